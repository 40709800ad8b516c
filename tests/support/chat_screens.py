"""The chat in a terminal: keys, and a script whose answers are slow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlxrunner

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
from mlxrunner.chat.start import open_chat
from mlxrunner.terminal.signals import Interrupts
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
