"""`mlxrunner sessions` and `mlxrunner cache`: saved chats and their caches."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

import click

from mlxrunner.cli.options import debug_option, flag, json_option, model_option, session_words
from mlxrunner.cli.program import HelpGroup, visible_text
from mlxrunner.errors import OptionError, ReadError, SessionError
from mlxrunner.system.reading import read_json

if TYPE_CHECKING:
    from mlxrunner.sessions.session import Session
    from mlxrunner.sessions.store import SessionStore


@click.group(cls=HelpGroup, invoke_without_command=True)
@json_option
@debug_option
@click.pass_context
def sessions(ctx: click.Context, as_json: bool) -> None:
    """List the saved conversations (see `chat --session`), as `sessions list` does; `show`,
    `export` and `rm` take one.
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_, as_json=as_json)
    elif as_json:
        raise OptionError("--json lists saved chats: give it without a command, or after it")


@sessions.command(name="list")
@json_option
@debug_option
def list_(as_json: bool) -> None:
    """List the saved sessions, then unnamed chats.

    With turns, sizes of text and caches, date and model.
    """
    from mlxrunner.sessions.store import SessionStore, unnamed_chats

    store = SessionStore()
    found: list[dict[str, Any]] = []
    unnamed = unnamed_chats(store)
    for name in [*(name for name in store.names() if name not in unnamed), *unnamed]:
        try:
            found.append(_described(store, name, store.load(name)))
        except SessionError as error:
            click.echo(visible_text(f"mlxrunner: {error}"), err=True)
    if as_json:
        click.echo(json.dumps(found))
    elif not found:
        click.echo("no sessions yet: `mlxrunner chat --session NAME` begins one", err=True)
    if as_json or not found:
        return
    _print_table(found, get_terminal_size().columns if sys.stdout.isatty() else 10**6)


def _print_table(found: list[dict[str, Any]], width: int) -> None:
    """Print a line of at most `width` characters for each session, if the names leave room."""
    from mlxrunner.terminal.output import size

    long = max(4, *(len(one["name"]) for one in found))
    is_wide = width - long >= 61
    room = max(12, width - long - (45 if is_wide else 27))
    form = f"{{:{long}}}  {{:>5}}  {'{:>7}  {:>7}  ' if is_wide else '{:.0}{:.0}'}{{:16}}  {{}}"
    click.echo(form.format("name", "turns", "text", "caches", "saved", "model"))
    for one in found:
        caches = size(one["cache_bytes"]) if one["cache_bytes"] else "none"
        others = f"  and {', '.join(one['branches'])}" if one["branches"] else ""
        model = " ".join(one["model"].split())
        if len(model + others) <= room:
            model += others
        elif len(model) > room:
            model = model.rpartition("/")[2]
        if len(model) > room:
            model = f"{model[: room - 9]}...{model[-6:]}"
        sizes = size(one["text_bytes"]), caches
        click.echo(
            visible_text(form.format(one["name"], one["turns"], *sizes, one["saved"], model))
        )


branch_option = click.option(
    "--branch", metavar="NAME", help="Take this branch. [default: the one used last]"
)


state_option = click.option(
    "--state",
    type=click.IntRange(min=1),
    metavar="N",
    help="Take the text as it was before the last /undo, /clear or the like; 2: the one before.",
)


@sessions.command()
@click.argument("name", shell_complete=session_words)
@branch_option
@state_option
@json_option
@debug_option
def show(name: str, branch: str | None, state: int | None, as_json: bool) -> None:
    """Show session NAME: its settings, branches and messages."""
    from mlxrunner.sessions.store import SessionStore
    from mlxrunner.terminal.output import size

    store = SessionStore()
    session = _chosen(store, name, branch, state)
    about = _described(store, name, session)
    if as_json:
        click.echo(
            json.dumps(
                {
                    **about,
                    "system": session.system,
                    "settings": session.settings,
                    "messages": session.messages,
                }
            )
        )
        return
    states = len(store.load_states(name)) if state is None else 0
    rows = {
        "model": " ".join(session.model.split()),
        "saved": about["saved"],
        "turns": f"{about['turns']}"
        + (f" on branch {session.branch}" if len(session.branches) > 1 else ""),
        "branches": ", ".join(sorted(session.branches)) if len(session.branches) > 1 else "",
        "tokens": f"{about['tokens']}",
        "states": f"{states} before commands: --state 1 shows the last, /redo brings it back"
        if states
        else "",
        "caches": size(about["cache_bytes"])
        if about["cache_bytes"]
        else "none: the first turn evaluates the conversation again",
        "settings": ", ".join(
            f"{key} {value}"
            for key, value in _flat(session.settings)
            if value not in (None, [], {}, False)
        ),
        "system": session.system or "",
    }
    for row, value in rows.items():
        if value:
            click.echo(visible_text(f"{row:9} {value}"))
    for message in session.messages:
        click.echo(visible_text(f"{message['role']}: {message['content']}"))


@sessions.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=session_words)
@debug_option
def rm(names: tuple[str, ...]) -> None:
    """Remove sessions with text and caches, except those open in a chat."""
    from mlxrunner.sessions.store import SessionStore

    store, failed = SessionStore(), []
    for name in dict.fromkeys(names):
        try:
            store.remove(name)
        except SessionError as error:
            failed.append(str(error))
    if failed:
        raise SessionError("; ".join(failed))


