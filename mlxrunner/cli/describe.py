"""`mlxrunner show`, `plan`, `doctor`, `config`, `completion` and `models`: say what there is."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import get_completion_class

from mlxrunner.cli.options import (
    MEMORY_OPTIONS,
    debug_option,
    flag,
    json_option,
    model_argument,
    model_words,
    repository_words,
    together,
    wire_option,
)
from mlxrunner.cli.program import HelpCommand, HelpGroup, key_text, line_text, visible_text
from mlxrunner.config.file import (
    COMMANDS,
    EVERYWHERE,
    KEYS,
    OPTIONS,
    Config,
    config_path,
    read_config_file,
)
from mlxrunner.config.names import hub_id_of
from mlxrunner.config.option import MODEL, Setting, layer, settled
from mlxrunner.errors import ModelError, OptionError
from mlxrunner.options import WIRE

if TYPE_CHECKING:
    from mlxrunner.models.resolve import CachedModel


@click.command(cls=HelpCommand)
@model_argument
@json_option
@debug_option
def show(model: str, as_json: bool) -> None:
    """Describe MODEL without loading its weights: architecture, layers, context, bytes per token,
    and the tokens and texts that end answers.
    """
    from dataclasses import asdict

    from mlxrunner.models.load import describe, ends_of
    from mlxrunner.terminal.output import one_line, size

    facts = describe(model)
    try:
        ends, problem = ends_of(model), ""
    except ModelError as error:
        ends, problem = [], one_line(str(error))
    if as_json:
        listed = None if problem else list(map(asdict, ends))
        click.echo(json.dumps({**facts.as_dict(), "ends": listed}))
        return
    context = f"{facts.context} tokens" + (
        "" if facts.context_is_known else " (not stated: a guess)"
    )
    rows = {
        "architecture": facts.architecture,
        "layers": ", ".join(f"{count} {kind}" for kind, count in facts.layers.items()),
        "context": context,
        "vocabulary": f"{facts.vocab} tokens",
        "weights": size(facts.weight_bytes)
        + (
            f" in files, {size(facts.loaded_bytes)} in memory"
            if size(facts.weight_bytes) != size(facts.loaded_bytes)
            else ""
        ),
        "cache": f"{size(facts.cache.per_token)} per token"
        + (f" and {size(facts.cache.fixed)} whatever the length" if facts.cache.fixed else "")
        + f"; {size(facts.cache.per_token * facts.context + facts.cache.fixed)} "
        "for the whole context",
        "ends": "; ".join(map(_end_text, ends)) or (f"not known: {problem}" if problem else "none"),
    }
    for name, value in rows.items():
        click.echo(f"{name:13} {visible_text(value)}")


def _end_text(end: Any) -> str:
    """Return an end of answers, such as `<|im_end|> (2: config.json, chat template)`."""
    number = "" if end.token is None else f"{end.token}: "
    text = end.text if end.token is not None else repr(end.text)
    return f"{text} ({number}{', '.join(end.places)})"


@click.command(cls=HelpCommand)
@model_argument
@together(MEMORY_OPTIONS)
@wire_option
@flag("--measure", help="Load the model and run the worst-case batch instead of estimating it.")
@json_option
@debug_option
def plan(model: str, measure: bool, as_json: bool, wire: str, **options: Any) -> None:
    """Compute the memory of MODEL for a context, and the largest context that fits.

    Works from config.json and the headers of the weight files, without loading them. Exit code 2 if
    it does not fit.
    """
    from mlxrunner.loading import plan_model
    from mlxrunner.runner import Runner
    from mlxrunner.system import device
    from mlxrunner.terminal.output import loading, size

    made = plan_model(model, **options)
    if measure and made.fits:
        with loading(model, leaves=True) as show:
            loaded = Runner.load(model, progress=show, **{**options, "context": made.context})
        made = loaded.plan or made
    wired = device.wirable(made.wired(wire))
    if as_json:
        click.echo(json.dumps(made.as_dict() | {"wired": wired}))
    else:
        *rows, advice = made.table().splitlines()
        if device.is_gpu():
            rows.append(f"wired: {size(wired)} ({wire}): {WIRE[wire]}")
        click.echo("\n".join([*rows, advice]))
    sys.exit(0 if made.fits else 2)


@click.command(cls=HelpCommand)
@json_option
@debug_option
def doctor(as_json: bool) -> None:
    """Check device, memory and libraries of this machine, and say how to fix problems."""
    from dataclasses import asdict

    from mlxrunner.system.device import findings

    found = findings()
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in found]))
        return
    for finding in found:
        click.echo(f"{'ok ' if finding.ok else '!! '} {finding.name:14} {finding.value}")
        if finding.advice:
            click.echo(f"    {'':14} {finding.advice}")


WIDTH = 20
HIDDEN = "***"
"""The value that is shown for a key."""


@click.command(cls=HelpCommand)
@model_argument
@flag("--keys", help="List the keys that the file may have, by section.")
@json_option
@debug_option
@click.pass_context
def config(ctx: click.Context, /, model: str, keys: bool, as_json: bool) -> None:
    """Show the config file and the options in effect for MODEL.

    By default, MODEL is that of a command without -m. A model that is not on this machine is not
    downloaded.
    """
    if keys:
        _list_keys(ctx, as_json)
        return
    found = read_config_file()
    suggested, note = _suggested(model)
    holding = {
        command: _shown(settled(layer(suggested, MODEL), found.options(command, model)))
        for command in COMMANDS
    }
    if as_json:
        click.echo(json.dumps(_as_dict(found, model, holding)))
        return
    rows = {
        "file": _file(found),
        "model": f"{model}{note}",
        "aliases": ", ".join(f"{name} = {model}" for name, model in found.aliases.items()),
        "system prompts": ", ".join(f"@{name}" for name in found.prompts),
        "prompt templates": ", ".join(found.templates),
    }
    for name, value in rows.items():
        if value:
            click.echo(visible_text(f"{name:{WIDTH}}{' '.join(value.split())}"))
    for line in _lines(holding):
        click.echo(visible_text(line))


def _list_keys(ctx: click.Context, as_json: bool) -> None:
    """Print the keys of each section with the help of their options."""
    commands = ctx.find_root().command.commands  # type: ignore[attr-defined]  # it is a group
    helps = {
        str(one.name): key_text(one, ctx)
        for command in COMMANDS
        for one in commands[command].params
        if isinstance(one, click.Option) and not str(one.name).startswith("former_")
    }
    sections = {OPTIONS: EVERYWHERE} | {one: KEYS[one] - EVERYWHERE for one in COMMANDS}
    rows = {one: {key: helps[key] for key in sorted(keys)} for one, keys in sections.items()}
    if as_json:
        click.echo(json.dumps(rows))
        return
    formatter = ctx.make_formatter()
    for section, texts in rows.items():
        if texts:
            with formatter.section(f"[{section}]"):
                formatter.write_dl([*texts.items()])
    click.echo(formatter.getvalue().strip())


def _suggested(model: str) -> tuple[dict[str, Any], str]:
    """Return what the model suggests, and a note about it."""
    from mlxrunner.models.files import suggestion_of
    from mlxrunner.models.resolve import HUB_ID, folder_if_here

    folder = folder_if_here(model)
    if folder is None:
        is_on_hub = HUB_ID.fullmatch(model) is not None
        return {}, " (not on this machine yet)" if is_on_hub else " (there is no such model)"
    found = suggestion_of(folder)
    return found.options, "" if found.problem is None else f" ({found.problem})"


def _shown(settings: dict[str, Setting]) -> dict[str, Setting]:
    """Return the settings without the key, which others may see over a shoulder or in a log."""
    hidden = (
        {"api_key": replace(settings["api_key"], value=HIDDEN)} if "api_key" in settings else {}
    )
    return settings | hidden


def _file(found: Config) -> str:
    path = config_path()
    if path is None:
        return "(none: MLXRUNNER_CONFIG is empty)"
    return str(path) if found.path is not None else f"{path} (there is none yet)"


def _lines(holding: dict[str, dict[str, Setting]]) -> list[str]:
    """Return a line for each value and the commands for which it holds."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for command, settings in holding.items():
        for name, setting in settings.items():
            key = name, json.dumps(setting.value), setting.source
            rows.setdefault(key, []).append(command)
    return [
        f"{name:{WIDTH}}{value[:60]:16} ({source}) for {', '.join(commands)}"
        for (name, value, source), commands in rows.items()
    ] or ["every option has its built-in default"]


