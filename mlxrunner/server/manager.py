"""Answer requests with the models that they name, which are loaded and unloaded as asked.

Knows no protocol.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from mlxrunner.config.names import did_you_mean, hub_id_of
from mlxrunner.engine.parallel_runner import Handle, ParallelRunner, news_of
from mlxrunner.engine.thread import run_in_worker
from mlxrunner.errors import ClosedError, ContextLengthError, EngineError, ModelError
from mlxrunner.models.load import LoadProgress, tell_nobody
from mlxrunner.models.resolve import HUB_ID, cached_models, folder_if_here, lasting
from mlxrunner.options import EMBEDDED
from mlxrunner.profiling.divergence import PromptRecord
from mlxrunner.profiling.schema import NoteKind
from mlxrunner.results import Chunk, logger
from mlxrunner.server.events import (
    SOON,
    TOO_LONG,
    AnswerEnd,
    AnswerEvent,
    ApiError,
    EndReason,
    Ping,
    ServerRequest,
    api_error_of,
    field_error,
)
from mlxrunner.server.models import MANY_SLOTS, ModelCard, ModelLoader, ServedModel, card_of
from mlxrunner.server.prompts.answer_tokens import digest, message_digest
from mlxrunner.server.prompts.builder import BuiltPrompt
from mlxrunner.server.prompts.rules import LRUCache, MemoizedFunction, without_billing
from mlxrunner.server.tools.reader import AnswerSplitter, joined
from mlxrunner.tokenizer.prompt import Caller

LONGEST_WAIT = 120
"""Most seconds after which a refused client is told to ask again."""
OnEnd = Callable[[str, NoteKind | None], None]
"""A function that is told how the answer to a request ended."""
MOST_MESSAGES, MOST_TOOLS, MOST_STOPS = 20_000, 2_000, 1_000
"""Each token of an answer is compared with all stop strings, while other requests wait."""
TOOL_DIGEST_BYTES, MODELS_ASKED_BYTES = 64_000_000, 1_000_000
"""Most bytes of remembered digests of tools, and of conversations whose last model is known."""
REMEMBERED = 32
"""Requests whose durations say how soon a slot will be free."""


class ModelManager:
    """Answers the requests of all protocols with the models that it holds.

    Everything but `load_first` belongs to one event loop.
    """

    def __init__(
        self,
        names: ModelNames,
        opening: ModelLoader,
        on_open: Callable[[ParallelRunner], None],
        on_end: OnEnd = lambda request, note: None,
    ) -> None:
        """Hold no model yet. `on_open` is called with the runner of each one.

        `on_end` is called with the id of each request and the remark on its answer, as soon as that
        is known, and again at the end of the request.
        """
        self._on_end = on_end
        self.on_prompt: Callable[[int], object] = lambda tokens: None
        """A function that is told the tokens of a prompt, in its task, before it is evaluated."""
        self.names, self._opening = names, opening
        self.models_held = ModelSlots(opening, on_open)
        self.began = time.time()
        self.refused = 0
        """Requests that were told to come later."""
        self.is_stopping = False
        """True once the server takes no more requests."""
        self._is_over = False
        self._handles = set[Handle]()
        """The requests that the engines are answering."""
        self._models_asked = ModelsAsked()
        self._durations: deque[float] = deque(maxlen=REMEMBERED)

    def load_first(self, progress: LoadProgress = tell_nobody) -> ServedModel:
        """Load the first model, before the server runs. Raise what its loading raises."""
        opened = self._opening.load(self.names.first, self._opening.budget(), progress)
        self.models_held.take_in(opened)
        return opened

    def end_answers(self) -> None:
        """End the answers that are running, and those that still begin: each client is told so."""
        self.is_stopping = self._is_over = True
        for handle in self._handles:
            handle.cancel()

    def announce_end(self) -> None:
        """Let the next server wait for the disk caches of this one, which is stopping."""
        from mlxrunner.cache.disk.disk_cache import announce_end

        for place in self.models_held:
            runner = None if place.opened is None else place.opened.runner
            if runner is not None and runner.keeps_parked and runner.parked_in is not None:
                announce_end(runner.parked_in)

    async def close(self) -> None:
        """Unload all models. Idle conversations are parked."""
        self.is_stopping = True
        await self.models_held.close()

    def models(self) -> Sequence[ModelCard]:
        return [self._card(shown, self.names.find(shown)) for shown in self.names]

    def card(self, model: str) -> ModelCard:
        """Return the model that a request means by `model`. Raise ApiError if it is unknown."""
        name = self.names.find(model)
        return self._card(self.names.known_as(model), name)

    def _card(self, shown: str, name: str) -> ModelCard:
        place, pictures = self.models_held.get(name), self._opening.settings.pictures
        if place is None:
            return card_of(shown, name, None, pictures=pictures)
        return replace(card_of(shown, name, place.opened, pictures=pictures), expires=place.expires)

    async def hold(self, model: str, keep_alive: float | None) -> None:
        """Load a model, and unload it `keep_alive` seconds after its last answer.

        0 unloads it now, a negative number never; None: as the server is set. Raise ApiError.
        """
        if keep_alive == 0 and self.models_held.get(self.names.find(model)) is None:
            return
        asked = ServerRequest(protocol="ollama", model=model, keep_alive=keep_alive)
        with self._in_place(asked) as place:
            await _loaded(place)

    async def count(self, asked: ServerRequest) -> int:
        """Return the number of tokens of the prompt, without evaluating it. Raise ApiError."""
        with self._in_place(asked) as place:
            opened = await _loaded(place)
            return len((await asyncio.to_thread(opened.maker.make, asked)).prompt.tokens)

    async def answer(self, asked: ServerRequest) -> AsyncGenerator[AnswerEvent, None]:
        """Yield the events of an answer. Closing the iterator ends the request within one step.

        Raise ApiError, before the first event or later.
        """
        began = time.monotonic()
        with self._in_place(asked) as place:
            try:
                async with aclosing(self._answer(asked, place)) as events:
                    async for event in events:
                        yield event
            finally:
                self._on_end(asked.id, None)
        self._durations.append(time.monotonic() - began)

    @contextmanager
    def _in_place(self, asked: ServerRequest) -> Iterator[ModelSlot]:
        """Enter the place of the model that is asked for. Raise ApiError."""
        check_counts(asked)
        name = self.names.find(asked.model)
        self._check_queue(self.models_held.get(name))
        place = self.models_held.enter(name)
        usual = self._opening.settings.keep_alive
        keep_alive = usual if asked.keep_alive is None else asked.keep_alive
        try:
            yield place
        except Exception as error:
            if isinstance(error, EngineError):
                self.models_held.give_up(place)
            raise api_error_of(error) from error
        finally:
            self.models_held.leave(place, keep_alive)

    def _check_queue(self, place: ModelSlot | None) -> None:
        """Raise ApiError if the server stops, or if too many requests wait already."""
        if self.is_stopping:
            raise _stopping()
        settings = self._opening.settings
        opened = None if place is None else place.opened
        slots = opened.slots if opened is not None else settings.slots or MANY_SLOTS
        waiting = 0 if place is None else place.users - slots
        if waiting < settings.max_queue:
            return
        self.refused += 1
        usual = sum(self._durations) / len(self._durations) if self._durations else 1.0
        wait = usual * (waiting + 1) / slots
        raise ApiError(
            429,
            f"requests that wait for one of {slots} slots: {waiting}, and at most "
            f"{settings.max_queue} may (max_queue): ask again later",
            code="rate_limit_exceeded",
            retry_after=max(1, min(LONGEST_WAIT, math.ceil(wait))),
        )

    async def _answer(
        self, asked: ServerRequest, place: ModelSlot
    ) -> AsyncGenerator[AnswerEvent, None]:
        beats = Heartbeat()
        if place.opened is None and place.loading is not None:
            async for _ in beats.until(place.loading):
                yield Ping()
        opened = await _loaded(place)
        making = asyncio.ensure_future(
            asyncio.to_thread(_begin, opened, asked, self._models_asked, self.on_prompt)
        )
        try:
            async for _ in beats.until(making):
                yield Ping()
        except BaseException:  # the client has left
            making.add_done_callback(_end_unread)
            raise
        begun = await making
        made, handle = begun.made, begun.handle
        reader, chunks, is_kept = ChunkReader(handle, is_whole=asked.is_whole), list[Chunk](), False
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
                    yield Ping()
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
            begun.record.has_thought = splitter.thinking_tokens > 0
            self._on_end(asked.id, None if splitter.note is None else splitter.note.kind)
            yield _end(opened, asked, begun, chunks, splitter)
        finally:
            self._handles.discard(handle)
            reader.close()
            self._on_end(asked.id, None if splitter.note is None else splitter.note.kind)
            if chunks and not is_kept:
                keep = partial(opened.maker.keep, made, chunks, is_cut=True)
                asyncio.get_running_loop().run_in_executor(None, keep)


LATEST = ":latest"
"""The tag that Ollama's clients add to a name."""
CLAUDE = "claude-"
"""The beginning of the names of Anthropic's models, which no other has.

Their clients name several for their own tasks: titles, subagents, the check of commands.
"""


