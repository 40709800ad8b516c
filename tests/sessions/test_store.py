"""Sessions on disk are whole or not there, private, and written by one process at a time.

Their names are nothing but names.
"""

from __future__ import annotations

import json
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sample import examples

from mlxrunner.errors import SessionError
from mlxrunner.sessions.caches import stored_entry
from mlxrunner.sessions.session import Branch, History, Position, Rendering, Session, SessionTurn
from mlxrunner.sessions.store import CACHE, TEXT, SessionStore
from mlxrunner.system.folders import Folder
from mlxrunner.system.writing import sealed, write_all


def session(text: str = "hello", tokens: int = 5) -> Session:
    history = History((SessionTurn(text, text),), Rendering(text, tuple(range(tokens))))
    return Session(
        "demo", {"main": Branch("be brief", history)}, settings={"options": {"temperature": 0.5}}
    )


TURN: dict[str, object] = {"user": "hello", "answer": "hello", "closing": ""}
TURN |= {"begins": None, "ends": None}
BEGIN, END = {"characters": 0, "tokens": 0}, {"characters": 5, "tokens": 5}


PIECE = f"talk-{'0' * 32}-7.safetensors"


def written(value: int, name: str = PIECE) -> Callable[[Folder], None]:
    """Return a function that writes caches of 4000 bytes."""
    return lambda folder: folder.write(name, lambda fd: write_all(fd, bytes([value]) * 4000))


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Limit the size of files, like a disk that is nearly full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def edited(store: SessionStore) -> Iterator[Any]:
    """Save a session, let the block change what its text says, and leave out the checksum."""
    store.save("one", session())
    file = store.folder / "one" / TEXT
    content = json.loads(file.read_text())
    del content["crc32"]
    yield content
    file.write_text(json.dumps(content))


def test_what_was_saved_is_loaded(store: SessionStore) -> None:
    """Every field, texts of any kind included."""
    saved = session("naïve \x1b[31m \u2028 🙂 \ud800")
    saved.branches["other"] = Branch(None, History())
    store.save("one", saved)
    assert store.load("one") == saved
    assert store.names() == ["one"]


def test_the_files_are_their_owners_alone(store: SessionStore) -> None:
    """Folders 0700, files 0600, and nothing else is there."""
    store.save("one", session())
    store.save_cache("one", written(1))
    folder = store.folder / "one"
    assert sorted(os.listdir(folder)) == [TEXT, PIECE]
    modes = {
        path.name: path.stat().st_mode & 0o777 for path in (store.folder, folder, *folder.iterdir())
    }
    assert modes == {"sessions": 0o700, "one": 0o700, TEXT: 0o600, PIECE: 0o600}


