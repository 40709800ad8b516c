"""The chat shows its first lines, its answers and its bars."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.chats import CHAT, DEMO, SLOW


def test_there_is_a_banner_a_prompt_and_an_answer(open_screen: Any) -> None:
    """The exact transcript, as it stands on the screen; Ctrl-D leaves with exit code 0."""
    screen = open_screen(*CHAT, size=(140, 30))
    screen.prompt()
    assert screen.say("My name is Ana.") == "Nice to meet you."
    assert screen.say("What is my name?") == "Your name is Ana."
    assert screen.lines == [
        "This is the embedded demo model: a toy of 2.8 million parameters that remembers small "
        "facts you tell it, and nothing else.",
        "For a real one: mlxrunner chat llama3.2:1b (0.7 GB); `mlxrunner models --known` lists "
        "more.",
        "model demo, context window of 2048 tokens; /help lists the commands",
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


def test_plain_answers_without_work_ahead(open_screen: Any) -> None:
    """`--plain` without type-ahead gives the same answers and evaluates what precedes a text."""
    screen = open_screen(*CHAT, "--plain", "--set", "no_type_ahead=true")
    assert screen.say("My name is Ana.") == "Nice to meet you."
    assert screen.prompt().idle().say("What is my name?") == "Your name is Ana."
    assert "34 cached (5 of them while you read and typed), 0 missed" in screen.say("/stats")
    assert screen.leave() == 0


# A model that thinks, with a template that opens the thinking, leaves it out later, and has a
# switch for it.
THINKING = """
import sys
import mlx.core as mx
from mlxrunner.chat.conversation import Conversation
from mlxrunner.chat.repl import open_chat
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
    assert screen.say("/think hide") == "thinking is hidden; it is the template's default"
    assert screen.say("Is it?") == "So it is."
    assert screen.say("/think off") == "thinking is hidden; it is off"
    assert screen.prompt().idle().say("Is it?") == "At once."
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
    screen = open_screen(str(script), "--set", "no_type_ahead=true", size=(120, 30))
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


def test_the_first_line_says_how_tokens_are_chosen(open_screen: Any, tmp_path: Path) -> None:
    """It names what the model suggests, and what is typed; the demo model says nothing."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    model = (*CHAT, "--no-reserve", str(folder))
    first = "sampling: temperature 0.6, top_k 20, as the model suggests (/set shows and changes it)"
    assert first in open_screen(*model).until(">>>").shown.splitlines()
    greedy = open_screen(*model, "--greedy").until(">>>")
    assert "\nsampling: greedy (/set" in greedy.shown
    assert "sampling" not in open_screen(*CHAT, "--no-reserve").until(">>>").shown


def test_a_model_that_is_loaded_again_shows_a_bar(open_screen: Any) -> None:
    """With what takes the time; here it is shown at once."""
    code = (
        "from mlxrunner.terminal import output\n"
        "output.PATIENCE_S = 0.0\n"
        "from mlxrunner.cli import main; main(['chat', '--set', 'no_type_ahead=true'])\n"
    )
    screen = open_screen("-c", code)
    assert "s: trying the longest step, at the end of 2048 tokens" in screen.prompt().raw
    for command, context in (("/set context 300", 300), ("/model demo", 300)):
        before = len(screen.raw)
        screen.say(command)
        shown = f"s: trying the longest step, at the end of {context} tokens"
        assert shown in screen.raw[before:]
