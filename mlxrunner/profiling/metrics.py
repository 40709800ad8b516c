"""Keep counters and histograms of the requests in a file in Prometheus text format.

The textfile collector of node_exporter reads it. Counting continues from the counts in the file, so
many short runs count like one long run. A file belongs to one process: if several use it, only the
counts of the last one to write stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxrunner.errors import MissingFileError, OptionError, ReadError
from mlxrunner.results import logger
from mlxrunner.system.imports import how_to_install
from mlxrunner.system.reading import read_text
from mlxrunner.system.writing import check_own, write_errors_as, written

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from mlxrunner.profiling.schema import Event


LARGEST = 2**24
"""The most bytes of a file whose counts are continued."""
Labels = tuple[tuple[str, str], ...]
COUNTERS = {
    "mlxrunner_requests": "Requests, by what they found and how they ended.",
    "mlxrunner_prompt_tokens": "Prompt tokens asked for.",
    "mlxrunner_cached_tokens": "Prompt tokens that requests did not evaluate.",
    "mlxrunner_prefetched_tokens": "Of these, the ones that were evaluated in advance.",
    "mlxrunner_evaluated_tokens": "Prompt tokens that requests evaluated.",
    "mlxrunner_lost_tokens": "Prompt tokens that could have been reused, by reason.",
    "mlxrunner_completion_tokens": "Tokens of answers.",
    "mlxrunner_prefill_seconds": "Time spent on evaluating prompts.",
    "mlxrunner_decode_seconds": "Time spent on answers after their first token.",
}
GAUGES = {
    "mlxrunner_entry_tokens": "Tokens in the KV cache after the last request.",
    "mlxrunner_used_bytes": "Bytes of the caches that hold them.",
    "mlxrunner_allocated_bytes": "Bytes allocated for caches and checkpoints.",
}
HISTOGRAMS = {
    "mlxrunner_ttft_seconds": (
        "Time to the first token, by outcome.",
        (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
    ),
    "mlxrunner_request_evaluated_tokens": (
        "Prompt tokens that a request evaluated.",
        (1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6),
    ),
}
"""The histograms with their descriptions and the upper bounds of their buckets."""


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
        self._values: dict[tuple[str, Labels], float] = {}
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def __call__(self, event: Event) -> None:
        """Count an event."""
        model = {"model": event.model}
        self._add(
            "mlxrunner_requests_total", 1, **model, outcome=event.outcome, finish=event.finish
        )
        for name in ("prompt", "cached", "prefetched", "evaluated", "completion"):
            self._add(f"mlxrunner_{name}_tokens_total", getattr(event, f"{name}_tokens"), **model)
        if event.lost_tokens:
            self._add(
                "mlxrunner_lost_tokens_total",
                event.lost_tokens,
                **model,
                reason=str(event.reason),
            )
        for name in ("prefill", "decode"):
            self._add(
                f"mlxrunner_{name}_seconds_total", getattr(event, f"{name}_s") or 0.0, **model
            )
        if event.ttft_s is not None:
            self._observe("mlxrunner_ttft_seconds", event.ttft_s, **model, outcome=event.outcome)
        self._observe("mlxrunner_request_evaluated_tokens", event.evaluated_tokens, **model)
        gauges = (event.entry_tokens_after, event.used_bytes, event.cache_bytes)
        for name, value in zip(GAUGES, gauges, strict=True):
            self._values[name, _labels(model)] = value

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as prometheus_client asks of a collector."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        for name, text in COUNTERS.items():
            yield _filled(CounterMetricFamily(name, text), self._samples(f"{name}_total"))
        for name, text in GAUGES.items():
            yield _filled(GaugeMetricFamily(name, text), self._samples(name))
        for name, (text, _) in HISTOGRAMS.items():
            samples = [
                sample
                for end in ("_bucket", "_count", "_sum")
                for sample in self._samples(name + end)
            ]
            yield _filled(HistogramMetricFamily(name, text), samples)

    def _samples(self, name: str) -> list[tuple[str, Labels, float]]:
        return [
            (one, labels, value) for (one, labels), value in self._values.items() if one == name
        ]

    def _add(self, name: str, value: float, **labels: str) -> None:
        key = name, _labels(labels)
        self._values[key] = self._values.get(key, 0.0) + value

    def _observe(self, name: str, value: float, **labels: str) -> None:
        for bound in (*HISTOGRAMS[name][1], float("inf")):
            self._add(
                f"{name}_bucket",
                value <= bound,
                **labels,
                le="+Inf" if bound == float("inf") else repr(bound),
            )
        self._add(f"{name}_count", 1, **labels)
        self._add(f"{name}_sum", value, **labels)


class MetricsFile(MetricsCollector):
    """A sink of events that replaces the whole file after each event.

    Whoever could read the file before can read the new one.
    """

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
        foreign = {family.name for family in families} - {*COUNTERS, *GAUGES, *HISTOGRAMS}
        if foreign:
            raise OptionError(
                f"{self._path} holds {min(foreign)}, which is not mlxrunner's: choose another file "
                "for --metrics"
            )
        for family in families:
            self._values |= {
                (sample.name, _labels(sample.labels)): sample.value for sample in family.samples
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


def _filled(family: Any, samples: Iterable[tuple[str, Labels, float]]) -> Metric:
    for name, labels, value in samples:
        family.add_sample(name, dict(labels), value)
    metric: Metric = family
    return metric
