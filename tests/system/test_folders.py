"""Folders of the user's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxrunner.system.folders import CacheFile, data_folder


def test_the_home_of_an_unknown_user_is_an_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Callers make one line of an OSError."""
    monkeypatch.setenv("MLXRUNNER_DATA", "~no-such-user/data")
    with pytest.raises(OSError, match="MLXRUNNER_DATA names ~no-such-user/data"):
        data_folder()


def test_a_cache_file_keeps_the_newest_values(own_home: Path) -> None:
    """A value that is kept again is among the newest."""
    file = CacheFile("small.json", most=3)
    assert file.values() == {}
    for key, value in (("a", 1), ("b", [2]), ("c", {"x": 3}), ("a", 4), ("d", None)):
        file.keep(key, value)
    assert CacheFile("small.json").values() == {"c": {"x": 3}, "a": 4, "d": None}
    assert file.path == own_home / ".cache" / "mlxrunner" / "small.json"
    assert file.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b'{"a": 1', b"[" * 100_000])
def test_a_damaged_cache_file_is_empty_and_written_again(content: bytes) -> None:
    """A changed text counts as damage."""
    file = CacheFile("small.json")
    file.keep("a", 1)
    changed = file.path.read_text().replace("1\n", "2\n")
    for damaged in (content, changed.encode()):
        file.path.write_bytes(damaged)
        assert file.values() == {}
        file.keep("b", 5)
        assert file.values() == {"b": 5}
