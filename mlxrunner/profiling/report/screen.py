"""Print a summary or a simulation in the terminal, with rich.

The output may be wide or narrow, in colour or piped. It shows all figures at every width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING

from mlxrunner.profiling.reasons import place_remedy, remedy
from mlxrunner.profiling.report.aggregate import OUTCOMES, LossSum, Miss, Summary, by_tokens
from mlxrunner.profiling.report.batches import BatchRun, name_of, words
from mlxrunner.profiling.report.formatting import moment, number, percent, rate, seconds
from mlxrunner.terminal.text import visible

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod, RenderableType
    from rich.table import Table
    from rich.text import Text

    from mlxrunner.profiling.replay.guesses import Guesses
    from mlxrunner.profiling.replay.trials import Simulation

COLOURS = {"hit": "green", "partial": "yellow", "miss": "yellow"}
"""The colours of outcomes; red is only what could have been avoided."""
BAR = 24
"""The most columns of a bar."""
FIGURES = (
    "requests",
    "tokens",
    "time",
    "p50",
    "p90",
    "p99",
    "reused",
    "at best",
    "failed",
    "cut",
    "hits",
    "evaluated",
    "change",
)
"""The columns of figures, which are aligned at the right."""
NARROW = 72
"""The least columns of a terminal that shows bars and the longer columns."""


def console(stream: IO[str]) -> Console:
    """Make a console that never takes text of a file for markup, an emoji or a link."""
    from rich.console import Console

    return Console(file=stream, markup=False, highlight=False, emoji=False)


def show(summary: Summary, to: Console) -> None:
    """Print the whole report."""
    _totals(summary, to)
    _batches(summary.batches.runs, to)
    _first_tokens(summary, to)
    _losses("tokens lost, by reason", summary.reasons, remedy, to)
    _losses("tokens lost, by place", summary.places, place_remedy, to)
    _costliest(summary.costliest, to)


def show_simulation(simulation: Simulation, to: Console) -> None:
    """Print a row for each setting, and how far the replay agrees with the log."""
    from rich.bar import Bar

    is_wide = to.width >= NARROW and not _is_ascii(to)
    columns = ("replayed", "reused", "hits", "evaluated", "change", *(["bar"] if is_wide else []))
    table = _table("", columns)
    before = simulation.rows[0].evaluated
    for row in simulation.rows:
        change = _change(row.evaluated, before) if row is not simulation.rows[0] else ""
        drawn = [Bar(1, 0, row.hit_rate, color="green")] if is_wide else []
        table.add_row(
            _text(row.what.name),
            percent(row.hit_rate),
            number(row.hits),
            number(row.evaluated),
            change,
            *drawn,
        )
    to.print(table)
    to.print()
    if simulation.side_by_side:
        to.print(_text(_side_by_side(simulation)))
    if simulation.requests > simulation.only_logged:
        to.print(_agreement(simulation.agreed, simulation.requests - simulation.only_logged))
    if simulation.guesses is not None:
        to.print(_text(_guesses(simulation.guesses)))


def _guesses(guesses: Guesses) -> str:
    """Say how many tokens of the answers were guessed, and the forward passes that are left."""
    return (
        f"--speculate lookup would have guessed {number(guesses.drafted)} tokens, "
        f"{number(guesses.accepted)} of them right: {number(guesses.passes)} forward passes for "
        f"the answers instead of {number(guesses.tokens)}."
    )


def _agreement(agreed: int, requests: int) -> Text:
    """Say how many of the replayed requests found the same as the log says."""
    if agreed == requests:
        return _text(
            f"As it was run, each of the {number(requests)} requests found exactly what the log "
            "says it had found."
        )
    return _text(
        f"As it was run, {number(agreed)} of {number(requests)} requests found exactly what the "
        "log says they had found; the others began with an entry that is not in the log, or "
        "followed an interrupt.",
        "yellow",
    )


def _side_by_side(simulation: Simulation) -> str:
    """Say which rows replay the requests in slots, and which do not."""
    ran = f"{number(simulation.side_by_side)} requests ran side by side, in slots of their own. "
    again = (
        "with other slots and sorted by prefix they do so again, each as soon as a slot is free; "
    )
    others = (
        "all other rows but the first replay them one at a time, in the order in which they began."
    )
    if not simulation.only_logged:
        return f"{ran}{again.capitalize()}{others}"
    said = (
        f"{number(simulation.only_logged)} of these are in a log that does not say how; the first "
        "row is what it says they had found. "
    )
    return (
        f"{ran}{said}All other rows replay those one at a time, in the order in which they began."
    )


def sparkline(shares: list[float], *, is_ascii: bool) -> str:
    """Return a mark for each share from 0 to 1."""
    marks = "_.-=+*#@" if is_ascii else "▁▂▃▄▅▆▇█"
    return "".join(marks[min(int(share * len(marks)), len(marks) - 1)] for share in shares)


def _totals(summary: Summary, to: Console) -> None:
    tokens = summary.tokens
    new = tokens["evaluated"] + tokens["ahead"] - tokens["lost"]
    ahead = f" ({number(tokens['ahead'])} of these evaluated in advance)" if tokens["ahead"] else ""
    names = [visible(name) for name, _ in summary.models.most_common(3)]
    models = ", ".join(names) + (" ..." if len(summary.models) > 3 else "")
    period = f"{moment(summary.first_time)} to {moment(summary.last_time)} UTC"
    overlap = " for each of several at a time" if summary.side_by_side else ""
    reused = f"reused {number(tokens['saved'])} + lost {number(tokens['lost'])}"
    rows = [
        ("requests", f"{number(summary.requests)}, {period}"),
        ("models", models),
        (
            "hit rate by token",
            f"{percent(summary.hit_rate)} of {number(tokens['prompt'])} prompt tokens were reused",
        ),
        ("", f"{reused} + new {number(new)}{ahead}"),
        ("hit rate by request", f"{percent(summary.request_hit_rate)}: {_counts(summary)}"),
        ("time saved", _time_saved(summary)),
        (
            "rates",
            f"prefill {rate(summary.prefill_rate)}, decode {rate(summary.decode_rate)}{overlap}",
        ),
        *_guessed(summary),
        *_exceptions(summary),
    ]
    to.print(_grid(rows))
    _over_time(summary, to)


def _guessed(summary: Summary) -> list[tuple[str, str]]:
    """Return the row about guessed tokens of answers, if there were any."""
    right, drafted = summary.accepted.total(), summary.drafted.total()
    said = f"{number(right)} of {number(drafted)} tokens of answers were right"
    return [("guessed", said)] if drafted else []


def _time_saved(summary: Summary) -> str:
    if not summary.estimated:
        return "-"
    is_partial = summary.estimated < summary.requests
    known = f", in {number(summary.estimated)} of the requests" if is_partial else ""
    return f"{seconds(summary.saved_s)}, as estimated from this machine's own prefills{known}"


def _exceptions(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield rows about requests that ended early or were run again cold, if there are any."""
    interrupted, failed = summary.finishes["interrupted"], summary.finishes["error"]
    if interrupted or failed:
        yield "ended early", f"{interrupted} interrupted, {failed} by an error"
    if summary.verified:
        differed = f"of which {number(summary.unequal)} differed"
        yield "verified cold", f"{number(summary.verified)}, {differed}"
    if summary.untested:
        why = "one wrong token would be within the tolerance"
        yield "untested", f"{number(summary.untested)}: {why}"