@dataclass(frozen=True)
class ModelNames:
    """The names of models that requests may give."""

    first: str
    """The model of requests that name none, as the user named it."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of models, from the config file."""
    only_first: bool = False
    """True if requests get no other model than the first."""
    has_claude: bool = True
    """True if a name of Anthropic's that no model has here means the first model."""

    @cached_property
    def shown(self) -> str:
        """The name that clients see of the first model: a folder's is its last part."""
        place = Path(lasting(self.first))
        return place.name if place.is_absolute() else self.first

    def find(self, asked: str) -> str:
        """Return the model that a request means by `asked`. Raise ApiError if it is unknown."""
        for name in (asked, asked.removesuffix(LATEST)):
            if name in ("", self.shown, self.first):
                return self.first
            if name in self.aliases and self._may_be(self.aliases[name]):
                return self.aliases[name]
            meant = hub_id_of(name)
            if meant == self.first:
                return meant
            if self.only_first:
                continue
            # A path of two parts is not a hub id.
            is_id = HUB_ID.fullmatch(meant) and not Path(meant).is_dir()
            if meant in EMBEDDED or (is_id and folder_if_here(meant) is not None):
                return meant
        if self.has_claude and asked.startswith(CLAUDE):
            return self.first
        known, meant = list(self), hub_id_of(asked.removesuffix(LATEST))
        is_on_hub = not self.only_first and HUB_ID.fullmatch(meant) is not None
        get = f"`mlxrunner models pull {asked:.100}` downloads it; " if is_on_hub else ""
        raise ApiError(
            404,
            f"there is no model {asked:.100}: {get}{did_you_mean(asked, known)}"
            f"this server has {', '.join(known)}. Set the client to one of these, or add an alias "
            "to the config file",
            code="model_not_found",
            param="model",
        )

    def known_as(self, asked: str) -> str:
        """Return `asked`, a name that `find` finds, as the lists of models have it."""
        if asked in self.aliases:
            return asked
        return hub_id_of(asked.removesuffix(LATEST)) or self.shown

    def show(self, name: str) -> str:
        """Return the name that clients see of the model `name`."""
        return self.shown if name == self.first else name

    def __iter__(self) -> Iterator[str]:
        """Yield the names that clients can give, the first model's first."""
        aliases = [alias for alias, name in self.aliases.items() if self._may_be(name)]
        others = () if self.only_first else _cached()
        yield from dict.fromkeys((self.shown, *aliases, *others))

    def _may_be(self, name: str) -> bool:
        return not self.only_first or name == self.first