def test_the_users_folder_is_where_the_system_has_such_things(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XDG_DATA_HOME on Linux; MLXRUNNER_DATA wins."""
    monkeypatch.delenv("MLXRUNNER_DATA", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    assert SessionStore().folder == tmp_path / "xdg" / "mlxrunner" / "sessions"
    monkeypatch.setenv("MLXRUNNER_DATA", str(tmp_path / "chosen"))
    assert SessionStore().folder == tmp_path / "chosen" / "sessions"


NO_NAMES = ["../x", "a/b", "/etc/passwd", "", ".", "..", ".hidden", "a b", "a\n", "x" * 49, "-f"]


@pytest.mark.parametrize("name", [*NO_NAMES, "a\0b", "~"])
def test_a_name_is_no_path(store: SessionStore, name: str) -> None:
    """Refused in one line by everything that takes a name; nothing is made anywhere."""
    acts = (store.load, store.remove, store.folder_of, store.exists)
    for act in (*acts, lambda name: store.save(name, session())):
        with pytest.raises(SessionError, match="can't be a session's name") as caught:
            act(name)
        assert "\n" not in str(caught.value)
    assert list(store.folder.iterdir()) == []


@pytest.mark.parametrize("name", ["a", "My-Session_2.1", "größe", "日本"])
def test_names_are_letters_of_any_language(store: SessionStore, name: str) -> None:
    """With digits, dots, dashes and underscores."""
    store.save(name, session())
    assert store.names() == [name]


def test_links_are_not_followed(store: SessionStore, tmp_path: Path) -> None:
    """Neither in place of a session nor of its files; what they point to stays as it is."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / TEXT).write_text("mine")
    (store.folder / "linked").symlink_to(outside)
    store.save("one", session())
    text = store.folder / "one" / TEXT
    text.unlink()
    text.symlink_to(outside / TEXT)
    for name in ("linked", "one"):
        with pytest.raises(SessionError, match=r"can't be (opened|read)"):
            store.load(name)
    with pytest.raises(SessionError):
        store.save("linked", session())
    store.save("one", session())  # the link is replaced
    assert store.load("one").model == "demo"
    assert (outside / TEXT).read_text() == "mine"


def test_what_is_no_file_is_refused(store: SessionStore) -> None:
    """A pipe in place of a file would wait for ever."""
    store.save("one", session())
    (store.folder / "one" / TEXT).unlink()
    os.mkfifo(store.folder / "one" / TEXT)
    with pytest.raises(SessionError, match="not a regular file"):
        store.load("one")
    for name in (CACHE, PIECE):
        os.mkfifo(store.folder / "one" / name)
        with pytest.raises(SessionError, match="not a regular file"):
            stored_entry(store.folder_of("one"))


WRONG_TEXTS = ["", "{", "[]", "null", "1", '"x"', "[" * 100_000, '{"a":' * 100_000, "\xff"]
WRONG_TEXTS += [f'{{"schema": {value}}}' for value in ("1", "2", "NaN", "9" * 10_000)]


@pytest.mark.parametrize("text", WRONG_TEXTS, ids=range(len(WRONG_TEXTS)))
def test_a_text_that_is_none_of_ours_is_one_line(store: SessionStore, text: str) -> None:
    store.save("one", session())
    (store.folder / "one" / TEXT).write_bytes(text.encode("latin-1"))
    with pytest.raises(SessionError, match="`mlxrunner sessions rm one`") as caught:
        store.load("one")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


MAIN = "branches main"
HISTORY = f"{MAIN} history"
FIRST = f"{HISTORY} turns 0"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model", 3),
        ("branch", "nowhere"),
        ("branches", []),
        (MAIN, None),
        ("settings", "x"),
        ("saved_at", "now"),
        ("fingerprint", None),
        (f"{MAIN} system", 1),
        (f"{HISTORY} turns", {}),
        (f"{HISTORY} turns", [TURN | {"ends": END}, TURN | {"begins": BEGIN}]),
        *((f"{HISTORY} first", value) for value in (9, -1)),
        (f"{HISTORY} dropped", -1),
        *((f"{HISTORY} spelling tokens", one) for one in ([1, -1], [1.5], [2**31], [True])),
        (FIRST, 7),
        (FIRST, TURN | {"begins": END | {"characters": 0}, "ends": END | {"tokens": 0}}),
        (FIRST, TURN | {"begins": END | {"tokens": 0}, "ends": END | {"characters": 0}}),
        (f"{FIRST} user", ["x"]),
        (f"{FIRST} ends", {"characters": 0, "tokens": 99}),
        (f"{FIRST} begins", {"characters": -1, "tokens": 0}),
    ],
    ids=str,
)
def test_a_text_with_a_wrong_value_is_one_line(
    store: SessionStore, path: str, value: object
) -> None:
    """Types, bounds and what belongs together are checked."""
    *steps, last = [int(step) if step == "0" else step for step in path.split()]
    with edited(store) as content:
        place = reduce(lambda place, step: place[step], steps, content)
        place[last] = value
    with pytest.raises(SessionError) as caught:
        store.load("one")
    assert "\n" not in str(caught.value)


def test_a_file_of_an_older_version_keeps_its_tokens(store: SessionStore) -> None:
    """Files of up to version 0.2 have no checksum."""
    with edited(store) as content:
        pass
    assert store.load("one").to_json() == json.dumps(content)


