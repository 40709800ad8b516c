"""Options that several commands share, the values that hold for them, and the words for shells.

The values come from what was typed, the config file, the model, and the defaults. A shell asks for
words after each press of Tab, so nothing here imports mlx at its top.
"""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial, wraps
from os import environ
from typing import TYPE_CHECKING, Any, cast

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from mlxrunner.cli.program import GOING, KEYS_ONLY, F, HelpCommand, set_debug, visible_text
from mlxrunner.config.file import ASSIGNED, NAMED, read_assignments, read_config_file
from mlxrunner.config.names import known_models
from mlxrunner.config.option import (
    MAX_SCHEMA,
    MODEL,
    NO_FORMER_NAMES,
    Option,
    Setting,
    about,
    check_schema,
    check_tools,
    layer,
    names,
    parse_size,
    renamed,
    settled,
    size_text,
    values,
)
from mlxrunner.errors import OptionError, ReadError
from mlxrunner.options import (
    EMBEDDED,
    GREEDY,
    STOP_IDS,
    GenerateOptions,
    OpenSettings,
    RunnerSettings,
)
from mlxrunner.system.reading import read_text

if TYPE_CHECKING:
    from mlxrunner.profiling.profile import Profile
    from mlxrunner.runner import Runner


MOST_TOOLS = 2**22
"""Most bytes of a file of tools."""
INTERVAL = "checkpoint_interval"
"""The only setting of a runner that does not change a memory plan."""
DEMO_BANNER = (
    "This is the embedded demo model: a toy of 2.8 million parameters that remembers small facts "
    "you tell it, and nothing else.\n"
    "For a real one: mlxrunner chat llama3.2:1b (0.7 GB); `mlxrunner models --known` lists more."
)


def _verbose(ctx: click.Context, parameter: click.Parameter, value: int) -> None:
    if value:
        import logging

        from mlxrunner.terminal.output import log_to_stderr

        log_to_stderr(logging.INFO if value == 1 else logging.DEBUG)


def flag(*names: str, help: str) -> Callable[[F], F]:
    """Return an option without a value, whose parameter is true if it is given."""
    return click.option(*names, is_flag=True, help=help)


debug_option = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=set_debug,
    help="Show the traceback of an error.",
)
verbose_option = click.option(
    "-v",
    "--verbose",
    count=True,
    expose_value=False,
    callback=_verbose,
    help="Log reuse and timing of each request to stderr; -vv also logs lookups before evaluation.",
)
trust_option = flag(
    "--trust-remote-code", help="Run Python code that the model brings. Only if you trust it."
)
events_option = click.option(
    "--events",
    metavar="FILE",
    envvar="MLXRUNNER_EVENTS",
    show_envvar=True,
    help="Append one JSON line per request: tokens reused, cause of a miss, timing.",
)
json_option = flag("--json", "as_json", help="Print one JSON object instead.")


def _note(text: str) -> None:
    """Print a note about what was typed, unless this is a server's worker: its parent has."""
    from mlxrunner.server.supervisor import PASSED

    if PASSED not in environ:
        click.echo(visible_text(text), err=True)


