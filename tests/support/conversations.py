"""Requests of many agents and chats to one runner, made up from a seed, and scaled down.

Each client has a header that all its conversations share: the tools and the system prompt. Its
conversations grow turn by turn, with the runner's own answers in them. Clients edit earlier
messages, ask again, strip the thinking of earlier answers, ask for titles in requests of their own,
compact what has become too long, and start four subagents at once over one trunk.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from support.engine import Engine
from support.engine import EngineHandle as Handle

from mlxrunner.engine.request import Observation
from mlxrunner.errors import CacheFullError, NoFreeSlotError

BOS, END, SYSTEM, USER, ASSISTANT = 256, 257, 260, 261, 262
"""`END` is the end mark of `ByteTokenizer`; the others begin a message."""
Tokens = list[int]
SUBAGENTS = 4
ROOM = 0.8
"""The share of the context from which on a client compacts its conversation."""
MOST = 9
"""The most tokens of an answer."""
SUMMARY = 20
"""Tokens that the question for a summary takes at most, with the marks of two messages before."""


@dataclass(frozen=True)
class Client:
    """A kind of client. Lengths are in tokens, at scale 1."""

    name: str
    header: int
    """The tokens with which all its conversations begin."""
    own: int
    """The tokens about its project and its user."""
    turn: tuple[int, int]
    """The least and the most tokens of a message or a tool's result."""
    burst: int
    """The most requests that it sends without a pause."""
    weights: tuple[float, float, float, float]
    """The weights of four turns: continue, edit an earlier one, ask again, start four subagents."""
    has_title: bool = False
    """True if a request of its own asks for a title, before the first answer."""
    thinks: bool = False
    """True if earlier answers come back without the first half, which was thinking."""


CLIENTS = (
    Client("agent with subagents", 240, 16, (12, 60), 8, (20, 1, 1, 1)),
    Client("agent", 140, 12, (12, 60), 8, (20, 1, 1, 0)),
    Client("agent with titles", 100, 12, (8, 50), 6, (20, 1, 1, 0), has_title=True),
    Client("chat", 20, 0, (6, 40), 2, (8, 2, 2, 0), has_title=True),
    Client("chat with thinking", 20, 4, (6, 40), 2, (8, 1, 1, 0), thinks=True),
    Client("bare chat", 1, 0, (6, 40), 2, (8, 2, 1, 0)),
)


@dataclass(eq=False)
class Ask:
    """A request of a conversation."""

    conversation: int
    prompt: Tokens
    max_tokens: int
    answer: Tokens | None = None
    """The tokens of the answer; None before it has ended."""


Script = Generator[list[Ask], None, None]


