"""The house of the models: it answers what protocols ask, and knows none of them."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from mlxrunner.errors import ClosedError, ContextLengthError, EngineError
from mlxrunner.models.load import LoadProgress, tell_nobody
from mlxrunner.parallel.handle import Handle
from mlxrunner.results import Chunk, Usage
from mlxrunner.serve.answering.answers import ModelCard
from mlxrunner.serve.answering.cards import card_of
from mlxrunner.serve.answering.loaded import LoadedModels, Place
from mlxrunner.serve.answering.names import ModelNames
from mlxrunner.serve.answering.opened import Opened, Opening
from mlxrunner.serve.answering.pace import Beats, Reader
from mlxrunner.serve.answering.refusing import SOON, check_counts, refusal_of, too_long
from mlxrunner.serve.asked import Asked
from mlxrunner.serve.events import (
    CacheReport,
    Ended,
    EndReason,
    Event,
    Note,
    Reading,
    RefusedError,
    Waiting,
    joined,
)
from mlxrunner.serve.prompts.causes import Cause, Causes, Seen
from mlxrunner.serve.prompts.make import Made
from mlxrunner.serve.prompts.split import AnswerSplitter
from mlxrunner.tokenizer.prompt import Caller

LONGEST_WAIT = 120
"""Most seconds after which a refused client is told to ask again."""
OnEnd = Callable[[str, Note | None], None]
"""A function that is told how the answer to a request ended."""
REMEMBERED = 32
"""Requests whose durations say how soon a slot will be free."""


class House:
    """Answers requests with the models that it holds: see `Answers`, whose methods it has.

    Everything but `load_first` belongs to one event loop.
    """

    def __init__(
        self,
        names: ModelNames,
        opening: Opening,
        on_open: Callable[[Opened], None],
        on_end: OnEnd = lambda request, note: None,
    ) -> None:
        """Hold no model yet. `on_open` is called with each one that was loaded.

        `on_end` is called with the id of each request and the remark on its answer, as soon as that
        is known, and again at the end of the request.
        """
        self._on_end = on_end
        self.names, self._opening = names, opening
        self.models_held = LoadedModels(opening, on_open)
        self.began = time.time()
        self.refused = 0
        """Requests that were told to come later."""
        self.is_stopping = False
        """True once the server takes no more requests."""
        self._is_over = False
        self._handles = set[Handle]()
        """The requests that the engines are answering."""
        self._causes = Causes()
        self._durations: deque[float] = deque(maxlen=REMEMBERED)

    def load_first(self, progress: LoadProgress = tell_nobody) -> Opened:
        """Load the first model, before the server runs. Raise what its loading raises."""
        opened = self._opening.load(self.names.first, self._opening.budget(), progress)
        self.models_held.take_in(opened)
        return opened

    def end_answers(self) -> None:
        """End the answers that are running, and those that still begin: each client is told so."""
        self.is_stopping = self._is_over = True
        for handle in self._handles:
            handle.cancel()

    async def close(self) -> None:
        """Unload all models. Idle conversations are parked."""
        self.is_stopping = True
        await self.models_held.close()

    def models(self) -> Sequence[ModelCard]:
        """Return the models that a request may name."""
        return [
            self._card(shown, name) for shown in self.names for name in [self.names.find(shown)]
        ]

    def card(self, model: str) -> ModelCard:
        """Return the model that a request means by `model`. Raise RefusedError if it is unknown."""
        name = self.names.find(model)
        return self._card(self.names.known_as(model), name)

    def _card(self, shown: str, name: str) -> ModelCard:
        pictures = self._opening.settings.pictures
        return card_of(shown, name, self.models_held.get(name), pictures=pictures)

    async def hold(self, model: str, keep_alive: float | None) -> None:
        """Load a model, and unload it `keep_alive` seconds after its last answer.

        0 unloads it now, a negative number never; None: as the server is set. Raise RefusedError.
        """
        if keep_alive == 0 and self.models_held.get(self.names.find(model)) is None:
            return
        asked = Asked(protocol="ollama", model=model, keep_alive=keep_alive)
        with self._in_place(asked) as place:
            try:
                await _loaded(place)
            except Exception as error:
                raise refusal_of(error) from error

    async def count(self, asked: Asked) -> int:
        """Return the number of tokens of the prompt, without evaluating it. Raise RefusedError."""
        with self._in_place(asked) as place:
            try:
                opened = await _loaded(place)
                made = await asyncio.to_thread(opened.maker.make, asked)
            except Exception as error:
                raise refusal_of(error) from error
        return len(made.prompt.tokens)

    async def answer(self, asked: Asked) -> AsyncGenerator[Event, None]:
        """Yield the events of an answer. Closing the iterator ends the request within one step.

        Raise RefusedError, before the first event or later.
        """
        began = time.monotonic()
        with self._in_place(asked) as place:
            try:
                async with aclosing(self._answer(asked, place)) as events:
                    async for event in events:
                        yield event
            except Exception as error:
                if isinstance(error, EngineError):
                    self.models_held.give_up(place)
                raise refusal_of(error) from error
            finally:
                self._on_end(asked.id, None)
        self._durations.append(time.monotonic() - began)

    @contextmanager
    def _in_place(self, asked: Asked) -> Iterator[Place]:
        """Enter the place of the model that is asked for. Raise RefusedError."""
        check_counts(asked)
        name = self.names.find(asked.model)
        self._check_queue(self.models_held.get(name))
        place = self.models_held.enter(name)
        keep_alive = asked.keep_alive
        if keep_alive is None:
            keep_alive = self._opening.settings.keep_alive
        try:
            yield place
        finally:
            self.models_held.leave(place, keep_alive)

    def _check_queue(self, place: Place | None) -> None:
        """Raise RefusedError if the server stops, or if too many requests wait already."""
        if self.is_stopping:
            raise _stopping()
        settings = self._opening.settings
        waiting = 0 if place is None else place.users - settings.slots
        if waiting < settings.max_queue:
            return
        self.refused += 1
        wait = self._usual_duration() * (waiting + 1) / settings.slots
        raise RefusedError(
            429,
            f"requests that wait for one of {settings.slots} slots: {waiting}, and at most "
            f"{settings.max_queue} may (--max-queue): ask again later",
            code="rate_limit_exceeded",
            retry_after=max(1, min(LONGEST_WAIT, math.ceil(wait))),
        )

    def _usual_duration(self) -> float:
        return sum(self._durations) / len(self._durations) if self._durations else 1.0

    async def _answer(self, asked: Asked, place: Place) -> AsyncGenerator[Event, None]:
        beats = Beats()
        if place.opened is None and place.loading is not None:
            async for _ in beats.until(place.loading):
                yield Waiting(f"{self.names.show(place.name)} is being loaded")
        opened = await _loaded(place)
        making = asyncio.ensure_future(asyncio.to_thread(_begin, opened, asked, self._causes))
        try:
            async for _ in beats.until(making):
                yield Waiting("the prompt is being prepared")
        except BaseException:  # the client has left
            making.add_done_callback(_end_unread)
            raise
        begun = await making
        made, handle = begun.made, begun.handle
        reader, chunks, is_kept = Reader(handle, is_whole=asked.is_whole), list[Chunk](), False
        splitter = opened.maker.splitter(made, asked)
        self._handles.add(handle)
        if self._is_over:
            handle.cancel()
        try:
            while not chunks or chunks[-1].finish_reason is None:
                try:
                    come = await reader.next(beats.left)
                except TimeoutError:
                    beats.begin_again()
                    yield _progress(handle, len(made.prompt.tokens))
                    continue
                if not come:
                    raise _stopping()
                chunks += come
                for event in joined(event for chunk in come for event in splitter.add(chunk)):
                    yield event
                    beats.begin_again()
            for event in splitter.finish(is_whole=chunks[-1].finish_reason == "stop"):
                yield event
            is_kept = True
            await asyncio.to_thread(opened.maker.keep, made, chunks)
            begun.seen.has_thought = splitter.thinking_tokens > 0
            self._on_end(asked.id, splitter.note)
            yield _end(opened, asked, begun, chunks, splitter)
        finally:
            self._handles.discard(handle)
            reader.close()
            self._on_end(asked.id, splitter.note)
            if chunks and not is_kept:
                keep = partial(opened.maker.keep, made, chunks, is_cut=True)
                asyncio.get_running_loop().run_in_executor(None, keep)


def _stopping() -> RefusedError:
    return RefusedError(503, "the server is stopping", code="stopping", retry_after=SOON)


@dataclass(frozen=True)
class Begun:
    """A request that was submitted."""

    made: Made
    handle: Handle
    seen: Seen
    """The request as the detection of causes remembers it."""
    cause: Callable[[Usage], Cause | None]
    """The function that finds the cause of what was not reused."""


def _begin(opened: Opened, asked: Asked, causes: Causes) -> Begun:
    """Make the prompt and submit it, in a worker thread. Raise RefusedError, or the runner's."""
    try:
        made = opened.maker.make(asked, opened.room)
    except ContextLengthError as error:
        raise too_long(error.tokens, opened.room, is_least=error.is_least) from error
    options = {**opened.defaults, **made.options}
    tokens = len(made.prompt.tokens)
    if tokens >= opened.room:
        raise too_long(tokens, opened.room)
    if tokens + (options.get("max_tokens") or 0) > opened.room:
        options["max_tokens"] = None  # clients ask for more than there can be
    seen = causes.begin(asked, made, opened.name)
    cause = _once(partial(causes.end, seen))
    client = asked.client
    caller = Caller(
        asked.id, client.name, client.session, tuple(made.rules), cause, replaced=made.replaced
    )
    handle = opened.runner.submit(replace(made.prompt, caller=caller), **options)
    return Begun(made, handle, seen, cause)


