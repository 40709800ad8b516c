"""Results are remembered by plain data, up to a size in bytes."""

from __future__ import annotations

import copy
import tracemalloc
from typing import Any

import pytest

from mlxrunner.serve.prompts.lru import ENTRY, LRUCache, MemoizedFunction, footprint


def test_a_memory_keeps_what_was_used_last() -> None:
    """Up to its size; a value that is put again replaces the first."""
    one = ENTRY + footprint("a", b"a" * 1000)
    memory = LRUCache[bytes](4 * one)
    for key in "abc":
        memory.put(key, key.encode() * 1000)
    memory.put("b", b"B" * 2000)
    assert memory.get("a") == b"a" * 1000
    memory.put("d", b"d" * 1000)
    assert [(memory.get(key) or b"")[:1] for key in "abcd"] == [b"a", b"B", b"", b"d"]
    memory.put("e", b"e" * 10_000)
    assert len(memory) == 0


@pytest.mark.parametrize(
    ("text", "count"),
    [("", 20_000), ("x" * 10_000 + "\U0001f600", 400)],  # four bytes for each of these letters
    ids=["small", "wide"],
)
def test_a_memory_counts_objects_and_not_only_text(text: str, count: int) -> None:
    """All that it holds takes no more of the process's memory than it may."""
    most = 4_000_000
    remembered = MemoizedFunction(lambda value: [value, dict(value)], most)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(count):
            remembered({"role": "u", "content": f"{number}{text}"})
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert most / 2 < taken < most


def test_a_value_that_changes_meanwhile_is_remembered_as_it_was() -> None:
    """The result belongs to the value by which it is found again."""
    value = {"content": "old"}

    def work(given: Any) -> str:
        value["content"] = "new"  # another thread
        return str(given["content"])

    remembered = MemoizedFunction(work, 10**6)
    assert remembered(value) == "old"
    assert remembered({"content": "old"}) == "old"


def test_a_function_remembers_what_it_was_given() -> None:
    """Values that only look alike are others, and so are keys in another order."""
    seen: list[Any] = []

    def work(value: Any) -> int:
        seen.append(value)
        return len(seen)

    remembered = MemoizedFunction(work, 10**6)
    alike: list[Any] = [1, True, 1.0, "1", [1], [True], {"a": 1, "b": 2}, {"b": 2, "a": 1}, None]
    assert [remembered(copy.deepcopy(value)) for value in alike] == list(range(1, 10))
    assert [remembered(copy.deepcopy(value)) for value in alike] == list(range(1, 10))
    strange = object()
    assert [remembered(strange), remembered(strange)] == [10, 11]
