"""A conversation survives leaving: /save, /load and --session, through pipes and on a screen."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.chats import HIT, Talk, content
from support.checks import refused
from support.command import run as command

from mlxrunner.sessions.store import TEXT, SessionStore

ZORBLIN, WHO = "My name is Zorblin.", "What is my name?"
IS_ZORBLIN = "Your name is Zorblin.\n"


@pytest.fixture
def zor(talk: Talk) -> Talk:
    """The chat of a session, with options that are split at spaces, and more that are not."""

    def run(lines: list[str], words: str = "", *more: str) -> Result:
        return talk(lines, "--session", "zor", *words.split(), *more)

    return run


@contextmanager
def stored(data: Path) -> Iterator[Any]:
    """Let the block change what the session says on the disk."""
    found = content(data, "zor")
    yield found
    (data / "sessions" / "zor" / TEXT).write_text(json.dumps(found))


def test_a_name_is_recalled_across_save_exit_and_session(talk: Talk, zor: Talk, data: Path) -> None:
    """The second chat evaluates only its own tokens."""
    saved = talk([ZORBLIN, "/save zor"])
    assert saved.stdout == "Nice to meet you.\n"
    assert saved.stderr == "saved as zor: 1 turn, 31 tokens\n"
    again = zor([WHO, "/stats"])
    assert again.stdout == IS_ZORBLIN
    assert again.stderr.startswith("session zor: 1 turn, 31 tokens restored (286 kB)\n")
    assert HIT in again.stderr
    third = zor([WHO])
    assert third.stdout == IS_ZORBLIN
    assert third.stderr.startswith("session zor: 2 turns, 62 tokens restored")
    turns = content(data, "zor")["branches"]["main"]["history"]["turns"]
    assert [turn["user"] for turn in turns] == [ZORBLIN, WHO, WHO]


def test_a_session_that_is_open_is_refused_at_once(open_screen: Any, talk: Talk, zor: Talk) -> None:
    """The second chat says so in one line, before it loads the model; /save and rm do, too."""
    first = open_screen("-m", "mlxrunner", "chat", "--no-reserve", "--session", "zor")
    first.prompt()
    assert "session zor: new" in first.shown
    first.say(ZORBLIN)
    said = "the session 'zor' is open in another chat"
    refused(zor(["Hello!"], "-m nowhere"), f"mlxrunner: {said}: close that, or use another name\n")
    assert said in talk(["Hello!", "/save -f zor"]).stderr
    refused(command("sessions", "rm", "zor"), said)
    assert first.leave() == 0
    assert zor([WHO]).stdout == IS_ZORBLIN


def test_settings_come_back_unless_others_are_given(zor: Talk, data: Path) -> None:
    """Sampling, system prompt, history policy, thinking, --kv-bits and the model."""
    zor([ZORBLIN, "/set temperature 0.5"], "--seed 3 --kv-bits 8 --system", "Be brief.")
    saved = content(data, "zor")
    assert saved["model"] == "demo"
    assert saved["settings"]["options"] == {"temperature": 0.5, "seed": 3}
    again = zor(["/show", "/set seed", "/set temperature"], "--seed 4").stderr
    # With --kv-bits 8 as before, else nothing would be restored.
    for said in ("Be brief.", "seed = 4", "temperature = 0.5", "tokens restored"):
        assert said in again
    assert content(data, "zor")["settings"]["kv_bits"] == 8


def test_context_and_shown_thinking_come_back(talk: Talk, zor: Talk) -> None:
    """Context and shown thinking come back with --session and /load, unless another is given."""
    zor(["/set context 512", ZORBLIN, "/think hide"])
    asked = ["/set context", "/think"]
    hidden = "thinking is hidden; it is the template's default"
    again = zor(asked).stderr.splitlines()
    assert again == ["session zor: 1 turn, 31 tokens restored (286 kB)", "context = 512", hidden]
    given = zor(asked, "--context 600").stderr.splitlines()
    assert given[1:] == ["context = 600", hidden]
    loaded = talk(["/load zor", *asked, WHO, "/stats", "/load zor"])
    lines = ["loaded again with a context of 512 tokens", *again, HIT]
    assert loaded.stderr.splitlines()[:5] == lines
    assert loaded.stdout == IS_ZORBLIN


def test_a_context_that_can_not_be_is_left_out_by_a_load(talk: Talk, zor: Talk, data: Path) -> None:
    """The load says so, and the conversation is loaded."""
    zor([ZORBLIN])
    with stored(data) as saved:
        saved["settings"]["context"] = 2**31 - 1
    loaded = talk(["/load zor", WHO], "--reserve")
    assert loaded.stderr.startswith("its context of 2147483647 tokens is not used: ")
    assert "session zor: 1 turn" in loaded.stderr
    assert loaded.stdout == IS_ZORBLIN


@pytest.mark.parametrize(
    "lines", [[WHO], ["/undo", "My name is Ana.", WHO]], ids=["goes on", "undo"]
)
@pytest.mark.parametrize(
    "tokens",
    [[999_999] * 31, [5] * 31, [5] * 3000, []],
    ids=["none of the model's", "others", "too many", "none"],
)
def test_tokens_that_do_not_spell_the_text_are_dropped(
    zor: Talk, data: Path, tokens: list[int], lines: list[str]
) -> None:
    """The load says so, and the answer is that to the text."""
    zor([ZORBLIN])
    with stored(data) as saved:
        del saved["crc32"]  # as a file of an older version, in which nothing tells of the change
        history = saved["branches"]["main"]["history"]
        history["spelling"]["tokens"] = tokens
        history["turns"][0]["begins"] = history["turns"][0]["ends"] = None
    again = zor(lines)
    assert again.stderr.splitlines()[0] == (
        "session zor: 1 turn, 31 tokens restored (286 kB); it is tokenized again: "
        "its tokens do not match its text"
    )
    assert again.stdout.splitlines()[-1] == f"Your name is {'Ana' if lines[1:] else 'Zorblin'}."
    assert "tokenized anew" not in zor([]).stderr


def test_a_system_prompt_that_is_given_is_the_one_that_is_evaluated(zor: Talk) -> None:
    """Not the one that the saved tokens begin with."""
    zor(["Hello!"], "--system", "The user's name is Zorblin.")
    again = zor(["/system", WHO], "--system", "The user's name is Ana.")
    assert "system prompt: The user's name is Ana.\n" in again.stderr
    assert again.stdout == "Your name is Ana.\n"


def test_settings_that_can_not_be_are_left_out(zor: Talk, data: Path) -> None:
    """The file may say anything; the rest of it is used."""
    zor([ZORBLIN])
    options = {
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
    }
    with stored(data) as saved:
        saved["settings"] = {
            "options": options,
            "history": "../..",
            "keep_thinking": 7,
            "kv_bits": 3,
            "variables": {"tools": "x"},
            "context": 10**30,
            "hide_thinking": "x",
        }
    again = zor([WHO, "/set seed"])
    assert again.stdout == IS_ZORBLIN
    assert "seed = 3" in again.stderr


def test_a_model_that_is_gone_is_one_line(zor: Talk, data: Path) -> None:
    """Another one can be given: the text is kept."""
    zor([ZORBLIN])
    with stored(data) as saved:
        saved["model"] = "/nowhere/at/all"
    refused(zor(["Hello!"]), "/nowhere/at/all")
    assert zor([WHO], "-m demo --switch-model").stdout == IS_ZORBLIN


def test_branches_come_back(zor: Talk) -> None:
    """With their texts; the one that was talked on is talked on."""
    zor([ZORBLIN, "/branch other", "/undo", "My name is Ana.", "/switch main"])
    again = zor([WHO, "/switch other", WHO])
    assert again.stdout == f"{IS_ZORBLIN}Your name is Ana.\n"


def test_what_was_taken_back_is_saved_when_one_leaves(zor: Talk, data: Path) -> None:
    """Leaving saves what was taken back, and the file has nothing of a branch that was dropped."""
    zor(["My name is Ana.", ZORBLIN, "/undo", "/branch -d main~1"])
    assert "Zorblin" not in (data / "sessions" / "zor" / TEXT).read_text()
    again = zor([WHO])
    assert again.stderr.startswith("session zor: 1 turn, ")
    assert again.stdout == "Your name is Ana.\n"


def test_text_only_and_fewer_bits(zor: Talk, data: Path) -> None:
    """no_cache_file leaves the text; session_kv_bits makes the file smaller."""
    store = SessionStore(data / "sessions")
    zor([ZORBLIN])
    whole = store.nbytes("zor")[1]
    zor(["I have a dog."], "--set session_kv_bits=8")
    assert store.nbytes("zor")[1] < whole
    zor(["I have a cat."], "--set no_cache_file=true")
    assert os.listdir(data / "sessions" / "zor") == [TEXT]
    again = zor([WHO])
    assert again.stderr.startswith(
        "session zor: 3 turns, without caches: the first turn evaluates it again\n"
    )
    assert again.stdout == IS_ZORBLIN
    said = "mlxrunner: --set: session_kv_bits: 3 is out of range, it has to be 4 or 8\n"
    refused(zor(["Hello!"], "--set session_kv_bits=3"), said)
