"""Pictures in a chat: named in texts, seen by the model, and reused as tokens are."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("mlx_vlm", reason="needs the extra vision")

from support.chats import TABLE, Talk, Typist, cold_answer, draw
from support.seeing import write_seeing

from mlxrunner import Runner
from mlxrunner.chat.conversation import Conversation
from mlxrunner.chat.input import BEGIN, END, picture_paths
from mlxrunner.chat.repl import Chat

DEMO = "demo-pictures"


def chat_with(runner: Runner, model: str = DEMO) -> Chat:
    runner.reset()
    options = {"max_tokens": 8, "temperature": 0.0}
    loading = {"reserve": False, "pictures": True}
    return Chat(Conversation(runner, options=options), model=model, loading=loading)


@pytest.fixture
def chat(seeing: Runner) -> Chat:
    return chat_with(seeing)


def type_to(chat: Chat, *texts: str) -> None:
    chat.reader = Typist(list(texts))
    chat.run(TABLE)


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("kind", [DEMO, "qwen2_5_vl", "idefics3", "mllama"])
def test_warm_answers_are_cold_ones(kind: str, pictures: list[Path], tmp_path: Path) -> None:
    """The history before does not matter: shown, asked again, taken back, shown again."""
    model = kind if kind == DEMO else str(write_seeing(tmp_path / kind, kind))
    warm = Runner.load(model, pictures=True, reserve=False)
    cold = Runner.load(model, pictures=True, reserve=False)
    chat, rng, reused = chat_with(warm, model), random.Random(kind), 0
    if kind != DEMO:  # answers of random weights are no texts that can be tokenized again
        chat.conversation.policy = "template"
    for number in range(14):
        act = rng.choice(["image", "image", "ask", "ask", "undo", "retry", "named", "clear"])
        turns = chat.conversation.history.turns
        if act in ("undo", "retry") and not turns:
            act = "image"
        if act == "undo":
            type_to(chat, f"/undo {rng.randint(1, len(turns))}")
            continue
        texts = {
            "image": [f"/image {rng.choice(pictures)}", f"What is it? {number}"],
            "ask": [f"And now? {number}"],
            "retry": ["/retry"],
            "named": [f"Is it @{rng.choice(pictures)}?"],
            "clear": ["/clear", f"/image {pictures[0]}", str(pictures[1]), "Both?"],
        }
        type_to(chat, *texts[act])
        messages = chat.conversation.messages
        expected = cold_answer(cold, chat.conversation.album, messages[:-1])
        assert messages[-1]["content"] == expected, (number, act, messages)
        reused += warm.usage.cached_tokens if warm.usage is not None else 0
    assert reused > 100


def test_a_second_question_runs_no_encoder(chat: Chat, pictures: list[Path]) -> None:
    """A typed draft that the answer then needs runs none, either."""
    type_to(chat, f"/image {pictures[2]}", "What is it?")
    (name,) = chat.conversation.album._pixels
    assert chat.conversation.history.turns[0].user == f"{name}\nWhat is it?"
    encoded = chat.runner.model.sight.encoded
    type_to(chat, "And what more?")
    assert chat.runner.usage is not None
    assert chat.runner.usage.cached_tokens > 20
    chat._evaluate(f"{name} again", lambda: False)
    type_to(chat, f"{name} again")
    assert chat.runner.usage.evaluated_tokens < 16
    assert chat.runner.model.sight.encoded == encoded


def test_a_draft_is_never_evaluated_to_the_middle_of_a_picture(
    chat: Chat, pictures: list[Path]
) -> None:
    """The last tokens of a draft are left out; a picture is left out whole."""
    type_to(chat, f"/image {pictures[0]}")
    chat._evaluate("", lambda: False)
    held = chat.runner.entry.tokens.array
    chat._evaluate("a", lambda: False)
    assert len(chat.runner.entry.tokens) >= len(held) > 0


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("{a}", 1),
        ("  {a}  ", 1),
        ("'{b}'", 1),
        ('"{b}"', 1),
        ("{a} {a}", 2),
        ("{b_escaped}", 1),
        ("{b}", 1),
        ("{a} what is it?", 0),
        ("look at {a}", 0),
        ("missing.png", 0),
        ("'{a}", 0),
        ("\0.png", 0),
        (".png", 0),
    ],
)
def test_paths_that_a_terminal_drops(typed: str, expected: int, tmp_path: Path) -> None:
    """They may be plain, quoted, escaped, several, and nothing else may stand beside them."""
    one, other = draw(tmp_path / "a.png", 1), draw(tmp_path / "b c.PNG", 2)
    escaped = str(other).replace(" ", "\\ ")
    text = typed.format(a=one, b=other, b_escaped=escaped)
    found = picture_paths(text)
    assert len(found) == expected
    assert all(Path(path) in (one, other) for path in found)


def test_what_is_dropped_waits_for_the_next_message(
    chat: Chat, pictures: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Twice the same picture is once; /image -d drops it."""
    type_to(chat, f"'{pictures[0]}'", str(pictures[0]), str(pictures[1]), "/image")
    said = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in said[-2:]] == ["[picture: 0.png", "[picture: 1.png"]
    assert not chat.conversation.history.turns
    type_to(chat, "/image -d", "Hello")
    assert "no picture is attached to the next message" in capsys.readouterr().err
    assert chat.conversation.history.turns[0].user == "Hello"


