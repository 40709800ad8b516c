"""Users of the chat: typed texts, keys, screens and pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import Result
from PIL import Image

import mlxrunner
from mlxrunner import Runner
from mlxrunner.chat.conversation import Conversation
from mlxrunner.chat.input import NAME, Album
from mlxrunner.chat.repl import Chat, commands
from mlxrunner.chat.session_commands import Saving
from mlxrunner.sessions.session import Branch, History, SessionTurn
from mlxrunner.sessions.store import TEXT, SessionStore


class Typist:
    """Types what it is given; `seen`: what was there to be edited."""

    def __init__(self, texts: list[str]) -> None:
        self.texts, self.seen = texts, [""]

    def read(self, idle: Any, default: str = "") -> str:
        self.seen.append(default)
        if not self.texts:
            raise EOFError
        return self.texts.pop(0)


TABLE = commands()
Do = Callable[..., list[str]]
"""Types texts into a chat, and returns the lines that came."""
Talk = Callable[..., Result]
"""Runs a chat in a pipe, with the lines and options that it is given."""
FENCED = "Look:\n```py\nx = 1\ny = 2\n```\nand so on"
HIT = "last turn  hit (restored: session zor): 51 prompt tokens, 31 matched"


def content(data: Path, name: str) -> Any:
    return json.loads((data / "sessions" / name / TEXT).read_text())


def branch(*users: str, system: str | None = None) -> Branch:
    return Branch(system, History(tuple(SessionTurn(user, f"answer to {user}") for user in users)))


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


DEMO = Path(mlxrunner.__file__).parent / "models" / "demo"
CHAT = ("-m", "mlxrunner", "chat")
ALT_ENTER, CTRL_C, CTRL_J, TAB, UP = "\x1b\r", "\x03", "\n", "\t", "\x1b[A"
PASTE, PASTED = "\x1b[200~", "\x1b[201~"

# An endless, slow answer: Ctrl-C has something to interrupt. After each turn the entry is compared
# with the conversation. In the folder MOMENTS, if there is one, a file appears some layers after a
# text was read, or after its answer has begun.
SLOW = """
import os, random, sys, time
from pathlib import Path
from mlxrunner.chat.conversation import Conversation
from mlxrunner.chat.view import PlainView
from mlxrunner.chat.repl import open_chat
from mlxrunner.terminal.control import Interrupts
from mlxrunner.testing import OracleModel, oracle_runner

heard, handle = [], Interrupts._heard
Interrupts._heard = lambda self, *signal: (heard.append(signal), handle(self, *signal))
moments, rng, asked, layers_left = os.environ.get("MOMENTS"), random.Random(4), -1, 0

def slowly(index):
    global layers_left
    time.sleep(0.004)
    if moments and layers_left:
        layers_left -= 1
        if not layers_left:
            Path(moments, str(asked)).touch()
            while asked % 4 < 2 and len(heard) <= asked and time.monotonic() < started + 60:
                time.sleep(0.002)  # a slow machine must not turn a prefill into a decode

model = OracleModel(["full", "recurrent"], on_layer=slowly)
runner = oracle_runner(model=model, prefill_step=3)
conversation = Conversation(runner, options={"stop_tokens": [], "max_tokens": 400})
chat, table = open_chat(conversation, plain=True, history=False)
read, shown, turns = chat.reader.read, [], 0

class Shown(PlainView):
    def __init__(self):
        super().__init__()
        shown.clear()

    def write(self, text):
        global layers_left
        if layers_left is None:
            layers_left = rng.randint(1, 40)
        shown.append(text)
        super().write(text)

chat.view = Shown

def tail(runner, prompt):
    return [chunk.token for chunk in runner.generate([*prompt, 5], max_tokens=4, stop_tokens=[])]

def checked(*arguments):
    global turns, asked, layers_left, started
    model.on_layer = lambda index: None
    history = conversation.history
    kept = list(runner.entry.tokens)
    assert runner.entry.is_true or not kept, "the entry is not true"
    if len(history.turns) > turns:
        assert history.turns[-1].answer == "".join(shown), (history.turns[-1].answer, shown)
        spelled = list(history.rendering.tokens)  # the last token of an answer that is full \
is not run through the model
        assert len(kept) >= len(spelled) - 1 and kept[: len(spelled)] == spelled[: len(kept)], \
"the entry lacks what was shown"
    if kept:
        assert tail(runner, kept) == tail(oracle_runner(["full", "recurrent"]), kept), "not exact"
    print(f"<true {'decode' if len(history.turns) > turns else 'prefill'}>", flush=True)
    turns = len(history.turns)
    chat.type_ahead = not chat.type_ahead
    layers_left = 0
    model.on_layer = slowly
    text = read(*arguments)
    asked, started = asked + 1, time.monotonic()
    layers_left = rng.randint(1, 24) if asked % 4 < 2 else None
    return text

chat.reader.read = checked
sys.exit(chat.run(table))
"""


def answering(open_screen: Any, folder: Path) -> Any:
    """A chat in the middle of a slow answer."""
    script = folder / "slow.py"
    script.write_text(SLOW.replace('"max_tokens": 400', '"max_tokens": 60'))
    screen = open_screen(str(script), size=(200, 50))
    screen.prompt()
    screen.child.send("hello\r")
    screen.until(lambda: len(screen.everything[-1]) > 3 and ">>>" not in screen.everything[-1])
    return screen


def marks_pastes(screen: Any) -> bool:
    """Return True if the terminal was last told to mark what is pasted."""
    return bool(screen.raw.rfind("\x1b[?2004h") > screen.raw.rfind("\x1b[?2004l"))


def draw(file: Path, seed: int) -> Path:
    """Write a picture of noise, and return its path."""
    noise = np.random.default_rng(seed).integers(0, 255, (20 + seed, 30, 3), np.uint8)
    Image.fromarray(noise).save(file)
    return file


def cold_answer(runner: Runner, album: Album, messages: list[Any]) -> str:
    """Return the answer of an empty runner to messages whose pictures are named in their texts."""
    asked = []
    for message in messages:
        parts = re.split(f"{NAME.pattern}\n?", message["content"])
        shown = [*album.named(message["content"]), None]
        content = list[dict[str, Any]]()
        for text, name in zip(parts, shown, strict=True):
            content += [{"type": "text", "text": text}] if text else []
            content += [{"type": "image", "image": album._pixels[name]}] if name else []
        is_user = message["role"] == "user"
        asked.append({**message, "content": content if is_user else message["content"]})
    runner.reset()
    return runner.complete(asked, max_tokens=8, temperature=0.0).text
