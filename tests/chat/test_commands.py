"""Commands of the chat: what they do, what they say, and what they say when they can't."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.chats import FENCED, TABLE, Do, Typist
from support.checks import raising
from support.models import write_model
from support.waiting import until

from mlxrunner.chat.input import TypedText, is_open
from mlxrunner.chat.repl import Chat, commands
from mlxrunner.config.option import MODEL, layer
from mlxrunner.options import OVERFLOW


def test_a_message_is_shown_whole(chat: Chat, do: Do) -> None:
    """It is sent as it is, with its lines and spaces; there has to be one."""
    assert do("/show 1") == ["error: there is no message 1: nothing was said yet"]
    do("Hello!")
    text = f"{FENCED}   {'x' * 200}"
    chat.conversation.answer_with(0, text)
    assert do("/show 2") == ["2 assistant:", *text.splitlines()]
    assert do("/show 1x")[0].startswith("error: '1x' is not a whole number")


def test_the_values_of_a_setting_are_completed(chat: Chat) -> None:
    """The names once and in order, and then the values of that one."""
    words = {command.name: command.words for command in TABLE}
    names = list(words["/set"](chat, ""))
    assert len(set(names)) == len(names)
    assert names[-2:] == ["context", "history"]
    assert list(words["/set"](chat, "history ")) == ["exact", "template"]
    assert list(words["/set"](chat, "overflow ")) == [*OVERFLOW, "default"]
    assert list(words["/set"](chat, "seed ")) == ["default"]
    assert list(words["/set"](chat, "history exact ")) == []
    assert "temperature=" in words["/retry"](chat, "")


def test_help_has_every_command(do: Do) -> None:
    """From the table itself, each with a line of help."""
    lines = do("/help all")
    for command in TABLE:
        assert any(line.startswith(command.usage) and line.endswith(command.help) for line in lines)
        assert command.help


MEANT = {"stat": "stats", "stats2": "stats", "info": "show", "usage": "stats", "reset": "clear"}
MEANT |= {"exi": "exit", "temperature 0.8": "set temperature VALUE"}
MEANT |= {"exi": "exit", "temperature": "set temperature VALUE"}
MEANT |= {"exi": "exit"}
QUOTED = 'takes no argument; """ around a text sends it unchanged'
ERRORS = [
    *(
        (f"/{one}", f"no such command: /{one.split()[0]} (did you mean /{meant}? /help lists them)")
        for one, meant in MEANT.items()
    ),
    ("/x-y_z", "no such command: /x-y_z (/help lists them)"),
    ("/clear the table please", f"/clear {QUOTED}"),
    ("/exit now", f"/exit {QUOTED}"),
    (
        "/set system Be brief.",
        "the system prompt is not a setting: /system Be brief. sets it",
    ),
    ("/undo x", "'x' is not a whole number between 1 and 999999999"),
    ("/undo 0", "'0' is not a whole number between 1 and 999999999"),
    (f"/undo {'1' * 5000}", f"'{'1' * 20}' is not a whole number between 1 and 999999999"),
    ("/edit 1", "there is nothing to edit yet"),
    ("/retry", "there is no answer to repeat"),
    ("/switch", "there is no branch '': there is only main"),
    ("/branch two words", "'two words' can't be the name of a branch: use one word"),
    ("/branch main", "branch main exists already: /switch main opens it"),
    ("/copy", "there is no answer to copy yet"),
    ("/file -d a.txt", "a.txt is not attached to the next message: /file lists the attached ones"),
    ("/file nowhere.txt", "nowhere.txt: no such file"),
    ("/file /dev/zero", "/dev/zero: is a device, not a regular file"),
    ("/file /", "/: is a directory, not a regular file"),
    ("/export", "/export FILE: which file? FILE.json for JSON, anything else is Markdown"),
    ("/set nonsense 3", "there is no setting nonsense: there are max_tokens"),
    ("/set temprature 1", "there is no setting temprature: did you mean 'temperature'?"),
    ("/set nothink", "there is no setting nothink: /think off turns thinking off"),
    ("/show info", "/show info: N is the number of a message; /show alone shows model"),
    ("/set temperature warm", "temperature: 'warm' is not a number"),
    ("/set top_k 1.5", "top_k: '1.5' is not a whole number"),
    ("/set top_p 3", "top_p: 3.0 is out of range, it has to be between 0 and 1"),
    (
        "/set overflow sideways",
        "overflow: 'sideways' is not known, it has to be one of stop, shift, error",
    ),
    (
        "/set history perfect",
        "history: 'perfect' is not known, it has to be one of exact, template",
    ),
    ("/set context 1", "context: 1 is out of range"),
    ("/set stop [1", "stop: [1 is not readable as JSON"),
    ("/set stop [1]", "stop: each stop string has to be a text"),
    ("/model nowhere", "nowhere: no such model"),
    ("/think hard", "/think hard: must be show, hide, on or off"),
    ("/think on", "this model's template has no switch for thinking"),
]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        *((line, f"error: {said}") for line, said in ERRORS),
        ('/system ""', "system prompt: (none)"),
        ("/set parameter top_k 7", "top_k = 7"),
        ("/stats", "no turn yet"),
        ("/explain", "no turn yet"),
        ("/file", "no file is attached to the next message"),
    ],
)
def test_what_cannot_be_done_is_one_line(do: Do, line: str, said: str) -> None:
    """With what to do instead where there is something; the chat continues."""
    lines = do(line, "Hello!")
    assert lines[0] == "Hello! How can I help you?"
    assert len(lines) == 2
    assert lines[1].startswith(said)


