"""The ParallelRunner: many requests at once on one model, from any thread and from asyncio.

A thread of its own owns the model. Requests are tokenized in the thread that submits them.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import mlx.core as mx

from mlxrunner.cache.account import PromptAccount
from mlxrunner.config.option import check_flag, check_number, warn_of_renamed, with_current_names
from mlxrunner.engine.engine import Engine, MultiRequestRunner
from mlxrunner.engine.opening import seeing
from mlxrunner.engine.request import Observer
from mlxrunner.engine.scheduling.allocation import WORTH_WAITING
from mlxrunner.engine.thread import SLICE_S, EngineThread, Feed, HeldSlot, Stats
from mlxrunner.errors import MlxrunnerError
from mlxrunner.memory.plan import Plan
from mlxrunner.models.facts import ModelFacts
from mlxrunner.models.load import LoadedModel, LoadProgress, load_model, tell_nobody
from mlxrunner.models.resolve import name_of
from mlxrunner.options import (
    EngineKwargs,
    EngineSettings,
    GenerateOptions,
    OpenKwargs,
    OpenSettings,
    SubmitKwargs,
)
from mlxrunner.results import Chunk, Result
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.prompt import Prompt, check_length, room_of, shift_of, tokenize_prompt

if TYPE_CHECKING:
    from asyncio import Future

    from mlxrunner.cache.disk.disk_cache import DiskCache


class ParallelRunner(MultiRequestRunner):
    """A runner of up to `max_sequences` requests at once, of up to `context` tokens each.

    Any thread and any asyncio task may call it. A thread of the runner owns the model: use the
    model nowhere else while the runner is open. Requests that find no slot, or no room, wait: by
    priority, then by deadline, then by arrival. Use the runner as a context manager, or call
    `close`; then calls raise ClosedError.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        facts: ModelFacts,
        *,
        max_sequences: int,
        parking: DiskCache | None = None,
        name: str = "",
        **settings: Unpack[EngineKwargs],
    ) -> None:
        """Make a runner from loaded parts; `ParallelRunner.load` is the usual way.

        The settings are those of EngineSettings. `context` is the most tokens of one prompt and its
        answer. `parking`: where conversations go that are given up; None: they are lost. Raise
        OptionError for numbers that are out of range.
        """
        _evaluate(model)
        parts = model, tokenizer, facts
        chosen = {"max_step_ms": None, **with_current_names(EngineSettings, settings)}
        self._start(
            lambda: Engine(
                *parts, max_sequences=max_sequences, parking=parking, name=name, **chosen
            )
        )

    @classmethod
    def load(
        cls,
        model: str | PathLike[str] = "demo",
        *,
        max_sequences: int,
        trust_remote_code: bool = False,
        pictures: bool = False,
        progress: LoadProgress = tell_nobody,
        **settings: Unpack[OpenKwargs],
    ) -> Self:
        """Load "demo", a model directory or a hub id, and make a runner as `of` does.

        `pictures` and `progress`: see `Runner.load`; the runner's thread calls `progress`. Raise
        ModelError, which names the missing or broken file, and the errors of `of`.
        """
        check_flag("trust_remote_code", trust_remote_code)
        chosen = {"max_step_ms": None, **with_current_names(OpenSettings, settings)}
        return cls._started(
            lambda: Engine.load(
                name_of(model),
                max_sequences=max_sequences,
                trust_remote_code=trust_remote_code,
                pictures=pictures,
                progress=progress,
                **chosen,
            )
        )

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        *,
        max_sequences: int,
        progress: LoadProgress = tell_nobody,
        **settings: Unpack[OpenKwargs],
    ) -> Self:
        """Make a runner for a loaded model. The settings are those of OpenSettings.

        With `reserve` (the default) the runner allocates all cells now and runs the largest step
        once. Without `kv_cache_tokens` there are as many as fit into `cache_memory` bytes, or with
        `reserve` into what the plan leaves, and at most `max_sequences * context`. Raise
        MemoryPlanError, before anything is allocated, if the plan does not fit, and SessionError
        if the folder for parking can't be used.
        """
        _evaluate(loaded.model)
        chosen = {"max_step_ms": None, **with_current_names(OpenSettings, settings)}
        return cls._started(
            lambda: Engine.of(loaded, max_sequences=max_sequences, progress=progress, **chosen)
        )

    @classmethod
    def _started(cls, open_stepper: Callable[[], Engine]) -> Self:
        runner = cls.__new__(cls)
        runner._start(open_stepper)
        return runner

    def _start(self, open_stepper: Callable[[], Engine]) -> None:
        """Open the stepper in a thread of its own, and take over what callers may know of it."""
        self._thread = thread = EngineThread(open_stepper)
        self._finalizer = weakref.finalize(self, thread.stop)
        self._finalizer.atexit = False  # threads end before the interpreter in their own way
        self._stepper = stepper = thread.stepper
        self.context, self.kv_cache_tokens = stepper.context, stepper.kv_cache_tokens
        self.prefill_step, self.name = stepper.prefill_step, stepper.name
        self.model, self.tokenizer, self.facts = stepper.model, stepper.tokenizer, stepper.facts
        self.plan: Plan | None = stepper.plan
        """The memory plan, if the model was loaded with `reserve`."""
        self.suggested_options: dict[str, Any] = stepper.suggested_options
        """The sampling that the model suggests: see `Runner.suggested_options`."""
        self.draft_bytes = stepper.draft_bytes
        """Bytes of its draft model with all that it may store."""
        self.observers: list[Observer] = stepper.observers
        """Functions that the runner's thread calls with every ended request.

        They may submit and cancel requests; a call that waits raises BusyError. See
        `mlxrunner.profiling`.
        """
        stepper.shown_as = weakref.ref(self)

    @property
    def num_slots(self) -> int:
        return self._stepper.num_slots

    @property
    def why_alone(self) -> str | None:
        """Why a step carries one request only, with this model; None if it may carry several."""
        return self._stepper.why_alone

    @property
    def cells(self) -> int:
        """The former name of `kv_cache_tokens`."""
        warn_of_renamed("cells", "kv_cache_tokens", level=3)
        return self.kv_cache_tokens

    @property
    def settings(self) -> dict[str, Any]:
        """The options that decide what is stored."""
        return self._stepper.settings

    @property
    def parked_in(self) -> Path | None:
        """The folder of parked conversations; None: they are lost."""
        return self._stepper.parked_in

    @property
    def keeps_parked(self) -> bool:
        """True if `parked_in` is found again after a restart. Else it goes with this process."""
        return self._stepper.keeps_parked

    def __repr__(self) -> str:
        if self._thread.is_closed:
            return f"ParallelRunner({self.name!r}, closed)"
        stats = self.stats()
        busy = f"{stats.busy} of {stats.slots} slots busy"
        return f"ParallelRunner({self.name!r}, context={self.context}, {busy})"

    def close(self) -> None:
        """End all requests with a ClosedError, free the cells, and restore the model.

        Wait for the step that is running. A second call is allowed, also after an interrupt, and
        from any thread. A runner that is dropped, or still open when the program ends, is closed.
        """
        self._thread.may_wait("close")
        self._thread.stop()
        self._thread.join()
        self.model = None

    def stats(self) -> Stats:
        """Return how many requests run and wait, and what the slots hold. It never waits."""
        return self._thread.counted()

    def held(self) -> list[HeldSlot]:
        """Return what each slot holds at the moment. It never waits."""
        return self._thread.held()

    def submit(self, prompt: Prompt, **options: Unpack[SubmitKwargs]) -> Handle:
        """Begin a request. Prompt and options are those of `Runner.generate`, without callbacks.

        The prompt is tokenized, and a schema compiled, before this returns. Without a free slot, or
        room, the request waits; its times are counted from the moment at which it begins. Raise the
        errors of `Runner.generate`, and CacheFullError if the request can never find room.
        """
        return self._submit(prompt, dict(options))

    async def stream(self, prompt: Prompt, **options: Unpack[SubmitKwargs]) -> AsyncIterator[Chunk]:
        """Yield the chunks of a request in asyncio. The arguments and errors are those of `submit`.

        The prompt is tokenized in a worker thread, so that the event loop continues. The request is
        cancelled when the iterator is closed, and when the task is cancelled.
        """
        import asyncio

        with await asyncio.to_thread(self._submit, prompt, dict(options)) as handle:
            async for chunk in handle:
                yield chunk

    def _enqueue(self, prompt: Prompt, options: dict[str, Any]) -> Handle:
        return self._submit(prompt, options, is_whole=True)

    def _submit(self, prompt: Prompt, options: dict[str, Any], *, is_whole: bool = False) -> Handle:
        self._thread.check()
        request = self._stepper.prepare(prompt, options)
        return Handle(self._thread, self._thread.submit(request, is_whole=is_whole), self)


