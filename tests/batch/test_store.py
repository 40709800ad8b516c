"""The store returns what goes in, in order, and does nothing twice."""

from __future__ import annotations

import os
import random
import resource
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.batches import entry, filled, indices
from support.checks import has, output_of

from mlxrunner.batch.options import Order
from mlxrunner.batch.order import run_order, sort_key
from mlxrunner.batch.store import VERSION, LineCounts, Store, checksum
from mlxrunner.cache.entry import as_tokens
from mlxrunner.errors import StoreError


@pytest.mark.parametrize("name", ["a", None, 7, -(2**63), "é \0 \u2028", ""])
def test_an_entry_comes_back_as_it_went_in(name: str | int | None, tmp_path: Path) -> None:
    """All of its fields, of all their types, also after the file was closed and opened again."""
    path = tmp_path / "store"
    talk = [{"role": "user", "content": "\ud800"}]
    options = {"stop": ["\ud800"], "seed": 2**64 - 1}
    whole = entry(0, [0, 1, 255, 256, 2**31 - 1], prompt=talk, id=name, options=options)
    broken = entry(1, [], id=name, format="chat.completion", error="line 2: nothing in it")
    filled([whole, broken], path).close()
    with Store.open(path) as store:
        for one, other in zip(store.pending("input"), [whole, broken], strict=True):
            tokens = {"tokens": other.tokens.tolist()}
            assert {**vars(one), "tokens": one.tokens.tolist()} == {**vars(other), **tokens}


TOKENS = st.integers(0, 2) | st.sampled_from([255, 256, 65536, 2**31 - 1])


@given(st.lists(st.lists(TOKENS, max_size=5), max_size=25))
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
    """Results come as they were recorded, or in input order up to the first missing one.

    A second result of a line and one of an unknown line are errors that change nothing.
    """

    def answers(*of: Any, **more: Any) -> list[Any]:
        return [(one.index, one.body, one.failed) for one in store.answers(*of, **more)]

    zero, one, two = (0, b"0", False), (1, b"\xff\0", False), (2, b"2", True)
    with filled([[1], [2], [3], [4]], tmp_path / "store") as store:
        for index in (2, 0):
            store.record(index, b"%d" % index, failed=index == 2)
        store.commit()
        assert (answers("done"), answers("input")) == ([two, zero], [zero])
        (first,) = store.answers("input")
        store.record(1, b"\xff\0")
        store.commit()
        assert answers("input", after=first.place) == [one, two]
        last = list(store.answers("done"))[-1]
        assert (last.index, answers("done", after=last.place)) == (1, [])
        assert store.counts == LineCounts(lines=4, broken=0, done=3, failed=1)
        assert store.counts.left == 1
        for index in (0, 4):
            with pytest.raises(StoreError, match="one result only"):
                store.record(index, b"second")
        assert answers() == [zero, one, two]


def test_an_id_that_was_there_is_an_error() -> None:
    """A repeated id, OpenAI's or ours, is an error that names both lines.

    Ids of broken lines may repeat, as may lines without one.
    """
    lines = [
        entry(0, [1], id="a", format="chat.completion"),
        entry(1, [1], id="a", format="plain"),
        entry(2, [1], id=1, format="plain"),
        entry(3, [], id="b", format="chat.completion", error="line 4: broken"),
        entry(4, [2], id="b", format="chat.completion"),
        entry(5, [1], id="a", format="text_completion"),
        entry(6, [1], id="1", format="plain"),
        *(entry(number, [1], id=None) for number in (7, 8)),
        entry(9, [1], id=1),
    ]
    with filled(lines) as store:
        errors = {one.index: one.error for one in store.pending() if one.error}
        assert errors == {
            1: "line 2: id 'a' was there before, on line 1",
            3: "line 4: broken",
            5: "line 6: custom_id 'a' was there before, on line 1",
            9: "line 10: id 1 was there before, on line 3",
        }
        assert store.counts == LineCounts(lines=10, broken=4, done=0, failed=0)


def test_lines_come_one_after_the_other() -> None:
    """An index that is left out, or there twice, is an error, and nothing of that input stays.

    A complete input takes neither another line nor another end.
    """
    with Store.create() as store:
        store.add(entry(0, [1]))
        with pytest.raises(StoreError, match="line 2 was added where line 1"):
            store.add(entry(2, [1]))
        assert list(store.pending("input")) == []
        store.add(entry(0, [1]))
        store.finish()
        for change in (lambda: store.add(entry(0, [1])), store.finish):
            with pytest.raises(StoreError, match="its input is complete, nothing can be added"):
                change()
        assert store.counts == LineCounts(lines=1, broken=0, done=0, failed=0)
        assert indices(store.pending()) == [0]


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
            has(brief, index=line.index, options=line.options, error=line.error)


