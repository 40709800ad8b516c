"""The chat in a real terminal: what is on the screen, key by key."""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
import stat
import termios
from pathlib import Path
from typing import Any

import pexpect
import pytest

import mlxrunner
from mlxrunner.chat.commands.sessions import Saving
from mlxrunner.chat.start import commands
from mlxrunner.sessions.store import SessionStore
from mlxrunner.templates.messages import PlainMessage
from mlxrunner.tokenizer import load_tokenizer

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


def test_there_is_a_banner_a_prompt_and_an_answer(open_screen: Any) -> None:
    """The exact transcript, as it stands on the screen; Ctrl-D leaves with exit code 0."""
    screen = open_screen(*CHAT, size=(140, 30))
    screen.prompt()
    assert screen.say("My name is Ana.") == "Nice to meet you."
    assert screen.say("What is my name?") == "Your name is Ana."
    assert screen.lines == [
        "This is the embedded demo model: a toy of 2.8 million parameters that remembers small "
        "facts you tell it, and nothing else.",
        "For a real one: -m mlx-community/Llama-3.2-1B-Instruct-4bit (or any MLX model on the hub, "
        "or a directory).",
        ">>> My name is Ana.",
        "Nice to meet you.",
        ">>> What is my name?",
        "Your name is Ana.",
        ">>>",
    ]
    assert screen.leave() == 0


def test_the_banner_is_broken_between_words(open_screen: Any) -> None:
    """A narrow terminal would break within them."""
    screen = open_screen(*CHAT, size=(40, 30))
    screen.prompt()
    assert screen.lines[:2] == [
        "This is the embedded demo model: a toy",
        "of 2.8 million parameters that remembers",
    ]
    assert screen.leave() == 0


def test_line_editing(open_screen: Any, tmp_path: Path) -> None:
    """Several lines by three ways, a line given up, completion, suggestion, history."""
    screen = open_screen(*CHAT, size=(300, 30))  # paths stand on one line
    screen.prompt()
    screen.child.send(f"My name{CTRL_J}is{ALT_ENTER}Ana.\r")
    screen.until("... is\n... Ana.\n").until("Nice to meet you").prompt()
    screen.child.send('"""What is\rmy name?\r"""\r')
    screen.until('>>> """What is\n... my name?\n... """\n').until("Your name is Ana.").prompt()
    screen.child.send("half a line")
    screen.until(">>> half a line")
    screen.child.send(CTRL_C)
    screen.prompt()
    assert screen.say("/show").splitlines()[-4:] == [
        "   1 user      My name is Ana.",
        "   2 assistant Nice to meet you, Ana.",
        "   3 user      What is my name?",
        "   4 assistant Your name is Ana.",
    ]
    screen.child.send("/expl" + TAB)
    screen.until(">>> /explain")
    screen.child.send("\r")
    screen.until("prompt tokens were reused").prompt()
    assert (
        screen.say("/clera")
        == "error: no such command: /clera (did you mean /clear? /help lists them)"
    )
    (tmp_path / "a long name.txt").write_text("My dog is called Rex.")
    screen.child.send(f"/file {tmp_path}/a lo{TAB}")
    screen.until("a long name.txt")
    screen.child.send("\r")
    screen.until("goes with the next message").prompt()
    screen.child.send(UP + UP + UP)
    screen.until(">>> /explain")
    screen.child.send(UP)
    screen.until(">>> /show")
    screen.child.send(CTRL_C)
    screen.prompt()
    assert screen.leave() == 0


@pytest.mark.exhaustive(0)
def test_texts_are_kept_for_the_next_time(open_screen: Any, tmp_path: Path) -> None:
    """Texts of several lines are whole, in a file for the owner only; --no-history keeps none."""
    screen = open_screen(*CHAT)
    screen.prompt()
    screen.child.send(f"Hello!{CTRL_J}How are you?\r")
    screen.until("... How are you?").prompt()
    screen.leave()
    file = tmp_path / "data" / "history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    before = file.read_bytes()
    again = open_screen(*CHAT)
    again.prompt()
    again.child.send(UP)
    again.until(">>> Hello!\n... How are you?")
    again.child.send(CTRL_C)
    again.prompt()
    again.leave()
    secret = open_screen(*CHAT, "--no-history")
    secret.say("My name is Ana.")
    secret.leave()
    assert file.read_bytes() == before