@pytest.mark.parametrize("begin", ['{"crc32": "', '{"crc32": "00000000", ', "", '{"crd32": "'])
def test_tokens_go_with_a_checksum_that_is_wrong_and_texts_stay(
    store: SessionStore, begin: str
) -> None:
    """It is the same for the session and for a state of it, and for a damaged name of it."""
    store.save("one", session("ten cats"))
    store.save_state("one", session("two cats"))
    folder = store.folder / "one"
    for file in (folder / TEXT, folder / "state-1.json"):
        text = file.read_text().replace("cats", "dogs")
        file.write_text(begin + text[len(begin) :])
    found, (state,) = store.load("one"), store.load_states("one")
    if begin:
        assert (found.is_changed, state.is_changed) == (True, True)
        assert found.history == History((SessionTurn("ten dogs", "ten dogs"),))
        assert (found.system, found.settings) == ("be brief", {"options": {"temperature": 0.5}})
        assert found.fingerprint == {}
    assert state.history == History((SessionTurn("two dogs", "two dogs"),))
    store.save("one", found)
    assert not store.load("one").is_changed


COUNTED = SessionTurn("I have 5 cats", "5", Position(13, 3), Position(14, 4), "<end>")
CATS = Rendering("I have 5 cats5", (5, 17, 4711, 9))
LONG = Session(
    "demo",
    {
        name: Branch(system, History((COUNTED,), CATS, first=1, dropped=2))
        for name, system in (("main", None), ("other", "You count."))
    },
    settings={"options": {"temperature": 0.5}},
    fingerprint={"weights": "w1", "template": "t"},
    saved_at=17.5,
)


@examples(400)
@given(data=st.data())
def test_no_change_of_a_file_changes_tokens_or_loses_words(data: st.DataObject) -> None:
    """A changed file is refused, or its words are all there is and each of them is there."""
    content = sealed(LONG.to_json()).encode()
    at = data.draw(st.integers(0, len(content)))
    end = min(at + data.draw(st.integers(0, 1) | st.integers(0, 30)), len(content))
    changed = content[:at] + data.draw(st.binary(max_size=2)) + content[end:]
    try:
        found = Session.from_json(changed)
    except SessionError:
        return
    if changed == content:
        assert found == LONG
        return
    assert found.is_changed
    assert [one.history.rendering for one in found.branches.values()] == [Rendering()] * 2
    counts = [len(one.history.turns) for one in found.branches.values()]
    assert counts == [1, 1]
    kept = json.dumps([[one.system, one.history.turns[0].user] for one in found.branches.values()])
    assert abs(len(kept) - len('[[null, "I have 5 cats"], ["You count.", "I have 5 cats"]]')) < 40


def test_a_full_disk_costs_nothing_that_was_there(store: SessionStore) -> None:
    """The new text stays with the old caches where only these have no room.

    Nothing half-written stays.
    """
    store.save("one", session("old"))
    store.save_cache("one", written(1))
    said = "the session 'one' could not be saved: File too large"
    with files_of_at_most(2000):
        store.save("one", session("new"))
        with pytest.raises(SessionError, match=f"caches of {said}"):
            store.save_cache("one", written(2))
    with files_of_at_most(10), pytest.raises(SessionError, match=said):
        store.save("one", session("newest"))
    assert store.load("one").history.turns[0].user == "new"
    assert (store.folder / "one" / PIECE).read_bytes() == b"\1" * 4000
    assert sorted(os.listdir(store.folder / "one")) == [TEXT, PIECE]