def _cached() -> list[str]:
    try:
        return [model.name for model in cached_models()]
    except ModelError:
        return []


@dataclass(eq=False)
class ModelSlot:
    """A model that requests use, or wait for."""

    name: str
    users: int = 0
    """Requests that use it or wait for it."""
    opened: ServedModel | None = None
    """The model, once it is loaded."""
    loading: asyncio.Task[None] | None = None
    """The task that loads it; its exception says why it could not."""
    used: float = 0.0
    """The moment of its last use, on `time.monotonic`."""
    expires: float | None = None
    """Unix time at which it is unloaded if nobody asks; None: never."""
    timer: asyncio.TimerHandle | None = None


class ModelSlots:
    """The models of a server within its budget of bytes."""

    def __init__(self, opening: ModelLoader, on_open: Callable[[ParallelRunner], None]) -> None:
        """Hold no model yet. `on_open` is called with the runner of each one."""
        self._opening, self._on_open = opening, on_open
        self._places: dict[str, ModelSlot] = {}
        self._leaving: list[ModelSlot] = []
        """Places that no new request gets, until their last request has ended."""
        self._lock = asyncio.Lock()
        """Held while a model is loaded or unloaded."""
        self._left = asyncio.Event()
        """Set when a request has left its place."""

    def __iter__(self) -> Iterator[ModelSlot]:
        return (place for place in [*self._places.values(), *self._leaving] if place.opened)

    def get(self, name: str) -> ModelSlot | None:
        """Return the place of a model that is loaded or being loaded; None if it is neither."""
        place = self._places.get(name)
        has_failed = place and place.opened is None and place.loading and place.loading.done()
        return None if has_failed else place

    def take_in(self, opened: ServedModel) -> None:
        """Add a model that was loaded before the server runs."""
        self._places[opened.name] = ModelSlot(opened.name, opened=opened, used=time.monotonic())
        self._on_open(opened.runner)

    def enter(self, name: str) -> ModelSlot:
        """Return the place of a model, for a request that has to `leave` it.

        If the model is not loaded, its loading begins, once for all who wait for it.
        """
        place = self.get(name)
        if place is None:
            place = self._places[name] = ModelSlot(name)
            place.loading = asyncio.create_task(self._load(place))
            place.loading.add_done_callback(look_at)
        place.users += 1
        self._stop_timer(place)
        return place

    def leave(self, place: ModelSlot, keep_alive: float | None) -> None:
        """End the use of a place. `keep_alive`: seconds until it may go; None or less: for ever."""
        place.users -= 1
        place.used = time.monotonic()
        self._left.set()
        if place.users or keep_alive is None or keep_alive < 0:
            return
        place.expires = time.time() + keep_alive
        loop = asyncio.get_running_loop()
        place.timer = loop.call_later(keep_alive, self._expire, place)

    def give_up(self, place: ModelSlot) -> None:
        """Let no new request have a place whose model has failed."""
        if self._places.get(place.name) is place:
            del self._places[place.name]
            self._leaving.append(place)
            self._unload_soon(place)

    async def close(self) -> None:
        """Unload all models; what still runs there ends. What is being loaded is not waited for."""
        for place in self._places.values():
            if place.opened is None and place.loading is not None:
                place.loading.cancel()
        for place in list(self):
            self._stop_timer(place)
            await self._unload(place)

    async def _load(self, place: ModelSlot) -> None:
        async with self._lock:
            needed = await run_in_worker(self._opening.least, place.name)
            budget = await run_in_worker(self._opening.budget)
            while self._bytes() + needed > budget and (other := self._least_useful(place)):
                await self._make_leave(other)
            room = budget - self._bytes()
            opened = await run_in_worker(self._opening.load, place.name, room)
            try:
                self._on_open(opened.runner)
            except Exception:
                await asyncio.to_thread(opened.runner.close)
                raise
            place.opened, place.used = opened, time.monotonic()

    def _bytes(self) -> int:
        return sum(place.opened.bytes for place in self if place.opened)

    def _least_useful(self, wanted: ModelSlot) -> ModelSlot | None:
        """Return the place to give up first: an idle one that was used least recently."""
        others = [place for place in self if place is not wanted]
        return min(others, key=lambda place: (place.users > 0, place.used), default=None)

    async def _make_leave(self, place: ModelSlot) -> None:
        """Unload a model once its requests have ended. New ones load it again."""
        if self._places.get(place.name) is place:
            del self._places[place.name]
            self._leaving.append(place)
        while place.users:
            self._left.clear()
            await self._left.wait()
        await self._unload(place)

    async def _unload(self, place: ModelSlot) -> None:
        opened, place.opened, place.expires = place.opened, None, None
        if self._places.get(place.name) is place:
            del self._places[place.name]
        if place in self._leaving:
            self._leaving.remove(place)
        if opened is not None:
            logger.info("unloading %s", opened.name)
            await asyncio.to_thread(opened.runner.close)

    def _expire(self, place: ModelSlot) -> None:
        if not place.users and place.opened is not None:
            self.give_up(place)

    def _unload_soon(self, place: ModelSlot) -> None:
        async def unload() -> None:
            async with self._lock:
                if place.opened is not None:
                    await self._make_leave(place)

        task = asyncio.create_task(unload())
        task.add_done_callback(look_at)
        place.loading = task  # a task that nothing refers to may be dropped

    def _stop_timer(self, place: ModelSlot) -> None:
        if place.timer is not None:
            place.timer.cancel()
        place.timer, place.expires = None, None


