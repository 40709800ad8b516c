"""Nothing that was saved is lost by a command: /redo, states of a session, chats without a name."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.models import write_model
from support.sample import fewer
from support.typist import Typist
from support.waiting import until

from mlxrunner import Runner
from mlxrunner.chat.branches import Branches
from mlxrunner.chat.commands.sessions import Saving
from mlxrunner.chat.conversation import Conversation
from mlxrunner.chat.repl import Chat
from mlxrunner.chat.start import commands
from mlxrunner.chat.taken import MOST, State, Taken
from mlxrunner.errors import SessionError
from mlxrunner.sessions.history import History, Turn
from mlxrunner.sessions.session import Branch, Session
from mlxrunner.sessions.store import MOST_STATES, SessionStore
from mlxrunner.sessions.unnamed import (
    MOST_CHATS,
    drop_oldest,
    is_unnamed,
    must_be_free,
    new_name,
    unnamed_chats,
)

CHAT = ("-m", "mlxrunner", "chat", "--no-reserve")
PIPE = [sys.executable, *CHAT]
CTRL_C = "\x03"
TOKENS = r"\d+ of \d+ tokens reused, \d+ to evaluate"


def branch(*users: str, system: str | None = None) -> Branch:
    return Branch(system, History(tuple(Turn(user, f"answer to {user}") for user in users)))


@pytest.fixture(scope="module")
def demo() -> Runner:
    return Runner.load("demo", reserve=False)


class Typed:
    """A chat with a store, to which texts are typed."""

    def __init__(self, demo: Runner, store: SessionStore) -> None:
        demo.reset()
        self.store = store
        self.chat = Chat(Conversation(demo), model="demo", loading={"reserve": False})

    def type(self, *texts: str, session: str | None = None, goes_on: bool = False) -> None:
        """Type the texts into a chat of its own, and leave it."""
        saving = Saving(self.store, keeps_unnamed=True)
        self.chat.after_turn, self.chat.after_command, self.chat.after_load = [], [], []
        with saving.opened(session, goes_on=goes_on) as resumed:
            saving.begin(self.chat, resumed is not None)
            self.chat.reader = Typist(list(texts))
            self.chat.run(commands(*saving.commands))
            saving.end(self.chat)

    @property
    def users(self) -> list[str]:
        return [turn.user for turn in self.chat.conversation.history.turns]


@pytest.fixture
def typed(demo: Runner, tmp_path: Path) -> Any:
    """Return a new chat, each on the same store."""
    return lambda: Typed(demo, SessionStore(tmp_path / "sessions"))


def test_states_are_taken_newest_first_and_for_one_branch() -> None:
    """Those that lack nothing are passed over, and each is taken once."""
    taken, full, cut = Taken(), branch("a", "b"), branch("a")
    taken.push(State("main", full))
    taken.push(State("other", branch("x")))
    taken.push(State("main", cut))
    assert taken.pop("main", branch()) == cut
    assert taken.pop("main", cut) == full
    assert taken.pop("main", cut) is None
    assert taken.pop("other", full) == branch("x")
    for number in range(MOST + 1):
        taken.push(State("main", branch(str(number))))
    found = [taken.pop("main", branch()) for _ in range(MOST + 1)]
    assert found == [*(branch(str(number)) for number in range(MOST, 0, -1)), None]


@pytest.mark.parametrize(
    ("before", "after", "is_lost"),
    [
        (branch("a"), branch("a", "b"), False),
        (branch("a", "b"), branch("a"), True),
        (branch("a"), branch("b"), True),
        (branch(system="s"), branch(), True),
        (branch("a"), branch("a", system="s"), True),
        (branch(), branch("a"), False),
        (branch("a"), None, True),
        (branch(), None, False),
    ],
)
def test_a_state_is_lost_if_turns_or_the_system_prompt_are_gone(
    before: Branch, after: Branch | None, is_lost: bool
) -> None:
    """More turns lose nothing."""
    assert State("main", before).is_lost_in(after) is is_lost


def test_redo_brings_back_what_each_command_took(
    typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """/undo, /clear, /system, /edit's kin: one after the other, with the tokens as they were."""
    one = typed()
    one.type("My name is Ana.", "I have a dog.")
    whole = one.chat.conversation.history
    one.type("/undo 99", "/redo")
    assert one.chat.conversation.history is whole
    one.type("/undo", "/clear", "/redo", "/redo")
    assert one.chat.conversation.history is whole
    one.type("/redo")
    assert "error: no command has taken anything away from branch main" in capsys.readouterr().err
    one.type("/system You are a parrot.", "/redo")
    assert (one.chat.conversation.history, one.chat.conversation.system) == (whole, None)
    one.type("/retry seed=3 temperature=2", "/redo")
    assert one.chat.conversation.history is whole


