"""The program around the commands: their help, and one line with an exit code for each error.

Standard output that is closed or full is such an error. Standard error that is closed or full is
ignored.

`--help` shows the commands in the order of use, and the options that people use most. `--help-all`
shows all options of a command, under the same headings.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO, TypeVar

import click

from mlxrunner.errors import MlxrunnerError, OutputClosedError
from mlxrunner.terminal import early
from mlxrunner.terminal.early import INTERRUPTED

COMMANDS: dict[str, dict[str, str]] = {
    "Ask": {
        "chat": "Talk with a model.",
        "run": "Talk with a model, or answer one prompt, as `ollama run`.",
        "generate": "Answer one prompt.",
        "batch": "Answer a file of prompts, reusing what they share.",
    },
    "Serve": {
        "serve": "Serve OpenAI, Anthropic and Ollama clients.",
        "launch": "Start a coding agent on a server; use several hosts.",
        "worker": "Answer lines of batches on a Dask cluster.",
    },
    "Models": {
        "models": "List, download and remove models.",
        "show": "Describe a model without loading its weights.",
        "plan": "Compute the memory of a model, and what fits.",
    },
    "Saved conversations": {
        "sessions": "List, show, export and remove saved chats.",
        "cache": "Exchange prompt-cache files with mlx-lm.",
    },
    "Look inside": {
        "report": "Sum up what requests reused, and what they lost.",
        "explain": "Show why one request did not reuse more.",
        "simulate": "Replay requests with other settings, without a model.",
        "verify": "Prove on this device that reuse changes nothing.",
        "bench": "Measure a model on this machine.",
    },
    "Set up": {
        "doctor": "Check device, memory and libraries.",
        "config": "Show the config file and the options in effect.",
        "completion": "Print the script that completes commands in a shell.",
    },
}
"""The commands in the order of use, with their summaries."""

USED: dict[str, str] = {
    "chat": "model context draft-model system temperature max-tokens session continue no-save "
    "plain verbose events",
    "generate": "model prompt system image prompt-template temperature max-tokens seed schema "
    "choices json n verbose",
    "batch": "model output row-template system temperature max-tokens schema choices parallel "
    "workers resume plan quiet",
    "serve": "model host port api-key slots memory context keep-alive draft-model pictures events "
    "verbose",
}
"""The flags that `--help` shows of a command with many; of other commands, it shows all."""

HEADINGS: dict[str, str] = {
    "Model": "model context kv-bits draft-model trust-remote-code set",
    "Prompt": "prompt system prompt-template prompt-var image raw tools chat-template-var",
    "Input": "row-template prompt-column messages-column id-column delimiter pictures "
    "picture-folder strict",
    "Answer": "temperature max-tokens greedy seed stop schema choices top-k top-p min-p "
    "repetition-penalty speculate overflow logprobs n repeat",
    "Conversation": "session continue no-save switch-model branch state plain",
    "Output": "output json resume retry-failed output-order no-usage summary progress-file quiet "
    "html csv trace force print",
    "Run": "plan order parallel workers shard retries timeout max-errors dask tls-ca tls-cert "
    "tls-key insecure",
    "Server": "url host port api-key no-key allow-origin slots max-queue keep-alive no-disk-cache "
    "disk-cache-bytes unit",
    "Several hosts": "hosts rank rank-port",
    "Memory": "memory cache-memory reserve prefill-step wire rewind-slack checkpoint-budget "
    "measure",
    "Logs and checks": "verbose events log-text log-tokens metrics verify-cache verify-strict "
    "min-hit-rate debug",
}
"""All flags of commands with many options, by heading, in the order of the help."""
_CACHES = "wire rewind_slack checkpoint_budget checkpoint_interval"
_RARE = f"penalty_context presence_penalty frequency_penalty keep {_CACHES}"
KEYS_ONLY: dict[str, str] = {
    "chat": f"{_RARE} history keep_thinking no_cache_file session_kv_bits no_type_ahead "
    "no_input_history",
    "generate": _RARE,
    "batch": _RARE,
    "serve": f"{_CACHES} drain max_queue disk_write_bytes claude_names disable_rewrite",
}
"""Options by command that are keys of the config file. Their flags are read until version 0.4."""
GOING: dict[str, dict[str, str]] = {
    "chat": {
        "metrics": "`mlxrunner report` counts the requests of --events",
        "verify_strict": "a chat says each difference at once",
    },
    "generate": {"parallel": "--n gives 8 answers at a time"},
    "batch": {"max_step_ms": "nobody waits for a step of a batch"},
}
"""Options by command that version 0.4 does not have, and why none is needed."""
MANY = 14
"""A command with more options shows those of USED."""


def flag_of(option: click.Option) -> str:
    """Return the long name of an option without its dashes."""
    return max(option.opts, key=len).lstrip("-")


def option_record(option: click.Option, ctx: click.Context) -> tuple[str, str] | None:
    """Return names and text of an option, with its default; None if it is hidden."""
    record = option.get_help_record(ctx)
    if record is None or option.is_flag or option.count or option.multiple or option.required:
        return record
    names, text = record
    return names, _with_default(text, option, ctx)


def key_text(option: click.Option, ctx: click.Context) -> str:
    """Return the text of an option as a key of the config file, with its default."""
    text = " ".join(str(option.help).split())
    if option.multiple:
        return text
    if option.is_flag and not option.secondary_opts:
        switched = "false" if option.flag_value is False else "true"
        return f"{switched}: {text[:1].lower()}{text[1:]}"
    return _with_default(text, option, ctx)


def _with_default(text: str, option: click.Option, ctx: click.Context) -> str:
    default = option.get_default(ctx)
    shown = default if isinstance(default, int | float | str) else "none"
    return text if "default" in text else f"{text}  [default: {shown}]"


def _under_headings(options: Iterable[click.Option]) -> dict[str, list[click.Option]]:
    """Return options by heading, in the order of HEADINGS; "Options" has the others."""
    places = {
        flag: (number, place, heading)
        for number, (heading, flags) in enumerate(HEADINGS.items())
        for place, flag in enumerate(flags.split())
    }
    last = (len(HEADINGS), 0, "Options")
    found: dict[str, list[click.Option]] = {}
    for option in sorted(options, key=lambda one: places.get(flag_of(one), last)[:2]):
        found.setdefault(places.get(flag_of(option), last)[2], []).append(option)
    return found


class HelpCommand(click.Command):
    """A command whose `--help` shows the options that people use, and `--help-all` all of them."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), help_all_option(is_hidden=str(self.name) not in USED)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments. A file `./-` gets its whole path, since Path("./-") is "-"."""
        rest = super().parse_args(ctx, args)
        for one in self.params:
            value = ctx.params.get(str(one.name))
            is_file = one.metavar == "FILE" or isinstance(one.type, click.Path)
            if is_file and isinstance(value, str) and value != "-" == os.path.normpath(value):
                ctx.params[str(one.name)] = os.path.abspath(value)
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        options = [one for one in options if not one.hidden]
        used, is_short = USED.get(str(self.name), "").split(), not ctx.meta.get("help_all")
        helps = [one for one in options if flag_of(one) in ("help", "help-all")]
        own = [one for one in options if one not in helps]
        shown = [one for one in own if flag_of(one) in used] if used and is_short else own
        groups = _under_headings(shown) if len(own) > MANY else {"Options": shown}
        for heading, members in groups.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [r for one in members if (r := option_record(one, ctx)) is not None]
                )
        with formatter.section("Help"):
            formatter.write_dl([r for one in helps if (r := option_record(one, ctx)) is not None])
            if len(shown) < len(own):
                path = ctx.command_path
                formatter.write(f"  `{path} --help-all` shows {len(own) - len(shown)} more.\n")


