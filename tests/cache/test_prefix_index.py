"""The index of evaluated prefixes: exact, bounded, and whole after a kill."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from mlxrunner.cache.account import NAME, Fingerprints, PrefixIndex
from mlxrunner.cache.entry import as_tokens, common_prefix


def marks(index: PrefixIndex, tokens: list[int]) -> Fingerprints:
    return index.fingerprints(as_tokens(tokens))[0]


def some_texts(seed: int, count: int = 200) -> list[list[int]]:
    """Return texts that continue from each other, from any place."""
    rng, texts = random.Random(seed), [[1, 2, 3]]
    for _ in range(count):
        base = rng.choice(texts)
        more = [rng.randrange(3) for _ in range(rng.randint(0, 20))]
        texts.append(base[: rng.randint(0, len(base))] + more)
    return texts


@pytest.mark.parametrize("seed", range(4))
def test_it_knows_exactly_the_prefixes_that_were_added(tmp_path: Path, seed: int) -> None:
    """Also when another process opens the file now and then."""
    index, before = PrefixIndex(tmp_path / NAME), list[list[int]]()
    for number, text in enumerate(some_texts(seed)):
        if number % 50 == 49:
            index = PrefixIndex(tmp_path / NAME)
        wanted = max((common_prefix(as_tokens(one), as_tokens(text)) for one in before), default=0)
        assert index.shared(marks(index, text))[0] == wanted
        index.add(marks(index, text))
        before.append(text)
    assert len(index) == len({tuple(text[:n]) for text in before for n in range(1, len(text) + 1)})


def test_a_file_cut_off_anywhere_keeps_what_is_whole(tmp_path: Path) -> None:
    """A killed process may leave a record half written; the next one continues after the whole."""
    file, texts = tmp_path / NAME, some_texts(1, 12)
    index = PrefixIndex(file)
    for text in texts:
        index.add(marks(index, text))
    whole = file.read_bytes()
    for cut in range(16, len(whole)):
        file.write_bytes(whole[:cut])
        found = PrefixIndex(file)
        known = [found.shared(marks(found, text))[0] for text in texts]
        assert all(count <= len(text) for count, text in zip(known, texts, strict=True))
        found.add(marks(found, [7, 7, 7]))
        again = PrefixIndex(file)
        assert again.shared(marks(again, [7, 7, 7])) == (3, True)
        assert [again.shared(marks(again, text))[0] for text in texts] == known


def test_a_changed_byte_costs_what_comes_behind_it_at_most(tmp_path: Path) -> None:
    """No prefix is known that was not evaluated."""
    file, texts = tmp_path / NAME, some_texts(2, 12)
    index = PrefixIndex(file)
    for text in texts:
        index.add(marks(index, text))
    whole = file.read_bytes()
    for place in range(8, len(whole), 3):
        damaged = bytearray(whole)
        damaged[place] ^= 0x55
        file.write_bytes(damaged)
        found = PrefixIndex(file)
        for text in texts:
            assert found.shared(marks(found, [*text, 9, 9]))[0] <= len(text)


def test_it_stays_within_its_bound_in_memory_and_on_disk(tmp_path: Path) -> None:
    """The least recently used go; what is in use stays, and it says that it has forgotten."""
    limit, file = 20_000, tmp_path / NAME
    rng = np.random.default_rng(0)
    index = PrefixIndex(file, limit=limit)
    used = rng.integers(0, 9, 300).tolist()
    index.add(marks(index, used))
    assert not index.has_forgotten
    for _ in range(300):
        index.add(marks(index, rng.integers(0, 50_000, rng.integers(1, 400)).tolist()))
        assert index.shared(marks(index, used))[0] == 300
        assert 4 * len(index) <= limit
        assert file.stat().st_size <= 2 * limit + 16
    assert index.has_forgotten
    again = PrefixIndex(file, limit=limit)
    assert again.shared(marks(again, used)) == (300, True)


def test_a_stretch_goes_before_the_one_that_leads_to_it() -> None:
    """Else it would take room, and could not be found."""
    index = PrefixIndex(limit=4 * 500 + 256 * 3)
    for number in range(40):
        index.add(marks(index, [*range(300), *[number + 5] * 90]))
        assert index.shared(marks(index, list(range(300))))[0] == 300


@pytest.mark.parametrize("kind", ["folder", "link", "other", "foreign"])
def test_a_file_that_can_not_be_used_costs_a_line_of_the_log(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The index works, for this process; what is there is not touched."""
    file, elsewhere = tmp_path / NAME, tmp_path / "elsewhere"
    elsewhere.write_bytes(b"mine")
    if kind == "folder":
        file.mkdir()
    elif kind == "link":
        file.symlink_to(elsewhere)
    elif kind == "other":
        file.write_bytes(b"mine")
        file.chmod(0o666)
    else:
        file = tmp_path / "missing" / NAME
    index = PrefixIndex(file)
    index.add(marks(index, [1, 2]))
    index.add(marks(index, [1, 2, 3]))
    assert index.shared(marks(index, [1, 2, 3, 4])) == (3, False)
    assert elsewhere.read_bytes() == b"mine"
    assert len(caplog.messages) == 1
    assert kind != "other" or file.read_bytes() == b"mine"


def test_the_file_is_private_and_holds_no_token(tmp_path: Path) -> None:
    """Others can't read it, and who reads it can't tell the text."""
    file, index = tmp_path / NAME, PrefixIndex(tmp_path / NAME)
    index.add(marks(index, [1000, 1001, 1002] * 50))
    assert file.stat().st_mode & 0o777 == 0o600
    numbers = np.frombuffer(file.read_bytes()[16:], "<u4")
    assert not set(numbers.tolist()) & {1000, 1001, 1002}
