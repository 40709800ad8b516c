"""Estimate what a batch costs before it runs, and cut it for several machines.

A plan has the tokens evaluated in each order, the number of lines at a time, the parts for several
workers, and the seconds, by the speed of the model's last batch. It needs no weights. No tensors.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from mlxrunner.batch.options import Order
from mlxrunner.batch.order import LineCosts, cut, extra_of, shared_tokens
from mlxrunner.batch.prompts import PromptCost, cost
from mlxrunner.batch.store import BriefLine, LineCounts, Store, StoredLine
from mlxrunner.cache.entry import Shift, TokenArray
from mlxrunner.errors import OptionError
from mlxrunner.system.folders import CacheFile
from mlxrunner.terminal.output import count_of, duration

Read = TypeVar("Read", StoredLine, BriefLine)
"""A line of a store, as it was read."""
MOST, LONG, FEWER = 8, 1024, 4
"""Run MOST lines at a time, but FEWER if lines have more than LONG new tokens on average.

Measured by benchmarks/lanes.py on MLX's CPU backend: 8 lines bring about as much as 16. The gain
shrinks as the new part gets longer and the answer shorter; the memory grows with both.
"""
_COUNTED = (
    "these counts take one line at a time and no answers: a prompt that continues the answer "
    "before it costs less"
)
ANSWER = 64
"""The tokens that an answer is expected to have, unless its limit is less.

