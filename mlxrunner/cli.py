"""The command line: parse, call, print. Each library error becomes one line on stderr and an exit code; nothing here computes."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mlxrunner.errors import MlxrunnerError, OptionError, PromptError

if TYPE_CHECKING:
    from mlxrunner.runner import Runner

DEMO_BANNER = (
    "This is the embedded demo model: a toy of 2.8 million parameters that remembers small facts you tell it, and nothing else.\n"
    "For a real one: -m mlx-community/Llama-3.2-1B-Instruct-4bit (or any MLX model on the hub, or a directory)."
)
INTERRUPTED = 130
F = TypeVar("F", bound=Callable[..., Any])


class Program(click.Group):
    """Turns errors into one line; `--debug` anywhere shows the traceback, too."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError, SystemExit):
            raise
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except MlxrunnerError as error:
            _report(ctx, str(error))
            sys.exit(error.exit_code)
        except Exception as error:
            _report(ctx, f"internal error: {type(error).__name__}: {' '.join(str(error).split())} (--debug shows where)")
            sys.exit(1)


def _report(ctx: click.Context, line: str) -> None:
    if ctx.meta.get("debug"):
        click.echo(_visible(traceback.format_exc().rstrip()), err=True)
    click.echo(f"mlxrunner: {_visible(line)}", err=True)


def _visible(text: str) -> str:
    from mlxrunner.terminal import visible

    return visible(text)


