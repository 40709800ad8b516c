"""`--help`: the options that people use, under headings; `--help-all`: all of them."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from mlxrunner import OptionError, cli
from mlxrunner.cli.program import COMMANDS, HEADINGS, MANY, USED, flag_of, option_record
from mlxrunner.config.option import parse_size, size_text


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*path, name)
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))


PATHS = list(commands(cli.main))


def command_at(path: tuple[str, ...]) -> click.Command:
    command: click.Command = cli.main
    for name in path:
        command = command.commands[name]  # type: ignore[attr-defined]
    return command


def options_at(path: tuple[str, ...]) -> list[click.Option]:
    params = command_at(path).params
    return [one for one in params if isinstance(one, click.Option) and not one.hidden]


def shown(path: tuple[str, ...], flag: str) -> str:
    result = CliRunner().invoke(
        cli.main, [*path, flag], prog_name="mlxrunner", terminal_width=80, env={"COLUMNS": "80"}
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_program_lists_its_commands_in_the_order_of_use() -> None:
    """Each once, with a summary that is whole in 80 columns."""
    listed = [name for names in COMMANDS.values() for name in names]
    assert listed == list(cli.main.commands)
    text = " ".join(shown((), "--help").split())
    assert all(summary in text for names in COMMANDS.values() for summary in names.values())


@pytest.mark.exhaustive(len(PATHS))
@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_no_summary_is_cut_and_no_line_is_wide(path: tuple[str, ...]) -> None:
    for flag in ("--help", "--help-all") if path[-1] in USED else ("--help",):
        text = shown(path, flag)
        assert "...\n" not in text.partition("Commands:")[2]
        assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("name", USED)
def test_the_help_shows_about_a_dozen_options(name: str) -> None:
    """Under headings; every other option is in --help-all, under a heading of its kind."""
    flags = [flag_of(one) for one in options_at((name,))]
    used = USED[name].split()
    assert set(used) <= set(flags)
    assert 10 <= len(used) <= 14
    short, whole = shown((name,), "--help"), shown((name,), "--help-all")
    assert [flag for flag in flags if f"--{flag}" not in whole] == []
    assert f"--help-all` shows {len(flags) - len(used)} more" in " ".join(short.split())
    known = {flag for heading in HEADINGS.values() for flag in heading.split()}
    assert [flag for flag in flags if flag not in known] == []
    assert "Options:" not in whole


def test_a_command_that_shows_all_options_has_few() -> None:
    for path in PATHS:
        assert path[-1] in USED or len(options_at(path)) <= MANY, path


@pytest.mark.exhaustive(len(PATHS))
@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_every_option_with_a_value_shows_its_default(path: tuple[str, ...]) -> None:
    context = click.Context(command_at(path))
    for option in options_at(path):
        takes_one = not (option.is_flag or option.multiple or option.count or option.required)
        record = option_record(option, context)
        assert record is not None
        assert record[1].count("default:") == takes_one or not takes_one, option.name


ONE_MEANING = "prompt-template row-template prompt-var memory strict tokens port".split()


def test_an_option_name_has_one_meaning() -> None:
    """Names that once had two stand for one option; the old ones are still read, hidden."""
    helps: dict[str, set[str]] = {}
    for path in PATHS:
        for option in options_at(path):
            helps.setdefault(flag_of(option), set()).add(str(option.help))
    assert [name for name in ONE_MEANING if len(helps[name]) != 1] == []


FORMER = {
    ("generate", "--var"): "--prompt-var",
    ("generate", "--strict"): "--verify-strict",
    ("generate", "--template-var"): "--chat-template-var",
    ("chat", "--no-history"): "--no-input-history",
    ("batch", "--memory"): "--cache-memory",
    ("batch", "--prompt-template"): "--row-template",
    ("verify", "--tokens"): "--max-tokens",
    ("bench", "--context"): "--prompt-tokens",
    ("launch", "--port"): "--rank-port",
}


@pytest.mark.parametrize(("command", "old"), FORMER, ids=" ".join)
def test_a_former_name_is_read_with_a_note(command: str, old: str) -> None:
    """It gives its value to today's option."""
    found = cli.main.commands[command]
    former = next(one for one in found.params if old in one.opts)
    now = next(one for one in found.params if FORMER[command, old] in one.opts)
    assert isinstance(former, click.Option)
    assert former.hidden
    words = {"batch": ["in.jsonl"], "launch": ["claude"]}.get(command, [])
    value = [] if former.is_flag else ["a=1" if old.endswith("var") else "2000"]
    with CliRunner().isolation() as (_, err, _):
        context = found.make_context(command, [old, *value, *words])
        note = err.getvalue().decode()
    assert f"{old} is called {FORMER[command, old]} now" in note
    assert context.params[str(now.name)] not in (None, (), False)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GB", 8 * 10**9),
        ("8 gb", 8 * 10**9),
        ("1.5g", 1_500_000_000),
        ("2GiB", 2**31),
        ("500M", 5 * 10**8),
        ("1000000", 1_000_000),
        ("7b", 7),
    ],
)
def test_a_size_is_written_as_people_write_it(text: str, nbytes: int) -> None:
    """Decimal, as disks and Apple's tools count; with an i, binary."""
    assert parse_size("memory", text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "8 giga", "1e9", "8ib", "1" * 100])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"memory: .* is not a size, such as 8GB"):
        parse_size("memory", text)


def test_sizes_are_shown_so() -> None:
    assert [size_text(n) for n in (8 * 2**30, 10**9, 1500, 0)] == ["8GiB", "1GB", "1500", "0"]
    assert "[default: 8GiB]" in " ".join(shown(("serve",), "--help-all").split())
