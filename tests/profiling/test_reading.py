"""Events as the schema says them, and lines that somebody else wrote."""

from __future__ import annotations

import json
import tempfile
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checks import read_lines
from support.events import afternoon, example_event

from event_schema import event_schema, field_rows
from mlxrunner.errors import ReadError
from mlxrunner.profiling.logs import read_events, with_rotated
from mlxrunner.profiling.profile import as_line
from mlxrunner.profiling.report.report import COLUMNS, NESTED
from mlxrunner.profiling.schema import Event
from mlxrunner.results import with_new_names

EXAMPLES = Path(__file__).with_name("example.jsonl")
EARLIER = Path(__file__).with_name("earlier.jsonl")
LATER: dict[str, Any] = dict.fromkeys(("line", "submitted", "caller"))
LATER |= {"restored_tokens": 0, "draft_passes": 0, "drafts": (), "evicted": ()}
LATER |= {"missed_tokens": 0, "displaced_tokens": 0, "new_tokens": 0, "index_is_full": False}
"""The fields that events of earlier programs lack, with the values that they have then."""


def example(number: int = 0, **changes: Any) -> dict[str, Any]:
    return read_lines(EXAMPLES)[number] | changes


def line_of(**changes: Any) -> bytes:
    return json.dumps(example(**changes)).encode()


def completed(line: dict[str, Any]) -> dict[str, Any]:
    """Add the fields that older events lack."""
    line = LATER | with_new_names(line)
    if (parted := line["divergence"]) is not None:
        sides = {name: {**parted[name], "picture": None} for name in ("previous", "current")}
        line["divergence"] = {**parted, **sides, "picture": None}
    if line["verify"] is None:
        return line
    return line | {"verify": {"wrong_token": None, **line["verify"]}}


@pytest.mark.parametrize("file", [EXAMPLES, EARLIER], ids=["today", "earlier"])
def test_the_examples_are_events(file: Path) -> None:
    """They are read as they are, or as an earlier program wrote them, with the names of today."""
    read, lines = read_events([file]), read_lines(file)
    assert [event.as_dict() for event in read] == [completed(line) for line in lines]
    assert read.skipped.total() == 0
    if file == EXAMPLES:
        for line in lines:
            jsonschema.validate(line, event_schema())
    else:  # chat, answers at once and a verified request
        assert {line["command"] for line in lines} == {"chat", "generate"}
        assert any(line["divergence"] for line in lines)
        assert any(line["verify"] for line in lines)


BROKEN = {
    "cut off": (line_of()[:200], "unreadable"),
    "no JSON": (b"hello", "unreadable"),
    "not UTF-8": (b'{"schema": "\xff\xfe"}', "unreadable"),
    "zeros": (b"\x00" * 100, "unreadable"),
    "a list": (b"[1, 2]", "unreadable"),
    "NaN": (line_of(ttft_s=float("nan")), "unreadable"),
    "deep": (b"[" * 100_000, "unreadable"),
    "another tool's": (b'{"level": "info"}', "foreign"),
    "an older version": (line_of(version=0), "version"),
    "a newer version": (line_of(version=2), "version"),
    "a field is missing": (line_of().replace(b'"reason"', b'"cause"'), "invalid"),
    "a wrong type": (line_of(cached_tokens="many"), "invalid"),
    "a negative count": (line_of(cached_tokens=-1), "invalid"),
    "a boolean count": (line_of(cached_tokens=True), "invalid"),
    "beyond a count": (line_of(cached_tokens=10**30), "invalid"),
    "a list for a reason": (line_of(reason=["empty"]), "invalid"),
    "an unknown reason": (line_of(reason="bad luck"), "invalid"),
    "a broken part": (line_of(spans=[{"name": "prefill"}]), "invalid"),
    "a broken id": (line_of(id="000000000000\n"), "invalid"),
}


