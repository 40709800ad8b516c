"""Print a summary or a simulation in the terminal, with rich.

The output may be wide or narrow, in colour or piped. It shows all figures at every width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from mlxrunner.errors import OptionError
from mlxrunner.profiling.logs import read_events
from mlxrunner.profiling.report.report import REPORT_EVERY, must_have
from mlxrunner.profiling.report.summary import (
    OUTCOMES,
    Summary,
    blame_of,
    in_requests,
    name_of,
    words,
)
from mlxrunner.profiling.schema import (
    ClientRequest,
    Divergence,
    Event,
    Pieces,
    Side,
    part_of,
)
from mlxrunner.terminal.output import moment, number, percent, rate, seconds, visible

if TYPE_CHECKING:
    from mlxrunner.profiling.replay.trials import Simulation


COLOURS = {"hit": "green", "partial": "yellow", "miss": "yellow"}
"""The colours of outcomes; red is only what could have been avoided."""
FIGURES = {
    "at best",
    "hit rate",
    *"requests tokens time p50 p90 p99 reused failed cut change".split(),
    *"cached missed displaced new".split(),
}
NARROW = 72
"""The least columns of a terminal that shows the longer columns."""


def console(stream: IO[str]) -> Console:
    """Make a console that never takes text of a file for markup, an emoji or a link."""
    return Console(file=stream, markup=False, highlight=False, emoji=False)


def show_report(summary: Summary, to: Console) -> None:
    """Print the whole report."""
    _diagnosis(summary, to)
    to.print(_grid(_totals(summary)))
    _over_time(summary, to)
    if runs := summary.batches.runs:
        rows = (
            (
                name_of(run),
                percent(run.reuse),
                percent(run.best),
                number(run.failed.total() + run.refused),
                number(run.cut),
            )
            for run in runs
        )
        to.print()
        _table(to, "batches", ("order", "reused", "at best", "failed", "cut"), rows)
        to.print()
        for run in runs:
            to.print(_text(f"{moment(run.time)} UTC: {words(run)}"))
    times = {outcome: summary.ttft[outcome].as_dict() for outcome in OUTCOMES}
    known: Iterator[tuple[str | Text, ...]] = (
        (
            _text(outcome, COLOURS[outcome]),
            number(int(row["requests"] or 0)),
            *(seconds(row[name]) for name in ("p50", "p90", "p99")),
        )
        for outcome, row in times.items()
        if row["requests"]
    )
    columns = ("outcome", "requests", "p50", "p90", "p99")
    to.print()
    _table(to, "time to the first token", columns, known)
    if misses := summary.costliest:
        title = "most tokens evaluated again (mlxrunner explain FILE ID)"
        lost = ((m.id, seconds(m.seconds), number(m.tokens), m.client, m.cause) for m in misses)
        to.print()
        _table(to, title, ("id", "time", "tokens", "client", "cause"), lost)


def show_simulation(simulation: Simulation, to: Console) -> None:
    """Print a row for each setting, and how far the replay agrees with the log."""
    first = simulation.rows[0]
    rows = (
        (
            row.what.name,
            percent(row.hit_rate),
            *("-" if count is None else number(count) for count in row.counts.values()),
            _change(row.evaluated, first.evaluated) if row is not first else "",
        )
        for row in simulation.rows
    )
    _table(to, "", ("replayed", "hit rate", *first.counts, "change"), rows)
    to.print(_text("Counts are prompt tokens. change: of those evaluated (all but cached)."))
    to.print()
    if simulation.side_by_side:
        to.print(_text(_side_by_side(simulation)))
    agreed, requests = simulation.agreed, simulation.requests - simulation.only_logged
    if 0 < requests == agreed:
        said = f"As it was run, each of the {number(requests)} requests found exactly what the log "
        to.print(_text(f"{said}says it had found."))
    elif requests:
        said = (
            f"As it was run, {number(agreed)} of {number(requests)} requests found exactly what "
            "the log says they had found; the others began with a cache that is not in the log, or "
            "followed an interrupt."
        )
        to.print(_text(said, "yellow"))
    if (guesses := simulation.guesses) is not None:
        said = (
            f"--speculate lookup would have guessed {number(guesses.drafted)} tokens, "
            f"{number(guesses.accepted)} of them right: {number(guesses.passes)} forward passes "
            f"for the answers instead of {number(guesses.tokens)}."
        )
        to.print(_text(said))


def _side_by_side(simulation: Simulation) -> str:
    """Say which rows replay the requests in slots, and which do not."""
    ran = f"{number(simulation.side_by_side)} requests ran side by side, in slots of their own. "
    order = "one at a time, in the order in which they began."
    if not simulation.only_logged:
        return (
            f"{ran}With other slots and sorted by prefix they do so again, each as soon as a slot "
            f"is free; all other rows but the first replay them {order}"
        )
    return (
        f"{ran}{number(simulation.only_logged)} of these are in a log that does not say how; the "
        f"first row is what it says they had found. All other rows replay those {order}"
    )


def _change(tokens: int, before: int) -> str:
    if tokens == before:
        return "the same"
    return f"{(tokens - before) / before:+.1%}" if before else "more"


def sparkline(shares: list[float], *, is_ascii: bool) -> str:
    """Return a mark for each share from 0 to 1."""
    marks = "_.-=+*#@" if is_ascii else "▁▂▃▄▅▆▇█"
    return "".join(marks[min(int(share * len(marks)), len(marks) - 1)] for share in shares)


def _totals(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield the rows of the summary's sums."""
    tokens = summary.tokens
    period = f"{moment(summary.first_time)} to {moment(summary.last_time)} UTC"
    yield "requests", f"{number(summary.requests)}, {period}"
    names = [name for name, _ in summary.models.most_common(3)]
    yield "models", ", ".join(names) + (" ..." if len(summary.models) > 3 else "")
    share = f"{percent(summary.hit_rate)} of {number(tokens['prompt'])}"
    yield "hit rate by token", f"{share} prompt tokens were reused"
    four = ("cached", "missed", "displaced", "new")
    ahead = f" ({number(tokens['prefetched'])} of these evaluated in advance)"
    account = " + ".join(f"{name} {number(tokens[name])}" for name in four)
    yield "", account + (ahead if tokens["prefetched"] else "")
    counts = ", ".join(f"{number(summary.outcomes[outcome])} {outcome}" for outcome in OUTCOMES)
    yield "hit rate by request", f"{percent(summary.request_hit_rate)}: {counts}"
    saved = f"{seconds(summary.saved_s)}, as estimated from this machine's own prefills"
    if summary.estimated < summary.requests:
        saved += f", in {number(summary.estimated)} of the requests"
    yield "time saved", saved if summary.estimated else "-"
    rates = f"prefill {rate(summary.prefill_rate)}, decode {rate(summary.decode_rate)}"
    yield "rates", rates + (" for each of several at a time" if summary.side_by_side else "")
    if drafted := summary.drafted.total():
        right = number(summary.accepted.total())
        yield "guessed", f"{right} of {number(drafted)} tokens of answers were right"
    interrupted, failed = summary.finishes["interrupted"], summary.finishes["error"]
    if interrupted or failed:
        yield "ended early", f"{number(interrupted)} interrupted, {number(failed)} by an error"
    if summary.verified:
        differed = f"of which {number(summary.unequal)} differed"
        yield "verified cold", f"{number(summary.verified)}, {differed}"
    if summary.untested:
        why = "one wrong token would be within the tolerance"
        yield "untested", f"{number(summary.untested)}: {why}"


