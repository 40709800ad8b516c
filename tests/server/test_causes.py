"""Injected causes of misses are named, with the message that they are about."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from support.strict_templates import TEMPLATES, load_strict

from mlxrunner.profiling.divergence import (
    REMEDIES,
    Cause,
    PromptRecord,
    RecentPrompts,
    cause_of,
    difference,
)
from mlxrunner.results import CacheUse, MemoryUse, Timing, Usage
from mlxrunner.server.events import Client, ServerRequest
from mlxrunner.server.manager import prompt_record
from mlxrunner.server.prompts.builder import PromptBuilder

CASES = 40
"""Random conversations for each cause."""
WORDS = (
    "the file has a test that fails because of one line in main module so please mend it".split()
)


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> PromptBuilder:
    """A maker that leaves thinking to the template, and keeps the billing header."""
    tokenizer = load_strict(tmp_path_factory.mktemp("causes") / "qwen3", "qwen3")
    return PromptBuilder(tokenizer, TEMPLATES["qwen3"][0])


def usage_of(reason: str | None = "diverged", outcome: Any = "partial") -> Usage:
    """Return the usage of a request that reused a part."""
    cache = CacheUse(50, 0, None, None, None, 0, 0, lost_tokens=10)
    timing, memory = Timing(0, 0, 0, 0, 0), MemoryUse(0, 0)
    moved = {"displaced_tokens": 10, "new_tokens": 40}
    return Usage(100, 5, 50, 50, outcome, reason, timing, memory, cache, **moved)


def words(order: random.Random, count: int) -> str:
    """Return a text."""
    return " ".join(order.choice(WORDS) + str(order.randint(1, 99)) for _ in range(count))


@dataclass
class Talk:
    """A request of an agent in the middle of its work."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    model: str = "m"
    variables: dict[str, Any] = field(default_factory=dict)
    session: str = "s1"

    def asked(self) -> ServerRequest:
        """Return it as a request."""
        return ServerRequest(
            protocol="chat",
            model=self.model,
            messages=self.messages,
            tools=self.tools,
            variables=self.variables,
            client=Client("agent", self.session),
        )

    def changed(self, number: int, content: str) -> Talk:
        """Return it with another content of a message."""
        messages = [*self.messages]
        messages[number] = {**messages[number], "content": content}
        return replace(self, messages=messages)

    def grown(self, order: random.Random) -> Talk:
        """Return the next request of the same work."""
        return replace(self, messages=[*self.messages, *turn(order)])

    @property
    def system(self) -> str:
        """The system prompt."""
        text: str = self.messages[0]["content"]
        return text


def turn(order: random.Random) -> Iterator[dict[str, Any]]:
    """Yield an answer of the assistant, and a question of the user."""
    answer = {"role": "assistant", "content": words(order, 20)}
    yield answer | {"reasoning_content": words(order, 15)}
    yield {"role": "user", "content": words(order, 10)}


def tool(name: str) -> dict[str, Any]:
    """Return a description of a tool."""
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def talk(order: random.Random) -> Talk:
    """Return a conversation."""
    system = (
        f"You are an agent. {words(order, 30)}\nWorking directory: /home/ana/work/{order.random()}"
        f"\nToday is {day(order)}. {words(order, 5)} Budget: {order.randint(10**4, 10**6)} left."
        f"\nSession 8f14e45f-ceea-467f-9a3b-{order.getrandbits(48):012x}. {words(order, 40)}"
    )
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": words(order, 12)},
    ]
    for _ in range(order.randint(2, 6)):
        messages += turn(order)
    return Talk(messages, [tool(name) for name in ("bash", "edit", "grep", "read")])


def day(order: random.Random) -> str:
    """Return a date, in one of many forms."""
    number, hour = order.randint(1, 28), order.randint(10, 23)
    return order.choice(
        [
            f"2026-11-{number:02}",
            f"Nov {number}, 2026 {hour}:14",
            f"2026-11-{number:02}T{hour}:14:05Z",
        ]
    )


Injected = tuple[Talk, int | None]
Inject = Callable[[Talk, random.Random], Injected]


def in_system(begins: str, new: Callable[[random.Random], str]) -> Inject:
    """Replace the part of the system prompt from `begins` up to the next full stop and space."""

    def inject(old: Talk, order: random.Random) -> Injected:
        before, _, rest = old.system.partition(begins)
        value = new(order)
        end = rest.index(". ") if ". " in rest else rest.index("\n")
        return old.changed(0, before + begins + value + rest[end:]), 0

    return inject