NO_COMMANDS = ["/usr/bin", "/* a comment */", "//", "/etc/hosts is a file", "1/2", '"""/clear"""']


@pytest.mark.parametrize("text", [*NO_COMMANDS, "", "/etc\npasswd", " /a\n/b"])
def test_what_is_no_command_is_a_text(text: str) -> None:
    """A slash and letters, digits, - and _ are one; a path, or what is quoted, is not."""
    assert TABLE.parse(text) is None
    assert not commands().is_command(text)


def test_a_command_is_read_at_once_whatever_it_takes() -> None:
    """Also with more white space in it than anybody types."""
    parsed = TABLE.parse("/system a" + " " * 500_000 + "b ")
    assert parsed is not None
    assert (parsed[0].name, len(parsed[1])) == ("/system", 500_002)


@pytest.mark.parametrize("space", [" ", "\t", "\n", "  \n "])
def test_what_a_command_takes_may_be_of_many_lines(chat: Chat, do: Do, space: str) -> None:
    """The lines are those that were pasted."""
    do(f"/system{space}You are nice.\nAnd brief. ")
    assert chat.conversation.system == "You are nice.\nAnd brief."


@pytest.mark.parametrize(
    ("text", "argument"),
    [
        ('/system """You are nice.\nAnd brief."""', "You are nice.\nAnd brief."),
        ('/system\n"""\n/show\n"""', "/show"),
        ('/system """open', '"""open'),
        ('/system say """x"""', 'say """x"""'),
    ],
    ids=["lines", "own lines", "open", "within"],
)
def test_what_a_command_takes_may_be_quoted(text: str, argument: str) -> None:
    """It is open until the quotes are closed, as a text is."""
    parsed = TABLE.parse(text)
    assert parsed is not None
    assert parsed[1] == argument
    assert is_open(text) == (argument == '"""open')