def together(options: tuple[Callable[[F], F], ...]) -> Callable[[F], F]:
    """Return several options as one decorator, in the order in which --help shows them."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def option_of(
    kind: type, name: str, flag: str | None = None, was: Sequence[str] = (), **changes: Any
) -> Callable[[F], F]:
    """Return the command-line option for a field of the dataclass `kind` that describes one.

    `flag` is its name on the command line, by default made from `name`: `--no-NAME` for a flag that
    is on by default. `was` are former flags. `changes` are attributes of `click.option` to add or
    replace.
    """
    one = kind.__dataclass_fields__[name]  # type: ignore[attr-defined]  # `kind` is a dataclass
    described, attributes = about(one), dict[str, Any]()
    if described.kind is str and described.among:
        attributes["type"] = _Choice(described)
    elif described.kind is bool:
        attributes["is_flag"] = True
        attributes["flag_value"] = not one.default
    elif described.is_size:
        attributes["type"] = _Size()
    elif described.kind is not str:
        attributes["type"] = described.kind
    attributes |= {"help": described.help, "metavar": described.metavar}
    if described.is_list:
        attributes["multiple"] = True
    elif described.is_size and one.default is not None:
        text = f"{described.help} [default: {size_text(one.default)}]"
        attributes |= {"default": one.default, "help": text}
    elif one.default is not None:
        shows = described.kind is not bool and "[default" not in described.help
        attributes |= {"default": one.default, "show_default": shows}
    attributes |= changes
    prefix = "--no-" if described.kind is bool and one.default else "--"
    flag = flag or _flag(prefix, name)
    like = {
        key: attributes[key] for key in ("is_flag", "flag_value", "multiple") if key in attributes
    }
    former = (*(_flag(prefix, old) for old in described.was), *was)
    hidden = (former_option(old, flag, name, **like) for old in former)
    return together((click.option(flag, name, **attributes), *hidden))


def _flag(prefix: str, name: str) -> str:
    return prefix + name.replace("_", "-")


def former_option(old: str, flag: str, name: str, **like: Any) -> Callable[[F], F]:
    """Return the hidden option for `old`, a former flag of the option `flag` called `name`.

    `like` are the attributes of a flag, or of an option with several values.
    """
    plain = f"former_{old.strip('-').replace('-', '_')}"
    return click.option(old, plain, cls=_Former, now=(name, flag), **like)


class _Size(click.ParamType[int]):
    """A number of bytes, written as 8GB, 500MB, 2GiB or in digits."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name = "size" if param is None else str(param.name)
        return parse_size(name, value) if isinstance(value, str) else value


class _Former(click.Option):
    """A former name of an option, which is not shown. Its values are those of today's name."""

    def __init__(self, *names: Any, now: tuple[str, str], **attributes: Any) -> None:
        attributes |= {"hidden": True, "expose_value": False, "is_eager": True}
        super().__init__(*names, **attributes)
        self._now = now

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        """Hand what was typed to today's option, which is read later because it is not eager."""
        typed, (name, flag) = cast("dict[str, Any]", opts), self._now
        if (value := typed.pop(str(self.name), None)) is not None:
            typed[name] = (
                [*value, *typed.get(name, ())] if self.multiple else typed.get(name, value)
            )
            if not ctx.resilient_parsing:
                _note(renamed(self.opts[0], flag))
        return None, args


class _Choice(click.Choice[str]):
    """A choice that says why a value is refused, if there is more to say than the choices."""

    def __init__(self, described: Option) -> None:
        super().__init__(list(described.among))
        self._described = described

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        why = self._described.why_not(value)
        if why is not None:
            self.fail(why, param, ctx)
        return super().convert(value, param, ctx)


def _options_of(kind: type, chosen: Iterable[str]) -> tuple[Callable[[F], F], ...]:
    return tuple(option_of(kind, name) for name in chosen)


Words = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _words(found: Callable[[], Iterable[str]], otherwise: str | None = None) -> Words:
    """Return a function for `shell_complete=` that offers the words of `found`.

    The shell completes `otherwise` ("dir") by itself where none of them fits.
    """

    def offer(ctx: click.Context, parameter: click.Parameter, begin: str) -> list[CompletionItem]:
        with suppress(Exception):  # a shell cannot show an error
            given = ctx.params.get(parameter.name or "") if parameter.nargs == -1 else None
            words = [w for w in found() if w.startswith(begin) and w not in (given or ())]
            if words or otherwise is None:
                return [CompletionItem(word) for word in words]
        return [CompletionItem(begin, type=otherwise)] if otherwise else []

    return offer


def _repositories() -> list[str]:
    from mlxrunner.models.download import repositories

    return repositories()


def _sessions() -> list[str]:
    from mlxrunner.sessions.store import SessionStore

    return SessionStore().names()


model_words = _words(
    lambda: [*EMBEDDED, *read_config_file().aliases, *_repositories(), *known_models()], "dir"
)
"""For a parameter that takes every kind of model."""
repository_words = _words(_repositories)
"""For a parameter that takes a repository of the hub cache."""
template_words = _words(lambda: read_config_file().templates)
"""For a parameter that takes a prompt template of the config file."""
session_words = _words(_sessions)
"""For a parameter that takes a saved session."""


OF_REQUESTS = frozenset(names(GenerateOptions))


