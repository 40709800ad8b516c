"""Nearly all of mlx-lm's architectures answer in rows of many sequences as alone.

They are tiny, with random float32 weights. The engine is driven directly, without a scheduler.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from support.architectures import CONFIGS, VOCAB, build, settings_of
from support.engine import WINDOWS_KEEP, BatchedModel, Engine, engine_for

from mlxrunner import Runner
from mlxrunner.cache.layers.factory import CacheOptions
from mlxrunner.cache.layers.recurrent import RecurrentCache, Stack
from mlxrunner.cache.protocol import Batch
from mlxrunner.models.facts import facts_of, widen_windows
from mlxrunner.testing import ByteTokenizer

DOCS = Path(__file__).parents[2] / "docs" / "many-sequences.md"
LENGTHS = (37, 1, 64, 140, 65)
PIECE, ANSWER = 64, 4


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(3, VOCAB, count).tolist() for count in lengths]


def model_of(architecture: str, **config: Any) -> Any:
    model = build(architecture, **config)
    widen_windows(model)  # as loading it does
    return model


def engine_of(
    model: Any,
    slack: int = WINDOWS_KEEP,
    bits: int | None = None,
    *,
    depends_on_chunks: bool = False,
) -> Any:
    return engine_for(
        model,
        CacheOptions(context=256, rewind_slack=slack, kv_bits=bits),
        max_sequences=6,
        capacity=256,
        max_batch=200,
        depends_on_chunks=depends_on_chunks,
    )


class Alone:
    """Sequences on mlx-lm's own caches, one by one."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def answer(self, prompt: list[int], count: int) -> tuple[list[int], list[mx.array]]:
        """Return greedy tokens and their log-probabilities `[vocab]`."""
        cache = make_prompt_cache(self.model)
        for begin in range(0, len(prompt), PIECE):
            logits = self.model(mx.array([prompt[begin : begin + PIECE]]), cache=cache)[0, -1]
            mx.eval(logits)
        tokens, logprobs = [], []
        for _ in range(count):
            logprobs.append(logits - mx.logsumexp(logits))
            tokens.append(int(mx.argmax(logits).item()))  # type: ignore[arg-type]
            logits = self.model(mx.array([[tokens[-1]]]), cache=cache)[0, -1]
        return tokens, logprobs


def forward(engine: Any, work: Mapping[int, list[int]]) -> dict[int, mx.array]:
    """Run tokens of some sequences; return the logits `[vocab]` after the last one of each."""
    done = {sequence: engine.caches(sequence)[0].offset for sequence in work}
    row = [(done[s] + place, s) for s, tokens in work.items() for place in range(len(tokens))]
    ends = np.cumsum([len(tokens) for tokens in work.values()]) - 1
    batch = Batch([position for position, _ in row], [sequence for _, sequence in row])
    tokens = mx.array([token for tokens in work.values() for token in tokens])
    return dict(zip(work, engine.forward(tokens, batch, ends.tolist()), strict=True))


def together(
    engine: Any, texts: list[list[int]], count: int
) -> list[tuple[list[int], list[mx.array]]]:
    """Return the answers of all `texts`, which begin one after the other, two prefills at once."""
    answers: list[tuple[list[int], list[mx.array]]] = [([], []) for _ in texts]
    left = [list(text) for text in texts]
    number = 0
    while any(len(tokens) < count for tokens, _ in answers):
        begun = [s for s in range(len(texts)) if number >= 2 * s and len(answers[s][0]) < count]
        prefilling = [s for s in begun if len(left[s]) > 1][:2]
        carried = [s for s in begun if s in prefilling or len(left[s]) == 1]
        if engine.most_sequences == 1:
            carried = carried[:1]
        work = {sequence: left[sequence][:PIECE] for sequence in carried}
        for sequence, logits in (forward(engine, work) if work else {}).items():
            del left[sequence][:PIECE]
            if not left[sequence]:
                tokens, logprobs = answers[sequence]
                logprobs.append(logits - mx.logsumexp(logits))
                tokens.append(int(mx.argmax(logits).item()))  # type: ignore[arg-type]
                left[sequence] = tokens[-1:]
        number += 1
    return answers


