"""The house of the models: answers, queue, loading on demand, and clients that leave."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.actor import playing
from support.models import write_model

from mlxrunner.config.serving import ServeSettings
from mlxrunner.errors import ClosedError, MemoryPlanError, OptionError
from mlxrunner.models.load import LoadProgress, tell_nobody
from mlxrunner.parallel.handle import Handle
from mlxrunner.parallel.threads.workers import has_work
from mlxrunner.profiling.report.explain import find
from mlxrunner.serve.answering import house as house_module
from mlxrunner.serve.answering import pace
from mlxrunner.serve.answering.house import House
from mlxrunner.serve.answering.names import ModelNames
from mlxrunner.serve.answering.opened import Opened, Opening
from mlxrunner.serve.asked import Asked, Client
from mlxrunner.serve.events import Ended, Event, Reading, RefusedError, Text, Waiting
from mlxrunner.serve.watch.record import Record
from mlxrunner.serve.watch.routes import explained

CHATML = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SETTINGS = ServeSettings(slots=2, max_queue=1, parks=False, memory=400_000_000)


class Counting(Opening):
    """An opening that counts, and needs as many bytes as a test says."""

    loads: list[str]
    needs: dict[str, int]

    def load(self, name: str, room: int, progress: LoadProgress = tell_nobody) -> Opened:
        self.loads.append(Path(name).name)
        found = super().load(name, min(room, 200_000_000), progress)
        return replace(found, bytes=self.needs.get(Path(name).name, 1))

    def least(self, name: str) -> int:
        super().least(name)
        return self.needs.get(Path(name).name, 1)

    def budget(self) -> int:
        return 400_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tiny models."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("first", "second", "third")):
        write_model(folder / name, seed=seed, tokenizer=False)
        from support.models import write_tokenizer

        write_tokenizer(folder / name, chat_template=CHATML)
    return folder


def opening(settings: ServeSettings = SETTINGS, **needs: int) -> Counting:
    found = Counting(settings=settings, runner={"context": 400})
    object.__setattr__(found, "loads", [])
    object.__setattr__(found, "needs", needs)
    return found


@asynccontextmanager
async def house_of(folder: Path, opening: Opening) -> AsyncIterator[House]:
    aliases = {name: str(folder / name) for name in ("second", "third")}
    async with open_house(ModelNames(str(folder / "first"), aliases), opening) as house:
        yield house


@asynccontextmanager
async def open_house(names: ModelNames, opening: Opening) -> AsyncIterator[House]:
    """Return a house with an opening of any kind, and close it."""
    house = House(names, opening, lambda opened: None)
    try:
        yield house
    finally:
        await house.close()


def asked(text: str = "Hello", **more: Any) -> Asked:
    more.setdefault("options", {"max_tokens": 4, "stop_tokens": []})
    given = {"protocol": "chat", "model": "", "messages": [{"role": "user", "content": text}]}
    return Asked(**{**given, **more})


async def events_of(house: House, one: Asked) -> list[Event]:
    return [event async for event in house.answer(one)]


async def reached(holds: Callable[[], object]) -> None:
    """Wait until a state is reached."""
    async with asyncio.timeout(300):
        while not holds():
            await asyncio.sleep(0.005)


def in_house(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_an_answer_and_the_next_turn(folder: Path) -> None:
    """The second request reuses the first one, and says so; both say what they cost."""

    async def run() -> None:
        async with house_of(folder, opening()) as house:
            first = (await events_of(house, asked()))[-1]
            again = await events_of(house, asked())
            assert isinstance(first, Ended)
            assert isinstance(again[-1], Ended)
            assert (first.reason, first.cache.outcome, first.cache.reason) == (
                "length",
                "miss",
                "empty",
            )
            assert again[-1].cache.cached == first.usage.prompt_tokens - 1
            assert [type(event) for event in again[:-1]] == [Text] * (len(again) - 1)
            count = await house.count(asked())
            assert count == first.usage.prompt_tokens

    in_house(run())


def test_the_cause_of_a_miss_is_named(folder: Path) -> None:
    """The report has its name and its remedy; a hit has none."""

    async def run() -> None:
        texts = ["Today is 2026-11-02. Be brief.", "Today is 2026-11-03. Be brief."]
        async with house_of(folder, opening()) as house:
            reports = []
            for text in (texts[0], texts[0], texts[1]):
                system = {"role": "system", "content": text}
                one = asked()
                one = replace(one, messages=[system, *one.messages])
                ended = (await events_of(house, one))[-1]
                assert isinstance(ended, Ended)
                reports.append(ended.cache)
        assert [report.cause for report in reports] == ["first-request", None, "changing-date"]
        assert "cause=changing-date" in reports[2].header
        assert "message 0" in str(reports[2].body["remedy"])
        assert [report.body["message"] for report in reports] == [None, None, 0]
        assert reports[2].header.endswith("cause=changing-date; message=0")

    in_house(run())


def test_two_requests_load_a_model_once(folder: Path) -> None:
    """They wait for the same loading; the event loop goes on meanwhile."""

    async def run() -> None:
        made = opening()
        async with house_of(folder, made) as house:
            ticks = 0

            async def tick() -> None:
                nonlocal ticks
                while True:
                    ticks += 1
                    await asyncio.sleep(0.001)

            ticking = asyncio.create_task(tick())
            both = [asyncio.create_task(events_of(house, asked())) for _ in range(2)]
            answers = await asyncio.gather(*both)
            ticking.cancel()
            assert made.loads == ["first"]
            assert ticks > 5
            assert all(isinstance(events[-1], Ended) for events in answers)

    in_house(run())


def test_beats_come_while_a_model_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client is told why it waits, and how far its prompt is."""
    monkeypatch.setattr(pace.Beats.__init__, "__defaults__", (0.0, 0.0))

    async def run() -> None:
        async with house_of(folder, opening()) as house:
            events = await events_of(house, asked("x" * 300))
            waits = [event.why for event in events if isinstance(event, Waiting)]
            assert "first is being loaded" in waits
            assert all(event.total > 300 for event in events if isinstance(event, Reading))
            assert isinstance(events[-1], Ended)

    in_house(run())


