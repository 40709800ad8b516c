"""What differences mean: the limit, and what is said."""

from __future__ import annotations

import json
import math

import pytest

from mlxrunner.verify.report import DIFFERENT, FACTOR, LAST_PLACES, NOT_TESTED, OK, Difference, Report, Row

NOISE = Row("the same cold run twice", found=Difference(8, 8, 0.0), noise=Difference(8, 8, 0.01))


def report(*rows: Row, wrong_token: float = 5.0) -> Report:
    made = Report("m", "cpu", 100, "m on cpu", epsilon=1e-7, largest=10.0, wrong_token=wrong_token, rows=[NOISE, *rows])
    made.is_complete = True
    return made


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (Row("r", found=Difference(8, 8, 0.079)), OK),
        (Row("r", found=Difference(3, 8, 0.079)), OK),
        (Row("r", found=Difference(8, 8, 0.081)), DIFFERENT),
        (Row("r", found=Difference(8, 8, math.nan)), DIFFERENT),
        (Row("r", found=Difference(8, 8, math.inf)), DIFFERENT),
        (Row("r", found=Difference(8, 8, 0.0), fault="the entry is not true"), DIFFERENT),
        (Row("r"), DIFFERENT),
        (Row("r", untested="nothing could be reused"), NOT_TESTED),
        (Row("r", found=Difference(0, 0, 0.5), limit=1.0), OK),
        (Row("r", found=Difference(0, 0, 0.03), limit=0.02), DIFFERENT),
    ],
    ids=["within", "a tie within", "beyond", "not a number", "infinite", "fault", "nothing", "untested", "own limit", "beyond its own"],
)  # fmt: skip
def test_a_row_is_judged_by_the_noise_of_cold_runs(row: Row, verdict: str) -> None:
    """A few times the noise; a token that differs within it is a tie; what is not a number is different."""
    made = report(row)
    assert made.limit == pytest.approx(FACTOR * 0.01)
    assert made.verdict(row) == verdict
    assert made.passed == (verdict != DIFFERENT)
    assert verdict in made.table()
    assert json.loads(json.dumps(made.as_dict(), allow_nan=False))["rows"][1]["verdict"] == verdict


def test_the_limit_is_at_least_some_units_in_the_last_place() -> None:
    """Where cold runs happen to agree."""
    quiet = Report("m", "cpu", 100, epsilon=1e-3, largest=20.0, rows=[Row("r", Difference(8, 8, 0.0), Difference(8, 8, 0.0))])
    assert quiet.limit == pytest.approx(LAST_PLACES * 0.02)


def test_noise_that_hides_a_wrong_token_is_said() -> None:
    """Beyond the limit it is a remark; where cold runs differ as much as different prompts, nothing has been verified."""
    assert not report().is_blind
    assert "can't be told" not in report().table()
    hidden = report(wrong_token=0.05)
    assert hidden.is_blind
    assert hidden.passed
    assert "can't be told" in hidden.table()
    assert not report(wrong_token=0.01).passed
    assert not report(wrong_token=math.nan).passed


def test_an_interrupted_report_does_not_say_that_all_is_well() -> None:
    """Only what it has seen."""
    made = report(Row("append", found=Difference(8, 8, 0.0), reused=9, prompt=10))
    assert "2 of 2 rows tested, and reuse changes nothing" in made.table()
    made.is_complete = False
    assert "changes nothing" not in made.table()
    assert "Interrupted after 2 rows" in made.table()
    assert made.as_dict()["passed"] is False
