"""Memory is wired as `wire` says, on a faked GPU that records MLX's limit."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from click.testing import CliRunner
from support.models import write_model

from mlxrunner import OptionError, ParallelRunner, Runner, cli
from mlxrunner.engine.engine import Engine
from mlxrunner.loading import plan_model
from mlxrunner.options import WIRE
from mlxrunner.system import device
from mlxrunner.terminal.output import size

RECOMMENDED = 10**9


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The limits that MLX was told, in order. Nothing of earlier tests is wired."""
    gc.collect()
    told = list[int]()
    monkeypatch.setattr(device, "is_gpu", lambda: True)
    monkeypatch.setattr(device, "preferred_dtype", lambda: mx.float32)
    monkeypatch.setattr(
        device, "describe", lambda: {"max_recommended_working_set_size": RECOMMENDED}
    )
    monkeypatch.setattr(mx, "set_wired_limit", told.append)
    monkeypatch.setattr(device, "_wired", {})
    yield told
    gc.collect()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    write_model(tmp_path / "model", max_position_embeddings=256)
    return str(tmp_path / "model")


OPENERS: dict[str, Callable[..., Any]] = {
    "reserved": Runner.load,
    "growing": lambda folder, **options: Runner.load(folder, reserve=False, **options),
    "for each request": lambda folder, **options: Runner.load(folder, reserve="request", **options),
    "several": lambda folder, **options: Engine.load(folder, max_sequences=2, **options),
    "several, growing": lambda folder, **options: Engine.load(
        folder, max_sequences=2, reserve=False, **options
    ),
}


@pytest.mark.parametrize("wire", WIRE)
@pytest.mark.parametrize("opened", OPENERS.values(), ids=OPENERS.keys())
def test_each_way_wires_what_it_says(
    folder: str, limits: list[int], wire: str, opened: Callable[..., Any]
) -> None:
    """The weights alone by default; and MLX is never asked where nothing is to be wired."""
    with opened(folder, wire=wire) as runner:
        weights = plan_model(folder).lines[0].total
        if wire == "none":
            assert limits == []
        elif wire == "weights":
            assert limits == [weights]
        else:
            assert weights < limits[-1] <= RECOMMENDED
            assert runner.plan is None or limits == [runner.plan.total]


def test_the_limit_is_the_sum_of_all_models_and_falls_with_each(
    folder: str, limits: list[int]
) -> None:
    runners = [Runner.load(folder, reserve=False) for _ in range(2)]
    runners.append(Runner.load(folder, reserve=False, wire="none"))
    weights = plan_model(folder).lines[0].total
    assert limits == [weights, 2 * weights]
    for left in (1, 0):
        runners[left].close()
        gc.collect()
        assert limits[-1] == left * weights
    count = len(limits)
    runners[2].close()
    gc.collect()
    assert len(limits) == count


def test_a_draft_model_is_wired_beside_its_model(folder: str, limits: list[int]) -> None:
    with Runner.load(folder, reserve=False, draft_model=folder):
        assert limits[-1] == 2 * plan_model(folder).lines[0].total
    with Engine.load(folder, max_sequences=2, draft_model=folder, wire="all"):
        assert limits[-1] > 2 * plan_model(folder).lines[0].total


def test_no_more_is_wired_than_the_device_recommends(folder: str, limits: list[int]) -> None:
    """Two models ask for more here."""
    models = [object_of(weight) for weight in (RECOMMENDED - 5, 10)]
    assert limits == [RECOMMENDED - 5, RECOMMENDED]
    del models[1]
    assert limits[-1] == RECOMMENDED - 5


def object_of(nbytes: int) -> Any:
    """Return something that can be freed, wired with that many bytes."""
    model = type("Model", (), {})()
    device.wire(model, nbytes)
    return model


def test_a_thread_of_its_own_wires_too(folder: str, limits: list[int]) -> None:
    """A server's engines have one each."""
    with ParallelRunner.load(folder, max_sequences=2):
        assert limits == [plan_model(folder).lines[0].total]


def test_an_unknown_way_is_refused(folder: str) -> None:
    for load in (Runner.load, OPENERS["several"]):
        with pytest.raises(OptionError, match=r"wire: 'some' is not known, .* weights, all, none"):
            load(folder, wire="some")


def test_plan_and_doctor_say_what_is_wired(folder: str, limits: list[int]) -> None:
    """With what it risks; nothing is wired for that."""
    weights = size(plan_model(folder).lines[0].total)
    for wire, said in (("weights", weights), ("all", "all"), ("none", "0 B")):
        result = CliRunner().invoke(cli.main, ["plan", folder, "--wire", wire])
        (line,) = (line for line in result.stdout.splitlines() if line.startswith("wired: "))
        assert said in line
        assert line.endswith(f"({wire}): {WIRE[wire]}")
    wired = json.loads(CliRunner().invoke(cli.main, ["plan", folder, "--json"]).stdout)["wired"]
    assert size(wired) == weights
    assert "wired memory   the weights" in CliRunner().invoke(cli.main, ["doctor"]).stdout
    assert limits == []
