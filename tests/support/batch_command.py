"""The command `mlxrunner batch`: its lines and its answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from mlxrunner import cli

FACTS = ["My name is Ana.", "My name is Zorblin."]


def run(words: object, *arguments: object, stdin: str | bytes = "") -> Result:
    """Run the command. The first words are split at spaces, further arguments are not."""
    given = [*str(words).split(), *map(str, arguments)]
    return CliRunner().invoke(cli.main, ["batch", *given], input=stdin)


def run_lines(words: str, *lines: Any) -> Result:
    """Write lines, and run them with `words`; the answers go to `out.jsonl`."""
    write(*lines)
    return run(f"in.jsonl -o out.jsonl {words}")


def write(*lines: Any, file: str = "in.jsonl") -> str:
    Path(file).write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )
    return file


def answers(file: str = "out.jsonl") -> list[Any]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def openai(custom_id: str, content: str, **body: Any) -> dict[str, Any]:
    body = {"model": "gpt", "messages": [{"role": "user", "content": content}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def table(file: str = "out.parquet") -> list[dict[str, Any]]:
    import pyarrow.parquet

    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(file).to_pylist()
    return rows
