"""An injected cause on each family of templates has its name, its message and its four counts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from server.test_causes import INJECTED, WORDS, Talk, billing, remembered, talk, turn
from support.accounts import FullMemory
from support.strict_templates import TEMPLATES, load_strict

from mlxrunner.cache.account import ConversationName, PromptAccount, TokenAccounting
from mlxrunner.cache.tokens import common_prefix
from mlxrunner.profiling.divergence import Cause, RecentPrompts, cause_of
from mlxrunner.results import Usage
from mlxrunner.server.prompts.builder import PromptBuilder
from mlxrunner.tokenizer.base import Tokenizer

FAMILIES = "llama3 qwen3 gemma3 phi4 mistral gpt-oss deepseek glm".split()
SEEDS = 3
PIECES = [
    *WORDS,
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "You are",
    " agent",
    "Working directory",
    "Session",
    "Today is",
    "Budget",
]
COUNTED = "trimmed_tokens shifted_tokens reevaluated_tokens cache_bytes peak_bytes".split()
TIMES = "tokenize_s lookup_s prefill_s ttft_s decode_s".split()


class Ideal:
    """A runner of one conversation that computes nothing: it holds the last prompt of each."""

    def __init__(self, builder: PromptBuilder) -> None:
        self.builder, self.memory, self.causes = builder, FullMemory(), RecentPrompts()
        self.accounting = TokenAccounting()
        self.held: list[Any] = []

    def send(self, one: Talk, reason: str | None = None) -> tuple[Usage, Cause | None]:
        """Send a request, check its account against a full memory, and return its cause."""
        tokens = self.builder.make(one.asked()).prompt.tokens
        cached = max((common_prefix(held, tokens) for held in self.held), default=0)
        cached = min(cached, len(tokens) - 1) if reason is None else 0
        name = ("agent", one.session)
        opened = self.accounting.begin(tokens, name=ConversationName(*name))
        found = self.accounting.end(opened, cached, cached, len(tokens), tokens[:0])
        usage = usage_of(len(tokens), cached, found, reason)
        self.memory.check(tokens.tolist(), name, usage)
        self.memory.evaluated.append(tokens.tolist())
        self.memory.asked.append((name, tokens.tolist()))
        self.held.append(tokens)
        return usage, cause_of(remembered(self.causes, self.builder, one), usage)


def usage_of(prompt: int, cached: int, found: PromptAccount, reason: str | None) -> Usage:
    """Return the usage of a request with this account."""
    new = prompt - cached - found.missed - found.displaced
    return Usage.from_dict(
        dict.fromkeys((*COUNTED, *TIMES), 0)
        | {"prompt_tokens": prompt, "cached_tokens": cached, "evaluated_tokens": prompt - cached}
        | {"missed_tokens": found.missed, "displaced_tokens": found.displaced, "new_tokens": new}
        | {"matched_tokens": cached, "completion_tokens": 1, "outcome": "partial"}
        | {"lost_tokens": found.missed + found.displaced}
        | {"trim_limited_by": None, "checkpoint": None, "evicted_by": None}
        | {"reason": reason or "diverged"}
    )


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("families")
    return {name: load_strict(folder / name, name, PIECES) for name in FAMILIES}


def conversation(order: random.Random, family: str) -> Talk:
    """Return a conversation that the template of a family can show."""
    one = replace(talk(order), session="s9")
    return replace(one, tools=[]) if family in ("gemma3", "phi4") else one


SYSTEMS = ("You answer questions about birds.", "Translate into Greek:", "Be brief, and rhyme.")
NO_TOOLS = ("tool order", "mode switch")


def cases(family: str) -> Iterator[str]:
    for name in INJECTED:
        has_no_tools = family in ("gemma3", "phi4") and name in NO_TOOLS
        if not has_no_tools and name not in ("model", "thinking", "variables"):
            yield name


@pytest.mark.parametrize("family", FAMILIES)
def test_causes_and_counts_are_right(family: str, tokenizers: dict[str, Tokenizer]) -> None:
    """In 98 of 100 conversations; the counts always."""
    wrong, count = [], 0
    for name in cases(family):
        expected, inject = INJECTED[name]
        builder = PromptBuilder(
            tokenizers[family], TEMPLATES[family][0], off=["billing-header"] * (name == "billing")
        )
        for seed in range(SEEDS):
            order = random.Random(f"{name}{seed}")
            first, runner = conversation(order, family), Ideal(builder)
            if name == "billing":
                first = billing(first, order)[0]
                header, _, rest = first.system.partition("\n\n")
                new, number = first.changed(0, header.replace("2.1.2", "2.1.3") + f"\n\n{rest}"), 0
            else:
                new, number = inject(first, order)
            runner.send(replace(conversation(order, family), session="s0"))
            runner.send(first)
            usage, cause = runner.send(new)
            count += 1
            if expected == "asked-anew" or expected == "first-request":
                assert usage.displaced_tokens < 16
            if cause is None or (cause.name, cause.message) != (expected, number):
                wrong.append((name, seed, cause, usage.displaced_tokens, usage.new_tokens))
    assert len(wrong) <= 0.02 * count, wrong[:6]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reason", ["evicted", "restarted", "interrupted"])
def test_what_the_program_lost_is_missed(
    family: str, reason: str, tokenizers: dict[str, Tokenizer]
) -> None:
    """A conversation that only went on: the client is not to blame."""
    builder = PromptBuilder(tokenizers[family], TEMPLATES[family][0])
    order, runner = random.Random(reason), Ideal(builder)
    one = conversation(order, family)
    plain = replace(one, messages=[{k: m[k] for k in ("role", "content")} for m in one.messages])
    runner.send(plain)
    grown = replace(plain, messages=[*plain.messages, *without_thinking(order)])
    usage, cause = runner.send(grown, reason)
    assert usage.missed_tokens > 0.8 * usage.prompt_tokens
    assert usage.displaced_tokens == 0
    assert cause is None or cause.name == reason


def without_thinking(order: random.Random) -> Iterator[dict[str, Any]]:
    """Yield another turn, in words only."""
    for message in turn(order):
        yield {name: message[name] for name in ("role", "content")}


@pytest.mark.parametrize("family", FAMILIES)
def test_unrelated_conversations_have_no_cause_to_mend(
    family: str, tokenizers: dict[str, Tokenizer]
) -> None:
    """One client asks, with the same system prompt or another one."""
    builder = PromptBuilder(tokenizers[family], TEMPLATES[family][0])
    runner, order = Ideal(builder), random.Random(family)
    for number in range(12):
        system = SYSTEMS[number % 3]
        question = " ".join(order.choice(WORDS) + str(order.random()) for _ in range(12))
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": question},
        ]
        usage, cause = runner.send(Talk(messages, [], session=f"s{number}"))
        assert usage.displaced_tokens == 0
        assert cause is None or cause.remedy.startswith("Nothing is to be done")