def test_going_back_says_what_is_reused(open_screen: Any) -> None:
    """/undo, /edit, /retry, /branch, /switch and /clear say what they reuse, one by one."""
    screen = open_screen(*CHAT)
    screen.prompt()
    assert screen.say("/undo") == "error: there is no turn to take back"
    assert screen.say("/edit") == "error: there is nothing to edit yet"
    assert screen.say("/retry") == "error: there is no answer to try again"
    screen.say("My name is Ana.")
    screen.say("I have a dog.")
    undone = screen.say("/undo")
    assert re.fullmatch(
        r"1 turn taken back, 1 turn left: (\d+) of \1 tokens reused, 0 to evaluate; "
        "/redo brings it back",
        undone,
    )
    assert re.fullmatch(
        r"on branch other: \d+ of \d+ tokens reused, \d+ to evaluate", screen.say("/branch other")
    )
    screen.child.send("/edit 1\r")
    screen.until(lambda: screen.lines[-1] == ">>> My name is Ana.")
    screen.child.send("\x7f" * 4 + "Bo.\r")
    screen.until("Nice to meet you").prompt()
    assert re.search(
        r"\n\d+ of \d+ tokens reused, \d+ to evaluate\nNice to meet you.*\n>>>$", screen.shown
    )
    assert screen.say("What is my name?") == "Your name is Bo."
    switched = screen.say("/switch main")
    assert re.fullmatch(
        r"on branch main, 1 turn: \d+ of \d+ tokens reused, \d+ to evaluate", switched
    )
    assert screen.say("What is my name?") == "Your name is Ana."
    assert screen.say("/branch").splitlines() == ["* main", "  other"]
    assert (
        screen.say("/switch nowhere")
        == "error: there is no branch 'nowhere': there are main, other"
    )
    screen.child.send("/edit 2\r")
    screen.until(lambda: screen.lines[-1] == ">>> Nice to meet you.")
    screen.child.send(" Your cat is Tom.\r")
    screen.until("the answer of turn 1 is changed").prompt()
    assert (
        screen.say("/show").splitlines()[-1] == "   2 assistant Nice to meet you. Your cat is Tom."
    )
    retried = screen.say("/retry temperature=1.5 seed=3").splitlines()
    assert re.fullmatch(r"(\d+) of \d+ tokens reused, 1 to evaluate", retried[0])
    assert (
        screen.say("/retry")
        .splitlines()[0]
        .startswith("the temperature is 0, so the answer will be the same")
    )
    assert screen.say("/retry temperature=hot") == "error: temperature: 'hot' is not a number"
    assert screen.say("/clear").startswith("cleared: ")
    assert screen.say("What is my name?") != "Your name is Ana."