def path(old: Talk, order: random.Random) -> Injected:
    """Another working directory."""
    lines = old.system.split("\n")
    lines[1] = f"Working directory: /tmp/claude-{order.randint(1000, 9999)}/{order.random()}"
    return old.changed(0, "\n".join(lines)), 0


def budget(old: Talk, order: random.Random) -> Injected:
    """Another number of tokens that are left."""
    before, _, rest = old.system.partition("Budget: ")
    return old.changed(
        0, f"{before}Budget: {order.randint(10, 9999)} left{rest.partition(' left')[2]}"
    ), 0


def tool_order(old: Talk, order: random.Random) -> Injected:
    return replace(old, tools=[*old.tools[1:], old.tools[0]]), None


def mode_switch(old: Talk, order: random.Random) -> Injected:
    return replace(old, tools=old.tools[: order.randint(1, 3)]), None


def edited(old: Talk, order: random.Random) -> Injected:
    number = order.randrange(1, len(old.messages) - 1)
    return old.changed(number, words(order, 11)), number


def asked_anew(old: Talk, order: random.Random) -> Injected:
    """Another last question: what stood before it is reused."""
    number = len(old.messages) - 1
    return old.changed(number, words(order, 11)), number


def dropped(old: Talk, order: random.Random) -> Injected:
    number = order.randrange(1, len(old.messages) - 3)
    return replace(old, messages=old.messages[:number] + old.messages[number + 2 :]), number


def inserted(old: Talk, order: random.Random) -> Injected:
    number = order.randrange(1, len(old.messages) - 1)
    new = {"role": "user", "content": words(order, 6)}
    return replace(old, messages=[*old.messages[:number], new, *old.messages[number:]]), number


def system(old: Talk, order: random.Random) -> Injected:
    return old.changed(0, old.system.replace("You are an agent.", words(order, 9) + ".")), 0


def reminder(old: Talk, order: random.Random) -> Injected:
    return old.changed(0, f"{old.system}\n\n{words(order, 8)}"), 0


def thinking(old: Talk, order: random.Random) -> Injected:
    messages = [
        {name: value for name, value in message.items() if name != "reasoning_content"}
        for message in old.messages
    ]
    return replace(old, messages=messages), 2


def title(old: Talk, order: random.Random) -> Injected:
    messages = [
        {"role": "system", "content": "You are a title generator. Write a title of five words."},
        old.messages[1],
    ]
    return Talk(messages, [], session=old.session), None


def compaction(old: Talk, order: random.Random) -> Injected:
    summary = f"This session is being continued from a previous conversation. {words(order, 40)}"
    messages = [old.messages[0], {"role": "user", "content": summary}]
    return replace(old, messages=messages), 1


def summarize(old: Talk, order: random.Random) -> Injected:
    """A compaction's question, with its own system prompt and without tools."""
    ask = {"role": "user", "content": "Write a detailed summary of the conversation so far."}
    messages = [*old.messages[:-1], ask]
    return replace(old, messages=messages, tools=[]), len(messages) - 1


def model(old: Talk, order: random.Random) -> Injected:
    return replace(old, model="other"), None


def variables(old: Talk, order: random.Random) -> Injected:
    return replace(old, variables={"enable_thinking": False}), None


def new_one(old: Talk, order: random.Random) -> Injected:
    """A new conversation with the same system prompt and tools."""
    messages = [old.messages[0], {"role": "user", "content": words(order, 14)}]
    return replace(old, messages=messages, session="s2"), None


def billing(old: Talk, order: random.Random) -> Injected:
    header = f"x-anthropic-billing-header: cc_version=2.1.{order.randint(200, 299)};"
    return old.changed(0, f"{header}\n\n{old.system}"), 0


