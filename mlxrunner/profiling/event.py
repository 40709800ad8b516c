"""One request as an event: a flat dict with the fields of schema.json, and the same as a line for people. No tensors."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxrunner.observation import Observation

SCHEMA, VERSION = "mlxrunner/events", 1
_FROM_USAGE = (
    "prompt_tokens", "matched_tokens", "cached_tokens", "ahead_tokens", "evaluated_tokens", "trimmed_tokens", "completion_tokens",
    "shifted_tokens", "reevaluated_tokens", "lost_tokens", "outcome", "reason", "freed_by", "rewind_limited_by", "checkpoint",
    "used_bytes", "cache_bytes", "peak_bytes",
)  # fmt: skip
_usage_values = attrgetter(*_FROM_USAGE)
_encode = json.JSONEncoder(separators=(",", ":")).encode
_LOGGED = (
    "command", "number", "outcome", "reason", "freed_by", "rewind_limited_by", "prompt_tokens", "matched_tokens", "cached_tokens",
    "ahead_tokens", "evaluated_tokens", "trimmed_tokens", "lost_tokens", "completion_tokens", "shifted_tokens",
    "entry_tokens_after", "finish", "error", "ttft_s", "total_s", "prefill_rate", "decode_rate", "saved_s", "cache_bytes",
    "request_bytes", "id",
)  # fmt: skip


_LOGGED_ZERO = {"divergence_index", "divergence_message", "verify_equal", "verify_first_difference"}


def event_of(observed: Observation, identity: Mapping[str, Any], number: int) -> dict[str, Any]:
    """What is known of a request by itself; `identity`: process, command, model, fingerprint; `number`: of the request among theirs.

    `divergence`, `saved_s`, `verify` and `profile_s` are left for those who know them.
    """
    usage, lookup, answered = observed.usage, observed.lookup, observed.usage.completion_tokens
    began = observed.clock.began
    prefill = [
        chunk for chunk in observed.chunks if not answered or chunk[1] <= observed.clock.first
    ]
    evaluated, seconds = (
        sum(count for _, _, count in prefill),
        sum(end - begin for begin, end, _ in prefill),
    )
    started = "cold" if number == 1 else "warm"
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "id": f"{number:04x}{identity['process']}",
        "time": _moment(began),
        **identity,
        "number": number,
        "prompt_kind": observed.prepared.kind,
        "messages": len(observed.prepared.messages) or None,
        "finish": observed.finish,
        "error": observed.error,
        "entry_tokens": lookup.entry_tokens,
        "entry_tokens_after": len(observed.entry),
        **dict(zip(_FROM_USAGE, _usage_values(usage), strict=True)),
        "saved_tokens": lookup.reused,
        "saved_s": None,
        "run": f"{started}-{'restored' if lookup.is_restored else usage.outcome}",
        "divergence": None,
        "tokenize_s": _seconds(usage.tokenize_s),
        "lookup_s": _seconds(usage.lookup_s),
        "prefill_s": _seconds(usage.prefill_s) if answered else None,
        "ttft_s": _seconds(usage.ttft_s) if answered else None,
        "decode_s": _seconds(usage.decode_s) if answered else None,
        "total_s": _seconds(observed.ended - began),
        "profile_s": 0.0,
        "prefill_rate": round(evaluated / seconds, 1) if seconds else None,
        "decode_rate": round(usage.decode_rate, 1) or None,
        "request_bytes": max(0, usage.peak_bytes - observed.active_bytes),
        "spans": _spans(observed),
        "verify": None,
    }


def logfmt(event: Mapping[str, Any]) -> str:
    """The event as `key=value ...`, without what is nothing: counts, times and the place of a divergence, no text and no hashes."""
    fields = {name: event[name] for name in _LOGGED}
    if event["divergence"]:
        fields |= {
            f"divergence_{name}": event["divergence"][name]
            for name in ("index", "message", "role", "part")
        }
    if event["verify"]:
        fields |= {
            f"verify_{name}": event["verify"][name]
            for name in ("equal", "first_difference", "logits_difference")
        }
    kept = _LOGGED_ZERO | {name for name, value in fields.items() if value != 0}
    return " ".join(
        f"{name}={_value(value)}"
        for name, value in fields.items()
        if value is not None and name in kept
    )


def as_line(event: Mapping[str, Any]) -> str:
    return _encode(event)


def _spans(observed: Observation) -> list[dict[str, Any]]:
    clock, usage, lookup = observed.clock, observed.usage, observed.lookup
    began, matched_s = clock.began, usage.lookup_s - lookup.rewind_s
    spans = [("tokenize", began, usage.tokenize_s, usage.prompt_tokens)]
    spans.append(("lookup", clock.lookup_began, matched_s, usage.prompt_tokens))
    if lookup.rewind_s:
        spans.append(
            ("rewind", clock.lookup_began + matched_s, lookup.rewind_s, usage.trimmed_tokens)
        )
    spans += [("prefill", begin, end - begin, count) for begin, end, count in observed.chunks]
    if usage.completion_tokens > 1:
        spans.append(("decode", clock.first, usage.decode_s, usage.completion_tokens - 1))
    if usage.reevaluated_tokens:
        spans.sort(key=lambda span: span[1])
    return [
        {
            "name": name,
            "start_s": _seconds(begin - began),
            "duration_s": _seconds(took),
            "tokens": count,
        }
        for name, begin, took, count in spans
    ]


def _moment(began: float) -> str:
    """A moment on time.perf_counter as UTC."""
    # time.strftime would look for the time zone each time.
    return (
        datetime.fromtimestamp(time.time() - (time.perf_counter() - began), UTC).isoformat(
            timespec="microseconds"
        )[:-6]
        + "Z"
    )


def _seconds(value: float) -> float:
    return round(value, 7) if value > 0 else 0.0


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return (
        text if text and all(c.isprintable() and c not in ' "=' for c in text) else json.dumps(text)
    )
