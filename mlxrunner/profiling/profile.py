"""Watch a runner, make an event of each of its requests, and write it as a line.

`Verifier` runs a request again cold, beside the entry, and compares the answers. Results of a
device differ in the last bits if a prompt is cut into other chunks. The tolerance is therefore
measured, by two cold runs with different chunks. The effect of one wrong token is measured too,
since a tolerance above that effect certifies nothing. One request of a process is measured, so
there is also a least tolerance, by the type of the logits.
"""

from __future__ import annotations

import json
import logging
import random
import secrets
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlxrunner.cache.entry import TokenArray, TokenBuffer
from mlxrunner.cache.layers.factory import CacheOptions, evaluate, make_layer_caches, run_lazily
from mlxrunner.cache.prefix import PrefixCache
from mlxrunner.cache.protocol import LayerCache, describe
from mlxrunner.config.option import (
    Option,
    check_callable,
    check_flag,
    check_path,
    check_text,
    listed,
)
from mlxrunner.engine.request import Observation
from mlxrunner.errors import OptionError, VerifyError
from mlxrunner.models.fingerprint import loaded_fingerprint
from mlxrunner.options import CHECKPOINT_BUDGET, RunnerSettings
from mlxrunner.profiling.divergence import Divergences
from mlxrunner.profiling.logs import LineWriter
from mlxrunner.profiling.schema import (
    SCHEMA,
    VERSION,
    BatchLine,
    ClientRequest,
    DraftCounts,
    Event,
    Eviction,
    Span,
    Verify,
)
from mlxrunner.profiling.tokenlog import TokenLines
from mlxrunner.results import Rate, logger
from mlxrunner.runner import Runner
from mlxrunner.system.speed import PrefillCurve
from mlxrunner.templates.messages import thinking_tokens
from mlxrunner.tokenizer.prompt import sees

if TYPE_CHECKING:
    from mlxrunner.engine.engine import Engine
    from mlxrunner.engine.parallel_runner import ParallelRunner
    from mlxrunner.tokenizer.prompt import Caller


Sink = Callable[[Event], None]


ALONE: Mapping[str, Any] = {
    **{name: value for name, value in vars(RunnerSettings()).items() if name != "context"},
    "checkpoint_budget": CHECKPOINT_BUDGET,
}
"""The values that a token log gives for settings that a runner does not have.

With them, the requests of a runner of several at a time can be replayed one at a time.
"""
LOGGED_AS = {"kv_cache_tokens": "cells", "cache_memory": "memory", "max_step_ms": "step_ms"}
"""The settings that have other names in fingerprints and token logs."""


