"""--verify-cache: a spoiled entry is caught, a healthy one never accused."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from click.testing import CliRunner
from support.checks import ends, raising
from support.events import run, summary_of
from support.models import tiny_config, tiny_model

from mlxrunner import cli
from mlxrunner.errors import LogitsError, OptionError, VerifyError
from mlxrunner.models.facts import facts_of
from mlxrunner.profiling.profile import Measured, Profile, Verifier, profiled
from mlxrunner.runner import Runner
from mlxrunner.testing import ByteTokenizer

ARCHITECTURES = (
    "llama qwen3 gemma3_text lfm2 deepseek_v3 qwen3_next jamba mamba2 gpt_oss llama4".split()
)


def watched(
    architecture: str = "llama",
    *,
    verify: float = 1.0,
    context: int = 512,
    sizes: dict[str, int] | None = None,
    chance: Callable[[], float] = random.random,
    **options: Any,
) -> tuple[Runner, list[dict[str, Any]]]:
    """A runner on a tiny model, and the events of its requests as they come."""
    config = tiny_config(architecture, vocab_size=300, **(sizes or {}))
    model = tiny_model(config)
    events: list[dict[str, Any]] = []
    parts = model, ByteTokenizer(), facts_of(model, config)
    runner = Runner(*parts, name=architecture, context=context, prefill_step=16, **options)
    keep = [lambda event: events.append(event.as_dict())]
    Profile(verify=verify, sinks=keep, chance=chance).watch(runner)
    return runner, events


def ask(runner: Runner, prompt: Any, **options: Any) -> None:
    list(runner.generate(prompt, **({"max_tokens": 12, "stop_tokens": []} | options)))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_healthy_entry_is_never_accused(architecture: str) -> None:
    """Every answer token of any prompt is compared, and the entry stays as it was."""
    runner, events = watched(architecture)
    text = "the quick brown fox jumps over the lazy dog " * 2
    ask(runner, text)
    for prompt in (f"{text}again", f"{text[:60]}other words", f"{text[:60]}other words", text[:50]):
        ask(runner, prompt)
        assert runner.entry.is_true
    assert all((event["verify"] is not None) == (event["cached_tokens"] > 0) for event in events)
    found = [event["verify"] for event in events if event["verify"]]
    assert len(found) >= 2
    assert all(one["equal"] and one["first_difference"] is None for one in found), found
    assert all(one["tokens"] == 11 for one in found)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "lfm2", "mamba2"])
def test_a_spoiled_entry_is_caught(architecture: str, caplog: pytest.LogCaptureFixture) -> None:
    """A value changed between requests is found, freed and reported, and the next is right."""
    runner, events = watched(architecture)
    ask(runner, "the quick brown fox")
    for cache in runner.entry.caches:
        spoil(cache)
    with caplog.at_level(logging.WARNING, "mlxrunner"):
        ask(runner, [*runner.entry.tokens, 7, 8])
    found = events[-1]["verify"]
    assert found["equal"] is False
    assert found["logits_difference"] > found["tolerance"] or found["first_difference"] == 0
    assert "the cache was wrong and is freed: request 2 run again cold: " in caplog.text
    ask(runner, [*range(1, 30)])
    assert events[-1]["reason"] == "verify_failed"
    ask(runner, [*range(1, 30), 3])
    assert events[-1]["verify"]["equal"] is True


@pytest.mark.parametrize("noise", [0.5, float("inf")])
def test_a_tolerance_that_hides_a_wrong_token_certifies_nothing(
    noise: float, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request within the tolerance is untested, neither verified nor different."""
    runner, events = watched()
    ask(runner, "the quick brown fox jumps")
    monkeypatch.setattr(Verifier, "_measure", lambda *_: Measured(noise, 4.0))
    with caplog.at_level(logging.WARNING, "mlxrunner"):
        ask(runner, "the quick brown fox sleeps")
    found = events[-1]["verify"]
    assert (found["equal"], found["wrong_token"], found["first_difference"]) == (None, 4.0, None)
    assert found["tolerance"] >= 4.0
    told = "request 2 is not verified: one wrong token makes 4, which is within the tolerance of"
    assert told in caplog.text
    assert runner.entry.tokens
    summary = summary_of(*events)
    assert (summary.verified, summary.unequal, summary.untested) == (0, 0, 1)


def test_a_model_that_depends_on_its_chunks_is_not_certified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """mlx-lm's PLaMo 3, had nobody found it out at load: its own noise is as large as a mistake."""
    monkeypatch.setattr("mlxrunner.models.facts.masks_asked", lambda model: {})
    sizes = {"head_dim": 16, "sliding_window": 12, "sliding_window_pattern": 2}
    sizes |= {"num_hidden_layers": 4}
    runner, events = watched("plamo3", sizes=sizes)
    text = "the quick brown fox jumps over the lazy dog " * 2
    for prompt in (text, f"{text}again", f"{text}once more"):
        ask(runner, prompt)
    found = [event["verify"]["equal"] for event in events if event["verify"]]
    assert found
    assert True not in found