Not measured: each machine has to expect the same, so that all of them cut alike.
"""
MOST_SHARDS = 100_000
MOST_SHOWN = 16
"""The most workers of which each has a line in the table."""
PositiveNumber = Annotated[float, msgspec.Meta(gt=0, le=1e300)]
"""A positive, finite number."""


@dataclass(frozen=True)
class Survey:
    """The lines that are to be run, in one order."""

    cost: PromptCost
    """The tokens of the prompts in this order."""
    longest_prompt: int
    longest_answer: int | None
    """The most tokens of an answer; None if a line has no limit."""
    answer_tokens: float
    """The expected tokens of all answers, each of the mean length or its limit if that is less."""

    @property
    def lines(self) -> int:
        """The number of lines."""
        return self.cost.prompts

    @property
    def evaluated(self) -> int:
        """The prompt tokens that one entry evaluates, one line at a time."""
        return self.cost.evaluated

    @property
    def new_tokens(self) -> float:
        """The mean number of tokens that a line does not share with the line before it."""
        return self.evaluated / self.lines if self.lines else 0.0

    def cells(self, lanes: int, context: int) -> int:
        """Return the most tokens that `lanes` lines store at once, if they share nothing.

        `context` is the most tokens of a prompt and its answer.
        """
        answer = context if self.longest_answer is None else self.longest_answer
        return lanes * min(context, self.longest_prompt + answer)


def survey(
    lines: Iterable[StoredLine | BriefLine],
    defaults: Mapping[str, Any],
    context: int,
    speed: Speed | None = None,
) -> Survey:
    """Survey the lines that can be run, in their order, with two in memory at a time.

    `defaults` are the options of the batch, and `context` is the most tokens of a prompt and its
    answer. Without a `speed` no answer tokens are expected.
    """
    mean = speed.answer_tokens if speed else 0.0
    longest = answer = 0
    expected, is_limited = 0.0, True

    def prompts() -> Iterator[TokenArray]:
        nonlocal longest, answer, expected, is_limited
        for line in lines:
            if line.error is None:
                limit, tokens = limit_of(line, defaults), line.tokens
                if len(tokens) >= context:
                    tokens = _within(context, tokens, {**defaults, **line.options})
                longest, answer = max(longest, len(tokens)), max(answer, limit or 0)
                expected += mean if limit is None else min(mean, limit)
                is_limited = is_limited and limit is not None
                yield tokens

    found = cost(prompts())
    return Survey(found, longest, answer if is_limited else None, expected)


def limit_of(line: StoredLine | BriefLine, defaults: Mapping[str, Any]) -> int | None:
    """Return the most tokens of a line's answer; None without a limit.

    `defaults` are the options of the batch.
    """
    limit: int | None = line.options.get("max_tokens", defaults.get("max_tokens"))
    return limit


def _within(context: int, tokens: TokenArray, options: Mapping[str, Any]) -> TokenArray:
    """Return the tokens that are run of a prompt that does not fit, after a shift if allowed."""
    if options.get("overflow") != "shift":
        return tokens
    shift = Shift(context, min(options.get("keep") or 0, context - 2))
    return np.concatenate([tokens[: shift.keep], tokens[shift.keep + shift.discard(len(tokens)) :]])


def worth(evaluated: int, lines: int) -> int:
    """Return the number of lines at a time that is likely to be fastest.

    `evaluated` is the number of prompt tokens that one entry would evaluate for all `lines`.
    """
    return max(1, min(MOST if evaluated <= LONG * lines else FEWER, lines))


def lanes_for(found: Survey, wanted: int | None, loading: Mapping[str, Any]) -> tuple[int, str]:
    """Return the number of lines at a time, and the reason if the options allow only one.

    The reason is else empty. The number may fall again when the model is loaded and several lines
    do not fit. `wanted` is the number asked for, or None for the fastest; `loading` holds the
    options of `Runner.load`.
    """
    lanes = max(1, min(wanted, found.lines)) if wanted else worth(found.evaluated, found.lines)
    if lanes > 1 and loading.get("kv_bits"):
        return 1, "--kv-bits stores one sequence only"
    return lanes, ""


@dataclass(frozen=True)
class BatchPlan:
    """The cost of a batch. Prompt tokens are those of the lines that are left to run."""

    lines: int
    """The number of lines of the input."""
    broken: int
    """The number of lines that get an error and are not run."""
    done: int
    """The number of lines that a resumed run has answered before."""
    to_run: int
    """The number of lines that are left to run."""
    tokens: int
    """The prompt tokens of the lines to run."""
    evaluated_in_input_order: int
    """The prompt tokens evaluated with one entry in the order of the input."""
    evaluated_in_prefix_order: int
    """The prompt tokens evaluated with one entry in prefix order."""
    evaluated_at_best: int
    """The prompt tokens that a cache of any size evaluates: the nodes of the tree of prefixes."""
    order: Order
    parallel: int
    """The number of lines at a time, if they fit into memory."""
    answer_tokens: float | None
    """The expected answer tokens; None if no speed is known."""
    seconds: float | None
    """The expected seconds in the chosen order; None if no speed is known."""
    speed: Speed | None
    """The speed that was measured last; None if there is none."""
    cut: CutPlan | None = None
    """The parts for several machines, if the user asks for them."""

    @property
    def evaluated(self) -> int:
        """The prompt tokens evaluated in the chosen order."""
        if self.order == "prefix":
            return self.evaluated_in_prefix_order
        return self.evaluated_in_input_order

    @property
    def saved(self) -> float:
        """The share of prompt tokens that the chosen order does not evaluate, from 0 to 1."""
        return 1 - self.evaluated / self.tokens if self.tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return all fields by name, with `evaluated` and `saved`."""
        return asdict(self) | {"evaluated": self.evaluated, "saved": self.saved}

    def table(self) -> str:
        """Return the plan as text for people: a line per count, with remarks."""
        remarks = (
            f"{self.broken} can't be run" if self.broken else "",
            f"{self.done} are done" if self.done else "",
        )
        by_input, by_prefix = self.evaluated_in_input_order, self.evaluated_in_prefix_order
        rows = [
            ("lines", self.lines, ", ".join(filter(None, remarks))),
            ("prompt tokens", self.tokens, ""),
            ("evaluated in input order", by_input, self._share(by_input)),
            ("evaluated in prefix order", by_prefix, self._share(by_prefix)),
            ("evaluated at best", self.evaluated_at_best, "by a cache of any size"),
        ]
        wide = max(len(f"{count:,}") for _, count, _ in rows)
        text = [f"{what:<25}  {count:>{wide},}  {remark}".rstrip() for what, count, remark in rows]
        text += [_COUNTED, self._time()]
        text.append(f"{self.parallel} at a time, as far as they fit into memory")
        return "\n".join([*text, *([] if self.cut is None else self.cut.lines())])

    def _share(self, evaluated: int) -> str:
        return f"{1 - evaluated / self.tokens:.0%} saved" if self.tokens else ""

    def _time(self) -> str:
        if self.seconds is None or self.speed is None:
            return "no estimate of the time: this model's speed is known after its first batch"
        speed = self.speed
        answers = f"answers {speed.decode_rate:.0f} tokens/s"
        if self.to_run and self.answer_tokens is not None:
            answers += f" and {self.answer_tokens / self.to_run:.0f} tokens long"
        return (
            f"about {duration(self.seconds)} in {self.order} order, as fast as last time: "
            f"prompts {speed.prefill_rate:.0f} tokens/s, {answers}"
        )


