"""`mlxrunner explain`: both sides, the reason, what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console
from support.checks import refused, write_lines
from support.events import afternoon, as_event, example_event

from mlxrunner import cli
from mlxrunner.profiling import schema
from mlxrunner.profiling.report.screen import show_event
from mlxrunner.profiling.schema import MOST_WORDS, REASONS, compare, cut_words, remedy


def run(*arguments: str | Path, width: int = 120) -> Result:
    return CliRunner().invoke(
        cli.main, ["explain", *map(str, arguments)], env={"COLUMNS": str(width)}
    )


@pytest.fixture
def events(tmp_path: Path) -> Path:
    file = tmp_path / "events.jsonl"
    write_lines(file, [*afternoon(30), example_event()])
    return file


def with_texts(text: str | None) -> dict[str, Any]:
    """Return an event with this text at its divergence."""
    event = example_event()
    for side in ("common", "previous", "current"):
        event["divergence"][side]["text"] = text
    return event


def test_a_divergence_is_shown_with_both_sides_and_the_remedy(events: Path) -> None:
    """The sentence, where, the two texts side by side, what it cost and what to change."""
    result = run(events, "00000000002a")
    assert result.exit_code == 0
    together = " ".join(result.stdout.split())
    assert "The prompt leaves the cached text in the middle" in together
    assert "earlier: the thinking block of message" in together
    assert "now: the text of message 1 (assistant)" in together
    assert "33 of them because of that (10.1 ms)" in together
    assert "What to change: send earlier messages back unchanged" in together
    (line,) = [line for line in result.stdout.splitlines() if "│<think>" in line]
    assert "│Your name is" in line


def test_the_last_one_and_the_beginning_of_an_id_will_do(events: Path) -> None:
    """All ways to the same event. The file may come from the environment."""
    given = {"MLXRUNNER_EVENTS": str(events), "COLUMNS": "120"}
    told = run(events, "--last").stdout
    assert told == run(events, "00000000002a").stdout == run(events, "00000000002").stdout
    for arguments in (["--last"], ["00000000002a"], ["00000000002"], [str(events), "--last"]):
        assert CliRunner().invoke(cli.main, ["explain", *arguments], env=given).stdout == told
    result = CliRunner().invoke(cli.main, ["explain"], env=given)
    assert f"give the ID of an event in {events}, or --last" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "no event has the id 'nope'"),
        (["0000000000"], "is the beginning of several ids"),
        ([], "events.jsonl, or --last"),
        (["00000000002a", "--last"], "not both"),
    ],
    ids=["unknown", "ambiguous", "neither", "both"],
)
def test_what_cannot_be_found_is_said(events: Path, arguments: list[str], message: str) -> None:
    refused(run(events, *arguments), message)


def test_hashes_are_shown_as_such_with_the_way_to_text() -> None:
    text = " ".join(shown(with_texts(None)).split())
    assert "00000001 00000002" in text
    assert "only keyed hashes were logged" in text
    assert "--log-text" in text


@pytest.mark.parametrize("reason", [*REASONS, None])
def test_every_reason_is_explained(reason: str | None) -> None:
    """With its sentence, and its remedy where it has one; also without a divergence."""
    event = example_event(
        reason=reason, evicted_by="x", divergence=None, ttft_s=None, prefill_rate=None
    )
    text = " ".join(shown(event, width=300).split())
    if reason is None:
        assert "Not all was reused that had been evaluated before" in text
        return
    sentence = REASONS[reason].sentence
    assert sentence[1:] in text
    mend = remedy(reason, has_one_entry=event["max_sequences"] == 1)
    assert (f"What to change: {mend}" in text) == bool(mend)


def test_what_was_given_up_and_what_came_back_is_said() -> None:
    """The loser of an eviction names the request that took its place, which says so as well."""
    gone = {"tokens": 812, "slot": 3, "cause": "memory", "parked": False}
    kept = {"tokens": 90, "slot": 1, "cause": "slot", "parked": True}
    text = " ".join(shown(example_event(restored_tokens=25, evicted=[gone, kept])).split())
    assert "25 of the reused tokens came back from disk." in text
    assert "To get memory, it evicted 812 tokens, which are lost." in text
    assert "To get a slot, it evicted 90 tokens, which are in the disk cache." in text
    event = example_event(reason="evicted", evicted_by="request 12", divergence=None)
    assert "What to change" not in shown(event)  # a runner of one request at a time
    lost = shown({**event, "max_sequences": 8})
    told = " ".join(lost.split())
    assert "evicted to make room for another request (request 12)" in told
    assert "What to change: more memory or more slots" in told


def test_a_prompt_that_ends_is_shown_as_that() -> None:
    divergence = example_event()["divergence"]
    nothing = {"message": None, "role": None, "part": None, "tokens": [], "text": ""}
    text = shown(example_event(divergence=divergence | {"current": nothing}))
    assert "(past its end)" in text
    assert "(ends here)" in text


def test_blanks_that_make_the_difference_are_seen() -> None:
    """A lost space, tab or line end is why many prompts diverge."""
    divergence = example_event()["divergence"]
    texts = {"previous": "a b\n", "current": "a  b\t"}
    sides = {name: divergence[name] | {"text": text} for name, text in texts.items()}
    text = shown(example_event(divergence=divergence | sides))
    assert "│a{-·-}b{-↵" in text
    assert "│a{+··+}b{+⇥+}" in text


def test_only_what_differs_is_coloured() -> None:
    left, right = compare(cut_words("the red fox"), cut_words("the blue fox"))
    assert left == [("the ", True), ("red", False), (" fox", True)]
    assert right == [("the ", True), ("blue", False), (" fox", True)]
    text = "any text,\n\n with\t all\u00a0of it\u200b"
    assert "".join(cut_words(text)) == text
    coloured = shown(example_event(), colours=True)
    assert "\x1b[1;31m" in coloured
    assert "\x1b[1;32m" in coloured


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_both_sides_are_whole_in_a_narrow_terminal(width: int) -> None:
    together = "".join(shown(example_event(), width=width).split())
    assert "Thepromptleavesthecachedtext" in together
    assert "<think>↵" in together
    assert "Yournameis" in together


def test_logged_text_cannot_drive_the_terminal() -> None:
    divergence = example_event()["divergence"]
    evil = "\x1b]0;evil\x07[red]\u202e"
    sides = {
        "previous": divergence["previous"] | {"text": evil},
        "current": divergence["current"] | {"text": "x", "role": evil},
    }
    caller = {"request": evil, "client": evil, "session": evil, "cause": evil, "remedy": evil}
    hostile = {"model": evil, "divergence": divergence | sides, "caller": caller}
    text = shown(example_event(**hostile), width=300)
    assert "What to change: \\x1b" in text
    assert "\x1b" not in text
    assert "[red]\\u202e" in text


def shown(event: dict[str, Any], width: int = 120, *, colours: bool = False) -> str:
    system: Any = "standard" if colours else None
    plain = {"markup": False, "highlight": False, "emoji": False}
    console = Console(width=width, force_terminal=colours, color_system=system, **plain)
    with console.capture() as captured:
        show_event(as_event(event), console)
    return captured.get()


@pytest.mark.parametrize(
    ("left", "right"),
    [(["a "] * 4000, ["a "] * 6000), (["a", "b"] * 2000, ["b", "a", "c"] * 2000)],
    ids=["one word", "two words"],
)
def test_long_sides_are_compared_by_their_first_words(
    left: list[str], right: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comparing all of them takes minutes; how many more there are is said."""
    sizes = []

    class Matcher(schema.SequenceMatcher[str]):
        def __init__(self, junk: Any, a: list[str], b: list[str], *, autojunk: bool) -> None:
            sizes.append((len(a), len(b)))
            super().__init__(junk, a, b, autojunk)

    monkeypatch.setattr(schema, "SequenceMatcher", Matcher)
    before, after = compare(left, right)
    assert sizes == [(MOST_WORDS, MOST_WORDS)]
    assert "".join(text for text, _ in before).startswith("".join(left[:MOST_WORDS]))
    assert (before[-1][0], after[-1][0]) == (" ... and 3,800 more", " ... and 5,800 more")


def test_a_word_that_fills_the_screen_is_cut() -> None:
    assert len(shown(with_texts("x" * 10**6))) < 10**4
