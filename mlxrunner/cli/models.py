"""`mlxrunner models`: list, download and remove the models of the hub cache."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from mlxrunner.cli.options import debug_option, json_option, model_words, repository_words
from mlxrunner.cli.program import HelpGroup, line_text, visible_text
from mlxrunner.config.names import hub_id_of
from mlxrunner.errors import ModelError, OptionError

if TYPE_CHECKING:
    from mlxrunner.models.resolve import CachedModel


@click.group(cls=HelpGroup, invoke_without_command=True)
@click.option(
    "--known", is_flag=True, help="List models with short names, and which fit this machine."
)
@json_option
@debug_option
@click.pass_context
def models(ctx: click.Context, known: bool, as_json: bool) -> None:
    """List the models in the local hub cache: size on disk, last use, context, and whether they fit
    into memory. `models pull` downloads one, `models rm` removes one.
    """
    if ctx.invoked_subcommand is not None:
        if as_json or known:
            flag = "--json" if as_json else "--known"
            raise OptionError(f"{flag} lists models: give it without a command")
        return
    if known:
        _list_known(as_json)
        return
    from mlxrunner.models.resolve import cached_models

    found = cached_models()
    rows = _described(found)
    if as_json:
        click.echo(json.dumps(rows))
    elif not rows:
        click.echo(
            "no models in the hub cache yet: `mlxrunner models --known` lists some, and "
            "`mlxrunner models pull llama3.2:1b` downloads one",
            err=True,
        )
    else:
        _print_table(rows)


def _list_known(as_json: bool) -> None:
    """Print the models with short names, by their sizes."""
    from mlxrunner.config.names import known_models
    from mlxrunner.models.download import repositories
    from mlxrunner.system.device import offered_bytes
    from mlxrunner.terminal.output import size

    offered, here = offered_bytes(), set(repositories())
    rows: list[dict[str, Any]] = [
        {
            "name": one.name,
            "model": one.hub_id,
            "bytes": one.nbytes,
            "fits": one.needed_bytes <= offered,
            "downloaded": one.hub_id in here,
        }
        for one in sorted(set(known_models().values()), key=lambda one: (one.nbytes, one.name))
    ]
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        fit = "fits" if row["fits"] else "too large"
        mark = "downloaded" if row["downloaded"] else fit
        click.echo(f"{size(row['bytes']):>7}  {row['name']:18}  {mark:10}  {row['model']}")
    click.echo(
        f"{size(offered)} of memory can be used here. Sizes are rough; `mlxrunner plan NAME` "
        "computes them.\nThe authors of mlxrunner have not tried these models: `mlxrunner verify "
        "NAME` does it for you.\nAny other model in MLX's format has its hub id as name: "
        "OWNER/NAME.",
        err=True,
    )


@models.command()
@click.argument("name", metavar="ID", required=False, shell_complete=model_words)
@click.option("-m", "--model", metavar="ID", shell_complete=model_words, help="The same as ID.")
@click.option(
    "--trust-remote-code",
    is_flag=True,
    help="Download Python code that the model brings, too; it is not run.",
)
@debug_option
def pull(name: str | None, model: str | None, trust_remote_code: bool) -> None:
    """Download the model ID (OWNER/NAME, or a short name).

    Fetches safetensors, tokenizer, settings and chat template, also of a newer revision, after a
    check of the disk space. After Ctrl-C or a broken connection, the same command resumes.
    """
    from mlxrunner.models.resolve import pull
    from mlxrunner.terminal.output import size

    if (name is None) == (model is None):
        raise click.UsageError("Give one ID: `mlxrunner models --known` lists short names.")
    name = hub_id_of(name or model or "")
    folder = pull(name, with_code=trust_remote_code)
    nbytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    click.echo(visible_text(f"{name}: {size(nbytes)} in {folder}"))


@models.command()
@click.argument("names", nargs=-1, required=True, metavar="ID...", shell_complete=repository_words)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@debug_option
def rm(names: tuple[str, ...], yes: bool) -> None:
    """Remove models from the hub cache, after confirmation.

    Removes every revision and partial downloads, nothing outside the hub cache. A process that has
    loaded the model keeps it.
    """
    from mlxrunner.models.resolve import must_be_removable, removable_bytes, remove
    from mlxrunner.terminal.output import size

    chosen = list(dict.fromkeys(map(hub_id_of, names)))
    for name in chosen:
        must_be_removable(name)
    if not yes:
        what = ", ".join(f"{name} ({size(removable_bytes(name))})" for name in chosen)
        _must_agree(f"remove {what}?")
    for name in chosen:
        freed = remove(name)
        click.echo(f"{visible_text(name)}: {size(freed)} freed")


def _must_agree(question: str) -> None:
    """Ask, and end the program with code 1 after a no. Raise OptionError if nobody can answer."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise OptionError(f"{question} --yes removes without asking, which needs a terminal")
    if not click.confirm(visible_text(question), err=True):
        click.echo("nothing was removed", err=True)
        sys.exit(1)


def _described(found: list[CachedModel]) -> list[dict[str, Any]]:
    from mlxrunner.terminal.output import PATIENCE_S, Progress

    progress, rows = Progress(patience_s=PATIENCE_S), []
    try:
        for number, one in enumerate(found):
            progress.update(f"reading {one.name}", number, len(found))
            rows.append(_description(one))
    finally:
        progress.close()
    return rows


def _description(model: CachedModel) -> dict[str, Any]:
    from datetime import UTC, datetime

    from mlxrunner.loading import context_and_plan
    from mlxrunner.models.resolve import last_use

    used = last_use(model.name)
    row: dict[str, Any] = {
        "name": model.name,
        "bytes": model.nbytes,
        "folder": str(model.folder),
        "last_used": None if used is None else datetime.fromtimestamp(round(used), UTC).isoformat(),
        "context": None,
        "fits": None,
        "largest_context": None,
        "problem": None,
    }
    try:
        context, plan = context_and_plan(str(model.folder))
    except ModelError as error:
        return row | {"problem": str(error)}
    return row | {"context": context, "fits": plan.fits, "largest_context": plan.largest_context}


def _print_table(rows: list[dict[str, Any]]) -> None:
    from mlxrunner.terminal.output import size

    lines = [
        (
            f"{size(row['bytes']):>7}",
            row["name"],
            "" if row["context"] is None else f"{row['context']} tokens",
            _used(row["last_used"]),
            _fit(row),
        )
        for row in rows
    ]
    wide = [max(len(line[column]) for line in lines) for column in range(4)]
    for size_, name, context, used, fit in lines:
        click.echo(
            visible_text(
                f"{size_}  {name:<{wide[1]}}  {context:>{wide[2]}}  {used:<{wide[3]}}  {fit}"
            )
        )


def _used(moment: str | None) -> str:
    """Return the time of the last use in the user's time zone."""
    from datetime import datetime

    if moment is None:
        return "never used"
    return f"used {datetime.fromisoformat(moment).astimezone():%Y-%m-%d %H:%M}"


def _fit(row: dict[str, Any]) -> str:
    """Say in a few words if a model fits."""
    if row["problem"] is not None:
        return f"can't be run: {line_text(row['problem'])}"
    if not row["fits"]:
        return "does not fit"
    if row["largest_context"] < row["context"]:
        return f"fits with a context of {row['largest_context']} tokens"
    return "fits"