def _evaluate(model: Any) -> None:
    """Evaluate all arrays of a model in the thread that made it: no other thread could."""
    if hasattr(model, "modules"):
        modules = model.modules()
        # Encoders of pictures keep tables in objects that are not modules.
        plain = [
            vars(value)
            for module in modules
            for value in vars(module).values()
            if hasattr(value, "__dict__") and not isinstance(value, type | Mapping)
        ]
        mx.eval(
            [
                value
                for held in (*modules, *plain)
                for value in held.values()
                if isinstance(value, mx.array)
            ]
        )


DEFAULT_MAX_TOKENS = 1024
"""Tokens of each answer without a limit. Its room has to be known before the first token."""


@dataclass(frozen=True)
class Failed:
    """An answer that an error has ended, with its text up to the error."""

    text: str
    tokens: list[int]
    error: MlxrunnerError


def sample(
    model: str,
    prompt: Prompt,
    count: int,
    *,
    parallel: int,
    loading: Mapping[str, Any],
    watch: Callable[[Any], object] = lambda runner: None,
    **options: Any,
) -> Iterator[Result | Failed]:
    """Yield `count` answers to one prompt, at most `parallel` at a time.

    One that fails does not end the others. Their seeds are `seed`, `seed + 1` ... A model that
    can't run several in a step computes them one by one. `loading`: options of `Engine.load`, of
    which `context` is the tokens of the prompt and one answer; None: the model's own. `watch` is
    called with the runner before its first request. Raise ContextLengthError if the prompt fills
    the context, unless it is shifted.
    """
    settings, several = dict(loading), min(parallel, count)
    brings_code = settings.pop("trust_remote_code", False)
    if settings.pop("pictures", False):
        asked = OpenSettings.of(max_sequences=several, **settings)
        loaded = seeing(model, asked, trust_remote_code=brings_code)
    else:
        loaded = load_model(model, trust_remote_code=brings_code)
    seed = options.pop("seed", None)
    each = [options | {"seed": None if seed is None else seed + i} for i in range(count)]
    yield from _together(
        loaded,
        prompt,
        each,
        several,
        settings.pop("context", None) or loaded.facts.context,
        watch,
        settings,
    )