def typed_names(ctx: click.Context) -> set[str]:
    """Return the names of the options on the command line."""
    typed = ParameterSource.COMMANDLINE
    return {name for name in ctx.params if ctx.get_parameter_source(name) is typed}


def typed_options(ctx: click.Context, options: dict[str, Any], *, greedy: bool) -> dict[str, Any]:
    """Return the options of a request that the user gave. Raise OptionError if they contradict.

    `greedy` stands for the options of GREEDY.
    """
    given = typed_names(ctx) & OF_REQUESTS
    typed = {name: value for name, value in options.items() if name in given}
    if not greedy:
        return typed
    for name in GREEDY:
        if typed.get(name):
            raise OptionError(
                f"--greedy takes the most likely token, and --{name.replace('_', '-')} "
                f"{typed[name]} may not: use one of them"
            )
    return typed | GREEDY


class Configured(HelpCommand):
    """A command whose options the config file may set, and `--set` for once."""

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        command = str(self.name)
        self._keys, self._going = KEYS_ONLY[command].split(), GOING.get(command, {})
        for one in self.params:
            if isinstance(one, click.Option) and one.name in (*self._keys, *self._going):
                one.hidden = True

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        assigned = ctx.params.pop("keys", ())
        if not ctx.resilient_parsing:
            self._say_what_goes(ctx)
            _assign(ctx, assigned)
            configure(ctx)
        return rest

    def _say_what_goes(self, ctx: click.Context) -> None:
        """Print a note for each typed option that version 0.4 does not have."""
        typed = typed_names(ctx)
        for one in self.params:
            name, flag = str(one.name), one.opts[0]
            if one.name not in typed or not (name in self._keys or name in self._going):
                continue
            value = ctx.params[name]
            text = value if isinstance(value, str) else json.dumps(value)
            instead = self._going.get(name) or (
                f"use {ASSIGNED} {shlex.quote(f'{name}={text}')}, or {name} in the config file"
            )
            _note(f"{flag} is read until version {NO_FORMER_NAMES}; {instead}")


set_option = click.option(
    ASSIGNED,
    "keys",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set a key of the config file for this command (repeatable); `mlxrunner config --keys` "
    "lists them.",
)


def _assign(ctx: click.Context, given: Sequence[str]) -> None:
    """Set options by their names in the config file, as if their flags had been typed."""
    for name, setting in read_assignments(str(ctx.command.name), given).items():
        if name not in ctx.params or name == "api_key":  # other users see command lines
            raise OptionError(f"{ASSIGNED} {name}: set that in the config file")
        value = setting.value
        ctx.params[name] = read_config_file().system(value) if name == "system" else value
        ctx.set_parameter_source(name, ParameterSource.COMMANDLINE)


def configure(ctx: click.Context) -> None:
    """Give the options that were not typed the values of the config file.

    Options of a request are left to `usual_options`, because their model may be another one: that
    of a session.
    """
    config, params = read_config_file(), ctx.params
    model = params.get("named") or params["model"]
    for name, setting in config.options(str(ctx.command.name), model).items():
        if setting.note is not None:
            _note(setting.note)
        if params.get("raw") and name in ("system", "template"):
            continue
        if name == "template":
            params[name] = {**setting.value, **(params.get(name) or {})}
        elif name in params.keys() - OF_REQUESTS and _is_default(ctx, name):
            params[name] = config.system(setting.value) if name == "system" else setting.value


