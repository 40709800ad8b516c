"""Count requests for Prometheus: those of many runs in a file, those of a server in its log.

The textfile collector of node_exporter reads the file. Counting continues from the counts in it, so
many short runs count like one long run. A file belongs to one process: if several use it, only the
counts of the last one to write stay.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mlxrunner.errors import MissingFileError, OptionError, ReadError
from mlxrunner.profiling.logs import LineWriter
from mlxrunner.profiling.profile import Profile, as_line
from mlxrunner.results import logger
from mlxrunner.system.imports import how_to_install
from mlxrunner.system.reading import read_text
from mlxrunner.system.writing import check_own, write_errors_as, written

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from mlxrunner.engine.parallel_runner import ParallelRunner
    from mlxrunner.engine.request import Observation
    from mlxrunner.profiling.schema import Event, NoteKind
    from mlxrunner.tokenizer.prompt import Caller


LARGEST = 2**24
"""The most bytes of a file whose counts are continued."""
Labels = tuple[tuple[str, str], ...]
METRICS: Mapping[str, tuple[str, str]] = {
    "mlxrunner_requests": ("counter", "Requests, by what they found and how they ended."),
    "mlxrunner_prompt_tokens": ("counter", "Prompt tokens asked for."),
    "mlxrunner_cached_tokens": ("counter", "Prompt tokens that requests did not evaluate."),
    "mlxrunner_prefetched_tokens": (
        "counter",
        "Of these, the ones that were evaluated in advance.",
    ),
    "mlxrunner_evaluated_tokens": ("counter", "Prompt tokens that requests evaluated."),
    "mlxrunner_lost_tokens": ("counter", "Prompt tokens that could have been reused, by reason."),
    "mlxrunner_completion_tokens": ("counter", "Tokens of answers."),
    "mlxrunner_prefill_seconds": ("counter", "Time spent on evaluating prompts."),
    "mlxrunner_decode_seconds": ("counter", "Time spent on answers after their first token."),
    "mlxrunner_entry_tokens": ("gauge", "Tokens in the KV cache after the last request."),
    "mlxrunner_used_bytes": ("gauge", "Bytes of the caches that hold them."),
    "mlxrunner_allocated_bytes": ("gauge", "Bytes allocated for caches and checkpoints."),
    "mlxrunner_ttft_seconds": ("histogram", "Time to the first token, by outcome."),
    "mlxrunner_request_evaluated_tokens": (
        "histogram",
        "Prompt tokens that a request evaluated.",
    ),
}
"""The type and the description of each metric, by its name."""
BUCKETS = {
    "mlxrunner_ttft_seconds": (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
    "mlxrunner_request_evaluated_tokens": (1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6),
}
"""The upper bounds of the buckets of each histogram."""
REMEMBERED = 1000
"""The most requests of a server whose events are remembered."""


class MetricsCollector:
    """A sink of events that counts them, and a collector of prometheus_client."""

    def __init__(self) -> None:
        """Begin with nothing. Raise OptionError if prometheus_client is missing."""
        try:
            from prometheus_client import CollectorRegistry
        except ImportError as error:
            raise OptionError(
                f"--metrics needs the package prometheus_client: {how_to_install('metrics')}"
            ) from error
        self._values: dict[str, dict[tuple[str, Labels], float]] = {name: {} for name in METRICS}
        """The samples of each metric, by the ending of their name and their labels."""
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def __call__(self, event: Event) -> None:
        """Count an event."""
        model = {"model": event.model}
        outcome = {**model, "outcome": event.outcome}
        self._add("mlxrunner_requests", "_total", 1, **outcome, finish=event.finish)
        for name in ("prompt", "cached", "prefetched", "evaluated", "completion"):
            tokens = getattr(event, f"{name}_tokens")
            self._add(f"mlxrunner_{name}_tokens", "_total", tokens, **model)
        if event.lost_tokens:
            reason = str(event.reason)
            self._add("mlxrunner_lost_tokens", "_total", event.lost_tokens, **model, reason=reason)
        for name in ("prefill", "decode"):
            seconds = getattr(event, f"{name}_s") or 0.0
            self._add(f"mlxrunner_{name}_seconds", "_total", seconds, **model)
        if event.ttft_s is not None:
            self._observe("mlxrunner_ttft_seconds", event.ttft_s, **outcome)
        self._observe("mlxrunner_request_evaluated_tokens", event.evaluated_tokens, **model)
        for name, value in (
            ("entry_tokens", event.entry_tokens_after),
            ("used_bytes", event.used_bytes),
            ("allocated_bytes", event.cache_bytes),
        ):
            self._values[f"mlxrunner_{name}"]["", _labels(model)] = value

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as prometheus_client asks of a collector."""
        from prometheus_client.core import Metric

        for name, (kind, text) in METRICS.items():
            metric = Metric(name, text, kind)
            values = self._values[name]
            for ending, labels in sorted(values, key=lambda sample: sample[0]):
                metric.add_sample(name + ending, dict(labels), values[ending, labels])
            yield metric

    def _add(self, name: str, ending: str, value: float, **labels: str) -> None:
        key, values = (ending, _labels(labels)), self._values[name]
        values[key] = values.get(key, 0.0) + value

    def _observe(self, name: str, value: float, **labels: str) -> None:
        for bound in (*BUCKETS[name], math.inf):
            shown = "+Inf" if bound == math.inf else repr(bound)
            self._add(name, "_bucket", value <= bound, **labels, le=shown)
        self._add(name, "_count", 1, **labels)
        self._add(name, "_sum", value, **labels)