class Profile:
    """A recorder of the requests of one process, started by `watch` and ended by `finish`.

    If another runner is loaded in the same process, `watch` that one too. Every event is also
    logged, as one line of `logfmt`. `eligible`, `verified` and `failed` count the requests that
    could be verified, that were, and that were wrong.
    """

    def __init__(
        self,
        command: str = "python",
        *,
        events: str | Path | None = None,
        tokens: str | Path | None = None,
        log_text: bool = False,
        verify: float = 0.0,
        sinks: Sequence[Sink] = (),
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Open the files; `watch` begins to record.

        `command` is the one in the events. `events` and `tokens` are files to which events and the
        token log are appended. With `log_text`, events show a few tokens' text at a divergence.
        `verify` is the share (0 to 1) of the warm requests that are run again cold, drawn by
        `chance`. `sinks` are called with each event. Raise OptionError if a file can't be written
        or the share is out of range.
        """
        Option(float, low=0, high=1).check("verify_cache", verify)
        check_text("command", command)
        check_flag("log_text", log_text)
        for name, file in (("events", events), ("tokens", tokens)):
            if file is not None:
                check_path(name, file)
        self._sinks = list(listed("sinks", sinks, "[print]"))
        for sink in self._sinks:
            check_callable("sinks", sink, "(event)")
        check_callable("chance", chance, "no arguments")
        self.process, self.number = secrets.token_hex(4), 0
        self.eligible, self.verified, self.failed = 0, 0, 0
        self._command, self._share, self._chance = command, verify, chance
        self.log_text = log_text
        """True if events show a few tokens' text at a divergence."""
        self._events = LineWriter(events) if events is not None else None
        self._tokens = None
        if tokens is not None:
            self._tokens = LineWriter(
                tokens, first=lambda: as_line(self._lines.first()) if self._lines else ""
            )
        self._layers: list[dict[str, Any]] = []
        self._identity: dict[str, Any] = {}
        self._settings: dict[str, Any] = {}
        self._entry = TokenBuffer()
        self._lines: TokenLines | None = None
        self._measured: Measured | None = None
        self._watched: list[weakref.ref[Runner | ParallelRunner | Engine]] = []

    def watch(self, runner: Runner | ParallelRunner | Engine) -> Self:
        """Record the requests of `runner` from now on: `with Profile(...).watch(runner):`.

        If this profile watched another runner before, the next event says what became of its entry.
        """
        if not hasattr(runner, "observers"):
            raise OptionError(
                f"runner: {runner!r:.80} is not a runner; load one with Runner.load(model)"
            )
        if sees(runner.tokenizer) and (self._share or self._tokens is not None):
            raise OptionError(
                "verify, tokens: a model that sees pictures is neither verified nor recorded by "
                "token: their ids are of this process only"
            )
        before, settings = self._identity.get("model"), self._settings
        self._settings = {LOGGED_AS.get(k, k): value for k, value in runner.settings.items()}
        if self._entry and before is not None and isinstance(runner, Runner):
            reason, by = "model_changed", f"{before} -> {runner.name}"
            if before == runner.name:
                changed = (
                    f"{name}: {settings.get(name)} -> {value}"
                    for name, value in self._settings.items()
                    if settings.get(name) != value
                )
                reason, by = "options_changed", ", ".join(changed) or "loaded again"
            runner.cache.explain_loss(reason, by, self._entry.array)
        model: Any = runner.model
        weights: Any = tree_flatten(model.parameters()) if hasattr(model, "parameters") else []
        self._identity = {
            "process": self.process,
            "command": self._command,
            "model": runner.name,
            "max_sequences": self._settings.get("max_sequences", 1),
            "fingerprint": loaded_fingerprint(weights, runner.facts, self._settings),
        }
        self._entry = TokenBuffer()
        self._divergences = Divergences(runner.tokenizer, self.log_text)
        self._curve = PrefillCurve()
        self._measured, self._lines = None, None
        if self._tokens is not None:
            self._layers = _describe_layers(model, self._caches(runner))
        if self not in runner.observers:
            runner.observers.append(self)
        self._watched.append(weakref.ref(runner))
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def __call__(self, runner: Any, observed: Observation) -> None:
        """Record a request that has ended."""
        began = time.perf_counter()
        self.number += 1
        self._entry = observed.entry
        if not self.is_wanted:
            return
        event = event_of(observed, self._identity, self.number)
        event.divergence = self._divergences.describe(
            observed.prepared, observed.prompt, observed.lookup, observed.account
        )
        event.saved_s = self._saved_s(observed)
        event.profile_s = round(time.perf_counter() - began, 7)
        try:
            event.verify = self._verify(runner, observed) if self._is_chosen(observed) else None
        finally:  # even if the user interrupts the verification
            if self._tokens is not None:
                if self._lines is None:
                    self._lines = TokenLines(self._process(runner))
                    self._tokens.begin_again()
                self._tokens.write(as_line(self._lines.request(observed, event)))
            self._keep(event)

    def take(self, line: str) -> None:
        """Record an event that another process wrote as this line."""
        self._keep(Event.of(json.loads(line)))

    @property
    def _is_parallel(self) -> bool:
        """True if the runner is one of several requests at a time, even if it has one slot."""
        return "max_sequences" in self._settings

    @property
    def is_wanted(self) -> bool:
        """True if a file, a sink, the log or the verification needs events."""
        return bool(
            self._events or self._tokens or self._sinks or self._share
        ) or logger.isEnabledFor(logging.INFO)

    def finish(self, *, strict: bool = False) -> None:
        """Stop watching and close the files.

        With `strict`, raise VerifyError if a verified request was wrong.
        """
        for watched in self._watched:
            runner = watched()
            if runner is not None:
                runner.observers[:] = [one for one in runner.observers if one is not self]
        self._watched.clear()
        for writer in (self._events, self._tokens):
            if writer is not None:
                writer.close()
        if strict and self.failed:
            raise VerifyError(self.failed, self.verified)

    def _keep(self, event: Event) -> None:
        """Write the event to its file and the log, and call the sinks."""
        if self._events is not None:
            self._events.write(as_line(event))
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", logfmt(event))
        for sink in self._sinks:
            sink(event)

    def _saved_s(self, observed: Observation) -> float | None:
        """Estimate the time of the reused tokens from the prefills so far; None: unknown."""
        at = observed.usage.cached_tokens
        if self._is_parallel:  # requests share their passes, so no time is that of one alone
            return None
        if not observed.usage.cache.reevaluated_tokens:
            for begin, end, count in observed.chunks:
                self._curve.add(at, at + count, end - begin)
                at += count
        seconds = self._curve.seconds(observed.lookup.reused, self._settings["prefill_step"])
        return None if seconds is None else round(seconds, 7)

    def _is_chosen(self, observed: Observation) -> bool:
        """Draw the share of the requests with reused tokens that is verified."""
        if not self._share or observed.logits is None or not observed.usage.cached_tokens:
            return False
        self.eligible += 1
        return self._chance() < self._share

    def _verify(self, runner: Any, observed: Observation) -> Verify:
        """Run the request again cold. Free the entry if it was wrong."""
        rough = self._settings.get("kv_bits") is not None
        verifier = Verifier(
            runner.model,
            runner.cache.cold_caches,
            runner.prefill_step,
            self._measured,
            is_rough=rough,
        )
        logger.debug("verifying %d tokens", len(observed.entry))
        found = verifier.verify(observed)
        self._measured = verifier.measured
        if found.equal is None:
            logger.warning(
                "request %d is not verified: one wrong token makes %.3g, which is within the "
                "tolerance of %.3g",
                self.number,
                found.wrong_token,
                found.tolerance,
            )
            return found
        self.verified += 1
        if not found.equal:
            self.failed += 1
            token, difference = found.first_difference, found.logits_difference
            what = (
                f"its last logits differ by {difference:.3g}"
                if token is None
                else f"answer token {token} is another one"
            )
            why = f"request {self.number} run again cold: {what}"
            logger.warning("the cache was wrong and is freed: %s", why)
            runner.cache.free(why, "verify_failed")
        return found

    def _caches(self, runner: Any) -> list[LayerCache]:
        """Return empty layer caches, as a runner of one request at a time has them."""
        if self._is_parallel:
            names = ("context", "rewind_slack", "kv_bits")
            options = CacheOptions(**{name: self._settings[name] for name in names})
            return make_layer_caches(runner.model, options)
        return list(runner.cache.cold_caches())

    def _process(self, runner: Any) -> dict[str, Any]:
        """Return the fields of the token log's line about this process."""
        names = ("process", "model", "fingerprint")
        return {
            **{name: self._identity[name] for name in names},
            **ALONE,
            **self._settings,
            "layers": self._layers,
            "never_reused": bool(runner.facts.depends_on_chunks),
            "message_ends": sorted(runner.tokenizer.message_ends),
            "thinking": thinking_tokens(runner.tokenizer.encode_more),
        }


def _describe_layers(model: Any, caches: Sequence[LayerCache]) -> list[dict[str, Any]]:
    """Return a line per kind of layer. The empty `caches` can't be used afterwards."""
    run_lazily(model, caches, 1)
    lines = [describe(cache) for cache in caches]
    return [
        line | {"count": lines.count(line)}
        for index, line in enumerate(lines)
        if lines.index(line) == index
    ]


@contextmanager
def profiled(profile: Profile, *, strict: bool = False) -> Iterator[Profile]:
    """Finish the profile at the end of the block.

    With `strict`, raise VerifyError if a verified request was wrong and the block has not failed.
    """
    try:
        yield profile
    except BaseException:
        profile.finish()
        raise
    profile.finish(strict=strict)


_LOGGED = """
command number outcome reason evicted_by trim_limited_by prompt_tokens matched_tokens cached_tokens
missed_tokens displaced_tokens new_tokens prefetched_tokens evaluated_tokens trimmed_tokens
completion_tokens shifted_tokens
entry_tokens_after finish error ttft_s total_s prefill_rate decode_rate saved_s cache_bytes
request_bytes id
""".split()
"""The fields of a logfmt line, in its order."""
_LOGGED_ZERO = set(
    "divergence_index divergence_message cause_message verify_equal verify_first_difference".split()
)
"""The fields of a logfmt line that mean something if they are 0 or false."""
_OF_USAGE = """
prompt_tokens cached_tokens missed_tokens displaced_tokens new_tokens evaluated_tokens
completion_tokens outcome reason draft_passes
""".split()
"""The fields of an event that are those of the usage; all fields of its cache and memory are."""
_encode = json.JSONEncoder(separators=(",", ":"), default=vars, check_circular=False).encode


def event_of(observed: Observation, identity: Mapping[str, Any], number: int) -> Event:
    """Make the event of a request from what its runner observed.

    `identity` holds process, command, model, max_sequences and fingerprint. `number` is that of the
    request in its process, from 1. The caller sets `divergence`, `saved_s`, `verify` and
    `profile_s`.
    """
    usage, lookup, began = observed.usage, observed.lookup, observed.clock.began
    line, caller, scheduling = observed.prepared.line, observed.prepared.caller, observed.scheduling
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
        **{name: getattr(usage, name) for name in _OF_USAGE},
        **vars(usage.cache),
        **vars(usage.memory),
        saved_tokens=lookup.reused,
        saved_s=None,
        run=f"{started}-{'restored' if lookup.is_restored else usage.outcome}",
        divergence=None,
        index_is_full=observed.account.is_bounded,
        **_times(observed),
        request_bytes=max(0, usage.memory.peak_bytes - observed.active_bytes),
        spans=_spans(observed),
        verify=None,
        line=BatchLine(**vars(line)) if line is not None else None,
        restored_tokens=lookup.restored,
        drafts=tuple(DraftCounts(**vars(use)) for use in usage.drafts),
        caller=_client(caller, observed) if caller is not None else None,
        submitted=None if scheduling is None else scheduling.submitted or None,
        evicted=tuple(Eviction(**vars(one)) for one in (scheduling.evicted if scheduling else ())),
    )


