"""Ask questions about one document: python examples/ask_document.py FILE QUESTION... [-m MODEL]

FILE is a text; for a PDF, `pdftotext report.pdf report.txt` makes one. QUESTION may be a file of
questions, one per line. The document is evaluated for the first question only. --choices needs
the package llguidance.
"""

import argparse
import sys
from pathlib import Path

from mlxrunner import MlxrunnerError, Runner

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("file", type=Path)
parser.add_argument("questions", nargs="+")
parser.add_argument("-m", "--model", default="demo")
parser.add_argument("--context", type=int, default=8192)
parser.add_argument("--choices", help="the allowed answers, such as yes,no")
given = parser.parse_args()
choices = given.choices.split(",") if given.choices else None

try:
    document = given.file.read_text()
    questions = []
    for one in given.questions:
        questions += Path(one).read_text().splitlines() if Path(one).is_file() else [one]
    with Runner.load(given.model, context=given.context) as runner:
        for question in questions:
            messages = [{"role": "user", "content": f"{document}\n\n{question}"}]
            result = runner.complete(messages, max_tokens=500, choices=choices)
            usage, seconds = result.usage, result.usage.timing.ttft_s
            print(f"{question} {result.text}")
            reused = f"{usage.cached_tokens} of {usage.prompt_tokens} tokens reused"
            print(f"  {reused}, first token after {seconds:.2f} s", flush=True)
except (MlxrunnerError, OSError) as error:
    sys.exit(str(error))
