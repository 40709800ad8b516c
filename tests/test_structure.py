"""The house itself: which room may know which."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from mlxrunner import cli, errors
from mlxrunner.errors import MlxrunnerError

# Each case runs in the sample, too: a rule that is broken shows in minutes.
pytestmark = pytest.mark.exhaustive(1000)

ROOT = Path(cli.__file__).parent.parent
MODULES = {
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path
    for path in ROOT.rglob("*.py")
}
# From the top of the house to the ground: a module imports only from its own floor or lower ones.
FLOORS = [
    ["cli", "__main__"],
    ["cluster", "serve", "verify"],
    ["batch", "bench", "chat", "profiling", "testing"],
    ["sessions", "ranks"],
    ["runner", "loading", "parallel"],
    ["engine", "memory", "speculation"],
    ["models"],
    ["cache", "pictures", "tokenizer"],
    ["templates"],
    ["config", "errors", "options", "results", "system", "terminal"],
]
BOOKKEEPING = """
batch.answers
batch.database
batch.fields
batch.job
batch.lines
batch.openai_format
batch.options
batch.output
batch.plan
batch.prompts
batch.shards.cut
batch.shards.lines
batch.shards.merge
batch.shards.plan
batch.speed
batch.store
bench.measurements
cache.checkpoints
cache.disk.index
cache.entry
cache.eviction
cache.layers.extents
cache.layers.protocol
cache.lookup
cache.pool.attention_split
cache.pool.cells
cache.pool.interface
cache.prefix
cache.tokens
chat.branches
chat.commands.table
chat.markdown
chat.typeahead
chat.view
cluster.dealing
cluster.options
config.arguments
config.file
config.json_options
config.layering
config.list_options
config.names
config.option
engine.constrain
engine.owner
errors
memory.plan
models.fingerprint
models.suggested
options
parallel.scheduling.slots
parallel.settings
pictures.table
profiling.curve
profiling.logs
profiling.divergence
profiling.metrics
profiling.tokenlog
profiling.replay.simulate
profiling.report.page
profiling.report.report
profiling.report.screen
profiling.report.summary
profiling.schema
results
sessions.session
sessions.store
speculation.controller
speculation.drafting
speculation.lookup
system.folders
system.limits
system.power
system.reading
system.tensorfile
system.writing
templates.messages
templates.segments
templates.thinking
terminal.clipboard
terminal.keyboard
terminal.logs
terminal.progress
terminal.signals
terminal.text
tokenizer.stream
tokenizer.vocabulary
verify.findings
""".split()


def floor(module: str) -> int:
    return next(i for i, rooms in enumerate(FLOORS) if module.split(".")[0] in rooms)


@cache
def imports(path: Path, *, at_runtime: bool = False) -> frozenset[str]:
    """Return the dotted names that a module imports.

    `at_runtime`: without those for type checkers only.
    """
    tree = ast.parse(path.read_text())
    skipped = {
        id(child)
        for node in ast.walk(tree)
        if at_runtime and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def inner(module: str) -> set[str]:
    """Modules of this package that `module` imports."""
    found = {
        name.removeprefix("mlxrunner.")
        for name in imports(MODULES[module])
        if name.startswith("mlxrunner.")
    }
    return {name for name in found if name in MODULES or f"{name}.__init__" in MODULES}


@pytest.mark.parametrize("module", [name for name in MODULES if name not in ("__init__",)])
def test_imports_point_downwards(module: str) -> None:
    """Nothing imports from a higher floor."""
    wrong = {other for other in inner(module) if floor(other) < floor(module)}
    assert not wrong


def needs(module: str) -> set[str]:
    """Modules of this package that `module` imports when it runs, also within a function."""
    names = {
        name.removeprefix("mlxrunner.")
        for name in imports(MODULES[module], at_runtime=True)
        if name.startswith("mlxrunner.")
    }
    late = {other for user, other in LATE_IMPORTS if user == module}
    found = {name for one in names for name in (one, f"{one}.__init__") if name in MODULES}
    return found - late


LATE_IMPORTS: dict[tuple[str, str], str] = {}
"""Imports within a function that close a circle: the module, the other one, and the reason."""


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return each circle of modules that need each other, in order."""
    found, done = [], set[str]()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append(path[path.index(module) :])
        elif module not in done:
            for other in sorted(graph[module]):
                visit(other, [*path, module])
            done.add(module)

    for module in graph:
        visit(module, [])
    return found


