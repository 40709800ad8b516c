"""The public API: what `from mlxrunner import ...` gives."""

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
from click.testing import CliRunner
from support.models import tiny_config, tiny_model

import mlxrunner
from mlxrunner import (
    BatchRequest,
    BusyError,
    ClosedError,
    GenerateKwargs,
    GenerateOptions,
    OptionError,
    ParallelRunner,
    Profile,
    RequestError,
    Result,
    Runner,
    RunnerKwargs,
    RunnerSettings,
    Usage,
    cli,
    errors,
    run_batch,
)
from mlxrunner.batch.fields import read_fields
from mlxrunner.batch.job import Job
from mlxrunner.batch.options import BatchOptions, FileOptions
from mlxrunner.chat.commands.settings import parse_settings
from mlxrunner.config.option import about, names
from mlxrunner.errors import MlxrunnerError
from mlxrunner.loading import plan_model
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
    """Every module does that."""
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


def test_every_observer_is_told_though_one_of_them_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
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


# Options: described once, for every door.

BAD = {
    "temperature=-1": "temperature: -1.0 is out of range, it has to be between 0 and 100",
    "top_p=1.5": "top_p: 1.5 is out of range, it has to be between 0 and 1",
    "max_tokens=0": "max_tokens: 0 is out of range, it has to be at least 1",
    "seed=-1": f"seed: -1 is out of range, it has to be between 0 and {2**64 - 1}",
    "penalty_context=0": "penalty_context: 0 is out of range, "
    f"it has to be between 1 and {2**31 - 1}",
}


@pytest.mark.parametrize("given", BAD)
def test_every_door_refuses_an_option_with_the_same_words(given: str) -> None:
    """Python, the command line, a batch line and the chat's /set."""
    name, _, text = given.partition("=")
    value = about(GenerateOptions.__dataclass_fields__[name]).parse(name, text)
    with pytest.raises(OptionError) as error:
        oracle_runner().generate("a", **{name: value})  # type: ignore[arg-type]
    assert str(error.value) == BAD[given]
    with pytest.raises(OptionError) as error:
        read_fields({"prompt": "a", name: value}, BatchOptions())
    assert str(error.value) == BAD[given]
    with pytest.raises(OptionError) as error:
        parse_settings(given)
    assert str(error.value) == BAD[given]
    option = f"--{name.replace('_', '-')}"
    result = CliRunner().invoke(cli.main, ["generate", "-p", "a", option, text])
    assert (result.exit_code, result.stderr) == (2, f"mlxrunner: {BAD[given]}\n")


SETTINGS = {
    "context=1": f"context: 1 is out of range, it has to be between 2 and {2**31 - 1}",
    "kv_bits=3": "kv_bits: 3 is out of range, it has to be 4 or 8",
    "prefill_step=0": f"prefill_step: 0 is out of range, it has to be between 1 and {2**31 - 1}",
    "checkpoint_budget=-1": "checkpoint_budget: -1 is out of range, it has to be at least 0",
}


@pytest.mark.parametrize("given", SETTINGS)
def test_every_door_refuses_a_setting_with_the_same_words(given: str) -> None:
    """`Runner`, `Runner.load`, `plan_model` and the command line."""
    name, _, text = given.partition("=")
    value: dict[str, Any] = {name: int(text)}
    calls: list[Callable[[], object]] = [
        lambda: oracle_runner(**value),
        lambda: Runner.load("demo", **value),
        lambda: plan_model("demo", **value),
    ]
    for call in calls:
        with pytest.raises(OptionError) as error:
            call()
        assert str(error.value) == SETTINGS[given]
    result = CliRunner().invoke(
        cli.main, ["generate", "-p", "a", f"--{name.replace('_', '-')}", text]
    )
    assert (result.exit_code, result.stderr) == (2, f"mlxrunner: {SETTINGS[given]}\n")


BATCH = {
    "order=random": "order: 'random' is not known, it has to be one of prefix, input",
    "output_order=x": "output_order: 'x' is not known, it has to be one of input, done",
    "retries=-1": "retries: -1 is out of range, it has to be at least 0",
    "timeout=0": "timeout: 0.0 is out of range, it has to be more than 0",
    "parallel=0": "parallel: 0 is out of range, it has to be at least 1",
    "max_errors=0": "max_errors: 0 is out of range, it has to be at least 1",
}


