"""Made-up events, and events in the words of `mlxrunner explain`."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
from click.testing import CliRunner, Result

from mlxrunner import cli
from mlxrunner.profiling.profile import Profile
from mlxrunner.profiling.report.summary import Summary
from mlxrunner.profiling.schema import Event
from mlxrunner.results import with_new_names
from mlxrunner.runner import Runner
from mlxrunner.testing import oracle_runner

PREFILL_RATE, DECODE_RATE = 2400.0, 400.0
PLACES = [
    ("assistant", "thinking"),
    ("system", "text"),
    ("user", "text"),
    ("system", "tools"),
    ("assistant", "template_header"),
]
BEGIN = datetime(2026, 11, 20, 13, tzinfo=UTC)
HASHES = [f"{number:08x}" for number in range(1, 16)]
PARTIAL_HIT: dict[str, Any] = {
    "schema": "mlxrunner/events",
    "version": 1,
    "id": "00000000002a",
    "time": "2026-11-20T13:00:00.000000Z",
    "process": "a1b2c3d4",
    "number": 3,
    "command": "chat",
    "model": "demo",
    "max_sequences": 1,
    "fingerprint": "0123456789abcdef",
    "prompt_kind": "messages",
    "messages": 3,
    "finish": "stop",
    "error": None,
    "prompt_tokens": 64,
    "entry_tokens": 68,
    "matched_tokens": 30,
    "cached_tokens": 30,
    "prefetched_tokens": 0,
    "evaluated_tokens": 34,
    "trimmed_tokens": 38,
    "completion_tokens": 12,
    "shifted_tokens": 0,
    "reevaluated_tokens": 0,
    "entry_tokens_after": 75,
    "lost_tokens": 33,
    "saved_tokens": 30,
    "saved_s": 0.0101,
    "outcome": "partial",
    "reason": "diverged",
    "evicted_by": None,
    "trim_limited_by": None,
    "checkpoint": None,
    "run": "warm-partial",
    "divergence": {
        "index": 30,
        "message": 1,
        "role": "assistant",
        "part": "text",
        "common": {"tokens": HASHES[:8], "text": "assistant\n"},
        "previous": {
            "message": 1,
            "role": "assistant",
            "part": "thinking",
            "tokens": HASHES[8:11],
            "text": "<think>\nThe user",
        },
        "current": {
            "message": 1,
            "role": "assistant",
            "part": "text",
            "tokens": HASHES[11:],
            "text": "Your name is",
        },
    },
    "tokenize_s": 0.0011,
    "lookup_s": 0.0003,
    "prefill_s": 0.0104,
    "ttft_s": 0.0121,
    "decode_s": 0.0251,
    "total_s": 0.0375,
    "profile_s": 4e-05,
    "prefill_rate": 3269.2,
    "decode_rate": 438.2,
    "used_bytes": 387072,
    "cache_bytes": 18874368,
    "peak_bytes": 121000000,
    "request_bytes": 9000000,
    "spans": [
        {"name": "tokenize", "start_s": 0.0, "duration_s": 0.0011, "tokens": 64},
        {"name": "lookup", "start_s": 0.0011, "duration_s": 0.0002, "tokens": 64},
        {"name": "rewind", "start_s": 0.0013, "duration_s": 0.0001, "tokens": 38},
        {"name": "prefill", "start_s": 0.0015, "duration_s": 0.0104, "tokens": 34},
        {"name": "decode", "start_s": 0.0121, "duration_s": 0.0251, "tokens": 11},
    ],
    "verify": None,
}
"""A request that diverged: 30 of 64 prompt tokens are reused, 33 are lost."""


def example_event(**changes: Any) -> dict[str, Any]:
    """Return a copy of PARTIAL_HIT with other values in the fields `changes`."""
    return copy.deepcopy(PARTIAL_HIT) | changes


def as_event(line: dict[str, Any]) -> Event:
    """The event of a line; its counts need not fit together."""
    return msgspec.convert(with_new_names(line), Event)


def afternoon(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Return `count` requests of conversations that grow, are edited and begin again.

    Some are regenerated or think-stripped.
    """
    rng = random.Random(seed)
    clock, entry = BEGIN, 0
    kinds = ["append"] * 70 + ["strip"] * 15 + ["edit"] * 8 + ["new"] * 4 + ["freed"] * 3
    for number in range(1, count + 1):
        kind = "new" if entry > 12_000 else rng.choice(kinds)
        prompt = rng.randint(30, 900) if kind == "new" else entry + rng.randint(20, 400)
        matched = {
            "append": entry,
            "strip": max(entry - rng.randint(100, 900), 0),
            "edit": int(entry * rng.random()),
            "freed": 0,
        }.get(kind, 12)
        event = _request(
            rng, number, prompt, min(matched, entry, prompt), entry, is_freed=kind == "freed"
        )
        clock += timedelta(seconds=rng.expovariate(0.2))
        event["time"] = _rfc3339(clock)
        clock += timedelta(seconds=event["total_s"])
        entry = event["entry_tokens_after"]
        yield event


