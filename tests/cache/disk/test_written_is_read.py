"""Every reader takes what its writer has written: the same entry, in sessions and parked."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.old_caches import write_old
from support.reused import ALL, CHECKPOINTS, FEW, MIXES, NO_HELP, SLACK
from support.sample import examples
from support.saving import stored

from mlxrunner import Runner
from mlxrunner.cache.disk.disk_cache import DiskCache
from mlxrunner.cache.disk.pieces import StoredEntry
from mlxrunner.cache.entry import ROLES, CacheEntry, CheckpointPlaces
from mlxrunner.pictures.table import PictureNames, PictureTable, has_pictures
from mlxrunner.sessions.caches import SessionEntry, stored_entry
from mlxrunner.sessions.session import Session
from mlxrunner.sessions.store import SessionStore
from mlxrunner.testing import oracle_runner

from .conftest import PARTS, PLENTY, answer, offloaded

TABLE = PictureTable()
PICTURES = [TABLE.add(bytes([n]) * 32, *form) for n, form in enumerate([(1, None), (6, (1, 2, 3))])]


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Tokens, with pictures among them in some."""
    tokens, picture = st.lists(st.integers(1, 250), max_size=30), st.sampled_from(PICTURES)
    pictures = draw(st.lists(picture, max_size=2))
    found = draw(tokens)
    for one in pictures:
        found += [*one.ids.tolist(), *draw(tokens)]
    return found


def beginning(draw: st.DrawFn, tokens: list[int]) -> list[int]:
    """Return the beginning of a prompt. It ends within no picture."""
    within = {number for one in PICTURES for number in one.ids.tolist()[1:]}
    ends = [end for end in range(len(tokens)) if tokens[end] not in within]
    return tokens[: draw(st.sampled_from([*ends, len(tokens)]))]


def evaluate(runner: Runner, data: st.DataObject, prompt: list[int]) -> None:
    """Evaluate a prompt in random pieces, with checkpoints, drafts and perhaps an interrupt."""
    if not prompt:
        return
    draw = data.draw
    offsets = st.integers(0, len(prompt))
    with runner._cache.begin(prompt) as lease:
        roles = draw(st.dictionaries(offsets, st.sampled_from(ROLES), max_size=3))
        lease.mark(CheckpointPlaces(roles, (), len(prompt)))
        taken = draw(st.sets(offsets, max_size=4) | st.just({0, *range(len(prompt) + 1)}))
        until = draw(st.just(len(prompt)) | offsets)
        while True:
            if lease.recorded in taken:
                lease.checkpoint()
            if lease.recorded >= until:
                return
            nexts = [stop for stop in (*taken, until) if stop > lease.recorded]
            count = min(draw(st.integers(1, 12)), min(nexts) - lease.recorded)
            piece = lease.remaining[:count]
            is_draft = draw(st.booleans())
            lease.begin_draft(count) if is_draft else lease.begin_forward()
            runner.model(mx.array(piece)[None], cache=lease.model_caches)
            lease.end_forward(count)
            if draw(st.integers(0, 9)) == 0:
                return  # the pass is not recorded
            lease.accept(piece) if is_draft else lease.record(piece)


def described(entry: CacheEntry) -> Any:
    kept = [(one.offset, one.role) for one in entry.checkpoints]
    return entry.tokens.array.tolist(), entry.offsets, kept, entry.is_shifted


def goes_on_equally(there: Runner, cold: Runner, prompt: list[int]) -> int:
    """Answer with both, and return how many tokens the first one has reused."""
    if has_pictures(
        np.array(prompt, np.int32)
    ):  # the oracle sees none: the equal entry has to be enough
        return there.entry.reach(min(len(there.entry.tokens), len(prompt) - 2))[0]
    said, usage = answer(there, prompt, 3)
    assert said == answer(cold, prompt, 3)[0]
    assert there.entry.is_true
    return usage.cached_tokens


def session_of(
    store: SessionStore, entry: CacheEntry, names: PictureNames
) -> SessionEntry | StoredEntry:
    return stored(store, entry, "s", PARTS, names)


def old_session_of(store: SessionStore, entry: CacheEntry, names: PictureNames) -> StoredEntry:
    """Return the entry in the one file that version 0.2 wrote."""
    pictures = names.of(entry.tokens.array)
    write_old(store.folder / "s", entry.export(), PARTS, None, pictures)
    found = stored_entry(store.folder_of("s"))
    assert isinstance(found, StoredEntry)
    return found


MIXED = st.sampled_from(list(MIXES.values())) | st.tuples(
    st.lists(st.sampled_from(ALL), min_size=1, max_size=3),
    st.sampled_from([NO_HELP, SLACK, CHECKPOINTS, FEW]),
)


@examples(120)
@given(mixed=MIXED, prompt=prompts(), data=st.data())
def test_what_is_written_is_read(
    mixed: tuple[list[str], dict[str, int]], prompt: list[int], data: st.DataObject
) -> None:
    """Sessions and parked conversations of any entry come back whole, and answer as a cold run."""

    def new() -> Runner:
        return oracle_runner(mixed[0], **mixed[1])

    runner = new()
    for _ in range(data.draw(st.integers(1, 2))):
        evaluate(runner, data, prompt)
        prompt = [*beginning(data.draw, prompt), *data.draw(prompts())]
    entry, names = runner.entry, PictureNames(TABLE)
    before, said = described(entry), entry.tokens.array.tolist()
    cut = said[: data.draw(st.integers(0, len(said)))]
    with TemporaryDirectory() as folder:
        store = SessionStore(Path(folder) / "sessions")
        store.save("s", Session("oracle"))
        if said:
            for found in (session_of(store, entry, names), old_session_of(store, entry, names)):
                found.check(new().cache.outline())
                found.renumber({one.digest: one for one in PICTURES})
                here = new()
                here.cache.adopt(found)
                assert described(here.entry) == before
                assert goes_on_equally(here, new(), [*cut, 7, 8]) == goes_on_equally(
                    runner_with(new(), found), new(), [*cut, 7, 8]
                )
        options: dict[str, Any] = {"limit": PLENTY, "pictures": names}
        parking = DiskCache(Path(folder) / "kept", PARTS, **options)
        assert (offloaded(parking, entry) is None) == (not said)
        parking.close()
        parking = DiskCache(Path(folder) / "kept", PARTS, **options)
        assert len(parking) == bool(said)
        for parked in list(parking._index):
            assert described(runner_with(new(), parking.restore(parked)).entry) == (
                *before[:2],
                before[2] if parked.states else [],
                before[3],
            )
            found = parking.find(np.array([*cut, 7, 8], np.int32))
            if found is not None:
                here = runner_with(new(), parking.restore(*found))
                assert goes_on_equally(here, new(), [*cut, 7, 8]) == found[1]
        parking.close()


def runner_with(runner: Runner, saved: Any) -> Runner:
    runner.cache.adopt(saved)
    assert runner.entry.is_true
    return runner


@pytest.mark.parametrize("kinds", [["sliding"], ["recurrent", "full"]], ids="-".join)
def test_a_checkpoint_at_the_beginning_is_none(kinds: list[str]) -> None:
    """Nobody goes back to it: a cold start is as good."""
    runner = oracle_runner(kinds, **CHECKPOINTS)
    with runner._cache.begin([1, 2, 3]) as lease:
        assert lease.checkpoint() == []
    assert not len(runner.entry.checkpoints)