def test_redo_keeps_what_came_after_as_a_branch(
    typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Going back and forth loses nothing."""
    one = typed()
    one.type("My name is Ana.", "/clear", "My name is Bo.", "/redo")
    assert one.users == ["My name is Ana."]
    assert "; what was here is kept as branch main~1" in capsys.readouterr().err
    one.type("/switch main~1")
    assert one.users == ["My name is Bo."]


def test_redo_drops_the_branch_that_kept_the_same_turns(typed: Any) -> None:
    """A session keeps what it would lose as a branch, until the turns are back."""
    one = typed()
    one.type("My name is Ana.", "I have a dog.", "/undo 2", session="trip")
    assert list(one.chat.branches) == ["main", "main~1"]
    two = typed()
    two.type("/redo", session="trip")
    assert two.users == ["My name is Ana.", "I have a dog."]
    assert list(two.chat.branches) == ["main"]


def test_branches_that_were_kept_go_when_they_are_not_needed() -> None:
    """Those that the user made stay."""
    branches = Branches(others={"mine": branch("a")})
    branches.keep("main", branch("a"))
    branches.keep("main", branch("b"))
    branches.keep("main", branch("a", system="s"))
    branches.drop_kept_within(branch("a", "c"))
    assert list(branches) == ["main", "main~2", "main~3", "mine"]


def test_system_in_the_middle_keeps_the_conversation(
    typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what is evaluated again, and the next prompt is that of the template."""
    one = typed()
    one.type("My name is Ana.", "I have a dog.")
    capsys.readouterr()
    one.type("/system You are a parrot.")
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "system prompt: You are a parrot."
    assert said[1].startswith("the conversation stays: ")
    assert said[1].endswith(" to evaluate")
    one.type("What is my name?")
    assert one.users == ["My name is Ana.", "I have a dog.", "What is my name?"]
    conversation = one.chat.conversation
    messages = [{"role": "system", "content": "You are a parrot."}, *conversation.messages[:-1]]
    tokenizer = conversation.runner.tokenizer
    prompt = conversation.renderer.asked(conversation.history, 2)
    assert prompt.text == tokenizer.render(messages)
    assert tokenizer.decode(conversation.runner.entry.tokens).startswith(prompt.text)


def test_a_template_without_a_system_prompt_changes_nothing(
    typed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the template is the answer, and the conversation is as it was."""
    one = typed()
    one.type("My name is Ana.")
    before = one.chat.conversation.branch

    def render(messages: Any, **variables: Any) -> str:
        raise SessionError("no system prompt here")

    with monkeypatch.context() as patched:
        patched.setattr(one.chat.runner.tokenizer, "render", render)
        one.type("/system You are a parrot.")
    assert one.chat.conversation.branch == before


def test_a_session_keeps_the_last_states(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text only, for the owner only; a later chat brings them back. Ten are too slow to type."""
    assert MOST_STATES == 10
    most = fewer(MOST_STATES, 3)
    monkeypatch.setattr("mlxrunner.sessions.store.MOST_STATES", most)
    one = typed()
    one.chat.conversation.options = {"max_tokens": 2}
    texts = [text for number in range(most + 2) for text in (f"Hello {number}!", "/clear")]
    one.type("My name is Ana.", "/undo", *texts, session="trip")
    folder = one.store.folder / "trip"
    files = sorted(path.name for path in folder.glob("state-*.json"))
    assert files == sorted(f"state-{number}.json" for number in range(4, 4 + most))
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    states = one.store.load_states("trip")
    assert [state.history.turns[0].user for state in states[:2]] == [
        f"Hello {most + 1}!",
        f"Hello {most}!",
    ]
    assert not any(state.history.rendering.tokens for state in states)
    two = typed()
    two.type("/redo", session="trip")
    assert two.users == [f"Hello {most + 1}!"]
    two.type("What is my name?", "/redo", session="trip")
    assert two.users == [f"Hello {most}!"]


def test_damaged_states_are_left_out(typed: Any) -> None:
    """Also a link and a FIFO, for which nobody waits; the session itself opens."""
    one = typed()
    one.type("My name is Ana.", "/clear", session="trip")
    folder = one.store.folder / "trip"
    (folder / "state-2.json").write_text("{")
    (folder / "state-3.json").symlink_to("/etc/passwd")
    os.mkfifo(folder / "state-4.json")
    (folder / "state-5.json").touch()
    os.truncate(folder / "state-5.json", 2**40)
    assert len(one.store.load_states("trip")) == 1
    two = typed()
    two.type("/redo", "/clear", session="trip")
    assert (folder / "state-6.json").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from mlxrunner.stored.folder import Folder
from mlxrunner.sessions.history import History, Turn
from mlxrunner.sessions.session import Branch, Session
from mlxrunner.sessions.store import SessionStore

left = int(sys.argv[2])

def counted(name):
    act = getattr(os, name)

    def call(*arguments, **options):
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return act(*arguments, **options)

    setattr(os, name, call)

for name in ("open", "write", "rename", "unlink", "fsync", "close"):
    counted(name)
store = SessionStore(Path(sys.argv[1]))
turn = Turn("new", "answer")
with store.lock("trip"):
    store.save_state("trip", store.load("trip"))
    store.save("trip", Session("demo", {"main": Branch(None, History((turn,)))}))
print("done")
"""


def test_a_kill_at_any_moment_loses_no_turn(tmp_path: Path) -> None:
    """The old text is in the session or in a state of it, at every step of the writing."""
    script, moment, done = tmp_path / "killed.py", 0, ""
    script.write_text(KILLED)
    while not done:
        moment += 3
        store = SessionStore(tmp_path / str(moment))
        store.save("trip", Session("demo", {"main": branch("old")}))
        for number in range(MOST_STATES):
            store.save_state("trip", Session("demo", {"main": branch(str(number))}))
        command = [sys.executable, str(script), str(store.folder), str(moment)]
        done = subprocess.run(command, capture_output=True, text=True).stdout
        found = [store.load("trip"), *store.load_states("trip")]
        assert len(found) >= 1 + MOST_STATES - 1
        assert "old" in [session.history.turns[0].user for session in found]
    assert moment > 3


def test_a_chat_without_a_name_is_kept_and_goes_on(typed: Any) -> None:
    """Its text, for the owner only, with what commands took away."""
    one = typed()
    one.type("/stats")
    assert one.store.names() == []
    assert list(one.store.folder.iterdir()) == []
    one.type("My name is Ana.", "/clear", "I have a dog.")
    (name,) = one.store.names()
    assert is_unnamed(name)
    folder = one.store.folder / name
    assert sorted(path.name for path in folder.iterdir()) == ["conversation.json", "state-1.json"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    two = typed()
    two.type("What is it called?", "/redo", goes_on=True)
    assert two.users == ["My name is Ana."]
    assert two.store.names() == [name]
    assert two.store.load(name).history.turns[0].user == "My name is Ana."


def test_a_chat_that_ends_cleared_keeps_its_text(typed: Any) -> None:
    """/clear and leaving is no wish to forget."""
    typed().type("My name is Ana.", "/clear")
    two = typed()
    two.type(goes_on=True)
    assert two.users == ["My name is Ana."]


def test_loading_a_session_begins_another_chat(typed: Any) -> None:
    """The turns that were kept before stay as they are."""
    one = typed()
    one.type("Hello!", session="trip")
    two = typed()
    two.type("My name is Ana.", "/load -f trip", "How are you?")
    saved = [[turn.user for turn in two.store.load(name).history.turns] for name in
             unnamed_chats(two.store)]  # fmt: skip  # one list
    assert sorted(saved) == [["Hello!", "How are you?"], ["My name is Ana."]]
    assert [turn.user for turn in two.store.load("trip").history.turns] == ["Hello!"]


def test_loading_keeps_an_unnamed_chat_and_says_where(
    typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its present state is kept, so that nothing is given up."""
    typed().type("Hello!", session="trip")
    two = typed()
    two.type("My name is Ana.", "/undo", "I have a dog.", "/load trip")
    (kept,) = unnamed_chats(two.store)
    assert f"the chat so far is kept as {kept}: /load {kept} goes back to it" in (
        capsys.readouterr().err
    )
    assert two.users == ["Hello!"]
    three = typed()
    three.type(f"/load {kept}")
    assert three.users == ["I have a dog."]


def test_the_last_twenty_chats_are_kept(tmp_path: Path) -> None:
    """The oldest go, but none that is open, and no session that has a name."""
    store, names = SessionStore(tmp_path), []
    store.save("unnamed-trip", Session("demo"))
    for number in range(MOST_CHATS + 3):
        names.append(new_name())
        store.save(names[-1], Session("demo"))
        os.utime(tmp_path / names[-1] / "conversation.json", (number, number))
    assert unnamed_chats(store) == names[::-1]
    other = SessionStore(tmp_path)
    with other.lock(names[1]):
        drop_oldest(store)
    assert unnamed_chats(store) == [*names[:2:-1], names[1]]
    assert "unnamed-trip" in store.names()


def test_two_chats_go_on_with_two_conversations(tmp_path: Path) -> None:
    """The second takes the one before the last; a third has none."""
    store = SessionStore(tmp_path)
    names = [new_name(), new_name()]
    for number, name in enumerate(names):
        store.save(name, Session("demo"))
        os.utime(tmp_path / name / "conversation.json", (number, number))
    first, second = Saving(store), Saving(SessionStore(tmp_path))
    with first.opened(None, goes_on=True), second.opened(None, goes_on=True):
        assert [first.kept_as, second.kept_as] == names[::-1]
        third = Saving(SessionStore(tmp_path))
        with (
            pytest.raises(
                SessionError, match=f"{names[1]} is open in another chat, and so is {names[0]}; "
            ),
            third.opened(None, goes_on=True),
        ):
            raise AssertionError("it was opened")


def test_the_names_of_unnamed_chats_are_not_for_sessions(typed: Any, tmp_path: Path) -> None:
    """The program would remove it one day."""
    name = new_name()
    with pytest.raises(SessionError, match="use another name"):
        must_be_free(SessionStore(tmp_path), name)
    one = typed()
    one.type("Hello!", f"/save {name}")
    assert name not in one.store.names()


def test_a_full_disk_ends_the_keeping_and_not_the_chat(
    typed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said once."""

    def fail(*arguments: Any) -> None:
        raise SessionError("the disk is full")

    monkeypatch.setattr(SessionStore, "save", fail)
    one = typed()
    one.type("My name is Ana.", "Hello!")
    assert one.users == ["My name is Ana.", "Hello!"]
    assert capsys.readouterr().err.count("this chat is not kept from now on: the disk is full") == 1


def chat(typed: str, *arguments: str, data: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MLXRUNNER_DATA": str(data)}
    return subprocess.run(
        [*PIPE, *arguments], input=typed, capture_output=True, text=True, env=environment
    )


def test_chats_in_a_terminal_are_kept_and_those_in_a_pipe_are_not(
    open_screen: Any, tmp_path: Path
) -> None:
    """--continue shows the last turn and the model; --no-save keeps nothing."""
    data = tmp_path / "data"
    assert chat("Hello!\n", data=data).returncode == 0
    secret = open_screen(*CHAT, "--no-save")
    secret.say("My name is Bo.")
    assert secret.leave() == 0
    assert list(data.glob("sessions/*")) == []
    screen = open_screen(*CHAT, size=(80, 24))
    screen.say("My name is Ana.")
    screen.say("/clear")
    screen.say("My name is \u202eAna.")
    screen.kill()  # with SIGKILL
    again = open_screen(*CHAT, "--continue", size=(80, 24))
    again.prompt()
    name = next(data.glob("sessions/unnamed-*")).name
    shown = again.lines
    at = next(i for i, line in enumerate(shown) if line.startswith(f"session {name}: 1 turn"))
    assert "model demo, context of 2048 tokens" in shown[at:]
    assert r">>> My name is \u202eAna." in shown[at:]
    assert "\u202e" not in again.raw
    assert again.say("/redo").startswith("brought back, 1 turn: ")
    assert again.leave() == 0
    assert chat("What is my name?\n", "--continue", data=data).stdout == "Your name is Ana.\n"


@pytest.mark.exhaustive(0)
def test_another_model_of_a_session_is_asked_for(open_screen: Any, tmp_path: Path) -> None:
    """In a terminal by a question, which no earlier key answers; elsewhere by an option."""
    write_model(tmp_path / "model")
    data, other = tmp_path / "data", ("--session", "trip", "-m", str(tmp_path / "model"))
    chat("My name is Ana.\n", "--session", "trip", data=data)
    refused = chat("Hello!\n", *other, data=data)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--switch-model goes on with " in refused.stderr
    switched = chat("/show\n", *other, "--switch-model", data=data)
    assert switched.returncode == 0
    assert f"model     {tmp_path}/model" in switched.stderr
    screen = open_screen(*CHAT, *other)
    screen.child.send("yes\r")
    screen.until("[y/N]")
    assert screen.child.isalive()
    screen.child.send("n\r")
    assert screen.end() == 2
    assert "nothing has changed: without -m, session trip goes on with" in " ".join(
        screen.raw.split()
    )
    screen = open_screen(*CHAT, *other, "--max-tokens", "4")
    screen.child.send("What is my name?\r")
    screen.until("[y/N]")
    screen.child.send("y\r")
    screen.until(">>> What is my name?").prompt()
    assert "model     demo" not in screen.say("/show")
    assert screen.leave() == 0


@pytest.mark.exhaustive(0)
def test_two_kinds_of_going_on_are_refused(tmp_path: Path) -> None:
    """--continue and --session name two conversations."""
    done = chat("", "--continue", "--session", "trip", data=tmp_path)
    assert done.returncode == 2
    assert "use one of them" in done.stderr
    none = chat("", "--continue", data=tmp_path)
    assert none.returncode == 2
    assert "there is no unnamed chat to go on with" in none.stderr


@pytest.mark.exhaustive(0)
def test_sessions_lists_unnamed_chats_last_and_shows_states(typed: Any, tmp_path: Path) -> None:
    """`show` and `export` take a state; `rm` removes an unnamed chat."""
    one = typed()
    one.type("My name is Ana.", "/clear", "Hello!")
    typed().type("Hello!", session="zoo")
    (name,) = unnamed_chats(one.store)
    environment = {**os.environ, "MLXRUNNER_DATA": str(tmp_path)}

    def sessions(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mlxrunner", "sessions", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    listed = json.loads(sessions("list", "--json").stdout)
    assert [session["name"] for session in listed] == ["zoo", name]
    assert "states    1 before commands" in sessions("show", name).stdout
    assert "user: My name is Ana." in sessions("show", name, "--state", "1").stdout
    assert "My name is Ana." in sessions("export", name, "-", "--state", "1").stdout
    missing = sessions("show", name, "--state", "2")
    assert f"the session '{name}' has no state 2: it has 1" in missing.stderr
    assert sessions("rm", name).returncode == 0
    until(lambda: unnamed_chats(one.store) == [])