def _together(
    loaded: LoadedModel,
    prompt: Prompt,
    each: list[dict[str, Any]],
    parallel: int,
    context: int,
    watch: Callable[[Any], object],
    settings: dict[str, Any],
) -> Iterator[Result | Failed]:
    options = GenerateOptions.of(**each[0])
    room = room_of(options, context)
    tokenized = tokenize_prompt(
        loaded.tokenizer, prompt, options.variables, room, options.continue_final_message
    )
    length, most = len(tokenized.tokens), options.max_tokens or min(DEFAULT_MAX_TOKENS, context)
    if shift_of(options, loaded.tokenizer, tokenized, context) is None:
        check_length(tokenized.tokens, context)
    shifts = options.overflow == "shift" and length + most > context
    overflow = "stop" if options.overflow == "shift" and not shifts else options.overflow
    context = min(context, length + most)
    # A request that shifts copies its shared tokens.
    cells = None if shifts else length + parallel * (context - length + WORTH_WAITING)
    with Engine.of(
        loaded, max_sequences=parallel, context=context, kv_cache_tokens=cells, **settings
    ) as runner:
        watch(runner)
        own = {"max_tokens": most, "overflow": overflow}
        with closing(runner._run_handles((prompt, one | own) for one in each)) as handles:
            yield from map(_whole, handles)


def _whole(chunks: Iterable[Chunk]) -> Result | Failed:
    """Read an answer to its end, or to the error that ends it."""
    read: list[Chunk] = []
    try:
        read.extend(chunks)
    except MlxrunnerError as error:
        tokens = [chunk.token for chunk in read if chunk.token is not None]
        return Failed("".join(chunk.text for chunk in read), tokens, error)
    return Result.of(read)


T = TypeVar("T")