def test_a_queue_that_is_full(folder: Path) -> None:
    """The request beyond it is told when to come again; the others are answered."""

    async def run() -> None:
        async with house_of(folder, opening()) as house:
            running = [asyncio.create_task(events_of(house, asked(str(n)))) for n in range(3)]
            await asyncio.sleep(0)
            with pytest.raises(RefusedError) as refused:
                await events_of(house, asked())
            assert refused.value.status == 429
            assert refused.value.retry_after
            assert "1 requests wait for one of 2 slots, and 1 may" in refused.value.message
            for events in await asyncio.gather(*running):
                assert isinstance(events[-1], Ended)
            assert house.refused == 1

    in_house(run())


@pytest.mark.parametrize(
    ("one", "status", "words"),
    [
        (asked("x" * 500), 400, r"the prompt is too long: it has 5\d\d tokens, .* room for 400"),
        (asked(model="gpt-4"), 404, "there is no model gpt-4: .*first, second, third"),
        (asked(options={"temperature": -1}), 400, "temperature: -1 is out of range"),
        (asked(model="../first"), 404, "there is no model"),
        (asked(messages=[{"role": "user", "content": ""}] * 20_001), 400, "20000 are the most"),
        (asked(tools=[{}] * 2_001), 400, "tools: there are 2001, and 2000 are the most"),
    ],
    ids=["too long", "unknown", "option", "path", "messages", "tools"],
)
@pytest.mark.exhaustive(6)
def test_refusals(folder: Path, one: Asked, status: int, words: str) -> None:
    """They have a status and a sentence with both values, and leave the house as it was."""

    async def run() -> None:
        async with house_of(folder, opening()) as house:
            with pytest.raises(RefusedError, match=words) as refused:
                await events_of(house, one)
            assert refused.value.status == status
            assert isinstance((await events_of(house, asked()))[-1], Ended)

    in_house(run())