def test_settings_hold_for_the_answers_that_follow(chat: Chat, do: Do) -> None:
    assert do(
        "/set stop .",
        "My name is Ana.",
        "/set stop default",
        "/set max-tokens 2",
        "Hello!",
        "/set stop",
    ) == [
        "Nice to meet you",
        "Hell",
        'stop = "."',
        "stop = (none)",
        "max_tokens = 2",
        "(stopped at max_tokens 2: /set max_tokens 4 allows more, /retry max_tokens=4 "
        "answers again)",
        "stop = (none)",
    ]
    assert do("/set seed 5", '/set stop "a\\n"', '/set stop ["x", "y"]') == [
        "seed = 5",
        'stop = "a\\n"',
        'stop = "x", "y"',
    ]
    assert chat.conversation.options == {"max_tokens": 2, "seed": 5, "stop": ("x", "y")}
    listed = do("/set")
    wanted = ("seed", "context", "top_p")
    assert [line.split() for line in listed if line.startswith(wanted)] == [
        ["context", "2048", "(default)"],
        ["top_p", "1.0", "(default)"],
        ["seed", "5", "(here)"],
    ]


def test_settings_say_where_they_come_from(chat: Chat, do: Do) -> None:
    """The model suggests, the user sets, and `default` goes back to what the model suggests."""
    chat.conversation.usual = layer({"temperature": 0.6, "repetition_penalty": 1.2}, MODEL)
    shown = do("/set temperature 0.5", "/set", "/set temperature default", "/show")
    assert "temperature         0.5             (here)" in shown
    assert "repetition_penalty  1.2             (model)" in shown
    assert "temperature = 0.6" in shown
    assert "sampling  temperature 0.6, repetition_penalty 1.2, as the model suggests" in shown


def test_greedy_is_one_word(chat: Chat, do: Do) -> None:
    """It overrides what the model suggests, its penalties included, and so does /retry greedy."""
    chat.conversation.usual = layer({"temperature": 50.0, "repetition_penalty": 1.9}, MODEL)
    lines = do("/set greedy", "My name is Ana.", "/retry greedy", "/set repetition_penalty")
    assert lines[:3] == ["Nice to meet you.", "Nice to meet you.", "sampling: greedy"]
    assert lines[-1] == "repetition_penalty = (none)"


