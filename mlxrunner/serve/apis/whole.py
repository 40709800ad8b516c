"""The whole answer from its events, and several answers side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from mlxrunner.serve.answering.answers import Answers
from mlxrunner.serve.apis.delivery import end
from mlxrunner.serve.asked import Asked
from mlxrunner.serve.events import (
    CallArguments,
    CallBegan,
    Ended,
    Event,
    Text,
    Thought,
    Token,
)


@dataclass
class Call:
    """A tool call of an answer."""

    id: str
    name: str
    arguments: str = ""
    """The JSON text of the arguments so far."""


@dataclass
class Whole:
    """An answer, as far as its events have come."""

    text: str = ""
    thought: str = ""
    calls: list[Call] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    """The tokens of the text, if log-probabilities were asked for."""
    parts: list[Text | Thought | Call] = field(default_factory=list)
    """Texts, thoughts and calls in their order, neighbours of one kind joined."""
    ended: Ended | None = None

    def add(self, event: Event) -> None:
        """Add the next event."""
        match event:
            case Text(text, tokens):
                self.text += text
                self.tokens.extend(tokens)
                self._join(event)
            case Thought(text):
                self.thought += text
                self._join(event)
            case CallBegan(_, call_id, name):
                self.calls.append(Call(call_id, name))
                self.parts.append(self.calls[-1])
            case CallArguments(_, text):
                self.calls[-1].arguments += text
            case Ended():
                self.ended = event

    def _join(self, event: Text | Thought) -> None:
        last = self.parts[-1] if self.parts else None
        if isinstance(last, Text | Thought) and type(last) is type(event):
            self.parts[-1] = type(event)(last.text + event.text)
        elif event.text:
            self.parts.append(type(event)(event.text))

    @property
    def end(self) -> Ended:
        """The last event. Raise RuntimeError if it has not come."""
        if self.ended is None:
            raise RuntimeError("the answer has no end")
        return self.ended


async def whole(answers: Answers, asked: Asked) -> Whole:
    """Return the whole answer. Raise RefusedError."""
    found = Whole()
    async for event in events_of(answers, replace(asked, is_whole=True)):
        found.add(event)
    return found


async def wholes(answers: Answers, several: Sequence[Asked]) -> list[Whole]:
    """Return the whole answers of several requests, which run side by side."""
    found = [Whole() for _ in several]
    together = [replace(asked, is_whole=True) for asked in several]
    async with aclosing(merged(answers, together)) as events:
        async for index, event in events:
            found[index].add(event)
    return found


async def events_of(answers: Answers, asked: Asked) -> AsyncGenerator[Event, None]:
    """Yield the events of an answer. Closing this closes the answer.

    Raise RuntimeError if the last event does not end it.
    """
    events = answers.answer(asked)
    event: Event | None = None
    try:
        async for event in events:
            yield event
        if not isinstance(event, Ended):
            raise RuntimeError(f"the answer has no end, but {event!r:.80}")
    finally:
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()


async def merged(
    answers: Answers, several: Sequence[Asked]
) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield the events of several answers with their numbers, as they come.

    The first error ends all of them.
    """
    if len(several) == 1:  # needs no task for each event
        async with aclosing(events_of(answers, several[0])) as events:
            async for one in events:
                yield 0, one
        return
    sources = [events_of(answers, asked) for asked in several]
    waiting = {asyncio.ensure_future(_next(source)): n for n, source in enumerate(sources)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                event = task.result()
                if event is not None:
                    waiting[asyncio.ensure_future(_next(sources[index]))] = index
                    yield index, event
    finally:
        await end(*waiting)
        for source in sources:
            await source.aclose()


async def _next(source: AsyncIterator[Event]) -> Event | None:
    return await anext(source, None)