@pytest.mark.exhaustive(
    8, "qwen3_5", "falcon_h1", "deepseek_v32", "llama4", "rwkv7", "gemma3n", "ministral3", "gpt2"
)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_rows_of_many_answer_as_each_alone(architecture: str) -> None:
    """Prompts of 1 to 140 tokens, in pieces, begun one after the other; and the docs say how."""
    model = model_of(architecture)
    texts = prompts()
    expected = [Alone(model).answer(text, ANSWER) for text in texts]
    engine = engine_of(model)
    found = together(engine, texts, ANSWER)
    assert ways_of(engine) == documented()[architecture], engine.why_alone
    engine.close()
    for (tokens, logprobs), (wanted, known) in zip(found, expected, strict=True):
        assert tokens == wanted
        gaps = [mx.abs(a - b).max() for a, b in zip(logprobs, known, strict=True)]
        assert mx.stack(gaps).max().item() < 1e-3  # type: ignore[operator]


SHARING = """
deepseek_v3 dbrx gemma2 gpt_neox llama minicpm3 nemotron phi3 smollm3 telechat3
afmoe cohere2 gemma3_text gemma3n gpt_oss olmo3 step3p5
bailing_hybrid jamba kimi_linear lfm2 nemotron_h plamo2 qwen3_5
deepseek_v32 longcat_flash nanochat plamo qwen talkie
mamba mamba2 rwkv7 afm7 gpt2 gpt_bigcode
baichuan_m1 falcon_h1 llama4 longcat_flash_ngram recurrent_gemma
""".split()
"""Some of each mix of layer caches and way to run together, all of a mix that few have."""


@pytest.mark.exhaustive(4, "qwen3_5", "llama4", "falcon_h1", "afm7")
@pytest.mark.parametrize("architecture", SHARING)
def test_requests_with_prefixes_in_common_answer_as_the_single_runner(architecture: str) -> None:
    """Four over one header, in three slots, and then the next turn of the last two."""
    model = build(architecture)
    facts = facts_of(model, {"model_type": architecture, "vocab_size": VOCAB})
    header, *ends = prompts((40, 3, 30, 1, 50))
    texts = [header + end for end in ends]
    with Engine(
        model, ByteTokenizer(), facts, max_sequences=3, context=200, prefill_step=48
    ) as runner:
        results = runner.run(texts, max_tokens=4, stop_tokens=[])
        for text, result in zip(texts[2:], results[2:], strict=True):
            texts.append([*text, *result.tokens, 7, 8])
        results += runner.run(texts[4:], max_tokens=2, stop_tokens=[])
    for text, result in zip(texts, results, strict=True):
        alone = Runner(model, ByteTokenizer(), facts, context=200)
        wanted = list(alone.generate(text, max_tokens=len(result.tokens), stop_tokens=[]))
        assert result.tokens == [chunk.token for chunk in wanted if chunk.token is not None]


def ways_of(engine: Any) -> str:
    ways = {part for way in engine.ways for part in way.split(" and ")}
    return " and ".join(sorted(ways))


def documented() -> dict[str, str]:
    rows = re.findall(
        r"^\| (row|stacked|per sequence|one at a time)(.*?) \| (.*) \|$",
        DOCS.read_text(encoding="utf-8"),
        re.M,
    )
    return {name: way + more for way, more, names in rows for name in re.findall(r"`(.*?)`", names)}


def test_the_docs_name_every_architecture_that_is_tried() -> None:
    """No other ones, and at least 45 that run several sequences at once."""
    assert documented().keys() == CONFIGS.keys()
    assert sum(ways != "one at a time" for ways in documented().values()) >= 45


HYBRIDS = ["qwen3_5", "lfm2", "mamba2", "falcon_h1", "recurrent_gemma", "rwkv7"]


def cold(model: Any, tokens: list[int]) -> mx.array:
    logits: mx.array = model(mx.array([tokens]), cache=make_prompt_cache(model))[0, -1]
    return logits