def _client(caller: Caller, observed: Observation) -> ClientRequest:
    """Return who sent the request, and the cause on that side for what was not reused."""
    names = ("request", "client", "session", "rules", "replaced")
    made = ClientRequest(**{name: getattr(caller, name) for name in names})
    found = caller.record and caller.record.cause(observed.account, observed.usage)
    if found:
        made.cause, made.remedy, made.message = found.name, found.remedy, found.message
    return made


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
    if event.caller:
        for name in ("client", "cause", "message"):
            shown["cause_message" if name == "message" else name] = getattr(event.caller, name)
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
    measured = Rate()
    for begin, end, count in observed.chunks:
        if not answered or end <= first:
            measured.add(count, end - begin)
    return None if measured.per_second is None else round(measured.per_second, 1)


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
    moment = datetime.fromtimestamp(time.time() - (time.perf_counter() - began), UTC)
    return moment.isoformat(timespec="microseconds")[:-6] + "Z"


def _seconds(value: float) -> float:
    return round(value, 7) if value > 0 else 0.0


def _logfmt_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return (
        text if text and all(c.isprintable() and c not in ' "=' for c in text) else json.dumps(text)
    )


ANSWER_STEP = 32
"""The answer tokens that are evaluated at once; all their logits are in memory together."""
NOISE = 8.0
"""The tolerance, in multiples of the measured noise."""
NEAR_END = 4
"""The distance in tokens of the wrong token from the end: a recurrent state forgets the rest."""
_RELATIVE = {mx.float32: 1e-4, mx.float16: 5e-3, mx.bfloat16: 3e-2}
"""The least tolerance by type, as a share of the largest logit."""