def test_ctrl_c_at_twenty_random_moments_leaves_an_exact_conversation(
    open_screen: Any, tmp_path: Path
) -> None:
    """The next turn equals a cold run, and what was shown is kept, after Ctrl-C at any moment."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW.replace('"max_tokens": 400', '"max_tokens": 1500'))
    screen = open_screen(str(script), size=(200, 50), MOMENTS=str(tmp_path))
    met = {"prefill": 0, "decode": 0}
    for turn in range(22):
        screen.until(lambda count=turn: screen.raw.count("<true ") == count + 1).prompt()
        screen.child.send(f"turn {turn}: a question of several chunks")
        screen.until("several chunks")
        screen.child.send("\r")
        screen.until((tmp_path / str(turn)).exists)
        screen.child.send(CTRL_C)
    screen.until(lambda: screen.raw.count("<true ") == 23).prompt()
    for kind in re.findall("<true (decode|prefill)>", screen.raw)[1:]:
        met[kind] += 1
    assert min(met.values()) >= 4, met
    assert screen.leave() == 0


def test_an_interrupt_from_outside_while_typing_is_a_ctrl_c(open_screen: Any) -> None:
    """`kill -INT`: the line is given up, the chat goes on."""
    screen = open_screen(*CHAT)
    screen.prompt()
    screen.child.send("half a line")
    screen.until(">>> half a line")
    os.kill(screen.child.pid, signal.SIGINT)
    screen.prompt()
    assert screen.say("My name is Ana.") == "Nice to meet you."
    assert screen.leave() == 0


def answering(open_screen: Any, folder: Path) -> Any:
    """A chat in the middle of a slow answer."""
    script = folder / "slow.py"
    script.write_text(SLOW.replace('"max_tokens": 400', '"max_tokens": 60'))
    screen = open_screen(str(script), size=(200, 50))
    screen.prompt()
    screen.child.send("hello\r")
    screen.until(lambda: len(screen.everything[-1]) > 3 and ">>>" not in screen.everything[-1])
    return screen


def test_what_is_typed_during_an_answer_waits_for_the_next_prompt(
    open_screen: Any, tmp_path: Path
) -> None:
    """Unseen, and not lost."""
    screen = answering(open_screen, tmp_path)
    screen.child.send("/show\r")
    screen.until("   1 user      hello").prompt()
    assert screen.shown.count("/show") == 1


def marks_pastes(screen: Any) -> bool:
    """Return True if the terminal was last told to mark what is pasted."""
    return bool(screen.raw.rfind("\x1b[?2004h") > screen.raw.rfind("\x1b[?2004l"))


def test_what_is_pasted_during_an_answer_is_one_text(open_screen: Any, tmp_path: Path) -> None:
    """It has as many lines as were pasted, which wait for Enter."""
    screen = answering(open_screen, tmp_path)
    assert marks_pastes(screen)
    screen.child.send(f"{PASTE}line a\rline b\rline c{PASTED}")
    screen.until(">>> line a\n... line b\n... line c")
    screen.child.send(CTRL_C)
    assert screen.leave() == 0
    assert not marks_pastes(screen)


def test_what_is_edited_cannot_drive_the_terminal(open_screen: Any) -> None:
    """Characters that hide or reorder text are shown, and stay in the text."""
    screen = open_screen(*CHAT)
    screen.say("My name is \u202eAna.")
    screen.child.send("/edit 1\r")
    screen.until(r">>> My name is \u202eAna.")
    screen.child.send("\x7f!\r")
    screen.until("to evaluate").prompt()
    assert "user      My name is \\u202eAna!" in screen.say("/show")
    assert "\u202e" not in screen.raw


def test_every_command_works_in_a_terminal(open_screen: Any, tmp_path: Path) -> None:
    """Every command works typed one after the other, and a new one has to be typed here too."""
    (tmp_path / "note.txt").write_text("My cat is Tom.")
    tokens = r"\d+ of \d+ tokens reused, \d+ to evaluate"
    said = {
        "/help": "(?s)/undo .*/bye  .*Ctrl-C stops",
        "/system The user's name is Ana.": "system prompt: The user's name is Ana.",
        "What is my name?": r"Your name is Ana\.",
        "/set temperature 0.5": r"temperature = 0\.5",
        "/show": r"(?s)sampling  temperature 0\.5.*system    The user's name is Ana"
        r".*2 assistant Your name is Ana",
        "/set temperature default": r"temperature = 0\.0",
        "/think hide": "thinking is hidden; it is as the template has it",
        "/stats": "(?s)last turn  .*history    exact; drift from the template: none",
        "/explain": r"\d+ of \d+ prompt tokens were reused",
        "/copy": r"copied 17 characters through the terminal \(OSC 52\), if it allows that",
        f"/export {tmp_path}/talk.md": f"1 turn written to {tmp_path}/talk.md",
        f"/file {tmp_path}/note.txt": r"note.txt \(14 B\) goes with the next message",
        "/file -d": "no file goes with the next message",
        "/save trip": r"saved as trip: 1 turn, \d+ tokens",
        "/branch other": f"on branch other: {tokens}",
        "/undo": f"1 turn taken back, 0 turns left: {tokens}",
        "/redo": f"brought back, 1 turn: {tokens}",
        "/switch main": f"on branch main, 1 turn: {tokens}",
        "/retry temperature=0": rf"(?s){tokens}\nYour name is Ana\.",
        "/edit": ">>> What is my name\\?$",  # which Ctrl-C then gives up
        "/editor Hi!": ">>> Hi!$",
        "/model demo": "model: demo, context of 2048 tokens",
        "/clear": f"cleared: {tokens}",
        "/load -f trip": "session trip: 1 turn, ",
    }
    typed = {text.split()[0] for text in said if text.startswith("/")}
    assert typed | {"/bye"} == {
        command.name for command in commands(*Saving(SessionStore(tmp_path)).commands)
    }
    screen = open_screen(*CHAT, size=(300, 60), SSH_TTY="/dev/pts/0", EDITOR="true")
    for text, answer in said.items():
        if text == "/edit":
            screen.child.send("/edit\r")
            screen.until(lambda answer=answer: re.search(answer, screen.shown) is not None)
            screen.child.send(CTRL_C)
            screen.until("nothing changed").prompt()
        elif text.startswith("/editor"):
            screen.child.send(f"{text}\r")
            screen.until(lambda answer=answer: re.search(answer, screen.shown) is not None)
            screen.child.send(CTRL_C)
            screen.prompt()
        else:
            assert re.search(answer, screen.say(text)), text
    copied = re.search("\x1b]52;c;(.*?)\a", screen.raw)
    assert copied is not None
    assert base64.b64decode(copied[1]) == b"Your name is Ana."
    assert (tmp_path / "talk.md").read_text().endswith("## Assistant\n\nYour name is Ana.\n")
    screen.child.send("/bye\r")
    assert screen.end() == 0


@pytest.mark.exhaustive(1)
@pytest.mark.parametrize("size", [(100, 30), (24, 8)], ids=["wide", "narrow"])
def test_a_paste_of_5000_lines_is_one_message(open_screen: Any, size: tuple[int, int]) -> None:
    """It does not fit the context, which is said in one line; what was there before still is."""
    screen = open_screen(*CHAT, "--no-history", size=size)
    screen.say("My name is Ana.")
    screen.prompt()
    lines = [f"line {number}" for number in range(5000)]
    screen.child.send(PASTE + "\r".join(lines) + PASTED)
    screen.until(lambda: screen.lines[-1].strip().endswith("line 4999"))
    screen.child.send("\r")
    screen.until(lambda: "a longer --context" in " ".join(screen.shown.split())).prompt()
    messages: list[PlainMessage] = [
        {"role": "user", "content": "My name is Ana."},
        {"role": "assistant", "content": "Nice to meet you."},
        {"role": "user", "content": "\n".join(lines)},
    ]
    tokenizer = load_tokenizer(DEMO)
    tokens = len(tokenizer.encode(tokenizer.render(messages)))  # not a line of it was lost
    said = " ".join(" ".join(screen.everything[-12:]).split())
    assert f"error: the prompt has {tokens} tokens" in said
    assert "/clear" not in said
    assert screen.say("What is my name?") == "Your name is Ana."
    assert screen.leave() == 0


def test_plain_answers_without_work_ahead(open_screen: Any) -> None:
    """`--plain --no-type-ahead` gives the same answers and evaluates what precedes a text."""
    screen = open_screen(*CHAT, "--plain", "--no-type-ahead")
    assert screen.say("My name is Ana.") == "Nice to meet you."
    assert screen.say("What is my name?") == "Your name is Ana."
    assert "34 cached (5 of them while you read and typed), 15 evaluated" in screen.say("/stats")
    assert screen.leave() == 0


def test_a_resize_while_typing_and_while_answering(open_screen: Any, tmp_path: Path) -> None:
    """The line is drawn anew in the new width, and the answers are right."""
    screen = open_screen(*CHAT)
    screen.prompt()
    screen.child.send("Hello! My name ")
    screen.until(">>> Hello! My name")
    screen.resize(18, 12)
    screen.child.send("is Ana.")
    screen.until(lambda: screen.lines[-2:] == [">>> Hello! My name", " is Ana."])
    screen.child.send("\r")
    screen.until("Nice to meet you").prompt()
    screen.child.send("What is my name?\r")
    screen.resize(90, 20)
    screen.until("Your name is Ana.").prompt()
    assert screen.leave() == 0


# A model that thinks, with a template that opens the thinking, leaves it out later, and has a
# switch for it.
THINKING = """
import sys
import mlx.core as mx
from mlxrunner.chat.conversation import Conversation
from mlxrunner.chat.start import open_chat
from mlxrunner.testing import EOS, ByteTokenizer, oracle_runner

