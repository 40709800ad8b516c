"""Measured speeds are kept between runs, for their owner only, and never cause an error."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from mlxrunner.batch.plan import MOST_MODELS, Speed, known_speed, remember_speed, speed_file

FAST, SLOW = Speed(2000, 200, 30.5), Speed(20, 2, 3)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_was_measured_last_is_known(folder: Path) -> None:
    """Each model has its own newest speed, in one file of mode 0600 with nothing beside it."""
    assert known_speed("demo") is None
    for model, speed in [("demo", SLOW), ("owner/name", SLOW), ("demo", FAST)]:
        remember_speed(model, speed)
    assert (known_speed("demo"), known_speed("owner/name"), known_speed("other")) == (
        FAST,
        SLOW,
        None,
    )
    assert speed_file() == folder / "mlxrunner" / "speed.json"
    assert stat.S_IMODE(speed_file().stat().st_mode) == 0o600
    assert [file.name for file in speed_file().parent.iterdir()] == ["speed.json"]


def test_by_default_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """~/.cache/mlxrunner/speed.json."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert speed_file() == tmp_path / ".cache" / "mlxrunner" / "speed.json"


def test_a_directory_is_known_by_any_of_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative or whole, with a slash or without."""
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    remember_speed("model", FAST)
    assert known_speed("./model/") == known_speed(str(tmp_path / "model")) == FAST


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nope",
        b"[]",
        b"5",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"demo": 5}',
        b'{"demo": []}',
        b'{"demo": {}}',
        b'{"demo": {"prefill_rate": 1, "decode_rate": 1}}',
        b'{"demo": {"prefill_rate": 1, "decode_rate": 1, "answer_tokens": 1, "x": 1}}',
        *(
            json.dumps(
                {"demo": {"prefill_rate": 1, "decode_rate": wrong, "answer_tokens": 1}}
            ).encode()
            for wrong in (0, -1, "1", None, True, math.nan, math.inf, [])
        ),
    ],
)
def test_a_damaged_file_is_as_good_as_none(content: bytes) -> None:
    """Nothing is known, and the next measurement makes it whole."""
    speed_file().parent.mkdir(parents=True)
    speed_file().write_bytes(content)
    assert known_speed("demo") is None
    remember_speed("demo", FAST)
    assert known_speed("demo") == FAST


@pytest.mark.parametrize("kind", ["FIFO", "hole", "twice"])
def test_what_can_not_be_read_at_once_is_as_good_as_none(kind: str) -> None:
    """Nobody waits for it, or reads it whole to know."""
    speed_file().parent.mkdir(parents=True)
    if kind == "FIFO":
        os.mkfifo(speed_file())
    elif kind == "hole":
        speed_file().touch()
        os.truncate(speed_file(), 2**40)
    else:
        speed_file().write_text('{"demo": 1, "demo": 2}')
    assert known_speed("demo") is None


def test_a_file_that_can_not_be_written(folder: Path) -> None:
    """Is not worth an error, and neither is a folder that can't be made."""
    folder.write_text("a file where the folder should be")
    remember_speed("demo", FAST)
    assert known_speed("demo") is None


def test_an_interrupted_write_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new content takes the old one's place in one step or not at all, and leaves no rest."""
    remember_speed("demo", SLOW)

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        remember_speed("demo", FAST)
    assert known_speed("demo") == SLOW
    assert [file.name for file in speed_file().parent.iterdir()] == ["speed.json"]


def test_the_file_stays_small() -> None:
    """Models that were not used for a long time are forgotten."""
    for number in range(MOST_MODELS + 5):
        remember_speed(f"owner/{number}", SLOW)
        remember_speed("demo", FAST)
    assert len(json.loads(speed_file().read_text()).keys() - {"crc32"}) == MOST_MODELS


def test_a_speed_that_was_changed_is_not_known() -> None:
    """A file of an older version, which has no checksum, is."""
    remember_speed("demo", FAST)
    text = speed_file().read_text()
    speed_file().write_text(text.replace("2000", "2001"))
    assert known_speed("demo") is None
    speed_file().write_text("{" + text.partition(", ")[2])
    assert known_speed("demo") == FAST
    assert known_speed("demo") == FAST
    assert known_speed("owner/0") is None


def test_the_time_for_tokens() -> None:
    """Prompts and answers, each at its own rate."""
    assert SLOW.seconds(40, 10) == 2 + 5
