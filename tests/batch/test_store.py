"""The store returns what goes in, in order, and does nothing twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.batches import entry, filled, indices

from mlxrunner.batch.options import Order
from mlxrunner.batch.order import run_order
from mlxrunner.batch.records import LineCounts, StoredLine, sort_key
from mlxrunner.batch.store import Store
from mlxrunner.cache.tokens import as_tokens
from mlxrunner.errors import StoreError


@pytest.mark.parametrize("name", ["a", None, 7, -(2**63), "é \0 \u2028", ""])
def test_an_entry_comes_back_as_it_went_in(name: str | int | None, tmp_path: Path) -> None:
    """All of its fields, of all their types, also after the file was closed and opened again."""
    path = tmp_path / "store"
    given = StoredLine(
        0,
        17,
        as_tokens([0, 1, 255, 256, 2**31 - 1]),
        name,
        "plain",
        {"stop": ["\ud800"], "seed": 2**64 - 1},
        None,
        [{"role": "user", "content": "\ud800"}],
    )
    broken = StoredLine(
        1, 18, as_tokens([]), name, "chat.completion", error="line 18: nothing in it"
    )
    with Store.create(path) as store:
        store.add(given)
        store.add(broken)
        store.finish()
    with Store.open(path) as store:
        found = list(store.pending("input"))
    for one, other in zip(found, [given, broken], strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert {**vars(one), "tokens": 0} == {**vars(other), "tokens": 0}


@given(
    st.lists(
        st.lists(st.integers(0, 2) | st.sampled_from([255, 256, 65536, 2**31 - 1]), max_size=5),
        max_size=25,
    )
)
def test_prefix_order_is_that_of_the_tree(prompts: list[list[int]]) -> None:
    """The store keeps the order that `run_order` chooses for its lines."""
    with filled(prompts) as store:
        rows = sorted((sort_key(as_tokens(tokens)), index) for index, tokens in enumerate(prompts))
        order = run_order(((index, key) for key, index in rows), len(prompts))
        assert indices(store.pending("prefix")) == list(order)
        assert indices(store.pending("input")) == list(range(len(prompts)))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.data())
def test_what_is_recorded_during_an_iteration_does_not_come_any_more(
    tokens: list[int], data: st.DataObject
) -> None:
    """Each entry comes once while results are recorded, or never if it was done before its turn."""
    with filled([[token] for token in tokens]) as store:
        order = indices(store.pending())
        done: set[int] = set()
        seen = []
        for one in store.pending():
            assert one.index not in done
            seen.append(one.index)
            for index in data.draw(st.sets(st.sampled_from(order))) - done:
                store.record(index, b"")
                done.add(index)
            if data.draw(st.booleans()):
                store.commit()
        assert seen == [index for index in order if index in seen]
        assert set(seen) | done == set(order)
        assert indices(store.pending()) == [index for index in order if index not in done]


def test_results_come_back_in_both_orders(tmp_path: Path) -> None:
    """Results come as they were recorded, or in input order up to the first missing one."""
    with filled([[1], [2], [3], [4]], tmp_path / "store") as store:
        for index in (2, 0):
            store.record(index, b"%d" % index, failed=index == 2)
        store.commit()
        assert [(one.index, one.body, one.failed) for one in store.answers("done")] == [
            (2, b"2", True),
            (0, b"0", False),
        ]
        first = list(store.answers("input"))
        assert [one.index for one in first] == [0]
        store.record(1, b"\xff\0")
        store.commit()
        assert [(one.index, one.body) for one in store.answers("input", after=first[-1].place)] == [
            (1, b"\xff\0"),
            (2, b"2"),
        ]
        last = list(store.answers("done"))[-1]
        assert last.index == 1
        assert list(store.answers("done", after=last.place)) == []
        assert store.counts == LineCounts(lines=4, broken=0, done=3, failed=1)
        assert store.counts.left == 1


def test_nothing_is_done_twice() -> None:
    """A second result of a line and one of an unknown line are errors that change nothing."""
    with filled([[1], [2]]) as store:
        store.record(0, b"first")
        store.commit()
        for index in (0, 2):
            with pytest.raises(StoreError, match="one result only"):
                store.record(index, b"second")
        assert [one.body for one in store.answers()] == [b"first"]


def test_an_id_that_was_there_is_an_error() -> None:
    """A repeated id, OpenAI's or ours, is an error that names both lines.

    Ids of broken lines may repeat, as may lines without one.
    """
    with Store.create() as store:
        store.add(entry(0, [1], id="a", format="chat.completion"))
        store.add(entry(1, [1], id="a", format="plain"))
        store.add(entry(2, [1], id=1, format="plain"))
        store.add(entry(3, [], id="b", format="chat.completion", error="line 4: broken"))
        store.add(entry(4, [2], id="b", format="chat.completion"))
        store.add(entry(5, [1], id="a", format="text_completion"))
        store.add(entry(6, [1], id="1", format="plain"))
        store.add(entry(7, [1], id=None))
        store.add(entry(8, [1], id=None))
        store.add(entry(9, [1], id=1))
        store.finish()
        errors = {one.index: one.error for one in store.pending() if one.error}
        assert errors == {
            1: "line 2: id 'a' was there before, on line 1",
            3: "line 4: broken",
            5: "line 6: custom_id 'a' was there before, on line 1",
            9: "line 10: id 1 was there before, on line 3",
        }
        assert store.counts == LineCounts(lines=10, broken=4, done=0, failed=0)


def test_ids_of_a_program_may_repeat() -> None:
    """It gets its answers in order."""
    with Store.create(unique_ids=False) as store:
        store.add(entry(0, [1], id="a"))
        store.add(entry(1, [1], id="a"))
        store.finish()
        assert store.counts.broken == 0


def test_lines_come_one_after_the_other() -> None:
    """An index that is left out, or there twice, is an error, and nothing of that input stays."""
    with Store.create() as store:
        store.add(entry(0, [1]))
        with pytest.raises(StoreError, match="line 2 was added where line 1"):
            store.add(entry(2, [1]))
        assert list(store.pending("input")) == []
        store.add(entry(0, [1]))
        store.finish()
        assert store.counts.lines == 1


def test_a_complete_input_takes_no_more_lines() -> None:
    """Neither another line nor another end; what is there stays."""
    with filled([[1], [2]]) as store:
        for change in (lambda: store.add(entry(0, [1])), store.finish):
            with pytest.raises(StoreError, match="its input is complete, nothing can be added"):
                change()
        assert store.counts == LineCounts(lines=2, broken=0, done=0, failed=0)
        assert indices(store.pending()) == [0, 1]


def test_an_empty_input_is_complete() -> None:
    """No lines are an input, too."""
    with filled([]) as store:
        assert store.is_complete
        assert list(store.pending()) == list(store.answers()) == []


@pytest.mark.parametrize("order", ["prefix", "input"])
def test_the_lines_that_are_left_are_those_that_are_pending(order: Order) -> None:
    prompts = [[3, 1], [1], [], [3], [1, 2], [3, 1, 4]]
    with filled(prompts) as store:
        assert sorted(indices(store.left(order))) == list(range(6))
        for index in (0, 4):
            store.record(index, b"{}")
        store.commit()
        assert sorted(indices(store.left(order))) == [1, 2, 3, 5]
        for brief, line in zip(store.left(order), store.pending(order), strict=True):
            assert brief.tokens.tolist() == line.tokens.tolist()
            assert (brief.index, brief.options, brief.error) == (
                line.index,
                line.options,
                line.error,
            )
