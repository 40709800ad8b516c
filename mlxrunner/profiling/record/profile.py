"""Watch a runner, and make an event of each of its requests.

Nothing happens while a request runs. The work afterwards takes a few dozen microseconds, unless
tokens were lost (their place is then looked for) or the request is verified.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from mlx.utils import tree_flatten

from mlxrunner.cache.layers.factory import CacheOptions, make_layer_caches, run_lazily
from mlxrunner.cache.layers.protocol import LayerCache, describe
from mlxrunner.cache.tokens import TokenArray, TokenBuffer
from mlxrunner.config.arguments import check_callable, check_flag, check_path, check_text, listed
from mlxrunner.config.option import Option
from mlxrunner.engine.observation import Observation
from mlxrunner.errors import OptionError, VerifyError
from mlxrunner.models.fingerprint import loaded_fingerprint
from mlxrunner.options import RunnerSettings
from mlxrunner.profiling.curve import PrefillCurve
from mlxrunner.profiling.record.divergence import Divergences
from mlxrunner.profiling.record.event import as_line, event_of, logfmt
from mlxrunner.profiling.record.tokenlog import TokenLines
from mlxrunner.profiling.record.writer import LineWriter
from mlxrunner.profiling.schema import Event, Verify
from mlxrunner.results import logger
from mlxrunner.runner import CHECKPOINT_BUDGET, Runner
from mlxrunner.templates.thinking import thinking_tokens
from mlxrunner.tokenizer.prompt import Seeing

if TYPE_CHECKING:
    from mlxrunner.parallel.runner import ParallelRunner
    from mlxrunner.parallel.stepper import Stepper
    from mlxrunner.profiling.record.verify import Measured

Sink = Callable[[Event], None]
"""A function that is called with each event."""


ALONE: Mapping[str, Any] = {
    **{name: value for name, value in vars(RunnerSettings()).items() if name != "context"},
    "checkpoint_budget": CHECKPOINT_BUDGET,
}
"""The values that a token log gives for settings that a runner does not have.