def help_all_option(*, is_hidden: bool) -> click.Option:
    """Return the option --help-all, hidden where it shows what --help does."""
    return click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        hidden=is_hidden,
        callback=_show_all,
        help="Show all options and exit.",
    )


def _show_all(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta["help_all"] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


class HelpGroup(click.Group):
    """A group of commands with such a help, in the order in which they were added."""

    command_class = HelpCommand

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), help_all_option(is_hidden=True)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if self.invoke_without_command and args and args[0] in {"list", "ls"} - {*self.commands}:
            args = args[1:]  # the group itself lists
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


F = TypeVar("F", bound=Callable[..., Any])


class Program(HelpGroup):
    """A click group that prints each error as one line; `--debug` adds the traceback."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        wide = max(len(name) for commands in COMMANDS.values() for name in commands)
        for heading, commands in COMMANDS.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{name:{wide}}", text) for name, text in commands.items()])
        click.Command.format_options(self, ctx, formatter)

    def main(self, *arguments: Any, **extra: Any) -> Any:
        guard_streams()
        try:
            return super().main(*arguments, **extra)
        except OutputClosedError as error:  # raised by --help, while click reads the arguments
            click.echo(f"mlxrunner: {error}", err=True)
            sys.exit(error.exit_code)
        finally:
            give_up_output()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise reworded(error) from error

    def invoke(self, ctx: click.Context) -> Any:
        is_early = early.hand_over()
        try:
            return self._invoke(ctx)
        finally:
            if is_early:
                early.begin()

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except click.UsageError as error:
            raise reworded(error) from error
        except (
            click.ClickException,
            click.exceptions.Exit,
            click.Abort,
            BrokenPipeError,
            SystemExit,
        ):
            raise
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except MlxrunnerError as error:
            _report(ctx, visible_text(str(error)) if error.is_table else line_text(str(error)))
            sys.exit(error.exit_code)
        except Exception as error:
            _end_if_told(error)
            _report(
                ctx,
                line_text(
                    f"internal error: {type(error).__name__}: {' '.join(str(error).split())} "
                    "(--debug shows where)"
                ),
            )
            sys.exit(1)


def reworded(error: click.UsageError) -> click.UsageError:
    """Return an error of click with what the user may have meant."""
    match error:
        case click.NoSuchOption():
            return _with_our_name(error)
        case click.NoSuchCommand():
            return _with_our_command(error)
        case click.MissingParameter():
            name = "" if error.param is None else (error.param.metavar or str(error.param.name))
            name = name.strip("[].").upper() if isinstance(error.param, click.Argument) else ""
            if name in MEANINGS:
                return click.UsageError(f"Missing {name}: {MEANINGS[name]}.", ctx=error.ctx)
        case click.BadParameter():
            return _with_our_number(error)
        case click.UsageError(ctx=click.Context(info_name=name)) if "extra arg" in error.message:
            hint = ". mlxrunner run MODEL PROMPT answers one prompt." if name == "chat" else ""
            return click.UsageError(visible_text(error.message) + hint, ctx=error.ctx)
    return error


def _with_our_name(error: click.NoSuchOption) -> click.NoSuchOption:
    """Return the error about an unknown option with the option of ours that may be meant."""
    from mlxrunner.config.names import FLAGS, LETTERS, MEANT, SAME, WAYS, plain

    if error.ctx is None:
        return error
    options = [one for one in error.ctx.command.params if isinstance(one, click.Option)]
    options = [one for one in options if not one.hidden]
    flags = {str(one.name): max(one.opts, key=len) for one in options}
    flags |= {flag.lstrip("-").replace("-", "_"): flag for one in options for flag in one.opts}
    command = str(error.ctx.command.name)
    flags |= {key: f"--set {key}=VALUE" for key in KEYS_ONLY.get(command, "").split()}
    option = error.option_name
    names = LETTERS.get(option[1:], ()) if len(option) == 2 else (option,)
    asks = "temperature" in flags  # advice about requests is for commands that make some
    ways = [WAYS[plain(name)] for name in names if plain(name) in WAYS]
    ways = [way for way in ways if asks or "`mlxrunner " in way or "mlxrunner launch" in way]
    others = (FLAGS.get(plain(name), (name,)) for name in names)
    meant = dict.fromkeys(
        _our_flag(next((one for one in other if one in flags), other[0]), flags) for other in others
    )
    ours = " or ".join(repr(flag) for flag in meant if flag is not None)
    hint = ways[0] if ways else f"Did you mean {ours}?" if ours else ""
    known = {*SAME, *MEANT, *FLAGS, *LETTERS}
    if not ways and plain(option) not in known:
        hint = _place_of(option, error.ctx) or hint
    # click's own proposals count the dashes as letters that are alike
    message = f"No such option {option!r}. {hint}".rstrip()
    return click.NoSuchOption(option, message, ctx=error.ctx)


def _place_of(option: str, ctx: click.Context) -> str:
    """Return which commands have an option that the one of `ctx` lacks; empty if none has it."""
    commands = getattr(ctx.find_root().command, "commands", {})
    having = [
        name
        for name, command in commands.items()
        if any(option in one.opts and not getattr(one, "hidden", False) for one in command.params)
    ]
    if having and ctx.parent is None:
        return f"It comes after a command that has it: mlxrunner {having[0]} {option} ..."
    if len(having) > 4:
        having = [*having[:3], "other commands"]
    *most, last = having or [""]
    return f"{', '.join(most)} and {last} have it." if most else f"{last} has it." if last else ""


def _our_flag(name: str, flags: Mapping[str, str]) -> str | None:
    """Return our flag that somebody who wrote `name` may have meant, with its value if it has one.

    `flags` are those of the command by name.
    """
    from mlxrunner.config.names import nearest

    ours, _, value = (nearest(name, flags) or "").partition(": ")
    if not ours:
        return None
    return flags[ours] + (f" {_as_pair(value)}" if value else "")


def _with_our_command(error: click.NoSuchCommand) -> click.UsageError:
    """Return the error about an unknown command with what may be meant: ours, or a prompt."""
    from mlxrunner.config.names import ADVICE, COMMANDS, known_models
    from mlxrunner.options import EMBEDDED

    name, group = error.command_name, error.ctx and error.ctx.parent and error.ctx.info_name
    ours = COMMANDS.get(f"{group} {name}" if group else name)
    if not group and name in ADVICE:
        meant = ADVICE[name]
    elif ours is not None:
        meant = f"Did you mean 'mlxrunner {ours}'?"
    elif group and not error.possibilities:
        *most, last = getattr(error.ctx and error.ctx.command, "commands", ()) or ("nothing",)
        meant = f"{group} has {', '.join(most)} and {last}."
    elif name in EMBEDDED or name in known_models():
        meant = f"{name} is a model: mlxrunner chat {name}"
    elif name.strip() and not error.possibilities:
        meant = f"To ask that, type mlxrunner generate {shlex.quote(line_text(name[:60]))}"
    else:
        return error
    return click.UsageError(f"{error.message} {meant}", ctx=error.ctx)


_COUNT = re.compile(r"'(\d+(?:\.\d+)?)([km])i?b?' ", re.IGNORECASE)


def _with_our_number(error: click.BadParameter) -> click.BadParameter:
    """Return an error about a number in our words; one such as 8k says what to write instead."""
    message = error.message.replace("is not a valid integer", "is not a whole number")
    message = message.replace("is not a valid float", "is not a number")
    if (found := _COUNT.match(message)) is not None:
        number = float(found[1]) * 1024 ** " km".index(found[2].lower())
        message = f"{message.rstrip('.')}: write {int(number)}."
    hint = error.param_hint
    return click.BadParameter(message, ctx=error.ctx, param=error.param, param_hint=hint)


MEANINGS = {
    "EVENTS": "a file that chat, generate, batch or serve wrote with --events FILE",
    "LOG": "a file that chat, generate or batch wrote with --log-tokens FILE",
    "INPUT": "a file of prompts: lines of JSON, a table, or a folder of texts",
    "ID": "a short name (`mlxrunner models --known` lists them) or a hub id OWNER/NAME",
    "ADDRESS": "that of the cluster's scheduler, such as tls://HOST:8786",
    "CLIENT": "claude, codex or opencode",
    "NAME": "a saved chat: `mlxrunner sessions list` lists them",
    "SESSION": "a saved chat: `mlxrunner sessions list` lists them",
    "FILE": "the file to write, or to read",
}
"""The meaning of each argument, for the error about one that is missing."""


def _as_pair(value: str) -> str:
    """Return a JSON object of one variable as the command line takes it: NAME=VALUE."""
    import json

    (name, found), *_ = json.loads(value).items()
    return f"{name}={json.dumps(found)}"


def _end_if_told(error: BaseException | None) -> None:
    """Exit if Ctrl-C or `kill` is the cause of `error`.

    Python wraps them in a RuntimeError if they come in the middle of an import.
    """
    while (error := error and error.__cause__) is not None:
        if isinstance(error, KeyboardInterrupt):
            sys.exit(INTERRUPTED)
        if isinstance(error, SystemExit):
            sys.exit(error.code)


class StandardOutput(io.TextIOWrapper):
    """Standard output that raises OutputClosedError, or BrokenPipeError if its reader is gone."""

    def write(self, text: str) -> int:
        with self._explained():
            return super().write(text)

    def flush(self) -> None:
        with self._explained():
            super().flush()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            why = (
                "is closed"
                if error.errno == errno.EBADF
                else f"can't be written: {error.strerror or error}"
            )
            raise OutputClosedError(f"standard output {why}") from error


class StandardError(io.TextIOWrapper):
    """Standard error that ignores failures, such as a terminal that has gone away."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def guard_streams() -> None:
    """Replace the standard streams by StandardOutput and StandardError.

    A closed stream is opened on /dev/null, so that no other file gets its number.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY)  # noqa: TID251  # the lowest number that is free
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        sys.stdout = _guarded(StandardOutput, sys.stdout, 1)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = _guarded(StandardError, sys.stderr, 2)


def give_up_output() -> None:
    """Drop output that could not be written, so that Python does not retry at exit."""
    try:
        sys.stdout.flush()
    except (OutputClosedError, OSError, ValueError):
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)  # noqa: TID251  # the null device
            os.dup2(null, sys.stdout.fileno())


def _guarded(guard: type[io.TextIOWrapper], stream: TextIO | None, number: int) -> TextIO:
    if stream is None:
        return guard(
            io.FileIO(number, "w", closefd=False), "utf-8", "backslashreplace", line_buffering=True
        )
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    return guard(
        stream.buffer,
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _report(ctx: click.Context, text: str) -> None:
    if ctx.meta.get("debug"):
        click.echo(visible_text(traceback.format_exc().rstrip()), err=True)
    click.echo(f"mlxrunner: {text}", err=True)


def line_text(text: str) -> str:
    """Return `text` as one safe line: see `one_line`, which is imported late."""
    from mlxrunner.terminal.output import one_line

    return one_line(text)


def visible_text(text: str) -> str:
    """Return `text` without control characters: see `visible`, which is imported late."""
    from mlxrunner.terminal.output import visible

    return visible(text)


def set_debug(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Note that --debug was given, before or after the command."""
    ctx.meta["debug"] = ctx.meta.get("debug") or value