class MetricsFile(MetricsCollector):
    """A sink of events that replaces the whole file, with the same readers, after each event."""

    def __init__(self, file: str | Path) -> None:
        """Take over the counts in `file`, and write it.

        Raise OptionError if prometheus_client is missing, or the file is not ours or can't be
        written.
        """
        super().__init__()
        self._path = Path(file)
        self._continue()
        self._write()

    def __call__(self, event: Event) -> None:
        """Count an event and write the file. Log a warning if that fails."""
        super().__call__(event)
        try:
            self._write()
        except OptionError as error:
            logger.warning("metrics: %s", error)

    def _continue(self) -> None:
        """Take over the counts in the file. Raise OptionError if it is not ours."""
        from prometheus_client.parser import text_string_to_metric_families

        with write_errors_as(OptionError, self._path), suppress(FileNotFoundError):
            check_own(self._path, replaced=True)
        try:
            text = read_text(self._path, LARGEST)
            text = text.replace("mlxrunner_ahead_", "mlxrunner_prefetched_")  # as of 0.2
            families = list(text_string_to_metric_families(text))
        except MissingFileError:
            return
        except ReadError as error:
            raise OptionError(str(error)) from error
        except (ValueError, KeyError, IndexError) as error:
            raise OptionError(
                f"{self._path} is not in Prometheus text format: choose another file for --metrics"
            ) from error
        foreign = {family.name for family in families} - METRICS.keys()
        if foreign:
            raise OptionError(
                f"{self._path} holds {min(foreign)}, which is not mlxrunner's: choose another file "
                "for --metrics"
            )
        for family in families:
            self._values[family.name] |= {
                (sample.name.removeprefix(family.name), _labels(sample.labels)): sample.value
                for sample in family.samples
            }

    def _write(self) -> None:
        from prometheus_client import generate_latest
        from prometheus_client.openmetrics.exposition import ALLOWUTF8

        text = generate_latest(self.registry, ALLOWUTF8).decode()
        with (
            write_errors_as(OptionError, self._path),
            written(self._path, shared=True, sync=False) as stream,
        ):
            stream.write(text)


def _labels(labels: Mapping[str, str]) -> Labels:
    """Sort the labels, and write lone surrogates, which no file can hold, as their codes."""
    return tuple(
        (name, value.encode("utf-8", "backslashreplace").decode())
        for name, value in sorted(labels.items())
    )


class RequestLog:
    """The events of a server's requests."""

    def __init__(
        self, events: str | Path | None = None, *, tokens: str | None = None, log_text: bool = False
    ) -> None:
        """Record nothing yet.

        `events`, `tokens` and `log_text` are those of a Profile. Raise OptionError if a
        file can't be written, or if prometheus_client is missing.
        """
        self._events = None if events is None else LineWriter(events)
        self._tokens, self._log_text = tokens, log_text
        self._lock = threading.Lock()
        self._by_request: OrderedDict[str, Event] = OrderedDict()
        self._callers: dict[str, dict[int, Caller | None]] = defaultdict(dict)
        self._profiles: dict[str, Profile] = {}
        """The profiles of the models that are loaded, or were until now, by their names."""
        self._waiting: dict[str, Event] = {}
        """Events of requests of which it is not known yet how the answer ended."""
        self._ended: OrderedDict[str, NoteKind | None] = OrderedDict()
        """The remarks on answers, by request."""
        self.counts = MetricsCollector()

    def watch(self, runner: ParallelRunner) -> None:
        """Record the requests of a model. Raise OptionError if a file can't be written.

        If it was loaded before, it has been unloaded since.
        """
        if (before := self._profiles.pop(runner.name, None)) is not None:
            before.finish()
        profile = Profile("serve", tokens=self._tokens, log_text=self._log_text, sinks=[self._add])
        profile.watch(runner)
        self._profiles[runner.name] = profile
        runner.observers.append(self._see)
        self._callers[runner.name].clear()

    def close(self) -> None:
        """Stop watching and close the files."""
        for profile in self._profiles.values():
            profile.finish()
        with self._lock:
            for event in self._waiting.values():
                self._write(event)
            self._waiting.clear()
        if self._events is not None:
            self._events.close()

    def ended(self, request: str, note: NoteKind | None) -> None:
        """Note how the answer to a request ended, and write its event.

        The model's thread may add that later. A second call for a request changes nothing.
        """
        with self._lock:
            if request in self._ended:
                return
            self._ended[request] = note
            while len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)
            if (event := self._waiting.pop(request, None)) is not None:
                self._write(event, note)

    def event(self, request: str) -> Event | None:
        """Return the event of a request by its id; None: it is not known, or not any more."""
        with self._lock:
            return self._by_request.get(request)

    def last(self, count: int) -> list[Event]:
        """Return the last events, the youngest first."""
        with self._lock:
            return list(self._by_request.values())[: -count - 1 : -1]

    def caller(self, model: str, slot: int) -> Caller | None:
        """Return the client whose request was the last to end in a slot."""
        return self._callers[model].get(slot)

    def metrics(self) -> str:
        from prometheus_client import generate_latest

        with self._lock:
            return generate_latest(self.counts.registry).decode()

    def _add(self, event: Event) -> None:
        with self._lock:
            self.counts(event)
            key = event.caller.request if event.caller is not None else event.id
            self._by_request[key] = event
            while len(self._by_request) > REMEMBERED:
                self._by_request.popitem(last=False)
            if event.caller is None or not key or key in self._ended:
                self._write(event, self._ended.get(key))
            else:
                self._waiting[key] = event

    def _write(self, event: Event, note: NoteKind | None = None) -> None:
        if note is not None and event.caller is not None:
            event.caller.note = note
        if self._events is not None:
            self._events.write(as_line(event))

    def _see(self, runner: object, observed: Observation) -> None:
        if observed.scheduling is not None:
            name = getattr(runner, "name", "")
            self._callers[name][observed.scheduling.slot] = observed.prepared.caller