def test_more_tokens_asked_for_than_there_are(folder: Path) -> None:
    """Clients ask for 32,000 tokens of any model: the answer ends where the context does."""

    async def run() -> None:
        async with house_of(folder, opening()) as house:
            one = asked(options={"max_tokens": 32_000, "stop_tokens": []})
            ended = (await events_of(house, one))[-1]
            assert isinstance(ended, Ended)
            assert ended.reason == "length"
            assert ended.usage.total_tokens == 400

    in_house(run())


@pytest.mark.parametrize("way", ["closed", "cancelled"])
def test_a_client_that_leaves(folder: Path, way: str) -> None:
    """Its slot is free after the step that runs, and what it had evaluated is reused."""

    async def run() -> None:
        async with house_of(folder, opening()) as house:
            endless = asked("x" * 100, options={"stop_tokens": []})
            await events_of(house, asked())
            place = house.models_held.get(str(folder / "first"))
            assert place is not None
            assert place.opened is not None
            runner = place.opened.runner
            if way == "closed":
                answer = house.answer(endless)
                async for event in answer:
                    if isinstance(event, Text):
                        break
                await answer.aclose()
            else:
                seen = list[Event]()

                async def read() -> None:
                    async for event in house.answer(endless):
                        seen.append(event)

                task = asyncio.create_task(read())
                await reached(lambda: any(isinstance(event, Text) for event in seen))
                task.cancel()
                await asyncio.wait({task})
            steps = runner.stats().steps
            await reached(lambda: not runner.stats().busy)
            assert runner.stats().steps <= steps + 2
            assert place.users == 0
            ended = (await events_of(house, asked("x" * 100)))[-1]
            assert isinstance(ended, Ended)
            assert ended.cache.cached > 100

    in_house(run())


def test_what_a_client_saw_before_it_left_is_kept() -> None:
    """The prompt of its next request has the tokens that were generated, up to there."""

    async def run() -> None:
        endless = playing(lambda text: "Word " * 500)
        opening = endless(settings=SETTINGS, runner={"context": 4000})
        async with open_house(ModelNames("actor", {}), opening) as house:
            answer, seen = house.answer(asked(options={})), ""
            async with aclosing(answer):
                async for event in answer:
                    seen += event.text if isinstance(event, Text) else ""
                    if len(seen) > 20:
                        break
            place = house.models_held.get("actor")
            assert place is not None
            assert place.opened is not None
            maker = place.opened.maker
            await reached(lambda: len(maker.kept))
            sent = [
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": seen},
                {"role": "user", "content": "Go on"},
            ]
            made = maker.make(asked(messages=sent))
            assert made.kept == 1
            assert made.prompt.text == made.rendered

    in_house(run())


def test_a_client_that_leaves_while_its_prompt_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal that nobody is left to read is no error of the server's."""
    makes, may_refuse, complaints = threading.Event(), threading.Event(), list[Any]()

    def refuse(opened: Any, asked: Any, causes: Any) -> Any:
        makes.set()
        may_refuse.wait()
        raise RefusedError(400, "the prompt is too long")

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: complaints.append(context)
        )
        async with house_of(folder, opening()) as house:
            await events_of(house, asked())
            monkeypatch.setattr("mlxrunner.serve.answering.house._begin", refuse)
            task = asyncio.create_task(events_of(house, asked()))
            await reached(makes.is_set)
            task.cancel()
            await asyncio.wait({task})
            others = asyncio.all_tasks() - {asyncio.current_task()}
            may_refuse.set()
            await asyncio.wait(others)
            del task, others
            gc.collect()

    in_house(run())
    assert complaints == []


