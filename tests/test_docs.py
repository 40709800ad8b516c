"""README and docs hold what the program is: its commands, variables, rooms, and what it prints.

`python tools/record_docs.py --write` puts what the program prints into the pages.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import mlxrunner
from doc_tables import with_tables
from mlxrunner import cli
from mlxrunner.profiling.schema import REASONS
from record_docs import PAGES, agree, examples, plain, typed_examples

ROOT = Path(__file__).parent.parent

DOCS = {page.name: page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))}
ALL = "\n".join(DOCS.values())
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
PACKAGE = ROOT / "mlxrunner"


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Yield each command with its name: `sessions list`."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        yield " ".join((*path, name)), command


def variables() -> Iterator[str]:
    """Yield the environment variables that the package reads or sets."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "envvar":
                yield ast.literal_eval(node.value)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("os.environ."):
                yield ast.literal_eval(node.args[0])
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
                yield ast.literal_eval(node.slice)


@pytest.mark.exhaustive(1, "docs/structured.md")
@pytest.mark.parametrize("name", [name for name in NAMES if any(examples(ROOT / name))])
def test_examples_show_what_the_program_prints(name: str) -> None:
    """Every example of a page, typed in a folder of its own, does what the page shows."""
    failures = [
        f"line {example.line}: {example.failure}"
        for example in typed_examples(ROOT / name, slow=False)
        if example.failure
    ]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", NAMES)
def test_tables_are_those_of_the_program(name: str) -> None:
    """Commands of the chat, fields of an event."""
    text = (ROOT / name).read_text()
    assert text == with_tables(text)


def test_what_is_not_typed_has_a_reason() -> None:
    """An example is typed unless it needs or does what a test can't."""
    reasons = [note for page in PAGES for one in examples(page) for note in one.notes("not typed")]
    assert set(reasons) == {"needs the hub", "needs llm", "installs", "its test runs it"}


@pytest.mark.parametrize(
    ("shown", "printed", "holds"),
    [
        ("a\n", "a\n", True),
        ("a\n", "b\n", False),
        ("a ... c\n", "a b c\n", True),
        ("a\n...\n", "a\nb\nc\n", True),
        ("a\n...\nc\n", "a\nb\n", False),
        ("in 0.2 s: 5 tokens\n", "in 17.25 s: 5 tokens\n", True),
        ("in 0.2 s: 5 tokens\n", "in 0.2 s: 6 tokens\n", False),
        ("about 15 s\n", "about 2 min 2 s\n", True),
    ],
)
def test_the_check_of_examples_sees_differences(shown: str, printed: str, holds: bool) -> None:
    """Times may differ, counts may not."""
    assert agree(shown, printed, any_figures=False) == holds


def test_any_figures_may_differ_where_a_page_says_so() -> None:
    """Words may not."""
    assert plain("5 of 7 kB", any_figures=True) == plain("17 of 1,024 MB", any_figures=True)
    assert plain("5 hits", any_figures=True) != plain("5 misses", any_figures=True)


