"""`mlxrunner chat`: talk with a model."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxrunner.cli.generate import generate
from mlxrunner.cli.options import (
    LOADING,
    Configured,
    chosen_model,
    debug_option,
    draft_option,
    flag,
    former_option,
    load,
    loader,
    model_options,
    named_argument,
    overflow_options,
    recording,
    recording_options,
    sampling_options,
    session_words,
    system_option,
    take,
    template_var_option,
    typed_names,
    typed_options,
    usual_options,
)
from mlxrunner.cli.program import HelpCommand
from mlxrunner.errors import OptionError

if TYPE_CHECKING:
    from mlxrunner.chat.conversation import Conversation
    from mlxrunner.chat.input import CommandTable
    from mlxrunner.chat.repl import Chat
    from mlxrunner.chat.session_commands import Saving


@click.command(cls=Configured)
@named_argument
@model_options
@draft_option
@system_option()
@sampling_options
@overflow_options("shift")
@template_var_option
@click.option(
    "--history",
    type=click.Choice(["exact", "template"]),
    default="exact",
    show_default=True,
    help="exact keeps the evaluated tokens; template renders earlier turns with the chat template.",
)
@flag("--keep-thinking", help="Keep thinking in the history where the template would drop it.")
@flag("--plain", help="Print answers as plain text.  [default: Markdown in a terminal]")
@flag(
    "--no-type-ahead",
    help="Evaluate nothing while you type.  [default: type-ahead, unless on battery]",
)
@flag("--no-input-history", help="Do not save typed texts for the arrow keys.")
@former_option("--no-history", "--no-input-history", "no_input_history", is_flag=True)
@click.option(
    "--session",
    metavar="NAME",
    shell_complete=session_words,
    help="Continue or start this saved conversation; saves it after each turn.",
)
@flag("--continue", "goes_on", help="Continue the last unnamed chat.")
@flag("--no-save", help="Save nothing of a chat without --session.  [default: its text]")
@flag("--switch-model", help="Let -m continue a session of another model.")
@flag("--no-cache-file", help="Save only the text of sessions.  [default: the KV cache, too]")
@click.option(
    "--session-kv-bits",
    type=int,
    metavar="B",
    help="Save the KV cache in 8 or 4 bits. [default: unchanged]",
)
@recording_options
@click.pass_context
def chat(
    ctx: click.Context,
    /,
    named: str | None,
    model: str,
    system: str | None,
    history: Any,
    keep_thinking: bool,
    plain: bool,
    no_type_ahead: bool,
    no_input_history: bool,
    session: str | None,
    goes_on: bool,
    no_save: bool,
    switch_model: bool,
    no_cache_file: bool,
    session_kv_bits: int | None,
    greedy: bool,
    draft_model: str | None,
    **options: Any,
) -> None:
    """Talk with MODEL (the same as -m MODEL). Each turn evaluates only its own tokens.

    In a terminal: line editing, /help for the commands, Ctrl-C stops an answer, Ctrl-D leaves.
    Otherwise each line of standard input is a turn, and stdout gets the answers.
    """
    from mlxrunner.terminal.control import Keyboard, is_terminal

    _check_begin(session, goes_on)
    given = typed_names(ctx)
    if named is not None:
        model = _no_prompt(chosen_model(named, model))
        given.add("model")
    loading, own = _loading(options)
    keyboard, caches = Keyboard(is_terminal()), not (no_cache_file or own)
    with keyboard:  # first of all, to keep what is typed while the model loads
        from mlxrunner.chat.repl import open_chat
        from mlxrunner.chat.session_commands import Saving, must_be_wanted, put_back

        keeps = not no_save and (is_terminal() or goes_on)
        saving = Saving(caches=caches, kv_bits=session_kv_bits, keeps_unnamed=keeps)
        opening = saving.opened(session, goes_on=goes_on)
        with recording(options, "chat") as profile, opening as resumed:
            conversation = _conversation(ctx, system, options, history, keep_thinking, greedy)
            if resumed is not None:
                if "model" in given and not switch_model:
                    must_be_wanted(saving.kept_as, resumed.model, model, keyboard)
                given |= conversation.options.keys()
                model = put_back(resumed, conversation, loading, model, given)
            loading["draft_model"] = draft_model
            conversation.runner = load(model, loading, banner=is_terminal())
            conversation.usual = usual_options("chat", model)
            profile.watch(conversation.runner)
            own["after_load"] = [lambda chat: profile.watch(chat.runner), _take_usual_options]
            own |= {"plain": plain, "history": not no_input_history}
            own |= {"keyboard": keyboard, "type_ahead": not no_type_ahead}
            opened, table = open_chat(
                conversation, *saving.commands, model=model, loading=loading, **own
            )
            _run(opened, table, saving, is_resumed=resumed is not None)


def _loading(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take the options of a load. Return them, and how a model that ranks share is loaded."""
    loading, shared = take(options, LOADING), loader()
    if shared is None:
        return loading, {}
    # Nothing is planned or saved for one rank alone.
    return loading | {"reserve": False}, {"load_elsewhere": shared}


