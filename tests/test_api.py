"""The public API: what `from mlxrunner import ...` gives, and how its runners end."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.models import tiny_config, tiny_model

import mlxrunner
from mlxrunner import (
    BatchRequest,
    BusyError,
    ClosedError,
    ParallelRunner,
    Profile,
    RequestError,
    Result,
    Runner,
    errors,
    run_batch,
)
from mlxrunner.errors import MlxrunnerError
from mlxrunner.models.facts import facts_of
from mlxrunner.testing import ByteTokenizer, OracleModel, interrupt_at, oracle_runner

PACKAGE = Path(mlxrunner.__file__).parent


def test_importing_the_package_imports_no_library() -> None:
    """The first use of a name imports what it needs."""
    code = (
        "import sys; before = set(sys.modules); import mlxrunner; dir(mlxrunner)\n"
        "roots = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(roots - sys.stdlib_module_names))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["mlxrunner"]


def test_errors_and_options_need_no_library() -> None:
    """A program that only catches errors, or checks options, does not wait for mlx."""
    code = (
        "import sys; from mlxrunner import GenerateOptions, OptionError, Result, Usage\n"
        "assert not {'mlx', 'mlx_lm', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", mlxrunner.__all__)
def test_a_public_name_is_there_and_described(name: str) -> None:
    """`from mlxrunner import NAME` works, and help(NAME) says something."""
    found = getattr(mlxrunner, name)
    assert found is getattr(mlxrunner, name)
    assert found.__name__ == name
    assert found.__doc__
    assert name in dir(mlxrunner)


def test_every_error_is_public() -> None:
    """Whoever calls a function can catch what it raises."""
    tree = {
        name
        for name, found in vars(errors).items()
        if isinstance(found, type) and issubclass(found, MlxrunnerError)
    }
    assert tree <= set(mlxrunner.__all__)


@pytest.mark.parametrize("name", errors.FORMER)
def test_an_error_can_be_imported_by_its_former_name(name: str) -> None:
    """It is the one of today, so that `except` catches what is raised."""
    assert getattr(mlxrunner, name) is getattr(errors, name) is errors.FORMER[name]


def test_every_error_of_the_package_lives_in_errors() -> None:
    """One file holds the whole tree."""
    ours = {name for name in vars(errors) if name.endswith("Error")}
    elsewhere = {
        f"{path.name}: {node.name}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "errors.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and ours & {ast.unparse(base) for base in node.bases}
    }
    assert elsewhere == set()


def test_type_checkers_see_every_public_name() -> None:
    """They read the imports under TYPE_CHECKING, and the marker file."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    seen = [
        alias.name
        for node in tree.body
        if isinstance(node, ast.If)
        for statement in node.body
        if isinstance(statement, ast.ImportFrom) and statement.module != "typing"
        for alias in statement.names
    ]
    assert sorted(seen) == sorted(mlxrunner.__all__)
    assert (PACKAGE / "py.typed").is_file()


PROGRAM = """
from collections.abc import Mapping
from typing import Any

from mlxrunner import BatchRequest, Message, Runner, run_batch

call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
chat: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            {"function": {"name": "g", "arguments": {"city": "Oslo", "days": 3}}},
        ],
    },
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "1", "content": "[1, 2]", "name": "f"},
]
plain: list[dict[str, str]] = [{"role": "user", "content": "Hello"}]
loose: list[dict[str, Any]] = [*plain, {"role": "assistant", "tool_calls": [call]}]
other: tuple[Mapping[str, object], ...] = ({"role": "user", "content": "Hello"},)
with Runner.load("demo", context=64) as runner:
    for messages in (chat, plain, loose):
        print(runner.complete(messages, tools=[{"type": "function"}]).text)
    print(runner.complete(other).usage.cached_tokens, runner.complete([1, 2]).tokens)
    print([one.text for one in run_batch(runner, [BatchRequest(chat), BatchRequest("a")])])
wrong: Message = {"role": "user", "content": 5}  # type: ignore[typeddict-item]
misspelt: Message = {"role": "user", "contents": ""}  # type: ignore[typeddict-unknown-key]
runner.complete("a", max_tokens="5")  # type: ignore[arg-type]
"""


