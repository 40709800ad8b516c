"""Explain one request: show the entry and the prompt side by side where they part."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING

from mlxrunner.errors import OptionError
from mlxrunner.profiling.reading import read_events
from mlxrunner.profiling.reasons import PARTING, place_remedy, remedy
from mlxrunner.profiling.report.aggregate import place_of
from mlxrunner.profiling.report.formatting import moment, number, seconds
from mlxrunner.profiling.report.report import REPORT_EVERY, must_have
from mlxrunner.profiling.schema import ClientRequest, Divergence, Event, Side, part_of
from mlxrunner.terminal.text import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

Pieces = list[tuple[str, bool]]
"""The pieces of a text; True for those that the other side has as well."""
NARROW = 50
"""The least columns of a terminal that shows the two sides side by side."""
MOST = 200
"""The most words of a side that are compared and shown. Comparing takes their cube at worst."""
LONGEST_WORD = 400
"""The most characters of a word that are shown."""
HASHED = (
    "Of tokens, only keyed hashes were logged: equal ones are equal tokens. To see the text next "
    "time, run the program with --log-text (the events then hold text of your prompts)."
)


def find(
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


def show(event: Event, to: Console) -> None:
    """Print what happened, the two sides, and what to change."""
    from rich.text import Text

    head = f"{event.id}  {event.command}, {event.model}, {moment(event.time)} UTC: "
    to.print(
        Text(visible(head)).append(
            event.outcome, {"hit": "green", "partial": "yellow"}.get(event.outcome, "red")
        )
    )
    if event.caller is not None:
        to.print(Text(visible(_asker(event.caller))))
    to.print(Text(visible(_capital(event.explain()) + "."), "bold"))
    to.print(Text(_cost(event)))
    if event.restored_tokens or event.evicted:
        to.print(Text(_moved(event)))
    if event.divergence is not None:
        to.print()
        _sides(event.divergence, to)
    mend = _remedy(event)
    if mend:
        to.print()
        to.print(Text("What to change: ", "bold").append(f"{mend}.", "not bold"))


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
    """Return the change that helps; empty if nothing was lost.

    It depends on the place where prompt and entry part, or else on the reason.
    """
    if event.caller is not None and event.caller.remedy is not None:
        return event.caller.remedy.removesuffix(".")
    if not event.lost_tokens and event.reason in PARTING:
        return ""
    return (place_remedy(place_of(event)) if event.reason == "diverged" else "") or remedy(
        event.reason
    )


def _cost(event: Event) -> str:
    """Return a sentence about the tokens evaluated and lost, and the time."""
    evaluated, ahead = event.evaluated_tokens, event.ahead_tokens
    said = f"{number(evaluated)} {'was' if evaluated == 1 else 'were'} evaluated"
    if ahead:
        said += f" and {number(ahead)} had been in advance"
    if event.lost_tokens:
        said += f", {number(event.lost_tokens)} of them because of that"
        if event.prefill_rate:
            said += f" ({seconds(event.lost_tokens / event.prefill_rate)})"
    first = (
        f"; first token after {seconds(event.ttft_s)}"
        if event.ttft_s is not None
        else "; there was no first token"
    )
    return f"{said}{first}."


def _moved(event: Event) -> str:
    """Say what came back from disk for the request, and what was given up to make room for it."""
    said = []
    if event.restored_tokens:
        said.append(f"{number(event.restored_tokens)} of the reused tokens came back from disk.")
    for one in event.evicted:
        need = "a slot" if one.cause == "slot" else "memory"
        where = "parked on disk" if one.parked else "lost"
        said.append(f"To get {need}, it gave up {number(one.tokens)} tokens, which are {where}.")
    return " ".join(said)


def _sides(divergence: Divergence, to: Console) -> None:
    """Print the two sides of a divergence."""
    from rich.table import Table
    from rich.text import Text

    common, previous, current = divergence.common, divergence.previous, divergence.current
    is_text = common.text is not None or previous.text is not None or current.text is not None
    if is_text:
        before = [(_shortened(word), True) for word in words(common.text or "")[-MOST:]]
        left, right = compare(words(previous.text or ""), words(current.text or ""))
    else:
        before = [(f"{_shortened(token)} ", True) for token in common.tokens[-MOST:]]
        left, right = compare(
            [f"{token} " for token in previous.tokens],
            [f"{token} " for token in current.tokens],
        )
    columns = [
        (f"the entry had {_whereabouts(previous)}", _marked(before, left, "red", is_text)),
        (f"the prompt has {_whereabouts(current)}", _marked(before, right, "green", is_text)),
    ]
    if to.width < NARROW:
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


def words(text: str) -> list[str]:
    """Cut a text into words, runs of blanks and single other characters."""
    return re.findall(r"\w+|[^\S\n]+|[^\w\s]|\n", text)


def compare(left: list[str], right: list[str]) -> tuple[Pieces, Pieces]:
    """Cut both sides into pieces that the other one has as well, and pieces that it has not.

    Compare and show only the first words of a long side.
    """
    compared = left[:MOST], right[:MOST]
    matcher = SequenceMatcher(None, *compared, autojunk=False)
    sides: tuple[Pieces, Pieces] = ([], [])
    for kind, left_begin, left_end, right_begin, right_end in matcher.get_opcodes():
        for side, pieces in (
            (sides[0], left[left_begin:left_end]),
            (sides[1], right[right_begin:right_end]),
        ):
            if pieces:
                side.append(("".join(map(_shortened, pieces)), kind == "equal"))
    for side, whole in zip(sides, (left, right), strict=True):
        if len(whole) > MOST:
            side.append((f" ... and {number(len(whole) - MOST)} more", True))
    return sides


def _shortened(word: str) -> str:
    return word if len(word) <= LONGEST_WORD else f"{word[:LONGEST_WORD]}..."


def _marked(before: Pieces, pieces: Pieces, colour: str, is_text: bool) -> Text:
    """Return one side in colour, with the common text before it."""
    from rich.text import Text

    text = Text()
    for piece, _ in before:
        text.append(_shown(piece), "dim")
    text.append("│", "bold")
    for piece, is_common in pieces:
        text.append(
            _shown(piece, is_blank_seen=is_text and not is_common),
            "" if is_common else f"bold {colour}",
        )
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


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
