"""Answers are there after a restart, as they were generated, or they are not there at all."""

from __future__ import annotations

import logging
import os
import random
import tempfile
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from support.sample import examples
from support.strict_templates import TEMPLATES, load_strict

from mlxrunner.cache.entry import as_tokens
from mlxrunner.server.prompts import answer_tokens
from mlxrunner.server.prompts.answer_tokens import (
    NAME,
    AnswerTokenCache,
    AnswerTokenFile,
    CachedAnswer,
    TokenSpan,
)
from mlxrunner.server.prompts.builder import PromptBuilder
from mlxrunner.server.tools.reader import ParsedAnswer
from mlxrunner.tokenizer.base import AnswerTokens
from tests.server.test_kept import FAMILIES, GO_ON, MERGED, Client, begins_with, call_text


def turn_of(text: str, **more: Any) -> CachedAnswer:
    tokens = as_tokens([ord(letter) for letter in text])
    said = ParsedAnswer("thought", text, (("look", '{"at":1}', None), ("see", "{}", "id")), 3)
    answer = AnswerTokens(text, tokens, array("q", range(len(text))), "<end>")
    return CachedAnswer(7, b"b" * 16, answer, said, **more)


def same(one: CachedAnswer, other: CachedAnswer) -> bool:
    names = ("length", "before", "said", "is_cut", "forms")
    return (
        all(getattr(one, name) == getattr(other, name) for name in names)
        and str(one.answer) == str(other.answer)
        and one.answer.tokens.dtype == other.answer.tokens.dtype
        and str(one.known) == str(other.known)
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_a_restart_loses_no_tokens(family: str, seed: int, tmp_path: Path) -> None:
    """After each turn of a conversation, the tokens of all its answers come from the file."""
    order = random.Random(seed)
    tokenizer = load_strict(tmp_path / "model", family, words=MERGED)
    maker = PromptBuilder(tokenizer, TEMPLATES[family][0])
    client = Client(maker, order, sends_thinking=False)
    maker.kept.store_in(AnswerTokenFile(tmp_path))
    made = client.ask({"role": "user", "content": "hello the file"})
    for turn in range(4):
        text = call_text(maker.form.name, 100 + turn, order)
        if order.random() < 0.4:
            header = "<|channel|>final<|message|>" if maker.form.kind == "channels" else ""
            text = f"{header}the file: {{x}}"
        written = client.answer(made, text)
        maker.kept = AnswerTokenCache()
        maker.kept.store_in(AnswerTokenFile(tmp_path))
        assert len(maker.kept) == turn + 1
        after = client.ask(*([] if "tool_calls" in client.messages[-2] else [GO_ON]))
        assert begins_with(after, made, written)
        made = after


def test_every_field_comes_back(tmp_path: Path) -> None:
    """Half a character of JSON too, and what was cut off; twice is once."""
    file = AnswerTokenFile(tmp_path)
    turns = [turn_of("one\u2028"), turn_of("\ud83d x", is_cut=True)]
    turns[0].known["One<end>"] = TokenSpan(3, 6, "one", as_tokens([1, 2]))
    turns[0].forms = 1
    for number, turn in enumerate(turns):
        file.add(bytes([number]) * 16, turn)
    found = list(AnswerTokenFile(tmp_path).read())
    assert [link for link, _ in found] == [b"\0" * 16, b"\1" * 16]
    assert all(same(one, turn) for (_, one), turn in zip(found, turns, strict=True))
    kept = AnswerTokenCache()
    kept.store_in(file)
    kept.store_in(file)
    assert len(kept) == 2
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600


@examples(200)
@given(some.data())
def test_damage_costs_answers_and_changes_none(data: some.DataObject) -> None:
    """Bytes are changed, added, or missing at the end."""
    with tempfile.TemporaryDirectory() as name:
        folder, turns = Path(name), [turn_of(f"{number} abc") for number in range(4)]
        for turn in turns:
            AnswerTokenFile(folder).add(b"l", turn)
        content = bytearray((folder / NAME).read_bytes())
        del content[data.draw(some.integers(0, len(content))) :]
        for place in data.draw(some.lists(some.integers(0, max(0, len(content) - 1)), max_size=3)):
            content[place : place + 1] = data.draw(some.binary(max_size=2))
        (folder / NAME).write_bytes(content)
        found = [turn for _, turn in AnswerTokenFile(folder).read()]
        assert all(any(same(one, turn) for turn in turns) for one in found)
        AnswerTokenFile(folder).add(b"l", turn_of("next"))
        assert same([turn for _, turn in AnswerTokenFile(folder).read()][-1], turn_of("next"))


def test_an_answer_that_takes_too_much_is_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The reader would refuse a file that it made too large, with all the others."""
    file = AnswerTokenFile(tmp_path, 20_000)
    for text in ("short", "x" * 30_000, "last"):
        file.add(b"l", turn_of(text))
    assert [turn.answer.text for _, turn in file.read()] == ["short", "last"]
    assert "of at most 10,000 bytes" in caplog.text


def test_a_file_is_bounded(tmp_path: Path) -> None:
    """The older half goes first."""
    most = 20_000
    for number in range(200):
        AnswerTokenFile(tmp_path, most).add(b"l", turn_of(f"{number}"))
        assert (tmp_path / NAME).stat().st_size <= most
    found = [turn.answer.text for _, turn in AnswerTokenFile(tmp_path, most).read()]
    assert 10 < len(found) < 190
    assert found == [f"{number}" for number in range(200 - len(found), 200)]


def full(descriptor: int, data: bytes) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("what", ["link", "fifo", "folder", "full"])
def test_what_cannot_be_written_is_said_once(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is kept in memory, and nothing is read or written elsewhere."""
    path, other = tmp_path / NAME, tmp_path / "other"
    other.write_text("other")
    match what:
        case "link":
            path.symlink_to(other)
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "full":
            monkeypatch.setattr(answer_tokens, "write_all", full)
    file = AnswerTokenFile(tmp_path)
    assert list(file.read()) == []
    with caplog.at_level(logging.WARNING, logger="mlxrunner"):
        file.add(b"l", turn_of("one"))
        file.add(b"l", turn_of("two"))
    (said,) = caplog.messages
    assert "an answer will not be known after a restart: " in said
    assert other.read_text() == "other"