def look_at(future: asyncio.Future[Any]) -> None:
    """Take the exception of a future, which those who wait for it raise: nobody may be left."""
    if not future.cancelled():
        future.exception()


def check_counts(asked: ServerRequest) -> None:
    """Raise ApiError for more messages, tools or stop strings than any conversation has."""
    stops = asked.options.get("stop") or ()
    for name, given, most in (
        ("stop", () if isinstance(stops, str) else stops, MOST_STOPS),
        ("messages", asked.messages, MOST_MESSAGES),
        ("tools", asked.tools, MOST_TOOLS),
    ):
        if len(given) > most:
            raise field_error(name, f"there are {len(given)}, and {most} are the most: send fewer")


def too_long(tokens: int, room: int, *, is_least: bool = False) -> ApiError:
    """Return the refusal of a prompt of `tokens` tokens where `room` is the most there is.

    `is_least`: it was not tokenized, because it has at least so many.

    Clients such as Claude Code and opencode shorten the conversation when an error has the words
    "prompt is too long".
    """
    count = f"at least {tokens}" if is_least else tokens
    return ApiError(
        400,
        f"the prompt is too long: it has {count} tokens, and the context has room for {room} with "
        "the answer: shorten it, or start the server with a longer --context or more --memory",
        code=TOO_LONG,
    )