class Trace:
    """The requests of many conversations, in an order of their own.

    `next` gives the first request of the order that can begin now: a conversation asks only when
    its answer is there. The same seed gives the same requests, if the same prompts are answered
    alike and each answer has as many tokens as it may.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        conversations: int = 40,
        requests: int = 1000,
        context: int = 1024,
        scale: float = 1.0,
    ) -> None:
        self._make: dict[str, Any] = {"seed": seed, "context": context, "scale": scale}
        self.conversations, self.requests = conversations, requests
        self._order = deque(self._ordered(random.Random(seed), requests))
        self._scripts = [self._script(number) for number in range(conversations)]
        self._asked: list[list[Ask]] = [[] for _ in range(conversations)]
        self._ready: deque[Ask] = deque()

    def next(self) -> Ask | None:
        """Return the next request that can begin; None if all have to wait for answers."""
        if not self._ready:
            for place, number in enumerate(self._order):
                if all(ask.answer is not None for ask in self._asked[number]):
                    del self._order[place]
                    self._asked[number] = next(self._scripts[number])
                    self._ready.extend(self._asked[number])
                    break
        return self._ready.popleft() if self._ready else None

    def put_back(self, ask: Ask) -> None:
        """Make `next` return a request again that could not begin."""
        self._ready.appendleft(ask)

    @property
    def is_over(self) -> bool:
        """True if every request has been given out."""
        return not self._order and not self._ready

    def _script(self, number: int) -> Script:
        client = CLIENTS[number % len(CLIENTS)]
        return _Conversation(number, client, **self._make).script()

    def _ordered(self, rng: random.Random, requests: int) -> Iterator[int]:
        """Yield the number of each conversation that asks: now and then one, and several times."""
        scripts = [self._script(number) for number in range(self.conversations)]
        while requests > 0:
            number = rng.randrange(self.conversations)
            for _ in range(rng.randint(1, CLIENTS[number % len(CLIENTS)].burst)):
                if requests > 0:
                    requests -= _answer_with_zeros(next(scripts[number]))
                    yield number


def _answer_with_zeros(asked: list[Ask]) -> int:
    for ask in asked:
        ask.answer = [0] * ask.max_tokens
    return len(asked)


@dataclass
class _Conversation:
    number: int
    client: Client
    seed: int
    context: int
    scale: float
    messages: list[Tokens] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(f"{self.seed} {self.number}")
        client = self.client
        common = random.Random(f"{self.seed} {client.name}")
        self._header = [BOS, *self._some(client.header - 1, common)]
        self._subagents = [BOS, *self._some(client.header // 2, common)]
        self._title = [BOS, SYSTEM, *self._some(12, common)]
        self._first = [*self._some(client.own), END] if client.own else []

    def script(self) -> Script:
        """Yield what is asked together; the answers are in it when the script continues."""
        if self.client.has_title:
            message = self._message(USER)
            yield [self._ask([*self._title, *message])]
            yield from self._say(message)
        while True:
            acts = (self._go_on, self._edit, self._again, self._start_subagents)
            (act,) = self._rng.choices(acts, self.client.weights)
            if self._is_full:
                yield from self._compact()
            yield from act()

    @property
    def _is_full(self) -> bool:
        """True if little room is left, or not enough to ask for a summary after the next turn."""
        said = max(SUBAGENTS * MOST, round(self.client.turn[1] * self.scale))
        most = self.context - said - MOST - SUMMARY
        return len(self._prompt()) > min(ROOM * self.context, most)

    def _go_on(self) -> Script:
        yield from self._say(self._message(USER))

    def _edit(self) -> Script:
        """Say something else in the place of an earlier message; what came after it is gone."""
        earlier = range(0, len(self.messages), 2)
        if earlier:
            del self.messages[self._rng.choice(earlier[-4:]) :]
        yield from self._say(self._message(USER))

    def _again(self) -> Script:
        """Ask for the last answer again."""
        if self.messages:
            self.messages.pop()
            yield from self._say(self.messages.pop())
        else:
            yield from self._go_on()

    def _start_subagents(self) -> Script:
        """Four subagents start at once, work for some turns, and their results come back."""
        trunk = [*self._subagents, *self._message(USER), *self._message(USER)]
        own = [[*trunk, *self._message(USER)] for _ in range(SUBAGENTS)]
        for turn in range(self._rng.randint(2, 4)):
            if turn:
                own = [[*tokens, *self._message(USER)] for tokens in own]
            asked = [self._ask([*tokens, ASSISTANT]) for tokens in own]
            yield asked
            own = [[*ask.prompt, *(ask.answer or []), END] for ask in asked]
        results = [token for ask in asked for token in ask.answer or []]
        yield from self._say([USER, *results, END])

    def _compact(self) -> Script:
        """Ask for a summary of everything, and continue with that."""
        ask = self._ask([*self._prompt(), USER, *self._some(8), END, ASSISTANT])
        yield [ask]
        self.messages = [[USER, *self._some(8), END], [ASSISTANT, *(ask.answer or []), END]]

    def _say(self, message: Tokens) -> Script:
        self.messages.append(message)
        ask = self._ask([*self._prompt(), ASSISTANT])
        yield [ask]
        answer = ask.answer or []
        if self.client.thinks:
            answer = answer[len(answer) // 2 :]
        self.messages.append([ASSISTANT, *answer, END])

    def _prompt(self) -> Tokens:
        said = [token for message in self.messages for token in message]
        return [*self._header, *self._first, *said]

    def _ask(self, prompt: Tokens) -> Ask:
        return Ask(self.number, prompt, self._rng.randint(3, MOST))

    def _message(self, role: int) -> Tokens:
        return [role, *self._some(self._rng.randint(*self.client.turn)), END]

    def _some(self, count: int, rng: random.Random | None = None) -> Tokens:
        rng = rng or self._rng
        return [rng.randrange(BOS) for _ in range(round(count * self.scale))]


class Ideal:
    """A cache that never forgets: it knows how much of a prompt was evaluated before."""

    def __init__(self) -> None:
        self._root: dict[int, Any] = {}

    def shared(self, prompt: Sequence[int]) -> int:
        """Return the tokens of `prompt` that it could reuse; the last one is always evaluated."""
        node, count = self._root, 0
        for token in prompt[:-1]:
            if token not in node:
                break
            node, count = node[token], count + 1
        return count

    def add(self, tokens: Sequence[int]) -> None:
        """Add the tokens of a prompt, or of a prompt and the evaluated part of its answer."""
        node = self._root
        for token in tokens:
            node = node.setdefault(token, {})


@dataclass
class Played:
    """The sums of a trace that was played on a runner."""

    requests: int = 0
    prompt: int = 0
    """Tokens of all prompts."""
    shareable: int = 0
    """Tokens of prompts that a cache which never forgets had reused."""
    reused: int = 0
    """Tokens of prompts that the runner did not evaluate."""
    failures: list[str] = field(default_factory=list)
    """Why each request that failed did, and each that never found room."""
    most_bytes: int = 0
    """The most bytes that the runner's caches took when a request ended."""
    restored: int = 0
    """Tokens of `reused` that came back from disk."""
    evicted: int = 0
    """Conversations that were given up to make room, also those that were parked."""
    lost: int = 0
    """Those of `evicted` that were not parked."""
    asks: list[Ask] = field(default_factory=list)
    """All requests, in the order in which they began."""

    @property
    def share(self) -> float:
        """The share of the shareable tokens that were reused."""
        return self.reused / self.shareable if self.shareable else 1.0


