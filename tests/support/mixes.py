"""Mixes of the oracle's layers, how far each may be rewound, and prompts that follow a prompt."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrunner import Runner
from mlxrunner.testing import oracle_runner

NO_HELP = {"rewind_slack": 0, "checkpoint_budget": 0}
SLACK = {"rewind_slack": 4, "checkpoint_budget": 0}
CHECKPOINTS = {"rewind_slack": 2, "checkpoint_interval": 7, "checkpoint_budget": 10**6}
FEW = {"rewind_slack": 2, "checkpoint_interval": 5, "checkpoint_budget": 300}
ALL = ["full", "sliding", "recurrent", "composite", "chunked", "unknown"]
each_kind_and_all = pytest.mark.parametrize(
    "kinds", [*([kind] for kind in ALL), ALL], ids=lambda kinds: "-".join(kinds)
)
with_and_without_checkpoints = pytest.mark.parametrize(
    "options", [NO_HELP, CHECKPOINTS], ids=["alone", "checkpoints"]
)


class Mix:
    """Layers, and how they may be rewound."""

    def __init__(self, kinds: list[str], options: dict[str, int]) -> None:
        self.kinds, self.options = kinds, options

    def runner(self, **options: Any) -> Runner:
        return oracle_runner(self.kinds, **(self.options | options))


def mixes_of(named: dict[str, tuple[list[str], dict[str, int]]]) -> pytest.MarkDecorator:
    """Run a test with each mix, as its argument `mix`."""
    return pytest.mark.parametrize("mix", [Mix(*given) for given in named.values()], ids=named)


def next_prompts(said: list[int]) -> dict[str, list[int]]:
    """Return prompts that may follow the tokens of a request and its answer."""
    return {
        "next turn": [*said, 5, 6, 7],
        "the same again": said,
        "last token regenerated": said[:-1],
        "edited late": [*said[:-4], 9, 9, 9],
        "edited in the middle": [*said[: len(said) // 2], 8, 8],
        "edited early": [*said[:3], 8, 8],
        "another conversation": [99, 98, 97],
    }
