"""Type the examples of README.md and docs/ into the real program.

    python tools/record_docs.py [--write] [--slow] [PAGE ...]

Each page has a folder of its own, and its examples run there from top to bottom:

- Bash runs the lines of a `console` block that begin with `$ `; the other lines are the output.
  Lines that begin with `>>> ` are typed into `mlxrunner chat` at a pseudo-terminal. `^C` stands
  where the program is interrupted.
- `$ cat FILE` of a file that does not exist writes it, as the example shows it.
- `...` stands for any text, on a line of its own for any lines. Times, sizes, rates, dates and ids
  may differ.
- `<!-- typed: any figures -->` above a block lets all its figures differ. `<!-- typed: slow -->`
  runs it only with --slow.
- `<!-- typed before: COMMAND -->` prepares what a block needs. `<!-- not typed: REASON -->` leaves
  the block out.
- A `python` block is run as a script; a `text` block after it is the output.
- `<!-- table: NAME -->` ... `<!-- end -->` is made from the program.

Prints the differences, and exits with 1 if there are any. With --write, puts them into the pages.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from doc_tables import with_tables

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SECONDS = 300
BLOCK = re.compile(
    r"(?P<comments>(?:<!-- [^\n]* -->\n)*)```(?P<kind>console|python)\n(?P<text>.*?)```\n"
    r"(?:\n```text\n(?P<output>.*?)```\n)?",
    re.DOTALL,
)


UNITS = r"(?:ms|us|s|%|kB|MB|GB|/s|min|tokens/s|tok/s|seconds)"
VARIABLE = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::[\d.]+)?Z?|\b[0-9a-f]{12}\b|_s=[\d.e-]+|"
    rf"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?= ?{UNITS}(?![\w/]))"
)
EVENT = re.compile(r"\b[0-9a-f]{12}\b")


@dataclass
class Example:
    """A block of a page, and its output of this time."""

    page: Path
    line: int
    kind: str
    text: str
    output: str | None
    comments: list[str]
    printed: str = ""
    failure: str = ""

    def notes(self, kind: str) -> list[str]:
        """Return the comments `<!-- KIND: NOTE -->` above the block."""
        found = (comment.partition(": ") for comment in self.comments)
        return [note for name, _, note in found if name == kind]

    @property
    def is_skipped(self) -> bool:
        return bool(self.notes("not typed"))

    @property
    def is_slow(self) -> bool:
        return any("slow" in note for note in self.notes("typed"))

    @property
    def any_figures(self) -> bool:
        return any("any figures" in note for note in self.notes("typed"))

    @property
    def steps(self) -> Iterator[tuple[str, str]]:
        """Yield the commands of a console block, each with the output that the page shows."""
        for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            yield command, shown


@dataclass
class Page:
    """The folder in which the examples of a page run."""

    folder: Path
    ids: dict[str, str] = field(default_factory=dict)
    """Ids of events in the page, and those of this time."""

    def run(self, example: Example) -> None:
        """Set `printed`, and `failure` if the page shows something else."""
        for command in example.notes("typed before"):
            arguments = ["bash", "-ec", command]
            subprocess.run(arguments, cwd=self.folder, env=environment(self.folder), check=True)
        if example.kind == "python":
            self._run_script(example)
            return
        for command, shown in example.steps:
            printed = self._step(command, shown)
            if agree(shown, printed, example.any_figures):
                example.printed += f"$ {command}\n{shown}"
                self.ids |= dict(zip(EVENT.findall(shown), EVENT.findall(printed), strict=False))
            else:
                example.printed += f"$ {command}\n{printed}"
                example.failure += difference(shown, printed)

    def _run_script(self, example: Example) -> None:
        shown = "...\n" if example.output is None else example.output
        example.printed = self._output([sys.executable, "-c", example.text], "")
        is_right = agree(shown, example.printed, example.any_figures)
        if "Traceback" in example.printed or not is_right:
            example.failure = difference(shown, example.printed)

    def _step(self, command: str, shown: str) -> str:
        target = self.folder / command.removeprefix("cat ")
        if command.startswith("cat ") and not target.exists():
            target.write_text(shown)
            return shown
        command = without_make(command)
        if shown.startswith(">>>"):
            return typed(
                command,
                [line[4:] for line in shown.splitlines() if line.startswith(">>>")],
                self.folder,
            )
        for old, new in self.ids.items():
            command = command.replace(old, new)
        return self._output(["bash", "-c", command], shown)

    def _output(self, arguments: list[str], shown: str) -> str:
        """Return both streams, without a terminal.

        If `shown` has a line `^C`, the program is interrupted after as many lines as stand above.
        """
        with subprocess.Popen(
            arguments,
            cwd=self.folder,
            env=environment(self.folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        ) as process:
            lines: list[str] = []
            interrupt_after = shown.splitlines().index("^C") if "^C\n" in shown else -1
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if len(lines) == interrupt_after:
                    os.killpg(process.pid, signal.SIGINT)
                    lines.append("^C\n")
            process.wait(SECONDS)
        return (
            "".join(lines)
            .replace(f"{self.folder}/.home", "/home/you")
            .replace(str(self.folder), "/home/you/work")
        )


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a user without any files, in a terminal of 80 columns."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MLXRUNNER_", "XDG_", "HF_"))
    }
    home = folder / ".home"
    home.mkdir(exist_ok=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    changed = {
        "HOME": str(home),
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "80",
        "PYTHONUNBUFFERED": "1",
    }
    return {**kept, **changed, "HF_HUB_OFFLINE": "1", "TERM": "dumb"}


def without_make(command: str) -> str:
    """Return the command that a target of the Makefile starts."""
    if not command.startswith("make "):
        return command
    target = command.split("#")[0].split()[1]
    recipe = (ROOT / "Makefile").read_text().partition(f"\n{target}: ")[2].partition("\n\n")[0]
    return "mlxrunner" + recipe.partition("/mlxrunner")[2]


def typed(command: str, texts: list[str], folder: Path) -> str:
    """Type `texts` into a chat; returns the screen from the first of them on."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.screen import Screen

    env = {**environment(folder), "TERM": "xterm-256color", "COLUMNS": "100"}
    screen = Screen(["-m", "mlxrunner", *command.split()[1:]], env, (100, 60), str(folder))
    screen.prompt()
    for text, before in zip(texts, ["", *texts], strict=False):
        if re.match(r"/edit\b", before):  # the message is there already, to be edited
            screen.until(lambda: screen.lines[-1].startswith(">>> ")).child.send(
                "\x15" + text + "\r"
            )
            screen.until(
                lambda text=text: (
                    screen.lines[-2:] != [f">>> {text}"] and screen.lines[-1:] == [">>>"]
                )
            )
        elif re.match(r"/edit\b", text):
            screen.prompt().child.send(text + "\r")
            screen.until(
                lambda: (
                    screen.lines[-1].startswith(">>> ")
                    and not screen.lines[-1].startswith(">>> /edit")
                )
            )
        else:
            screen.say(text)
    screen.child.send("/bye\r")
    lines = screen.everything[:-1]
    screen.kill()
    begin = next(index for index, line in enumerate(lines) if line.startswith(">>>"))
    return "\n".join(lines[begin:]) + "\n"