INJECTED: dict[str, tuple[str, Inject]] = {
    "date": ("changing-date", in_system("Today is ", day)),
    "path": ("changing-id", path),
    "uuid": (
        "changing-id",
        in_system(
            "Session ", lambda order: f"8f14e45f-ceea-467f-9a3b-{order.getrandbits(48):012x}"
        ),
    ),
    "budget": ("changing-number", budget),
    "tool order": ("tool-order", tool_order),
    "mode switch": ("tools-changed", mode_switch),
    "edited": ("message-edited", edited),
    "asked anew": ("asked-anew", asked_anew),
    "dropped": ("message-dropped", dropped),
    "inserted": ("message-inserted", inserted),
    "system": ("system-changed", system),
    "reminder": ("system-grown", reminder),
    "thinking": ("thinking-stripped", thinking),
    "title": ("title-request", title),
    "compaction": ("compaction", compaction),
    "summarize": ("compaction", summarize),
    "model": ("another-model", model),
    "variables": ("template-variables", variables),
    "new": ("first-request", new_one),
    "billing": ("billing-header", billing),
}


def remembered(recent: RecentPrompts, maker: PromptBuilder, one: Talk) -> PromptRecord:
    """Send a request, and return what is remembered of it."""
    made = maker.make(one.asked())
    return recent.add(prompt_record(one.asked(), made, one.model))


def found(maker: PromptBuilder, talks: list[Talk], reason: str | None = "diverged") -> Cause | None:
    """Send requests, one after the other, and return the cause for the last one."""
    causes, cause = RecentPrompts(), None
    for one in talks:
        cause = cause_of(remembered(causes, maker, one), usage_of(reason))
    return cause


@pytest.mark.parametrize("name", INJECTED)
def test_an_injected_cause_is_named(maker: PromptBuilder, name: str) -> None:
    """The right cause and the right message, in 95 of 100 conversations."""
    expected, inject = INJECTED[name]
    if name == "billing":
        maker = PromptBuilder(maker.tokenizer, TEMPLATES["qwen3"][0], off=["billing-header"])
    wrong = []
    for seed in range(CASES):
        order = random.Random(f"{name}{seed}")
        others = [talk(order) for _ in range(3)]
        first = replace(talk(order), session="s9")
        if name == "billing":
            first = billing(first, order)[0]
            header, _, rest = first.system.partition("\n\n")
            new, number = first.changed(0, header.replace("2.1.2", "2.1.3") + "\n\n" + rest), 0
        else:
            new, number = inject(first, order)
        if order.random() < 0.5 and expected not in (
            "title-request",
            "compaction",
            "first-request",
            "asked-anew",
        ):
            new = new.grown(order)
        cause = found(maker, [*others, first, *others[:1], new])
        if cause is None or (cause.name, cause.message) != (expected, number):
            wrong.append((seed, cause))
    assert len(wrong) <= CASES * 0.05, wrong[:5]


def test_the_first_request_and_growth_have_causes_of_their_own(maker: PromptBuilder) -> None:
    """A conversation that only goes on loses nothing by its client."""
    order = random.Random(0)
    one = talk(order)
    assert found(maker, [one]) == Cause("first-request", REMEDIES["first-request"])
    assert found(maker, [one, one.grown(order)], reason=None) is None
    evicted = found(maker, [one, one.grown(order)], reason="evicted")
    assert evicted is not None
    assert evicted.name == "evicted"
    assert "--memory" in evicted.remedy


@pytest.mark.parametrize("turns", [0, 1])
def test_tasks_that_differ_in_a_number_are_no_fault_of_the_client(
    maker: PromptBuilder, turns: int
) -> None:
    """Subagents that begin side by side; an answer that is asked for again with another number."""
    order = random.Random(0)
    before = [{"role": "system", "content": words(order, 40)}]
    before += [one for _ in range(turns) for one in [*turn(order)][::-1]]
    tasks = [Talk([*before, {"role": "user", "content": f"Do job {job}."}], []) for job in (1, 2)]
    cause = found(maker, tasks)
    assert cause is not None
    assert cause.name == ("asked-anew" if turns else "first-request")


def test_a_date_before_a_long_last_message_is_named(maker: PromptBuilder) -> None:
    """The text behind it could be reused if the date stood at the end."""
    order = random.Random(0)
    document = words(order, 60)
    asks = [
        Talk([{"role": "user", "content": f"Now: 10:15:0{second}. {document}"}], [])
        for second in (1, 7)
    ]
    cause = found(maker, asks)
    assert cause is not None
    assert (cause.name, cause.message) == ("changing-date", 0)


