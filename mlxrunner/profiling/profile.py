"""The profile of one process: it watches a runner, and makes an event of each request.

Nothing happens while a request runs. What is done afterwards is a few dozen microseconds, unless something was lost (then the place
is looked for) or the request is one of those that are verified.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxrunner.cache.checkpoints import INTERVAL
from mlxrunner.cache.factory import DEFAULT_SLACK, CacheOptions, make_layer_caches
from mlxrunner.cache.layer import LayerCache
from mlxrunner.cache.tokens import TokenArray, TokenBuffer
from mlxrunner.errors import OptionError, VerifyError
from mlxrunner.events import logger
from mlxrunner.observation import Observation
from mlxrunner.profiling.curve import PrefillCurve
from mlxrunner.profiling.divergence import Divergences
from mlxrunner.profiling.event import as_line, event_of, logfmt
from mlxrunner.profiling.identity import describe_layers, fingerprint, thinking_marks
from mlxrunner.profiling.tokenlog import TokenLines
from mlxrunner.profiling.writer import LineWriter
from mlxrunner.runner import DEFAULT_PREFILL_STEP

if TYPE_CHECKING:
    from mlxrunner.profiling.verify import Measured

Sink = Callable[[dict[str, Any]], None]
"""Is given each event."""


ALONE: Mapping[str, Any] = {
    "prefill_step": DEFAULT_PREFILL_STEP, "checkpoint_interval": INTERVAL, "checkpoint_budget": 2**30,
    "rewind_slack": DEFAULT_SLACK, "kv_bits": None,
}  # fmt: skip
"""What a token log says of a runner that has none of these, so that its requests can be replayed one at a time."""


class Profile:
    """Attach it to a runner, and to the next one if another is loaded in the same process; close it at the end.

    `command`: as in the events. `events`, `tokens`: files to append events and the token log to. `log_text`: events show a few tokens'
    text at a divergence. `verify`: this share of the warm requests (0 to 1) is run again cold, as `chance` says; `eligible`, `verified` and
    `failed` count them. `sinks`: who else wants the events.
    Every event is also logged, as one line of `logfmt`. OptionError for a file that can't be written, or a share out of range.
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
        if not 0 <= verify <= 1:
            raise OptionError(
                f"verify_cache: {verify} is out of range, it has to be between 0 and 1"
            )
        self.process, self.number = secrets.token_hex(4), 0
        self.eligible, self.verified, self.failed = 0, 0, 0
        self._command, self._log_text, self._share, self._chance = command, log_text, verify, chance
        self._sinks = list(sinks)
        self._events = LineWriter(events) if events is not None else None
        self._tokens = LineWriter(tokens, first=self._process_line) if tokens is not None else None
        self._layers: list[dict[str, Any]] = []
        self._identity: dict[str, Any] = {}
        self._settings: dict[str, Any] = {}
        self._entry = TokenBuffer()
        self._lines: TokenLines | None = None
        self._measured: Measured | None = None
        self._entry_tokens = 0

    def attach(self, runner: Any) -> None:
        """Watch `runner` from now on. If this profile watched another one before, the next event says what became of its entry."""
        before, settings = self._identity.get("model"), self._settings
        self._settings = dict(runner.settings)
        if self._entry and before is not None:
            changed = [
                f"{name}: {settings.get(name)} -> {value}"
                for name, value in self._settings.items()
                if settings.get(name) != value
            ]
            if before != runner.name:
                runner.explain_loss(
                    "model_changed", f"{before} -> {runner.name}", self._entry.array
                )
            else:
                runner.explain_loss(
                    "options_changed", ", ".join(changed) or "loaded again", self._entry.array
                )
        self._identity = {
            "process": self.process,
            "command": self._command,
            "model": runner.name,
            "max_sequences": self._settings.get("max_sequences", 1),
            "fingerprint": fingerprint(runner.model, runner.facts, self._settings),
        }
        self._entry = TokenBuffer()
        self._divergences = Divergences(runner.tokenizer, self._log_text)
        self._curve = PrefillCurve()
        self._entry_tokens, self._measured, self._lines = 0, None, None
        if self._tokens is not None:
            self._layers = describe_layers(runner.model, self._caches(runner))
        runner.observer = self

    def __call__(self, runner: Any, observed: Observation) -> None:
        """A request has ended."""
        began = time.perf_counter()
        self.number += 1
        self._entry = observed.entry
        if not self._is_wanted:
            return
        event = event_of(observed, self._identity, self.number)
        if (
            "prefill_step" not in self._settings
            or observed.lookup.entry_tokens != self._entry_tokens
        ):
            self._divergences.forget()  # the entry is not what the last request left: others shared it, or it was taken back
        event["divergence"] = self._divergences.describe(
            observed.prepared, observed.prompt, observed.lookup
        )
        self._divergences.follow(observed.prepared)
        self._entry_tokens = len(observed.entry)
        event["saved_s"] = self._saved_s(observed)
        event["profile_s"] = round(time.perf_counter() - began, 7)
        try:
            event["verify"] = self._verify(runner, observed) if self._is_chosen(observed) else None
        finally:  # also when somebody does not want to wait for that
            self._write(runner, observed, event)

    @property
    def _is_wanted(self) -> bool:
        """Whether anybody wants the events."""
        return bool(
            self._events or self._tokens or self._sinks or self._share
        ) or logger.isEnabledFor(logging.INFO)

    def finish(self, *, strict: bool = False) -> None:
        """Close the files. VerifyError if `strict` and a verified request was wrong."""
        for writer in (self._events, self._tokens):
            if writer is not None:
                writer.close()
        if strict and self.failed:
            raise VerifyError(self.failed, self.verified)

    def _write(self, runner: Any, observed: Observation, event: dict[str, Any]) -> None:
        if self._events is not None:
            self._events.write(as_line(event))
        if self._tokens is not None:
            self._log_tokens(self._tokens, runner, observed, event)
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", logfmt(event))
        for sink in self._sinks:
            sink(event)

    def _saved_s(self, observed: Observation) -> float | None:
        """What the reused tokens would have cost, by what prefills have cost so far."""
        at = observed.usage.cached_tokens
        step = self._settings.get("prefill_step")
        if step is None:  # requests that share their passes: nobody knows whose time it was
            return None
        if not observed.usage.reevaluated_tokens:
            for begin, end, count in observed.chunks:
                self._curve.add(at, at + count, end - begin)
                at += count
        seconds = self._curve.seconds(observed.lookup.reused, step)
        return None if seconds is None else round(seconds, 7)

    def _is_chosen(self, observed: Observation) -> bool:
        """That share of the requests that reused something, by chance: processes of one request each are chosen as often as others."""
        if not self._share or observed.logits is None or not observed.usage.cached_tokens:
            return False
        self.eligible += 1
        return self._chance() < self._share

    def _verify(self, runner: Any, observed: Observation) -> dict[str, Any]:
        from mlxrunner.profiling.verify import Verifier, Warm

        rough = self._settings.get("kv_bits") is not None
        verifier = Verifier(
            runner.model, runner.cold_caches, runner.prefill_step, self._measured, is_rough=rough
        )
        tokens: TokenArray = observed.entry.array.copy()
        logger.debug("verifying %d tokens", len(tokens))
        found = verifier.verify(
            Warm(tokens, len(observed.prompt), observed.logits, observed.is_greedy)
        )
        self._measured = verifier.measured
        if found["equal"] is None:
            logger.warning(
                "request %d is not verified: one wrong token makes %.3g, which is within the tolerance of %.3g",
                self.number, found["wrong_token"], found["tolerance"],
            )  # fmt: skip
            return found
        self.verified += 1
        if not found["equal"]:
            self.failed += 1
            token, difference = found["first_difference"], found["logits_difference"]
            what = (
                f"its last logits differ by {difference:.3g}"
                if token is None
                else f"answer token {token} is another one"
            )
            why = f"request {self.number} run again cold: {what}"
            logger.warning("the entry was wrong and is freed: %s", why)
            runner.free(why, "verify_failed")
        return found

    def _log_tokens(
        self, writer: LineWriter, runner: Any, observed: Observation, event: dict[str, Any]
    ) -> None:
        if self._lines is None:
            self._lines = TokenLines(self._process(runner))
            writer.begin_again()
        writer.write(as_line(self._lines.request(observed, event)))

    def _process_line(self) -> str:
        return as_line(self._lines.first()) if self._lines is not None else ""

    def _caches(self, runner: Any) -> list[LayerCache]:
        """Empty ones, as a runner of one request at a time has them."""
        if self._settings.get("max_sequences", 1) == 1:
            return list(runner.cold_caches())
        return make_layer_caches(runner.model, CacheOptions(context=self._settings["context"]))

    def _process(self, runner: Any) -> dict[str, Any]:
        """The token log's line about this process."""
        names = ("process", "model", "fingerprint")
        return {
            **{name: self._identity[name] for name in names},
            **ALONE,
            **self._settings,
            "layers": self._layers,
            "never_reused": bool(runner.facts.depends_on_chunks),
            "message_ends": sorted(runner.tokenizer.message_ends),
            "thinking": thinking_marks(runner.tokenizer),
        }


@contextmanager
def profiled(profile: Profile, *, strict: bool = False) -> Iterator[Profile]:
    """Finish the profile at the end; what `strict` finds comes last, and only if nothing else has gone wrong."""
    try:
        yield profile
    except BaseException:
        profile.finish()
        raise
    profile.finish(strict=strict)