With them, the requests of a runner of several at a time can be replayed one at a time.
"""


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
        self._tokens = LineWriter(tokens, first=self._process_line) if tokens is not None else None
        self._layers: list[dict[str, Any]] = []
        self._identity: dict[str, Any] = {}
        self._settings: dict[str, Any] = {}
        self._entry = TokenBuffer()
        self._lines: TokenLines | None = None
        self._measured: Measured | None = None
        self._entry_tokens = 0
        self._watched: list[weakref.ref[Runner | ParallelRunner | Stepper]] = []

    def watch(self, runner: Runner | ParallelRunner | Stepper) -> Self:
        """Record the requests of `runner` from now on: `with Profile(...).watch(runner):`.

        If this profile watched another runner before, the next event says what became of its entry.
        """
        if not hasattr(runner, "observers"):
            raise OptionError(
                f"runner: {runner!r:.80} is not a runner; load one with Runner.load(model)"
            )
        if isinstance(runner.tokenizer, Seeing) and (self._share or self._tokens is not None):
            raise OptionError(
                "verify, tokens: a model that sees pictures is neither verified nor recorded by "
                "token: their ids are of this process only"
            )
        before, settings = self._identity.get("model"), self._settings
        self._settings = dict(runner.settings)
        if self._entry and before is not None and isinstance(runner, Runner):
            changed = [
                f"{name}: {settings.get(name)} -> {value}"
                for name, value in self._settings.items()
                if settings.get(name) != value
            ]
            if before != runner.name:
                runner.cache.explain_loss(
                    "model_changed", f"{before} -> {runner.name}", self._entry.array
                )
            else:
                runner.cache.explain_loss(
                    "options_changed", ", ".join(changed) or "loaded again", self._entry.array
                )
        self._identity = {
            "process": self.process,
            "command": self._command,
            "model": runner.name,
            "max_sequences": self._settings.get("max_sequences", 1),
            "fingerprint": _fingerprint(runner, self._settings),
        }
        self._entry = TokenBuffer()
        self._divergences = Divergences(runner.tokenizer, self.log_text)
        self._curve = PrefillCurve()
        self._entry_tokens, self._measured, self._lines = 0, None, None
        if self._tokens is not None:
            self._layers = _describe_layers(runner.model, self._caches(runner))
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
        if self._is_parallel or observed.lookup.entry_tokens != self._entry_tokens:
            # The last request did not leave this entry: others shared it, or it was taken back.
            self._divergences.forget()
        event.divergence = self._divergences.describe(
            observed.prepared, observed.prompt, observed.lookup
        )
        self._divergences.follow(observed.prepared)
        self._entry_tokens = len(observed.entry)
        event.saved_s = self._saved_s(observed)
        event.profile_s = round(time.perf_counter() - began, 7)
        try:
            event.verify = self._verify(runner, observed) if self._is_chosen(observed) else None
        finally:  # even if the user interrupts the verification
            self._write(runner, observed, event)

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

    def _write(self, runner: Any, observed: Observation, event: Event) -> None:
        """Write the event to the files and the log, and call the sinks."""
        if self._tokens is not None:
            self._log_tokens(self._tokens, runner, observed, event)
        self._keep(event)

    def _keep(self, event: Event) -> None:
        """Write the event to its file and the log, and call the sinks."""
        if self._events is not None:
            self._events.write(as_line(event))
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", logfmt(event))
        for sink in self._sinks:
            sink(event)

    def _saved_s(self, observed: Observation) -> float | None:
        """Estimate the seconds that evaluating the reused tokens would have taken.

        The estimate comes from the prefills so far. Return None if that would be a guess.
        """
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
        """Return True for the share of the requests that is verified, drawn by chance.

        Only requests that reused tokens are eligible. Chance chooses processes of one request each
        as often as others.
        """
        if not self._share or observed.logits is None or not observed.usage.cached_tokens:
            return False
        self.eligible += 1
        return self._chance() < self._share

    def _verify(self, runner: Any, observed: Observation) -> Verify:
        """Run the request again cold. Free the entry if it was wrong."""
        from mlxrunner.profiling.record.verify import Verifier, Warm

        rough = self._settings.get("kv_bits") is not None
        verifier = Verifier(
            runner.model,
            runner.cache.cold_caches,
            runner.prefill_step,
            self._measured,
            is_rough=rough,
        )
        tokens: TokenArray = observed.entry.array.copy()
        logger.debug("verifying %d tokens", len(tokens))
        found = verifier.verify(
            Warm(tokens, len(observed.prompt), observed.logits, observed.is_greedy)
        )
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
            logger.warning("the entry was wrong and is freed: %s", why)
            runner.cache.free(why, "verify_failed")
        return found

    def _log_tokens(
        self, writer: LineWriter, runner: Any, observed: Observation, event: Event
    ) -> None:
        """Write the request to the token log."""
        if self._lines is None:
            self._lines = TokenLines(self._process(runner))
            writer.begin_again()
        writer.write(as_line(self._lines.request(observed, event)))

    def _process_line(self) -> str:
        """Return the token log's line about this process; empty before its first request."""
        return as_line(self._lines.first()) if self._lines is not None else ""

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


def _fingerprint(runner: Any, settings: Mapping[str, Any]) -> str:
    model = runner.model
    weights: Any = tree_flatten(model.parameters()) if hasattr(model, "parameters") else []
    return loaded_fingerprint(weights, runner.facts, settings)


def _describe_layers(model: Any, caches: Sequence[LayerCache]) -> list[dict[str, Any]]:
    """Return the `layers` of a token log: a line per kind of layer, with the number of its layers.

    `caches` are empty and can't be used afterwards: their shapes are those after an unevaluated
    token.
    """
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
