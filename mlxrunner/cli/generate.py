"""`mlxrunner generate`: answer one prompt, which is typed or comes from standard input."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from mlxrunner.cli.options import (
    LOADING,
    Configured,
    check_options,
    draft_option,
    flag,
    form_options,
    former_option,
    is_given,
    load,
    option_of,
    options_that_hold,
    overflow_options,
    recording,
    recording_options,
    request_model_options,
    sampling_options,
    system_option,
    take,
    template_options,
    template_words,
    typed_options,
)
from mlxrunner.cli.program import line_text
from mlxrunner.config.file import read_config_file
from mlxrunner.config.names import did_you_mean, known_models
from mlxrunner.errors import MlxrunnerError, OptionError, PromptError
from mlxrunner.options import PER_REQUEST, GenerateOptions, check_raw

ONE_SEQUENCE = ("kv_bits", "rewind_slack", "checkpoint_budget", "checkpoint_interval")
"""Settings that mean nothing for several sequences in one row."""

if TYPE_CHECKING:
    from mlxrunner.batch.tables import Template
    from mlxrunner.engine.parallel_runner import Failed
    from mlxrunner.profiling.profile import Profile
    from mlxrunner.results import Chunk, Result
    from mlxrunner.runner import Runner


@click.command(cls=Configured)
@click.argument("words", nargs=-1, metavar="[PROMPT]")
@request_model_options
@draft_option
@click.option(
    "-p",
    "--prompt",
    metavar="TEXT",
    help="The same as PROMPT, also for a text that looks like an option or a model.",
)
@system_option()
@click.option(
    "-t",
    "--prompt-template",
    "form",
    metavar="NAME",
    shell_complete=template_words,
    help="Put the prompt into this template of the config file, at {input}.",
)
@click.option(
    "--prompt-var",
    "variables",
    multiple=True,
    metavar="NAME=VALUE",
    help="With -t: the text at {NAME} (repeatable).",
)
@former_option("--var", "--prompt-var", "variables", multiple=True)
@click.option(
    "--image",
    "images",
    multiple=True,
    type=click.Path(),
    metavar="FILE",
    help="A picture before the prompt (repeatable).",
)
@flag("--raw", help="Continue the prompt as plain text, without the chat template.")
@sampling_options
@form_options
@template_options
@overflow_options("stop")
@recording_options
@option_of(
    GenerateOptions,
    "logprobs",
    help="With --json: each token's log-probability and the K likeliest.",
)
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Run the request N times, to see its cache hits.",
)
@click.option(
    "--n",
    "count",
    type=click.IntRange(min=1),
    default=1,
    metavar="K",
    help="Give K answers; the prompt's tokens are stored once.",
)
@click.option(
    "--parallel",
    type=click.IntRange(min=1),
    default=8,
    metavar="N",
    help="With --n: at most N at a time.  [default: 8]",
)
@flag(
    "--json", "as_json", help="Print one JSON object per answer, each on a line, instead of texts."
)
@click.pass_context
def generate(
    ctx: click.Context,
    /,
    words: tuple[str, ...],
    model: str,
    prompt: str | None,
    system: str | None,
    form: str | None,
    variables: tuple[str, ...],
    images: tuple[str, ...],
    raw: bool,
    repeat: int,
    count: int,
    parallel: int,
    as_json: bool,
    greedy: bool,
    draft_model: str | None,
    **options: Any,
) -> None:
    """Answer PROMPT. stdout gets the answer only.

    Standard input is appended to the prompt, or is the prompt; PROMPT - is standard input, too.

    --json prints an object with text, tokens, finish_reason and usage, one per line with --repeat
    and --n. With --n, seeds are SEED, SEED + 1 ..., and answers have at most 1024 tokens by
    default.
    """
    if options["logprobs"] is not None and not as_json:
        raise OptionError("--logprobs needs --json to print them")
    _check_count(count, repeat, options)
    text = prompt_of(words, prompt, is_optional=form is not None)
    text, own_system = filled(form, text, variables)
    system = system if own_system is None or is_given("system") else own_system
    if raw:
        check_raw(options, system)
    if not text:
        raise PromptError(
            'the prompt is empty: give one (mlxrunner generate "TEXT") or send it to standard input'
        )
    loading = take(options, LOADING)
    if loading["reserve"] is None:
        loading["reserve"] = True if count > 1 else PER_REQUEST
    if images:
        check_pictures(raw=raw, options=options)
        loading["pictures"] = True
    banner = sys.stderr.isatty() and not as_json
    request = text if raw else _messages(system, content_of(text, images))
    with recording(options, "generate") as profile:
        check_options(options)
        typed = typed_options(ctx, options, greedy=greedy)
        options = options_that_hold("generate", model, options, typed)
        if count > 1:
            loading["draft_model"] = draft_model
            error = _answers(model, request, count, parallel, loading, as_json, options, profile)
            if error is not None:
                ctx.exit(error.exit_code)
            return
        runner = load(model, loading | {"draft_model": draft_model}, banner=banner)
        profile.watch(runner)
        for _ in range(repeat):
            _answer(runner, request, as_json, options)


def _messages(system: str | None, content: Any) -> list[dict[str, Any]]:
    """Return a conversation of one message, after the system prompt if there is one."""
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": content}]


def _check_count(count: int, repeat: int, options: dict[str, Any]) -> None:
    """Raise OptionError for options that do not go together with --n, or with its absence."""
    if count == 1:
        if is_given("parallel"):
            raise OptionError("--parallel is for the answers of --n: use --n K with it")
        return
    if options["verify_cache"]:
        raise OptionError(
            "--verify-cache runs one request at a time, and --n several: use one of them"
        )
    if repeat > 1:
        raise OptionError(
            "--repeat runs requests one after the other, and --n in parallel: use one of them"
        )
    for name in ONE_SEQUENCE:
        if is_given(name):
            raise OptionError(
                f"--{name.replace('_', '-')} needs single requests, and --n runs several: "
                "use one of them"
            )


def _answers(
    model: str,
    request: Any,
    count: int,
    parallel: int,
    loading: dict[str, Any],
    as_json: bool,
    options: dict[str, Any],
    profile: Profile,
) -> MlxrunnerError | None:
    """Print several answers with an empty line between them, and the error of each that failed.

    Return the first of these errors.
    """
    from mlxrunner.engine.parallel_runner import Failed, sample
    from mlxrunner.models.resolve import resolve
    from mlxrunner.terminal.output import FilteredStream
    from mlxrunner.terminal.output import loading as loading_bar

    def watch(runner: Any) -> None:
        bar.close()
        profile.watch(runner)

    output, bar = FilteredStream(), ExitStack()
    names = ("context", "trust_remote_code", "reserve", "wire", "draft_model", "pictures")
    shared = {name: loading[name] for name in names if name in loading}
    if is_given("prefill_step"):  # the default for several sequences is another one
        shared["prefill_step"] = loading["prefill_step"]
    for name in filter(None, (model, loading["draft_model"])):
        resolve(name, with_code=loading["trust_remote_code"])
    with bar:
        bar.enter_context(loading_bar(model, leaves=True))
        results = sample(
            model, request, count, parallel=parallel, loading=shared, watch=watch, **options
        )
        first = None
        for number, result in enumerate(results):
            if as_json:
                click.echo(json.dumps({"index": number, **_as_dict(result)}))
            else:
                output.write(f"{chr(10) if number else ''}{result.text}\n")
            if isinstance(result, Failed):
                said = line_text(f"answer {number + 1} of {count}: {result.error}")
                click.echo(f"mlxrunner: {said}", err=True)
                first = first or result.error
            elif not as_json:
                _say_if_cut(result, options, f"answer {number + 1} of {count}")
    return first


def _as_dict(result: Result | Failed) -> dict[str, Any]:
    from mlxrunner.engine.parallel_runner import Failed

    if isinstance(result, Failed):
        return {**vars(result), "finish_reason": "error", "error": str(result.error)}
    answer: dict[str, Any] = {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
    }
    if result.logprobs is not None:
        answer["logprobs"] = [{"logprob": logprob, "top": top} for logprob, top in result.logprobs]
    return answer | {"usage": result.usage.as_dict()}


def _say_if_cut(last: Chunk | Result, options: dict[str, Any], which: str) -> None:
    """Say on stderr that a structured answer is not complete, so that no program parses it."""
    if last.finish_reason == "length" and (options["schema"] or options["choices"]):
        why = f"{which} was cut off before it was complete"
        click.echo(f"mlxrunner: {why}: a larger --max-tokens or --context helps", err=True)


def _say_if_full(runner: Runner, last: Chunk, max_tokens: int | None) -> None:
    """Say on stderr that the end of the context has cut the answer off."""
    told = last.usage is not None and last.usage.completion_tokens == max_tokens
    if last.finish_reason == "length" and not told:
        line = f"(stopped at the end of the context of {runner.context} tokens: "
        more = "--context N makes it longer, --overflow shift drops the oldest half)"
        click.secho(line + more, err=True, dim=True)


def _answer(runner: Runner, request: Any, as_json: bool, options: dict[str, Any]) -> None:
    from mlxrunner.terminal.output import FilteredStream, PrefillBar

    output, bar = FilteredStream(), PrefillBar()
    chunks = []
    try:
        for chunk in runner.generate(request, progress=bar, **options):
            chunks.append(chunk)
            if not as_json:
                output.write(
                    chunk.text + ("\n" if chunk.finish_reason else "")
                )  # before the log line
    except KeyboardInterrupt:
        output.write("" if as_json else "\n")
        raise
    finally:
        bar.close()
    last = chunks[-1]
    if not as_json:
        _say_if_cut(last, options, "the answer")
        if sys.stderr.isatty():
            _say_if_full(runner, last, options["max_tokens"])
        return
    result: dict[str, Any] = {
        "text": "".join(chunk.text for chunk in chunks),
        "tokens": [chunk.token for chunk in chunks],
        "finish_reason": last.finish_reason,
        "usage": last.usage.as_dict() if last.usage else None,
    }
    if options["logprobs"] is not None:
        result["logprobs"] = [
            {"logprob": chunk.logprob, "top": chunk.top_logprobs} for chunk in chunks
        ]
    click.echo(json.dumps(result))


INPUT = "input"
"""The name of the place in a template where the prompt goes."""
FROM_INPUT = "-"
"""The prompt that stands for standard input."""
JOINED_BY = "\n\n"
"""The text between a prompt and what comes from standard input."""


def prompt_of(words: tuple[str, ...], option: str | None, *, is_optional: bool = False) -> str:
    """Return the prompt: the text that is typed, and standard input after it.

    `words` are the arguments, and `option` is that of --prompt. Nothing is dropped: raise
    OptionError if two texts are typed, or if it is unclear whether one is a model. Without a text
    and a pipe it is empty if `is_optional`, and an OptionError otherwise.
    """
    typed = _typed(words, option)
    if typed is None and is_optional and (sys.stdin is None or sys.stdin.isatty()):
        return ""
    return _with_input(typed)


def filled(name: str | None, text: str, given: tuple[str, ...]) -> tuple[str, str | None]:
    """Return the prompt that a template of the config file makes of `text`, and its system prompt.

    Without the `name` of a template, that is `text` and None. `given` are the variables, each as
    NAME=VALUE. A template without {input} is followed by the text. Raise OptionError for a variable
    that is missing or not used, and for a template that can't be read.
    """
    variables = _variables(given)
    if name is None:
        if variables:
            raise OptionError("--prompt-var fills a template: name it with -t NAME")
        return text, None
    config = read_config_file()
    template = config.template(name)
    system = None if template.system is None else config.system(template.system)
    places = _places(name, template.prompt)
    columns = places.columns if places is not None else []
    _check_variables(name, [column for column in columns if column != INPUT], variables)
    if INPUT in columns and not text:
        raise OptionError(f"template {name} needs an input: give a prompt, or pipe a text in")
    made = template.prompt if places is None else places.fill({**variables, INPUT: text})
    return made if INPUT in columns or not text else f"{made}{JOINED_BY}{text}", system


def _places(name: str, prompt: str) -> Template | None:
    """Return the parsed text of a template, or None if it has no places to fill."""
    from mlxrunner.batch.tables import Template

    if "{" not in prompt and "}" not in prompt:
        return None
    try:
        return Template(prompt)
    except OptionError as error:
        raise OptionError(f"template {name}: {error}") from error


def _variables(given: tuple[str, ...]) -> dict[str, str]:
    variables = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals or not name or name == INPUT:
            raise OptionError(f"--prompt-var {one:.80}: it has to be NAME=VALUE, and not {INPUT}=")
        variables[name] = value
    return variables


def _check_variables(name: str, wanted: list[str], given: dict[str, str]) -> None:
    missing = [f"--prompt-var {one}=..." for one in wanted if one not in given]
    unused = [one for one in given if one not in wanted]
    if missing:
        raise OptionError(f"template {name} needs {', '.join(missing)}")
    if unused:
        has = f"it has {', '.join(wanted)}" if wanted else "it has none"
        raise OptionError(
            f"template {name} has no variable {unused[0]!r:.60}: {did_you_mean(unused[0], wanted)}"
            f"{has}"
        )


def _typed(words: tuple[str, ...], option: str | None) -> str | None:
    if option is not None and words:
        raise OptionError(
            f"two prompts: {_shown(words[0])} and --prompt {_shown(option)}: use one of them"
        )
    if option is not None or not words:
        return option
    if len(words) > 1:
        raise OptionError(_too_many(words))
    if _is_model(words[0]):
        raise OptionError(
            f"{_shown(words[0])} may be a model or a prompt: -m {_shown(words[0])} names the "
            f"model, --prompt {_shown(words[0])} asks"
        )
    return words[0]


def _too_many(words: tuple[str, ...]) -> str:
    model, *rest = words
    if _is_model(model):
        return (
            f"is {_shown(model)} a model? mlxrunner generate -m {_shown(model)} "
            f"{_shown(' '.join(rest))}; is all of it the prompt? mlxrunner generate "
            f"{_shown(' '.join(words))}"
        )
    return (
        f"{len(words)} texts, and a prompt is one: mlxrunner generate {_shown(' '.join(words))}; "
        "-m MODEL names a model"
    )


def _is_model(text: str) -> bool:
    """Return True if `text` is the name of a model, or looks like one."""
    from mlxrunner.models.resolve import HUB_ID
    from mlxrunner.options import EMBEDDED

    return (
        text in EMBEDDED
        or text in read_config_file().aliases
        or text in known_models()
        or HUB_ID.fullmatch(text) is not None
        or ("\0" not in text and os.path.isfile(os.path.join(text, "config.json")))
    )


def _shown(text: str) -> str:
    """Return `text` as a shell needs it, cut to a few words."""
    return shlex.quote(text if len(text) <= 60 else f"{text[:60]} ...")


def _with_input(typed: str | None) -> str:
    """Return what is typed with standard input after it, unless that is a terminal."""
    from mlxrunner.system.reading import say_if_waiting

    if typed is not None and typed != FROM_INPUT:
        if sys.stdin is None or sys.stdin.isatty():
            return typed
        say_if_waiting(sys.stdin.buffer, "standard input")
        piped = sys.stdin.read().rstrip("\n")
        return f"{typed}{JOINED_BY}{piped}" if piped.strip() else typed
    if sys.stdin is None:
        raise OptionError('standard input is closed: give a prompt: mlxrunner generate "TEXT"')
    if sys.stdin.isatty():
        if typed is None:
            raise OptionError(
                'no prompt: give one (mlxrunner generate "TEXT"), or send it to standard input'
            )
        click.echo("reading the prompt from the terminal, end it with Ctrl-D", err=True)
    return sys.stdin.read().rstrip("\n")


ONLY_TEXT = {
    "verify_cache": "--verify-cache runs requests again without pictures",
    "log_tokens": "--log-tokens writes tokens only",
}
"""Options that know no pictures, and why."""


def check_pictures(*, raw: bool, options: dict[str, Any], by: str = "--image") -> None:
    """Raise OptionError for options that do not go together with the option `by`."""
    if raw:
        raise OptionError(f"--raw is plain text only: leave it out, or leave {by} out")
    for name, why in ONLY_TEXT.items():
        if options[name]:
            raise OptionError(f"{why}: leave it out, or leave {by} out")


def content_of(text: str, images: Sequence[str]) -> Any:
    """Return the content of a message with the pictures in these files before its text.

    Raise PictureError if one can't be read, and OptionError if nothing that reads them is
    installed.
    """
    if not images:
        return text
    from mlxrunner.system.picture_files import open_picture

    parts: list[dict[str, Any]] = [
        {"type": "image", "image": open_picture(name)} for name in images
    ]
    return [*parts, {"type": "text", "text": text}]