@sessions.command()
@click.argument("name", shell_complete=session_words)
@click.argument("file", type=click.Path(dir_okay=False))
@branch_option
@state_option
@flag("--force", help="Overwrite FILE.")
@debug_option
def export(name: str, file: str, branch: str | None, state: int | None, force: bool) -> None:
    """Write the conversation of session NAME to a file.

    FILE.json is JSON, anything else is Markdown, and - is standard output.
    """
    from pathlib import Path

    from mlxrunner.chat.commands import transcript
    from mlxrunner.sessions.store import SessionStore
    from mlxrunner.system.writing import why_not, written

    session = _chosen(SessionStore(), name, branch, state)
    text = transcript(file, session.system, session.messages, session.model)
    if file == "-":
        click.echo(visible_text(text), nl=False)
        return
    try:
        with written(Path(file), force=force) as stream:
            stream.write(text)
    except FileExistsError as error:
        raise OptionError(f"{file} is there already: --force overwrites it") from error
    except OSError as error:
        raise OptionError(f"{file}: {why_not(error, file)}") from error
    turns = len(session.messages) // 2
    click.echo(visible_text(f"{turns} turn{'' if turns == 1 else 's'} written to {file}"), err=True)


def _flat(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value)
        else:
            yield key, value


def _chosen(store: SessionStore, name: str, branch: str | None, state: int | None) -> Session:
    """Return the session, or a state of it, with `branch` as its present one.

    Raise SessionError if it has no such state, or no branch of that name.
    """
    session = store.load(name)
    if state is not None:
        states = store.load_states(name)
        if state > len(states):
            raise SessionError(f"the session {name!r} has no state {state}: it has {len(states)}")
        session = states[state - 1]
    if branch is not None and branch not in session.branches:
        raise SessionError(
            f"the session {name!r} has no branch {branch!r}: "
            f"there are {', '.join(sorted(session.branches))}"
        )
    session.branch = session.branch if branch is None else branch
    return session


def _described(store: SessionStore, name: str, session: Session) -> dict[str, Any]:
    from datetime import datetime

    from mlxrunner.sessions.session import LATEST

    text_bytes, cache_bytes = store.nbytes(name)
    # A file that was edited does not say when it was saved.
    at = session.saved_at or min(max(store.saved_ns(name) / 1e9, 0), LATEST)
    saved = datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M")
    turns, tokens = len(session.history.turns), len(session.history.rendering.tokens)
    return {
        "name": name,
        "model": session.model,
        "turns": turns,
        "tokens": tokens,
        "saved": saved,
        "text_bytes": text_bytes,
        "cache_bytes": cache_bytes,
        "branches": sorted({*session.branches} - {session.branch}),
    }


MOST_BYTES = 2**25
"""Most bytes of a file of token ids: about four million of them."""


@click.group(cls=HelpGroup)
@debug_option
def cache() -> None:
    """Exchange caches with mlx-lm: its prompt-cache files (mlx_lm.cache_prompt, mlx_lm.generate
    --prompt-cache-file).
    """


@cache.command(name="export")
@click.argument("session", shell_complete=session_words)
@click.argument("file", type=click.Path(dir_okay=False))
@flag("--force", help="Overwrite FILE.")
@debug_option
def export_cache(session: str, file: str, force: bool) -> None:
    """Write the caches of SESSION to FILE.safetensors for mlx-lm.

    Their tokens are in its metadata.
    """
    from pathlib import Path

    from mlxrunner.sessions.exchange import export_session

    if Path(file).exists() and not force:
        raise OptionError(f"{file} is there already: --force overwrites it")
    tokens = export_session(session, Path(file))
    click.echo(f"{tokens} tokens", err=True)


@cache.command(name="import")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--session", "name", required=True, metavar="NAME", help="The session to create.")
@model_option("The model that made the file.")
@click.option(
    "--tokens",
    metavar="IDS",
    help=(
        "The tokens of the file, as [1, 2 ...] or @FILE. [default: as an export of mlxrunner says]"
    ),
)
@click.option(
    "--kv-bits", type=int, metavar="B", help="8 or 4, for a file with quantized keys and values."
)
@flag(
    "--trust",
    help="Take your word for what FILE can't tell: that MODEL made it, and of exactly these "
    "tokens.",
)
@debug_option
def import_(
    file: str, name: str, model: str, tokens: str | None, kv_bits: int | None, trust: bool
) -> None:
    """Make a session of FILE, a prompt cache of mlx-lm.

    A chat whose prompt begins with its tokens reuses them.
    """
    from pathlib import Path

    from mlxrunner.sessions.exchange import import_session

    count = import_session(
        Path(file),
        name,
        model,
        None if tokens is None else _tokens(tokens),
        kv_bits,
        trust=trust,
    )
    click.echo(
        f"{count} tokens: in `mlxrunner chat --session {name}`, a prompt that begins with them "
        "does not evaluate them again",
        err=True,
    )


def _tokens(text: str) -> list[int]:
    try:
        found = (
            read_json(text[1:], MOST_BYTES, given=True)
            if text.startswith("@")
            else json.loads(text)
        )
    except ReadError as error:
        raise OptionError(f"--tokens: {error}") from error
    except (ValueError, RecursionError) as error:
        raise OptionError(
            f"--tokens: {text[:60]} is not readable as a JSON list: "
            f"{' '.join(str(error).split())[:100]}"
        ) from error
    if not isinstance(found, list):
        raise OptionError(f"--tokens: has to be a list of token ids, as [1, 2, 3], not {text[:60]}")
    return found