@pytest.mark.parametrize("given", BATCH)
def test_every_door_refuses_an_option_of_a_batch_with_the_same_words(given: str) -> None:
    """`Job`, `run_batch` where it has the option, and the command line."""
    name, _, text = given.partition("=")
    value: dict[str, Any] = {name: about(FileOptions.__dataclass_fields__[name]).parse(name, text)}
    with pytest.raises(OptionError) as error:
        Job(inputs=("in.jsonl",), **value)
    assert str(error.value) == BATCH[given]
    if name in names(BatchOptions):
        with pytest.raises(OptionError) as error:
            run_batch(oracle_runner(), [], **value)
        assert str(error.value) == BATCH[given]
    option = f"--{name.replace('_', '-')}"
    result = CliRunner().invoke(cli.main, ["batch", "in.jsonl", "-o", "out.jsonl", option, text])
    assert result.exit_code == 2
    if about(FileOptions.__dataclass_fields__[name]).kind is not str:  # click refuses a choice
        assert result.stderr == f"mlxrunner: {BATCH[given]}\n"


def test_a_batch_refuses_an_option_of_the_wrong_type() -> None:
    """A flag is True or False, a number is no text."""
    for wrong, message in (
        ({"retries": True}, "retries: True is not a whole number"),
        ({"timeout": "1"}, "timeout: '1' is not a number"),
        ({"raw": "no"}, "raw: 'no' has to be True or False"),
        ({"system": 5}, "system: 5 is not a text"),
    ):
        with pytest.raises(OptionError) as error:
            Job(inputs=("in.jsonl",), **wrong)  # type: ignore[arg-type]
        assert str(error.value) == message


def test_an_unknown_option_is_named_with_the_known_ones() -> None:
    """For requests and for settings."""
    with pytest.raises(OptionError, match=r"'temprature': did you mean 'temperature'\? known "):
        oracle_runner().generate("a", temprature=1)  # type: ignore[call-arg]
    with pytest.raises(OptionError, match=r"'kvbits': did you mean 'kv_bits'\? known are ch"):
        Runner.load("demo", kvbits=4)  # type: ignore[call-arg]


def test_type_checkers_know_every_option() -> None:
    """GenerateKwargs and RunnerKwargs name the fields of the classes behind them."""
    assert set(GenerateKwargs.__annotations__) == set(names(GenerateOptions))
    assert {"context", *RunnerKwargs.__annotations__} == set(names(RunnerSettings))


@pytest.mark.parametrize("kind", [GenerateOptions, RunnerSettings, FileOptions])
def test_every_option_is_described(kind: type) -> None:
    """Its help stands in its field, and its default is a value that it allows."""
    for name in names(kind):
        described = about(kind.__dataclass_fields__[name])  # type: ignore[attr-defined]
        assert described.help
    kind()


WORDS = {
    "context",
    "stop",
    "keep",
    "schema",
    "choices",
    "seed",
    "overflow",
    "logprobs",
    "template",
    "tools",
}
"""Options whose names are also words for other things, or fields of OpenAI's format."""
ELSEWHERE = {
    "config/names.py": "it translates the names of other programs",
    "profiling": "token logs have fields of these names",
    "sessions": "so have saved sessions and their layers",
    "chat/saved_settings.py": "a saved session has a field of that name",
    "chat/commands/sessions.py": "a saved cache has bits of its own",
    "cli/cache.py": "a saved cache has bits of its own",
    "batch/responses.py": "it answers in OpenAI's format",
    "models/suggested.py": "a generation_config.json has fields of these names",
    "chat/full_context.py": "it says which limit has cut an answer off",
    "cli/llm_plugin.py": "it says which settings llm knows",
    "cli/generate.py": "it refuses the option beside --n, and passes it on to nobody",
    "memory": "a plan counts the tokens of a step and the bytes of checkpoints",
    "engine/pipeline.py": "it does the steps",
    "parallel/runner.py": "it has settings of its own",
    "serve/apis": "protocols have fields of these names",
}
"""Where an option's name is another thing's name as well."""


@pytest.mark.parametrize("name", sorted({*names(GenerateOptions), *names(RunnerSettings)} - WORDS))
def test_no_option_is_passed_on_by_name_in_more_than_four_files(name: str) -> None:
    """A parameter, a text or `name=name` counts; passing all options on names none."""
    naming = sorted(
        file
        for path in PACKAGE.rglob("*.py")
        if not (file := path.relative_to(PACKAGE).as_posix()).startswith(tuple(ELSEWHERE))
        and passes_on(name, ast.parse(path.read_text()))
    )
    assert len(naming) <= 4, naming


