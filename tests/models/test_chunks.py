"""Models that depend on their chunks are mended for windows, and otherwise never reused."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from click.testing import CliRunner, Result
from mlx.utils import tree_flatten
from support.checks import read_lines
from support.engine import Engine
from support.models import _TINY, change_json, tiny_config, tiny_model, write_model
from support.saving import stored

from mlxrunner import ModelError, Runner, cli
from mlxrunner.cache.layers.attention import SlidingWindowCache
from mlxrunner.cache.layers.factory import make_layer_caches
from mlxrunner.models.facts import DEPENDS, depends_on_chunks, facts_of
from mlxrunner.models.load import PROBES, load_model
from mlxrunner.profiling.profile import Profile
from mlxrunner.sessions.store import SessionStore
from mlxrunner.testing import ByteTokenizer

PLAMO: dict[str, Any] = {"head_dim": 16, "sliding_window": 12, "sliding_window_pattern": 2}
PLAMO |= {"num_hidden_layers": 4, "max_position_embeddings": 4096}


def text(length: int, vocab: int = 290) -> list[int]:
    return [number * 37 % vocab for number in range(length)]


@pytest.fixture
def as_mlx_lm_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows hold what mlx-lm's caches hold, not what its PLaMo 3 asks a mask for."""
    monkeypatch.setattr("mlxrunner.models.facts.masks_asked", lambda model: {})


def plamo(seed: int = 0, **config: Any) -> tuple[Any, dict[str, Any]]:
    settings = tiny_config("plamo3", vocab_size=300, **{**PLAMO, **config})
    return tiny_model(settings, seed), settings


def runner_of(model: Any, config: dict[str, Any], **options: Any) -> Runner:
    return Runner(model, ByteTokenizer(), facts_of(model, config), context=400, **options)


def answer(runner: Runner, prompt: list[int], count: int = 6) -> list[tuple[int | None, float]]:
    chunks = runner.generate(prompt, max_tokens=count, stop_tokens=[], logprobs=0)
    return [(chunk.token, pytest.approx(chunk.logprob, abs=2e-4)) for chunk in chunks]


@pytest.mark.exhaustive(3)
@pytest.mark.parametrize(
    "options", [{}, {"rewind_slack": 0, "checkpoint_interval": 20}], ids=["usual", "checkpoints"]
)
@pytest.mark.parametrize("seed", range(3))
def test_a_window_holds_what_its_model_asks_for(seed: int, options: dict[str, int]) -> None:
    """PLaMo 3 gets the one token more that it wants, and random histories lose no reuse."""
    model, config = plamo(seed)
    warm = runner_of(model, config, prefill_step=17, **options)
    dice, said = random.Random(seed), [1]
    windows = [cache for cache in make_layer_caches(model) if isinstance(cache, SlidingWindowCache)]
    assert {cache.window for cache in windows} == {13}
    reused = 0
    for _ in range(12):
        kept = said[: dice.randrange(len(said) + 1)] if dice.random() < 0.5 else said
        prompt = [*kept, *(dice.randrange(290) for _ in range(dice.randrange(1, 40)))][-300:]
        cold = runner_of(model, config, prefill_step=dice.choice((5, 64)))
        found = answer(warm, prompt)
        assert found == answer(cold, prompt)
        assert warm.usage is not None
        reused += warm.usage.cached_tokens
        said = [*prompt, *(token or 0 for token, _ in found)]
    assert reused > 100


def test_its_prompts_are_evaluated_as_without_any_cache() -> None:
    """The mask alone says what a query sees: cut anywhere, the logits are those of one piece."""
    model, config = plamo()
    prompt = text(70)
    logits = model(mx.array([prompt]))[0, -1]
    expected = logits - mx.logsumexp(logits)
    options: dict[str, Any] = {"max_tokens": 1, "stop_tokens": [], "logprobs": 0}
    for step in (1, 7, 13, 69):
        (chunk,) = runner_of(model, config, prefill_step=step).generate(prompt, **options)
        assert chunk.token == mx.argmax(logits).item()
        assert chunk.logprob == pytest.approx(expected[chunk.token].item(), abs=1e-4)