def _as_dict(found: Config, model: str, holding: dict[str, dict[str, Setting]]) -> dict[str, Any]:
    path = config_path()
    return {
        "file": None if path is None else str(path),
        "is_there": found.path is not None,
        "model": model,
        "aliases": dict(found.aliases),
        "prompts": dict(found.prompts),
        "templates": {name: vars(template) for name, template in found.templates.items()},
        "options": {
            command: {
                name: {"value": one.value, "source": one.source} for name, one in settings.items()
            }
            for command, settings in holding.items()
        },
    }


SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_MLXRUNNER_COMPLETE"
"""The variable of the environment in which the scripts ask for words."""


@click.command(cls=HelpCommand)
@click.argument("shell", type=click.Choice(SHELLS))
@debug_option
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands, options, models and sessions in SHELL.

    \b
    bash: add to ~/.bashrc    eval "$(mlxrunner completion bash)"
    zsh:  add to ~/.zshrc     eval "$(mlxrunner completion zsh)"
    fish: mlxrunner completion fish > ~/.config/fish/completions/mlxrunner.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "mlxrunner", VARIABLE).source())


@click.group(cls=HelpGroup, invoke_without_command=True)
@flag("--known", help="List models with short names, and which fit this machine.")
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
@flag("--trust-remote-code", help="Download Python code that the model brings, too; it is not run.")
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
@flag("-y", "--yes", help="Do not ask.")
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