def make_plan(
    counts: LineCounts,
    found: Mapping[Order, Survey],
    order: Order,
    *,
    parallel: int,
    speed: Speed | None = None,
    cut: CutPlan | None = None,
) -> BatchPlan:
    """Return the plan for lines that were surveyed in both orders.

    `parallel` is the number of lines at a time, and `speed` the one with which they were surveyed.
    `cut` has the parts for several machines.
    """
    by_input, by_prefix, chosen = found["input"].cost, found["prefix"].cost, found[order]
    return BatchPlan(
        lines=counts.lines,
        broken=counts.broken,
        done=counts.done,
        to_run=chosen.lines,
        tokens=by_input.tokens,
        evaluated_in_input_order=by_input.evaluated,
        evaluated_in_prefix_order=by_prefix.evaluated,
        evaluated_at_best=by_prefix.nodes,
        order=order,
        parallel=parallel,
        answer_tokens=chosen.answer_tokens if speed else None,
        seconds=speed.seconds(chosen.evaluated, chosen.answer_tokens) if speed else None,
        speed=speed,
        cut=cut,
    )


@dataclass(frozen=True, order=True)
class Shard:
    """One of the equal parts of a batch."""

    number: int
    """The number of the part, from 1."""
    count: int

    @classmethod
    def of(cls, text: str) -> Shard:
        """Read `I/N`. Raise OptionError if it is not of that form."""
        found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
        if found is not None:
            shard = cls(int(found[1]), int(found[2]))
            if 1 <= shard.number <= shard.count <= MOST_SHARDS:
                return shard
        raise OptionError(
            f"--shard {text}: has to be I/N, a part and the number of parts, such as 1/4, with I "
            f"from 1 to N and N up to {MOST_SHARDS:,}"
        )

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def keep_shard(
    store: Store, lines: Iterable[Read], shard: Shard, defaults: Mapping[str, Any]
) -> str:
    """Keep only the lines of a shard in a store whose input was arranged.

    `lines` are those of the store in prefix order, and `defaults` the options of the batch. Return
    a digest of the whole cut, which all machines have in common.
    """
    indexes, costs = costs_of(lines, defaults)
    places = cut(costs, shard.count)
    store.keep(indexes[places[shard.number - 1] : places[shard.number]])
    digest = hashlib.sha256(np.asarray(indexes, "<i4").data)
    digest.update(np.asarray(places, "<i8").data)
    return digest.hexdigest()


def costs_of(
    lines: Iterable[Read], defaults: Mapping[str, Any], *, answer: float = ANSWER
) -> tuple[array[int], LineCosts]:
    """Return the indexes of the lines, which come in prefix order, and what the lines cost.

    Two lines are in memory at a time. `defaults` are the options of the batch, and `answer` is the
    number of tokens that an answer is expected to have. A line that can't be run costs nothing.
    """
    costing = CostRecorder(defaults, answer=answer)
    for _ in costing.of(lines):
        pass
    return costing.indexes, costing.costs


class CostRecorder:
    """Notes what lines cost while something else reads them: to read them takes longest.

    The notes take 16 bytes for each line, and a cut 8 more.
    """

    def __init__(self, defaults: Mapping[str, Any], *, answer: float = ANSWER) -> None:
        """Take the arguments of `costs_of`."""
        self._defaults, self._answer = defaults, answer
        self.indexes = array("i")
        self._evaluated, self._reused, self._answers = (array("i") for _ in range(3))

    def of(self, lines: Iterable[Read]) -> Iterator[Read]:
        """Yield the lines, which come in prefix order, and note what they cost."""
        before = b""
        for line in lines:
            key = line.key
            self._note(line, key, before)
            before = key
            yield line

    def _note(self, line: StoredLine | BriefLine, key: bytes, before: bytes) -> None:
        """Note the cost of a line with this sort key after the key `before`.

        A line that can't be run costs nothing.
        """
        tokens, shared, answer = len(key) // 4, 0, 0
        if line.error is None and tokens:
            shared = min(shared_tokens(before, key), tokens - 1)
            limit = limit_of(line, self._defaults)
            answer = int(self._answer if limit is None else min(self._answer, limit))
        self.indexes.append(line.index)
        self._evaluated.append(tokens - shared)
        self._reused.append(shared)
        self._answers.append(answer)

    @property
    def costs(self) -> LineCosts:
        """The costs of the lines so far, without a copy: no line may come any more."""
        notes = (self._evaluated, self._reused, self._answers)
        return LineCosts(*(np.frombuffer(numbers, np.intc) for numbers in notes))