def test_answers_are_sampled_as_the_model_suggests(
    chat: Chat, do: Do, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The options of an answer are those of the model where the user sets none."""
    asked: list[dict[str, Any]] = []
    answer = chat.runner.generate

    def generate(prompt: Any, **options: Any) -> Any:
        asked.append(options)
        return answer(prompt, **options)

    monkeypatch.setattr(chat.runner, "generate", generate)
    chat.conversation.usual = layer({"temperature": 0.6, "top_p": 0.9}, MODEL)
    chat.conversation.options = {"top_p": 0.5, "max_tokens": 2}
    do("Hello!")
    assert [(one["temperature"], one["top_p"]) for one in asked] == [(0.6, 0.5)]


def test_a_context_is_changed_by_loading_again(chat: Chat, do: Do) -> None:
    """The conversation stays, and continues as if nothing had been."""
    lines = do("My name is Ana.", "/set context 512", "What is my name?", "/set context")
    assert lines[:2] == ["Nice to meet you.", "Your name is Ana."]
    assert lines[2:] == [
        "loaded again with a context of 512 tokens; the conversation is evaluated again",
        "context = 512",
    ]
    assert chat.loading["context"] == 512


def test_another_model_goes_on_with_the_texts(chat: Chat, do: Do, tmp_path: Path) -> None:
    """Its own tokens spell them; one that is broken leaves the present one in place."""
    write_model(tmp_path / "tiny")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    lines = do(
        "My name is Ana.",
        f"/model {tmp_path / 'broken'}",
        f"/model {tmp_path / 'tiny'}",
        "/set max_tokens 3",
        "Hi",
        "/set max_tokens default",
        "/model demo",
        "What is my name?",
    )
    assert lines[-1].startswith("model: demo")
    assert "Your name is Ana." in lines
    assert chat.model == "demo"
    assert len(chat.conversation.history.turns) == 3


def test_no_branch_keeps_tokens_of_another_model(chat: Chat, do: Do, tmp_path: Path) -> None:
    """Tokens beyond the new model's vocabulary are dropped, and no drift is reported before use."""
    write_model(tmp_path / "tiny")
    chat.conversation.options["max_tokens"] = 3
    lines = do(
        "My name is Ana.",
        "/branch b",
        f"/model {tmp_path / 'tiny'}",
        "/stats",
        "/switch main",
        "Hello!",
    )
    assert not [line for line in lines if line.startswith("error")]
    assert "history    exact; drift from the template: not known" in lines
    assert len(chat.conversation.history.turns) == 2
    asked = chat.conversation.asked
    assert list(asked.tokens) == chat.runner.tokenizer.encode(asked.text)


def test_a_longer_context_is_offered_as_the_chat_sets_it(do: Do) -> None:
    """The options of the command line are of no use at the prompt."""
    *_, full = do("/set overflow stop", "/set context 40", "My name is Ana.", "My name is Ana.")
    assert full.endswith(
        "; /set context 80 makes it longer, /undo removes turns, /clear all of them"
    )


@pytest.mark.parametrize(
    "text", ["My name is Ana. ", '"""/clear"""', '"""x""" is a docstring', "two\nlines\n"]
)
def test_an_edit_that_changes_nothing_drops_nothing(
    chat: Chat, do: Do, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """The text may begin or end with any white space or quotes."""
    chat.interactive = True
    do(text, "I have a dog.")
    before = chat.conversation.history.turns

    class Enter(Typist):
        def read(self, idle: Any, default: str = "") -> str:
            return default or super().read(idle)

    chat.reader = Enter(["/edit 1", "/edit 2"])
    chat.run(TABLE)
    assert chat.conversation.history.turns == before


def test_an_edit_or_retry_that_is_interrupted_brings_the_turn_back(
    chat: Chat, do: Do, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No work is lost, neither by Ctrl-C in the prefill nor by an error."""
    do("My name is Ana.", "I have a dog.")
    before = chat.conversation.history.turns
    lines = do("/retry max_tokens=0")
    assert lines[-1].startswith("error: max_tokens: 0 is out of range")
    chat.interactive = True
    for text in ("word " * 3000, ""):
        do("/edit 1", text)
        assert chat.conversation.history.turns == before
    monkeypatch.setattr(chat.conversation.runner, "generate", raising(KeyboardInterrupt))
    do("/retry")
    assert chat.conversation.history.turns == before


@pytest.mark.parametrize(
    ("battery", "wanted"), [(False, True), (True, False)], ids=["mains", "battery"]
)
def test_nothing_is_typed_ahead_on_battery(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, battery: bool, wanted: bool
) -> None:
    """The conversation before the draft is evaluated on both."""
    monkeypatch.setattr("mlxrunner.chat.repl.on_battery", lambda: battery)
    text = "My name is Ana and I have a very good dog."

    waits = threading.Event()

    class Watched(TypedText):
        def wait_until_over(self, idle: Callable[[], object] = lambda: None) -> None:
            waits.set()
            super().wait_until_over(idle)

    evaluate, evaluated = chat.conversation.evaluate, []

    def told(prompt: str, cancelled: Callable[[], bool], *after: Any) -> None:
        evaluate(prompt, cancelled, *after)
        evaluated.append(prompt)

    monkeypatch.setattr(chat.conversation, "evaluate", told)

    class Slow:
        def read(self, idle: Callable[[TypedText], None], default: str = "") -> str:
            draft = Watched(text)
            reading = threading.Thread(
                target=lambda: (
                    until(lambda: waits.is_set() if battery else text in evaluated),
                    draft.finish(),
                )
            )
            reading.start()
            idle(draft)
            reading.join()
            raise EOFError

    chat.reader = Slow()
    chat.run(TABLE)
    spelled = chat.runner.tokenizer.decode(list(chat.runner.entry.tokens))
    assert spelled.startswith("<s><|im_start|>user\n")
    assert ("My name is Ana" in spelled) is wanted