def _end_unread(making: asyncio.Future[Begun]) -> None:
    """End a request that was submitted after its client had left."""
    if not making.cancelled() and making.exception() is None:
        making.result().handle.cancel()


def _once(find: Callable[[Usage], Cause | None]) -> Callable[[Usage], Cause | None]:
    """Return `find` as a function that looks once: the event and the response say the same."""
    found: list[Cause | None] = []

    def cause(usage: Usage) -> Cause | None:
        if not found:
            found.append(find(usage))
        return found[0]

    return cause


async def _loaded(place: Place) -> Opened:
    """Wait until the model of a place is there. Raise what its loading raised."""
    if place.opened is None and place.loading is not None:
        await asyncio.wait({place.loading})
        if not place.loading.cancelled():
            place.loading.result()
    if place.opened is None:
        raise ClosedError("server")
    return place.opened


def _progress(handle: Handle, tokens: int) -> Event:
    """Say how far a request is that has no new token."""
    reached = handle.reached
    return Reading(reached, tokens) if reached else Waiting("all slots are taken")


def _end(
    opened: Opened, asked: Asked, begun: Begun, chunks: Sequence[Chunk], splitter: AnswerSplitter
) -> Ended:
    """Return the last event of an answer whose last chunk has come."""
    usage, reason = chunks[-1].usage, chunks[-1].finish_reason
    if usage is None:
        raise RefusedError(500, "the answer ended without its usage", code="internal")
    stop = _stop_sequence(opened, asked, chunks) if reason == "stop" else None
    ended: EndReason = "length" if reason == "length" else "stop"
    if splitter.calls:
        ended = "tool_calls"
    elif stop is not None:
        ended = "stop_sequence"
    return Ended(
        ended,
        usage,
        cache_report(usage, begun.made.rules, begun.cause(usage)),
        stop_sequence=stop if ended == "stop_sequence" else None,
        thinking_tokens=splitter.thinking_tokens,
        note=splitter.note,
        replaced=begun.made.replaced,
    )


def _stop_sequence(opened: Opened, asked: Asked, chunks: Sequence[Chunk]) -> str | None:
    """Return the stop string of the request that ended its answer; None if none did."""
    given = asked.options.get("stop") or ()
    tokens = [chunk.token for chunk in chunks if chunk.token is not None]
    if not given or tokens[-1] in opened.loaded.tokenizer.stop_tokens:
        return None
    stops = (given,) if isinstance(given, str) else tuple(given)
    text = opened.loaded.tokenizer.decode(tokens)
    found = [(text.index(stop), stop) for stop in stops if stop in text]
    return min(found)[1] if found else None


def cache_report(usage: Usage, rules: Sequence[str], cause: Cause | None) -> CacheReport:
    """Return what a request reused, and why not more."""
    return CacheReport(
        usage.outcome,
        usage.reason,
        usage.cached_tokens,
        usage.cache.lost_tokens,
        None if cause is None else cause.name,
        None if cause is None else cause.remedy,
        None if cause is None else cause.message,
        tuple(rules),
    )
