"""The text of `--help`: commands in the order of use, and the options that people use most.

`--help-all` shows all options of a command, under the same headings.
"""

from __future__ import annotations

from collections.abc import Iterable

import click

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


def write_commands(formatter: click.HelpFormatter) -> None:
    """Write the commands of the program with their summaries, under headings."""
    wide = max(len(name) for commands in COMMANDS.values() for name in commands)
    for heading, commands in COMMANDS.items():
        with formatter.section(heading):
            formatter.write_dl([(f"{name:{wide}}", text) for name, text in commands.items()])