def test_the_readme_is_a_first_page() -> None:
    """At most 150 lines of at most 120 characters."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []


@pytest.mark.parametrize("name", [*NAMES, "tests/README.md"])
def test_lines_of_prose_have_at_most_120_characters(name: str) -> None:
    """Tables, examples and comments may be wider."""
    text = re.sub(r"```.*?```", "", (ROOT / name).read_text(), flags=re.DOTALL)
    wide = [line for line in text.splitlines() if len(line) > 120]
    assert [line for line in wide if not line.startswith(("|", "<!--", "!["))] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_to_files(name: str) -> None:
    """Those of the pages in docs/ are checked by `mkdocs build --strict`."""
    links = re.findall(r"\]\(([^)#]+)", (ROOT / name).read_text())
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_scripts_that_need_the_tests_have_them_on_their_path() -> None:
    """Without PYTHONPATH=tests, one that imports `support` ends at once."""
    text = ALL + "".join(file.read_text() for file in (ROOT / "benchmarks").glob("*.py"))
    for before, name in re.findall(r"(\S*)[ `]?python ((?:benchmarks|tools)/\w+\.py)", text):
        script = (ROOT / name).read_text()
        needs_path = re.search(r"^from support", script, re.M) and "sys.path.insert" not in script
        assert not needs_path or before.endswith("PYTHONPATH=tests"), name


def test_every_command_is_in_the_docs() -> None:
    """With its help, which explains each option."""
    for name, command in commands(cli.main):
        assert command.help, name
        options = [option for option in command.params if isinstance(option, click.Option)]
        assert all(option.help for option in options if not option.hidden), name
        if not isinstance(command, click.Group):
            assert f"mlxrunner-{name.replace(' ', '-')}.txt" in DOCS["commands.md"], name
    assert [name for name in cli.main.commands if f"`mlxrunner {name}" not in ALL] == []


def test_every_variable_is_in_the_docs() -> None:
    """The variables are those of the environment."""
    found = set(variables())
    assert {"MLXRUNNER_MODEL", "MLXRUNNER_DATA", "XDG_CACHE_HOME", "SSH_TTY"} <= found
    assert [name for name in found if f"`{name}`" not in DOCS["commands.md"]] == []


def test_every_reason_is_in_the_docs() -> None:
    """The page says what it means, and what to change."""
    assert [name for name in REASONS if f"\n| `{name}` |" not in DOCS["entry.md"]] == []


def test_every_public_name_is_in_the_docs() -> None:
    """Classes, functions and errors that `from mlxrunner import ...` gives."""
    assert [
        name for name in mlxrunner.__all__ if not re.search(rf"\b{name}\b", DOCS["python.md"])
    ] == []


def test_every_room_is_in_the_docs() -> None:
    """The folders, and the modules beside them, each with a remark."""
    rooms = {
        f"{file.parent.relative_to(PACKAGE)}/"
        for file in PACKAGE.rglob("*.py")
        if file.parent != PACKAGE
    }
    modules = {file.name for file in PACKAGE.glob("*.py") if not file.name.startswith("__")}
    tree = DOCS["architecture.md"]
    listed = set(re.findall(r"(?m)^([\w/]+/|\w+\.py) {2,}\S", tree))
    assert listed == rooms | modules


def test_files_that_the_docs_name_exist() -> None:
    """`cache/entry.py`, `tools/record_docs.py`."""
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", ALL))
    files = [f"/{file.relative_to(ROOT)}" for file in ROOT.glob("[!.]*/**/*.py")]
    assert [n for n in named if not any(file.endswith(f"/{n}") for file in files)] == []


def test_names_that_the_architecture_gives_exist() -> None:
    """`EntryLease.close` is a method of a class somewhere in the package."""
    source = "\n".join(file.read_text() for file in PACKAGE.rglob("*.py"))
    named = set(re.findall(r"`([A-Z]\w+)\.(\w+)`", DOCS["architecture.md"]))
    assert len(named) >= 5
    assert [n for n in named if f"class {n[0]}" not in source or f"def {n[1]}(" not in source] == []


def test_names_are_in_the_files_that_the_architecture_gives() -> None:
    """`PrefixCache.begin` in `cache/prefix.py`."""
    text = " ".join(DOCS["architecture.md"].split())
    named = re.findall(r"`([A-Za-z_.]+)` (?:in |\()`([a-z_/]+\.py)`", text)
    assert len(named) >= 20
    named = [(name, file) for name, file in named if not file.startswith("tests/")]
    source = {file: (PACKAGE / file).read_text() for _, file in named}
    assert [
        (name, file)
        for name, file in named
        if not re.search(rf"(?:def |class |^){name.rpartition('.')[2]}\b", source[file], re.M)
    ] == []