def _check_begin(session: str | None, goes_on: bool) -> None:
    """Raise OptionError if there is nothing to read, or if two conversations are to continue."""
    if sys.stdin is None:
        raise OptionError(
            "standard input is closed: a chat reads its turns from a terminal, a file or a pipe"
        )
    if goes_on and session is not None:
        raise OptionError(
            f"--continue opens the last unnamed chat, and --session {session}: use one of them"
        )


def _no_prompt(named: str) -> str:
    """Return the name of a model. Raise OptionError if it reads as a prompt."""
    if " " in named and not Path(named).expanduser().exists():
        raise OptionError(
            f"{named}: no such model; to ask that, type mlxrunner generate {shlex.quote(named)}"
        )
    return named


def _conversation(
    ctx: click.Context,
    system: str | None,
    options: dict[str, Any],
    history: Any,
    keep_thinking: bool,
    greedy: bool,
) -> Conversation:
    """Return an empty conversation with the options that were typed, to which no model belongs yet.

    Raise OptionError for an option that is wrong, before the model is loaded.
    """
    from mlxrunner.chat.conversation import Conversation
    from mlxrunner.options import GenerateOptions

    GenerateOptions.of(**options)
    if history == "template" and keep_thinking:
        raise OptionError(
            "keep_thinking needs history = exact: with template, the template decides what stays"
        )
    variables = options.pop("template") or {}
    typed = typed_options(ctx, options, greedy=greedy)
    runner: Any = None
    return Conversation(runner, system, typed, history, keep_thinking, variables)


def _run(chat: Chat, table: CommandTable, saving: Saving, *, is_resumed: bool) -> None:
    """Talk until the user leaves, save, and exit with the chat's code."""
    from mlxrunner.terminal.control import uninterrupted

    conversation = chat.conversation
    if chat.interactive and not is_resumed:
        chat.introduce()
    if chat.interactive and (chat.model != "demo" or conversation.effective):
        chat.say(f"sampling: {conversation.sampling} (/set shows and changes it)")
    saving.begin(chat, is_resumed)
    try:
        code = chat.run(table)
    finally:
        with uninterrupted():
            saving.end(chat)
            if chat.interactive:
                saving.say_how_to_continue(chat)
    if code:
        sys.exit(code)


def _take_usual_options(chat: Chat) -> None:
    """Sample as the model that was just loaded suggests."""
    chat.conversation.usual = usual_options("chat", chat.model)


class _Argument(str):
    """One of the arguments, which is told from an equal one by its identity."""


@click.command(
    cls=HelpCommand,
    context_settings={"ignore_unknown_options": True},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[MODEL] [PROMPT]...")
@debug_option
@click.pass_context
def run(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """Chat with MODEL, or answer PROMPT or standard input, as `ollama run` does.

    It takes the options of `mlxrunner chat`, or with a prompt those of `mlxrunner generate`.

    \b
    mlxrunner run llama3.2:1b
    mlxrunner run llama3.2:1b "Why is the sky blue?"
    mlxrunner run llama3.2:1b "Summarize this" < notes.txt
    """
    command, given = _meant([_Argument(one) for one in arguments])
    inner = command.make_context(str(command.name), given, parent=ctx.parent)
    with inner:
        command.invoke(inner)


def _meant(arguments: list[str]) -> tuple[click.Command, list[str]]:
    """Return the command that is meant, and its arguments."""
    words = _words(generate, "words", arguments)
    if words is None and _words(chat, "named", arguments) is not None:
        return chat, arguments  # an option that only a chat has
    is_piped = sys.stdin is not None and not sys.stdin.isatty()
    if words is not None and len(words) < 2 and not is_piped:
        return chat, arguments
    words = words or ()
    options = [one for one in arguments if not any(one is word for word in words)]
    model = ["-m", words[0]] if words else []
    prompt = ["-p", " ".join(words[1:])] if words[1:] else []
    return generate, [*model, *prompt, *options]


def _words(command: click.Command, name: str, arguments: list[str]) -> tuple[str, ...] | None:
    """Return the words that `command` takes as argument `name`; None if it refuses an option."""
    try:
        found = command.make_parser(click.Context(command)).parse_args(list(arguments))[0]
    except click.UsageError:
        return None
    return found[name] if isinstance(found.get(name), tuple) else ()