class Stacked:
    """Three sequences that have decoded together, and what each of them has."""

    def __init__(self, model: Any) -> None:
        self.model, self.engine = model, engine_of(model)
        self.tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
        self.pass_({0: [5, 6, 7, 8], 1: [9, 10], 2: [11, 12, 13]})
        for step in range(3):
            self.pass_({0: [20 + step], 1: [30 + step], 2: [40 + step]})
        self.stacks = [cache for cache in self.apart(0) if cache.stack is not None]
        assert self.stacks == self.apart(0)

    def apart(self, sequence: int) -> list[RecurrentCache]:
        caches = self.engine.caches(sequence)
        return [cache for cache in caches if isinstance(cache, RecurrentCache)]

    def pass_(self, work: Mapping[int, list[int]]) -> None:
        """Run tokens; every logit has to be that of a cold run."""
        for sequence, logits in forward(self.engine, work).items():
            self.tokens[sequence] += work[sequence]
            expected = cold(self.model, self.tokens[sequence])
            assert mx.allclose(logits, expected, atol=2e-3), sequence

    def rewind(self, sequence: int, to: int) -> None:
        for cache in self.engine.caches(sequence):
            cache.rewind(to)
        del self.tokens[sequence][to:]


@pytest.mark.exhaustive(2, "qwen3_5")
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_one_member_of_a_stack_can_undo_its_last_pass(architecture: str) -> None:
    """The others are not touched, and all continue as a cold run."""
    stacked = Stacked(model_of(architecture))
    for cache in stacked.apart(1):
        assert (cache.offset, cache.reachable(cache.offset - 1)) == (5, 4)
        assert cache.reachable(3) == 0
    stacked.rewind(1, 4)
    stacked.pass_({0: [50], 1: [51], 2: [52]})
    stacked.rewind(0, 7)
    stacked.rewind(2, 6)
    stacked.pass_({0: [53, 54], 2: [55, 56]})
    stacked.pass_({1: [57]})
    stacked.pass_({0: [1], 1: [2], 2: [3]})