@pytest.mark.parametrize(("line", "kind"), BROKEN.values(), ids=BROKEN)
def test_what_can_not_be_used_is_skipped_and_counted(
    tmp_path: Path, line: bytes, kind: str
) -> None:
    """Fields that are not known yet are no mistake."""
    file, whole, later = tmp_path / "events", line_of(), line_of(mood="good")
    file.write_bytes(b"\n".join([whole, line, b"", later]))
    read = read_events([file])
    assert [event.id for event in read] == [example()["id"]] * 2
    assert dict(read.skipped) == {kind: 1}
    assert len(list(read)) == 2  # again, and counted again
    assert read.skipped.total() == 1


@cache
def validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(event_schema())


VALUES = st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists)


@given(st.sampled_from(sorted(example())), VALUES)
def test_the_reader_agrees_with_the_schema(name: str, value: Any) -> None:
    """About any value of any field, but for what no count can be."""
    changed = example(2) | {name: value}
    is_valid = validator().is_valid(changed)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        json.dump(changed, file)
        file.flush()
        taken = bool(list(read_events([file.name])))
    is_no_count = isinstance(value, float) and (abs(value) > 2**53 or value != value)
    assert taken == is_valid or is_no_count


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match=r"nowhere: no such file"):
        list(read_events([tmp_path / "nowhere"]))


def test_rotated_files_come_first(tmp_path: Path) -> None:
    for name in ("events", "events.1", "events.2", "events.4"):
        (tmp_path / name).touch()
    names = [path.name for path in with_rotated(tmp_path / "events")]
    assert names == ["events.2", "events.1", "events"]


NAMES = [field.name for field in fields(Event)]


def test_fields_are_those_that_are_written_in_their_order() -> None:
    """The order is that of the program before `Event` existed, and then the later ones."""
    for text in EARLIER.read_text().splitlines():
        line = with_new_names(json.loads(text))
        earlier = [name for name in line if name not in LATER]
        assert earlier == [name for name in NAMES if name not in LATER]
    event = Event.of(json.loads(text))
    assert event.as_dict() == LATER | line
    written = as_line(event).replace(',"drafts":[]', "").replace(',"evicted":[]', "")
    assert json.loads(written) == line


def test_the_schema_the_rows_and_the_columns_have_every_field() -> None:
    assert list(event_schema()["properties"]) == NAMES
    assert [name for name, _, _ in field_rows() if "." not in name] == NAMES
    flat = [name for name in NAMES if name not in NESTED]
    assert flat == list(COLUMNS[: len(flat)])


def test_each_field_has_a_description_and_each_quantity_a_unit() -> None:
    """Those of nested objects, too."""
    units = {"_tokens": "tokens", "_s": "seconds", "_bytes": "bytes", "_rate": "tokens/s"}
    for name, unit, description in field_rows():
        assert description.endswith("."), name
        for ending, wanted in units.items():
            if name.endswith(ending):
                assert unit == wanted, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"saved_tokens": 29}, "saved 29 [+] ahead 0 tokens are not the 30 cached"),
        ({"evaluated_tokens": 35}, "cached 30 [+] evaluated 35 tokens exceed 64"),
        (
            {"missed_tokens": 5, "displaced_tokens": 1, "new_tokens": 1},
            "cached 30 [+] missed 5 [+] displaced 1 [+] new 1 tokens are not the 64 of the prompt",
        ),
        (
            {"missed_tokens": 5, "displaced_tokens": 1, "new_tokens": 28},
            "lost 33 tokens are not missed 5 [+] displaced 1",
        ),
        ({"prefill_rate": 0.01}, "prefill_rate 0.01 is below 0.05"),
        ({"id": "nobody"}, r"Expected `str` matching regex .* at `\$.id`"),
    ],
)
def test_an_event_that_can_not_be_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Event.of(example_event(**changes))


def test_the_schema_accepts_events_and_refuses_other_fields_and_values() -> None:
    """For those who check events with a tool of their own.

    Made-up events are some: what is proved with them holds for real ones.
    """
    jsonschema.Draft202012Validator.check_schema(event_schema())
    for event in (example_event(), *afternoon(200)):
        validator().validate(event)
    for changes in ({"mood": "good"}, {"outcome": "bad"}, {"spans": [{"name": "nap"}]}):
        with pytest.raises(jsonschema.ValidationError):
            validator().validate(example_event(**changes))
