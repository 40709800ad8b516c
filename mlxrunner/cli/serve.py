"""`mlxrunner serve`: answer the requests of other programs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxrunner.cli.options import (
    Configured,
    debug_option,
    draft_option,
    events_option,
    flag,
    model_argument,
    option_of,
    set_option,
    take,
    together,
    trust_option,
    verbose_option,
    wire_option,
)
from mlxrunner.cli.program import F, visible_text
from mlxrunner.config.file import read_config_file
from mlxrunner.config.option import described, names
from mlxrunner.errors import OptionError
from mlxrunner.options import GenerateOptions, RunnerSettings, ServeSettings
from mlxrunner.system.imports import how_to_install

if TYPE_CHECKING:
    from mlxrunner.profiling.metrics import RequestLog
    from mlxrunner.server.manager import ModelManager
    from mlxrunner.server.models import ModelLoader, ServedModel
    from mlxrunner.server.supervisor import RequestJournal, ServerWorker

PACKAGES = ("fastapi", "uvicorn", "uvloop", "prometheus_client")
"""The packages of the extra `serve`."""
RUNNER = names(RunnerSettings)
"""The settings of each model's runner."""
OFF = {"claude_names": "--no-claude-names"}
"""Settings that are on, with the flags that turn them off."""
KEY_NOTE = (
    "the key is not in this file: put it into the config file, as api_key in [serve]; "
    "mlxrunner config shows its path"
)
GUESSES = described(GenerateOptions)["speculate"].help + " [default: auto]"
"""Help of an option that says nothing by itself, so that the config file may."""


def _option(name: str) -> Callable[[F], F]:
    changes: dict[str, Any] = {}
    if name == "api_key":
        changes = {"envvar": "MLXRUNNER_API_KEY", "show_envvar": True}
    return option_of(ServeSettings, name, OFF.get(name), **changes)


@click.command(cls=Configured)
@model_argument
@together(tuple(_option(name) for name in names(ServeSettings)))
@together(tuple(option_of(RunnerSettings, name) for name in RUNNER))
@option_of(GenerateOptions, "speculate", default=None, help=GUESSES)
@draft_option
@wire_option
@events_option
@flag("--log-text", help="Add the text of prompts to events, where they leave the prefix cache.")
@click.option(
    "--unit",
    "unit_kind",
    type=click.Choice(["launchd", "systemd"]),
    help="Print a file that lets launchd or systemd run the server, and end.",
)
@trust_option
@set_option
@verbose_option
@debug_option
def serve(
    model: str,
    unit_kind: Any,
    speculate: str | None,
    draft_model: str | None,
    wire: str,
    events: str | None,
    log_text: bool,
    trust_remote_code: bool,
    **options: Any,
) -> None:
    """Serve MODEL to other programs on this machine, in the protocols of OpenAI, Anthropic and
    Ollama.

    Conversations share memory and common prefixes. Evicted conversations go to the disk cache, and
    come back with their next request, also after a restart. Requests may name other models of the
    hub cache; the least recently used model is unloaded if memory is needed.

    Ctrl-C or kill stops the server: running requests have 10 seconds (`drain` in the config file),
    conversations go to the disk cache (exit code 0). A second Ctrl-C leaves at once (130).
    """
    usual = vars(RunnerSettings())
    runner = {k: value for k, value in take(options, RUNNER).items() if value != usual[k]}
    RunnerSettings.of(**runner)
    ranks = click.get_current_context().meta.get("ranks")
    settings = ServeSettings(**options)
    if ranks is not None:
        settings = replace(settings, disk_cache=False)  # files would have the part of one rank
    for package in PACKAGES:
        if find_spec(package) is None:
            raise OptionError(f"serve needs the package {package}: {how_to_install('serve')}")
    from mlxrunner.server import supervisor
    from mlxrunner.terminal.control import uninterrupted

    worker = supervisor.ServerWorker.started()
    if worker is None:
        supervisor.check_settings(settings)
        _warn_of_key_for_all()
        if unit_kind is not None:
            _print_unit(unit_kind, settings)
            return
        if ranks is None:
            with supervisor.listen(settings) as listening:
                sys.exit(supervisor.supervise(listening))
    with uninterrupted():  # pydantic turns an interrupt of its own work into another error
        from mlxrunner.profiling.metrics import RequestLog
        from mlxrunner.server import server  # noqa: F401  # imports all that it needs
        from mlxrunner.server.models import ModelLoader

    record = RequestLog(events, log_text=log_text)
    opening = ModelLoader(
        settings=settings,
        runner=runner,
        speculate=speculate,
        draft_model=draft_model,
        wire=wire,
        trust_remote_code=trust_remote_code,
        ranks=ranks,
    )
    _serve(model, opening, record, worker)