def _stopping() -> ApiError:
    return ApiError(503, "the server is stopping", code="stopping", retry_after=SOON)


@dataclass(frozen=True)
class SubmittedRequest:
    """A request that was submitted."""

    made: BuiltPrompt
    handle: Handle
    record: PromptRecord
    """The request as it is compared with others to find the cause of a miss."""


def _begin(
    opened: ServedModel,
    asked: ServerRequest,
    models: ModelsAsked,
    on_prompt: Callable[[int], object],
) -> SubmittedRequest:
    """Make the prompt and submit it, in a worker thread. Raise ApiError, or the runner's."""
    try:
        made = opened.maker.make(asked, opened.room)
    except ContextLengthError as error:
        raise too_long(error.tokens, opened.room, is_least=error.is_least) from error
    options = {**opened.defaults, **made.options}
    tokens = len(made.prompt.tokens)
    if tokens >= opened.room:
        raise too_long(tokens, opened.room)
    on_prompt(tokens)
    if tokens + (options.get("max_tokens") or 0) > opened.room:
        options["max_tokens"] = None  # clients ask for more than there can be
    record = prompt_record(asked, made)
    record.is_switched = models.add(record, opened.name)
    client, rules = asked.client, tuple(made.rules)
    told = (rules, record, record.is_title, made.replaced)
    caller = Caller(asked.id, client.name, client.session, *told)
    handle = opened.runner.submit(replace(made.prompt, caller=caller), **options)
    return SubmittedRequest(made, handle, record)


def _end_unread(making: asyncio.Future[SubmittedRequest]) -> None:
    """End a request that was submitted after its client had left."""
    if not making.cancelled() and making.exception() is None:
        making.result().handle.cancel()


def prompt_record(asked: ServerRequest, made: BuiltPrompt) -> PromptRecord:
    """Return what is remembered of a request, to find the cause of later misses."""
    messages: Sequence[Mapping[str, Any]] = made.source
    digests = made.digests
    if "billing-header" in made.rules:
        messages = without_billing(messages)
        digests = tuple(map(message_digest, messages))
    tools = tuple(map(_tool_digest, asked.tools))
    written = () if "tool-keys" in made.rules else asked.tools
    variables = {name: one for name, one in made.prompt.variables.items() if name != "tools"}
    return PromptRecord(tools, digest(variables), messages, digests, written)


_tool_digest = MemoizedFunction(
    lambda tool: digest({name: tool[name] for name in tool if name != "cache_control"}),
    TOOL_DIGEST_BYTES,
)


class ModelsAsked:
    """The models that were asked last in the latest conversations. Any thread may use it."""

    def __init__(self) -> None:
        self._known = LRUCache[str](MODELS_ASKED_BYTES)

    def add(self, prompt: PromptRecord, model: str) -> bool:
        """Note that `model` is asked; return True if another one was asked the turn before.

        That is the longest request that this one begins with, and whose answer follows it.
        """
        key, before = b"", None
        for message, one in zip(prompt.messages, prompt.digests, strict=True):
            if message["role"] == "assistant":
                before = self._known.get(key) or before
            key = digest([key.hex(), one.hex()])
        self._known.put(key, model)
        return before is not None and before != model


async def _loaded(place: ModelSlot) -> ServedModel:
    """Wait until the model of a place is there. Raise what its loading raised."""
    if place.opened is None and place.loading is not None:
        await asyncio.wait({place.loading})
        if not place.loading.cancelled():
            place.loading.result()
    if place.opened is None:
        raise ClosedError("server")
    return place.opened


