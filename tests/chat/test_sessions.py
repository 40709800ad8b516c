"""A conversation survives leaving: /save, /load and --session, through pipes and on a screen."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pexpect
import pytest
from click.testing import CliRunner, Result
from support.models import write_model
from support.waiting import PATIENCE_S, until

from mlxrunner import cli
from mlxrunner.sessions.store import CACHE, TEXT, SessionStore

Chat = Callable[..., Result]
HIT = "last turn  hit (restored: session zor): 58 prompt tokens, 38 matched"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's data folder."""
    monkeypatch.setenv("MLXRUNNER_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("MLXRUNNER_MODEL", raising=False)
    return tmp_path / "data"


@pytest.fixture
def chat(data: Path) -> Chat:
    """A chat that is given these lines, with these options."""

    def run(lines: list[str], *options: str) -> Result:
        result = CliRunner().invoke(
            cli.main, ["chat", "--no-reserve", *options], input="\n".join([*lines, ""])
        )
        assert "Traceback" not in result.stderr
        return result

    return run


def content(data: Path, name: str) -> Any:
    return json.loads((data / "sessions" / name / TEXT).read_text())


def test_a_name_is_recalled_across_save_exit_and_session(chat: Chat, data: Path) -> None:
    """The second chat evaluates only its own tokens."""
    saved = chat(["My name is Zorblin.", "/save zor"])
    assert saved.stdout == "Nice to meet you, Zorblin.\n"
    assert saved.stderr == "saved as zor: 1 turn, 38 tokens\n"
    again = chat(["What is my name?", "/stats"], "--session", "zor")
    assert again.stdout == "Your name is Zorblin.\n"
    assert again.stderr.startswith("session zor: 1 turn, 38 tokens restored (350 kB)\n")
    assert HIT in again.stderr
    third = chat(["What is my name?"], "--session", "zor")
    assert third.stdout == "Your name is Zorblin.\n"
    assert third.stderr.startswith("session zor: 2 turns, 69 tokens restored")
    assert [
        turn["user"] for turn in content(data, "zor")["branches"]["main"]["history"]["turns"]
    ] == [
        "My name is Zorblin.",
        "What is my name?",
        "What is my name?",
    ]


def test_a_name_is_recalled_on_a_screen(open_screen: Any) -> None:
    """/save in one terminal, /load and --session in others."""
    arguments = ("-m", "mlxrunner", "chat", "--no-reserve")
    first = open_screen(*arguments)
    first.prompt()
    first.say("My name is Zorblin.")
    assert first.say("/save zor") == "saved as zor: 1 turn, 38 tokens"
    assert first.leave() == 0
    second = open_screen(*arguments)
    second.prompt()
    assert second.say("/load zor").startswith("session zor: 1 turn, 38 tokens restored (350 kB)")
    assert second.say("What is my name?") == "Your name is Zorblin."
    assert second.leave() == 0
    third = open_screen(*arguments, "--session", "zor")
    third.prompt()
    assert "session zor: 1 turn, 38 tokens restored (350 kB)" in third.shown
    assert third.say("What is my name?") == "Your name is Zorblin."
    third.child.kill(signal.SIGKILL)
    fourth = open_screen(*arguments, "--session", "zor")
    fourth.prompt()
    assert "session zor: 2 turns," in fourth.shown
    assert "What is my name?" in fourth.say("/show")


def test_a_session_that_is_open_is_refused_at_once(
    open_screen: Any, tmp_path: Path, chat: Chat
) -> None:
    """The second chat says so in one line, before it loads the model; /save and rm do, too."""
    first = open_screen("-m", "mlxrunner", "chat", "--no-reserve", "--session", "zor")
    first.prompt()
    assert "session zor: a new one" in first.shown
    first.say("My name is Zorblin.")
    second = chat(["Hello!"], "--session", "zor", "-m", "nowhere")
    assert (second.stdout, second.exit_code) == ("", 2)
    assert (
        second.stderr
        == "mlxrunner: the session 'zor' is open in another chat: close that, or use another name\n"
    )
    assert "the session 'zor' is open in another chat" in chat(["Hello!", "/save -f zor"]).stderr
    removed = CliRunner().invoke(cli.main, ["sessions", "rm", "zor"])
    assert (removed.exit_code, removed.stderr.count("\n")) == (2, 1)
    assert first.leave() == 0
    assert chat(["What is my name?"], "--session", "zor").stdout == "Your name is Zorblin.\n"


def test_settings_come_back_unless_others_are_given(chat: Chat, data: Path) -> None:
    """Sampling, system prompt, history policy, thinking, --kv-bits and the model."""
    chat(
        ["My name is Zorblin.", "/set temperature 0.5"],
        "--session",
        "zor",
        "--system",
        "Be brief.",
        "--seed",
        "3",
        "--kv-bits",
        "8",
    )
    saved = content(data, "zor")
    assert saved["model"] == "demo"
    assert saved["settings"]["options"] == {"temperature": 0.5, "seed": 3}
    again = chat(["/show", "/set seed", "/set temperature"], "--session", "zor", "--seed", "4")
    assert (
        "system prompt: Be brief." in again.stderr.replace("\n", " ") or "Be brief." in again.stderr
    )
    assert "seed = 4" in again.stderr
    assert "temperature = 0.5" in again.stderr
    assert "tokens restored" in again.stderr  # with --kv-bits 8 as before
    assert content(data, "zor")["settings"]["kv_bits"] == 8


def test_context_and_shown_thinking_come_back(chat: Chat, data: Path) -> None:
    """Context and shown thinking come back with --session and /load, unless another is given."""
    chat(["/set context 512", "My name is Zorblin.", "/think hide"], "--session", "zor")
    asked = ["/set context", "/think"]
    hidden = "thinking is hidden; it is as the template has it"
    again = chat(asked, "--session", "zor").stderr.splitlines()
    assert again == ["session zor: 1 turn, 38 tokens restored (350 kB)", "context = 512", hidden]
    given = chat(asked, "--session", "zor", "--context", "600").stderr.splitlines()
    assert given[1:] == ["context = 600", hidden]
    loaded = chat(["/load zor", *asked, "What is my name?", "/stats", "/load zor"])
    assert loaded.stderr.splitlines()[:5] == [
        "loaded again with a context of 512 tokens",
        again[0],
        "context = 512",
        hidden,
        HIT,
    ]
    assert loaded.stdout == "Your name is Zorblin.\n"


def test_a_context_that_can_not_be_is_left_out_by_a_load(chat: Chat, data: Path) -> None:
    """The load says so, and the conversation is loaded."""
    chat(["My name is Zorblin."], "--session", "zor")
    saved = content(data, "zor")
    saved["settings"]["context"] = 2**31 - 1
    (data / "sessions" / "zor" / TEXT).write_text(json.dumps(saved))
    loaded = chat(["/load zor", "What is my name?"], "--reserve")
    assert loaded.stderr.startswith("its context of 2147483647 tokens is left out: ")
    assert "session zor: 1 turn" in loaded.stderr
    assert loaded.stdout == "Your name is Zorblin.\n"


@pytest.mark.parametrize(
    "lines",
    [["What is my name?"], ["/undo", "My name is Ana.", "What is my name?"]],
    ids=["goes on", "undo"],
)
@pytest.mark.parametrize(
    "tokens",
    [[999_999] * 38, [5] * 38, [5] * 3000, []],
    ids=["none of the model's", "others", "too many", "none"],
)
def test_tokens_that_do_not_spell_the_text_are_dropped(
    chat: Chat, data: Path, tokens: list[int], lines: list[str]
) -> None:
    """The load says so, and the answer is that to the text."""
    chat(["My name is Zorblin."], "--session", "zor")
    saved = content(data, "zor")
    history = saved["branches"]["main"]["history"]
    history["spelling"]["tokens"] = tokens
    history["turns"][0]["begins"] = history["turns"][0]["ends"] = None
    (data / "sessions" / "zor" / TEXT).write_text(json.dumps(saved))
    again = chat(lines, "--session", "zor")
    first = again.stderr.splitlines()[0]
    assert (
        first == "session zor: 1 turn, 38 tokens restored (350 kB); "
        "it is tokenized anew: its tokens do not spell its text"
    )
    assert again.stdout.splitlines()[-1] == f"Your name is {'Ana' if lines[1:] else 'Zorblin'}."
    assert "tokenized anew" not in chat([], "--session", "zor").stderr


def test_a_system_prompt_that_is_given_is_the_one_that_is_evaluated(chat: Chat) -> None:
    """Not the one that the saved tokens begin with."""
    chat(["Hello!"], "--session", "zor", "--system", "The user's name is Zorblin.")
    again = chat(
        ["/system", "What is my name?"], "--session", "zor", "--system", "The user's name is Ana."
    )
    assert "system prompt: The user's name is Ana.\n" in again.stderr
    assert again.stdout == "Your name is Ana.\n"


def test_settings_that_can_not_be_are_left_out(chat: Chat, data: Path) -> None:
    """The file may say anything; the rest of it is used."""
    chat(["My name is Zorblin."], "--session", "zor")
    saved = content(data, "zor")
    saved["settings"] = {
        "options": {
            "temperature": "hot",
            "seed": 3,
            "os.system": "x",
            "stop": [[]],
            "top_k": 10**30,
            "logits_processors": [1],
            "schema": '{"type": "object"}',
            "choices": ["a", "b"],
            "stop_tokens": [3],
            "logprobs": 5,
        },
        "history": "../..",
        "keep_thinking": 7,
        "variables": {"tools": "x"},
        "kv_bits": 3,
        "context": 10**30,
        "hide_thinking": "x",
    }
    (data / "sessions" / "zor" / TEXT).write_text(json.dumps(saved))
    again = chat(["What is my name?", "/set seed"], "--session", "zor")
    assert again.stdout == "Your name is Zorblin.\n"
    assert "seed = 3" in again.stderr


def test_a_model_that_is_gone_is_one_line(chat: Chat, data: Path) -> None:
    """Another one can be given: the text is kept."""
    chat(["My name is Zorblin."], "--session", "zor")
    saved = content(data, "zor")
    saved["model"] = "/nowhere/at/all"
    (data / "sessions" / "zor" / TEXT).write_text(json.dumps(saved))
    gone = chat(["Hello!"], "--session", "zor")
    assert (gone.stdout, gone.exit_code, gone.stderr.count("\n")) == ("", 2, 1)
    assert (
        chat(["What is my name?"], "--session", "zor", "-m", "demo", "--switch-model").stdout
        == "Your name is Zorblin.\n"
    )


def test_branches_come_back(chat: Chat) -> None:
    """With their texts; the one that was talked on is talked on."""
    chat(
        ["My name is Zorblin.", "/branch other", "/undo", "My name is Ana.", "/switch main"],
        "--session",
        "zor",
    )
    again = chat(["What is my name?", "/switch other", "What is my name?"], "--session", "zor")
    assert again.stdout == "Your name is Zorblin.\nYour name is Ana.\n"


def test_what_was_taken_back_is_saved_when_one_leaves(chat: Chat, data: Path) -> None:
    """Leaving saves what was taken back, and the file has nothing of a branch that was dropped."""
    chat(
        ["My name is Ana.", "My name is Zorblin.", "/undo", "/branch -d main~1"], "--session", "zor"
    )
    assert "Zorblin" not in (data / "sessions" / "zor" / TEXT).read_text()
    again = chat(["What is my name?"], "--session", "zor")
    assert again.stderr.startswith("session zor: 1 turn, ")
    assert again.stdout == "Your name is Ana.\n"


WIPES = {
    "undo": ["/undo 99"],
    "clear": ["/clear"],
    "system": ["/system Be brief.", "/undo 2"],
    "undo twice": ["/undo", "/undo"],
    "clear and go on": ["/clear", "My name is Quib."],
    "undo and go on": ["/undo", "My name is Quib."],
    "undo on a branch": ["/branch other", "/undo 99", "/switch main", "/undo 99"],
    "two ways on": ["/undo", "My name is Quib.", "/undo 99", "I have a dog."],
}


@pytest.mark.parametrize("wipes", WIPES.values(), ids=WIPES)
def test_no_command_wipes_what_was_saved(chat: Chat, data: Path, wipes: list[str]) -> None:
    """The saved text is kept as a branch. A message names it, and other commands read it."""
    chat(["My name is Ana.", "I have a parrot."], "--session", "zor")
    before = [
        (turn["user"], turn["answer"])
        for turn in content(data, "zor")["branches"]["main"]["history"]["turns"]
    ]
    wiped = chat([*wipes, "/bye"], "--session", "zor")
    line = "what was saved is kept as branch main~1 (2 turns): /switch main~1 goes back to it"
    assert wiped.stderr.count(line) == 1
    kept = content(data, "zor")["branches"]["main~1"]["history"]["turns"]
    assert [(turn["user"], turn["answer"]) for turn in kept] == before
    run = CliRunner().invoke
    assert "main~1" in run(cli.main, ["sessions", "list"]).stdout
    assert (
        "user: I have a parrot."
        in run(cli.main, ["sessions", "show", "zor", "--branch", "main~1"]).stdout
    )
    assert (
        "I have a parrot."
        in run(cli.main, ["sessions", "export", "zor", "-", "--branch", "main~1"]).stdout
    )
    wrong = run(cli.main, ["sessions", "show", "zor", "--branch", "x"])
    assert wrong.stderr.startswith("mlxrunner: the session 'zor' has no branch 'x': there are main")
    back = chat(["/switch main~1", "What is my name?"], "--session", "zor")
    assert "on branch main~1, 2 turns" in back.stderr
    assert back.stdout == "Your name is Ana.\n"


def test_a_session_whose_branch_is_empty_says_where_its_turns_are(chat: Chat) -> None:
    chat(["My name is Ana.", "/undo 99", "/bye"], "--session", "zor")
    line = "; branch main~1 has 1 turn: /switch main~1 goes to it\n"
    assert line in chat(["/bye"], "--session", "zor").stderr
    chat(["/switch main~1", "/bye"], "--session", "zor")
    assert line not in chat(["/bye"], "--session", "zor").stderr


def test_an_answer_that_is_changed_or_tried_again_is_kept(chat: Chat, data: Path) -> None:
    """Where another one takes its place; not where the same one comes again."""
    chat(["My name is Ana."], "--session", "zor")
    same = chat(["/retry temperature=0"], "--session", "zor")
    assert "kept as" not in same.stderr
    other = chat(
        ["/retry temperature=3 seed=5 max_tokens=8", "/retry temperature=3 seed=6 max_tokens=8"],
        "--session",
        "zor",
    )
    assert other.stderr.count("what was saved is kept as branch main~") == 2
    answers = {
        branch["history"]["turns"][0]["answer"]
        for branch in content(data, "zor")["branches"].values()
    }
    assert len(answers) == 3
    assert "Nice to meet you." in answers


def test_an_explicit_flag_overwrites(chat: Chat, data: Path) -> None:
    """/save -f drops what was there, unless the chat itself has saved under that name."""
    result = chat(["My name is Ana.", "/save zor", "/clear", "My name is Quib.", "/save zor"])
    assert result.stderr.count("kept as branch main~1 (1 turn)") == 1
    assert list(content(data, "zor")["branches"]) == ["main~1", "main"]
    chat(["My name is Bo.", "/save -f zor"])
    assert list(content(data, "zor")["branches"]) == ["main"]
    assert "Ana" not in (data / "sessions" / "zor" / TEXT).read_text()


def test_the_branch_that_is_talked_on_can_not_be_dropped(chat: Chat) -> None:
    """A branch that is not there can not be dropped either."""
    result = chat(["/branch -d main", "/branch -d other", "/branch other", "/branch -d main"])
    assert result.stderr.splitlines()[:2] == [
        "error: branch main is the present one: /switch to another one first",
        "error: there is no branch 'other': there are main",
    ]
    assert result.stderr.splitlines()[3] == "branch main is dropped, with 0 turns"


def test_a_session_without_a_turn_leaves_nothing(chat: Chat, data: Path) -> None:
    """A session whose model could not be loaded leaves nothing either."""
    chat([], "--session", "zor")
    chat(["Hello!"], "--session", "zor", "-m", "nowhere")
    assert os.listdir(data / "sessions") == []


def test_nothing_is_lost_without_being_said(chat: Chat, data: Path) -> None:
    """Another session is not overwritten, and unsaved turns are not given up, but with -f."""
    chat(["My name is Ana."], "--session", "ana")
    lines = [
        "My name is Zorblin.",
        "/save ana",
        "/load ana",
        "/save zor",
        "/save zor",
        "/load ana",
        "What is my name?",
        "/load -f zor",
    ]
    result = chat([*lines, "What is my name?"])
    said = result.stderr.splitlines()
    assert said[0] == "error: there is a session ana already: /save -f ana overwrites it"
    assert (
        said[1] == "error: what was said is not saved (1 turn): "
        "/save NAME saves it, /load -f ana gives it up"
    )
    assert said[2].startswith("saved as zor: 1 turn")
    assert said[3].startswith("saved as zor: 1 turn")
    assert said[4].startswith("session ana: 1 turn")
    assert said[5].startswith("session zor: 1 turn")
    assert result.stdout.splitlines()[1:] == ["Your name is Ana.", "Your name is Zorblin."]
    assert len(content(data, "ana")["branches"]["main"]["history"]["turns"]) == 1


def test_loading_within_a_session_goes_over_to_the_other_one(chat: Chat, data: Path) -> None:
    """Later turns are saved there, and the first session stays as it was."""
    chat(["My name is Ana."], "--session", "ana")
    chat(["My name is Zorblin.", "/load ana", "I have a dog."], "--session", "zor")
    users = {
        name: [turn["user"] for turn in content(data, name)["branches"]["main"]["history"]["turns"]]
        for name in ("ana", "zor")
    }
    assert users == {"ana": ["My name is Ana.", "I have a dog."], "zor": ["My name is Zorblin."]}


@pytest.mark.parametrize(
    "line", ["/save", "/save a b", "/save ../x", "/load", "/load nothing", "/load ../../etc"]
)
def test_names_that_are_none_are_one_line(chat: Chat, data: Path, line: str) -> None:
    """The chat goes on."""
    result = chat([line, "Hello!"])
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout


def test_text_only_and_fewer_bits(chat: Chat, data: Path) -> None:
    """--no-cache-file leaves the text; --session-kv-bits makes the file smaller."""
    chat(["My name is Zorblin."], "--session", "zor")
    whole = (data / "sessions" / "zor" / CACHE).stat().st_size
    chat(["I have a dog."], "--session", "zor", "--session-kv-bits", "8")
    assert (data / "sessions" / "zor" / CACHE).stat().st_size < whole
    chat(["I have a cat."], "--session", "zor", "--no-cache-file")
    assert os.listdir(data / "sessions" / "zor") == [TEXT]
    again = chat(["What is my name?"], "--session", "zor")
    assert again.stderr.startswith(
        "session zor: 3 turns, without caches: the first turn evaluates it anew\n"
    )
    assert again.stdout == "Your name is Zorblin.\n"
    wrong = chat(["Hello!"], "--session", "zor", "--session-kv-bits", "3")
    assert (wrong.exit_code, wrong.stderr) == (
        2,
        "mlxrunner: session_kv_bits: 3 is out of range, it has to be 4 or 8\n",
    )


def test_a_damaged_cache_file_costs_a_cold_turn(chat: Chat, data: Path) -> None:
    """One line says so; the conversation goes on, and is whole again afterwards."""
    chat(["My name is Zorblin."], "--session", "zor")
    file = data / "sessions" / "zor" / CACHE
    file.write_bytes(file.read_bytes()[:-100])
    again = chat(["What is my name?"], "--session", "zor")
    assert again.stdout == "Your name is Zorblin.\n"
    assert again.stderr.startswith(
        "session zor: 1 turn, its text is kept, its caches are dropped: the cache is truncated"
    )
    assert again.stderr.count("\n") == 1
    assert "69 tokens restored" in chat([], "--session", "zor").stderr


def test_another_model_within_a_session(chat: Chat, data: Path) -> None:
    """/set context loads the model again: what was evaluated is saved as before."""
    result = chat(
        ["My name is Zorblin.", "/set context 500", "What is my name?"], "--session", "zor"
    )
    assert result.stdout.endswith("Your name is Zorblin.\n")
    assert "69 tokens restored" in chat([], "--session", "zor").stderr


def test_a_full_disk_is_said_and_the_chat_goes_on(
    chat: Chat, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is one line after each turn and an exit code; the text can be exported."""

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mlxrunner.sessions.store.write_all", full)
    result = chat(["My name is Zorblin.", "What is my name?"], "--session", "zor")
    assert result.stdout == "Nice to meet you, Zorblin.\nYour name is Zorblin.\n"
    full = "error: the session 'zor' could not be saved: No space left on device; "
    assert f"{full}on the disk: none of 1 turn\n" in result.stderr
    assert f"{full}on the disk: none of 2 turns\n" in result.stderr
    assert result.exit_code == 2
    assert SessionStore().names() == []


class Disk:
    """A disk of `size` bytes, as far as sessions write to it."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size = folder, size

    def write_all(self, fd: int, data: bytes | memoryview) -> None:
        used = sum(file.stat().st_size for file in self._folder.rglob("*") if file.is_file())
        os.write(fd, data[: max(self._size - used, 0)])
        if used + len(data) > self._size:
            raise OSError(28, "No space left on device")


@pytest.fixture
def disk(data: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`disk(SIZE)` makes a disk of SIZE bytes, from now on."""

    def limit(size: int) -> None:
        for module in ("sessions.store", "stored.tensors"):
            monkeypatch.setattr(f"mlxrunner.{module}.write_all", Disk(data, size).write_all)

    return limit


SAFE = re.compile(
    r"(?:error|mlxrunner): the (caches of the )?session 'zor' could not be saved: "
    r"No space left on device; on the disk: (.*)"
)


@pytest.mark.parametrize("size", [500, 1500, 3000, 9000, 300_000, 500_000, 700_000])
def test_a_full_disk_says_which_turns_are_safe(
    chat: Chat, data: Path, disk: Callable[[int], None], size: int
) -> None:
    """They are safe: the text goes before the caches, of which there need not be any."""
    disk(size)
    result = chat([f"My name is Zorblin {number}." for number in range(7)], "--session", "zor")
    said = [found for line in result.stderr.splitlines() if (found := SAFE.match(line))]
    kept = (
        content(data, "zor")["branches"]["main"]["history"]["turns"]
        if "zor" in SessionStore().names()
        else []
    )
    assert said
    which = {0: "none of 7 turns", 7: "all of 7 turns"}.get(
        len(kept), f"the first {len(kept)} of 7 turns"
    )
    assert said[-1][2] == which
    assert (len(kept) == 7) == (size >= 9000)
    assert "its text was" not in result.stderr
    assert not kept or len(SessionStore().load("zor").history.turns) == len(kept)


def test_caches_give_way_to_the_text(chat: Chat, data: Path, disk: Callable[[int], None]) -> None:
    """Those that lie on a disk which is full by now."""
    chat(["My name is Zorblin."], "--session", "zor")
    disk(sum(file.stat().st_size for file in (data / "sessions" / "zor").iterdir()) + 100)
    result = chat(["What is my name?"], "--session", "zor")
    assert result.stdout == "Your name is Zorblin.\n"
    assert (
        "the caches of the session 'zor' could not be saved: No space left on device; on the disk: "
        "all of 2 turns" in result.stderr
    )
    assert len(content(data, "zor")["branches"]["main"]["history"]["turns"]) == 2


@pytest.mark.exhaustive(2)
@pytest.mark.parametrize("end", ["SIGHUP", "SIGTERM", "closed"])
def test_a_window_that_is_closed_in_mid_answer_costs_nothing(
    open_screen: Any, tmp_path: Path, data: Path, end: str
) -> None:
    """The question and the shown part of the answer are saved; a second signal does no harm."""
    write_model(tmp_path / "model", vocab_size=300)
    chat = ("-m", "mlxrunner", "chat", "--no-reserve", "--plain", "--session", "hup")
    screen = open_screen(*chat, "-m", str(tmp_path / "model"), "--max-tokens", "4000")
    screen.prompt()
    screen.child.send("An important question.\r")
    screen.until(lambda: len(screen.everything) > 4)
    close(screen, end)
    (turn,) = content(data, "hup")["branches"]["main"]["history"]["turns"]
    assert turn["user"] == "An important question."
    assert len(turn["answer"]) > 50


@pytest.mark.exhaustive(2)
@pytest.mark.parametrize("end", ["SIGHUP", "SIGTERM", "closed"])
def test_a_window_that_is_closed_at_the_prompt_costs_nothing(
    open_screen: Any, data: Path, end: str
) -> None:
    """Changes since the last turn are saved."""
    screen = open_screen("-m", "mlxrunner", "chat", "--no-reserve", "--session", "hup")
    screen.prompt()
    screen.say("My name is Ana.")
    screen.child.send("/edit 2\r")
    screen.until(">>> Nice to meet you.")
    screen.child.send(" A LONG EDIT.\r")
    screen.until("is changed").prompt()
    close(screen, end)
    (turn,) = content(data, "hup")["branches"]["main"]["history"]["turns"]
    assert turn["answer"] == "Nice to meet you. A LONG EDIT."


@pytest.mark.exhaustive(0)
def test_a_chat_in_a_pipe_that_is_killed_costs_nothing(data: Path) -> None:
    """By `kill`; nohup protects it from a window that is closed."""
    nohup = partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    arguments = [sys.executable, "-m", "mlxrunner", "chat", "--no-reserve", "--session", "hup"]
    with subprocess.Popen(
        arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=nohup,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdin.write("My name is Ana.\n/undo\n")
        child.stdin.flush()
        while not child.stderr.readline().startswith("1 turn taken back"):
            pass
        child.send_signal(signal.SIGHUP)
        child.stdin.write("My name is Zorblin.\n/undo\n")
        child.stdin.flush()
        while not child.stderr.readline().startswith("1 turn taken back"):
            pass
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert content(data, "hup")["branches"]["main"]["history"]["turns"] == []


def close(screen: Any, end: str) -> None:
    """Close the window, or send a signal and a second one; until the program has ended."""
    if end == "closed":
        screen.child.ptyproc.fileobj.close()
        screen.child.ptyproc.closed = True
    else:
        os.kill(screen.child.pid, getattr(signal, end))
        os.kill(screen.child.pid, signal.SIGTERM)
        screen.child.expect(pexpect.EOF)
    until(lambda: not screen.child.isalive())
