"""`mlxrunner cache`: exchange the caches of sessions with prompt-cache files of mlx-lm."""

from __future__ import annotations

import json

import click

from mlxrunner.cli.options import debug_option, model_option
from mlxrunner.cli.words import session_words
from mlxrunner.errors import OptionError, ReadError
from mlxrunner.system.reading import read_json

MOST_BYTES = 2**25
"""Most bytes of a file of token ids: about four million of them."""


@click.group()
@debug_option
def cache() -> None:
    """Exchange caches with mlx-lm: its prompt-cache files (mlx_lm.cache_prompt, mlx_lm.generate
    --prompt-cache-file).
    """


@cache.command()
@click.argument("session", shell_complete=session_words)
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@debug_option
def export(session: str, file: str, force: bool) -> None:
    """Write the caches of SESSION to FILE.safetensors for mlx-lm, with their tokens in its
    metadata.
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
@click.option(
    "--trust",
    is_flag=True,
    help=(
        "Take your word for what FILE can't tell: that MODEL made it, and of exactly these tokens."
    ),
)
@debug_option
def import_(
    file: str, name: str, model: str, tokens: str | None, kv_bits: int | None, trust: bool
) -> None:
    """Make a session of FILE, a prompt cache of mlx-lm: a chat whose prompt begins with its tokens
    goes on from there.
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
