"""Compare warm answers with cold ones on this device: every way in which a prompt comes back.

A scenario is a function that leaves a warm entry and returns the next prompt; a new one is a
function here and a line in SCENARIOS. Three checks stand beside them: keys that a shift has moved,
guessed tokens, and two sequences at once. The model's speed decides the length of the prompts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxrunner.bench.harness import load_or_make
from mlxrunner.cache.entry import as_tokens, common_prefix
from mlxrunner.cache.layers.factory import make_layer_caches
from mlxrunner.cache.protocol import LayerCache
from mlxrunner.engine.engine import Engine
from mlxrunner.errors import NotSupportedError, OptionError
from mlxrunner.loading import plan_model
from mlxrunner.memory.reserve import must_fit
from mlxrunner.models.facts import DEPENDS
from mlxrunner.options import GenerateOptions
from mlxrunner.results import Chunk, Usage
from mlxrunner.runner import Runner
from mlxrunner.sessions.caches import cache_writer, stored_entry
from mlxrunner.sessions.store import SessionStore
from mlxrunner.system import device
from mlxrunner.verify.findings import FACTOR, Check, Difference, Findings

WORDS = """
the a one many river stone copper lantern morning engine letter winter garden number harbour music
paper island window thread opens carries answers remembers forgets counts follows builds turns holds
brings takes under over between without because until when quiet early heavy seventh yellow careful
distant broken simple
""".split()
MESSAGES = 6
"""Number of messages of a prompt. The first one is half as long as the others."""
MORE = 16
"""Tokens of a next turn."""
THINKING = 3
"""Length of an answer with thinking, as a multiple of other answers."""
PLAIN: dict[str, Any] = {"stop_tokens": [], "speculate": "off"}
"""Options of the answers that lead to an entry. What is guessed depends on measured times."""
GUESSING: dict[str, Any] = PLAIN | {"speculate": "lookup"}
"""Options of answers whose tokens are guessed wherever that is possible."""
SMALLEST = 48
"""Fewest tokens of a prompt. Shorter ones have no early token to edit."""


@dataclass(frozen=True)
class Case:
    """The prompt that comes to the warm entry."""

    prompt: list[int]
    options: dict[str, Any] = field(default_factory=dict)
    before: list[int] | None = None
    """The prompt that a cold run evaluates first, in one request; None if there is none.

    The result of a shift depends on the tokens that it dropped.
    """


class Talk:
    """Made-up tokens of a conversation; `base` is a prompt with room for answers and turns."""

    def __init__(self, runner: Runner, answer: int) -> None:
        self.runner, self.answer = runner, answer
        length = runner.context - THINKING * answer - 2 * MORE
        if length < SMALLEST:
            raise OptionError(
                f"context: {runner.context} tokens are too few to verify anything "
                f"with answers of {answer}: "
                f"at least {runner.context - length + SMALLEST} are needed"
            )
        self._random = random.Random(0)
        self._ends = sorted(runner.tokenizer.message_ends)
        text = [*runner.tokenizer.encode(""), *self._text(length)]
        for end in range(length // (2 * MESSAGES), length, length // MESSAGES):
            text[end - 1 : end] = self._ends[:1] or text[end - 1 : end]
        self.base = text[:length]

    def more(self, count: int = MORE) -> list[int]:
        """Return the tokens of a next turn."""
        return [*self._ends[:1], *self._text(count)][:count]

    def changed(self, place: int) -> list[int]:
        """Return `base` with another token at `place`."""
        old, vocab = self.base[place], max(self.runner.facts.vocab, 2)
        other = next((token for token in self._text(MORE) if token != old), (old + 1) % vocab)
        return [*self.base[:place], other, *self.base[place + 1 :]]

    def unlike(self, prompt: list[int]) -> list[int]:
        """Return a prompt of the same length that has another token in every place."""
        vocab = max(self.runner.facts.vocab, 2)
        text = self._text(len(prompt))
        return [
            (token + 1) % vocab if token == other else token
            for token, other in zip(text, prompt, strict=True)
        ]

    def say(self, prompt: list[int], count: int) -> list[int]:
        """Return `count` tokens of a greedy answer. The entry then holds all but the last."""
        chunks = self.runner.generate(prompt, max_tokens=count, **PLAIN)
        return [chunk.token or 0 for chunk in chunks]

    def _text(self, count: int) -> list[int]:
        tokens: list[int] = []
        vocab = self.runner.facts.vocab
        while len(tokens) < count:
            words = [self._random.choice(WORDS) for _ in range(9)]
            words.append(str(self._random.randrange(10_000)))
            spelled = self.runner.tokenizer.encode_more(f"{' '.join(words).capitalize()}. ")
            usable = [token for token in spelled if not vocab or token < vocab]
            # A tokenizer may have no tokens for these words.
            tokens += usable or [self._random.randrange(max(vocab, 2))]
        return tokens[:count]


def append(talk: Talk) -> Case:
    """Append an answer and a next turn."""
    return Case([*talk.base, *talk.say(talk.base, talk.answer), *talk.more()])


def edit(talk: Talk, place: int) -> Case:
    """Change the token at `place` of the prompt."""
    talk.say(talk.base, talk.answer)
    return Case(talk.changed(place))


def regenerate(talk: Talk) -> Case:
    """Repeat the prompt after its answer."""
    talk.say(talk.base, talk.answer)
    return Case(talk.base)


def think_strip(talk: Talk) -> Case:
    """Leave the first half of an answer, its thinking, out of the next prompt."""
    said = talk.say(talk.base, THINKING * talk.answer)
    return Case([*talk.base, *said[len(said) // 2 :], *talk.more()])


def cancel_prefill(talk: Talk) -> Case:
    """Interrupt the prefill after half of the prompt, then repeat the prompt."""

    def stop(done: int, total: int) -> None:
        if 2 * done > total:
            raise _Stopped

    chunks = talk.runner.generate(talk.base, max_tokens=talk.answer, progress=stop, **PLAIN)
    with suppress(_Stopped):
        next(chunks)
    return Case(talk.base)


def cancel_decode(talk: Talk) -> Case:
    """Close the answer after some tokens, then append a next turn."""
    chunks: Any = talk.runner.generate(talk.base, max_tokens=THINKING * talk.answer, **PLAIN)
    said = [chunk.token for chunk in islice(chunks, talk.answer)]
    chunks.close()
    return Case([*talk.base, *said, *talk.more()])


def restore(talk: Talk) -> Case:
    """Save the entry as a session does, and read it back into freed caches."""
    said = talk.say(talk.base, talk.answer)
    with TemporaryDirectory() as folder:
        sessions = SessionStore(Path(folder))
        with sessions.lock("verify") as held:
            sessions.save_cache("verify", cache_writer(talk.runner.entry, held, {}))
            entry = stored_entry(held)
        assert entry is not None
        talk.runner.cache.adopt(entry)
        _ = talk.runner.entry  # read it now, before the file is removed
    return Case([*talk.base, *said, *talk.more()])


def overflow(talk: Talk) -> Case:
    """Continue a history of two turns with a prompt that is longer than the context."""
    talk.say(talk.base[: len(talk.base) // 2], 1)
    said = talk.say(talk.base, talk.answer)
    history = [*talk.base, *said[:-1]]
    prompt = [*history, *talk.more(talk.runner.context - len(history) + MORE // 2)]
    return Case(prompt, _shift(talk), before=history)


def overflow_decode(talk: Talk) -> Case:
    """Let an answer grow beyond the context."""
    talk.say(talk.base, 1)
    more = talk.runner.context - len(talk.base) - max(talk.answer // 2, 1)
    return Case([*talk.base, *talk.more(more)], _shift(talk))


def _shift(talk: Talk) -> dict[str, Any]:
    return {"overflow": "shift", "keep": len(talk.base) // (2 * MESSAGES)}


class _Stopped(KeyboardInterrupt):
    """An interrupt, as by Ctrl-C, that a scenario raises."""


SCENARIOS: dict[str, Callable[[Talk], Case]] = {
    "append": append,
    "edit an early token": lambda talk: edit(talk, len(talk.base) // 8),
    "edit a middle token": lambda talk: edit(talk, len(talk.base) // 2),
    "edit the last token": lambda talk: edit(talk, len(talk.base) - 1),
    "regenerate": regenerate,
    "thinking left out": think_strip,
    "cancelled in the prefill": cancel_prefill,
    "cancelled in the answer": cancel_decode,
    "restored from a file": restore,
    "overflow": overflow,
    "overflow in the answer": overflow_decode,
}


Logits = NDArray[np.float32]


@dataclass(frozen=True)
class AnswerLogits:
    """An answer with the logits that it was chosen from."""

    tokens: list[int]
    logits: Logits
    """The logits from which each token was chosen, `[tokens, vocab]`."""
    epsilon: float
    """The relative rounding step of the type in which the logits were computed."""
    usage: Usage


def ask(runner: Runner, case: Case, count: int) -> AnswerLogits:
    """Return the greedy answer to `case`, of `count` tokens."""
    rows: list[mx.array] = []

    def keep(tokens: mx.array, logits: mx.array) -> mx.array:
        rows.append(logits)
        return logits

    options = {"max_tokens": count, "stop_tokens": [], **case.options}
    chunks = list(runner.generate(case.prompt, logits_processors=[keep], **options))
    logits = np.array(mx.concatenate(rows).astype(mx.float32))[: len(chunks)]
    tokens, epsilon = [chunk.token or 0 for chunk in chunks], float(mx.finfo(rows[0].dtype).eps)
    return AnswerLogits(tokens, logits, epsilon, _usage_of(chunks))


def _usage_of(chunks: list[Chunk]) -> Usage:
    usage = chunks[-1].usage
    assert usage is not None
    return usage


def difference(one: AnswerLogits, other: AnswerLogits) -> Difference:
    """Return the difference up to the first other token, included; masked logits are equal."""
    equal = common_prefix(as_tokens(one.tokens), as_tokens(other.tokens))
    count = min(equal + 1, len(one.tokens), len(other.tokens))
    here, there = one.logits[:count], other.logits[:count]
    with np.errstate(invalid="ignore"):
        gap = float(np.where(here == there, 0, np.abs(here - there)).max(initial=0))
    return Difference(equal, max(len(one.tokens), len(other.tokens)), gap)


MOVED_KEYS, GUESSED, PARALLEL = "overflow: moved keys", "guessed tokens", "two in parallel"
LIKELIEST = 20
"""Number of tokens whose log-probabilities are compared if there are no logits."""


def moved_keys(talk: Talk) -> Check:
    """Compare the first layer's keys after a shift with newly evaluated keys of the same tokens.

    Keys of the first layer depend on token and position only. They are compared relative to the
    largest key of each channel, because a channel with large keys would hide the others. A key was
    rotated three times, by angles that are as large as positions and are rounded like them.
    """
    runner = talk.runner
    runner.reset()
    case = overflow(talk)
    usage = ask(runner, case, talk.answer).usage
    if not runner.entry.caches:
        return Check(MOVED_KEYS, fault="the cache is empty")
    moved = _keys(runner.entry.caches[0])
    if moved is None:
        return Check(MOVED_KEYS, untested="the first layer stores no keys as they were computed")
    if usage.cached_tokens <= case.options["keep"]:
        return Check(
            MOVED_KEYS, untested="nothing was moved: the remaining text was evaluated again"
        )
    tokens = list(runner.entry.tokens)
    runner.reset()
    talk.say(tokens, 1)
    computed = _keys(runner.entry.caches[0])
    assert computed is not None
    count = min(moved.shape[2], computed.shape[2])
    was, now = (keys.astype(mx.float32) for keys in (moved, computed))
    gaps = mx.abs(was[:, :, -count:] - now[:, :, -count:]).max(axis=(0, 2))
    apart = mx.where(gaps == 0, 0, gaps / mx.abs(now).max(axis=(0, 2))).max()
    steps = [float(mx.finfo(dtype).eps) for dtype in (moved.dtype, mx.float32)]
    limit = FACTOR * (2 * steps[0] + runner.context * steps[1])
    gap = float(apart.item())  # type: ignore[arg-type]  # a float array
    return Check(MOVED_KEYS, found=Difference(0, 0, gap), limit=limit)


def _keys(cache: LayerCache) -> mx.array | None:
    """Return a copy of the last keys; None if the layer does not store them as computed."""
    if not cache.stores_plain_rows:
        return None
    keys = mx.contiguous(cache.export().arrays["keys"])
    mx.eval(keys)
    return keys


def guessed(talk: Talk) -> Check:
    """Compare answers whose tokens are guessed with answers without guesses.

    The earlier answer is what is guessed. The first answer repeats it, so the guesses are right.
    The second one, to another last token, has to undo them. The third one comes to what is left.
    """
    runner = talk.runner
    changed = talk.changed(len(talk.base) - 1)
    prompts = [talk.base, changed, [*changed, *talk.more()]]
    expected = [_alone(talk, prompt) for prompt in prompts]
    runner.reset()
    talk.say(talk.base, talk.answer)
    options = {"max_tokens": talk.answer, "logprobs": LIKELIEST, **GUESSING}
    found = [_said(list(runner.generate(prompt, **options))) for prompt in prompts]
    usages = [answer.usage for answer in found]
    if not any(use.drafted for usage in usages for use in usage.drafts):
        return Check(GUESSED, untested="nothing was guessed")
    return Check(
        GUESSED,
        found=_worst(found, expected),
        reused=sum(usage.cached_tokens for usage in usages),
        prompt=sum(usage.prompt_tokens for usage in usages),
        fault=None if runner.entry.is_true else "the layers do not hold the tokens of the cache",
    )


def parallel(talk: Talk) -> Check:
    """Compare two prompts with half of their tokens in common, at once and each alone.

    The check also measures the noise of a device with two prompts at once. It compares two prompts
    with nothing in common, at once and each alone. It also compares the attention to a common
    prefix in parts and in one product.
    """
    runner, half = talk.runner, len(talk.base) // 2
    shared = [talk.base, [*talk.base[:half], *talk.more(half // 2)]]
    unlike = [talk.base, talk.unlike(talk.base)]
    base, *others = [_alone(talk, prompt) for prompt in (*shared, unlike[1])]
    as_computed = make_layer_caches(runner.model)
    pairs = zip(runner.entry.caches, as_computed, strict=False)
    if any(other.stores_plain_rows > one.stores_plain_rows for one, other in pairs):
        return Check(PARALLEL, untested="parallel requests have no quantized caches")
    runner.reset()
    try:
        in_parts, at_once = _together(talk, shared), _together(talk, shared, at_once=True)
        apart = _together(talk, unlike)
    except NotSupportedError as error:
        return Check(PARALLEL, untested=str(error))
    noise = [_worst(apart, [base, others[1]]), _worst(in_parts, at_once)]
    usages = [answer.usage for answer in in_parts]
    none = sum(answer.usage.cached_tokens for answer in apart)
    return Check(
        PARALLEL,
        found=_worst(in_parts, [base, others[0]]),
        apart=max(noise, key=lambda one: one.logits if one.logits == one.logits else np.inf),
        reused=sum(usage.cached_tokens for usage in usages),
        prompt=sum(usage.prompt_tokens for usage in usages),
        fault=f"{none} tokens were shared by prompts with nothing in common" if none else None,
    )


@dataclass(frozen=True)
class LogprobAnswer:
    """An answer of a runner that gives no logits."""

    tokens: list[int]
    logprobs: list[dict[int, float]]
    """Log-probabilities of the likeliest tokens, by token id, for each place of the answer."""
    usage: Usage


def _alone(talk: Talk, prompt: list[int]) -> LogprobAnswer:
    talk.runner.reset()
    answer = ask(talk.runner, Case(prompt), talk.answer)
    # A sum over a vocabulary in float32 would differ more than the two runs.
    exact = answer.logits.astype(np.float64)
    # A model may answer with infinities, which the table shows.
    with np.errstate(invalid="ignore"):
        logprobs = exact - np.logaddexp.reduce(exact, axis=1, keepdims=True)
    return LogprobAnswer(
        answer.tokens, [dict(enumerate(row.tolist())) for row in logprobs], answer.usage
    )


def _together(
    talk: Talk, prompts: list[list[int]], *, at_once: bool = False
) -> list[LogprobAnswer]:
    runner = talk.runner
    parts = runner.model, runner.tokenizer, runner.facts
    with Engine(*parts, max_sequences=len(prompts), context=runner.context) as together:
        if at_once:
            together.attend_at_once()
        handles = [
            together.submit(prompt, max_tokens=talk.answer, logprobs=LIKELIEST, **PLAIN)
            for prompt in prompts
        ]
        answers = [list(handle) for handle in handles]
    return [_said(chunks) for chunks in answers]


def _said(chunks: list[Chunk]) -> LogprobAnswer:
    return LogprobAnswer(
        [chunk.token or 0 for chunk in chunks],
        [dict(chunk.top_logprobs or {}) for chunk in chunks],
        _usage_of(chunks),
    )


def _worst(answers: list[LogprobAnswer], others: list[LogprobAnswer]) -> Difference:
    """Return the largest difference; NaN if one of them is not a number."""
    found = [_against(one, other) for one, other in zip(answers, others, strict=True)]
    return Difference(
        sum(d.equal for d in found),
        sum(d.tokens for d in found),
        float(np.max([d.logits for d in found])),
    )


def _against(one: LogprobAnswer, other: LogprobAnswer) -> Difference:
    """Compare the log-probabilities that both have, up to the first token that differs."""
    equal = common_prefix(as_tokens(one.tokens), as_tokens(other.tokens))
    pairs = list(zip(one.logprobs, other.logprobs, strict=False))[: equal + 1]
    apart = [
        abs(value - there[token])
        for here, there in pairs
        for token, value in here.items()
        if token in there
    ]
    return Difference(equal, max(len(one.tokens), len(other.tokens)), float(np.max([0.0, *apart])))


Begin = Callable[[str], None]
"""A function that is called with the name of each part before the part runs."""
REPEATED = "the same cold run twice"
NUM_PARTS = len(SCENARIOS) + 6
"""Number of calls of `begin` in a whole verification, loading included."""
SECONDS = 120
"""Longest time that a verification should take, roughly."""
MOST = 2048
"""Tokens of context beyond which a longer one proves nothing new."""
RUNS = 3 * len(SCENARIOS) + 14
"""Approximate number of prompts that are evaluated whole."""
NEAR_END = 3
"""Place of the wrong token, in tokens from the end. A state forgets distant tokens."""
SMALL_STEP = 8
"""A prefill step in tokens for which a device uses other kernels, as for single tokens."""


class Verification:
    """A verification of a runner. `findings` grow while it runs, also up to an interrupt."""

    def __init__(
        self,
        runner: Runner,
        other: Runner,
        answer: int = 8,
        *,
        about: str = "",
        begin: Begin = lambda name: None,
    ) -> None:
        """Prepare a verification with answers of `answer` tokens.

        `other`: a Runner on the same model with the same caches but no checkpoints. Its passes end
        at other offsets, and the resulting difference is the noise. `about`: the first line of the
        table.
        """
        self._runner, self._other = runner, other
        self._talk, self._begin = Talk(runner, answer), begin
        self._step = min(runner.prefill_step, max(len(self._talk.base) // 5, 2))
        self.findings = Findings(runner.name, device.backend(), runner.context, about)

    def run(self) -> Findings:
        """Run all checks and return the findings."""
        self._runner.prefill_step = self._step
        self._noise()
        for number, name in enumerate(SCENARIOS):
            self._begin(name)
            step = (self._step // 2, self._step // 3, SMALL_STEP)[number % 3]
            self._other.prefill_step = max(step, 1)
            self._add(name, partial(self._row, name))
        for name, row in ((MOVED_KEYS, moved_keys), (GUESSED, guessed), (PARALLEL, parallel)):
            self._begin(name)
            self._add(name, partial(row, self._talk))
        self.findings.is_complete = True
        return self.findings

    def _add(self, name: str, check: Callable[[], Check]) -> None:
        """Add what `check` finds, or why the model refuses it."""
        try:
            found = check()
        except OptionError as error:
            found = Check(name, untested=str(error))
        self.findings.checks.append(found)

    def _noise(self) -> None:
        """Measure the difference of two equal runs, and the change that one wrong token makes."""
        self._begin(REPEATED)
        base = Case(self._talk.base)
        first, second = self._cold(self._runner, base), self._cold(self._runner, base)
        wrong = self._cold(self._runner, Case(self._talk.changed(len(self._talk.base) - NEAR_END)))
        between = difference(first, second)
        self.findings.checks.append(Check(REPEATED, found=between, noise=between))
        self.findings.wrong_token = difference(first, wrong).logits
        self.findings.epsilon = first.epsilon

    def _row(self, name: str) -> Check:
        self._runner.reset()
        case = SCENARIOS[name](self._talk)
        warm = ask(self._runner, case, self._talk.answer)
        entry, usage, fault = self._runner.entry, warm.usage, None
        if not entry.is_true:
            fault = (
                f"the cache holds {len(entry.tokens)} tokens, "
                f"but its layers are at {sorted(set(entry.offsets))}"
            )
        cold = self._cold(self._runner, case)
        # A run that shifts uses the caches under test: it shows nothing about the device.
        noise = None if case.options else difference(cold, self._cold(self._other, case))
        largest = float(np.abs(cold.logits[np.isfinite(cold.logits)]).max(initial=0))
        self.findings.largest = max(self.findings.largest, largest)
        is_tested = usage.cached_tokens or fault
        return Check(
            name,
            found=difference(warm, cold),
            noise=noise,
            reused=usage.cached_tokens,
            prompt=usage.prompt_tokens,
            fault=fault,
            untested=None if is_tested else f"nothing could be reused: {usage.reason}",
        )

    def _cold(self, runner: Runner, case: Case) -> AnswerLogits:
        runner.reset()
        if case.before is not None:
            ask(runner, Case(case.before), 1)
        return ask(runner, case, self._talk.answer)


def verification(
    model: str,
    *,
    context: int | None = None,
    tokens: int = 8,
    kv_bits: int | None = None,
    trust_remote_code: bool = False,
    begin: Begin = lambda name: None,
) -> Verification:
    """Load `model` (a name, or `random:100M`) and prepare to verify it.

    `context`: tokens of the longest prompt with its answer; None: as many as a verification of
    SECONDS allows. `tokens`: tokens of each answer. `kv_bits`: see `Runner.load`. `begin`: called
    with the name of each part. Raise OptionError if the context is too short to find anything, and
    MemoryPlanError if the model does not fit into memory.
    """
    GenerateOptions.of(max_tokens=tokens)
    begin(f"loading {model}")
    if not model.startswith("random:"):
        must_fit(plan_model(model, context, kv_bits=kv_bits))
    loaded = load_or_make(model, trust_remote_code=trust_remote_code)
    parts = loaded.model, loaded.tokenizer, loaded.facts
    make = partial(Runner, *parts, name=model, kv_bits=kv_bits)
    return prepared(make, context=context, tokens=tokens, begin=begin)


def prepared(
    make: Callable[..., Runner], *, context: int | None, tokens: int, begin: Begin
) -> Verification:
    """Prepare to verify the model of the runners that `make` makes; see `verification`."""
    begin("measuring the model's speed")
    first = make()
    limit = context or min(MOST, first.context)
    token_s, step_s = _speed(make, min(limit, first.context))
    if context is None:
        context = _affordable(limit, token_s, step_s, THINKING * tokens + 2 * MORE)
    about = (
        f"{first.name} on {device.backend()}: context {context}, answers of {tokens} tokens, "
        f"prefill {1 / token_s:.0f} tokens/s"
    )
    if first.facts.depends_on_chunks:
        about += f"; {DEPENDS}, and nothing is reused"
    runner = make(context=context, whole=True)
    other = make(context=context, checkpoint_budget=0)
    return Verification(runner, other, tokens, about=about, begin=begin)


def _affordable(limit: int, token_s: float, step_s: float, beside: int) -> int:
    """Return the context for RUNS prompts in SECONDS, a ninth of them in small steps."""
    prompt = SECONDS / RUNS / (token_s + step_s / (9 * SMALL_STEP))
    return min(limit, max(int(prompt), 2 * SMALLEST) + beside)


def _speed(make: Callable[..., Runner], most: int) -> tuple[float, float]:
    """Return the seconds of a prompt token among many, and of a single one."""
    if most < SMALLEST:
        raise OptionError(
            f"context: {most} tokens are too few to verify anything: at least {SMALLEST} are needed"
        )
    runner = make(context=most)
    count = min(256, most - 8)
    for _ in range(2):  # the first time, kernels are compiled
        runner.reset()
        began = time.perf_counter()
        chunks = list(runner.generate([1] * count, max_tokens=4, stop_tokens=[]))
        seconds = time.perf_counter() - began
    decode = _usage_of(chunks).timing.decode_s
    return (seconds - decode) / count, decode / 3