def test_a_client_that_leaves_while_its_request_is_submitted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads its answer, so it ends."""
    begun, may_return = list[Any](), threading.Event()
    begin = house_module._begin

    def begin_slowly(*given: Any) -> Any:
        begun.append(begin(*given))
        may_return.wait()
        return begun[0]

    async def run() -> None:
        async with house_of(folder, opening()) as house:
            await events_of(house, asked())
            monkeypatch.setattr(house_module, "_begin", begin_slowly)
            task = asyncio.create_task(events_of(house, asked(options={"stop_tokens": []})))
            await reached(lambda: begun)
            task.cancel()
            await asyncio.wait({task})
            cancelled = list[Any]()
            monkeypatch.setattr(Handle, "cancel", lambda handle: cancelled.append(handle))
            may_return.set()
            await reached(lambda: cancelled)
            assert cancelled == [begun[0].handle]

    in_house(run())


def test_another_model_makes_the_least_useful_one_leave(folder: Path) -> None:
    """The one that was used least recently goes; a model in use stays until its answer is there."""
    half = 180_000_000

    async def run() -> None:
        made = opening(first=half, second=half, third=half)
        async with house_of(folder, made) as house:
            await events_of(house, asked())
            await events_of(house, asked(model="second"))
            await events_of(house, asked())
            assert made.loads == ["first", "second"]
            await events_of(house, asked(model="third"))
            held = [Path(place.name).name for place in house.models_held]
            assert held == ["first", "third"]
            answer = house.answer(asked(options={"max_tokens": 300, "stop_tokens": []}))
            await anext(answer)
            later = asyncio.create_task(events_of(house, asked(model="second")))
            rest = [event async for event in answer]
            assert isinstance(rest[-1], Ended)
            assert rest[-1].usage.completion_tokens == 300
            assert isinstance((await later)[-1], Ended)

    in_house(run())


def test_a_model_that_does_not_fit(folder: Path) -> None:
    """It is refused with a reason, and asking again tries again."""

    async def run() -> None:
        settings = ServeSettings(slots=2, parks=False, memory=1000)
        made = Opening(settings=settings)
        async with house_of(folder, made) as house:
            for _ in range(2):
                with pytest.raises(RefusedError, match="give more --memory") as refused:
                    await events_of(house, asked())
                assert refused.value.status == 503

    in_house(run())


class Stuck(Counting):
    """An opening whose models take until a test lets them in."""

    may_load: threading.Event
    ended: threading.Event

    def load(self, name: str, room: int, progress: LoadProgress = tell_nobody) -> Opened:
        self.loads.append(Path(name).name)
        self.may_load.wait()
        self.ended.set()
        raise MemoryPlanError("too late")


def test_a_stop_does_not_wait_for_a_model_that_is_loaded(folder: Path) -> None:
    """The request that waits for it is told so; another one that runs ends with its model."""

    async def run() -> None:
        made = Stuck(settings=SETTINGS)
        for name, value in {"loads": [], "needs": {}}.items():
            object.__setattr__(made, name, value)
        for name in ("may_load", "ended"):
            object.__setattr__(made, name, threading.Event())
        async with house_of(folder, made) as house:
            waiting = asyncio.create_task(events_of(house, asked()))
            await reached(lambda: made.loads)
            await house.close()
            assert not made.ended.is_set()
            assert has_work()
            done, _ = await asyncio.wait({waiting})
            error = done.pop().exception()
            assert isinstance(error, RefusedError)
            assert (error.status, error.code) == (503, "stopping")
            made.may_load.set()
            await reached(lambda: not has_work())

    in_house(run())


def test_a_model_that_can_not_be_watched(folder: Path) -> None:
    """It is refused with the reason and not held; the next request tries again."""
    opened_ones = list[Opened]()

    def refuse(opened: Opened) -> None:
        opened_ones.append(opened)
        if len(opened_ones) == 1:
            raise OptionError("events: the disk is full")

    async def run() -> None:
        house = House(ModelNames(str(folder / "first")), opening(), refuse)
        with pytest.raises(RefusedError, match="the disk is full"):
            await events_of(house, asked())
        assert list(house.models_held) == []
        with pytest.raises(ClosedError):
            opened_ones[0].runner.submit("x")
        await house.hold("first", 0)  # is not there, so nothing is loaded to be unloaded
        assert len(opened_ones) == 1
        assert isinstance((await events_of(house, asked()))[-1], Ended)
        await house.close()

    in_house(run())


def test_a_model_that_is_loaded_again_is_recorded_once(folder: Path, tmp_path: Path) -> None:
    """The files of its first time are closed, and both times are in the record."""
    record = Record(tmp_path / "events.jsonl")

    async def run() -> None:
        house = House(ModelNames(str(folder / "first")), opening(), record.watch)
        for number in range(3):
            await events_of(house, asked(id=f"msg_{number}", keep_alive=0))
            await reached(lambda: not list(house.models_held))
        await house.close()

    in_house(run())
    assert len(record._profiles) == 1
    assert [record.event(f"msg_{number}") is None for number in range(3)] == [False] * 3
    record.close()
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 3


def test_keep_alive(folder: Path) -> None:
    """0 unloads a model after its answer; a negative number keeps it, and so does None."""

    async def run() -> None:
        async with house_of(folder, opening()) as house:
            await events_of(house, asked(keep_alive=0))
            await reached(lambda: not list(house.models_held))
            await house.hold("first", 1000)
            card = next(iter(house.models()))
            assert card.is_loaded
            assert card.expires is not None
            await events_of(house, asked(keep_alive=-1))
            assert next(iter(house.models())).expires is None
            await house.hold("first", 0)
            await reached(lambda: not list(house.models_held))

    in_house(run())


def test_stop_strings(folder: Path) -> None:
    """The end names the string that ended the answer."""

    async def run() -> None:
        async with house_of(folder, opening()) as house:
            long = asked(options={"max_tokens": 30, "stop_tokens": []})
            text = "".join(
                event.text for event in await events_of(house, long) if isinstance(event, Text)
            )
            stop = next(one for one in text[3:] if one.isascii())
            one = asked(options={"max_tokens": 30, "stop": [stop, "never"], "stop_tokens": []})
            ended = (await events_of(house, one))[-1]
            assert isinstance(ended, Ended)
            assert (ended.reason, ended.stop_sequence) == ("stop_sequence", stop)

    in_house(run())


def test_a_house_that_is_closed(folder: Path) -> None:
    """It takes no request, and running ones end with a reason."""

    async def run() -> None:
        async with house_of(folder, opening()) as house:
            await events_of(house, asked())
            running = asyncio.create_task(
                events_of(house, asked(options={"stop_tokens": [], "max_tokens": 390}))
            )
            place = house.models_held.get(str(folder / "first"))
            assert place is not None
            assert place.opened is not None
            runner = place.opened.runner
            await reached(lambda: runner.stats().busy)
            await house.close()
            with pytest.raises(RefusedError, match="stopping"):
                await events_of(house, asked())
            done, _ = await asyncio.wait({running})
            error = done.pop().exception()
            assert error is None or (isinstance(error, RefusedError) and error.status == 503)

    in_house(run())


def test_the_client_is_named(folder: Path) -> None:
    """The event of a request names client, session and request."""
    seen: list[Any] = []

    async def run() -> None:
        made = opening()
        house = House(
            ModelNames(str(folder / "first")),
            made,
            lambda opened: opened.runner.observers.append(lambda _, it: seen.append(it)),
        )
        client = Client("claude-cli", "a session")
        await events_of(house, asked(id="msg_1", client=client))
        await house.close()

    in_house(run())
    caller = seen[0].prepared.caller
    assert (caller.request, caller.client, caller.session) == ("msg_1", "claude-cli", "a session")


def test_the_cause_of_a_miss(folder: Path, tmp_path: Path) -> None:
    """The response, the event and its explanation name the same cause, message and remedy."""
    record = Record(tmp_path / "events.jsonl")

    async def run() -> Ended:
        house = House(ModelNames(str(folder / "first")), opening(), record.watch)
        for day in (21, 22):
            messages = [
                {"role": "system", "content": f"Today is 2026-11-{day}. " + "Be brief. " * 9},
                {"role": "user", "content": "Hello"},
            ]
            ended = (await events_of(house, asked(messages=messages, id=f"msg_{day}")))[-1]
            assert isinstance(ended, Ended)
        await house.close()
        return ended

    report = asyncio.run(run()).cache
    record.close()
    assert (report.cause, report.outcome) == ("changing-date", "partial")
    event = find([tmp_path / "events.jsonl"], "msg_22")
    assert event.caller is not None
    assert (event.caller.cause, event.caller.remedy, event.caller.message) == (
        report.cause,
        report.remedy,
        0,
    )
    known = record.event("msg_22")
    assert known is not None
    said = " ".join(explained(known).split())
    assert "cause: changing-date in message 0" in said
    assert f"What to change: {report.remedy}" in said
