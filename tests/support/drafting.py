"""Guesses that a test decides, and prompts for them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.optimizers import Adam
from support.architectures import VOCAB, build, settings_of

from mlxrunner import Runner
from mlxrunner.cache import EntryLease, PrefixCache
from mlxrunner.cache.entry import Shift, places_of
from mlxrunner.cache.layers.factory import CacheOptions, make_layer_caches
from mlxrunner.engine.backends.backend import rotators
from mlxrunner.engine.drafting import PassCosts
from mlxrunner.models.facts import facts_of
from mlxrunner.testing import ByteTokenizer, interrupt_at

DEEPEST = 6
"""Most tokens of a draft."""
CHUNK = 16
"""Most tokens of one pass of a prefill."""
LINES = 400
"""An interrupt comes within so many lines of a step, if it is not over before."""


class Side:
    """A prefix cache, and the passes that a request makes on it."""

    def __init__(self, model: Any, options: CacheOptions, budget: int, shift: Shift | None) -> None:
        self.model, self.shift = model, shift
        self.cache = PrefixCache(partial(make_layer_caches, model, options), budget, 12)
        self.lease: EntryLease = None  # type: ignore[assignment]  # there is one between turns

    def take(self, prompt: list[int]) -> None:
        """Begin a request, and evaluate its prompt with the checkpoints that it wants."""
        lease = self.lease = self.cache.begin(prompt).take()
        lease.mark(places_of(len(prompt), [len(prompt) // 2]))
        while len(lease.remaining):
            self.checkpoint()
            stop = min(lease.next_stop, lease.recorded + CHUNK)
            self.record(lease.remaining[: stop - lease.recorded].tolist())
        self.checkpoint()

    def forward(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        """Run a pass that was begun, and return the log-probabilities `[n, vocab]`."""
        logits = self.model(mx.array([tokens]), cache=self.lease.model_caches)[0]
        logits = logits.astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(logprobs)
        self.lease.end_forward(len(tokens))
        return np.array(logprobs)

    def record(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        self.lease.begin_forward()
        logprobs = self.forward(tokens)
        self.lease.record(tokens)
        return logprobs

    def checkpoint(self) -> None:
        lease = self.lease
        if lease.needs_checkpoints and lease.recorded >= lease.checkpoint_due:
            mx.eval(lease.checkpoint())

    def make_room(self) -> None:
        """Shift if the context is full. What is pending is evaluated before."""
        shift, lease = self.shift, self.lease
        if shift is None or lease.recorded + len(lease.pending) < shift.context:
            return
        if lease.pending:
            self.record(lease.pending)
        tokens = lease.tokens
        discard = shift.discard(len(tokens))
        if not lease.shift(shift.keep, discard, partial(rotators, self.model)):
            left = lease.restart(tokens[: shift.keep] + tokens[shift.keep + discard :]).tolist()
            for begin in range(0, len(left), CHUNK):
                self.record(left[begin : begin + CHUNK])


class Drafting:
    """Two sides of one conversation, and what was seen of drafts."""

    def __init__(
        self,
        model: Any,
        rng: random.Random,
        *,
        vocab: int,
        near: float,
        budget: int = 10**8,
        context: int | None = None,
    ) -> None:
        shift = None if context is None else Shift(context, 4)
        options = CacheOptions(context, context is not None, rng.choice([0, 4, 32]))
        self.rng, self.vocab, self.near = rng, vocab, near
        self.drafted, self.plain = (Side(model, options, budget, shift) for _ in range(2))
        self.longest = 60 if context is None else context - 21
        self.said: list[int] = []
        """The tokens of the plain entry after the last turn."""
        self.seen = dict.fromkeys(
            ("drafts", "rejected", "pending", "fewer", "within", "shifts", "interrupts"), 0
        )

    def begin(self) -> None:
        """Take both leases for a prompt that continues from what was said, or leaves it."""
        rng, entry = self.rng, self.drafted.cache.entry
        if entry.is_shifted or len(self.said) > self.longest:
            self.drafted.cache.reset()
            self.said = []
        cut = rng.choice([0, 0, 0, 1, 2, rng.randint(0, len(self.said))])
        more = rng.choice([1, 3, 20, self.longest + 15 - len(self.said)])
        prompt = self.said[: len(self.said) - cut] + self.tokens(more)
        self.plain.cache.reset()
        for side in (self.drafted, self.plain):
            side.take(prompt)
        self.check()

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(1, self.vocab) for _ in range(count)]

    def step(self, line: int | None = None) -> None:
        """Draft, and keep some of it. With a `line`, Ctrl-C is pressed there and the turn ends."""
        whole = self.rng.random() < 0.1
        current, *draft = self.tokens(1 + self.rng.randint(0, DEEPEST))
        good = self.rng.choice([0, len(draft), self.rng.randint(0, len(draft))])
        fewer = self.rng.choice([good, good, good, self.rng.randint(0, good)])
        try:
            with interrupt_at(line or -1):
                rows = self.evaluate(current, draft, good, fewer, whole=whole)
        except KeyboardInterrupt:
            self.interrupted([current, *draft[:good]])
            return
        kept = [current, *(draft[: len(rows) - 1])]
        self.plain.make_room()
        for token, row in zip(kept, rows, strict=True):
            self.compare(row, self.plain.record([token])[0])
        self.plain.checkpoint()
        self.check()

    def evaluate(
        self, current: int, draft: list[int], good: int, fewer: int, *, whole: bool
    ) -> np.ndarray[Any, Any]:
        """Return the log-probabilities behind `current` and the drafted tokens that stay."""
        side, lease = self.drafted, self.drafted.lease
        was = lease.recorded
        side.make_room()
        pending = lease.pending
        at = lease.recorded + len(pending) + 1
        self.seen["shifts"] += at <= was
        if side.shift is not None:
            draft = draft[: side.shift.context - at]
        if whole:
            return side.record([*pending, current])[len(pending) :]
        rows, first = [*pending, current, *draft], len(pending) + 1
        lease.begin_draft(len(rows))
        logprobs = side.forward(rows)
        good, due = min(good, len(draft)), lease.checkpoint_due
        lease.accept(rows[: first + good])
        self.seen["fewer"] += fewer < good
        if fewer < good:
            good = fewer
            lease.accept(rows[: first + good])
        self.seen["drafts"] += 1
        self.seen["rejected"] += good < len(draft)
        self.seen["pending"] += bool(lease.pending)
        self.seen["within"] += lease.needs_checkpoints and at <= due < lease.recorded
        side.checkpoint()
        return logprobs[first - 1 : first + good]

    def end(self) -> None:
        """Close the leases. What is pending is evaluated first, as at the end of an answer."""
        if self.drafted.lease.pending and self.rng.random() < 0.7:
            self.drafted.record(self.drafted.lease.pending)
            assert self.drafted.cache.entry.tokens == self.plain.cache.entry.tokens
        for side in (self.drafted, self.plain):
            side.lease.close()
        self.check()
        self.said = list(self.plain.cache.entry.tokens)

    def interrupted(self, shown: list[int]) -> None:
        """End the turn after an interrupt, and begin another one."""
        self.seen["interrupts"] += 1
        for side in (self.drafted, self.plain):
            side.lease.close()
        entry, self.said = self.drafted.cache.entry, list(self.plain.cache.entry.tokens)
        assert entry.is_true
        assert entry.held is None
        if self.drafted.shift is None:
            assert list(entry.tokens) == [*self.said, *shown][: len(entry.tokens)]
        self.begin()

    def check(self) -> None:
        """Check the law of the entry: each layer holds its tokens, and the rest is pending."""
        side = self.drafted
        assert side.cache.entry.is_true
        there = [*side.cache.entry.tokens, *side.lease.pending]
        if side.cache.is_busy:
            assert there == list(self.plain.cache.entry.tokens)

    def compare(self, ours: np.ndarray[Any, Any], its: np.ndarray[Any, Any]) -> None:
        best = int(its.argmax())
        assert abs(float(ours[best] - its[best])) <= self.near
        assert int(ours.argmax()) == best


def steady_costs(patch: pytest.MonkeyPatch) -> None:
    """Let a pass cost a fiftieth more for each drafted token, however long it takes here."""
    patch.setattr(PassCosts, "ratio", lambda self, depth: 1 + depth / 50)


NAMES = (
    "llama qwen3 gemma2 gemma3_text gpt_oss cohere2 exaone4 olmo3 phi3 mixtral deepseek_v2 "
    "deepseek_v3 glm4_moe minicpm3 lfm2 mamba mamba2 falcon_h1 jamba granitemoehybrid nemotron_h "
    "qwen3_next kimi_linear olmo_hybrid"
).split()
"""Full, sliding, latent, recurrent and mixed architectures."""
NEAR = 1e-3
"""Two log-probabilities that differ by less may change places by the rounding of a pass."""


@dataclass
class Seen:
    """Counts of what was compared, and of what differed."""

    answers: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    near: int = 0
    """Answers that part where two tokens are as good as equally likely."""
    different: int = 0
    """Answers that part elsewhere."""


def runner_of(architecture: str, model: Any = None) -> Runner:
    """Return a runner on a tiny model: a random one, if none is given."""
    model = build(architecture) if model is None else model
    facts = facts_of(model, settings_of(architecture))
    return Runner(model, ByteTokenizer(), facts, context=512, prefill_step=64)


def prompts(seed: str, count: int) -> Iterator[list[int]]:
    """Yield prompts that repeat a part of themselves."""
    rng = random.Random(seed)
    for _ in range(count):
        part = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 24))]
        yield [rng.randrange(VOCAB), *part * rng.randint(1, 3), *part[: rng.randint(1, len(part))]]


def compare(runner: Runner, seed: str, count: int, length: int = 16) -> Seen:
    """Answer `count` prompts both ways, greedily and sampled in turn.

    What the entry held before is guessed, too: each second time another answer to the prompt.
    """
    seen = Seen()
    for number, prompt in enumerate(prompts(seed, count)):
        options: dict[str, Any] = {"max_tokens": length, "stop_tokens": [], "logprobs": 2}
        if number % 2:
            options |= {"temperature": 0.3, "seed": number}
        runner.reset()
        plain = _answer(runner, prompt, "off", options)
        if number % 4 > 1:
            _answer(runner, prompt, "off", options | {"temperature": 0.7, "seed": number + 1000})
        guessed = _answer(runner, prompt, "lookup", options)
        assert runner.usage is not None
        seen.answers += 1
        seen.tokens += len(plain)
        seen.drafted += sum(use.drafted for use in runner.usage.drafts)
        seen.accepted += sum(use.accepted for use in runner.usage.drafts)
        for (token, top), (other, _) in zip(plain, guessed, strict=True):
            if token != other:
                first, second = list((top or {}).values())[:2]
                is_near = not number % 2 and first - second < NEAR
                seen.near += is_near
                seen.different += not is_near
                break
    return seen


def _answer(runner: Runner, prompt: list[int], how: str, options: dict[str, Any]) -> list[Any]:
    chunks = runner.generate(prompt, speculate=how, **options)
    return [(chunk.token, chunk.top_logprobs) for chunk in chunks]


def trained(architecture: str, steps: int) -> Any:
    """Return a model that was trained to continue with what repeats itself."""
    model, rng = build(architecture), random.Random(architecture)
    adam = Adam(learning_rate=2e-3)

    def loss(model: Any, tokens: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")

    step = nn.value_and_grad(model, loss)
    model.train()
    for _ in range(steps):
        parts = [[rng.randrange(VOCAB) for _ in range(rng.randint(2, 16))] for _ in range(8)]
        rows = [(part * 33)[:64] for part in parts]
        _, gradients = step(model, mx.array(rows))
        adam.update(model, gradients)
        mx.eval(model.parameters(), adam.state)
    model.eval()
    return model