@pytest.mark.exhaustive(2, "qwen3_5")
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_pass_that_fails_is_repaired_by_a_rewind(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that it wrote is left, if it fails in the first layer or in the last."""
    stacked = Stacked(model_of(architecture))
    views = stacked.engine._apart
    for place in (0, len(views) - 1):
        before = {s: len(tokens) for s, tokens in stacked.tokens.items()}
        given = type(views[place]).given

        def fail(self: Any, cache: Any, at: Any = views[place], given: Any = given) -> Any:
            if self is at:
                raise RuntimeError("no memory")
            return given(self, cache)

        monkeypatch.setattr(type(views[place]), "given", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            forward(stacked.engine, {0: [60], 1: [61], 2: [62]})
        monkeypatch.undo()
        for sequence, offset in before.items():
            stacked.rewind(sequence, offset)
            assert {cache.offset for cache in stacked.engine.caches(sequence)} == {offset}
        stacked.pass_({0: [70], 1: [71], 2: [72]})


@pytest.mark.exhaustive(2, "qwen3_5")
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_prompts_of_several_lengths_run_in_stages(architecture: str) -> None:
    """Beside answers, those that begin and those that were begun; each can undo the pass."""
    stacked, random = Stacked(model_of(architecture)), Random(0)
    for _ in range(4):
        for one in (3, 4, 5):
            if stacked.tokens.setdefault(one, []):
                stacked.rewind(one, 0)
        lengths = {one: random.choice([1, 2, 2, 3, 5, 9]) for one in stacked.tokens}
        work = {one: random.choices(range(5, 90), k=size) for one, size in lengths.items()}
        before = {one: len(stacked.tokens[one]) for one in work}
        stacked.pass_(work)
        for one in random.sample(sorted(work), 3):
            stacked.rewind(one, before[one])
        again = [one for one in work if len(stacked.tokens[one]) == before[one]]
        stacked.pass_({one: random.choices(range(5, 90), k=random.choice([1, 4])) for one in again})


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_that_fails_is_repaired_by_a_rewind(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All members are where they were before the pass, whichever stage it reached."""
    stacked = Stacked(model_of("qwen3_5"))
    before = {one: len(tokens) for one, tokens in stacked.tokens.items()}
    work = {0: [60, 61], 1: [62, 63, 64], 2: [65, 66, 67, 68, 69]}
    stages = Stack.stages

    def fail(self: Stack, firsts: Any) -> Any:
        for number, cache in enumerate(stages(self, firsts)):
            if number == stage:
                raise RuntimeError("no memory")
            yield cache

    monkeypatch.setattr(Stack, "stages", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        forward(stacked.engine, work)
    monkeypatch.undo()
    for sequence, offset in before.items():
        stacked.rewind(sequence, offset)
        assert {cache.offset for cache in stacked.engine.caches(sequence)} == {offset}
    stacked.pass_({0: [70], 1: [71], 2: [72]})
    stacked.pass_(work)


@pytest.mark.exhaustive(2, "qwen3_5")
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_checkpoint_of_a_member_brings_it_back_and_makes_a_fork(architecture: str) -> None:
    """A snapshot, its export and `copy` all hold the member's own state, whatever came since."""
    stacked = Stacked(model_of(architecture))
    engine, offset = stacked.engine, len(stacked.tokens[1])
    kept = [cache.snapshot() for cache in stacked.apart(1)]
    mx.eval([snapshot.arrays for snapshot in kept])
    saved = [cache.export() for cache in stacked.apart(1)]
    stacked.pass_({0: [80], 1: [81], 2: [82]})
    stacked.pass_({0: [83], 1: [84], 2: [85]})
    for group in engine.groups:
        group.copy_prefix(1, 3, offset)
        group.remove(1, offset)
    for cache, fork, snapshot in zip(stacked.apart(1), stacked.apart(3), kept, strict=True):
        cache.restore(snapshot, offset)
        fork.copy(cache, offset)
    del stacked.tokens[1][offset:]
    stacked.tokens[3] = list(stacked.tokens[1])
    stacked.pass_({0: [90], 1: [91], 2: [92], 3: [93]})
    stacked.pass_({3: [94], 1: [95]})
    for group in engine.groups:
        group.copy_prefix(1, 4, offset)
    for fork, one in zip(stacked.apart(4), saved, strict=True):
        fork.adopt(one, offset)
    stacked.tokens[4] = stacked.tokens[1][:offset]
    stacked.pass_({4: [96], 0: [97]})


def test_a_fork_can_begin_before_the_last_pass() -> None:
    """It gets the member's states of that moment."""
    stacked = Stacked(model_of("qwen3_5"))
    before = len(stacked.tokens[1]) - 1
    for group in stacked.engine.groups:
        group.copy_prefix(1, 3, before)
    for cache, fork in zip(stacked.apart(1), stacked.apart(3), strict=True):
        fork.copy(cache, before)
    stacked.tokens[3] = stacked.tokens[1][:before]
    stacked.pass_({3: [94], 1: [95]})


def test_a_stack_is_kept_while_its_members_stay() -> None:
    """In whatever order they come; no array of a single one is made meanwhile."""
    stacked = Stacked(model_of("qwen3_5"))
    stack = stacked.apart(0)[0].stack
    stacked.pass_({2: [1], 0: [2], 1: [3]})
    assert stacked.apart(0)[0].stack is stack
    assert stacked.apart(2)[0].stack is stack
    stacked.pass_({2: [4], 0: [5]})
    assert stacked.apart(0)[0].stack is stacked.apart(2)[0].stack is not stack
    assert stacked.apart(1)[0].offset == len(stacked.tokens[1])
    stacked.pass_({1: [6], 2: [7], 0: [8]})


def test_a_stack_of_as_many_others_is_another_stack() -> None:
    """Two of three sequences run in each step, and each pass has the states of its own two."""
    stacked = Stacked(model_of("qwen3_5"))
    for pair in ((0, 1), (0, 2), (1, 2), (0, 1), (2, 0), (1, 0)):
        stacked.pass_({number: [10 + number] for number in pair})


def test_a_member_that_leaves_does_not_keep_the_stack() -> None:
    """Its bytes are its own, and what it was cut from is freed."""
    random = mx.random.normal
    caches = [RecurrentCache(ArraysCache(size=2)) for _ in range(8)]
    for cache in caches:
        cache.begin_forward()
        cache.inner.cache = [random((1, 4, 1000)), random((1, 1000))]
        cache.end_forward(1)
    before = mx.get_active_memory()
    stack = Stack.of(caches)
    mx.eval(stack.state)
    snapshot = caches[3].snapshot()
    mx.eval(snapshot.arrays)
    assert snapshot.nbytes == caches[3].nbytes == 4 * 5000
    caches[3].leave()
    mx.eval(caches[3].state)
    for cache in (*caches[:3], *caches[4:]):
        cache.free()
    del stack, cache
    assert mx.get_active_memory() - before < 4 * 5000 * 3


@pytest.mark.exhaustive(2, "qwen3_5")
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_5"])
def test_a_quantized_cache_runs_per_sequence(architecture: str) -> None:
    """With `kv_bits` the answers are those of the same caches alone."""
    model, texts = model_of(architecture, head_dim=32), prompts((20, 31, 3))
    engine = engine_of(model, bits=8)
    assert "per sequence" in engine.ways
    found = together(engine, texts, 8)
    for text, (tokens, _) in zip(texts, found, strict=True):
        alone = engine_of(model, bits=8, depends_on_chunks=True)
        assert alone.most_sequences == 1
        assert tokens == together(alone, [text], 8)[0][0]
    engine.close()


def test_a_model_that_depends_on_chunks_runs_one_sequence_at_a_time() -> None:
    """It says why, is not changed, and refuses a step of two."""
    model = model_of("qwen3")
    kinds = [type(module) for module in model.modules()]
    engine = engine_of(model, depends_on_chunks=True)
    assert "depend on how a prompt is cut" in (engine.why_alone or "")
    assert [type(module) for module in model.modules()] == kinds
    assert engine.ways == ["one at a time"] * 4
    with pytest.raises(ValueError, match=r"one sequence, not \[0, 1\]"):
        engine.forward(mx.array([1, 2]), Batch([0, 0], [0, 1]), [0])
    assert not any(cache.offset for cache in engine.caches(0))
    engine.close()


def test_closing_gives_every_module_its_own_class_back() -> None:
    """After a proof that failed, too."""
    for architecture in ("falcon_h1", "llama4", "gpt2"):
        model = model_of(architecture)
        kinds = [type(module) for module in model.modules()]
        engine_of(model).close()
        assert [type(module) for module in model.modules()] == kinds


def test_the_slack_of_windows_is_that_of_their_cells() -> None:
    engine = engine_of(model_of("gemma3_text"), slack=7)
    assert isinstance(engine, BatchedModel)
    assert {group.memory for group in engine.groups} == {None, 32 + 7}
    engine.close()


def test_few_cells_do_not_narrow_the_windows_of_each_sequence() -> None:
    """Layers that are apart see a whole window, whatever the share of the cells is."""
    config = {"vocab_size": 300}
    model = build("baichuan_m1", **config)
    given = model, ByteTokenizer(), facts_of(model, settings_of("baichuan_m1") | config)
    prompt = list(range(1, 61))
    options: dict[str, Any] = {"max_tokens": 5, "stop_tokens": [], "logprobs": 0}
    expected = Runner(*given, context=100).complete(prompt, **options)
    with Engine(*given, max_sequences=4, context=100, kv_cache_tokens=100) as runner:
        result = runner.complete(prompt, **options)
    assert result.tokens == expected.tokens
    pairs = zip(result.logprobs or [], expected.logprobs or [], strict=True)
    assert max(abs(ours[0] - its[0]) for ours, its in pairs) < 1e-4