def test_it_is_the_same_in_parallel_and_after_a_session(tmp_path: Path) -> None:
    """Two at once, and an entry that came back from a file."""
    model, config = plamo()
    prompts = [text(60), text(40) + [5] * 30]
    alone = [answer(runner_of(model, config), prompt, 20) for prompt in prompts]
    parts = model, ByteTokenizer(), facts_of(model, config)
    options: dict[str, Any] = {"max_tokens": 20, "stop_tokens": [], "logprobs": 0}
    with Engine(*parts, max_sequences=2, context=200) as together:
        handles = [together.submit(prompt, **options) for prompt in prompts]
        assert [[(chunk.token, chunk.logprob) for chunk in handle] for handle in handles] == alone
    runner, sessions = runner_of(model, config), SessionStore(tmp_path)
    said = [*prompts[0], *(token or 0 for token, _ in answer(runner, prompts[0]))]
    restore(runner, sessions)
    following = [*said, 7, 8, 9]
    assert answer(runner, following) == answer(runner_of(model, config), following)
    assert runner.usage is not None
    assert runner.usage.cached_tokens == len(said) - 1


def restore(runner: Runner, sessions: SessionStore) -> None:
    runner.cache.adopt(stored(sessions, runner.entry))


@pytest.mark.parametrize("name", ["llama", *_TINY])
def test_no_model_of_ours_is_accused(name: str) -> None:
    """Every kind of layer, with windows, chunks and states."""
    model = tiny_model(tiny_config(name))
    assert not depends_on_chunks(model, 288)


