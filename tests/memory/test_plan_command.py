"""`mlxrunner plan` prints a plan before anything is loaded."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest
from click.testing import CliRunner, Result
from support.checks import refused

from mlxrunner import cli
from mlxrunner.loading import plan_model
from mlxrunner.system import device

# The command.


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["plan", *arguments])


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that the device offers, the same each time it is asked."""
    nbytes = 10**9
    monkeypatch.setattr(device, "offered_bytes", lambda: nbytes)
    return nbytes


def test_the_command_prints_the_table(offers: int) -> None:
    result = run("demo", "--prefill-step", "256")
    assert (result.stdout, result.stderr, result.exit_code) == (
        plan_model("demo", prefill_step=256).table() + "\n",
        "",
        0,
    )
    assert "(estimated)" in result.stdout


def test_the_options_of_the_command_are_those_of_the_plan(offers: int) -> None:
    result = run("demo", "--context", "700", "--kv-bits", "8", "--prefill-step", "100", "--json")
    plan = plan_model("demo", 700, kv_bits=8, prefill_step=100)
    assert json.loads(result.stdout) == json.loads(json.dumps(plan.as_dict() | {"wired": 0}))
    assert plan.lines[1].rows == 700
    assert plan.lines[1].row_bytes < plan_model("demo").lines[1].row_bytes / 3
    assert plan.lines[2].what == "batch of 100 tokens (estimated)"


@pytest.mark.parametrize("measure", [[], ["--measure"]], ids=["estimated", "measured"])
def test_a_plan_that_does_not_fit_is_exit_code_2(
    offers: int, measure: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the table on stdout all the same, what would fit, and nothing loaded."""
    monkeypatch.setattr(mx, "load", None)
    result = run("demo", "--context", "1000000", *measure)
    assert result.exit_code == 2
    assert "a context of 1000000 tokens does not fit; this would: --context " in result.stdout
    fitting = result.stdout.split()[-1]
    assert run("demo", "--context", fitting).exit_code == 0
    assert run("demo", "--context", str(int(fitting) + 1)).exit_code == 2
    read = json.loads(run("demo", "--context", "1000000", "--json", *measure).stdout)
    assert (read["fits"], read["largest_context"]) == (False, int(fitting))


def test_measure_runs_the_batch_and_says_so(offers: int) -> None:
    """Everything else is as it was estimated."""
    options = ["demo", "--context", "256", "--prefill-step", "32", "--json"]
    guessed, measured = (json.loads(run(*options, *more).stdout) for more in ([], ["--measure"]))
    assert (guessed["batch_is_measured"], measured["batch_is_measured"]) == (False, True)
    assert measured["lines"][:-1] == guessed["lines"][:-1]
    assert measured["lines"][-1]["what"] == "batch of 32 tokens (measured)"
    assert 0 < measured["lines"][-1]["total"] != guessed["lines"][-1]["total"]


@pytest.mark.parametrize("measure", [[], ["--measure"]], ids=["estimated", "measured"])
def test_a_model_that_is_nowhere_is_one_line_and_exit_code_2(measure: list[str]) -> None:
    refused(run("nowhere", *measure), "mlxrunner: nowhere: no such model")


def test_a_context_beyond_the_models_own_is_planned_as_asked(offers: int) -> None:
    """The context that fits is then reckoned beyond the model's own, too."""
    plan = plan_model("demo", 5000)
    assert plan.fits
    assert plan.largest_context == plan.context == 5000
