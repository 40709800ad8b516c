"""Priorities, deadlines and growing answers, in steps of a real model."""

from __future__ import annotations

import random

import pytest
from support.engine import Engine, claim_least, request_of
from support.histories import Parts, alone, tiny_parts

from mlxrunner.errors import CacheFullError, ContextLengthError, OptionError, TimeLimitError

pytestmark = pytest.mark.usefixtures("proved_once")


def some(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(290) for _ in range(count)]


def test_an_interactive_prompt_goes_before_batch_ones(llama: Parts) -> None:
    with Engine(*llama, max_sequences=3, context=400, prefill_step=16) as runner:
        work = [runner.submit(some(i, 200), max_tokens=1, priority="batch") for i in range(2)]
        runner.step()
        question = runner.submit(some(9, 96), max_tokens=1)
        for _ in range(8):
            runner.step()
        assert question.reached == 96
        assert sum(handle.reached for handle in work) < 64
        assert len(question.result().tokens) == 1
        assert all(len(handle.result().tokens) == 1 for handle in work)


def test_an_answer_in_a_batch_yields_to_an_interactive_prompt(llama: Parts) -> None:
    """It continues with what the step has left, and comes to its end with the same tokens."""
    with Engine(*llama, max_sequences=3, context=400, prefill_step=16) as runner:
        work = runner.submit(prompt := some(1, 20), max_tokens=30, stop_tokens=[], priority="batch")
        for _ in range(5):
            runner.step()
        first = runner.submit(some(2, 4), max_tokens=60, stop_tokens=[])
        for _ in range(3):
            runner.step()
        runner.submit(some(3, 300), max_tokens=1)
        before = len(work.poll()), len(first.poll())
        for _ in range(14):
            runner.step()
        said, first_said = work.poll(), first.poll()
        assert len(first_said) == 14
        assert 0 < len(said) < 7
        rest = [chunk.token for chunk in work]
        tokens = [chunk.token for chunk in said] + rest
        assert tokens == alone(llama, prompt, 30)[before[0] :]


def test_the_nearest_deadline_is_evaluated_first(llama: Parts) -> None:
    with Engine(*llama, max_sequences=3, context=400, prefill_step=16) as runner:
        patient = runner.submit(some(1, 100), max_tokens=1)
        late = runner.submit(some(2, 100), max_tokens=1, deadline=2000)
        soon = runner.submit(some(3, 100), max_tokens=1, deadline=1000)
        for _ in range(7):
            runner.step()
        assert (patient.reached, late.reached, soon.reached) == (0, 12, 100)


@pytest.mark.parametrize(
    ("prompt", "said"), [(200, 0), (40, 5)], ids=["in its prompt", "in its answer"]
)
def test_a_deadline_ends_a_request_and_frees_its_slot(llama: Parts, prompt: int, said: int) -> None:
    """Its tokens so far can be read, the error says how long it had, and others continue."""
    with Engine(*llama, max_sequences=2, context=400, prefill_step=64) as runner:
        other = runner.submit(some(1, 40), max_tokens=12, stop_tokens=[])
        handle = runner.submit(some(2, prompt), max_tokens=150, stop_tokens=[], deadline=3600)
        for _ in range(max(1, said)):
            runner.step()
        request_of(handle).asked -= 3600
        runner.step()
        assert isinstance(handle.error, TimeLimitError)
        assert "stopped after 3600 s without an end" in str(handle.error)
        assert len(handle.poll()) == said
        with pytest.raises(TimeLimitError):
            handle.result()
        assert other.result().tokens == alone(llama, some(1, 40), 12)
        assert not any(slot.is_busy for slot in runner.slots)


def test_terms_are_checked_when_a_request_is_submitted(llama: Parts) -> None:
    with Engine(*llama, max_sequences=2, context=100) as runner:
        with pytest.raises(OptionError, match="priority: 'now' is not known"):
            runner.submit([1, 2], priority="now")  # type: ignore[typeddict-item]
        with pytest.raises(OptionError, match="deadline: -1 is out of range"):
            runner.submit([1, 2], deadline=-1)
        with pytest.raises(OptionError, match="max_step_ms: -1 is out of range"):
            Engine(*llama, max_sequences=2, max_step_ms=-1)


@pytest.mark.parametrize(
    ("name", "windows"), [("llama", {}), ("gemma3_text", {"sliding_window": 32})]
)
def test_answers_grow_and_the_youngest_of_lowest_priority_steps_back(
    name: str, windows: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three answers need more cells than there are. Each is that of a runner alone."""
    claim_least(8, 8, monkeypatch)
    given, waited = tiny_parts(name, **windows), set()
    prompts = [some(i, 30) for i in range(3)]
    with Engine(
        *given, max_sequences=3, context=300, prefill_step=64, kv_cache_tokens=200
    ) as runner:
        handles = [
            runner.submit(
                prompt, max_tokens=90, stop_tokens=[], priority="interactive" if i else "batch"
            )
            for i, prompt in enumerate(prompts)
        ]
        while not all(handle.finished for handle in handles):
            runner.step()
            back = [not one.finished and not request_of(one).is_placed for one in handles]
            waited.add(tuple(back))
        for handle, prompt in zip(handles, prompts, strict=True):
            assert handle.result().tokens == alone(given, prompt, 90)
    assert (True, False, False) in waited
    assert (False, False, True) not in waited
    assert not any(back[1] for back in waited)


def test_later_and_never_are_told_apart(llama: Parts) -> None:
    with Engine(
        *llama, max_sequences=2, context=300, prefill_step=64, kv_cache_tokens=320
    ) as runner:
        running = runner.submit(some(1, 200), max_tokens=50)
        with pytest.raises(CacheFullError, match="when another request has ended"):
            runner.submit(some(2, 100), max_tokens=50)
        running.cancel()
        runner.submit(some(2, 100), max_tokens=50).result()
    with Engine(
        *llama, max_sequences=2, context=300, prefill_step=64, kv_cache_tokens=100
    ) as runner:
        runner.submit(some(1, 40), max_tokens=10)
        with pytest.raises(ContextLengthError, match="context of 100 tokens"):
            runner.submit(some(2, 100), max_tokens=50)
        assert len(runner.run([some(2, 80)], max_tokens=50, stop_tokens=[])[0].tokens) == 20


def test_a_shared_prefix_that_is_awaited_counts_once(llama: Parts) -> None:
    """Four cold requests over a trunk begin at once where the trunk fits only once."""
    trunk = some(0, 200)
    with Engine(
        *llama, max_sequences=4, context=300, prefill_step=32, kv_cache_tokens=300
    ) as runner:
        handles = [runner.submit([*trunk, i], max_tokens=20, stop_tokens=[]) for i in range(4)]
        evaluated = [handle.result().usage.evaluated_tokens for handle in handles]
        assert evaluated == [201, 1, 1, 1]
        for i, handle in enumerate(handles):
            assert request_of(handle).said == alone(llama, [*trunk, i], 20)


@pytest.mark.parametrize("max_step_ms", [None, 5], ids=["chosen", "given"])
def test_pieces_beside_an_answer_change_no_token(llama: Parts, max_step_ms: float | None) -> None:
    with Engine(*llama, max_sequences=3, context=700, max_step_ms=max_step_ms) as runner:
        first = runner.submit(short := some(1, 9), max_tokens=150, stop_tokens=[])
        for _ in range(4):
            runner.step()
        later = runner.submit(long := some(2, 500), max_tokens=9, stop_tokens=[])
        assert later.result().tokens == alone(llama, long, 9)
        assert first.result().tokens == alone(llama, short, 150)
