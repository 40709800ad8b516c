"""Show what the server does: /, /health, /slots, /metrics and /explain/{request}."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse

from mlxrunner.engine.thread import HeldSlot, Stats
from mlxrunner.profiling.metrics import REMEMBERED, RequestLog
from mlxrunner.profiling.report import page as plots
from mlxrunner.profiling.report.page import document, safe
from mlxrunner.profiling.report.summary import Summary, blame_of, client_of, id_of
from mlxrunner.profiling.schema import Event
from mlxrunner.server.events import ApiError, PrintableResponse
from mlxrunner.server.manager import ModelManager
from mlxrunner.server.models import ServedModel
from mlxrunner.terminal.output import moment, number, percent, size

if TYPE_CHECKING:
    from prometheus_client.core import Metric


WIDTH = 100
"""Columns of an explanation."""


def watch_router(manager: ModelManager, record: RequestLog) -> APIRouter:
    """Return the routes about a server's models and requests."""
    record.counts.registry.register(ServerGauges(manager))
    router = APIRouter(tags=["watch"], default_response_class=PrintableResponse)

    @router.get("/", response_class=HTMLResponse)
    def page(request: Request) -> str:
        """Show in a browser what runs, what was reused, and what to change."""
        models = [_model(manager, one, record) for one in opened_in(manager)]
        return status_page(models, record.last(REMEMBERED), str(request.base_url))

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> dict[str, Any]:
        """Say that the server runs, for how long, and which models it holds."""
        return {
            "status": "stopping" if manager.is_stopping else "ok",
            "uptime_s": round(time.time() - manager.began, 3),
            "models": [manager.names.show(one.name) for one in opened_in(manager)],
        }

    @router.get("/slots")
    async def slots() -> dict[str, Any]:
        """List what each conversation holds, for each loaded model."""
        return {"models": [_model(manager, one, record) for one in opened_in(manager)]}

    @router.get("/metrics")
    def metrics() -> Response:
        """Return counters and gauges in Prometheus text format."""
        return PlainTextResponse(record.metrics(), media_type="text/plain; version=0.0.4")

    @router.get("/explain/{request}", response_class=PlainTextResponse)
    def explain(request: str) -> str:
        """Say in words what a request reused, why not more, and what to change."""
        event = record.event(request)
        if event is None:
            raise ApiError(
                404,
                f"no request {request:.100} is known: it is running, or older than the last "
                f"{REMEMBERED:,}; `mlxrunner explain FILE ID` reads the file of --events",
                code="not_found",
            )
        return explained(event)

    return router


def opened_in(manager: ModelManager) -> Iterator[ServedModel]:
    for place in manager.models_held:
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


