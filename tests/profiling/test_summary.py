"""Events in, figures out."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from support.events import afternoon, as_event, example_event, summary_of

from mlxrunner.profiling.report.summary import (
    BINS,
    MOST_PLACES,
    NOWHERE,
    SAMPLES,
    Summary,
    Times,
    by_tokens,
    place_of,
)


def test_rates_are_of_tokens_and_of_requests() -> None:

    def asked(prompt: int, cached: int, **more: object) -> dict[str, Any]:
        saved = {f"{name}_tokens": cached for name in ("cached", "saved", "matched")}
        counts = {"prompt_tokens": prompt, "evaluated_tokens": prompt - cached, "lost_tokens": 0}
        return example_event(**saved, **counts, **more)

    hit = asked(100, 99, outcome="hit", reason=None)
    summary = summary_of(hit, asked(900, 0, outcome="miss", reason="empty"))
    assert summary.hit_rate == pytest.approx(0.099)
    assert summary.request_hit_rate == 0.5
    assert summary.outcomes == {"hit": 1, "miss": 1}


def test_what_was_evaluated_in_advance_is_nothing_reused() -> None:
    names = ("prompt", "cached", "prefetched", "saved", "evaluated", "lost")
    counts = zip((f"{name}_tokens" for name in names), (64, 60, 50, 10, 4, 3), strict=True)
    summary = summary_of(example_event(**dict(counts)))
    assert summary.hit_rate == pytest.approx(10 / 64)
    (one,) = summary.timeline.bins
    assert (one.cached, one.displaced, one.new, one.prompt) == (10, 3, 51, 64)
    assert summary.as_dict()["tokens"]["prefetched"] == 50


def test_rates_per_second_leave_out_what_was_never_evaluated() -> None:
    """Interrupted prefills count for nothing, and an answer's first token for its prefill."""
    whole = example_event(
        evaluated_tokens=200, prefill_s=0.1, ttft_s=0.11, completion_tokens=11, decode_s=0.05
    )
    none = dict.fromkeys(("prefill_s", "ttft_s", "decode_s"))
    broken = example_event(evaluated_tokens=5000, completion_tokens=0, finish="interrupted", **none)
    summary = summary_of(whole, broken)
    assert summary.prefill_rate == pytest.approx(2000)
    assert summary.decode_rate == pytest.approx(200)
    assert list(summary.ttft["partial"].as_dict().values()) == [1, 0.11, 0.11, 0.11]


def test_percentiles_are_times_that_occurred() -> None:
    """The nearest rank: of 1 .. 100, p99 is 99; of one, itself; of none, nothing."""
    times = Times()
    assert list(times.as_dict().values()) == [0, None, None, None]
    times.values.append(7)
    assert list(times.as_dict().values()) == [1, 7, 7, 7]
    times.values[:] = array("d", range(1, 101))
    assert list(times.as_dict().values()) == [100, 50, 90, 99]


def test_losses_are_counted_by_reason_and_by_place_with_what_they_cost() -> None:
    diverged = example_event(prompt_tokens=900, lost_tokens=100, prefill_rate=1000.0)
    freed = example_event(
        prompt_tokens=900, reason="entry_freed", divergence=None, lost_tokens=50, prefill_rate=None
    )
    summary = summary_of(
        diverged, diverged, freed, example_event(reason="empty", lost_tokens=0, divergence=None)
    )
    lost = [(name, loss.requests, loss.tokens) for name, loss in by_tokens(summary.reasons)]
    assert lost == [("diverged", 2, 200), ("entry_freed", 1, 50), ("empty", 1, 0)]
    assert summary.reasons["diverged"].seconds == pytest.approx(0.2)
    places = {place: loss.tokens for place, loss in summary.places.items()}
    assert places == {"assistant: text": 200, NOWHERE: 50}


def test_the_costliest_misses_are_the_ten_that_took_longest() -> None:
    given = {"prompt_tokens": 900, "prefill_rate": 100.0}
    losses = {f"{n:012x}": (n * 37) % 101 for n in range(1, 60)}
    events = [example_event(id=id, lost_tokens=lost, **given) for id, lost in losses.items()]
    expected = sorted(events, key=lambda event: -event["lost_tokens"])[:10]
    assert [m.id for m in summary_of(*events).costliest] == [event["id"] for event in expected]


@pytest.mark.parametrize("count", [1, BINS, BINS + 1, 5 * BINS + 3])
def test_the_timeline_has_few_bins_and_all_tokens(count: int) -> None:
    events = list(afternoon(count))
    timeline = summary_of(*events).timeline
    assert len(timeline.bins) <= BINS
    assert sum(one.requests for one in timeline.bins) == count
    assert all(one.requests == timeline.width for one in timeline.bins[:-1])
    prompts, peaks = zip(*((e["prompt_tokens"], e["peak_bytes"]) for e in events), strict=True)
    assert sum(one.prompt for one in timeline.bins) == sum(prompts)
    assert max(one.peak_bytes for one in timeline.bins) == max(peaks)


def test_memory_is_bounded_whatever_the_file_says() -> None:
    summary = Summary()
    for number in range(SAMPLES + 1000):
        divergence = example_event()["divergence"] | {"role": f"role {number} " + "x" * 10_000}
        summary.add(as_event(example_event(model=f"model {number}", divergence=divergence)))
    assert len(summary.places) <= MOST_PLACES + 1
    assert max(map(len, summary.places)) < 60
    assert len(summary.models) <= MOST_PLACES + 1
    assert sum(summary.models.values()) == SAMPLES + 1000
    assert len(summary.samples) == SAMPLES


def test_a_place_is_named_by_role_and_part() -> None:
    divergence = example_event()["divergence"]
    for changed, name in (
        (divergence, "assistant: text"),
        (divergence | {"part": "template_header"}, "assistant: template header"),
        (divergence | {"role": None, "part": None}, "somewhere"),
        (None, NOWHERE),
    ):
        assert place_of(as_event(example_event(divergence=changed))) == name


def test_the_json_form_is_json_without_text_of_prompts() -> None:
    """The output of --json can be stored anywhere."""
    printed = json.dumps(summary_of(*afternoon(50), example_event()).as_dict(), allow_nan=False)
    assert "Your name is" not in printed
    assert json.loads(printed)["requests"] == 51