class Handle:
    """The growing answer of a request.

    Iterate it, with `for` or `async for`, for its chunks, or take the whole `result`. All members
    may be called in any thread. Each chunk goes to one reader. Threads and tasks may take turns;
    one that reads while another waits for a chunk gets a BusyError.

    A request pauses, while others run, where nobody has read its last 4,096 chunks. A handle that
    is dropped cancels its request, and so does the end of a `with` block.
    """

    def __init__(self, thread: EngineThread, feed: Feed, keeps: object) -> None:
        """Make the handle of `feed`. `keeps` lives as long as the handle."""
        self._thread, self._feed, self._keeps = thread, feed, keeps
        self._result: Result | None = None

    def __del__(self) -> None:
        feed = getattr(self, "_feed", None)  # None: Ctrl-C came before it was there
        if feed is not None and not feed.is_ended:
            self._thread.drop(feed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        """Wait for the next chunk. Behind the last one, raise the error that ended the request."""
        return self._alone(self._next)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        """Wait for the next chunk. Cancelling the task that waits cancels the request."""
        is_mine = False
        try:
            is_mine = self._feed.begin_to_read()
            while (chunk := self._took_async()) is None:
                await self._news()
            return chunk
        finally:
            if is_mine:
                self._feed.is_read = False

    @property
    def error(self) -> MlxrunnerError | None:
        """The error that ended the request, or None."""
        return self._feed.error

    @property
    def finished(self) -> bool:
        """True once the last chunk is ready, or will never come."""
        return self._feed.is_ended

    @property
    def reached(self) -> int:
        """Number of the prompt's tokens that are evaluated or reused so far."""
        request = self._feed.request
        return min(request.place, len(request.tokens))

    @property
    def account(self) -> PromptAccount:
        """The account of the prompt's tokens, once the request has ended."""
        return self._feed.request.account

    def poll(self) -> list[Chunk]:
        """Return the chunks that are ready, without waiting."""
        chunks = self._alone(self._feed.take_all)
        self._has_read()
        return chunks

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the request has ended, for at most `timeout` seconds; return True if it has.

        Meanwhile the request does not pause, even if nobody reads.
        """
        if timeout is not None:
            check_number("timeout", timeout)
        with self._feed.wanted_whole():
            self._has_read()
            return wait_for_news([self], timeout, at_end=True)

    def result(self) -> Result:
        """Wait for the end and return the result, or raise the error that ended the request.

        Chunks that were read before are not in it. Raise CancelledError if the request was
        cancelled.
        """
        return self._alone(self._whole)

    def cancel(self) -> None:
        """End the request: readers see the end at once, and its slot is free after the next step.

        Its evaluated tokens can be reused. A second call is allowed, also after the end.
        """
        if not self._feed.is_ended:
            self._thread.cancel(self._feed)

    def _alone(self, read: Callable[[], T]) -> T:
        """Return what `read` returns. Raise BusyError if somebody else is reading."""
        is_mine = False
        try:
            is_mine = self._feed.begin_to_read()
            return read()
        finally:
            if is_mine:
                self._feed.is_read = False

    def _next(self) -> Chunk:
        while (chunk := self._feed.take()) is None:
            wait_for_news([self])
        self._has_read()
        return chunk

    def _took_async(self) -> Chunk | None:
        try:
            chunk = self._feed.take()
        except StopIteration:
            raise StopAsyncIteration from None
        self._has_read()
        return chunk

    def _whole(self) -> Result:
        if self._result is None:
            self.wait()
            self._feed.check()
            self._result = Result.of(self._feed.take_all())
        return self._result

    def _has_read(self) -> None:
        """Let the request continue if it pauses and somebody has read enough."""
        if self._feed.request.is_paused and not self._feed.is_full:
            self._thread.wake()

    async def _news(self) -> None:
        """Wait in the event loop until there are chunks, or the end."""
        import asyncio

        self._thread.may_wait("async for")
        try:
            await news_of(self, None)
        except asyncio.CancelledError:
            self.cancel()
            raise


def wait_for_news(
    handles: Sequence[Handle], timeout: float | None = None, *, at_end: bool = False
) -> bool:
    """Wait until one of the handles has chunks, or the end, for at most `timeout` seconds.

    Return False if the time is over. `at_end`: wait only for an end.
    """
    until = math.inf if timeout is None else time.monotonic() + timeout
    mail: SimpleQueue[None] = SimpleQueue()
    wake = partial(mail.put, None)
    try:
        while not any(handle._feed.await_news(wake, at_end=at_end) for handle in handles):
            left = until - time.monotonic()
            if not left > 0:  # NaN is not a time
                return False
            handles[0]._thread.may_wait("waiting for a request")
            with suppress(Empty):
                mail.get(timeout=min(left, SLICE_S))
    finally:
        for handle in handles:
            handle._feed.forget(wake)
    return True


async def news_of(handle: Handle, seconds: float | None, *, at_end: bool = False) -> bool:
    """Wait in the event loop until `handle` has chunks, or the end, for at most `seconds`.

    None: as long as it takes. Return False if the time is over. Nothing is read. `at_end`: wait
    only for the end, and let the request not pause meanwhile. Cancelling the task that waits leaves
    the request running.
    """
    import asyncio

    loop, feed = asyncio.get_running_loop(), handle._feed
    news: Future[bool] = loop.create_future()
    wake = partial(_wake_loop, news)
    with feed.wanted_whole() if at_end else nullcontext():
        handle._has_read()
        if feed.await_news(wake, at_end=at_end):
            return True
        timer = None if seconds is None else loop.call_later(seconds, _settle, news, False)
        try:
            return await news
        finally:
            if timer is not None:
                timer.cancel()
            feed.forget(wake)


def _wake_loop(news: Future[bool]) -> None:
    """Let the task that awaits `news` continue. Its event loop may be closed by now."""
    try:
        news.get_loop().call_soon_threadsafe(_settle, news)
    except RuntimeError:
        return


def _settle(news: Future[bool], has_come: bool = True) -> None:
    if not news.done():
        news.set_result(has_come)