def _model(manager: ModelManager, opened: ServedModel, record: RequestLog) -> dict[str, Any]:
    stats = opened.runner.stats()
    return {
        "model": manager.names.show(opened.name),
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


def _conversation(held: HeldSlot, opened: ServedModel, record: RequestLog) -> dict[str, Any]:
    """Describe what a slot holds, and whose it is: of its request, or of the last one."""
    running = held.prompt
    caller = record.caller(opened.name, held.slot) if running is None else running.caller
    state = "busy" if held.is_busy else "idle"
    found = {"slot": held.slot, "state": state, "tokens": held.tokens, "bytes": held.bytes}
    return found | {name: getattr(caller, name, None) for name in ("client", "session", "request")}


GAUGES = {
    "slots": "Requests that a model can answer at a time.",
    "busy": "Slots whose request runs.",
    "waiting": "Requests that wait for a slot, or for room.",
    "tokens": "Tokens that the slots hold.",
    "bytes": "Bytes of keys, values and checkpoints in use.",
    "parked": "Bytes of the disk cache.",
}
"""The fields of `Stats` that are metrics, and their descriptions."""


class ServerGauges:
    """A collector of what the server holds at the moment."""

    def __init__(self, manager: ModelManager) -> None:
        self._manager = manager

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as prometheus_client asks of a collector."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        stats: dict[str, Stats] = {one.name: one.runner.stats() for one in opened_in(self._manager)}
        for name, text in GAUGES.items():
            family = GaugeMetricFamily(f"mlxrunner_server_{name}", text, labels=["model"])
            for model, found in stats.items():
                family.add_metric([model], getattr(found, name))
            yield family
        refused = CounterMetricFamily(
            "mlxrunner_server_refused", "Requests that were told to come later."
        )
        refused.add_metric([], self._manager.refused)
        yield refused


REFRESH_S = 5
"""Seconds after which the browser loads the page again."""
MISSES = 12
"""The most misses that are shown."""


def status_page(models: Sequence[Mapping[str, Any]], events: Sequence[Event], address: str) -> str:
    """Return the page of the server at `address`, which ends with a slash.

    `models` are those of `/slots`; `events` the last ones, youngest first.
    """
    summary = Summary()
    for event in reversed(events):
        summary.add(event)
    shown = "no requests yet"
    if events:
        last = "last request" if len(events) == 1 else f"last {number(len(events))} requests"
        shown = f"{percent(summary.hit_rate)} of the prompt tokens of the {last} were cached"
    held = _conversations(models, events)
    panels = [_connect(models, address), held]
    if events:
        panels = [plots.diagnosis(summary), plots.timeline(summary), held, _requests(events)]
    body = [
        "<header><h1>mlxrunner serve</h1>",
        f"<p>{_loaded(models)} {safe(shown[:1].upper() + shown[1:])}.</p>",
        "</header>",
        '<main class="panels">',
        *panels,
        "</main>",
        "<footer>The same as data: <code>/slots</code>, <code>/metrics</code>, "
        "<code>/explain/{request}</code>, <code>/health</code>.</footer>",
    ]
    return document(f"mlxrunner serve: {shown}", body, refresh_s=REFRESH_S)


def _loaded(models: Sequence[Mapping[str, Any]]) -> str:
    if not models:
        return "No model is loaded; a request loads its own."
    return " ".join(
        f"{safe(one['model'])}: {one['busy']} of {one['slots']} slots busy, {one['waiting']} "
        f"waiting, {size(one['bytes'])} of conversations, {size(one['parked_bytes'])} on "
        "disk."
        for one in models
    )


def _conversations(models: Sequence[Mapping[str, Any]], events: Sequence[Event]) -> str:
    """Return a panel with what each slot holds, those that run first; nothing without any."""
    known = set(map(id_of, events))
    held = [(model["model"], one) for model in models for one in model["conversations"]]
    if not held:
        return ""
    rows: list[list[str | plots.TableLink]] = [
        [
            *(one["state"], one["client"] or "", one["session"] or ""),
            *(number(one["tokens"]), size(one["bytes"])),
            _explained(one["request"]) if one["request"] in known else one["request"] or "",
            model,
        ]
        for model, one in sorted(held, key=lambda pair: (pair[1]["state"] != "busy", pair[0]))
    ]
    columns = ["state", "client", "session", "tokens", "size", "request", "model"]
    text = "The tokens that each slot holds. An idle conversation continues where it ended."
    table = plots.table(columns, rows, kind="stack")
    return plots.panel("Conversations", text, table, is_wide=True)


def _connect(models: Sequence[Mapping[str, Any]], address: str) -> str:
    """Return a panel that says how to connect a client."""
    model = models[0]["model"] if models else "MODEL"
    rows = [
        ["OpenAI", f"base URL {address}v1, any API key unless --api-key is set, model {model}"],
        ["Anthropic", f"ANTHROPIC_BASE_URL={address.rstrip('/')}, ANTHROPIC_MODEL={model}"],
        ["Ollama", f"OLLAMA_HOST={address.rstrip('/')}"],
        ["coding agents", "mlxrunner launch claude, codex, opencode ..."],
    ]
    table = plots.table(["client", "settings"], rows, kind="stack")
    text = "No requests yet. This page fills as they come."
    return plots.panel("Connect a client", text, table, is_wide=True)


def _requests(events: Sequence[Event]) -> str:
    """Return a panel with the latest requests that lost tokens, and what they lost them to."""
    lost = [event for event in events if event.missed_tokens or event.displaced_tokens]
    rows = [_request_row(event) for event in lost[:MISSES]]
    columns = ["request", "at", "client", "prompt", "cached", "missed", "displaced", "cause"]
    text = "Counts are prompt tokens. A link explains each request beside the earlier one."
    table = plots.table(columns, rows, kind="stack")
    return plots.panel("Latest requests that evaluated tokens again", text, table, is_wide=True)


def _request_row(event: Event) -> list[str | plots.TableLink]:
    counts = (
        number(getattr(event, f"{kind}_tokens"))
        for kind in ("prompt", "cached", "missed", "displaced")
    )
    cause, _, _ = blame_of(event, "displaced" if event.displaced_tokens else "missed")
    return [_explained(id_of(event)), moment(event.time), client_of(event), *counts, cause]


def _explained(request: str) -> plots.TableLink:
    return plots.TableLink(request, f"/explain/{request}")