def _debug(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    ctx.meta["debug"] = ctx.meta.get("debug") or value


def _verbose(ctx: click.Context, parameter: click.Parameter, value: int) -> None:
    if value:
        import logging

        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger = logging.getLogger("mlxrunner")
        logger.handlers = [handler]
        logger.setLevel(logging.INFO if value == 1 else logging.DEBUG)


debug_option = click.option("--debug", is_flag=True, expose_value=False, callback=_debug, help="Show the traceback of an error.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")


def _all(options: tuple[Callable[[F], F], ...]) -> Callable[[F], F]:
    """Several options as one decorator, in the order in which --help shows them."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


MEMORY_OPTIONS = (
    click.option("--context", type=int, help="Most tokens of prompt and answer together. [default: the model's own, or what fits]"),
    click.option("--kv-bits", type=int, metavar="B", help="Store full attention's keys and values in 8 or 4 bits. [default: as computed]"),
    click.option("--prefill-step", type=int, default=2048, show_default=True, help="Prompt tokens evaluated at once."),
    click.option("--rewind-slack", type=int, default=512, show_default=True, help="Tokens a sliding window keeps beyond itself, to be rewound."),
    click.option("--checkpoint-budget", type=int, metavar="BYTES", help="For checkpoints of windows and states. [default: room for 8]"),
)  # fmt: skip
LOADING = (
    "context",
    "kv_bits",
    "prefill_step",
    "rewind_slack",
    "checkpoint_budget",
    "checkpoint_interval",
    "reserve",
    "trust_remote_code",
)


def overflow_options(default: str) -> Callable[[F], F]:
    """What happens when the context is full."""
    return _all((
        click.option("--overflow", type=click.Choice(["stop", "shift", "error"]), default=default, show_default=True,
                     help="When the context is full: end the answer, drop the oldest half after the first --keep tokens, or fail."),
        click.option("--keep", type=int, help="Tokens that a shift keeps. [default: the system prompt]"),
    ))  # fmt: skip


def model_options(command: F) -> F:
    """What generate and chat load, and how much they say about it."""
    return _all((
        click.option("-m", "--model", default="demo", show_default=True, envvar="MLXRUNNER_MODEL", show_envvar=True,
                     help="demo, a model directory, or a hub id such as mlx-community/Llama-3.2-1B-Instruct-4bit."),
        *MEMORY_OPTIONS,
        click.option("--checkpoint-interval", type=int, default=1024, show_default=True, help="Tokens between checkpoints."),
        click.option("--reserve/--no-reserve", default=True, help="Take all memory at start, or as the conversation grows.  [default: reserve]"),
        click.option("--trust-remote-code", is_flag=True, help="Run Python code that the model brings. Only if you trust it."),
        click.option("-v", "--verbose", count=True, expose_value=False, callback=_verbose,
                     help="Log each request's cache hit to stderr; -vv: the entry after it, too."),
        debug_option,
    ))(command)  # fmt: skip


def sampling_options(command: F) -> F:
    """How the next token is chosen, and when an answer ends."""
    return _all((
        click.option("--max-tokens", type=int, help="Longest answer. [default: until the model stops or the context is full]"),
        click.option("--temperature", type=float, default=0.0, show_default=True, help="0 = always the most likely token."),
        click.option("--top-k", type=int, default=0, help="Only the K most likely tokens. [default: all]"),
        click.option("--top-p", type=float, default=1.0, help="Only the most likely tokens up to this probability. [default: all]"),
        click.option("--min-p", type=float, default=0.0, help="Only tokens at least this likely, as a share of the likeliest."),
        click.option("--repetition-penalty", type=float, help="Divide the logits of recent tokens; 1 = off."),
        click.option("--presence-penalty", type=float, help="Subtract from the logits of recent tokens."),
        click.option("--frequency-penalty", type=float, help="Subtract from them once per occurrence."),
        click.option("--penalty-context", type=int, default=20, show_default=True, help="How many recent tokens the penalties see."),
        click.option("--seed", type=int, help="Makes sampling repeatable."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before TEXT; may be given several times."),
    ))(command)  # fmt: skip


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="mlxrunner", message="mlxrunner %(version)s")
@debug_option
def main() -> None:
    """Run language models in a terminal on Apple silicon (MLX). One prefix-cache entry: only what is new in a prompt is evaluated."""
    for stream, errors in ((sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace"), (sys.stdin, "surrogateescape")):
        # A model may print what the terminal's encoding lacks; what is no text on standard input is refused where it is used.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=errors)


@main.command()
@model_options
@click.option("-p", "--prompt", metavar="TEXT", help="The user's message; - reads it from standard input.  [default: -]")
@click.option("--system", metavar="TEXT", help="The system prompt.")
@click.option("--raw", is_flag=True, help="The prompt is plain text to be continued: no chat template.")
@sampling_options
@overflow_options("stop")
@click.option("--logprobs", type=int, metavar="K", help="With --json: each token's log-probability and the K likeliest.")
@click.option(
    "--repeat", type=click.IntRange(min=1), default=1, metavar="N", help="Run the request N times, to see its cache hits."
)
@click.option(
    "--n", "count", type=click.IntRange(min=1), default=1, metavar="K", help="K answers, the prompt's tokens stored once."
)
@click.option(
    "--parallel", type=click.IntRange(min=1), default=8, metavar="N", help="With --n: at most N at a time.  [default: 8]"
)
@json_option
def generate(
    model: str,
    prompt: str | None,
    system: str | None,
    raw: bool,
    repeat: int,
    count: int,
    parallel: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Answer one prompt. The answer goes to stdout and nothing else does.

    --json prints an object with text, tokens, finish_reason and usage (a line for each --repeat and each of --n answers). With --n the
    seeds are SEED, SEED + 1 ..., and an answer has at most 1024 tokens unless --max-tokens says otherwise.
    """
    if raw and system:
        raise OptionError("--system needs the chat template, which --raw leaves out: use one of them")
    if options["logprobs"] is not None and not as_json:
        raise OptionError("--logprobs needs --json to print them")
    from mlxrunner.config import GenerateOptions

    text = _read_prompt(prompt)
    if not text:
        raise PromptError("the prompt is empty: give one with --prompt TEXT, or send it to standard input")
    loading = _take(options, LOADING)
    GenerateOptions.of(**options)  # complain before loading
    banner = sys.stderr.isatty() and not as_json
    request: Any = text if raw else [{"role": "user", "content": text}]
    if system:
        request.insert(0, {"role": "system", "content": system})
    if count > 1:
        _answers(model, request, count, parallel, loading, as_json, options)
        return
    runner = _load(model, loading, banner=banner)
    for _ in range(repeat):
        _answer(runner, request, as_json, options)


def _answers(
    model: str, request: Any, count: int, parallel: int, loading: dict[str, Any], as_json: bool, options: dict[str, Any]
) -> None:
    """Several answers, an empty line between them."""
    from mlxrunner.parallel.samples import sample
    from mlxrunner.terminal import Output

    output = Output()
    shared = {name: loading[name] for name in ("context", "trust_remote_code")}
    for number, result in enumerate(sample(model, request, count, parallel=parallel, **shared, **options)):
        if as_json:
            answer = {"text": result.text, "tokens": result.tokens, "finish_reason": result.finish_reason}
            click.echo(json.dumps({"index": number, **answer, "usage": result.usage.as_dict()}))
        else:
            output.write(f"{chr(10) if number else ''}{result.text}\n")


def _answer(runner: Runner, request: Any, as_json: bool, options: dict[str, Any]) -> None:
    from mlxrunner.terminal import Output, PrefillBar

    output, bar = Output(), PrefillBar()
    chunks = []
    try:
        for chunk in runner.generate(request, progress=bar, **options):
            chunks.append(chunk)
            if not as_json:
                output.write(chunk.text)
    except KeyboardInterrupt:
        output.write("" if as_json else "\n")
        raise
    finally:
        bar.close()
    if not as_json:
        output.write("\n")
        return
    last = chunks[-1]
    result: dict[str, Any] = {
        "text": "".join(chunk.text for chunk in chunks),
        "tokens": [chunk.token for chunk in chunks],
        "finish_reason": last.finish_reason,
        "usage": last.usage.as_dict() if last.usage else None,
    }
    if options["logprobs"] is not None:
        result["logprobs"] = [{"logprob": chunk.logprob, "top": chunk.top_logprobs} for chunk in chunks]
    click.echo(json.dumps(result))


@main.command()
@model_options
@click.option("--system", metavar="TEXT", help="The system prompt.")
@sampling_options
@overflow_options("shift")
def chat(model: str, system: str | None, **options: Any) -> None:
    """Talk with a model. Each turn evaluates only its own tokens.

    In a terminal: line editing, /help for the commands, Ctrl-C stops an answer, Ctrl-D leaves. Otherwise each line of standard
    input is a turn, and stdout gets the answers.
    """
    from mlxrunner.chat.conversation import Conversation
    from mlxrunner.chat.repl import Repl, pipe_reader, terminal_reader
    from mlxrunner.config import GenerateOptions

    loading = _take(options, LOADING)
    GenerateOptions.of(**options)  # complain before loading
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    runner = _load(model, loading, banner=interactive)
    conversation = Conversation(runner, system, options)
    sys.exit(Repl(conversation, terminal_reader() if interactive else pipe_reader(), interactive=interactive).run())


@main.command()
@json_option
@debug_option
def models(as_json: bool) -> None:
    """List the models in the local hub cache, with their sizes on disk."""
    from mlxrunner.models.catalog import cached_models
    from mlxrunner.terminal import size

    found = cached_models()
    if as_json:
        click.echo(json.dumps([{"name": m.name, "bytes": m.nbytes, "folder": str(m.folder)} for m in found]))
    elif not found:
        click.echo("no models in the hub cache yet: -m mlx-community/Llama-3.2-1B-Instruct-4bit would download one", err=True)
    else:
        for one in found:
            click.echo(f"{size(one.nbytes):>10}  {_visible(one.name)}")


@main.command()
@click.argument("model")
@json_option
@debug_option
def show(model: str, as_json: bool) -> None:
    """Say what is known about MODEL without loading its weights: architecture, layers by kind, context, bytes per token."""
    from mlxrunner.models.facts import describe
    from mlxrunner.terminal import size

    facts = describe(model)
    if as_json:
        click.echo(json.dumps(facts.as_dict()))
        return
    context = f"{facts.context} tokens" + ("" if facts.context_is_known else " (not stated: a guess)")
    rows = {
        "architecture": facts.architecture,
        "layers": ", ".join(f"{count} {kind}" for kind, count in facts.layers.items()),
        "context": context,
        "vocabulary": f"{facts.vocab} tokens",
        "weights": size(facts.weight_bytes),
        "cache": f"{size(facts.cache.per_token)} per token"
        + (f" and {size(facts.cache.fixed)} whatever the length" if facts.cache.fixed else "")
        + f"; {size(facts.cache.per_token * facts.context + facts.cache.fixed)} for the whole context",
    }
    for name, value in rows.items():
        click.echo(f"{name:13} {_visible(value)}")


@main.command()
@click.argument("model")
@_all(MEMORY_OPTIONS)
@click.option("--measure", is_flag=True, help="Load the model and run the worst-case batch instead of estimating it.")
@json_option
@debug_option
def plan(model: str, measure: bool, as_json: bool, **options: Any) -> None:
    """Say what MODEL needs for a context, what this device offers, and the largest context that fits.

    Works from config.json and the headers of the weight files, without loading them. Exit code 2 if it does not fit.
    """
    from mlxrunner.runner import Runner, plan_model

    made = plan_model(model, **options)
    if measure and made.fits:
        made = Runner.load(model, **{**options, "context": made.context}).plan or made
    click.echo(json.dumps(made.as_dict()) if as_json else made.table())
    sys.exit(0 if made.fits else 2)


@main.command()
@json_option
@debug_option
def doctor(as_json: bool) -> None:
    """Say what this machine has (device, memory, libraries), and what to do about what it lacks."""
    from dataclasses import asdict

    from mlxrunner.doctor import findings

    found = findings()
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in found]))
        return
    for finding in found:
        click.echo(f"{'ok ' if finding.ok else '!! '} {finding.name:14} {finding.value}")
        if finding.advice:
            click.echo(f"    {'':14} {finding.advice}")


def _load(model: str, loading: dict[str, Any], *, banner: bool) -> Runner:
    from mlxrunner.runner import Runner

    if banner and model == "demo":
        click.echo(DEMO_BANNER, err=True)
    return Runner.load(model, **loading)


def _take(options: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Move these options out of `options`."""
    return {name: options.pop(name) for name in names}


def _read_prompt(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if sys.stdin.isatty():
        if prompt is None:
            raise OptionError("no prompt: give one with --prompt TEXT, or send it to standard input")
        click.echo("reading the prompt from the terminal, end it with Ctrl-D", err=True)
    return sys.stdin.read().rstrip("\n")