def _is_default(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is ParameterSource.DEFAULT


def usual_options(command: str, model: str) -> dict[str, Setting]:
    """Return what holds for requests of `command` to `model` unless the user says otherwise.

    The variables of the chat template are not among it. The model is downloaded if it is not there.
    Raise ModelError if there is no such model.
    """
    from mlxrunner.models.files import suggestion_of
    from mlxrunner.models.resolve import resolve

    of_file = read_config_file().options(command, model)
    chosen = {name: one for name, one in of_file.items() if name in OF_REQUESTS - {"template"}}
    return settled(layer(suggestion_of(resolve(model)).options, MODEL), chosen)


def options_that_hold(
    command: str, model: str, options: dict[str, Any], typed: dict[str, Any]
) -> dict[str, Any]:
    """Return `options` with the values that hold: typed ones, then the usual ones of `model`."""
    variables = {"template": options["template"]}
    return options | values(usual_options(command, model)) | typed | variables


def named_model(ctx: click.Context, parameter: click.Parameter, model: str | None) -> str | None:
    """Return the model that a name or an alias means; None means that of the config file."""
    if model is None or ctx.resilient_parsing:
        return model
    config = read_config_file()
    if config.model is not None and _is_default(ctx, str(parameter.name)):
        model = str(config.model.value)
    return config.name_of(model)


def named_system(ctx: click.Context, parameter: click.Parameter, system: str | None) -> str | None:
    """Return the system prompt that `@NAME` stands for, or the text as it is."""
    return read_config_file().system(system) if system and system.startswith(NAMED) else system


draft_option = option_of(OpenSettings, "draft_model")
wire_option = option_of(OpenSettings, "wire")
LOADING = (*names(RunnerSettings), "reserve", "wire", "trust_remote_code")
"""Names of the options of `Runner.load`."""
FULL_CONTEXT = ("overflow", "keep")
FORM = ("schema", "choices")
TEMPLATE = ("template", "tools")
WITHOUT_SHARED_FLAG = ("logprobs", *STOP_IDS, "continue_final_message")
"""The options of a request without a flag for all commands; `batch` has --logprobs."""
SAMPLING = tuple(
    name
    for name in names(GenerateOptions)
    if name not in (*FULL_CONTEXT, *FORM, *TEMPLATE, *WITHOUT_SHARED_FLAG)
)
MEMORY_OPTIONS = _options_of(RunnerSettings, [n for n in names(RunnerSettings) if n != INTERVAL])


def overflow_options(default: str) -> Callable[[F], F]:
    """Return the options for a full context. `default` is that of --overflow."""
    first, second = FULL_CONTEXT
    return together(
        (
            option_of(GenerateOptions, first, default=default),
            option_of(GenerateOptions, second),
        )
    )


def model_option(text: str) -> Callable[[F], F]:
    """Return the option for a model, with `text` as its help."""
    return click.option(
        "-m",
        "--model",
        default="demo",
        show_default=True,
        shell_complete=model_words,
        envvar="MLXRUNNER_MODEL",
        show_envvar=True,
        callback=named_model,
        help=text,
    )


named_argument = click.argument(
    "named", metavar="[MODEL]", required=False, callback=named_model, shell_complete=model_words
)
"""The argument that names a model, in place of -m."""


def model_argument(command: F) -> F:
    """Let a command take its model as an argument or with -m; `command` gets it as `model`."""

    @wraps(command)
    def run(*arguments: Any, named: str | None, model: str, **options: Any) -> Any:
        return command(*arguments, model=chosen_model(named, model), **options)

    return cast("F", named_argument(model_option("The same as MODEL.")(run)))


def chosen_model(named: str | None, other: str) -> str:
    """Return the model that the argument names, else that of -m. Raise OptionError for both."""
    if named is None:
        return other
    if "model" in typed_names(click.get_current_context()):
        raise OptionError(f"two models: {named} and -m {other}: name one of them")
    return named


AT_START = "Allocate all memory at start, or as the conversation grows.  [default: reserve]"


def model_options(command: F) -> F:
    """Add the options for loading a model and for logging that chat and batch share."""
    return _model_options(True, AT_START)(command)


def request_model_options(command: F) -> F:
    """Add the same options for a command that runs one request, for which it reserves memory."""
    return _model_options(
        None,
        "Allocate memory for the whole context at start, or as the answer grows.  [default: for "
        "the prompt and --max-tokens]",
    )(command)


def _model_options(reserve: bool | None, text: str) -> Callable[[F], F]:
    return together(
        (
            model_option(
                "A short name such as llama3.2:1b (`mlxrunner models --known`), a hub id, a "
                "directory, demo, or an alias of the config file."
            ),
            *MEMORY_OPTIONS,
            option_of(RunnerSettings, INTERVAL),
            click.option("--reserve/--no-reserve", default=reserve, help=text),
            wire_option,
            trust_option,
            set_option,
            verbose_option,
            debug_option,
        )
    )


def system_option(
    help: str = "The system prompt; @NAME: one of the config file.",
) -> Callable[[F], F]:
    """Return the option for a system prompt, with its `help`."""
    return click.option("-s", "--system", metavar="TEXT", callback=named_system, help=help)


def sampling_options(command: F) -> F:
    """Add the options that choose the next token and end an answer."""
    greedy = flag("--greedy", help="Always the most likely token: temperature 0 and no penalties.")
    help_ = "0 = always the most likely token. [default: the model's, or 0]"
    temperature = option_of(GenerateOptions, "temperature", help=help_, show_default=False)
    others = [name for name in SAMPLING if name != "temperature"]
    return together((greedy, temperature, *_options_of(GenerateOptions, others)))(command)


def _read_json(
    flag: str,
    most: int,
    check: Callable[[str], None],
    ctx: click.Context,
    parameter: click.Parameter,
    file: str | None,
) -> str | None:
    """Return the text of `file`, at most `most` bytes, if `check` finds nothing wrong with it.

    A text in its place, which begins as JSON does, is taken as it is.
    """
    if file is None:
        return None
    is_text = file.lstrip().startswith(("{", "["))
    try:
        text = file if is_text else read_text(file, most, given=True)
        check(text)
    except ReadError as error:
        raise OptionError(f"{flag} {error}") from error
    except OptionError as error:
        raise OptionError(
            f"{flag}{'' if is_text else f' {file}'}: {str(error).partition(': ')[2]}"
        ) from error
    return text


def _split_choices(
    ctx: click.Context, parameter: click.Parameter, line: str | None
) -> tuple[str, ...] | None:
    if line is None:
        return None
    try:
        choices = tuple(
            text for row in csv.reader([line], skipinitialspace=True, strict=True) for text in row
        )
    except csv.Error as error:
        raise OptionError(
            f"--choices {line}: the texts are separated by commas, one that has a comma is put in "
            "double quotes"
        ) from error
    if not choices:
        raise OptionError("--choices: there is none, give them as yes,no")
    return choices


def form_options(command: F) -> F:
    """Add the options that hold the answer to a form."""
    schema, choices = FORM
    read = partial(_read_json, "--schema", 4 * MAX_SCHEMA, check_schema)
    return together(
        (
            option_of(GenerateOptions, schema, callback=read),
            option_of(GenerateOptions, choices, multiple=False, callback=_split_choices),
        )
    )(command)


def _read_variables(
    ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]
) -> dict[str, Any] | None:
    variables: dict[str, Any] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals:
            raise OptionError(f"--chat-template-var {one}: it has to be NAME=VALUE")
        try:
            variables[name] = json.loads(value)
        except (ValueError, RecursionError):
            variables[name] = value
    return variables or None


