"""Make the event of a request that has ended, and write an event as a line.

Files get JSON, and people get logfmt. No tensors.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from mlxrunner.profiling.schema import (
    SCHEMA,
    VERSION,
    BatchLine,
    ClientRequest,
    Draft,
    Event,
    Eviction,
    Span,
)

if TYPE_CHECKING:
    from mlxrunner.engine.observation import Observation
    from mlxrunner.results import Usage
    from mlxrunner.tokenizer.prompt import Caller

_LOGGED = """
command number outcome reason freed_by rewind_limited_by prompt_tokens matched_tokens cached_tokens
ahead_tokens evaluated_tokens trimmed_tokens lost_tokens completion_tokens shifted_tokens
entry_tokens_after finish error ttft_s total_s prefill_rate decode_rate saved_s cache_bytes
request_bytes id
""".split()
"""The fields of a logfmt line, in its order."""
_LOGGED_ZERO = {"divergence_index", "divergence_message", "verify_equal", "verify_first_difference"}
"""The fields of a logfmt line that mean something if they are 0 or false."""
_encode = json.JSONEncoder(separators=(",", ":"), default=vars, check_circular=False).encode


def event_of(observed: Observation, identity: Mapping[str, Any], number: int) -> Event:
    """Make the event of a request from what its runner observed.

    `identity` holds process, command, model, max_sequences and fingerprint. `number` is that of the
    request in its process, from 1. The caller sets `divergence`, `saved_s`, `verify` and
    `profile_s`.
    """
    usage, lookup, began = observed.usage, observed.lookup, observed.clock.began
    memory, cache, line = usage.memory, usage.cache, observed.prepared.line
    caller = observed.prepared.caller
    started = "cold" if number == 1 else "warm"
    return Event(
        schema=SCHEMA,
        version=VERSION,
        id=f"{number:04x}{identity['process']}",
        time=_utc(began),
        **identity,
        number=number,
        prompt_kind=observed.prepared.kind,
        messages=len(observed.prepared.messages) or None,
        finish=observed.finish,
        error=observed.error,
        entry_tokens=lookup.entry_tokens,
        entry_tokens_after=len(observed.entry),
        prompt_tokens=usage.prompt_tokens,
        matched_tokens=cache.matched_tokens,
        cached_tokens=usage.cached_tokens,
        ahead_tokens=cache.ahead_tokens,
        evaluated_tokens=usage.evaluated_tokens,
        trimmed_tokens=cache.trimmed_tokens,
        completion_tokens=usage.completion_tokens,
        shifted_tokens=cache.shifted_tokens,
        reevaluated_tokens=cache.reevaluated_tokens,
        lost_tokens=cache.lost_tokens,
        outcome=usage.outcome,
        reason=usage.reason,
        freed_by=cache.freed_by,
        rewind_limited_by=cache.rewind_limited_by,
        checkpoint=cache.checkpoint,
        used_bytes=memory.used_bytes,
        cache_bytes=memory.cache_bytes,
        peak_bytes=memory.peak_bytes,
        saved_tokens=lookup.reused,
        saved_s=None,
        run=f"{started}-{'restored' if lookup.is_restored else usage.outcome}",
        divergence=None,
        **_times(observed),
        request_bytes=max(0, memory.peak_bytes - observed.active_bytes),
        spans=_spans(observed),
        verify=None,
        line=BatchLine(**vars(line)) if line is not None else None,
        restored_tokens=lookup.restored,
        draft_passes=usage.draft_passes,
        drafts=tuple(Draft(**vars(use)) for use in usage.drafts),
        caller=_client(caller, usage) if caller is not None else None,
        **_beside(observed),
    )


def _client(caller: Caller, usage: Usage) -> ClientRequest:
    """Return who sent the request, and the cause on that side for what was not reused."""
    found = caller.cause(usage)
    more = {} if found is None else {name: getattr(found, name) for name in ("remedy", "message")}
    return ClientRequest(
        caller.request,
        caller.client,
        caller.session,
        caller.rules,
        None if found is None else found.name,
        replaced=caller.replaced,
        **more,
    )


def _beside(observed: Observation) -> dict[str, Any]:
    """Return what only a request beside others has, by the names of the event's fields."""
    beside = observed.beside
    if beside is None:
        return {}
    evicted = tuple(Eviction(**vars(one)) for one in beside.evicted)
    return {"submitted": beside.submitted or None, "evicted": evicted}