class Template(ByteTokenizer):
    def render(self, messages, *, add_generation_prompt=True, enable_thinking=True):
        last = max(i for i, m in enumerate(messages) if m["role"] == "user")
        shown = [{**m, "content": m["content"].split("</think>\\n\\n")[-1]} if i < last else m \
for i, m in enumerate(messages)]
        text = super().render(shown, add_generation_prompt=add_generation_prompt)
        return text + ("" if not add_generation_prompt else "<think>\\n" \
if enable_thinking else "<think>\\n\\n</think>\\n\\n")

runner = oracle_runner()
runner.tokenizer = Template()
left = []

def script(tokens, logits):
    global left
    if tokens[-1].item() == EOS:
        return logits  # of the step that is always one ahead
    if not left:
        thinks = bytes(t for t in tokens.tolist()[-8:] if t < 256) == b"<think>\\n"
        left = [*(b"hmm, well</think>\\n\\nSo **it** is." if thinks else b"At once."), EOS]
    return mx.where(mx.arange(logits.shape[-1]) == left.pop(0), 1e4, logits)

chat, table = open_chat(Conversation(runner, options={"logits_processors": [script]}), \
history=False, model="oracle")
sys.exit(chat.run(table))
"""


def test_thinking_is_shown_hidden_and_switched_off(open_screen: Any, tmp_path: Path) -> None:
    """Thinking is dimmed, hidden or switched off, and never in the next prompt."""
    script = tmp_path / "thinking.py"
    script.write_text(THINKING)
    screen = open_screen(str(script))
    assert screen.say("Is it?").splitlines() == ["hmm, well", "", "So it is."]
    assert "\x1b[2mhmm" in screen.raw
    assert screen.say("/think hide") == "thinking is hidden; it is as the template has it"
    assert screen.say("Is it?") == "So it is."
    assert screen.say("/think off") == "thinking is hidden; it is off"
    assert screen.say("Is it?") == "At once."
    stats = screen.say("/stats")
    assert "drift from the template: none" in stats
    assert re.search(r"\d+ cached \(\d+ of them while you read and typed\)", stats)
    assert screen.leave() == 0


BAR = (
    SLOW.replace('"max_tokens": 400', '"max_tokens": 3')
    .replace("prefill_step=3", "prefill_step=16")
    .replace("0.004", "0.1")
)


@pytest.mark.exhaustive(0)
def test_a_long_prefill_shows_how_far_it_is(open_screen: Any, tmp_path: Path) -> None:
    """With the share that came from the cache; it is gone when the answer begins."""
    script = tmp_path / "slow.py"
    script.write_text(BAR)
    screen = open_screen(str(script), "--no-type-ahead", size=(120, 30))
    screen.until("<true prefill>").prompt()
    screen.child.send("hello\r")
    screen.until(lambda: screen.raw.count("<true ") == 2).prompt()
    screen.child.send("x" * 300 + "\r")
    screen.until(
        lambda: (
            re.search(r"evaluating the prompt \(\d+% was cached\).* \d+/3\d\d tokens", screen.shown)
            is not None
        )
    )
    screen.until(lambda: screen.raw.count("<true ") == 3).prompt()
    assert "evaluating" not in screen.shown


@pytest.mark.parametrize("moment", ["typing", "answering"])
def test_a_killed_chat_leaves_the_terminal_as_it_was(
    open_screen: Any, tmp_path: Path, moment: str
) -> None:
    """It shows what is typed again; the exit code says what it was."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    screen = open_screen(str(script), size=(200, 50))
    before = termios.tcgetattr(screen.child.child_fd)
    screen.until("<true prefill>").prompt()
    screen.child.send("half a line")
    screen.until(">>> half a line")
    if moment == "answering":
        screen.child.send("\r")
        screen.until(lambda: not screen.everything[-1].startswith(">>>"))
    os.kill(screen.child.pid, signal.SIGTERM)
    screen.child.expect(pexpect.EOF)
    screen.raw += screen.child.before
    assert not marks_pastes(screen)
    assert termios.tcgetattr(screen.child.child_fd)[:4] == before[:4]
    screen.child.close()
    assert screen.child.exitstatus == 128 + signal.SIGTERM