def _serve(
    model: str, opening: ModelLoader, record: RequestLog, worker: ServerWorker | None
) -> None:
    """Load the first model and answer until a signal comes, on the socket of `worker` if given."""
    from mlxrunner.server import server, supervisor
    from mlxrunner.terminal.control import orderly_end

    settings, ranks = opening.settings, opening.ranks
    journal = None if worker is None else worker.journal
    with (
        orderly_end(),
        supervisor.listen(settings) if worker is None else worker.listening as listening,
    ):
        manager, opened = _loaded(model, opening, record, journal)
        address = supervisor.address_of(listening, settings.host)
        count = len(ranks.shares) if ranks else 1
        lines = server.welcome(opened, manager.names.shown, address, settings, count)
        if journal is not None and journal.restarts:
            lines = [f"serving {manager.names.shown} again at {address}"]
        shown = visible_text("\n".join(lines))

        def ready() -> None:
            click.echo(shown, err=True)
            if journal is not None:
                journal.ready()

        server.serve(manager, record, settings, listening, ready, journal)


def _loaded(
    model: str, opening: ModelLoader, record: RequestLog, journal: RequestJournal | None
) -> tuple[ModelManager, ServedModel]:
    """Load the first model, with a bar in a terminal."""
    from mlxrunner.models.resolve import resolve
    from mlxrunner.server.manager import ModelManager, ModelNames
    from mlxrunner.terminal.output import loading

    is_shared = opening.ranks is not None
    for name in filter(None, (model, opening.draft_model)):
        if not is_shared:
            resolve(name, with_code=opening.trust_remote_code)  # a download shows a bar of its own
    names = ModelNames(
        model,
        read_config_file().aliases,
        only_first=is_shared,
        has_claude=opening.settings.claude_names,
    )
    manager = ModelManager(names, opening, record.watch, record.ended)
    if journal is not None:
        manager.on_prompt = journal.prompt
    with loading(model, leaves=True) as show:
        return manager, manager.load_first(show)


def _print_unit(kind: Any, settings: ServeSettings) -> None:
    from mlxrunner.server.launch import unit

    arguments = _without(("--unit", "--api-key"), sys.argv[1:])
    program = Path(sys.argv[0]).absolute()
    # What `python -m` runs is a file that no system can run by itself.
    is_module = program.name == "__main__.py"
    begin = [sys.executable, "-m", "mlxrunner"] if is_module else [str(program)]
    command, folder = [*begin, *arguments], Path.cwd()
    source = click.get_current_context().get_parameter_source("api_key")
    is_of_file = source is click.core.ParameterSource.DEFAULT
    notes = () if is_of_file else (KEY_NOTE,)
    environment = os.environ
    text = unit(kind, command, folder, drain=settings.drain, environment=environment, notes=notes)
    click.echo(text, nl=False)
    for note in notes:
        click.echo(note, err=True)


def _without(flags: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return arguments without `flags` and their values."""
    left, rest = list[str](), iter(arguments)
    for one in rest:
        flag, equals, _ = one.partition("=")
        if flag not in flags:
            left.append(one)
        elif not equals:
            next(rest, None)
    return left


def _warn_of_key_for_all() -> None:
    """Say so if others can read the key in the config file."""
    config = read_config_file()
    if config.path is None or "api_key" not in config.sections["serve"]:
        return
    mode = config.path.stat().st_mode & 0o777
    if mode & 0o044:
        path = visible_text(str(config.path))
        click.echo(f"others can read the key in {path} (mode {mode:04o}): chmod 600 it", err=True)