def test_a_conversation_of_an_earlier_process_is_not_new(maker: PromptBuilder) -> None:
    """The restart is the cause, and not a first request."""
    one, usage = talk(random.Random(0)), replace(usage_of("restarted"), missed_tokens=40)
    cause = cause_of(remembered(RecentPrompts(), maker, one), usage)
    assert cause is not None
    assert cause.name == "restarted"
    assert "--disk-cache" in cause.remedy


def test_a_hit_has_no_cause(maker: PromptBuilder) -> None:
    """Neither a first one nor a second one has."""
    order, causes = random.Random(0), RecentPrompts()
    for one in (talk(order), talk(order)):
        seen = remembered(causes, maker, one)
        assert cause_of(seen, usage_of(None, "hit")) is None


def test_thinking_that_a_client_does_not_send_back(maker: PromptBuilder) -> None:
    """The answer to the last request had some."""
    order, causes = random.Random(0), RecentPrompts()
    one = talk(order)
    seen = remembered(causes, maker, one)
    seen.has_thought = True
    after = one.grown(order)
    del after.messages[len(one.messages)]["reasoning_content"]
    seen = remembered(causes, maker, after)
    cause = cause_of(seen, usage_of())
    assert cause is not None
    assert (cause.name, cause.message) == ("thinking-stripped", len(one.messages))


def test_a_billing_header_that_is_left_out_is_no_cause(maker: PromptBuilder) -> None:
    """Another change behind it is."""
    order = random.Random(0)
    one = talk(order)
    first, second = (billing(one, order)[0] for _ in range(2))
    assert first.system != second.system
    assert found(maker, [first, second], reason=None) is None
    cause = found(maker, [first, edited(second, order)[0]])
    assert cause is not None
    assert cause.name == "message-edited"


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("It is 10:15.", "It is 11:02.", "changing-date"),
        ("Today is Mon Nov 2 2026", "Today is Tue Nov 3 2026", "changing-date"),
        ("now: 1795340000", "now: 1795350000", "changing-date"),
        ("in /tmp/a1/x", "in /tmp/b2/x", "changing-id"),
        ("id 0123abcd9", "id 99ffabcd0", "changing-id"),
        ("12,345 tokens left", "9,870 tokens left", "changing-number"),
        ("Be brief.", "Be brief.\nTokens: few.", "grown"),
        ("Be brief.", "Be long.", "other"),
        ("", "Be long.", "other"),
        ("same 2026-11-02", "other 2026-11-03", "other"),
        ("I am Bo. Who am I?", "I am Bo.\n\nWho am I?", "other"),
    ],
)
def test_the_kind_of_a_difference(old: str, new: str, kind: str) -> None:
    """Dates come before ids, ids before numbers."""
    text = "word " * 50
    assert difference(old, new) == kind
    if kind != "grown":
        assert difference(f"{text}{old} {text}", f"{text}{new} {text}") == kind


def test_requests_that_are_remembered_are_bounded(maker: PromptBuilder) -> None:
    """The oldest go first."""
    order, causes = random.Random(0), RecentPrompts(most=2)
    talks = [talk(order) for _ in range(3)]
    for one in talks:
        remembered(causes, maker, one)
    assert remembered(causes, maker, talks[0]).previous is not None
    seen = RecentPrompts(most=2)
    for one in talks:
        remembered(seen, maker, one)
    known = remembered(seen, maker, talks[0]).previous
    assert known is None or known.messages != talks[0].messages


def test_texts_are_compared_only_at_the_first_difference(
    maker: PromptBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that has come before costs no digest, however many requests are remembered."""
    from mlxrunner.profiling import divergence
    from mlxrunner.server import manager
    from mlxrunner.server.prompts import builder

    order, causes = random.Random(0), RecentPrompts()
    one = talk(order)
    for _ in range(20):
        one = one.grown(order)
        remembered(causes, maker, one)
    counted: list[str] = []
    for module, name in (
        (manager, "message_digest"),
        (divergence, "difference"),
        (divergence, "is_like"),
    ):
        whole = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda *args, whole=whole, name=name: (counted.append(name), whole(*args))[1],
        )
    monkeypatch.setattr(builder, "message_digest", manager.message_digest)
    new = one.changed(len(one.messages) // 2, words(order, 10))
    seen = remembered(causes, maker, new)
    assert cause_of(seen, usage_of()) is not None
    assert counted.count("message_digest") <= 2  # as it came, and as a rule wrote it
    assert len(counted) <= 4