def test_a_checksum_is_that_of_stores_that_are_there() -> None:
    """A store of an earlier version has it in each row, so it must never change."""
    row: Any = (7, "\u00e9\ud800", None, b"\0\xff", -1, 2.5, "")
    assert checksum(*row) == 3560878094


def test_the_whole_input_is_there_or_none_of_it(tmp_path: Path) -> None:
    """Closed before the input was complete, the store is empty, says so, and takes it again.

    Closing without a commit drops the results since the last one.
    """
    path = tmp_path / "store"
    with Store.create(path) as store:
        for index in range(1000):
            store.add(entry(index, range(index)))
        assert not store.is_complete
    with Store.open(path) as store:
        assert (store.is_complete, store.counts) == (False, LineCounts(0, 0, 0, 0))
        assert list(store.pending("input")) == []
        for index in (0, 1):
            store.add(entry(index, [1]))
        store.finish({"input": "abc", "model": "demo"})
        for index in (0, 1):
            store.record(index, b"")
            if index == 0:
                store.commit()
    with Store.open(path) as store:
        assert (store.is_complete, store.counts) == (True, LineCounts(2, 0, 1, 0))
        assert store.meta == {"input": "abc", "model": "demo"}
        assert (indices(store.answers("done")), indices(store.pending())) == ([0], [1])


def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    """The file and SQLite's journal have mode 0600, and only the file is left when it is closed."""
    before = os.umask(0)
    try:
        with filled([[1]] * 100, tmp_path / "store") as store:
            store.record(0, b"0")
            files = list(tmp_path.iterdir())
            assert len(files) == 2
            assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    finally:
        os.umask(before)
    assert [file.name for file in tmp_path.iterdir()] == ["store"]


