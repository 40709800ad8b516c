"""The sample of the suite that runs without `--everything`: it makes `make test` short.

A test with many cases runs CASES of them, or as many as its mark `exhaustive(count)` says. A
property runs fewer random examples, and a test that loops over its cases asks `fewer`. The sample
is the same each time, so a failure can be repeated, `git bisect` finds the commit that broke a
test, and two people see the same. `make test-all` runs everything, with new random examples each
time. Where the variable CI is set, they are the same each time, too: a commit passes or fails by
what it changes.
"""

from __future__ import annotations

import os
from collections import defaultdict
from hashlib import sha256

import pytest
from hypothesis import HealthCheck, settings

SHARE = 8
"""Random examples with `--everything` for each one of the sample."""
CASES = 2
"""Cases of each test in the sample, where no mark says otherwise."""
FEWEST = 10
"""Fewest random examples of a property in the sample."""

_is_everything = False


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        "--everything",
        action="store_true",
        help="run the exhaustive tests whole and all random examples, not a sample of them",
    )


def configure(config: pytest.Config) -> None:
    """Choose between everything and the sample, before any test module is imported."""
    global _is_everything
    _is_everything = config.getoption("--everything")
    settings.register_profile(
        "mlxrunner",
        max_examples=_scaled(100),
        deadline=None,
        derandomize=not _is_everything or "CI" in os.environ,
        database=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    settings.load_profile("mlxrunner")


def examples(count: int) -> settings:
    """Decorate a property that wants `count` random examples with `--everything`."""
    return settings(max_examples=_scaled(count))


def _scaled(count: int) -> int:
    return count if _is_everything else min(count, max(FEWEST, count // SHARE))


def fewer(count: int, least: int) -> int:
    """Return `count` with `--everything`, else `least`: for a test that loops over its cases."""
    return count if _is_everything else least


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the sample of each test in `items`.

    Tests that are asked for by name (`file.py::test`) run whole.
    """
    if _is_everything or any("::" in argument for argument in config.args):
        return
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function):
            tests[item.nodeid.partition("[")[0]].append(item)
    left_out = {case for cases in tests.values() for case in {*cases} - {*drawn(cases)}}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def drawn(cases: list[pytest.Function]) -> list[pytest.Function]:
    """Draw CASES of one test's `cases`, or as many as its mark says.

    The ids that the mark names come first, then cases with new parameters.
    """
    marker = cases[0].get_closest_marker("exhaustive")
    count, *named = [CASES] if marker is None else marker.args
    shuffled = sorted(
        cases,
        key=lambda case: (
            not any(case.name.endswith(f"[{name}]") for name in named),
            sha256(case.name.encode()).digest(),
        ),
    )
    first: list[pytest.Function] = []
    seen: set[tuple[str, int]] = set()
    for case in shuffled:
        values = set(case.callspec.indices.items()) if hasattr(case, "callspec") else set()
        if not values <= seen:
            first.append(case)
            seen |= values
    rest = [case for case in shuffled if case not in first]
    return [*first, *rest][:count]