def passes_on(name: str, tree: ast.AST) -> bool:
    return any(
        (isinstance(node, ast.arg) and node.arg == name)
        or (isinstance(node, ast.keyword) and node.arg == name and named(node.value) == name)
        or (isinstance(node, ast.Constant) and node.value == name)
        for node in ast.walk(tree)
    )


def named(value: ast.expr) -> str:
    """The name of a variable or an attribute."""
    return ast.unparse(value).rpartition(".")[2]


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


PARALLEL = {
    "max_sequences=0": "max_sequences: 0 is out of range, it has to be at least 1",
    "max_sequences=None": "max_sequences: None is not a whole number",
    "context='x'": "context: 'x' is not a whole number",
    "context=0": f"context: 0 is out of range, it has to be between 2 and {2**31 - 1}",
    "prefill_step=1": f"prefill_step: 1 is out of range, it has to be between 2 and {2**31 - 1}",
}


@pytest.mark.parametrize("given", PARALLEL)
def test_a_parallel_runner_refuses_a_setting_in_a_sentence(given: str) -> None:
    """Also one of the wrong type, and a context of 0, which is not the default."""
    name, _, text = given.partition("=")
    runner = oracle_runner()
    settings = {"max_sequences": 2, name: ast.literal_eval(text)}
    with pytest.raises(OptionError) as error:
        ParallelRunner(runner.model, runner.tokenizer, runner.facts, **settings)
    assert str(error.value) == PARALLEL[given]


def test_a_model_is_a_text_or_a_path(tmp_path: Path) -> None:
    """Another value is a ModelError, with both runners."""
    kinds: list[Callable[[Any], object]] = [
        Runner.load,
        lambda model: ParallelRunner.load(model, max_sequences=1),
    ]
    for load in kinds:
        with pytest.raises(errors.ModelError, match=r"^5 names no model: give 'demo', a directory"):
            load(5)
        with pytest.raises(errors.ModelError, match=f"{tmp_path}.*config.json"):
            load(tmp_path)
    with Runner.load(Path("demo")) as runner:
        assert runner.name == "demo"


def test_a_batch_takes_batch_requests_only() -> None:
    """A bare prompt is an error that says so."""
    with pytest.raises(errors.PromptError, match=r"^request 0 has to be a BatchRequest\(prompt\)"):
        list(run_batch(oracle_runner(), ["Hello"]))  # type: ignore[list-item]


def test_a_profile_refuses_a_share_that_is_no_number() -> None:
    """It raises OptionError, also for one that is out of range."""
    with pytest.raises(OptionError, match=r"^verify_cache: 'all' is not a number$"):
        Profile(verify="all")  # type: ignore[arg-type]


def ask(**options: Any) -> Callable[[], object]:
    return lambda: oracle_runner().complete("a", max_tokens=2, **options)


def parallel_runner() -> ParallelRunner:
    config = tiny_config("llama", max_position_embeddings=4096, vocab_size=300)
    model = tiny_model(config)
    parts = model, ByteTokenizer(), facts_of(model, config)
    return ParallelRunner(*parts, max_sequences=1, context=64)


def called(given: Any) -> list[dict[str, Any]]:
    call = {"function": {"name": "f", "arguments": given}}
    return [{"role": "assistant", "content": None, "tool_calls": [call]}]


