"""A conversation survives leaving: /save, /load and --session, through pipes and on a screen."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.chats import HIT, Talk, content

from mlxrunner import cli
from mlxrunner.sessions.store import TEXT, SessionStore


def test_a_name_is_recalled_across_save_exit_and_session(talk: Talk, data: Path) -> None:
    """The second chat evaluates only its own tokens."""
    saved = talk(["My name is Zorblin.", "/save zor"])
    assert saved.stdout == "Nice to meet you.\n"
    assert saved.stderr == "saved as zor: 1 turn, 31 tokens\n"
    again = talk(["What is my name?", "/stats"], "--session", "zor")
    assert again.stdout == "Your name is Zorblin.\n"
    assert again.stderr.startswith("session zor: 1 turn, 31 tokens restored (286 kB)\n")
    assert HIT in again.stderr
    third = talk(["What is my name?"], "--session", "zor")
    assert third.stdout == "Your name is Zorblin.\n"
    assert third.stderr.startswith("session zor: 2 turns, 62 tokens restored")
    assert [
        turn["user"] for turn in content(data, "zor")["branches"]["main"]["history"]["turns"]
    ] == [
        "My name is Zorblin.",
        "What is my name?",
        "What is my name?",
    ]


def test_a_session_that_is_open_is_refused_at_once(
    open_screen: Any, tmp_path: Path, talk: Talk
) -> None:
    """The second chat says so in one line, before it loads the model; /save and rm do, too."""
    first = open_screen("-m", "mlxrunner", "chat", "--no-reserve", "--session", "zor")
    first.prompt()
    assert "session zor: new" in first.shown
    first.say("My name is Zorblin.")
    second = talk(["Hello!"], "--session", "zor", "-m", "nowhere")
    assert (second.stdout, second.exit_code) == ("", 2)
    assert (
        second.stderr
        == "mlxrunner: the session 'zor' is open in another chat: close that, or use another name\n"
    )
    assert "the session 'zor' is open in another chat" in talk(["Hello!", "/save -f zor"]).stderr
    removed = CliRunner().invoke(cli.main, ["sessions", "rm", "zor"])
    assert (removed.exit_code, removed.stderr.count("\n")) == (2, 1)
    assert first.leave() == 0
    assert talk(["What is my name?"], "--session", "zor").stdout == "Your name is Zorblin.\n"


def test_settings_come_back_unless_others_are_given(talk: Talk, data: Path) -> None:
    """Sampling, system prompt, history policy, thinking, --kv-bits and the model."""
    talk(
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
    again = talk(["/show", "/set seed", "/set temperature"], "--session", "zor", "--seed", "4")
    assert (
        "system prompt: Be brief." in again.stderr.replace("\n", " ") or "Be brief." in again.stderr
    )
    assert "seed = 4" in again.stderr
    assert "temperature = 0.5" in again.stderr
    assert "tokens restored" in again.stderr  # with --kv-bits 8 as before
    assert content(data, "zor")["settings"]["kv_bits"] == 8


def test_context_and_shown_thinking_come_back(talk: Talk, data: Path) -> None:
    """Context and shown thinking come back with --session and /load, unless another is given."""
    talk(["/set context 512", "My name is Zorblin.", "/think hide"], "--session", "zor")
    asked = ["/set context", "/think"]
    hidden = "thinking is hidden; it is the template's default"
    again = talk(asked, "--session", "zor").stderr.splitlines()
    assert again == ["session zor: 1 turn, 31 tokens restored (286 kB)", "context = 512", hidden]
    given = talk(asked, "--session", "zor", "--context", "600").stderr.splitlines()
    assert given[1:] == ["context = 600", hidden]
    loaded = talk(["/load zor", *asked, "What is my name?", "/stats", "/load zor"])
    assert loaded.stderr.splitlines()[:5] == [
        "loaded again with a context of 512 tokens",
        again[0],
        "context = 512",
        hidden,
        HIT,
    ]
    assert loaded.stdout == "Your name is Zorblin.\n"


def test_a_context_that_can_not_be_is_left_out_by_a_load(talk: Talk, data: Path) -> None:
    """The load says so, and the conversation is loaded."""
    talk(["My name is Zorblin."], "--session", "zor")
    saved = content(data, "zor")
    saved["settings"]["context"] = 2**31 - 1
    (data / "sessions" / "zor" / TEXT).write_text(json.dumps(saved))
    loaded = talk(["/load zor", "What is my name?"], "--reserve")
    assert loaded.stderr.startswith("its context of 2147483647 tokens is not used: ")
    assert "session zor: 1 turn" in loaded.stderr
    assert loaded.stdout == "Your name is Zorblin.\n"


@pytest.mark.parametrize(
    "lines",
    [["What is my name?"], ["/undo", "My name is Ana.", "What is my name?"]],
    ids=["goes on", "undo"],
)
@pytest.mark.parametrize(
    "tokens",
    [[999_999] * 31, [5] * 31, [5] * 3000, []],
    ids=["none of the model's", "others", "too many", "none"],
)
def test_tokens_that_do_not_spell_the_text_are_dropped(
    talk: Talk, data: Path, tokens: list[int], lines: list[str]
) -> None:
    """The load says so, and the answer is that to the text."""
    talk(["My name is Zorblin."], "--session", "zor")
    saved = content(data, "zor")
    del saved["crc32"]  # as a file of an older version, in which nothing tells of the change
    history = saved["branches"]["main"]["history"]
    history["spelling"]["tokens"] = tokens
    history["turns"][0]["begins"] = history["turns"][0]["ends"] = None
    (data / "sessions" / "zor" / TEXT).write_text(json.dumps(saved))
    again = talk(lines, "--session", "zor")
    first = again.stderr.splitlines()[0]
    assert (
        first == "session zor: 1 turn, 31 tokens restored (286 kB); it is tokenized again: "
        "its tokens do not match its text"
    )
    assert again.stdout.splitlines()[-1] == f"Your name is {'Ana' if lines[1:] else 'Zorblin'}."
    assert "tokenized anew" not in talk([], "--session", "zor").stderr


def test_a_system_prompt_that_is_given_is_the_one_that_is_evaluated(talk: Talk) -> None:
    """Not the one that the saved tokens begin with."""
    talk(["Hello!"], "--session", "zor", "--system", "The user's name is Zorblin.")
    again = talk(
        ["/system", "What is my name?"], "--session", "zor", "--system", "The user's name is Ana."
    )
    assert "system prompt: The user's name is Ana.\n" in again.stderr
    assert again.stdout == "Your name is Ana.\n"


def test_settings_that_can_not_be_are_left_out(talk: Talk, data: Path) -> None:
    """The file may say anything; the rest of it is used."""
    talk(["My name is Zorblin."], "--session", "zor")
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
    again = talk(["What is my name?", "/set seed"], "--session", "zor")
    assert again.stdout == "Your name is Zorblin.\n"
    assert "seed = 3" in again.stderr


def test_a_model_that_is_gone_is_one_line(talk: Talk, data: Path) -> None:
    """Another one can be given: the text is kept."""
    talk(["My name is Zorblin."], "--session", "zor")
    saved = content(data, "zor")
    saved["model"] = "/nowhere/at/all"
    (data / "sessions" / "zor" / TEXT).write_text(json.dumps(saved))
    gone = talk(["Hello!"], "--session", "zor")
    assert (gone.stdout, gone.exit_code, gone.stderr.count("\n")) == ("", 2, 1)
    assert (
        talk(["What is my name?"], "--session", "zor", "-m", "demo", "--switch-model").stdout
        == "Your name is Zorblin.\n"
    )


def test_branches_come_back(talk: Talk) -> None:
    """With their texts; the one that was talked on is talked on."""
    talk(
        ["My name is Zorblin.", "/branch other", "/undo", "My name is Ana.", "/switch main"],
        "--session",
        "zor",
    )
    again = talk(["What is my name?", "/switch other", "What is my name?"], "--session", "zor")
    assert again.stdout == "Your name is Zorblin.\nYour name is Ana.\n"


def test_what_was_taken_back_is_saved_when_one_leaves(talk: Talk, data: Path) -> None:
    """Leaving saves what was taken back, and the file has nothing of a branch that was dropped."""
    talk(
        ["My name is Ana.", "My name is Zorblin.", "/undo", "/branch -d main~1"], "--session", "zor"
    )
    assert "Zorblin" not in (data / "sessions" / "zor" / TEXT).read_text()
    again = talk(["What is my name?"], "--session", "zor")
    assert again.stderr.startswith("session zor: 1 turn, ")
    assert again.stdout == "Your name is Ana.\n"


def test_text_only_and_fewer_bits(talk: Talk, data: Path) -> None:
    """no_cache_file leaves the text; session_kv_bits makes the file smaller."""
    talk(["My name is Zorblin."], "--session", "zor")
    whole = SessionStore(data / "sessions").nbytes("zor")[1]
    talk(["I have a dog."], "--session", "zor", "--set", "session_kv_bits=8")
    assert SessionStore(data / "sessions").nbytes("zor")[1] < whole
    talk(["I have a cat."], "--session", "zor", "--set", "no_cache_file=true")
    assert os.listdir(data / "sessions" / "zor") == [TEXT]
    again = talk(["What is my name?"], "--session", "zor")
    assert again.stderr.startswith(
        "session zor: 3 turns, without caches: the first turn evaluates it again\n"
    )
    assert again.stdout == "Your name is Zorblin.\n"
    wrong = talk(["Hello!"], "--session", "zor", "--set", "session_kv_bits=3")
    assert (wrong.exit_code, wrong.stderr) == (
        2,
        "mlxrunner: --set: session_kv_bits: 3 is out of range, it has to be 4 or 8\n",
    )