def play(runner: Engine, trace: Trace) -> Played:
    """Run all requests of `trace`, each as soon as it can begin and a slot is free."""
    played, ideal = Played(), Ideal()
    running: list[tuple[Ask, Handle]] = []
    while running or not trace.is_over:
        _begin(runner, trace, running, played, ideal)
        runner.step()
        for ask, handle in [pair for pair in running if pair[1].finished]:
            running.remove((ask, handle))
            ask.answer = [chunk.token for chunk in handle.poll() if chunk.token is not None]
            ideal.add([*ask.prompt, *ask.answer[:-1]])
            if handle.error is not None:
                played.failures.append(str(handle.error))
    return played


def _begin(
    runner: Engine, trace: Trace, running: list[tuple[Ask, Handle]], played: Played, ideal: Ideal
) -> None:
    """Begin requests until the next one has to wait."""

    def seen(_: Any, observed: Observation) -> None:
        played.reused += observed.lookup.cached
        played.restored += observed.lookup.restored
        evicted = () if observed.scheduling is None else observed.scheduling.evicted
        played.evicted += len(evicted)
        played.lost += sum(not one.parked for one in evicted)
        played.most_bytes = max(played.most_bytes, observed.usage.memory.cache_bytes)

    if not played.asks:
        runner.observers.append(seen)
    while (ask := trace.next()) is not None:
        try:
            options: Any = {"stop_tokens": [], "speculate": "off"}
            handle = runner.submit(ask.prompt, max_tokens=ask.max_tokens, **options)
        except (NoFreeSlotError, CacheFullError) as error:
            if running:
                trace.put_back(ask)
                return
            played.failures.append(str(error))
            ask.answer = [0] * ask.max_tokens
            continue
        running.append((ask, handle))
        played.asks.append(ask)
        played.requests, played.prompt = played.requests + 1, played.prompt + len(ask.prompt)
        played.shareable += ideal.shared(ask.prompt)
        ideal.add(ask.prompt)
