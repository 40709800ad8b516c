"""A chat with pictures that was saved continues where it was, in another process."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_vlm", reason="needs the extra vision")

from support.chats import Typed, cold_answer, content
from support.saving import pieces
from support.seeing import write_seeing

from mlxrunner import Runner, SessionError
from mlxrunner.cache.disk.pieces import head_file
from mlxrunner.cache.entry import FIRST_OF_PICTURES
from mlxrunner.chat.conversation import Conversation
from mlxrunner.chat.repl import Chat
from mlxrunner.sessions.exchange import export_session
from mlxrunner.sessions.store import SessionStore
from mlxrunner.system import mlx_vlm_internals as internals

DEMO = "demo-pictures"
KINDS = (DEMO, "qwen2_5_vl", "idefics3", "mllama")


def typed_to(runner: Runner, folder: Path, model: str = DEMO) -> Typed:
    """Return a chat on a runner that has forgotten all, with the sessions in `folder`."""
    typed = Typed(runner, SessionStore(folder / "sessions"))
    options = {"max_tokens": 8, "temperature": 0.0}
    loading = {"reserve": False, "pictures": True}
    typed.chat = Chat(Conversation(runner, options=options), model=model, loading=loading)
    return typed


def saved_chat(seeing: Runner, picture: Path, folder: Path) -> tuple[Typed, str]:
    """Return a chat that was saved as session zor with a picture, and the picture's name."""
    typed = typed_to(seeing, folder)
    typed.type(f"/image {picture}", "What is it?", session="zor")
    (name,) = typed.chat.conversation.album._pixels
    return typed, name