@dataclass(frozen=True)
class Measured:
    """The largest differences of a model's last logits from those of a cold run."""

    noise: float
    """The difference of a cold run in other chunks."""
    wrong_token: float
    """The difference of a cold run with one wrong token."""


class Verifier:
    """A verifier of the requests of one model."""

    def __init__(
        self,
        model: Any,
        make_caches: Callable[[], list[LayerCache]],
        step: int,
        measured: Measured | None = None,
        *,
        is_rough: bool = False,
    ) -> None:
        """Verify requests of `model`.

        `make_caches` makes empty caches like the entry's, and `step` is the number of prompt tokens
        evaluated at once. `measured` holds earlier measurements of this model; None measures at the
        first request. `is_rough` says that keys and values are stored with fewer bits than they are
        computed with.
        """
        self._model, self._make_caches, self._step = model, make_caches, step
        self._least = _RELATIVE[mx.bfloat16] if is_rough else 0.0
        self.measured = measured

    def verify(self, observed: Observation) -> Verify:
        """Run the request cold and compare it with the result on the entry."""
        began = time.perf_counter()
        tokens, prompt = observed.entry.array.copy(), len(observed.prompt)
        last, gaps = self._cold(tokens, prompt, self._step)
        if self.measured is None:
            self.measured = self._measure(tokens, prompt, last)
        scale = max(1.0, _largest(last))
        relative = max(self._least, _RELATIVE.get(last.dtype, _RELATIVE[mx.bfloat16]))
        tolerance = max(relative * scale, NOISE * self.measured.noise)
        difference = _distance(last, observed.logits)
        gaps = gaps if observed.is_greedy else []
        wrong = [number for number, gap in enumerate(gaps) if not gap <= tolerance]
        is_equal = not wrong and difference <= tolerance
        return Verify(
            equal=None if is_equal and not tolerance < self.measured.wrong_token else is_equal,
            tokens=len(gaps),
            first_difference=wrong[0] if wrong else None,
            logits_difference=min(difference, 1e9),
            tolerance=min(tolerance, 1e9),
            wrong_token=min(self.measured.wrong_token, 1e9),
            seconds=round(time.perf_counter() - began, 6),
        )

    def _measure(self, tokens: TokenArray, prompt: int, last: mx.array) -> Measured:
        """Measure the noise and the effect of a wrong token with two more cold runs."""
        halves = self._cold(tokens, prompt, max(1, min(self._step, prompt) // 2))[0]
        place, wrong = max(len(tokens) - 1 - NEAR_END, 0), tokens.copy()
        wrong[place] = wrong[place] + 1 if wrong[place] < last.shape[-1] - 1 else 0
        other = self._cold(wrong, prompt, self._step)[0]
        return Measured(_distance(last, halves), _distance(last, other))

    def _cold(self, tokens: TokenArray, prompt: int, step: int) -> tuple[mx.array, list[float]]:
        """Return the last logits, and how far each answer token's logit is below the largest."""
        gaps: list[float] = []
        with PrefixCache(self._make_caches).begin(tokens) as session:

            def forward(count: int) -> mx.array:
                chunk = session.remaining[:count]
                session.begin_forward()
                logits: mx.array = self._model(mx.array(chunk)[None], cache=session.model_caches)
                session.end_forward(len(chunk))
                session.record(chunk)
                return logits

            while session.recorded < prompt - 1:
                forward(min(step, prompt - 1 - session.recorded))
                evaluate(session.caches)
                mx.clear_cache()
            while len(session.remaining):
                following = tokens[session.recorded + 1 :][:ANSWER_STEP]
                logits = forward(ANSWER_STEP)[0]
                last = mx.array(logits[-1:])
                evaluate(session.caches)
                gaps += _gaps(logits, following)
            mx.eval(last)
        return last, gaps


def _distance(a: mx.array, b: mx.array) -> float:
    """Return the largest difference; infinite if one of the logits is not a number."""
    difference = _largest(a.astype(mx.float32) - b.astype(mx.float32))
    return difference if np.isfinite(difference) else float("inf")


def _gaps(logits: mx.array, following: TokenArray) -> list[float]:
    """Return how far each token is below the largest of its row of `logits`, `[n, vocab]`."""
    rows = logits[: len(following)].astype(mx.float32)
    chosen = mx.take_along_axis(rows, mx.array(following)[:, None], axis=1)[:, 0]
    gaps: Any = (rows.max(axis=1) - chosen).tolist() if len(following) else []
    return list(gaps)


def _largest(array: mx.array) -> float:
    """Return the largest absolute value."""
    found: Any = mx.abs(array.astype(mx.float32)).max().item()
    return float(found)