@pytest.mark.exhaustive(0)
def test_a_typed_program_with_the_messages_of_openai_passes_mypy(tmp_path: Path) -> None:
    """Text parts, tool calls and their results; an ignore that nothing needs would be an error."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    check = [sys.executable, "-m", "mypy", "--strict", "--config-file", "pyproject.toml", str(file)]
    run = subprocess.run(check, capture_output=True, text=True, cwd=PACKAGE.parent, check=False)
    assert run.stdout == "Success: no issues found in 1 source file\n", run.stdout + run.stderr


def test_every_public_name_is_in_the_docs() -> None:
    """A page has it, where a reader can find it."""
    pages = " ".join(path.read_text() for path in (PACKAGE.parent / "docs").glob("*.md"))
    words = set(re.findall(r"\w+", pages))
    assert set(mlxrunner.__all__) - words == set()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        mlxrunner.Nonsense  # noqa: B018  # the access is the test


Parts = tuple[Any, Any, Any]


# Both runners: completing, closing, being watched.

MODEL = ["full", "sliding"]


@pytest.fixture
def llama() -> Parts:
    config = tiny_config("llama", max_position_embeddings=4096, vocab_size=300)
    model = tiny_model(config)
    return model, ByteTokenizer(), facts_of(model, config)


def test_complete_gives_what_generate_gives() -> None:
    """It gives one Result, and leaves the entry as `generate` does."""
    one, other = oracle_runner(), oracle_runner()
    chunks = list(one.generate("Hello", max_tokens=9, logprobs=2))
    result = other.complete("Hello", max_tokens=9, logprobs=2)
    assert result == replace(Result.of(chunks), usage=result.usage)
    assert (result.finish_reason, len(result.tokens)) == ("length", 9)
    assert result.text == "".join(chunk.text for chunk in chunks)
    assert result.usage.total_tokens == result.usage.prompt_tokens + 9
    assert one.entry.tokens.array.tolist() == other.entry.tokens.array.tolist()


def test_a_parallel_runner_completes_beside_what_runs(llama: Parts) -> None:
    """The answer of a Runner, while another request is under way."""
    alone = Runner(*llama).complete("Hello", max_tokens=8)
    with ParallelRunner(*llama, max_sequences=2, context=64) as runner:
        other = runner.submit("Something else", max_tokens=20)
        assert runner.complete("Hello", max_tokens=8).tokens == alone.tokens
        assert len(other.result().tokens) <= 20


def test_complete_interrupted_anywhere_leaves_a_true_entry() -> None:
    """Ctrl-C at any line: the runner answers as a fresh one does."""
    expected = oracle_runner(MODEL).complete([5, 6, 7, 8], max_tokens=6).tokens
    with interrupt_at(-1) as seen:
        oracle_runner(MODEL).complete([5, 6, 7], max_tokens=4)
    interrupted = 0
    for line in range(1, seen[0], max(1, seen[0] // 80)):
        runner = oracle_runner(MODEL)
        try:
            with interrupt_at(line):
                runner.complete([5, 6, 7], max_tokens=4)
        except KeyboardInterrupt:
            interrupted += 1
        assert runner.complete([5, 6, 7, 8], max_tokens=6).tokens == expected, f"line {line}"
    assert interrupted > 20


@pytest.mark.parametrize("line", range(1, 40, 2))
def test_a_parallel_completion_interrupted_frees_its_slot(llama: Parts, line: int) -> None:
    """The next request finds room, wherever Ctrl-C came."""
    with ParallelRunner(*llama, max_sequences=1, context=64) as runner:
        with suppress(KeyboardInterrupt), interrupt_at(line * 37):
            runner.complete([5, 6, 7], max_tokens=6)
        assert len(runner.complete([5, 6, 7, 8], max_tokens=6).tokens) == 6


def test_no_interrupt_is_planted_where_python_swallows_it(llama: Parts) -> None:
    """Python only prints an error of a `__del__`."""
    with ParallelRunner(*llama, max_sequences=1, context=64) as runner:
        handle = runner.submit([5, 6, 7], max_tokens=50)
        with interrupt_at(-1) as nothing:
            pass
        with interrupt_at(-1) as seen:
            del handle
        assert seen == nothing
        assert len(runner.complete([5, 6, 7, 8], max_tokens=6).tokens) == 6


CALLS: dict[str, Callable[[Any], object]] = {
    "generate": lambda runner: runner.generate("a"),
    "complete": lambda runner: runner.complete("a"),
    "evaluate": lambda runner: runner.evaluate("a"),
    "tokenize": lambda runner: runner.tokenize("a"),
    "reset": lambda runner: runner.reset(),
    "entry": lambda runner: runner.entry,
    "cache": lambda runner: runner.cache,
}


@pytest.mark.parametrize("call", CALLS)
def test_a_closed_runner_refuses_every_call(call: str) -> None:
    """The error says so, and closing again does nothing."""
    runner = oracle_runner()
    with runner as opened:
        assert opened is runner
        runner.complete("a", max_tokens=2)
    runner.close()
    with pytest.raises(ClosedError, match="this Runner is closed: load the model again"):
        CALLS[call](runner)
    assert repr(runner) == "Runner('oracle', closed)"


def test_a_closed_runner_keeps_no_model_and_no_entry() -> None:
    """Their memory is free although somebody still holds the runner."""
    model = OracleModel()
    gone = weakref.ref(model)
    runner = oracle_runner(model=model)
    del model
    runner.complete("Hello", max_tokens=3)
    runner.close()
    gc.collect()
    assert gone() is None
    assert runner.model is None


def test_closing_ends_the_request_that_runs() -> None:
    """Its iterator raises ClosedError; the observers hear of it once, as interrupted."""
    seen: list[str] = []
    runner = oracle_runner()
    runner.observers.append(lambda _, observation: seen.append(observation.finish))
    chunks = runner.generate("Hello", max_tokens=9)
    next(chunks)
    runner.close()
    assert seen == ["interrupted"]
    with pytest.raises(ClosedError):
        next(chunks)
    chunks.close()
    assert seen == ["interrupted"]


def test_a_callback_cannot_close_the_runner_that_calls_it() -> None:
    """BusyError, and the answer is complete."""
    runner = oracle_runner()
    refused: list[bool] = []

    def progress(done: int, total: int) -> None:
        with pytest.raises(BusyError):
            runner.close()
        refused.append(True)

    assert len(runner.complete(list(range(1, 30)), max_tokens=3, progress=progress).tokens) == 3
    assert refused
    runner.close()


def test_closing_can_be_interrupted_anywhere_and_called_again() -> None:
    """Ctrl-C at any line of `close`."""
    with oracle_runner() as runner, interrupt_at(-1) as seen:
        runner.close()
    for line in range(1, seen[0] + 1):
        runner = oracle_runner()
        runner.complete("a", max_tokens=2)
        with suppress(KeyboardInterrupt), interrupt_at(line):
            runner.close()
        runner.close()
        assert (runner.model, runner.owner.is_closed) == (None, True), f"line {line}"


def test_a_closed_parallel_runner_refuses_calls(llama: Parts) -> None:
    """It gives its model back as it was."""
    with ParallelRunner(*llama, max_sequences=2, context=32, name="tiny") as runner:
        handle = runner.submit("a", max_tokens=30, stop_tokens=[])
        assert re.fullmatch(
            r"ParallelRunner\('tiny', context=32, [01] of 2 slots busy\)", repr(runner)
        )
    runner.close()
    handle.cancel()
    for call in (handle.result, lambda: runner.submit("a")):
        with pytest.raises(ClosedError, match="this ParallelRunner is closed"):
            call()
    assert runner.model is None
    assert Runner(*llama).complete("a", max_tokens=2).tokens


def test_the_representation_names_the_model_and_the_entry() -> None:
    """It touches no tensor, and works in any thread."""
    runner = oracle_runner(context=128)
    runner.complete([1, 2, 3], max_tokens=2)
    assert repr(runner) == "Runner('oracle', context=128, entry of 4 tokens)"


def test_every_observer_is_told_though_one_of_them_fails(caplog: pytest.LogCaptureFixture) -> None:
    """An exception of one is logged; neither the request nor the others suffer."""
    seen: list[str] = []
    runner = oracle_runner()
    runner.observers += [
        lambda _, observation: seen.append("first"),
        lambda _, observation: 1 / 0,
        lambda _, observation: seen.append("last"),
    ]
    assert len(runner.complete("a", max_tokens=2).tokens) == 2
    assert seen == ["first", "last"]
    assert "the request was not recorded: ZeroDivisionError" in caplog.text


def test_a_profile_watches_within_its_block(tmp_path: Path) -> None:
    """Two of them beside each other; after the block a runner is watched no more."""
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    runner = oracle_runner()
    with Profile(events=one).watch(runner):
        runner.complete("a", max_tokens=2)
        with Profile(events=other).watch(runner):
            runner.complete("ab", max_tokens=2)
    runner.complete("abc", max_tokens=2)
    assert runner.observers == []
    assert [len(file.read_text().splitlines()) for file in (one, other)] == [2, 1]


@pytest.mark.parametrize("output_order", ["input", "done"])
def test_a_batch_result_has_its_text_usage_and_error_directly(output_order: str) -> None:
    """The error is an exception, which asking for the text raises."""
    requests = [BatchRequest("Hello"), BatchRequest([]), BatchRequest("Hello again")]
    results = sorted(
        run_batch(
            oracle_runner(),
            requests,
            output_order=output_order,  # type: ignore[arg-type]
            max_tokens=3,
        ),
        key=lambda result: result.index,
    )
    assert [result.error is None for result in results] == [True, False, True]
    assert results[0].text == oracle_runner().complete("Hello", max_tokens=3).text
    assert results[2].usage.completion_tokens == 3
    error = results[1].error
    assert isinstance(error, RequestError)
    assert (str(error), error.is_refused) == (
        "the prompt is empty: at least one token is needed",
        True,
    )
    with pytest.raises(RequestError, match="the prompt is empty"):
        results[1].text  # noqa: B018  # the access is the test
