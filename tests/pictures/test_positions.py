"""The ids of pictures among tokens, and positions along three axes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mlxrunner.cache.entry import FIRST_OF_PICTURES, as_tokens, words
from mlxrunner.errors import PromptError
from mlxrunner.pictures.model import axes, delta
from mlxrunner.pictures.table import PictureTable


def test_ids_are_beyond_every_vocabulary_and_never_used_again() -> None:
    """The same digest has the same ones."""
    table = PictureTable()
    one, two = table.add(b"1", 4), table.add(b"2", 3)
    assert one.ids.tolist() == [FIRST_OF_PICTURES + i for i in range(4)]
    assert two.first == FIRST_OF_PICTURES + 4
    assert table.add(b"1", 4) is one
    assert table.at(two.first + 2) is two
    for stranger in (7, two.first + 3):
        with pytest.raises(KeyError):
            table.at(stranger)


def test_ids_may_run_out() -> None:
    """They fit into 32 bits."""
    table = PictureTable()
    table.add(b"1", 2**30 - 3)
    with pytest.raises(PromptError, match="start it again"):
        table.add(b"2", 4)


def test_runs_of_pictures_are_found() -> None:
    """The same picture twice in a row is two runs, and a run may be cut at both ends."""
    table = PictureTable()
    one, two = table.add(b"1", 3), table.add(b"2", 2)
    tokens = as_tokens([*one.ids[1:], 5, *one.ids, *one.ids, *two.ids[:1]])
    found = [(begin, end, picture.digest) for begin, end, picture in table.among(tokens)]
    assert found == [(0, 2, b"1"), (3, 6, b"1"), (6, 9, b"1"), (9, 10, b"2")]
    assert words(tokens).tolist() == [5]
    assert list(table.among(as_tokens([1, 2]))) == []


def test_positions_by_hand() -> None:
    """A picture of 2 x 3 begins where the text ends, and the text continues after its 3 columns."""
    table = PictureTable()
    picture = table.add(b"1", 6, (1, 2, 3))
    tokens = as_tokens([9, *picture.ids, 9, 9])
    assert axes(table, tokens[:0], tokens).tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5],
        [0, 1, 1, 1, 2, 2, 2, 4, 5],
        [0, 1, 2, 3, 1, 2, 3, 4, 5],
    ]
    assert delta(table, tokens) == 3 - 6
    assert len(tokens) + delta(table, tokens) == 6


def test_positions_do_not_depend_on_where_a_pass_begins() -> None:
    """It may begin within a picture, too."""
    table, drawn = PictureTable(), random.Random(1)
    pictures = [table.add(bytes([i]), 2 * (i + 1), (1, 2, i + 1)) for i in range(4)]
    tokens = as_tokens(
        [*range(3), *(t for p in pictures for t in [*p.ids, 1, 2]), *pictures[0].ids]
    )
    whole = axes(table, tokens[:0], tokens)
    for _ in range(20):
        cut = drawn.randrange(len(tokens))
        assert np.array_equal(axes(table, tokens[:cut], tokens[cut:]), whole[:, cut:])
