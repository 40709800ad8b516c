"""The events of an answer, in one form for all protocols.

`Waiting` and `Reading` come at least every few seconds until the first token. Then come `Thought`,
`Text` and the events of tool calls in the order in which the model writes them, and at last one
`Ended`. An answer that fails raises a `RefusedError` instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from mlxrunner.profiling.schema import NoteKind
from mlxrunner.results import Usage

EndReason = Literal["stop", "stop_sequence", "length", "tool_calls"]
CUT_OFF = "it was cut off"
"""The reason why a call can't be read of which only the beginning came."""


@dataclass(frozen=True)
class Note:
    """A remark on an answer."""

    kind: NoteKind
    """The remark in one word, for events."""
    text: str
    """The remark for the client, which may have words of the answer."""

    @classmethod
    def unread(cls, why: str) -> Note:
        """Remark that a tool call could not be read, and is in the text."""
        text = f"a tool call could not be read, it is in the text: {why}"[:300]
        return cls("call-cut" if why == CUT_OFF else "call-unread", text)


@dataclass(frozen=True, slots=True)
class Waiting:
    """The request waits, for a slot or for its model; `why` says so in a few words."""

    why: str


@dataclass(frozen=True, slots=True)
class Reading:
    """The prompt is being evaluated."""

    reached: int
    """Tokens of the prompt that are evaluated or reused."""
    total: int
    """Tokens of the prompt."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token with its log-probabilities, where they were asked for."""

    text: str
    token: int
    logprob: float
    top: tuple[tuple[str, int, float], ...] = ()
    """The likeliest tokens: text, id, log-probability."""


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of the model's thinking, without its tags."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer."""

    text: str
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class CallBegan:
    """The model calls a tool. The events of two calls never mix."""

    index: int
    """Number of the call in this answer, from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments. The pieces together are a valid object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call is complete."""

    index: int


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The tokens that the request reused, and the reason why not more."""

    outcome: Literal["hit", "partial", "miss"]
    reason: str | None
    cached: int
    """Prompt tokens that were reused."""
    lost: int
    """Most tokens that could have been reused in addition, if not for `reason`."""
    cause: str | None = None
    """A known cause on the client's side, such as "billing-header", or None."""
    remedy: str | None = None
    """A remedy, in one sentence."""
    message: int | None = None
    """The number of the message that `cause` is about, from 0; None if it is about none."""
    rules: tuple[str, ...] = ()
    """The names of the rules that changed the prompt."""

    @property
    def header(self) -> str:
        """The value of the header `x-mlxrunner-cache`."""
        parts = [f"outcome={self.outcome}", f"cached={self.cached}", f"lost={self.lost}"]
        named: dict[str, object] = {"reason": self.reason, "cause": self.cause}
        named |= {"message": self.message, "rules": ",".join(self.rules) or None}
        said = (f"{name}={value}" for name, value in named.items() if value is not None)
        return "; ".join([*parts, *said])

    @property
    def body(self) -> dict[str, Any]:
        """The field `mlxrunner` beside the usage of a response."""
        return {
            "outcome": self.outcome,
            "reason": self.reason,
            "cached_tokens": self.cached,
            "lost_tokens": self.lost,
            "cause": self.cause,
            "remedy": self.remedy,
            "message": self.message,
            "rules": list(self.rules),
        }


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of the answer."""

    reason: EndReason
    usage: Usage
    cache: CacheReport
    stop_sequence: str | None = None
    """The stop string before which the answer ended; only if `reason` is "stop_sequence"."""
    thinking_tokens: int = 0
    """Tokens of the answer that were thinking."""
    note: Note | None = None
    replaced: tuple[str, ...] = ()
    """The types of what the prompt has as short texts, since the model can't be shown it."""


Event = Waiting | Reading | Thought | Text | CallBegan | CallArguments | CallEnded | Ended


def joined(events: Iterable[Event]) -> Iterator[Event]:
    """Yield `events`, neighbouring texts as one, and neighbouring thoughts as one."""
    last: Event | None = None
    for event in events:
        if isinstance(event, Text) and isinstance(last, Text):
            last = Text(last.text + event.text, last.tokens + event.tokens)
        elif isinstance(event, Thought) and isinstance(last, Thought):
            last = Thought(last.text + event.text)
        else:
            if last is not None:
                yield last
            last = event
    if last is not None:
        yield last


class RefusedError(Exception):
    """A request that gets no answer, or whose answer ends early, with what the client is told."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str = "invalid_request",
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        """Make the refusal. `status` is one of HTTP, `param` the field of the body at fault."""
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after = retry_after
