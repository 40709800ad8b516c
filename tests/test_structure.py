"""The house: what import-linter and ruff can't check. The contracts are in pyproject.toml."""

from __future__ import annotations

import ast
import graphlib
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

import mlxrunner
from mlxrunner import errors
from mlxrunner.errors import MlxrunnerError

# Each case runs in the sample, too: a rule that is broken shows in minutes.
pytestmark = pytest.mark.exhaustive(1000)

PACKAGE = Path(mlxrunner.__file__).parent
ROOT = PACKAGE.parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


@pytest.mark.parametrize("with_types", [False, True], ids=["at run time", "for types, too"])
def test_the_contracts_are_kept(with_types: bool, tmp_path: Path) -> None:
    """`lint-imports` says which import breaks which. Those for types keep to the floors, too."""
    text = (ROOT / "pyproject.toml").read_text()
    if with_types:
        first = text.index("[[tool.importlinter.contracts]]")
        end = text.index("[[tool.importlinter.contracts]]", first + 1)
        text = text[:end].replace("exclude_type_checking_imports = true", "")
    file = tmp_path / "pyproject.toml"
    file.write_text(text)
    # In a process of its own: import-linter configures logging, and switches other loggers off.
    run = "from importlinter import cli; raise SystemExit(cli.lint_imports({!r}, no_cache=True))"
    words = [sys.executable, "-c", run.format(str(file))]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_no_module_needs_itself() -> None:
    """There are no import circles, also through imports within functions."""
    graph = grimp.build_graph("mlxrunner", exclude_type_checking_imports=True, cache_dir=None)
    needs = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(needs).prepare()  # raises CycleError, which names the circle


CLAIM = re.compile(r"(?i)\b(bookkeeping|no tensors|without tensors|arithmetic|never imports mlx)\b")
"""Words of a module's docstring that say that it has no tensors."""
IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if {"mlx", "mlx_lm", "mlx_vlm"} & sys.modules.keys():
        sys.exit(f"{name} imports mlx")
"""


def test_bookkeeping_imports_no_mlx() -> None:
    """A module whose docstring says so is testable anywhere, and so is all that it imports."""
    bookkeeping = {
        name: tree
        for name, path in MODULES.items()
        if CLAIM.search(ast.get_docstring(tree := ast.parse(path.read_text())) or "")
    }
    rooms = {name.split(".")[1] for name in bookkeeping}
    assert rooms >= {"batch", "cache", "memory", "profiling", "engine"}
    for name, tree in bookkeeping.items():
        for_types = {
            id(child)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for child in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in for_types:
                first = getattr(node, "module", None) or node.names[0].name
                assert first.split(".")[0] not in ("mlx", "mlx_lm", "mlx_vlm"), name
    command = [sys.executable, "-c", IMPORT, *bookkeeping]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


SCRIPTS = sorted(path for name in ("benchmarks", "tools") for path in (ROOT / name).glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_scripts_import_what_the_package_has(script: Path) -> None:
    """A module or a name that was moved is moved in benchmarks and tools, too."""
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlxrunner"):
            for alias in node.names:
                pkgutil.resolve_name(f"{node.module}.{alias.name}")


METHOD = re.compile(
    r"(?<!Store)(?<!AnswerFile)(?<!folder)(?<!Folder)(?<!cls)\.open\("
    r"|\.(read|write)_(text|bytes)\(|\.touch\("
)
"""A method of a path that opens a file. Ruff bans the functions that do (TID251, PTH123)."""


@pytest.mark.parametrize(
    ("code", "is_one"),
    [
        ("path.open('ab')", True),
        ("Path(name).read_text()", True),
        ("file.write_bytes(content)", True),
        ("read_text(path, 10)", False),
        ("Store.open(path)", False),
        ("folder.open(name)", False),
    ],
)
def test_the_check_knows_what_opens(code: str, is_one: bool) -> None:
    """Functions of the one opener are not counted."""
    assert bool(METHOD.search(code)) == is_one


def test_only_the_openers_open_files() -> None:
    """Bounded, regular and never waiting: others say why not, in a comment `opens: ...`."""
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, path in MODULES.items()
        if name not in ("mlxrunner.system.reading", "mlxrunner.system.writing")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if METHOD.search(line) and not re.search("# opens: |# noqa: TID251", line)
    ]
    assert found == []


CONJUNCTIONS = """
And As Because But How However Nor Of Or So Than That Then What Whatever Whether Which Who
""".split()


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a file, those of constants and fields included."""
    for node in ast.walk(ast.parse(path.read_text())):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value


@pytest.mark.parametrize("folder", ["mlxrunner", "tests", "tools", "benchmarks"])
def test_a_docstring_begins_with_a_verb_or_a_subject(folder: str) -> None:
    """Ruff knows functions' docstrings only (D401), and no clauses."""
    wrong = [
        f"{path.relative_to(ROOT)}: {text[:60]}"
        for path in (ROOT / folder).rglob("*.py")
        for text in docstrings(path)
        if re.split(r"\W", text, maxsplit=1)[0] in CONJUNCTIONS
    ]
    assert wrong == []


def test_every_error_is_in_the_tree() -> None:
    """The docstring of `mlxrunner.errors` lists each class, with its exit code."""
    codes: dict[str, int] = {}
    for name in MODULES.keys() - {"mlxrunner.__main__"}:
        for found in vars(importlib.import_module(name)).values():
            if isinstance(found, type) and issubclass(found, MlxrunnerError):
                codes[found.__name__] = found.exit_code
    listed = errors.__doc__ or ""
    lines = {
        name: line
        for line in listed.splitlines()
        for name in re.findall(r"\w+Error", line.split("exit code")[0])
    }
    assert [name for name in codes if name not in lines] == []
    wrong = {
        name
        for name, line in lines.items()
        if (said := re.search(r"exit code (\d)", line)) and int(said[1]) != codes[name]
    }
    assert wrong == set()


def test_the_demo_model_is_small_and_ordinary() -> None:
    """At most 8 MB, and the files of any model directory."""
    files = {path.name: path.stat().st_size for path in (PACKAGE / "models" / "demo").iterdir()}
    assert sum(files.values()) <= 8_000_000
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.model",
        "tokenizer_config.json",
    } <= files.keys()


def test_each_planted_fault_stands_in_its_file_and_has_a_test() -> None:
    """A fault whose line was changed is planted in the new one: see tests/README.md."""
    faults = tomllib.loads((ROOT / "tools" / "mutations.toml").read_text())["mutations"]
    for fault in faults:
        assert (ROOT / fault["file"]).read_text().count(fault["old"]) == 1, fault["name"]
        file, _, test = fault["found_by"].partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(), fault["name"]
    assert min(Counter(fault["law"] for fault in faults).values()) >= 30