NO_LIST = "is not a list; give one, such as "
CALLED: dict[str, tuple[Callable[[], object], str]] = {
    "processors": (ask(logits_processors=5), f"logits_processors: 5 {NO_LIST}"),
    "processor": (ask(logits_processors=[5]), "logits_processors: 5 can't be called; give a "),
    "processed": (
        ask(logits_processors=[lambda tokens, logits: None]),
        "returned None, it has to return an array of shape (1, ",
    ),
    "progress": (ask(progress=5), "progress: 5 can't be called; give a function of (tokens"),
    "cancelled": (
        lambda: oracle_runner().evaluate("a", cancelled=5),  # type: ignore[arg-type]
        "cancelled: 5 can't be called; give a function of no arguments",
    ),
    "stop token": (
        ask(stop_tokens=[10**9]),
        "stop_tokens: 1000000000 is beyond the model's vocabulary, it has to be between 0 and ",
    ),
    "negative": (ask(stop_tokens=[-1]), "stop_tokens: -1 is out of range, it has to be between 0"),
    "stop": (ask(stop={"a": 1}), f"stop: {{'a': 1}} {NO_LIST}"),
    "choices": (ask(choices=["a", ""]), "at least one character, not ''; leave it out"),
    "schema": (ask(schema="{"), "in '{'; it has to be a JSON object, such as"),
    "constant": (ask(schema='{"const": NaN}'), "schema: not valid JSON: Out of range float"),
    "tools": (ask(tools='[{"f": '), "in '[{\"f\": '; it has to be a list of JSON objects"),
    "arguments": (
        lambda: oracle_runner().complete(called('{"a": NaN}')),
        "message 0: the arguments of 'f' have to be a JSON object, such as ",
    ),
    "number": (lambda: oracle_runner().complete(called({"a": float("nan")})), "not {'a': nan}"),
    "object": (lambda: oracle_runner().complete(called({"a": abs})), "not JSON serializable"),
    "prompt": (
        lambda: oracle_runner().complete(5),  # type: ignore[arg-type]
        "a prompt is a text, token ids or messages, not int: 5",
    ),
    "token": (
        lambda: oracle_runner().complete([None]),  # type: ignore[list-item]
        "token ids have to be a flat list of integers, not [None]",
    ),
    "requests": (
        lambda: run_batch(oracle_runner(), 5),  # type: ignore[arg-type]
        f"requests: 5 {NO_LIST}[BatchRequest",
    ),
    "runner": (
        lambda: run_batch(5, []),  # type: ignore[arg-type]
        "runner: 5 is not a Runner or ParallelRunner; load one with Runner.load(model)",
    ),
    "options": (
        lambda: (
            next(
                run_batch(
                    oracle_runner(),
                    [BatchRequest("a", options=5)],  # type: ignore[arg-type]
                )
            ).text
        ),
        "options: 5 has to be a dictionary of options",
    ),
    "prompts": (
        lambda: parallel_runner().run(5),  # type: ignore[arg-type]
        f"prompts: 5 {NO_LIST}",
    ),
    "one prompt": (lambda: parallel_runner().run("Hello"), f"prompts: 'Hello' {NO_LIST}"),
    "pairs": (
        lambda: parallel_runner().run_each(5),  # type: ignore[arg-type]
        f"requests: 5 {NO_LIST}",
    ),
    "pair": (
        lambda: list(parallel_runner().run_each(["ab"])),  # type: ignore[list-item]
        "request 0 has to be a pair of a prompt and its options, such as",
    ),
    "events": (
        lambda: Profile(events=5),  # type: ignore[arg-type]
        "events: 5 names no file; give a text or a Path",
    ),
    "sinks": (lambda: Profile(sinks=5), f"sinks: 5 {NO_LIST}"),  # type: ignore[arg-type]
    "watched": (
        lambda: Profile().watch(5),  # type: ignore[arg-type]
        "runner: 5 is not a runner; load one",
    ),
    "reserve": (
        lambda: Runner.load(reserve="no"),  # type: ignore[arg-type]
        "reserve: 'no' has to be True or False",
    ),
    "trusting": (
        lambda: ParallelRunner.load(
            max_sequences=1,
            trust_remote_code="no",  # type: ignore[arg-type]
        ),
        "trust_remote_code: 'no' has to be True or False",
    ),
    "parts": (
        lambda: Runner(5, ByteTokenizer(), 5),  # type: ignore[arg-type]
        "facts: 5 is not a ModelFacts; use Runner.",
    ),
    "chunks": (
        lambda: Result.of([5]),  # type: ignore[list-item]
        "chunks: 5 is not a Chunk; give what Runner.generate",
    ),
    "usage": (lambda: Usage.from_dict({}), "usage: 'completion_tokens' is wrong in {}; give what"),
}


@pytest.mark.parametrize("case", CALLED)
def test_a_wrong_argument_is_an_error_with_the_value_and_a_remedy(case: str) -> None:
    """Never a TypeError from somewhere within, and never silence."""
    call, message = CALLED[case]
    with pytest.raises(MlxrunnerError) as error:
        call()
    assert message in str(error.value)


def test_the_error_of_a_callback_comes_out_as_it_is() -> None:
    """It is the caller's own."""
    with pytest.raises(ZeroDivisionError):
        oracle_runner().complete("a", progress=lambda done, total: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        oracle_runner().complete("a", logits_processors=[lambda tokens, logits: 1 / 0])
