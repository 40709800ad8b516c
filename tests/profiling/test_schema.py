"""The fields of an event stand in one place: the schema, the CSV and the docs say the same."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest
from support.events import example_event

from mlxrunner.profiling.profile import as_line
from mlxrunner.profiling.report.report import COLUMNS, NESTED
from mlxrunner.profiling.schema import Event, event_schema, field_rows
from mlxrunner.results import with_new_names

EARLIER = Path(__file__).with_name("earlier.jsonl")
NAMES = [field.name for field in fields(Event)]
LATER = {
    "line": None,
    "submitted": None,
    "restored_tokens": 0,
    "draft_passes": 0,
    "drafts": (),
    "evicted": (),
    "caller": None,
}
"""The fields that events of earlier programs lack, with the values that they have then."""


def test_fields_are_those_that_are_written_in_their_order() -> None:
    """The order is that of the program before `Event` existed, and then the later ones."""
    for text in EARLIER.read_text().splitlines():
        line = with_new_names(json.loads(text))
        assert list(line) == [name for name in NAMES if name not in LATER]
    event = Event.of(json.loads(text))
    assert event.as_dict() == line | LATER
    written = as_line(event).replace(',"drafts":[]', "").replace(',"evicted":[]', "")
    assert written == as_line(line)


def test_the_schema_the_rows_and_the_columns_have_every_field() -> None:
    """In the same order."""
    assert list(event_schema()["properties"]) == NAMES
    assert [name for name, _, _ in field_rows() if "." not in name] == NAMES
    assert [name for name in NAMES if name not in NESTED] == list(
        COLUMNS[: len(NAMES) - len(NESTED)]
    )


def test_each_field_has_a_description_and_each_quantity_a_unit() -> None:
    """Names tell which fields are quantities."""
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
        ({"lost_tokens": 35}, "lost 35 tokens exceed evaluated 34 [+] ahead 0"),
        ({"prefill_rate": 0.01}, "prefill_rate 0.01 is below 0.05"),
        ({"id": "nobody"}, r"Expected `str` matching regex .* at `\$.id`"),
    ],
)
def test_an_event_that_can_not_be_is_refused(changes: dict[str, object], message: str) -> None:
    """With what is wrong, and the values."""
    with pytest.raises(ValueError, match=message):
        Event.of(example_event(**changes))


def test_the_schema_accepts_events_and_refuses_other_fields_and_values() -> None:
    """For those who check events with a tool of their own."""
    schema = event_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(example_event(), schema)
    for changes in ({"mood": "good"}, {"outcome": "bad"}, {"spans": [{"name": "nap"}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(example_event(**changes), schema)
