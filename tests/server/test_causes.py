"""Injected causes of misses have their name, their message and their four counts."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from support.accounts import FullMemory, usage_of
from support.strict_templates import TEMPLATES, load_strict

from mlxrunner.cache.account import ConversationName, TokenAccounting
from mlxrunner.cache.entry import as_tokens, common_prefix
from mlxrunner.profiling import divergence
from mlxrunner.profiling.divergence import REMEDIES, Cause, difference
from mlxrunner.profiling.schema import NOTHING
from mlxrunner.results import Usage
from mlxrunner.server import manager
from mlxrunner.server.events import Client, ServerRequest
from mlxrunner.server.manager import ModelsAsked, prompt_record
from mlxrunner.server.prompts import builder
from mlxrunner.server.prompts.builder import PromptBuilder
from mlxrunner.tokenizer.prompt import Caller

FAMILIES = "llama3 qwen3 gemma3 chatml mistral gpt-oss deepseek glm".split()
CASES = 2
"""Random conversations for each cause and family."""
WANTED = 0.98
WORDS = (
    "the file has a test that fails because of one line in main module so please mend it".split()
)
PIECES = [
    *WORDS,
    *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "You are", " agent", "Working directory"),
    *("Session", "Today is", "Budget"),
]


STYLE = "{{ style | default('') }}"
"""The beginning of each template, which a variable changes."""


@pytest.fixture(scope="module")
def builders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PromptBuilder]:
    folder = tmp_path_factory.mktemp("families")
    return {
        name: PromptBuilder(
            load_strict(folder / name, name, PIECES, begin=STYLE), TEMPLATES[name][0]
        )
        for name in FAMILIES
    }


@pytest.fixture(params=["qwen3"])
def runner(request: pytest.FixtureRequest, builders: dict[str, PromptBuilder]) -> Ideal:
    """A server of one family."""
    return Ideal(builders[request.param])


@pytest.fixture
def order() -> random.Random:
    return random.Random(0)


of_each_family = pytest.mark.parametrize("runner", FAMILIES, indirect=True)


class Ideal:
    """A server of models that compute nothing, and hold all that they have evaluated."""

    def __init__(self, builder: PromptBuilder) -> None:
        self.builder, self.models = builder, ModelsAsked()
        self.memories: defaultdict[str, FullMemory] = defaultdict(FullMemory)
        self.accounts: defaultdict[str, TokenAccounting] = defaultdict(TokenAccounting)

    def send(
        self,
        one: Talk,
        reason: str | None = None,
        answer: Sequence[int] = (),
        *,
        has_thought: bool = False,
        is_checked: bool = True,
    ) -> tuple[Usage, Cause | None]:
        """Send a request, check its account against a full memory, and return its cause.

        `reason`: the program has lost everything for it. `is_checked`: False to save time.
        """
        made = self.builder.make(one.asked())
        memory, accounting = self.memories[one.model], self.accounts[one.model]
        tokens = made.prompt.tokens
        record = prompt_record(one.asked(), made)
        record.is_switched = self.models.add(record, one.model)
        record.has_thought = has_thought
        caller = Caller("r", "agent", one.session, record=record, is_title=record.is_title)
        cached = 0 if reason else min(memory.known(tokens.tolist()), len(tokens) - 1)
        opened = accounting.begin(
            tokens,
            replace(made.prompt, caller=caller),
            ConversationName("agent", one.session, record.is_title),
        )
        found = accounting.end(opened, cached, cached, len(tokens), as_tokens(answer))
        is_hit = reason is None and cached == len(tokens) - 1
        usage = usage_of(
            prompt_tokens=len(tokens),
            cached_tokens=cached,
            missed_tokens=found.missed,
            displaced_tokens=found.displaced,
            new_tokens=len(tokens) - cached - found.missed - found.displaced,
            lost_tokens=found.missed + found.displaced,
            outcome="hit" if is_hit else "partial",
            reason=reason or "diverged",
        )
        name: Any = (f"agent{record.is_title}", one.session)
        if is_checked:
            memory.check(tokens.tolist(), name, usage)
        memory.evaluated.append([*tokens.tolist(), *answer])
        memory.asked.append((name, memory.evaluated[-1]))
        return usage, record.cause(found, usage)

    def causes(self, *talks: Talk) -> list[str | None]:
        """Send requests, one after the other, and return the names of the causes."""
        return [cause and cause.name for cause in (self.send(one)[1] for one in talks)]


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
        f"{AGENT} {words(order, 30)}\nWorking directory: /home/ana/work/{order.random()}"
        f"\nToday is {day(order)}. {words(order, 5)} Budget: {order.randint(10**4, 10**6)} left."
        f"\nSession {uuid(order)}. {words(order, 40)}"
    )
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": words(order, 12)},
    ]
    for _ in range(order.randint(2, 6)):
        messages += turn(order)
    return Talk(messages, [tool(name) for name in ("bash", "edit", "grep", "read")])


Injected = tuple[Talk, int | None]
"""The request that is changed, and the message at fault."""
Inject = Callable[[Talk, random.Random], Injected]


def day(order: random.Random) -> str:
    """Return a date, in one of many forms."""
    number, hour = order.randint(1, 28), order.randint(10, 23)
    iso = f"2026-11-{number:02}"
    return order.choice([iso, f"Nov {number}, 2026 {hour}:14", f"{iso}T{hour}:14:05Z"])


def temporary(order: random.Random) -> str:
    return f"/tmp/claude-{order.randint(1000, 9999)}/{order.random()}"


def uuid(order: random.Random) -> str:
    return f"8f14e45f-ceea-467f-9a3b-{order.getrandbits(48):012x}"


def in_system(begins: str, ends: str, new: Callable[[random.Random], str]) -> Inject:
    """Replace the part of the system prompt between two texts."""

    def inject(old: Talk, order: random.Random) -> Injected:
        before, _, rest = old.system.partition(begins)
        value = new(order)
        return old.changed(0, before + begins + value + rest[rest.index(ends) :]), 0

    return inject


def with_tools(change: Callable[[list[Any], random.Random], list[Any]]) -> Inject:
    return lambda old, order: (replace(old, tools=change(old.tools, order)), None)


def moved(old: Talk, order: random.Random) -> Injected:
    """A reminder that goes with the last message."""
    number = order.randrange(1, len(old.messages) - 3)
    message = {"role": "user", "content": f"<system-reminder>{words(order, 9)}"}
    before, after = old.messages[:number], old.messages[number:]
    old.messages[:] = [*before, message, *after]
    return replace(old, messages=[*before, *after, message]), len(old.messages) - 1


def beginning(old: Talk, order: random.Random) -> Injected:
    """A text in front of what is asked of it."""
    task = words(order, 40)
    for one in old.messages, (new := old.messages[:-1]):
        one[len(old.messages) - 1 :] = [{"role": "user", "content": f"{words(order, 8)} {task}"}]
    return replace(old, messages=new), len(new) - 1


def edited(old: Talk, order: random.Random, *, is_last: bool = False) -> Injected:
    """Another text of a message. Before the last question all is reused."""
    last = len(old.messages) - 1
    number = last if is_last else order.randrange(1, last)
    return old.changed(number, words(order, 11)), number


def dropped(old: Talk, order: random.Random) -> Injected:
    number = order.randrange(1, len(old.messages) - 3)
    return replace(old, messages=old.messages[:number] + old.messages[number + 2 :]), number


def inserted(old: Talk, order: random.Random) -> Injected:
    number = order.randrange(1, len(old.messages) - 1)
    new = {"role": "user", "content": words(order, 6)}
    return replace(old, messages=[*old.messages[:number], new, *old.messages[number:]]), number


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


def new_one(old: Talk, order: random.Random) -> Injected:
    """A new conversation with the same system prompt and tools."""
    messages = [old.messages[0], {"role": "user", "content": words(order, 14)}]
    return replace(old, messages=messages, session="s2"), None


def with_header(old: Talk, version: int) -> Talk:
    header = f"x-anthropic-billing-header: cc_version=2.1.{version};"
    return old.changed(0, f"{header}\n\n{old.system}")


def billing(old: Talk, order: random.Random) -> Injected:
    new = with_header(old, 300)
    old.messages[:] = with_header(old, order.randint(200, 299)).messages
    return new, 0


AGENT = "You are an agent."
INJECTED: dict[str, tuple[str, Inject]] = {
    "date": ("changing-date", in_system("Today is ", ". ", day)),
    "path": (
        "changing-id",
        in_system("directory: ", "\n", temporary),
    ),
    "uuid": ("changing-id", in_system("Session ", ". ", uuid)),
    "budget": (
        "changing-number",
        in_system("Budget: ", " left", lambda order: str(order.randint(10, 9999))),
    ),
    "key order": (
        "key-order",
        with_tools(lambda tools, _: [dict(reversed(one.items())) for one in tools]),
    ),
    "moved": ("message-moved", moved),
    "beginning": ("changing-beginning", beginning),
    "tool order": ("tool-order", with_tools(lambda tools, _: [*tools[1:], tools[0]])),
    "mode switch": (
        "tools-changed",
        with_tools(lambda tools, order: tools[: order.randint(1, 3)]),
    ),
    "edited": ("message-edited", edited),
    "asked anew": ("asked-anew", partial(edited, is_last=True)),
    "dropped": ("message-dropped", dropped),
    "inserted": ("message-inserted", inserted),
    "system": (
        "system-changed",
        lambda old, order: (old.changed(0, old.system.replace(AGENT, f"{words(order, 9)}.")), 0),
    ),
    "reminder": (
        "system-grown",
        lambda old, order: (old.changed(0, f"{old.system}\n\n{words(order, 8)}"), 0),
    ),
    "title": ("title-request", title),
    "compaction": ("compaction", compaction),
    "summarize": ("compaction", summarize),
    "model": (
        "another-model",
        lambda old, order: (replace(old.grown(order), model="other"), None),
    ),
    "variables": (
        "template-variables",
        lambda old, _: (replace(old, variables={"style": "brief"}), None),
    ),
    "new": ("first-request", new_one),
    "billing": ("billing-header", billing),
}


OFF = {"billing": ["billing-header"], "key order": ["tool-keys"]}
ENDS_TALK = "title-request compaction first-request asked-anew changing-beginning".split()


def plain(one: Talk) -> Talk:
    """Return a conversation without thinking."""
    return replace(one, messages=[{k: m[k] for k in ("role", "content")} for m in one.messages])


@pytest.mark.exhaustive(0)
@of_each_family
def test_an_injected_cause_has_its_name_its_message_and_its_counts(runner: Ideal) -> None:
    """Name and message in 98 of 100 conversations; the counts always."""
    tokenizer, template = runner.builder.tokenizer, runner.builder._template
    wrong, count = [], 0
    for name, (expected, inject) in INJECTED.items():
        builder = PromptBuilder(tokenizer, template, off=OFF.get(name, []))
        for seed in range(CASES):
            order, runner = random.Random(f"{name}{seed}"), Ideal(builder)
            others, first = [talk(order) for _ in range(3)], replace(talk(order), session="s9")
            new, number = inject(first, order)
            if order.random() < 0.5 and expected not in ENDS_TALK:
                new = new.grown(order)
            for one in (*others, first, *others[:1]):
                runner.send(one, is_checked=False)
            _, cause = runner.send(new)
            count += 1
            if cause is None or (cause.name, cause.message) != (expected, number):
                wrong.append((name, seed, cause))
    assert len(wrong) <= (1 - WANTED) * count, wrong[:6]


@of_each_family
@pytest.mark.parametrize("seed", range(CASES))
def test_thinking_that_a_client_does_not_send_back(runner: Ideal, seed: int) -> None:
    """The answer after it is displaced."""
    order = random.Random(seed)
    first = plain(talk(order))
    after = plain(first.grown(order))
    prompt, whole = (runner.builder.make(one.asked()).prompt.tokens for one in (first, after))
    begin = common_prefix(prompt, whole)
    thought = [order.randrange(100_000, 200_000) for _ in range(30)]  # which no prompt has
    runner.send(first, answer=[*thought, *whole[begin : begin + 40].tolist()], has_thought=True)
    usage, cause = runner.send(after)
    assert 40 - 16 <= usage.displaced_tokens <= 40 + 16
    assert (cause.name, cause.message) == ("thinking-stripped", len(first.messages))


@of_each_family
@pytest.mark.parametrize("reason", ["evicted", "restarted", "interrupted"])
def test_what_the_program_lost_is_missed(runner: Ideal, reason: str) -> None:
    """A conversation that only continued: the client is not to blame."""
    order = random.Random(reason)
    one = plain(talk(order))
    runner.send(one)
    usage, cause = runner.send(plain(one.grown(order)), reason)
    assert usage.missed_tokens > 0.8 * usage.prompt_tokens
    assert (usage.displaced_tokens, cause and cause.name) == (0, reason)


@pytest.mark.parametrize(
    ("missed", "reason", "names"),
    [
        (6, "diverged", (None, "first-request")),
        (6, "evicted", (None, "first-request")),
        (6, "empty", (None, "first-request")),
        (15, "side_by_side", (None, "first-request")),
        (60, "evicted", ("message-dropped", "evicted")),
    ],
)
def test_a_few_missed_tokens_are_nobodys_fault(
    runner: Ideal, order: random.Random, missed: int, reason: str, names: tuple[str | None, str]
) -> None:
    """The client has left a message out, or begun; no token is displaced by that."""
    old = plain(talk(order))
    asked = [one.asked() for one in (old, dropped(old, order)[0])]
    before, after = (prompt_record(one, runner.builder.make(one)) for one in asked)
    usage = usage_of(
        prompt_tokens=100,
        cached_tokens=99 - missed,
        missed_tokens=missed,
        displaced_tokens=0,
        new_tokens=1,
        lost_tokens=missed,
        outcome="partial",
        reason=reason,
    )
    causes = [divergence.cause_of(after, one, usage) for one in (before, None)]
    assert tuple(cause and cause.name for cause in causes) == names


SYSTEMS = ("You answer questions about birds.", "Translate into Greek:", "Be brief, and rhyme.")


@of_each_family
def test_unrelated_conversations_have_no_cause_to_mend(runner: Ideal, order: random.Random) -> None:
    """One client asks, with the same system prompt or another one."""
    for number in range(12):
        question = " ".join(order.choice(WORDS) + str(order.random()) for _ in range(12))
        messages = [
            {"role": "system", "content": SYSTEMS[number % 3]},
            {"role": "user", "content": question},
        ]
        usage, cause = runner.send(Talk(messages, [], session=f"s{number}"))
        assert usage.displaced_tokens == 0
        assert cause is None or cause.remedy.startswith(NOTHING)


def test_the_first_request_and_growth_have_causes_of_their_own(
    runner: Ideal, order: random.Random
) -> None:
    """A conversation that only continues, or is sent again, loses nothing by its client."""
    one = plain(talk(order))
    after = plain(one.grown(order))
    assert runner.send(one)[1] == Cause("first-request", REMEDIES["first-request"])
    assert runner.causes(one, after) == [None, None]
    evicted = runner.send(plain(after.grown(order)), "evicted")[1]
    assert "--memory" in evicted.remedy


@pytest.mark.parametrize("turns", [0, 1])
def test_tasks_that_differ_in_a_number_are_no_fault_of_the_client(
    runner: Ideal, order: random.Random, turns: int
) -> None:
    """Subagents that begin side by side; an answer that is asked for again with another number."""
    before = [{"role": "system", "content": words(order, 40)}]
    before += [one for _ in range(turns) for one in [*turn(order)][::-1]]
    tasks = [Talk([*before, {"role": "user", "content": f"Do job {job}."}], []) for job in (1, 2)]
    assert runner.causes(*tasks)[-1] == ("asked-anew" if turns else "first-request")


def one_shots(*texts: str) -> list[Talk]:
    return [Talk([{"role": "user", "content": text}], []) for text in texts]


def test_one_shots_that_ask_for_a_summary_are_new_ones(runner: Ideal, order: random.Random) -> None:
    """There is no conversation that they could replace."""
    asks = one_shots(*(f"Summarize: {words(order, 30)}" for _ in range(2)))
    assert runner.causes(*asks)[-1] == "first-request"


def test_a_date_before_a_long_last_message_is_named(runner: Ideal, order: random.Random) -> None:
    """The text after it could be reused if the date stood at the end."""
    document = words(order, 60)
    asks = one_shots(*(f"Now: 10:15:0{second}. {document}" for second in (1, 7)))
    *_, (_, cause) = map(runner.send, asks)
    assert (cause.name, cause.message) == ("changing-date", 0)


def test_a_conversation_of_an_earlier_process_is_not_new(
    runner: Ideal, order: random.Random
) -> None:
    """The restart is the cause, and not a first request."""
    one = talk(order)
    runner.send(one)
    runner.accounts["m"]._history.clear()
    cause = runner.send(one, "restarted")[1]
    assert cause.name == "restarted"
    assert "--disk-cache" in cause.remedy


def test_models_are_told_apart_by_conversations(runner: Ideal, order: random.Random) -> None:
    """Models that are asked the same are compared; a conversation that changes its model is not."""
    one = talk(order)
    same, after = replace(one, model="other"), replace(one.grown(order), model="third")
    assert runner.causes(one, same, after) == ["first-request", "first-request", "another-model"]


def test_a_title_is_never_the_earlier_request_of_a_conversation(
    runner: Ideal, order: random.Random
) -> None:
    """Agents ask for it first, with the same question and in the same session."""
    one = talk(order)
    one.messages[2:] = []
    asked, _ = title(one, order)
    assert runner.causes(asked, one) == ["title-request", "first-request"]


def test_a_billing_header_that_is_left_out_is_no_cause(runner: Ideal, order: random.Random) -> None:
    """Another change after it is."""
    first, second, third = (with_header(talk(random.Random(0)), n) for n in (201, 202, 203))
    assert first.system != second.system
    causes = runner.causes(first, second, edited(third, order)[0])
    assert causes[1:] == [None, "message-edited"]


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


def test_texts_are_compared_only_at_the_first_difference(
    runner: Ideal, order: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that has come before costs no digest, however many requests are remembered."""
    one = talk(order)
    for _ in range(20):
        one = one.grown(order)
        runner.send(one)
    counted: list[str] = []

    def count(whole: Any, name: str, *given: Any) -> Any:
        counted.append(name)
        return whole(*given)

    compared = ((divergence, "difference"), (divergence, "is_like"))
    for module, name in ((manager, "message_digest"), *compared):
        counting = partial(count, getattr(module, name), name)
        monkeypatch.setattr(module, name, counting)
    monkeypatch.setattr(builder, "message_digest", manager.message_digest)
    new = one.changed(len(one.messages) // 2, words(order, 10))
    assert runner.causes(new) != [None]
    assert counted.count("message_digest") <= 2  # as it came, and as a rule wrote it
    assert len(counted) <= 4
