"""The pages that say what the server does: /, /health, /slots, /metrics and /explain/{request}."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse, PlainTextResponse

from mlxrunner.parallel.threads.thread import Held, Stats
from mlxrunner.profiling.schema import Event
from mlxrunner.serve.answering.house import House
from mlxrunner.serve.answering.opened import Opened
from mlxrunner.serve.events import RefusedError
from mlxrunner.serve.shapes import ShownResponse
from mlxrunner.serve.watch.page import status_page
from mlxrunner.serve.watch.record import REMEMBERED, Record

if TYPE_CHECKING:
    from prometheus_client.core import Metric

WIDTH = 100
"""Columns of an explanation."""


def watch_router(house: House, record: Record) -> APIRouter:
    """Return the routes about a server's models and requests."""
    record.counts.registry.register(Gauges(house))
    router = APIRouter(tags=["watch"], default_response_class=ShownResponse)

    @router.get("/", response_class=HTMLResponse)
    def page() -> str:
        """Show in a browser what runs, what was reused, and the latest misses."""
        models = [_model(house, one, record) for one in opened_in(house)]
        return status_page(models, record.last(REMEMBERED))

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> dict[str, Any]:
        """Say that the server runs, for how long, and which models it holds."""
        return {
            "status": "stopping" if house.is_stopping else "ok",
            "uptime_s": round(time.time() - house.began, 3),
            "models": [house.names.show(one.name) for one in opened_in(house)],
        }

    @router.get("/slots")
    async def slots() -> dict[str, Any]:
        """List what each conversation holds, for each loaded model."""
        return {"models": [_model(house, one, record) for one in opened_in(house)]}

    @router.get("/metrics")
    def metrics() -> Response:
        """Return counters and gauges in Prometheus text format."""
        return PlainTextResponse(record.metrics(), media_type="text/plain; version=0.0.4")

    @router.get("/explain/{request}", response_class=PlainTextResponse)
    def explain(request: str) -> str:
        """Say in words what a request reused, why not more, and what to change."""
        event = record.event(request)
        if event is None:
            raise RefusedError(
                404,
                f"no request {request:.100} is known: it is running, or older than the last "
                f"{REMEMBERED:,}; `mlxrunner explain FILE ID` reads the file of --events",
                code="not_found",
            )
        return explained(event)

    return router


def opened_in(house: House) -> Iterator[Opened]:
    """Yield the models that are loaded."""
    for place in house.models_held:
        opened = place.opened  # another thread may unload it meanwhile
        if opened is not None:
            yield opened


def explained(event: Event) -> str:
    """Return what `mlxrunner explain` prints about an event, without colours."""
    from rich.console import Console

    from mlxrunner.profiling.report.screen import show_event

    text = io.StringIO()
    show_event(event, Console(file=text, width=WIDTH, color_system=None, markup=False, emoji=False))
    return text.getvalue()


def _model(house: House, opened: Opened, record: Record) -> dict[str, Any]:
    stats = opened.runner.stats()
    return {
        "model": house.names.show(opened.name),
        "context": opened.room,
        "slots": stats.slots,
        "busy": stats.busy,
        "waiting": stats.waiting,
        "bytes": stats.bytes,
        "parked_bytes": stats.parked,
        "conversations": [
            _conversation(held, opened, record) for held in opened.runner.held() if held.tokens
        ],
    }


def _conversation(held: Held, opened: Opened, record: Record) -> dict[str, Any]:
    """Describe what a slot holds, and whose it is: of its request, or of the last one."""
    running = held.prompt
    caller = record.caller(opened.name, held.slot) if running is None else running.caller
    return {
        "slot": held.slot,
        "state": "busy" if held.is_busy else "idle",
        "tokens": held.tokens,
        "bytes": held.bytes,
        "client": None if caller is None else caller.client,
        "session": None if caller is None else caller.session,
        "request": None if caller is None else caller.request,
    }


GAUGES = {
    "slots": "Requests that a model can answer at a time.",
    "busy": "Slots whose request runs.",
    "waiting": "Requests that wait for a slot, or for room.",
    "tokens": "Tokens that the slots hold.",
    "bytes": "Bytes of keys, values and checkpoints in use.",
    "parked": "Bytes on disk of parked conversations.",
}
"""The fields of `Stats` that are metrics, and their descriptions."""


class Gauges:
    """A collector of what the server holds at the moment."""

    def __init__(self, house: House) -> None:
        self._house = house

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as prometheus_client asks of a collector."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        stats: dict[str, Stats] = {one.name: one.runner.stats() for one in opened_in(self._house)}
        for name, text in GAUGES.items():
            family = GaugeMetricFamily(f"mlxrunner_server_{name}", text, labels=["model"])
            for model, found in stats.items():
                family.add_metric([model], getattr(found, name))
            yield family
        refused = CounterMetricFamily(
            "mlxrunner_server_refused", "Requests that were told to come later."
        )
        refused.add_metric([], self._house.refused)
        yield refused
