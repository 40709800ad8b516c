"""Requests as the clients of a server send them: conversations, and what makes prefixes miss.

A trace is a script. It yields waves, the requests of which come together, and gets the texts of
their answers: the next turn has them, as the client of a server would send them back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, str]
WORDS = "alpha beta gamma delta main test build file error result value return import class".split()
TURNS = 8
USERS = 12
TITLE = "Write a title for this conversation in five words: "
REMINDER = " Reminder: {} tokens are left in the context."
BILLING = "x-anthropic-billing-header: cc_version=2.1.97.a{0}; cc_entrypoint=cli; cch={0};\n"
"""The first line of Claude Code's system prompt, as a proxy passes it on."""


@dataclass(frozen=True)
class Ask:
    """A request."""

    messages: Sequence[Message]
    thinks: bool = False
    """True if the template opens a block of thinking, and leaves out that of earlier turns."""
    tools: Sequence[dict[str, Any]] = ()
    """Descriptions of tools."""


Wave = Sequence[Ask]
"""Requests that are sent at once. An empty wave restarts the server."""
Script = Generator[Wave, list[str], None]


@dataclass(frozen=True)
class Trace:
    """A script of requests."""

    name: str
    script: Callable[[int, int], Script]
    """A function of a seed and of the number of characters of a system prompt."""
    has_fault: bool = True
    """True if a server that reuses only linear conversations loses tokens."""


class Talk:
    """A conversation: each turn has a question and an answer."""

    def __init__(self, seed: int, size: int, number: int = 0) -> None:
        """Begin with a system prompt of `size` characters, which is the same for all numbers."""
        self.messages = [said("system", text(random.Random(seed), size))]
        self._rng, self._question = random.Random(f"{seed} {number}"), size // 10

    def ask(self, *, thinks: bool = False) -> Ask:
        """Ask the next question."""
        self.messages.append(said("user", text(self._rng, self._question)))
        return Ask(tuple(self.messages), thinks)

    def answered(self, answer: str) -> None:
        self.messages.append(said("assistant", answer))


