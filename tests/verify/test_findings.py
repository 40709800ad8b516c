"""Differences are judged by their limit, and told."""

from __future__ import annotations

import json
import math

import pytest

from mlxrunner.verify.findings import (
    DIFFERENT,
    FACTOR,
    LAST_PLACES,
    NOT_TESTED,
    OK,
    Check,
    Difference,
    Findings,
)

NOISE = Check("the same cold run twice", found=Difference(8, 8, 0.0), noise=Difference(8, 8, 0.01))


def report(*rows: Check, wrong_token: float = 5.0) -> Findings:
    made = Findings("m", "cpu", 100, "m on cpu", 1e-7, largest=10.0, wrong_token=wrong_token)
    made.checks, made.is_complete = [NOISE, *rows], True
    return made


JUDGED = {
    "within": (Check("r", found=Difference(8, 8, 0.079)), OK),
    "a tie within": (Check("r", found=Difference(3, 8, 0.079)), OK),
    "beyond": (Check("r", found=Difference(8, 8, 0.081)), DIFFERENT),
    "not a number": (Check("r", found=Difference(8, 8, math.nan)), DIFFERENT),
    "infinite": (Check("r", found=Difference(8, 8, math.inf)), DIFFERENT),
    "fault": (Check("r", found=Difference(8, 8, 0.0), fault="the entry is not true"), DIFFERENT),
    "nothing": (Check("r"), DIFFERENT),
    "untested": (Check("r", untested="nothing could be reused"), NOT_TESTED),
    "own limit": (Check("r", found=Difference(0, 0, 0.5), limit=1.0), OK),
    "beyond its own": (Check("r", found=Difference(0, 0, 0.03), limit=0.02), DIFFERENT),
}


@pytest.mark.parametrize(("row", "verdict"), JUDGED.values(), ids=JUDGED)
def test_a_row_is_judged_by_the_noise_of_cold_runs(row: Check, verdict: str) -> None:
    """A token within a few times the noise is a tie; what is not a number is different."""
    made = report(row)
    assert made.limit == pytest.approx(FACTOR * 0.01)
    assert made.verdict(row) == verdict
    assert made.passed == (verdict != DIFFERENT)
    assert verdict in made.table()
    assert json.loads(json.dumps(made.as_dict(), allow_nan=False))["rows"][1]["verdict"] == verdict


def test_the_limit_is_at_least_some_units_in_the_last_place() -> None:
    """Where cold runs happen to agree."""
    same = Check("r", Difference(8, 8, 0.0), Difference(8, 8, 0.0))
    quiet = Findings("m", "cpu", 100, epsilon=1e-3, largest=20.0, checks=[same])
    assert quiet.limit == pytest.approx(LAST_PLACES * 0.02)


@pytest.mark.parametrize("wrong_token", [0.08, 0.05, 0.01, math.nan])
def test_what_a_limit_hides_is_untested(wrong_token: float) -> None:
    """No row is called equal where one wrong token makes no more than the limit."""
    append = Check("append", found=Difference(0, 8, 0.07), reused=9, prompt=10)
    assert not report(append).is_blind
    assert "2 of 2 rows tested, and reuse changes nothing" in report(append).table()
    hidden = report(append, wrong_token=wrong_token)
    assert hidden.is_blind
    assert not hidden.passed
    assert not hidden.is_different
    assert {hidden.verdict(row) for row in hidden.checks} == {NOT_TESTED}
    assert "not tested: one wrong token would be within the limit" in hidden.table()
    assert "Nothing is proved." in hidden.table()
    assert "changes nothing" not in hidden.table()


def test_what_is_beyond_a_limit_that_hides_is_different() -> None:
    hidden = report(
        Check("append", Difference(0, 8, 3.0)),
        Check("moved", Difference(0, 0, 0.5), limit=1.0),
        wrong_token=0.05,
    )
    assert [hidden.verdict(row) for row in hidden.checks] == [NOT_TESTED, DIFFERENT, OK]
    assert hidden.is_different
    assert not hidden.passed


AT_ONCE = [
    *[(0.07, 0.0, OK), (0.09, 0.0, DIFFERENT), (0.09, 0.02, OK), (0.17, 0.02, DIFFERENT)],
    *[(0.07, 0.65, DIFFERENT), (0.0, math.nan, DIFFERENT), (0.0, math.inf, DIFFERENT)],
]


@pytest.mark.parametrize(("found", "apart", "verdict"), AT_ONCE)
def test_prompts_at_once_have_a_noise_of_their_own(
    found: float, apart: float, verdict: str
) -> None:
    """Prompts at once widen their own row's limit only, and not beyond a device's noise."""
    made = report(Check("two", found=Difference(8, 8, found), apart=Difference(8, 8, apart)))
    assert made.limit == pytest.approx(FACTOR * 0.01)
    assert made.verdict(made.checks[1]) == verdict
    assert ("is more than a device makes" in made.table()) == (not apart <= 0.64)
    assert made.passed == (verdict == OK)


def test_a_quiet_device_may_still_have_noise_in_a_row_of_two() -> None:
    """Up to a thousandth of what a wrong token makes; beyond, the row's limit would hide one."""
    quiet = Check("the same cold run twice", Difference(8, 8, 0.0), Difference(8, 8, 0.0))
    for apart, verdict in ((0.004, OK), (0.006, DIFFERENT)):
        found = Difference(8, 8, 8 * apart)
        made = report(Check("two", found, apart=Difference(8, 8, apart)))
        made.checks[0] = quiet
        assert made.verdict(made.checks[1]) == verdict


def test_an_interrupted_report_does_not_say_that_all_is_well() -> None:
    made = report(Check("append", found=Difference(8, 8, 0.0), reused=9, prompt=10))
    assert "2 of 2 rows tested, and reuse changes nothing" in made.table()
    made.is_complete = False
    assert "changes nothing" not in made.table()
    assert "Interrupted after 2 rows" in made.table()
    assert made.as_dict()["passed"] is False