def test_the_first_line_says_how_tokens_are_chosen(open_screen: Any, tmp_path: Path) -> None:
    """It names what the model suggests, and what is typed; the demo model says nothing."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    model = (*CHAT, "--no-reserve", str(folder))
    first = "sampling: temperature 0.6, top_k 20, as the model suggests (/set shows and changes it)"
    assert open_screen(*model).until(">>>").shown.splitlines()[0] == first
    greedy = open_screen(*model, "--greedy").until(">>>")
    assert greedy.shown.splitlines()[0].startswith("sampling: greedy (/set")
    assert "sampling" not in open_screen(*CHAT, "--no-reserve").until(">>>").shown


def test_a_model_that_is_loaded_again_shows_a_bar(open_screen: Any) -> None:
    """With what takes the time; here it is shown at once."""
    code = (
        "from mlxrunner.terminal import progress\n"
        "progress.PATIENCE_S = 0.0\n"
        "from mlxrunner.cli import main; main(['chat', '--no-type-ahead'])\n"
    )
    screen = open_screen("-c", code)
    assert "loading demo: trying the longest step, at the end of 2048 tokens" in screen.prompt().raw
    for command, context in (("/set context 300", 300), ("/model demo", 300)):
        before = len(screen.raw)
        screen.say(command)
        shown = f"loading demo: trying the longest step, at the end of {context} tokens"
        assert shown in screen.raw[before:]