def _times(observed: Observation) -> dict[str, Any]:
    """Return the times and rates of a request, by the names of the event's fields."""
    timing, answered = observed.usage.timing, observed.usage.completion_tokens
    return {
        "tokenize_s": _seconds(timing.tokenize_s),
        "lookup_s": _seconds(timing.lookup_s),
        "prefill_s": _seconds(timing.prefill_s) if answered else None,
        "ttft_s": _seconds(timing.ttft_s) if answered else None,
        "decode_s": _seconds(timing.decode_s) if answered else None,
        "total_s": _seconds(observed.ended - observed.clock.began),
        "profile_s": 0.0,
        "prefill_rate": _prefill_rate(observed),
        "decode_rate": round(timing.decode_rate, 1) or None,
    }


def logfmt(event: Event) -> str:
    """Write the event as `key=value ...`: counts, times and the place of a divergence.

    Text and hashes are left out, and so are most fields that are null or 0.
    """
    values = vars(event)
    shown = {name: values[name] for name in _LOGGED}
    if event.divergence:
        for name in ("index", "message", "role", "part"):
            shown[f"divergence_{name}"] = getattr(event.divergence, name)
    if event.verify:
        for name in ("equal", "first_difference", "logits_difference"):
            shown[f"verify_{name}"] = getattr(event.verify, name)
    return " ".join(
        f"{name}={_logfmt_value(value)}"
        for name, value in shown.items()
        if value is not None and (value != 0 or name in _LOGGED_ZERO)
    )


def as_line(line: Event | Mapping[str, Any]) -> str:
    """Write an event, or a line of another log, as JSON without blanks or line ends."""
    return _encode(vars(line) if isinstance(line, Event) else line)


def _prefill_rate(observed: Observation) -> float | None:
    """Return tokens per second over the chunks up to the first token; None without chunks."""
    answered, first = observed.usage.completion_tokens, observed.clock.first
    chunks = [chunk for chunk in observed.chunks if not answered or chunk[1] <= first]
    seconds = sum(end - begin for begin, end, _ in chunks)
    return round(sum(count for _, _, count in chunks) / seconds, 1) if seconds else None


def _spans(observed: Observation) -> list[Span]:
    """Return the stretches of a request, with times in seconds since it began."""
    clock, usage, lookup = observed.clock, observed.usage, observed.lookup
    began, matched_s = clock.began, usage.timing.lookup_s - lookup.rewind_s
    spans = [("tokenize", began, usage.timing.tokenize_s, usage.prompt_tokens)]
    spans.append(("lookup", clock.lookup_began, matched_s, usage.prompt_tokens))
    if lookup.rewind_s:
        spans.append(
            ("rewind", clock.lookup_began + matched_s, lookup.rewind_s, usage.cache.trimmed_tokens)
        )
    spans += [("prefill", begin, end - begin, count) for begin, end, count in observed.chunks]
    if usage.completion_tokens > 1:
        spans.append(("decode", clock.first, usage.timing.decode_s, usage.completion_tokens - 1))
    if usage.cache.reevaluated_tokens:
        spans.sort(key=lambda span: span[1])
    return [
        Span(name, _seconds(begin - began), _seconds(took), count)  # type: ignore[arg-type]
        for name, begin, took, count in spans
    ]


def _utc(began: float) -> str:
    """Return the UTC time of a moment on time.perf_counter, in RFC 3339."""
    # time.strftime would look up the time zone each time.
    return (
        datetime.fromtimestamp(time.time() - (time.perf_counter() - began), UTC).isoformat(
            timespec="microseconds"
        )[:-6]
        + "Z"
    )


def _seconds(value: float) -> float:
    return round(value, 7) if value > 0 else 0.0


def _logfmt_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return (
        text if text and all(c.isprintable() and c not in ' "=' for c in text) else json.dumps(text)
    )