def spoil(cache: Any) -> None:
    """Flip the values that a layer has stored."""
    inner = getattr(cache, "inner", None)
    if hasattr(cache, "values"):
        cache.values = -cache.values
    elif inner is not None:
        inner.cache = [None if state is None else -3 * state for state in inner.cache]
    else:
        cache._stored = cache._stored._replace(values=-cache._stored.values)


def test_a_request_on_values_that_are_no_numbers_is_an_error_and_frees_them() -> None:
    """Nothing is left to verify, and the next request is right again."""
    runner, events = watched()
    ask(runner, "the quick brown fox")
    for cache in runner.entry.caches:
        cache.values = cache.values * mx.nan  # type: ignore[attr-defined]
    prompt = [*runner.entry.tokens, 7, 8]
    with pytest.raises(LogitsError):
        ask(runner, prompt)
    assert events[-1]["error"] == "LogitsError"
    assert not len(runner.entry.tokens)
    for _ in range(2):
        ask(runner, prompt)
    assert events[-1]["cached_tokens"] > 0
    assert events[-1]["verify"]["equal"] is True


@pytest.mark.parametrize(
    ("share", "chosen"), [(0.0, []), (0.25, [4]), (0.5, [3, 4]), (1.0, [2, 3, 4, 5])]
)
def test_the_share_is_chosen_by_chance(share: float, chosen: list[int]) -> None:
    """Each warm request is drawn by itself: a process of few requests is no exception."""
    numbers = iter([0.7, 0.4, 0.1, 0.99])
    runner, events = watched(verify=share, chance=lambda: next(numbers))
    for _ in range(5):
        ask(runner, "hello", max_tokens=2)
    assert [event["number"] for event in events if event["verify"]] == chosen


def test_strict_says_how_many_were_verified() -> None:
    """Passing may mean that nothing was looked at."""
    command = ["generate", "-p", "Hello!", "--repeat", 3, "--verify-cache"]
    for share, message in (("1e-12", "0 of 2"), ("1", "2 of 2")):
        result = run(*command, share, "--verify-strict")
        said = f"mlxrunner: {message} requests that reused something were verified"
        assert said in result.stderr
    assert "were verified" not in run(*command, 1).stderr


def test_sampled_answers_are_verified_by_their_logits() -> None:
    """No token is the one that has to come."""
    runner, events = watched()
    for _ in range(2):
        ask(runner, "hello there", temperature=1.5, seed=3)
    assert 0 < events[-1]["verify"]["tolerance"] < events[-1]["verify"]["wrong_token"]
    found = events[-1]["verify"]
    assert (found["equal"], found["tokens"], found["first_difference"]) == (True, 0, None)


def test_a_shifted_entry_is_not_held_against_a_cold_run() -> None:
    """A shift keeps tokens that had the dropped ones in sight: that is no mistake."""
    runner, events = watched(context=48)
    ask(runner, "the quick brown fox", overflow="shift", max_tokens=60)
    ask(runner, list(runner.entry.tokens), overflow="shift", max_tokens=2)
    assert events[-1]["cached_tokens"] > 0
    assert [event["verify"] for event in events] == [None, None]


def test_quantized_entries_are_verified_with_more_patience() -> None:
    """A rounding that went the other way is none of the entry's faults."""
    runner, events = watched("qwen3", kv_bits=8, sizes={"head_dim": 32})
    for text in ("brown fox jumps", "brown fox jumps over", "red fox"):
        ask(runner, f"the quick {text}")
    assert all(event["verify"] is None or event["verify"]["equal"] for event in events)
    assert sum(event["verify"] is not None for event in events) == 2


def test_ctrl_c_while_verifying_loses_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, events = watched()
    ask(runner, "hello")
    monkeypatch.setattr(Verifier, "verify", raising(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        ask(runner, "hello")
    assert (len(events), events[-1]["verify"], events[-1]["finish"]) == (2, None, "length")
    assert runner.entry.is_true


def test_strict_raises_at_the_end_and_only_then() -> None:
    profile = Profile()
    profile.verified, profile.failed = 3, 1
    with (
        pytest.raises(VerifyError, match="1 of 3 verified requests"),
        profiled(profile, strict=True),
    ):
        pass
    with profiled(profile):
        pass
    with pytest.raises(ZeroDivisionError), profiled(profile, strict=True):
        raise ZeroDivisionError


def test_a_share_out_of_range_is_said_before_loading(tmp_path: Path) -> None:
    wrong = r"verify_cache: 1.5 is out of range, it has to be between 0 and 1"
    with pytest.raises(OptionError, match=wrong):
        Profile(verify=1.5)
    same = ["--events", str(tmp_path / "f"), "--metrics", str(tmp_path / "f")]
    for arguments, message in (
        (["--verify-cache", "2"], "verify_cache: 2.0 is out of range"),
        (["--n", "2", "--verify-cache", "1"], "--verify-cache runs one request at a time"),
        (["--verify-strict"], "--verify-strict needs --verify-cache RATE"),
        (["--log-text"], "--log-text says what --events writes"),
        (same, "--events and --metrics are the same file"),
        (["--events", str(tmp_path)], f"{tmp_path}: can't be written: Is a directory"),
    ):
        result = CliRunner().invoke(cli.main, ["generate", "-p", "x", "-m", "nowhere", *arguments])
        ends(result, 2)
        assert result.stderr.startswith(f"mlxrunner: {message}")