def test_what_is_saved_is_on_the_disk_in_whole(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is synced before it gets its name, then the folder, down to the medium."""
    synced: list[str] = []
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder"}
    monkeypatch.setattr(
        "mlxrunner.system.folders.whole_sync",
        lambda fd: synced.append(kinds[stat.S_IFMT(os.fstat(fd).st_mode)]),
    )
    store.save("one", session())
    assert synced == ["file", "folder"]


def test_a_session_that_could_not_be_begun_is_not_there(store: SessionStore) -> None:
    """Its folder is not there either."""
    with files_of_at_most(10), pytest.raises(SessionError):
        store.save("one", session())
    assert list(store.folder.iterdir()) == []


def test_a_folder_that_can_not_be_made_is_one_line(tmp_path: Path) -> None:
    """A file where the data folder should be."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SessionError, match=r"no folder for sessions .* MLXRUNNER_DATA"):
        SessionStore(tmp_path / "file" / "sessions").save("one", session())


def test_removing(store: SessionStore) -> None:
    """Everything of it goes; what is not there, or open elsewhere, is said."""
    store.save("one", session())
    store.save_cache("one", written(1))
    with (
        SessionStore(store.folder).lock("one"),
        pytest.raises(SessionError, match="open in another chat"),
    ):
        store.remove("one")
    store.remove("one")
    assert list(store.folder.iterdir()) == []
    with pytest.raises(SessionError, match="no session is called 'one'"):
        store.remove("one")


HOLD = """
import sys, time
from pathlib import Path
from mlxrunner.sessions.store import SessionStore
with SessionStore(Path(sys.argv[1])).lock("one"):
    print("held", flush=True)
    time.sleep(3600)
"""


def test_two_processes_can_not_write_one_session(store: SessionStore) -> None:
    """A second writer is refused in one line, a reader is not, and a kill frees the session."""
    store.save("one", session())
    command = [sys.executable, "-c", HOLD, str(store.folder)]
    said = "the session 'one' is open in another chat: close that, or use another name"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(SessionError, match=said):
            store.save("one", session())
        assert store.load("one").model == "demo"
        other.kill()
    store.save("one", session("later"))
    assert store.load("one").history.turns[0].user == "later"


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import numpy as np
from mlxrunner.sessions.session import History, Position, Rendering, SessionTurn
from mlxrunner.sessions.session import Branch, Session
from mlxrunner.sessions.store import CACHE, SessionStore
from mlxrunner.system.tensorfile import Buffer, TensorFile
from mlxrunner.system.tensorfile import write as write_arrays
from mlxrunner.system.writing import sealed, write_all
assert "mlx" not in sys.modules

folder = Path(sys.argv[1])
kept = 0
found = {"nothing new": 0, "newer text": 0, "newer caches": 0}

def saving(first, saved):
    store = SessionStore(folder)
    with store.lock("one"):
        for n in range(first, first + 10_000):
            turns = (SessionTurn(f"turn {n}", "x" * (n % 50)),) * 20
            store.save("one", Session("demo", {"main": \
Branch(None, History(turns, Rendering("", (n,) * 2000)))}))
            os.write(saved, b"t")
            rows = np.full(300_000 + n, n, np.int32)
            tokens = {"tokens": Buffer("int32", rows.shape, rows.view(np.uint8).data)}
            store.save_cache("one", \
lambda folder: folder.write(CACHE, lambda fd: write_arrays(fd, tokens, {"n": str(n)})))
            os.write(saved, b"c")

caches = 0
for attempt in range(50):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        saving(kept + 1, write)
    os.close(write)
    for _ in range(attempt % 4):  # from before its first text to after its second one
        os.read(read, 1)
    time.sleep(random.uniform(0.001, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read)
    store = SessionStore(folder)
    if not store.exists("one"):
        continue
    session = store.load("one")
    n = session.history.rendering.tokens[0]
    assert session.history.rendering.tokens == (n,) * 2000 \
and session.messages[0]["content"] == f"turn {n}", n
    assert n >= kept
    found["newer text" if n > kept else "nothing new"] += 1
    kept = n
    if (folder / "one" / CACHE).exists():
        file = TensorFile(store.folder_of("one").open(CACHE))
        stored = np.frombuffer(file.arrays["tokens"].read(), np.int32)
        assert len(stored) == 300_000 + stored[0] and (stored == stored[0]).all()
        assert caches <= stored[0] <= n
        found["newer caches"] += stored[0] > caches
        caches = int(stored[0])
print(found["newer text"], found["newer caches"], len(os.listdir(folder / "one")))
"""


@pytest.mark.exhaustive(0)
def test_killed_fifty_times_while_saving(tmp_path: Path) -> None:
    """Text and caches are each whole after kill -9 at any moment, and saving continues."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    texts, caches, files = map(int, done.stdout.split())
    assert texts >= 5
    assert caches >= 1
    assert files <= 4
    store = SessionStore(tmp_path)
    store.save("one", session("after all"))
    store.save_cache("one", written(1, CACHE))
    assert sorted(os.listdir(tmp_path / "one")) == [CACHE, TEXT]


def test_several_threads_list_a_folder(tmp_path: Path) -> None:
    """Each sees all files: the thread that saves and the chat share one open folder."""
    folder = Folder(tmp_path)
    for number in range(200):
        (tmp_path / f"state-{number}.json").touch()
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: len(folder.names()), range(400)))
    assert set(found) == {200}