def _over_time(summary: Summary, to: Console) -> None:
    bins = summary.timeline.bins
    if len(bins) < 2:
        return
    per_mark = -(-len(bins) // max(to.width - 2, 10))
    groups = [bins[i : i + per_mark] for i in range(0, len(bins), per_mark)]
    shares = [
        sum(one.cached for one in group) / max(sum(one.prompt for one in group), 1)
        for group in groups
    ]
    width = per_mark * summary.timeline.width
    each = "a mark is a request" if width == 1 else f"a mark is {number(width)} requests"
    marks = sparkline(shares, is_ascii=to.options.ascii_only)
    to.print()
    to.print(Text("hit rate over time", "bold"), Text(f"0 to 100 % of the prompt tokens, {each}"))
    to.print(Text(marks, "green"), soft_wrap=False)


def _diagnosis(summary: Summary, to: Console) -> None:
    """Print what costs most and what helps, then all findings, each with its remedy."""
    findings, first, rest = summary.diagnosis, summary.headline, summary.unavoidable
    if first is None:
        said = (
            "Nothing to change: no token was evaluated again that other settings or another client "
            "would have saved."
        )
        to.print(_text(said, "bold"))
    else:
        to.print(_text(first.sentence, "bold red"))
        to.print(_text(f"What to change: {first.remedy}."))
    if first is not None and len(findings) > 1:
        rows = (
            (f.client, f.cause, f.kind, number(f.tokens), seconds(f.seconds), number(f.requests))
            for f in findings
        )
        columns = ("client", "cause", "kind", "tokens", "time", "requests")
        to.print()
        _table(to, "evaluated again", columns, rows)
        to.print()
        if named := {one.cause: one.remedy for one in findings if one.cause != first.cause}:
            to.print(_grid(named.items()))
    if rest.tokens:
        more = f"{number(rest.tokens)} {'' if first is None else 'more '}tokens"
        count = in_requests(rest.requests)
        to.print(_text(f"Nothing could have saved {more} that were evaluated again, in {count}."))
    to.print()


def _grid(rows: Iterable[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(*map(_text, row))
    return grid


def _table(
    to: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]]
) -> None:
    """Print a table. On a screen that would cut figures off, print a line for each of them."""
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    cells = [[one if isinstance(one, Text) else _text(one) for one in row] for row in rows]
    for index, name in enumerate(columns):
        is_figure = name in FIGURES
        is_whole = is_figure or name == "id"
        least = max(cell_len(str(cell)) for cell in (name, *(row[index] for row in cells)))
        table.add_column(
            name,
            justify="right" if is_figure else "left",
            no_wrap=is_whole,
            overflow="fold",
            header_style="dim",
            min_width=least if is_whole else len(name),
        )
    for row in cells:
        table.add_row(*row)
    unbounded = to.options.update(max_width=sys.maxsize)
    if Measurement.get(to, unbounded, table).minimum <= to.width:
        to.print(table)
        return
    grid = _grid([])
    for row in cells:
        for name, cell in zip(columns, row, strict=True):
            grid.add_row(name, cell)
        grid.add_row("", "")
    if title:
        to.print(Text(title, "bold"))
    to.print(grid)


def _text(text: str, style: str = "") -> Text:
    return Text(visible(text), style)


LEAST_SIDES = 50
"""The least columns of a terminal that shows the two sides side by side."""
HASHED = (
    "Of tokens, only keyed hashes were logged: equal ones are equal tokens. To see the text next "
    "time, run the program with --log-text (the events then hold text of your prompts)."
)


def find_event(
    files: Iterable[Path], wanted: str | None, progress: Callable[[int], None] = lambda events: None
) -> Event:
    """Return the event with the id `wanted`, or the only event whose id begins with it.

    The id of a server's request, as its response has it, finds its event, too.

    None finds the last event. `progress` is called now and then with the number of events so far.
    Raise OptionError if there is no such event, or several. Raise ReadError if a file can't be read
    or there are no events.
    """
    paths = list(files)
    events = read_events(paths)
    found: dict[str, Event] = {}
    count = 0
    for event in events:
        count += 1
        if count % REPORT_EVERY == 0:
            progress(count)
        if wanted is None:
            found = {event.id: event}
        elif event.caller is not None and event.caller.request == wanted:
            return event
        elif event.id.startswith(wanted):
            found[event.id] = event
            if event.id == wanted or len(found) > 1:
                break
    must_have(count, paths, events.skipped, "events")
    if wanted in found:
        return found[wanted]
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise OptionError(
            f"{wanted!r} is the beginning of several ids, {' and '.join(found)} among them: give "
            "more of it"
        )
    raise OptionError(
        f"no event has the id {wanted!r}: mlxrunner report lists the costliest, --last takes the "
        "last one"
    )


def show_event(event: Event, to: Console) -> None:
    """Print what happened, the two sides, and what to change."""
    head = f"{event.id}  {event.command}, {event.model}, {moment(event.time)} UTC: "
    colour = {"hit": "green", "partial": "yellow"}.get(event.outcome, "red")
    to.print(Text(visible(head)).append(event.outcome, colour))
    if event.caller is not None:
        to.print(Text(visible(_asker(event.caller))))
    explained = event.explain()
    to.print(Text(visible(f"{explained[:1].upper()}{explained[1:]}."), "bold"))
    to.print(Text(_cost(event)))
    if event.restored_tokens or event.evicted:
        to.print(Text(_moved(event)))
    if event.divergence is not None:
        to.print()
        _sides(event.divergence, to)
    mend = _remedy(event)
    if mend:
        to.print()
        to.print(Text("What to change: ", "bold").append(f"{visible(mend)}.", "not bold"))


def _asker(caller: ClientRequest) -> str:
    """Say whose request it was, and which rules changed its prompt."""
    said = f"request {caller.request} of {caller.client or 'an unknown client'}"
    if caller.session is not None:
        said += f", session {caller.session}"
    if caller.cause is not None:
        where = "" if caller.message is None else f" in message {caller.message}"
        said += f"; cause: {caller.cause}{where}"
    if caller.note is not None:
        said += f"; its answer: {caller.note}"
    if caller.replaced:
        said += f"; replaced by short texts: {', '.join(caller.replaced)}"
    if caller.rules:
        said += f"; rules that changed the prompt: {', '.join(caller.rules)}"
    return said


def _remedy(event: Event) -> str:
    """Return the change that helps; empty if nothing was lost."""
    if event.displaced_tokens or event.missed_tokens:
        mend = blame_of(event, "displaced" if event.displaced_tokens else "missed")[2]
        if mend:
            return mend
    caller = event.caller
    return "" if caller is None or caller.remedy is None else caller.remedy.removesuffix(".")


def _cost(event: Event) -> str:
    """Return a sentence about the tokens evaluated and lost, and the time."""
    evaluated, ahead = event.evaluated_tokens, event.prefetched_tokens
    said = f"{number(evaluated)} {'was' if evaluated == 1 else 'were'} evaluated"
    if ahead:
        said += f" and {number(ahead)} had been in advance"
    again = event.missed_tokens + event.displaced_tokens
    if again:
        said += f", {number(again)} of them because of that"
        if event.prefill_rate:
            said += f" ({seconds(again / event.prefill_rate)})"
    if event.ttft_s is None:
        return f"{said}; there was no first token."
    return f"{said}; first token after {seconds(event.ttft_s)}."


def _moved(event: Event) -> str:
    """Say what came back from disk for the request, and what was given up to make room for it."""
    said = []
    if event.restored_tokens:
        said.append(f"{number(event.restored_tokens)} of the reused tokens came back from disk.")
    for one in event.evicted:
        need = "a slot" if one.cause == "slot" else "memory"
        where = "in the disk cache" if one.parked else "lost"
        said.append(f"To get {need}, it evicted {number(one.tokens)} tokens, which are {where}.")
    return " ".join(said)


def _sides(divergence: Divergence, to: Console) -> None:
    """Print the two sides of a divergence."""
    is_text, before, left, right = divergence.compared()
    is_plain = to.color_system is None
    columns = [
        (f"{name}: {_whereabouts(side)}", _marked(before, pieces, mark, is_text, is_plain))
        for name, side, pieces, mark in (
            ("earlier", divergence.previous, left, "-"),
            ("now", divergence.current, right, "+"),
        )
    ]
    if to.width < LEAST_SIDES:
        for title, text in columns:
            to.print(Text(visible(title), "bold"))
            to.print(text)
    else:
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), expand=False)
        for title, _ in columns:
            table.add_column(Text(visible(title)), ratio=1, overflow="fold", header_style="bold")
        table.add_row(*(text for _, text in columns))
        to.print(table)
    if not is_text:
        to.print()
        to.print(Text(HASHED, "dim"))


def _marked(before: str, pieces: Pieces, mark: str, is_text: bool, is_plain: bool) -> Text:
    """Return one side; without colours (`is_plain`), differences are marked as by git."""
    text = Text().append(_shown(before), "dim").append("│", "bold")
    is_plain = is_plain and any(is_common and piece.strip() for piece, is_common in pieces)
    for piece, is_common in pieces:
        shown = _shown(piece, is_blank_seen=is_text and not is_common)
        if is_plain and not is_common:
            shown = f"{{{mark}{shown}{mark}}}"
        text.append(shown, "" if is_common else f"bold {'red' if mark == '-' else 'green'}")
    return text if pieces else text.append("(ends here)", "italic")


def _shown(piece: str, *, is_blank_seen: bool = False) -> str:
    """Make line ends and tabs visible, and blanks if they are the difference."""
    seen = visible(piece).replace("\n", "↵\n").replace("\t", "⇥")
    return seen.replace(" ", "·") if is_blank_seen and not piece.strip() else seen


def _whereabouts(side: Side) -> str:
    """Return the place of a side in words."""
    if side.part is None:
        return "(past its end)" if not side.tokens else ""
    message = "" if side.message is None else f" of message {side.message} ({side.role})"
    return f"{part_of(side)}{message}"
