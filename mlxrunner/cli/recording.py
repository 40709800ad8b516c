"""Options that record and verify requests, for every command that generates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from mlxrunner.cli.options import events_option, take, together
from mlxrunner.cli.program import F
from mlxrunner.errors import OptionError

if TYPE_CHECKING:
    from mlxrunner.profiling.profile import Profile

WATCHING = ("events", "log_text", "log_tokens", "metrics", "verify_cache")
RECORDING = (*WATCHING, "strict")


def recording_options(command: F) -> F:
    """Add the options that `recording` reads."""
    strict = click.option(
        "--strict", is_flag=True, help="With --verify-cache: exit code 4 if one of them differed."
    )
    return watching_options(strict(command))


def watching_options(command: F) -> F:
    """Add the same options without --strict, for a command with a --strict of its own."""
    return together(
        (
            events_option,
            click.option(
                "--log-text",
                is_flag=True,
                help=(
                    "With --events: a few tokens' text where a prompt leaves the entry, not "
                    "only hashes."
                ),
            ),
            click.option(
                "--log-tokens",
                metavar="FILE",
                envvar="MLXRUNNER_LOG_TOKENS",
                show_envvar=True,
                help="Append each request's token ids, which are its text, for mlxrunner simulate.",
            ),
            click.option(
                "--metrics",
                metavar="FILE",
                help=(
                    "Keep counters of the requests in FILE, in Prometheus text format "
                    "(textfile collector)."
                ),
            ),
            click.option(
                "--verify-cache",
                type=float,
                default=0.0,
                metavar="RATE",
                help=(
                    "Run this share of the requests that reused something again cold, and "
                    "compare: 0 to 1.  [default: 0]"
                ),
            ),
        )
    )(command)


@contextmanager
def recording(options: dict[str, Any], command: str) -> Iterator[Profile]:
    """Yield a Profile made of the recording options, which are taken out of `options`.

    Attach it to each runner that is loaded. It is closed at the end. Raise OptionError if the
    options contradict each other.
    """
    taken = take(options, RECORDING)
    if taken["log_text"] and not taken["events"]:
        raise OptionError("--log-text says what --events writes: give it a file, too")
    if command != "batch" and taken["strict"] and not taken["verify_cache"]:
        raise OptionError("--strict needs --verify-cache RATE to find a difference")
    from mlxrunner.profiling.report.report import must_differ

    must_differ(
        {
            "--events": taken["events"],
            "--log-tokens": taken["log_tokens"],
            "--metrics": taken["metrics"],
        }
    )
    from mlxrunner.profiling.profile import Profile, profiled

    sinks = []
    if taken["metrics"]:
        from mlxrunner.profiling.metrics import MetricsFile

        sinks.append(MetricsFile(taken["metrics"]))
    profile = Profile(
        command,
        events=taken["events"],
        tokens=taken["log_tokens"],
        log_text=taken["log_text"],
        verify=taken["verify_cache"],
        sinks=sinks,
    )
    with profiled(profile, strict=taken["strict"]):
        yield profile
    if taken["strict"] and taken["verify_cache"]:
        click.echo(
            f"mlxrunner: {profile.verified} of {profile.eligible} requests that reused something "
            "were verified",
            err=True,
        )