def test_no_module_needs_itself() -> None:
    """There are no import circles, but for late imports with a reason."""
    assert circles({module: needs(module) for module in MODULES}) == []


def test_the_check_finds_circles() -> None:
    """It would find one in the package, too."""
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


SCRIPTS = sorted(
    path for folder in ("benchmarks", "tools") for path in (ROOT.parent / folder).glob("*.py")
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_scripts_import_what_the_package_has(script: Path) -> None:
    """A module or a name that was moved is moved in benchmarks and tools, too."""
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlxrunner"):
            for alias in node.names:
                pkgutil.resolve_name(f"{node.module}.{alias.name}")


def test_only_the_command_line_imports_click() -> None:
    """Every job is usable without it."""
    assert [
        name
        for name, path in MODULES.items()
        if any(i.split(".")[0] == "click" for i in imports(path))
        and not name.startswith("cli.")  # llm shows only click's errors in one line
    ] == []


def reachable(module: str) -> set[str]:
    """Return the outside packages that importing `module` brings in, also through our modules."""
    seen: set[str] = set()
    outside: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in seen or name not in MODULES:
            continue
        seen.add(name)
        for found in imports(MODULES[name], at_runtime=True):
            if found.startswith("mlxrunner."):
                todo.append(found.removeprefix("mlxrunner."))
            else:
                outside.add(found.split(".")[0])
    return outside


@pytest.mark.parametrize("module", BOOKKEEPING)
def test_bookkeeping_never_imports_mlx(module: str) -> None:
    """Testable anywhere, and free of tensors."""
    assert not {"mlx", "mlx_lm"} & reachable(module)


def test_only_one_module_asks_for_the_device() -> None:
    """Everything else is device-neutral."""
    names = ("default_device", "mx.metal", "device_info", "is_available")
    asking = [
        name for name, path in MODULES.items() if any(word in path.read_text() for word in names)
    ]
    assert asking == ["system.device"]


def opens_for_writing(call: ast.Call) -> bool:
    """Return True if a call opens a file by its name, to write to it."""
    name = ast.unparse(call.func)
    method = name.rsplit(".")[-1]
    if name in ("open", "io.open") or (
        method == "open" and name not in ("os.open", "webbrowser.open")
    ):
        texts = [
            node.value
            for node in (*call.args, *(k.value for k in call.keywords))
            if isinstance(node, ast.Constant)
        ]
        return any(
            isinstance(text, str) and re.fullmatch(r"[rwxab+t]*[wxa+][rwxab+t]*", text)
            for text in texts
        )
    if name == "os.open" and ast.unparse(call.args[0]) != "os.devnull":
        return any(
            flag in ast.unparse(call)
            for flag in ("O_WRONLY", "O_RDWR", "O_CREAT", "O_APPEND", "O_TRUNC")
        )
    return method in (
        "write_text", "write_bytes", "touch", "mkstemp", "mktemp", "NamedTemporaryFile",
        "TemporaryFile", "connect", "write_to_textfile", "save_safetensors", "savez", "mkfifo",
        "mknod", "copyfile", "copy2", "FileHandler",
    )  # fmt: skip  # names by rows


def test_only_one_module_opens_files_for_writing() -> None:
    """All modules use the one opener, except for test models in folders of their own.

    The opener asks what a name means.
    """
    found = {
        f"{name}: {ast.unparse(node)[:80]}"
        for name, path in MODULES.items()
        if name != "system.writing"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and opens_for_writing(node)
    }
    assert not found


@pytest.mark.parametrize(
    ("code", "is_one"),
    [
        ("open(path, 'w')", True),
        ("path.open('ab')", True),
        ("path.open(mode='r+b')", True),
        ("open(path)", False),
        ("path.open('rb')", False),
        ("os.open(path, os.O_WRONLY)", True),
        ("os.open(path, os.O_RDONLY)", False),
        ("path.write_text(text)", True),
        ("sqlite3.connect(path)", True),
        ("store.open('name')", False),
    ],
)
def test_the_check_knows_what_opens_for_writing(code: str, is_one: bool) -> None:
    """Reading is not counted."""
    (statement,) = ast.parse(code).body
    assert isinstance(statement, ast.Expr)
    assert isinstance(statement.value, ast.Call)
    assert opens_for_writing(statement.value) == is_one


OPENERS = {
    "system.reading": "the one opener",
    "system.writing": "of what is one's own",
    "system.picture_files": "bytes that the one opener read",
    "system.limits": "files of the kernel",
    "system.device": "files of the kernel",
    "system.power": "files of the kernel",
    "cli.program": "the null device, in the place of a closed stream",
    "profiling.report.page": "a style sheet of the package",
    "system.folders": "a folder that is held open, nothing in it",
    "batch.output": "its own descriptor again, and its folder",
    "serve.launch": "an address of a server, no file",
}
"""Modules that open files by themselves, and what those are."""


def opens(call: ast.Call) -> bool:
    """Return True if a call opens a file by its name."""
    name = ast.unparse(call.func)
    receiver, _, method = name.rpartition(".")
    if name == "open" or name in ("io.open", "os.open", "np.load", "mx.load"):
        return True
    is_one_of_ours = receiver in (
        "Store",
        "AnswerFile",
        "webbrowser",
        "folder",
        "cls",
    ) or receiver.startswith("Folder(")
    return (method == "open" and not is_one_of_ours) or (
        receiver != "" and method in ("read_text", "read_bytes")
    )


def test_only_one_module_opens_files_of_others() -> None:
    """Bounded, regular and never waiting: all others go through its opener, or say why not."""
    found = {
        name: ast.unparse(node)[:80]
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and opens(node)
    }
    assert {name: call for name, call in found.items() if name not in OPENERS} == {}
    assert OPENERS.keys() <= found.keys()


@pytest.mark.parametrize(
    ("code", "is_one"),
    [
        ("open(path)", True),
        ("path.open('rb')", True),
        ("os.open(name, flags)", True),
        ("Path(name).read_text()", True),
        ("file.read_bytes()", True),
        ("read_text(path, 10)", False),
        ("Store.open(path)", False),
        ("open_file(path)", False),
    ],
)
def test_the_check_knows_what_opens(code: str, is_one: bool) -> None:
    """Functions of the one opener are not counted."""
    call = ast.parse(code, mode="eval").body
    assert isinstance(call, ast.Call)
    assert opens(call) == is_one


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
    """It does not go on with the sentence that a name is, and is no clause of another one."""
    wrong = [
        f"{path.relative_to(ROOT.parent)}: {text[:60]}"
        for path in (ROOT.parent / folder).rglob("*.py")
        for text in docstrings(path)
        if re.split(r"\W", text, maxsplit=1)[0] in CONJUNCTIONS
    ]
    assert wrong == []


def test_every_error_is_in_the_tree() -> None:
    """The docstring of `mlxrunner.errors` lists each class, with its exit code."""
    codes: dict[str, int] = {}
    for name in ("errors", *(name for name in MODULES if "." in name)):
        for found in vars(importlib.import_module(f"mlxrunner.{name}")).values():
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
    files = {path.name: path.stat().st_size for path in (ROOT / "models" / "demo").iterdir()}
    assert sum(files.values()) <= 8_000_000
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.model",
        "tokenizer_config.json",
    } <= files.keys()