def said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def text(rng: random.Random, length: int) -> str:
    """Return about `length` characters."""
    return " ".join(rng.choice(WORDS) for _ in range(length // 6))


def talked(seed: int, size: int) -> Generator[Wave, list[str], Talk]:
    """Hold a conversation, and return it."""
    talk = Talk(seed, size)
    for _ in range(TURNS):
        (answer,) = yield [talk.ask()]
        talk.answered(answer)
    return talk


def linear(seed: int, size: int) -> Script:
    yield from talked(seed, size)


def with_titles(seed: int, size: int) -> Script:
    """Ask for a title before each turn."""
    talk = Talk(seed, size)
    for _ in range(TURNS):
        ask = talk.ask()
        yield [Ask([said("user", TITLE + ask.messages[-1]["content"])])]
        (answer,) = yield [ask]
        talk.answered(answer)


def edited(seed: int, size: int) -> Script:
    """Edit a question in the middle, and continue."""
    talk = yield from talked(seed, size)
    talk.messages[TURNS + 1] = said("user", "Another question.")
    for _ in range(2):
        (answer,) = yield [talk.ask()]
        talk.answered(answer)


def dropped(seed: int, size: int) -> Script:
    """Drop two turns in the middle, and continue."""
    talk = yield from talked(seed, size)
    del talk.messages[TURNS + 1 : TURNS + 5]
    for _ in range(2):
        (answer,) = yield [talk.ask()]
        talk.answered(answer)


def stripped(seed: int, size: int) -> Script:
    """Send answers back without their thinking."""
    talk = Talk(seed, size)
    for turn in range(TURNS):
        yield [talk.ask(thinks=True)]
        talk.answered(f"This is answer {turn}, without what was thought before it.")


def reminder_at_the_end(seed: int, size: int) -> Script:
    """Append a reminder to the last question, which the next request has no more."""
    talk = Talk(seed, size)
    for turn in range(TURNS):
        *before, last = talk.ask().messages
        reminded = said("user", last["content"] + REMINDER.format(9000 - 100 * turn))
        (answer,) = yield [Ask([*before, reminded])]
        talk.answered(answer)


def reminder_in_front(seed: int, size: int) -> Script:
    """Append a reminder to the system prompt in every other request."""
    talk = Talk(seed, size)
    for turn in range(TURNS):
        system, *rest = talk.ask().messages
        reminded = said("system", system["content"] + REMINDER.format(9000 - 100 * turn))
        (answer,) = yield [Ask([reminded if turn % 2 else system, *rest])]
        talk.answered(answer)


def billed(seed: int, size: int) -> Script:
    """Begin the system prompt of each request with a line that differs."""
    talk = Talk(seed, size)
    for turn in range(TURNS):
        system, *rest = talk.ask().messages
        named = said("system", BILLING.format(f"{seed * TURNS + turn:05x}") + system["content"])
        (answer,) = yield [Ask([named, *rest])]
        talk.answered(answer)


def shuffled(seed: int, size: int) -> Script:
    """Write the keys of the tools' JSON in another order each time, as maps of Go and Swift do."""
    talk, rng = Talk(seed, size), random.Random(seed)
    names = [f"{word}_{seed}" for word in WORDS[:4]]
    for _ in range(TURNS):
        tools = [_tool(name, rng) for name in names]
        (answer,) = yield [Ask(talk.ask().messages, tools=tools)]
        talk.answered(answer)


def _tool(name: str, rng: random.Random) -> dict[str, Any]:
    """Return the description of a tool, with its keys in any order."""
    properties = {word: {"type": "string"} for word in rng.sample(WORDS[4:8], 4)}
    function = {"name": name, "parameters": {"type": "object", "properties": properties}}
    return {
        "type": "function",
        "function": {key: function[key] for key in rng.sample([*function], 2)},
    }


def together(seed: int, size: int) -> Script:
    """Start four subagents at once over a system prompt that nobody has sent before."""
    talks = [Talk(seed, size, number) for number in range(4)]
    for _ in range(2):
        answers = yield [talk.ask() for talk in talks]
        for talk, answer in zip(talks, answers, strict=True):
            talk.answered(answer)


def one_by_one(seed: int, size: int) -> Script:
    """Start four subagents one after another over one system prompt."""
    for number in range(4):
        talk = Talk(seed, size, number)
        for _ in range(2):
            (answer,) = yield [talk.ask()]
            talk.answered(answer)


def users(seed: int, size: int) -> Script:
    """Let users take turns, each with a conversation of its own."""
    talks = [Talk(1000 * seed + number, size // 4) for number in range(USERS)]
    for _ in range(4):
        for talk in talks:
            (answer,) = yield [talk.ask()]
            talk.answered(answer)


def restarted(seed: int, size: int) -> Script:
    """Go on with three conversations after a restart of the server."""
    talks = [Talk(1000 * seed + number, size) for number in range(3)]
    for _ in range(2):
        for talk in talks:
            for _ in range(2):
                (answer,) = yield [talk.ask()]
                talk.answered(answer)
        if len(talks[0].messages) < 6:
            yield []


TRACES = (
    Trace("one conversation", linear, has_fault=False),
    Trace("a title before each turn", with_titles, has_fault=False),
    Trace("12 users in turn", users, has_fault=False),
    Trace("four subagents in turn", one_by_one, has_fault=False),
    Trace("four subagents together", together),
    Trace("a message in the middle edited", edited),
    Trace("two turns in the middle dropped", dropped),
    Trace("thinking stripped", stripped),
    Trace("a reminder at the last message", reminder_at_the_end),
    Trace("a reminder at the system prompt", reminder_in_front),
    Trace("a restart", restarted),
    Trace("a billing header that changes", billed),
    Trace("keys of tools in any order", shuffled),
)
"""The traces. No two of them begin alike, so that none finds what another has left."""