def _end(
    opened: ServedModel,
    asked: ServerRequest,
    begun: SubmittedRequest,
    chunks: Sequence[Chunk],
    splitter: AnswerSplitter,
) -> AnswerEnd:
    """Return the last event of an answer whose last chunk has come."""
    usage, reason = chunks[-1].usage, chunks[-1].finish_reason
    if usage is None:
        raise ApiError(500, "the answer ended without its usage", code="internal")
    stop: str | None = None
    ended: EndReason = "length" if reason == "length" else "stop"
    if splitter.calls:
        ended = "tool_calls"
    elif reason == "stop" and (stop := _stop_sequence(opened, asked, chunks)) is not None:
        ended = "stop_sequence"
    return AnswerEnd(
        ended,
        usage,
        begun.made.rules,
        begun.record.cause(begun.handle.account, usage),
        stop_sequence=stop,
        thinking_tokens=splitter.thinking_tokens,
        note=splitter.note,
        replaced=begun.made.replaced,
    )


def _stop_sequence(
    opened: ServedModel, asked: ServerRequest, chunks: Sequence[Chunk]
) -> str | None:
    """Return the stop string of the request that ended its answer; None if none did."""
    given = asked.options.get("stop") or ()
    tokens = [chunk.token for chunk in chunks if chunk.token is not None]
    if not given or tokens[-1] in opened.loaded.tokenizer.stop_tokens:
        return None
    stops = (given,) if isinstance(given, str) else tuple(given)
    text = opened.loaded.tokenizer.decode(tokens)
    found = [(text.index(stop), stop) for stop in stops if stop in text]
    return min(found)[1] if found else None


T = TypeVar("T")
FIRST_S, EVERY_S = 1.0, 4.5
"""Seconds of silence before the first beat, and between two of them: clients wait for 5."""
FAST_S, GATHERED_S = 0.008, 0.016
"""Seconds between the tokens of a fast stream, and seconds between two of its deliveries.

Each delivery wakes the event loop and the client, so fast tokens share one: a screen shows about 60
pictures a second. Slower tokens are delivered as soon as they come.
"""


class Heartbeat:
    """The moments at which a client that gets nothing else is told that it is not forgotten."""

    def __init__(self, first: float = FIRST_S, every: float = EVERY_S) -> None:
        self._every = every
        self._due = asyncio.get_running_loop().time() + first

    @property
    def left(self) -> float:
        """Seconds until the next beat."""
        return max(0.0, self._due - asyncio.get_running_loop().time())

    def begin_again(self) -> None:
        """Count the silence from now on."""
        self._due = asyncio.get_running_loop().time() + self._every

    async def until(self, work: Awaitable[T]) -> AsyncIterator[None]:
        """Yield at each beat until `work` is done. Closing the iterator leaves `work` running.

        Read the result, or the exception, from `work` afterwards.
        """
        future = asyncio.ensure_future(work)
        future.add_done_callback(look_at)
        while True:
            done, _ = await asyncio.wait({future}, timeout=self.left)
            if done:
                return
            self.begin_again()
            yield


class ChunkReader:
    """Reads the chunks of a request, so that a beat never disturbs it."""

    def __init__(self, handle: Handle, *, is_whole: bool = False) -> None:
        """Read the chunks of `handle`. `is_whole`: nobody wants any of them before the last."""
        self._handle, self._is_whole = handle, is_whole
        self._last, self._is_fast = float("-inf"), False

    async def next(self, seconds: float) -> list[Chunk]:
        """Return the chunks that have come, at least one; none after the last one.

        Those of a fast stream are gathered. Raise TimeoutError if none comes within `seconds`, and
        the error that ended the request.
        """
        if self._is_fast:
            await self._gather()
        if not await news_of(self._handle, seconds, at_end=self._is_whole):
            raise TimeoutError
        if self._since() < FAST_S:
            await self._gather()
        self._last = asyncio.get_running_loop().time()
        chunks = self._handle.poll()
        self._is_fast = len(chunks) > 1
        if not chunks and self._handle.error is not None:
            raise self._handle.error.with_traceback(None)
        return chunks

    async def _gather(self) -> None:
        """Wait until it is time for a delivery, or for the end."""
        if (early := GATHERED_S - self._since()) > 0:
            await news_of(self._handle, early, at_end=True)

    def _since(self) -> float:
        return asyncio.get_running_loop().time() - self._last

    def close(self) -> None:
        """End the request, and free its slot after the step that is running."""
        self._handle.cancel()