def _request(
    rng: random.Random, number: int, prompt: int, matched: int, entry: int, *, is_freed: bool
) -> dict[str, Any]:
    cached = min(matched, prompt - 1)
    is_limited = matched > 500 and rng.random() < 0.1
    if is_limited:
        cached = int(cached * rng.random())
    evaluated, answer = prompt - cached, rng.randint(2, 300)
    lost = max(min(entry, prompt - 1) - cached, 0)
    reason = (
        "empty"
        if entry == 0
        else "rewind_limited"
        if is_limited
        else "entry_freed"
        if is_freed
        else "diverged"
        if lost
        else None
    )
    outcome = "miss" if cached == 0 else "partial" if lost else "hit"
    prefill, decode = 0.004 + evaluated / PREFILL_RATE * rng.uniform(1, 1.3), answer / DECODE_RATE
    role, part = rng.choice(PLACES)
    divergence = (
        example_event()["divergence"] | {"index": matched, "role": role, "part": part}
        if reason in ("diverged", "rewind_limited")
        else None
    )
    return example_event(
        id=f"{number:012x}", number=number, prompt_tokens=prompt, entry_tokens=entry,
        matched_tokens=matched, cached_tokens=cached, evaluated_tokens=evaluated,
        trimmed_tokens=entry - cached, completion_tokens=answer,
        entry_tokens_after=prompt + answer - 1, lost_tokens=lost, saved_tokens=cached,
        saved_s=round(cached / PREFILL_RATE, 7), outcome=outcome, reason=reason,
        evicted_by="a reset" if reason == "entry_freed" else None,
        trim_limited_by="sliding" if is_limited else None,
        run=f"{'cold' if number == 1 else 'warm'}-{outcome}", divergence=divergence,
        prefill_s=round(prefill, 7), ttft_s=round(prefill + 0.002, 7), decode_s=round(decode, 7),
        total_s=round(prefill + decode + 0.0025, 7), prefill_rate=round(evaluated / prefill, 1),
        decode_rate=DECODE_RATE, used_bytes=(prompt + answer) * 9216, cache_bytes=125_829_120,
        peak_bytes=180_000_000 + evaluated * 30_000, request_bytes=evaluated * 30_000,
        spans=_spans(prompt, evaluated, answer, prefill, decode),
    )  # fmt: skip  # fields by subject


def _spans(
    prompt: int, evaluated: int, answer: int, prefill: float, decode: float
) -> list[dict[str, Any]]:
    spans = [("tokenize", 0.0, 0.0015, prompt), ("lookup", 0.0015, 0.0004, prompt)]
    begin = 0.002
    for done in range(0, evaluated, 2048):
        tokens = min(2048, evaluated - done)
        spans.append(("prefill", begin, prefill * tokens / evaluated, tokens))
        begin += prefill * tokens / evaluated
    spans.append(("decode", begin, decode, answer - 1))
    return [
        {"name": name, "start_s": round(at, 7), "duration_s": round(took, 7), "tokens": tokens}
        for name, at, took, tokens in spans
    ]


def _rfc3339(moment: datetime) -> str:
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def summary_of(*events: dict[str, Any]) -> Summary:
    summary = Summary()
    for event in events:
        summary.add(as_event(event))
    return summary


def watched(*layers: Any, **options: Any) -> tuple[Runner, list[Event]]:
    """Return an oracle runner, and the events of its requests as they come."""
    runner, seen = oracle_runner(*layers, **options), list[Event]()
    Profile(sinks=[seen.append]).watch(runner)
    return runner, seen


def run(*arguments: Any, stdin: str = "", code: int = 0) -> Result:
    result = CliRunner().invoke(cli.main, [str(argument) for argument in arguments], input=stdin)
    assert result.exit_code == code, result.stderr
    return result


def said(events: Path) -> str:
    """Return `mlxrunner explain EVENTS --last` as one line in lower case."""
    return " ".join(run("explain", events, "--last").stdout.lower().split())
