"""The names that options had in version 0.2: each works, and a line names the one of today."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from mlxrunner import OptionError, ParallelRunner
from mlxrunner.cli import main
from mlxrunner.cli.options import option_of, together
from mlxrunner.config.file import read_config_file
from mlxrunner.config.option import former_names, option, with_current_names
from mlxrunner.options import OpenSettings, ServeSettings


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of each kind, with former names."""

    size: int = option(1, int, "A number.", low=0, was=("bulk",))
    texts: tuple[str, ...] = option((), str, "Texts.", is_list=True, was=("words",))
    loud: bool = option(False, bool, "A flag.", was=("noisy",))
    safe: bool = option(True, bool, "Be unsafe.", was=("guarded", "guard"))


@click.command()
@together(tuple(option_of(Settings, name) for name in ("size", "texts", "loud", "safe")))
@click.pass_context
def command(ctx: click.Context, /, **given: object) -> None:
    sources = {name for name in given if ctx.get_parameter_source(name).name == "COMMANDLINE"}  # type: ignore[union-attr]
    click.echo(f"{sorted(given.items())} {sorted(sources)}")


def run(*arguments: str) -> tuple[str, str]:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


@pytest.mark.parametrize(
    ("old", "new", "notes"),
    [
        (["--bulk", "2"], ["--size", "2"], ["--bulk is called --size"]),
        (["--bulk=2"], ["--size=2"], ["--bulk is called --size"]),
        (["--bulk=2", "--size=3"], ["--size=3"], ["--bulk is called --size"]),
        (["--words=a", "--words=b"], ["--texts=a", "--texts=b"], ["--words is called --texts"]),
        (["--words=a", "--texts=b"], ["--texts=a", "--texts=b"], ["--words is called --texts"]),
        (["--texts", "--words"], ["--texts", "--words"], []),
        (["--noisy"], ["--loud"], ["--noisy is called --loud"]),
        (["--no-guarded"], ["--no-safe"], ["--no-guarded is called --no-safe"]),
        (["--no-guard"], ["--no-safe"], ["--no-guard is called --no-safe"]),
    ],
    ids=str,
)
def test_a_former_flag_is_the_one_of_today(
    old: list[str], new: list[str], notes: list[str]
) -> None:
    """With the same value and the same source, and a line for each that was typed."""
    wanted, found = run(*new), run(*old)
    said = [f"{note} now; the old name is read until version 0.4\n" for note in notes]
    assert (found[0], found[1], wanted[1]) == (wanted[0], "".join(said), "")


def test_a_wrong_value_is_that_of_the_name_of_today() -> None:
    result = CliRunner().invoke(command, ["--bulk", "x"])
    assert (result.exit_code, "Invalid value for '--size'" in result.stderr) == (2, True)


def test_help_and_completion_show_the_names_of_today_only() -> None:
    shown = CliRunner().invoke(command, ["--help"]).stdout
    completed = {
        one.value for one in ShellComplete(command, {}, "x", "X").get_completions([], "--")
    }
    assert completed == {"--size", "--texts", "--loud", "--no-safe", "--help"}
    assert not [old for old in former_names(Settings) if f"--{old}" in shown]


def test_former_keyword_arguments() -> None:
    """Each has a warning; both names together are an error."""
    with pytest.warns(DeprecationWarning, match="bulk is called size now; the old name is read"):
        assert with_current_names(Settings, {"bulk": 2, "loud": True}) == {"size": 2, "loud": True}
    with pytest.raises(OptionError, match="bulk, size: they are the same, use size"):
        with_current_names(Settings, {"bulk": 2, "size": 2})


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ('origin = ["http://a"]', "allow_origin", ("http://a",)),
        ('no-rule = "billing-header"', "disable_rewrite", ("billing-header",)),
        ("park-bytes = 5", "disk_cache_bytes", 5),
        ("parks = false", "disk_cache", False),
    ],
)
def test_a_former_key_of_the_config_file(
    own_home: Path, line: str, name: str, value: object
) -> None:
    """It holds, and the server names its line and the key of today."""
    file = own_home / ".config" / "mlxrunner" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text(f"[serve]\n{line}\n")
    setting = read_config_file().options("serve", "demo")[name]
    assert (setting.value, setting.source) == (value, "config.toml line 2")
    note = f"config.toml line 2: {line.split()[0].replace('-', '_')} is called {name} now"
    result = CliRunner().invoke(main, ["serve", "--port", "99999"])
    assert (result.exit_code, result.stderr.startswith(note)) == (2, True), result.stderr
    file.write_text(f"[serve]\n{line}\n{name} = []\n")
    with pytest.raises(OptionError, match=f"{name} is there twice: keep one of them"):
        read_config_file()


def test_the_names_of_version_0_2_are_read() -> None:
    """Command lines, config files and programs of that version have them."""
    assert former_names(ServeSettings) == {
        "origin": "allow_origin",
        "no_rule": "disable_rewrite",
        "park_bytes": "disk_cache_bytes",
        "parks": "disk_cache",
        "park": "disk_cache",
    }
    assert former_names(OpenSettings) == {
        "cells": "kv_cache_tokens",
        "memory": "cache_memory",
        "step_ms": "max_step_ms",
        "park_bytes": "disk_cache_bytes",
        "park_folder": "disk_cache_dir",
    }


def test_a_runner_takes_the_former_names(tmp_path: Path) -> None:
    former: Any = {"cells": 80, "step_ms": 5, "park_bytes": 10**6, "park_folder": tmp_path}
    with pytest.warns(DeprecationWarning, match="called kv_cache_tokens"):
        runner = ParallelRunner.load(max_sequences=1, context=64, reserve=False, **former)
    with runner, pytest.warns(DeprecationWarning, match="cells is called"):
        assert runner.cells == runner.kv_cache_tokens == 80
    assert runner.settings["max_step_ms"] == 5
    assert [*tmp_path.iterdir()]