def template_var_option(command: F) -> F:
    """Add the option for variables of the chat template."""
    changes: dict[str, Any] = {"multiple": True, "callback": _read_variables}
    return option_of(
        GenerateOptions, "template", "--chat-template-var", ["--template-var"], **changes
    )(command)


def template_options(command: F) -> F:
    """Add the options for what the chat template is given besides the messages."""
    read = partial(_read_json, "--tools", MOST_TOOLS, check_tools)
    tools = option_of(GenerateOptions, "tools", callback=read)
    return template_var_option(tools(command))


def check_options(options: dict[str, Any], *, quiet: bool = False) -> None:
    """Check the options of a request before a model is loaded. Raise OptionError if one is wrong.

    Print a note if an option has no effect, unless `quiet` is true.
    """
    from mlxrunner.engine.constrain import check_form

    checked = GenerateOptions.of(**options)
    check_form(checked)
    if checked.has_form and checked.stop and not quiet:
        click.echo(
            (
                "--stop has no effect with --schema or --choices: such an answer ends where "
                "it is complete"
            ),
            err=True,
        )


def is_given(name: str) -> bool:
    """Return True if the user typed the option `name` or set its environment variable."""
    source = click.get_current_context().get_parameter_source(name)
    return source in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


def take(options: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Remove the options `names` from `options` and return them."""
    return {name: options.pop(name) for name in names}


def loader() -> Callable[[str, dict[str, Any]], Runner] | None:
    """Return what loads a model on several ranks, or None if this process has the whole model."""
    ranks = click.get_current_context().meta.get("ranks")
    if ranks is None:
        return None
    settings = names(RunnerSettings)
    return lambda model, loading: ranks.load(
        model, {name: loading[name] for name in settings if name in loading}
    )


def load(model: str, loading: dict[str, Any], *, banner: bool) -> Runner:
    """Load `model` with a bar in a terminal, after the banner of the demo model if `banner`."""
    from mlxrunner.models.resolve import resolve
    from mlxrunner.runner import Runner
    from mlxrunner.terminal.output import loading as loading_bar

    if (shared := loader()) is not None:
        return shared(model, loading)
    if banner and model == "demo":
        click.echo(_for_the_terminal(DEMO_BANNER), err=True)
    # A download shows a bar of its own.
    for name in filter(None, (model, loading.get("draft_model"))):
        resolve(name, with_code=loading["trust_remote_code"])
    with loading_bar(model, leaves=True) as show:
        return Runner.load(model, progress=show, **loading)


def _for_the_terminal(text: str) -> str:
    """Break `text` between words if standard error is a terminal, which breaks within them."""
    import sys

    if not sys.stderr.isatty():
        return text
    from mlxrunner.terminal.output import wrapped

    return "\n".join(wrapped(line) for line in text.splitlines())


WATCHING = ("events", "log_text", "log_tokens", "metrics", "verify_cache")
STRICT = "verify_strict"
RECORDING = (*WATCHING, STRICT)


def recording_options(command: F) -> F:
    """Add the options that `recording` reads."""
    strict = former_option("--strict", "--verify-strict", STRICT, is_flag=True)
    return watching_options(strict(command))


def watching_options(command: F) -> F:
    """Add the same options without the former name of one, for a command that has a --strict."""
    return together(
        (
            flag(
                "--verify-strict", help="With --verify-cache: exit code 4 if one of them differed."
            ),
            events_option,
            flag(
                "--log-text",
                help="With --events: add the text of a few tokens where a prompt leaves the "
                "prefix cache.",
            ),
            click.option(
                "--log-tokens",
                metavar="FILE",
                envvar="MLXRUNNER_LOG_TOKENS",
                show_envvar=True,
                help="Append each request's token ids, which are its text, for mlxrunner simulate.",
            ),
            click.option(
                "--metrics",
                metavar="FILE",
                help=(
                    "Keep counters of the requests in FILE, in Prometheus text format "
                    "(textfile collector)."
                ),
            ),
            click.option(
                "--verify-cache",
                type=float,
                default=0.0,
                metavar="RATE",
                help=(
                    "Run this share (0 to 1) of the requests that reused something again on "
                    "an empty cache, and compare.  [default: 0]"
                ),
            ),
        )
    )(command)


@contextmanager
def recording(options: dict[str, Any], command: str) -> Iterator[Profile]:
    """Yield a Profile made of the recording options, which are taken out of `options`.

    Attach it to each runner that is loaded. It is closed at the end. Raise OptionError if the
    options contradict each other.
    """
    taken = take(options, RECORDING)
    if taken["log_text"] and not taken["events"]:
        raise OptionError("--log-text says what --events writes: give it a file, too")
    if taken[STRICT] and not taken["verify_cache"]:
        raise OptionError("--verify-strict needs --verify-cache RATE to find a difference")
    from mlxrunner.profiling.report.report import must_differ

    must_differ(
        {
            "--events": taken["events"],
            "--log-tokens": taken["log_tokens"],
            "--metrics": taken["metrics"],
        }
    )
    from mlxrunner.profiling.profile import Profile, profiled

    sinks = []
    if taken["metrics"]:
        from mlxrunner.profiling.metrics import MetricsFile

        sinks.append(MetricsFile(taken["metrics"]))
    profile = Profile(
        command,
        events=taken["events"],
        tokens=taken["log_tokens"],
        log_text=taken["log_text"],
        verify=taken["verify_cache"],
        sinks=sinks,
    )
    with profiled(profile, strict=taken[STRICT]):
        yield profile
    if taken[STRICT]:
        click.echo(
            f"mlxrunner: {profile.verified} of {profile.eligible} requests that reused something "
            "were verified",
            err=True,
        )
