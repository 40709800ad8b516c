"""One dim line says what was dropped or cut off, and what to do."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from support.chats import CHAT, Typist

from mlxrunner.chat.conversation import Conversation
from mlxrunner.chat.repl import PIECE_S, Chat, commands
from mlxrunner.chat.view import LOGGER
from mlxrunner.engine.scheduling.pacing import Pace
from mlxrunner.testing import oracle_runner


def chat_of(context: int, *texts: str, most: int = 4096, **options: Any) -> Chat:
    """Return a chat on the oracle, whose answers never end by themselves, to be run."""
    runner = oracle_runner(context=context)
    runner.facts = replace(runner.facts, context=most)
    conversation = Conversation(runner, options={"stop_tokens": [], **options})
    return Chat(conversation, Typist([*texts]), model="oracle")


def notes_of(chat: Chat, capsys: pytest.CaptureFixture[str]) -> list[str]:
    chat.run(commands())
    return capsys.readouterr().err.splitlines()


def test_an_answer_that_is_cut_off_at_a_limit_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """With the limit of this answer, which /retry may have set."""
    chat = chat_of(200, "hello", "/retry max_tokens=3", "/set max_tokens 2", "hello", max_tokens=5)
    notes = [note for note in notes_of(chat, capsys) if note.startswith("(")]
    assert notes == [
        f"(stopped at max_tokens {most}: /set max_tokens {2 * most} allows more, /retry "
        f"max_tokens={2 * most} answers again)"
        for most in (5, 3, 2)
    ]


def test_an_answer_that_is_cut_off_at_the_end_of_the_context_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A longer context is offered where the model has one."""
    notes = notes_of(chat_of(60, "hello", overflow="stop"), capsys)
    assert notes == [
        "(stopped at the end of the context of 60 tokens: /set context 120 makes it longer, "
        "/undo removes turns, /clear all of them)"
    ]
    notes = notes_of(chat_of(60, "hello", most=60, overflow="stop"), capsys)
    assert notes == [
        "(stopped at the end of the context of 60 tokens: /undo removes turns, /clear all of them)"
    ]


def test_tokens_that_a_full_context_drops_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """In the turn that drops them, and not in the next."""
    chat = chat_of(100, "a" * 30, "b" * 30, "c", max_tokens=12)
    notes = [note for note in notes_of(chat, capsys) if "was full" in note]
    dropped = sum(usage.cache.shifted_tokens for usage in chat.conversation.usages)
    assert len(notes) == 1
    assert notes[0].startswith(
        f"(the context of 100 tokens was full: the oldest {dropped} tokens were dropped, and the "
        "model does not see them any more; /set context 200 makes it longer, "
    )


def test_turns_that_a_full_context_leaves_out_are_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where the conversation is rendered again."""
    chat = chat_of(100, "a" * 30, "b" * 30, "c", max_tokens=12)
    chat.conversation.policy = "template"
    notes = [note for note in notes_of(chat, capsys) if "was full" in note]
    assert notes
    assert "the oldest 1 turn was dropped, and the model does not see it any more" in notes[0]


def test_the_line_is_dim_in_a_terminal(open_screen: Any) -> None:
    """It is apart from the answer."""
    screen = open_screen(*CHAT, "--no-reserve", "--max-tokens", "2", size=(150, 30))
    said = screen.say("My name is Ana.").splitlines()
    assert said[-1].startswith("(stopped at max_tokens 2: ")
    assert "\x1b[2m(stopped at" in screen.raw
    assert screen.leave() == 0


def test_log_lines_come_before_or_after_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """Also without a terminal, where both streams may end in the same file."""
    chat = chat_of(200, "hello", max_tokens=5)
    events: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            events.append("log")

    class View:
        def write(self, text: str) -> None:
            events.append("text")
            LOGGER.warning("in the middle")

        def pause(self) -> None: ...

        def close(self) -> None:
            events.append("end")

    chat.view = View
    LOGGER.addHandler(handler := Handler())
    try:
        chat.run(commands())
    finally:
        LOGGER.removeHandler(handler)
    assert "log" in events
    assert "text" not in events[events.index("end") :]
    assert "log" not in events[events.index("text") : events.index("end")]


@pytest.mark.parametrize("is_interactive", [True, False])
def test_the_prefill_of_a_chat_follows_the_speed_in_a_terminal(is_interactive: bool) -> None:
    """Ctrl-C acts soon; in a pipe the pieces, and so the answers, stay the same."""
    runner = oracle_runner()
    chat = Chat(Conversation(runner, options={"max_tokens": 2}), interactive=is_interactive)
    list(chat.conversation.send("hello"))
    if is_interactive:
        assert isinstance(runner.pace, Pace)
        assert runner.pace.seconds == PIECE_S
    else:
        assert runner.pace is None