def _change(tokens: int, before: int) -> str:
    return (
        "the same"
        if tokens == before
        else f"{(tokens - before) / before:+.1%}"
        if before
        else "more"
    )


def _counts(summary: Summary) -> str:
    return ", ".join(f"{number(summary.outcomes[outcome])} {outcome}" for outcome in OUTCOMES)


def _over_time(summary: Summary, to: Console) -> None:
    from rich.text import Text

    bins = summary.timeline.bins
    if len(bins) < 2:
        return
    room = max(to.width - 2, 10)
    per_mark = -(-len(bins) // room)
    groups = [bins[i : i + per_mark] for i in range(0, len(bins), per_mark)]
    shares = [
        sum(one.cached for one in group) / max(sum(one.prompt for one in group), 1)
        for group in groups
    ]
    width = per_mark * summary.timeline.width
    each = "a mark is a request" if width == 1 else f"a mark is {number(width)} requests"
    to.print()
    to.print(Text("hit rate over time", "bold"), Text(f"0 to 100 % of the prompt tokens, {each}"))
    to.print(Text(sparkline(shares, is_ascii=_is_ascii(to)), "green"), soft_wrap=False)


def _batches(runs: Sequence[BatchRun], to: Console) -> None:
    if not runs:
        return
    table = _table("batches", ("order", "reused", "at best", "failed", "cut"))
    for run in runs:
        failed = run.failed.total() + run.refused
        table.add_row(
            _text(name_of(run)),
            percent(run.reuse),
            percent(run.best),
            number(failed),
            number(run.cut),
        )
    _print(table, to)
    to.print()
    for run in runs:
        to.print(_text(f"{moment(run.time)} UTC: {words(run)}"))


def _first_tokens(summary: Summary, to: Console) -> None:
    table = _table("time to the first token", ("outcome", "requests", "p50", "p90", "p99"))
    for outcome in OUTCOMES:
        row = summary.ttft[outcome].as_dict()
        if row["requests"]:
            times = (seconds(row[name]) for name in ("p50", "p90", "p99"))
            table.add_row(
                _text(outcome, COLOURS[outcome]), number(int(row["requests"] or 0)), *times
            )
    _print(table, to)


def _losses(
    title: str, losses: Mapping[str, LossSum], mend: Callable[[str], str], to: Console
) -> None:
    from rich.bar import Bar

    if not losses:
        return
    is_wide = to.width >= NARROW and not _is_ascii(to)
    table = _table(title, ("", "requests", "tokens", "time", *(["bar"] if is_wide else [])))
    most = max(loss.tokens for loss in losses.values())
    for name, loss in by_tokens(losses):
        colour = "red" if loss.avoidable else "yellow"
        drawn = [Bar(max(most, 1), 0, loss.tokens, color=colour)] if is_wide else []
        table.add_row(
            _text(name), number(loss.requests), number(loss.tokens), seconds(loss.seconds), *drawn
        )
    _print(table, to)
    mended = [(name, mend(name)) for name, loss in by_tokens(losses) if loss.tokens and mend(name)]
    if mended:
        to.print()
        to.print(_text("what to change", "bold"))
        to.print(_grid(mended))


def _costliest(misses: list[Miss], to: Console) -> None:
    if not misses:
        return
    is_wide = to.width >= NARROW
    table = _table(
        "the costliest misses (mlxrunner explain FILE ID)",
        ("id", "time", "tokens", "reason", *(["where"] if is_wide else [])),
    )
    for miss in misses:
        where = [_text(miss.place)] if is_wide else []
        table.add_row(
            _text(miss.id), seconds(miss.seconds), number(miss.tokens), _text(miss.reason), *where
        )
    _print(table, to)


def _grid(rows: list[tuple[str, str]]) -> RenderableType:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(_text(name), _text(value))
    return grid


def _table(title: str, columns: tuple[str, ...]) -> Table:
    from rich.table import Table

    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for name in columns:
        if name == "bar":
            table.add_column("", min_width=6, max_width=BAR)
            continue
        is_figure = name in FIGURES
        justify: JustifyMethod = "right" if is_figure else "left"
        table.add_column(
            name,
            justify=justify,
            no_wrap=is_figure or name == "id",
            overflow="fold",
            header_style="dim",
            min_width=len(name),
        )
    return table


def _print(table: Table, to: Console) -> None:
    to.print()
    to.print(table)


def _text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(visible(text), style)


def _is_ascii(to: Console) -> bool:
    return to.options.ascii_only