@pytest.mark.parametrize("damage", ["missing", "broken", "another", "a folder"])
def test_a_picture_that_is_not_what_its_name_says_stays_a_name(
    seeing: Runner,
    pictures: list[Path],
    tmp_path: Path,
    damage: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The chat continues, and shows it to the model as text."""
    typed, _ = saved_chat(seeing, pictures[0], tmp_path)
    (file,) = (tmp_path / "sessions" / "zor").glob("picture-*.png")
    if damage == "broken":
        file.write_bytes(file.read_bytes()[:50])
    elif damage == "another":
        file.write_bytes(pictures[1].read_bytes())
    else:
        file.unlink()
    if damage == "a folder":
        file.mkdir()
    typed = typed_to(seeing, tmp_path)
    typed.type("And now?", session="zor")
    assert "shown again" not in "".join(capsys.readouterr())
    assert len(typed.chat.conversation.messages) == 4
    assert not typed.chat.conversation.album._pixels


def cache_of(folder: Path) -> Path:
    (head,) = pieces(folder / "sessions" / "zor", "talk-")
    return head


def asked_last(typed: Typed) -> Any:
    usage = typed.chat.conversation.runner.usage
    assert usage is not None
    return usage


@pytest.mark.exhaustive(1)
@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_in_another_process(
    kind: str, pictures: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is evaluated again, though other pictures came first there and have its ids."""
    model = kind if kind == DEMO else str(write_seeing(tmp_path / kind, kind))
    here, there = (Runner.load(model, pictures=True, reserve=False) for _ in range(2))
    typed = typed_to(here, tmp_path, model)
    typed.type(f"/image {pictures[0]}", "What?", f"/image {pictures[1]}", "And?", session="zor")
    assert cache_of(tmp_path).stat().st_mode & 0o777 == 0o600
    stored = content(tmp_path, "zor")
    assert len(stored["pictures"]) == 2
    typed.type("Why?")
    expected = typed.chat.conversation.messages[-1]["content"]
    for one in reversed(pictures):
        there.complete(
            [{"role": "user", "content": [{"type": "image", "image": one}]}], max_tokens=1
        )
    encoded = there.model.sight.encoded
    later = typed_to(there, tmp_path, model)
    capsys.readouterr()
    later.type("Why?", session="zor")
    said = "".join(capsys.readouterr())
    assert "2 pictures shown again" in said
    assert " tokens restored " in said
    assert later.chat.conversation.messages[-1]["content"] == expected
    usage = asked_last(later)
    assert usage.cached_tokens > 0.6 * usage.prompt_tokens
    assert usage.cache.lost_tokens == 0
    assert there.model.sight.encoded == encoded


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("seed", range(4))
def test_random_chats_go_on_as_cold(seed: int, pictures: list[Path], tmp_path: Path) -> None:
    """Pictures are shown, taken back and saved, and any of three processes continues with them."""
    drawn, reused = random.Random(seed), 0
    runners = [Runner.load(DEMO, pictures=True, reserve=False) for _ in range(3)]
    for turn in range(6):
        here, _, other = drawn.sample(runners, 3)
        typed = typed_to(here, tmp_path)
        texts = [
            ["How many circles?"],
            [f"/image {drawn.choice(pictures)}", f"What? {turn}"],
            ["/undo", f"And {turn}?"],
            ["/branch", f"/image {drawn.choice(pictures)}", f"Is it {turn}?"],
        ]
        begun = [f"/image {pictures[0]}", "What is it?"]
        typed.type(*(drawn.choice(texts) if turn else begun), session="zor")
        album, messages = typed.chat.conversation.album, typed.chat.conversation.messages
        reused += asked_last(typed).cached_tokens
        assert messages[-1]["content"] == cold_answer(other, album, messages[:-1])
    assert reused > 60


def damaged(pictures: Any, drawn: random.Random) -> Any:
    """Return what stands in place of the pictures of a stored entry."""
    digest, (begin, width, *_) = next(iter(pictures.items()))
    numbers = pictures[digest]
    wrong: list[Any] = [5, [], [begin, width - 1], [begin, width, 1, 1, 1], [begin + 1, width]]
    wrong += [[-begin, width], [begin, 2**40], [float(begin), width], [begin, width, width]]
    others = [{"zz": numbers}, {digest: numbers, "00" * 32: [begin + 1, 3]}, {"11" * 32: numbers}]
    return drawn.choice([{}, [], 7, *others, *({digest: one} for one in wrong)])


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("where", ["text", "caches"])
def test_damaged_names_of_pictures_cost_the_caches_only(
    seeing: Runner,
    pictures: list[Path],
    tmp_path: Path,
    seed: int,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The text is there, the pictures are shown, and the answer is that of a cold run."""
    drawn, file = random.Random(seed), tmp_path / "sessions" / "zor" / "conversation.json"
    stored = dict[str, Any]()
    if where == "caches":

        def head(*arguments: Any, **named: Any) -> Any:
            found = head_file(*arguments, **named)
            pictures = damaged(found.about["pictures"], drawn)
            return replace(found, about={**found.about, "pictures": pictures})

        monkeypatch.setattr("mlxrunner.sessions.caches.head_file", head)
    saved_chat(seeing, pictures[0], tmp_path)
    if where == "text":
        stored = content(tmp_path, "zor")
        stored["pictures"] = damaged(stored["pictures"], drawn)
        file.write_text(json.dumps(stored))
    typed = typed_to(seeing, tmp_path)
    capsys.readouterr()
    typed.type("And now?", session="zor")
    said = "".join(capsys.readouterr())
    if where == "caches":
        assert "its caches are dropped, its text is kept: " in said
        assert "among the" in said
    else:
        assert "its file was changed by another program" in said
    album, messages = typed.chat.conversation.album, typed.chat.conversation.messages
    assert len(messages) == 4
    assert messages[-1]["content"] == cold_answer(seeing, album, messages[:-1])


def test_a_chat_without_eyes_keeps_the_text(
    seeing: Runner,
    pictures: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """mlx-vlm may be gone, and mlx-lm knows no picture."""
    saved_chat(seeing, pictures[0], tmp_path)
    monkeypatch.setattr(internals, "is_installed", lambda: False)
    blind = Runner.load(DEMO, reserve=False)
    typed = typed_to(blind, tmp_path)
    typed.type("And now?", session="zor")
    said = "".join(capsys.readouterr())
    assert "its pictures are not shown: pictures need mlx-vlm" in said
    assert len(typed.chat.conversation.history.turns) == 2
    assert max(typed.chat.conversation.history.rendering.tokens) < FIRST_OF_PICTURES


def test_no_file_of_mlx_lm_has_pictures(
    seeing: Runner, pictures: list[Path], tmp_path: Path
) -> None:
    """Its tokens could not be told from others."""
    saved_chat(seeing, pictures[0], tmp_path)
    with pytest.raises(SessionError, match="has pictures, which no file of mlx-lm can name"):
        export_session("zor", tmp_path / "a.safetensors", SessionStore(tmp_path / "sessions"))


@pytest.mark.parametrize("how", ["context", "interrupted"])
def test_a_model_that_is_loaded_again_has_other_ids(
    how: str, pictures: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of pictures are made again, and the answer is that of a cold run."""
    model = write_seeing(tmp_path / "idefics3", "idefics3")  # no option says that it sees
    typed = typed_to(Runner.load(model, reserve=False), tmp_path, str(model))
    typed.chat.loading = {"reserve": False}
    typed.type(f"/image {pictures[0]}", "What?", f"/image {pictures[1]}", "/branch b", "And?")
    chat, load = typed.chat, Runner.load
    if how == "interrupted":

        def interrupted(*arguments: Any, **options: Any) -> Any:
            monkeypatch.setattr(Runner, "load", load)
            raise KeyboardInterrupt

        monkeypatch.setattr(Runner, "load", interrupted)
        with pytest.raises(KeyboardInterrupt):
            chat.loaded.change(str(model), context=900)
        chat.loaded.complete()
    else:
        chat.loaded.change(str(model), context=900)
    assert not chat.conversation.history.shows_pictures
    assert not any(one.history.shows_pictures for one in chat.branches.others.values())
    typed.type(f"/image {pictures[2]}", "So?")
    album, messages = chat.conversation.album, chat.conversation.messages
    other = Runner.load(model, reserve=False)
    assert messages[-1]["content"] == cold_answer(other, album, messages[:-1])