def test_what_is_no_picture_is_one_line(
    chat: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A picture that waits is still there."""
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty.png").write_bytes(b"")
    good = draw(tmp_path / "[x]\x1b[31m.png", 1)
    type_to(chat, f"/image {good}")
    name = capsys.readouterr().err
    assert name.startswith("[picture: _x_")
    assert "\x1b" not in name
    for file, why in (
        ("text.png", "not a picture of a known format"),
        ("empty.png", "not a picture of a known format"),
        ("missing.png", "No such file"),
        (".", "directory"),
    ):
        type_to(chat, f"/image {tmp_path / file}")
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert why.lower() in said.lower()
        assert said.count("\n") == 1
    assert len(chat.attachments.pictures) == 1


def test_only_a_user_shows_pictures(chat: Chat, pictures: list[Path]) -> None:
    """A name in an answer is a text, and nobody can write what stands around a picture."""
    name, _ = chat.conversation.album.add(str(pictures[0]))
    tokenizer = chat.conversation.tokenizer
    for message in (
        {"role": "assistant", "content": name},
        {"role": "assistant", "content": f"{BEGIN}{name}{END}"},
        {"role": "user", "content": f"{BEGIN}[picture: other.png, 1x1, 00000000]{END}"},
    ):
        text = tokenizer.render([message])  # type: ignore[list-item]
        assert max(tokenizer.encode(text)) < chat.runner.facts.vocab
    shown = tokenizer.render([{"role": "user", "content": f"{BEGIN}{name}{END}"}])
    assert max(tokenizer.encode(shown)) >= 2**30


def test_a_model_without_eyes_stays(
    demo: Runner, pictures: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says why, and the chat continues."""
    chat = Chat(Conversation(demo), model="demo", loading={"reserve": False})
    type_to(chat, f"/image {pictures[0]}", "My name is Ana. What is my name?")
    out, err = capsys.readouterr()
    assert "pictures are not supported for model_type 'llama'" in err
    assert "Ana" in out
    assert chat.attachments.pictures == []


def test_the_eyes_are_loaded_when_they_are_needed(
    pictures: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The turns before stay, and another model is loaded without."""
    runner = Runner.load(DEMO, reserve=False)
    chat = Chat(Conversation(runner), model=DEMO, loading={"reserve": False})
    type_to(chat, "Hello", f"What is in @{pictures[0]}", "/model demo", "Hello again")
    assert f"{DEMO} is loaded again, with its vision encoder" in capsys.readouterr().err
    assert len(chat.conversation.history.turns) == 3
    assert "pictures" not in chat.loading
    assert not chat.conversation.sees


def test_in_a_pipe(talk: Talk, pictures: list[Path]) -> None:
    result = talk([f"/image {pictures[0]}", "How many red squares?"], "-m", DEMO)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip()
    assert "[picture: 0.png, 30x20, " in result.stderr