@pytest.mark.exhaustive(4)
@pytest.mark.parametrize(
    "dtype", [mx.float32, mx.bfloat16, mx.float16], ids=["float32", "bfloat16", "float16"]
)
@pytest.mark.parametrize("window", [2, 12, 4096])
def test_it_is_found_with_a_few_tokens(
    window: int, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few tokens find it for any window, and find nothing where windows hold enough."""

    def found() -> set[bool]:
        made = set()
        for seed in range(5):
            model, config = plamo(seed, sliding_window=window)
            model.set_dtype(dtype)
            facts_of(model, config)
            made.add(depends_on_chunks(model, 300))
        return made

    assert found() == {False}
    monkeypatch.setattr("mlxrunner.models.facts.masks_asked", lambda model: {})
    assert found() == {True}


def test_a_model_that_cannot_be_run_is_not_accused() -> None:
    """Whoever runs it will hear why; one whose logits are no numbers proves nothing."""
    model, _ = plamo()
    model.lm_head.weight = mx.full(model.lm_head.weight.shape, float("nan"))
    assert not depends_on_chunks(model, 300)
    del model.lm_head
    assert not depends_on_chunks(model, 300)


@pytest.fixture
def folder(tmp_path: Path, as_mlx_lm_has_it: None) -> Path:
    write_model(tmp_path / "plamo", "plamo3", **PLAMO)
    return tmp_path / "plamo"


def test_it_is_named_at_load_and_never_reused(
    folder: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Each request is cold and says why, a session is text, and nothing is evaluated early."""
    with caplog.at_level(logging.WARNING, "mlxrunner"):
        runner = Runner.load(str(folder), 400, reserve=False)
    assert [record.message for record in caplog.records if record.name == "mlxrunner"] == [
        f"{folder}: {DEPENDS}, so nothing is reused: every prompt is evaluated whole"
    ]
    assert runner.facts.depends_on_chunks
    said: list[int] = text(60, 250)
    for number in range(4):
        if number == 3:
            restore(runner, SessionStore(tmp_path / "sessions"))
        found = answer(runner, said)
        assert found == answer(Runner.load(str(folder), 400, reserve=False), said)
        assert runner.usage is not None
        assert runner.usage.cached_tokens == 0
        if number:
            assert (runner.usage.reason, runner.usage.cache.evicted_by) == ("entry_freed", DEPENDS)
        said = [*said, *(token or 0 for token, _ in found), 9]
    assert runner.evaluate(said) == 0
    too_long = [*said, *range(200), *range(200)]
    options: dict[str, Any] = {"max_tokens": 5, "stop_tokens": [], "overflow": "shift", "keep": 3}
    cold = Runner.load(str(folder), 400, reserve=False)
    warm, new = (one.complete(too_long, **options).tokens for one in (runner, cold))
    assert warm == new


def test_it_runs_one_request_at_a_time(folder: Path) -> None:
    """With the reason, through the same interface; nothing is reused."""
    loaded = load_model(str(folder))
    prompt = text(40, 250)
    with Engine.of(loaded, max_sequences=2, context=100, reserve=False) as runner:
        assert runner.why_alone == DEPENDS
        results = runner.run([prompt, [*prompt, 7]], max_tokens=3, stop_tokens=[])
    assert [result.usage.cached_tokens for result in results] == [0, 0]


def test_nothing_of_it_is_verified_and_nothing_accused(folder: Path, tmp_path: Path) -> None:
    """--verify-cache looks at what was reused."""
    runner = Runner.load(str(folder), 400, reserve=False)
    profile = Profile(events=tmp_path / "events.jsonl", verify=1.0)
    profile.watch(runner)
    for count in (40, 50, 70):
        answer(runner, text(count, 250))
    profile.finish(strict=True)
    events = read_lines(tmp_path / "events.jsonl")
    assert [event["verify"] for event in events] == [None] * 3


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("is_tried", [True, False], ids=["named", "not tried"])
def test_verify_proves_nothing_about_it(
    folder: Path, is_tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code is 5, since cold runs differ as much as one wrong token makes."""
    if not is_tried:
        monkeypatch.setattr("mlxrunner.models.load.depends_on_chunks", lambda model, vocab: False)
    result = verified(folder)
    assert "changes nothing" not in result.stdout
    assert result.exit_code in ((5,) if is_tried else (4, 5)), result.stdout


def verified(folder: Path) -> Result:
    command = ["verify", str(folder), "--context", "200", "--max-tokens", "6"]
    return CliRunner().invoke(cli.main, command)


@pytest.mark.exhaustive(0)
def test_verify_passes_where_windows_hold_what_is_asked_for(tmp_path: Path) -> None:
    """The whole of it, parallel and moved keys included."""
    write_model(tmp_path / "m", "plamo3", **PLAMO)
    result = verified(tmp_path / "m")
    assert result.exit_code == 0, result.stdout
    assert "15 of 15 rows tested, and reuse changes nothing in them." in result.stdout


def test_a_model_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again from the same files; but after any of them, its code or the versions changed."""
    tried: list[int] = []

    def probe(model: Any, vocab: int) -> bool:
        tried.append(vocab)
        return depends_on_chunks(model, vocab)

    monkeypatch.setattr("mlxrunner.models.load.depends_on_chunks", probe)
    write_model(tmp_path / "model")
    other = write_model(tmp_path / "other", seed=1)

    def count(folder: str = "model") -> int:
        tried.clear()
        assert load_model(str(tmp_path / folder)).facts.depends_on_chunks is False
        return len(tried)

    assert [count(), count(), count("other"), count("other"), count()] == [1, 0, 1, 0, 0]
    change_json(tmp_path / "model" / "config.json", rope_theta=5000.0)
    assert [count(), count()] == [1, 0]
    monkeypatch.setattr("mlxrunner.models.load.PROBE_VERSION", 2)
    assert [count(), count()] == [1, 0]
    PROBES.path.write_text('{"crc32": "00000000"}')
    assert [count(), count()] == [1, 0]
    with pytest.raises(ModelError, match="NaN"):
        weights = {name: array * float("nan") for name, array in tree_flatten(other.parameters())}
        mx.save_safetensors(str(tmp_path / "other" / "model.safetensors"), weights)
        count("other")


def test_what_depends_on_chunks_is_remembered_and_said_again(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is reused after the second load either."""
    for number in range(2):
        assert load_model(str(folder)).facts.depends_on_chunks
        assert caplog.text.count(DEPENDS) == number + 1
        monkeypatch.setattr("mlxrunner.models.load.depends_on_chunks", None)
