"""Retake the pictures of the report page in docs/images: `python tools/report_pictures.py`.

Chats with the demo model and runs two batches, writes the pages of their events, and photographs
them with a headless Chromium. Needs chromium, and Pillow, which comes with the extra `plot`.

    --keep FOLDER   work there, and use the logs that it has
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
LIGHT, DARK = 1, 0
PICTURES = [
    *(("chat", width, scheme) for width in (500, 1000, 1600) for scheme in (LIGHT, DARK)),
    *(("batch", 1000, scheme) for scheme in (LIGHT, DARK)),
]
COLOURS = 255
WORDS = "the a cat bird town river told asked friend house lamp window night story garden".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", metavar="FOLDER")
    kept = parser.parse_args().keep
    folder = Path(kept or tempfile.mkdtemp(prefix="report-pictures-")).resolve()
    folder.mkdir(exist_ok=True)
    try:
        for name, write in (("chat", write_chat), ("batch", write_batches)):
            if not (folder / f"{name}.jsonl").exists():
                write(folder)
            run(folder, "report", f"{name}.jsonl", "--html", f"{name}.html")
        for name, width, scheme in PICTURES:
            take(folder, name, width, scheme)
    finally:
        if kept is None:
            shutil.rmtree(folder)


def write_chat(folder: Path) -> None:
    """Chat with edits, branches, files, a full context and a saved session."""
    rng = random.Random(5)
    (folder / "notes.txt").write_text(words(rng, 500))
    typed = []
    for number, name in enumerate(["Zorblin", "Ana", "Quib", "Bo", "Mira"]):
        typed += [f"/system You are a kind friend of {name}."] if number in (2, 4) else []
        typed += [f"My name is {name}.", "I have a parrot.", "What is my name?"]
        typed += ["/file notes.txt"] if number % 2 else []
        typed += [f"Tell me a story of {words(rng, rng.randint(4, 60))}.", "Which pet do I have?"]
        typed += [f"/branch other{number}", f"I live in a {words(rng, 20)}.", "Tell me a story."]
        typed += ["/switch main", "/undo 2", f"I like {words(rng, rng.randint(5, 80))}."]
        typed += ["/retry temperature=0.8 seed=3", "What is my name?"]
        typed += ["/save -f one"] if number == 1 else []
        typed += ["/clear"]
    typed += ["/load -f one", "What is my name?", "Tell me a story.", "/clear", "Hello!"]
    options = ["--max-tokens", "60", "--overflow", "shift", "--verify-cache", "0.2"]
    run(folder, "chat", *options, "--events", "chat.jsonl", typed="\n".join(typed) + "\n")


def write_batches(folder: Path) -> None:
    """Run 200 lines about 6 documents in prefix order, and then 48 of them as they come.

    A few lines can't be run, some answers are cut, and in the second run some may take too long.
    """
    rng = random.Random(3)
    documents = [words(rng, 120) for _ in range(6)]
    lines = []
    for number in range(200):
        question = f"My name is {WORDS[number % 15]}. {words(rng, rng.randint(2, 30))}."
        line = {"id": f"q{number}", "prompt": question, "system": documents[number % 6]}
        lines.append(line | ({"max_tokens": 3} if number % 17 == 0 else {}))
    lines[50], lines[120]["id"] = {"promt": "Hello!"}, "q119"
    rng.shuffle(lines)
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "some.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:48]))
    both = ["--max-tokens", "12", "--events", "batch.jsonl"]
    run(folder, "batch", "lines.jsonl", "-o", "first.jsonl", *both, allowed=(0, 3))
    slow = ["--order", "input", "--parallel", "1", "--timeout", "4"]
    run(folder, "batch", "some.jsonl", "-o", "second.jsonl", *slow, *both, allowed=(0, 3))


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def run(folder: Path, *command: str, typed: str = "", allowed: tuple[int, ...] = (0,)) -> None:
    """Run a command of the program in the folder, which is its home, too."""
    environment = {name: value for name, value in os.environ.items() if "MLXRUNNER" not in name}
    environment |= {"HOME": str(folder), "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-m", "mlxrunner", *command],
        cwd=folder,
        input=typed,
        text=True,
        capture_output=True,
        env=environment,
    )
    if ended.returncode not in allowed:
        sys.exit(f"{ended.stderr}mlxrunner {command[0]} ended with {ended.returncode}")


def take(folder: Path, name: str, width: int, scheme: int) -> None:
    """Photograph the whole page at this width, in light or dark."""
    picture, page = folder / "picture.png", folder / f"{name}.html"
    copy = folder / "copy.html"
    script = "<script>document.title = document.documentElement.scrollHeight</script></body>"
    text = re.sub("<meta http-equiv[^>]*>", "", page.read_text()).replace("</body>", script)
    copy.write_text(text)
    found = re.search(r"<title>(\d+)", browse(copy, folder, f"--window-size={width},100"))
    height = found[1] if found else 2000
    colours = f"--blink-settings=preferredColorScheme={scheme}"
    browse(page, folder, f"--window-size={width},{height}", colours, f"--screenshot={picture}")
    IMAGES.mkdir(exist_ok=True)
    shown = IMAGES / f"report-{name}-{width}-{'light' if scheme == LIGHT else 'dark'}.png"
    with Image.open(picture) as taken:
        few = taken.convert("RGB").quantize(COLOURS, kmeans=2, dither=Image.Dither.NONE)
        few.save(shown, optimize=True)
    print(f"{shown.relative_to(ROOT)}  {shown.stat().st_size / 1000:.0f} kB")


def browse(file: Path, folder: Path, *arguments: str) -> str:
    """Return the page as Chromium understands it. Nothing is fetched."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    what = [] if any("screenshot" in one for one in arguments) else ["--dump-dom"]
    own = f"--user-data-dir={folder / 'chromium'}"
    command = ["chromium", *options, *quiet, own, *what, *arguments, file.as_uri()]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment
    ).stdout


if __name__ == "__main__":
    main()