def agree(shown: str, printed: str, any_figures: bool) -> bool:
    """Return True if `shown` is `printed`, except for figures that differ from run to run."""
    pattern = re.escape(plain(shown, any_figures))
    pattern = re.sub(
        r"(?m)^\\\.\\\.\\\.\n", r"(?:.*\\n)*?", pattern.replace(r"\ ", " ").replace("\\\n", "\n")
    )
    pattern = pattern.replace(r"\.\.\.", ".*")
    return re.fullmatch(pattern, plain(printed, any_figures)) is not None


def plain(text: str, any_figures: bool) -> str:
    """Write figures as `#`, and several spaces or empty lines as one."""
    text = VARIABLE.sub("#", text)
    if any_figures:
        text = re.sub(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", "#", text)
        text = re.sub(r"# [kMG]?B\b", "# B", text)
    # The chat may not have had the time to evaluate ahead.
    text = re.sub(
        r" \(# of them while you read and typed\)|, # had been evaluated in advance", "", text
    )
    text = re.sub(r"[█▉▊▋▌▍▎▏]+", "█", text)
    text = re.sub(r"(?:# min )?# (?:ms|s)\b", "# s", text)
    text = re.sub(r"[ ]+\n", "\n", text)
    text = re.sub(r"\n{3,}", "\n\n", text)
    return re.sub(r"[ ]+", " ", text).rstrip("\n") + "\n"


def difference(shown: str, printed: str) -> str:
    return f"the page shows\n{shown}\nthe program prints\n{printed}"


def examples(page: Path) -> Iterator[Example]:
    text = page.read_text()
    for match in BLOCK.finditer(text):
        comments = re.findall(r"<!-- (.*?) -->", match["comments"])
        line = text.count("\n", 0, match.start()) + 1
        yield Example(page, line, match["kind"], match["text"], match["output"], comments)


def typed_examples(page: Path, *, slow: bool) -> Iterator[Example]:
    """Run the examples of a page and yield them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Page(Path(name))
        for example in examples(page):
            if not example.is_skipped and (slow or not example.is_slow):
                folder.run(example)
                yield example


def with_examples(text: str, found: list[Example]) -> str:
    """Put the output of the examples into a page."""
    for example in found:
        if not example.failure:
            continue
        if example.kind == "console":
            text = text.replace(
                f"```console\n{example.text}```", f"```console\n{example.printed}```"
            )
        elif example.output is not None:
            text = text.replace(f"```text\n{example.output}```", f"```text\n{example.printed}```")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "pages", metavar="PAGE", nargs="*", type=Path, help="only these [default: all]"
    )
    parser.add_argument("--write", action="store_true", help="put what is printed into the pages")
    parser.add_argument("--slow", action="store_true", help="also type what takes minutes")
    arguments = parser.parse_args()
    differs = False
    for page in arguments.pages or PAGES:
        before = page.read_text()
        found = list(typed_examples(page, slow=arguments.slow))
        after = with_tables(with_examples(before, found))
        differs |= any(example.failure for example in found) or after != before
        for example in found:
            if example.failure:
                print(f"{page}:{example.line}: {example.failure}")
        print(
            f"{page}: {len(found)} examples, {sum(bool(e.failure) for e in found)} differ",
            flush=True,
        )
        if arguments.write and after != before:
            page.write_text(after)
    return int(differs and not arguments.write)


if __name__ == "__main__":
    sys.exit(main())