def test_a_temporary_store_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no name that anybody could see, also while it is open and larger than its memory."""
    monkeypatch.setenv("SQLITE_TMPDIR", str(tmp_path))
    with Store.create() as store:
        store._db.execute("PRAGMA cache_size=10")
        for index in range(500):
            store.add(entry(index, range(1000)))
        store.finish()
        assert len(indices(store.pending())) == 500
        assert list(tmp_path.iterdir()) == []


def test_one_process_at_a_time(tmp_path: Path) -> None:
    """A second one is refused at once, and can have it when the first one is gone."""
    path = tmp_path / "store"
    program = "import sys; from mlxrunner.batch.store import Store; Store.open(sys.argv[1])"
    second = [sys.executable, "-c", program, str(path)]
    with filled([[1]], path):
        refused = subprocess.run(second, capture_output=True, text=True, check=False)
        assert "another process is using it" in refused.stderr.splitlines()[-1]
        with pytest.raises(StoreError, match="another process is using it"):
            Store.open(path)
    assert subprocess.run(second, check=False).returncode == 0


def other_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE lines (a)")


def other_version(path: Path) -> None:
    Store.create(path).close()
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA user_version={VERSION + 1}")


def damaged(path: Path) -> None:
    filled([range(1000)] * 50, path).close()
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + bytes(len(whole) - 4096))


NEWER = f"of version {VERSION + 1}, and this program knows version {VERSION}: no run can resume"
NO_STORE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "No such file"),
    "a directory": (Path.mkdir, "Is a directory"),
    "a text": (lambda path: path.write_text("{}\n" * 1000), "not a batch store"),
    "another database": (other_database, "is not a batch store"),
    "another version": (other_version, NEWER),
    "damaged": (damaged, "not a batch store, or damaged"),
}


@pytest.mark.parametrize(("make", "problem"), NO_STORE.values(), ids=NO_STORE)
def test_what_is_not_a_store_is_refused(
    make: Callable[[Path], object], problem: str, tmp_path: Path
) -> None:
    """In one line that names the file and what is wrong with it; the file is left as it is."""
    path = tmp_path / "store"
    make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(StoreError, match=problem) as caught:
        Store.open(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (path.read_bytes() if path.is_file() else None) == before


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    """`create` makes new files only, in folders that exist."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreError, match="File exists"):
        Store.create(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(StoreError, match="No such file or directory"):
        Store.create(tmp_path / "folder" / "file")


CHILD = """
import sys, time
from pathlib import Path
from mlxrunner.batch.store import Store, StoredLine
from mlxrunner.cache.entry import as_tokens

with Store.open(Path(sys.argv[1])) as store:
    if not store.is_complete:
        for index in range(3000):
            store.add(StoredLine(index, index + 1, tokens=as_tokens(range(index % 7, 200))))
        store.finish()
    print("ready", flush=True)
    for count, entry in enumerate(store.pending(), 1):
        store.record(entry.index, b"%d" % entry.index * 50)
        if count % 3 == 0:
            store.commit()
            print(store.counts.done, flush=True)
"""


@pytest.mark.exhaustive(0)
def test_killed_at_random_points(tmp_path: Path) -> None:
    """All that was committed is unchanged after kill -9 at twenty random moments."""
    path = tmp_path / "store"
    Store.create(path).close()
    random.seed(0)
    committed = 0
    for attempt in range(20):
        is_late = attempt >= 8  # it is filled then, and has committed up to twice
        command = [sys.executable, "-c", CHILD, path]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            said = [child.stdout.readline() for _ in range(1 + attempt % 3) if is_late]
            time.sleep(random.uniform(0, 0.02) if is_late else random.uniform(0.1, 0.5))
            child.kill()
            said = "".join([*said, child.stdout.read()]).split()
        with Store.open(path) as store:
            assert store.is_complete or not said
            lines = 3000 * store.is_complete
            done = list(store.answers("done"))
            assert len(done) >= max([committed, *map(int, said[1:])])
            assert all(one.body == b"%d" % one.index * 50 for one in done)
            order = sorted(range(lines), key=lambda index: (index % 7, index))
            assert indices(done) == order[: len(done)]
            assert len(done) + len(indices(store.pending())) == lines
            committed = len(done)
    assert committed


def test_a_full_disk_while_it_is_filled(tmp_path: Path) -> None:
    """An error that says so; the store is empty and can be filled when there is room."""
    path = tmp_path / "store"
    with Store.create(path) as store:
        store._db.execute("PRAGMA max_page_count=100")
        with pytest.raises(StoreError, match=r"the disk is full .*: free space"):
            for index in range(1000):
                store.add(entry(index, range(1000)))
    with Store.open(path) as store:
        assert not store.is_complete
        store.add(entry(0, [1]))
        store.finish()


@contextmanager
def small_disk(store: Store) -> Iterator[None]:
    (pages,) = store._one("PRAGMA page_count")
    store._db.execute(f"PRAGMA max_page_count={pages + 20}")
    yield


@contextmanager
def small_files(store: Store) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("limited", "problem"),
    [
        (small_disk, r"the disk is full .*: free space"),
        (small_files, "what was committed is kept"),
    ],
)
def test_a_store_that_can_not_grow_keeps_what_was_committed(
    limited: Callable[[Store], AbstractContextManager[None]], problem: str, tmp_path: Path
) -> None:
    """The other results are to be done again."""
    path = tmp_path / "store"
    with filled([[index] for index in range(50)], path) as store:
        committed = 0
        with limited(store), pytest.raises(StoreError, match=problem):
            for index in range(50):
                store.record(index, bytes(10_000))
                if index % 2:
                    store.commit()
                    committed = index + 1
        assert store.counts.done == committed
    with Store.open(path) as store:
        assert indices(store.answers("done")) == list(range(committed))
        assert indices(store.pending()) == list(range(committed, 50))
        assert 0 < committed < 50


@pytest.mark.exhaustive(0)
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    """Less than 120 MB hold 240 MB of tokens that are stored, sorted, read and answered."""
    program = f"""
import resource, sys
from pathlib import Path
from mlxrunner.batch.store import Store, StoredLine
import numpy as np

def megabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // \
(1024 if sys.platform == "linux" else 1024**2)

before = megabytes()
tokens = np.arange(3000, dtype=np.int32)
with Store.create(Path({str(tmp_path / "store")!r})) as store:
    for index in range(20_000):
        store.add(StoredLine(index, index + 1, tokens=(tokens + index % 97 + 1).astype(np.int32)))
    store.finish()
    assert sum(1 for entry in store.pending("input")) == 20_000
    for entry in store.pending():
        store.record(entry.index, bytes(1000))
    store.commit()
    assert sum(len(body.body) for body in store.answers()) == 20_000_000
print(megabytes() - before)
"""
    assert int(output_of(program)) < 120