@dataclass(frozen=True)
class WorkerShare:
    """The work of one worker."""

    lines: int
    evaluated: int
    seconds: float | None
    """The seconds that it is expected to take; None if no speed is known."""


@dataclass(frozen=True)
class CutPlan:
    """The parts of a batch for several workers."""

    parts: Sequence[WorkerShare]
    """The work of each worker, in the order of the shards."""
    evaluated: int
    extra: float
    """The tokens that are evaluated again, as a share of those that one machine evaluates."""
    seconds: float | None
    """The seconds of the worker that takes longest; None if no speed is known."""

    @classmethod
    def of(cls, costs: LineCosts, workers: int, answers: float, speed: Speed | None) -> CutPlan:
        """Cut lines with these costs for `workers` that all have the `speed` of this machine.

        `answers` are the expected tokens of all answers.
        """
        places = cut(costs, workers)
        expected = int(costs.answers.sum()) or 1

        def part(first: int, end: int) -> WorkerShare:
            evaluated = costs.evaluated_of(first, end)
            own = answers * int(costs.answers[first:end].sum()) / expected
            return WorkerShare(
                end - first, evaluated, speed.seconds(evaluated, own) if speed else None
            )

        parts = [part(first, end) for first, end in pairwise(places)]
        evaluated = sum(one.evaluated for one in parts)
        alone = evaluated - extra_of(costs, places)
        seconds = [one.seconds for one in parts if one.seconds is not None]
        extra = evaluated / alone - 1 if alone else 0.0
        return cls(parts, evaluated, extra, max(seconds, default=None))

    def lines(self) -> list[str]:
        """Return the plan as lines of text for people."""
        busy = [(number, part) for number, part in enumerate(self.parts, 1) if part.lines]
        count = count_of(len(self.parts), "worker")
        text = [
            f"cut for {count}: {self.evaluated:,} tokens evaluated, "
            f"{self.extra:.1%} more than by one machine"
        ]
        if len(busy) <= MOST_SHOWN:
            text += [f"  worker {n}: {_described(part)}" for n, part in busy]
        else:
            least = min((part for _, part in busy), key=lambda part: part.evaluated)
            most = max((part for _, part in busy), key=lambda part: part.evaluated)
            text += [f"  least: {_described(least)}", f"  most: {_described(most)}"]
        if len(busy) < len(self.parts):
            idle = count_of(len(self.parts) - len(busy), "worker")
            is_enough = sum(part.lines for part in self.parts) >= len(self.parts)
            why = ": to split more would cost more than it saves" if is_enough else ""
            text.append(f"  {idle} without lines{why}")
        if self.seconds is not None:
            text.append(f"about {duration(self.seconds)} on {count} as fast as this machine")
        return text


def _described(part: WorkerShare) -> str:
    seconds = "" if part.seconds is None else f", about {duration(part.seconds)}"
    return f"{count_of(part.lines, 'line')}, {part.evaluated:,} tokens evaluated{seconds}"


@dataclass(frozen=True)
class Speed:
    """The speed of a model in its last batch."""

    prefill_rate: PositiveNumber
    """Prompt tokens evaluated per second."""
    decode_rate: PositiveNumber
    """Answer tokens per second, of all lines that ran at once."""
    answer_tokens: PositiveNumber
    """The mean number of tokens of an answer."""

    def seconds(self, evaluated: int, answers: float) -> float:
        """Return the seconds for `evaluated` prompt tokens and `answers` answer tokens."""
        return evaluated / self.prefill_rate + answers / self.decode_rate


SPEEDS = CacheFile("speed.json")
"""The speeds of models, each by its name or folder."""


def known_speed(model: str) -> Speed | None:
    """Return the last measured speed of `model`, as the user names it.

    Return None if there is none, or if its figures are not positive numbers.
    """
    with suppress(ValueError, KeyError):
        return msgspec.convert(SPEEDS.values()[_key(model)], Speed)
    return None


def remember_speed(model: str, speed: Speed) -> None:
    """Keep the speed for the next estimate. Do nothing if its file can't be written."""
    SPEEDS.keep(_key(model), asdict(speed))


def _key(model: str) -> str:
    """Return the name of a model in the file; for a directory its absolute path."""
    with suppress(OSError, ValueError, RuntimeError):
        folder = Path(model).expanduser()
        if folder.is_dir():
            return str(folder.resolve())
    return model
