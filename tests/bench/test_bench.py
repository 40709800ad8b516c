"""`mlxrunner bench` gives every figure, in a table and in JSON, also after an interrupt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.checks import ends, raising
from support.models import write_model

from mlxrunner import ModelError, cli
from mlxrunner.bench import harness as sides
from mlxrunner.bench.bench import Bench, num_parameters
from mlxrunner.bench.harness import Measurements, PromptCacheBackend, load_or_make, mlx_lm_backend
from mlxrunner.runner import Runner


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["bench", *arguments])


@pytest.fixture(autouse=True)
def no_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have tests of their own."""
    monkeypatch.setattr("mlxrunner.bench.bench.bandwidth", lambda dtype, nbytes: 1e10)
    monkeypatch.setattr("mlxrunner.bench.bench.arithmetic", lambda dtype: 1e11)


@pytest.mark.exhaustive(0)
def test_every_figure_of_a_model(tmp_path: Path) -> None:
    """Load, ceilings, prefill, decode, memory and warm prompts each come with a share."""
    write_model(tmp_path / "m")
    options = "--prompt-tokens 64 --prompt-tokens 100 --rounds 2 --json".split()
    result = run(str(tmp_path / "m"), *options)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    figures = {figure["name"]: figure for figure in found["figures"]}
    ceilings = {"ceiling: bandwidth, float32", "ceiling: arithmetic, float32"}
    cold = ("cold prefill of", "decode after", "peak memory with")
    cached = ("0 % cached", "50 % cached", "90 % cached", "99 % cached", "100 % cached")
    wanted = [f"{name} {tokens}" for tokens in (64, 100) for name in cold]
    wanted += [f"first token of 100, {part}" for part in (*cached, "regenerated")]
    head = ["load", *sorted(ceilings, reverse=True)]
    assert list(figures) == [*head, *wanted, "weights", "entry of 100 tokens"]
    assert all(0 < one["min"] <= one["median"] <= one["max"] for one in figures.values())
    bound = {name: one["ceiling"] for name, one in figures.items() if one["share"] is not None}
    assert set(figures) - set(bound) == ceilings
    evaluated = [one["evaluated"] for one in figures.values() if one["evaluated"] is not None]
    assert evaluated == [100, 50, 10, 1, 1, 1]
    assert bound["decode after 100"] == "bandwidth"
    assert bound["peak memory with 64"] == "memory"
    assert found["versus"] == []
    assert found["rounds"] == 2


def test_guessed_answers(tmp_path: Path) -> None:
    """An answer that is asked for again takes a pass for up to 16 of its tokens."""
    write_model(tmp_path / "m")
    result = run(str(tmp_path / "m"), "--quick", "--speculate", "lookup", "--json")
    assert result.exit_code == 0, result.output
    found = {figure["name"]: figure for figure in json.loads(result.stdout)["figures"]}
    passes = {name: one["passes"] for name, one in found.items() if one["passes"] is not None}
    again = "decode after 128, the answer asked for again"
    assert passes == {again: 31, f"{again}, guessed": 2}
    assert min(found[name]["min"] for name in passes) > 0


@pytest.mark.exhaustive(0)
def test_beside_mlx_lm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same tokens from the same weights, ratios with minimum, median and maximum."""
    write_model(tmp_path / "m")
    result = run(str(tmp_path / "m"), "--prompt-tokens", "48", "--rounds", "2", "--vs", "mlx-lm")
    assert result.exit_code == 0, result.output
    assert "not the same tokens" not in result.stderr
    versus = result.stdout.split("against mlx-lm")[1].splitlines()
    cold = ["load", "cold prefill of 48", "decode after 48", "peak memory with 48"]
    cached = [f"first token of 48, {p} % cached" for p in (50, 90, 99, 100)]
    names = [line.split("  ")[0] for line in versus[2:]]
    assert names == [*cold, *cached, "first token of 48, regenerated"]
    measurements = Bench(str(tmp_path / "m"), contexts=[48], rounds=2, versus=True).run()
    assert measurements.as_dict()["versus"][0]["gain"].keys() == {"min", "median", "max"}


@pytest.mark.exhaustive(0)
def test_what_mlx_lm_can_not_load_by_itself_has_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All else is compared on the weights that we have loaded."""
    write_model(tmp_path / "m")

    monkeypatch.setattr("mlx_lm.load", raising(ValueError))
    measurements = Bench(str(tmp_path / "m"), contexts=[32], rounds=1, versus=True).run()
    assert "mlx-lm can't load it by itself: ValueError" in capsys.readouterr().err
    assert measurements.comparisons[0].name == "cold prefill of 32"


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "mamba2"])
def test_mlx_lm_s_prompt_cache_is_trimmed_to_what_is_shared(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trimmed prompt cache gives a cold run's tokens and evaluates only what is new.

    It starts again where a cache cannot be trimmed.
    """
    write_model(tmp_path / "m", architecture)
    runner = Runner.load(str(tmp_path / "m"), reserve=False)
    side, cold = PromptCacheBackend(runner), mlx_lm_backend(runner)
    given: list[int] = []
    generate = sides.stream_generate

    def counted(model: Any, tokenizer: Any, prompt: list[int], **options: Any) -> Any:
        given.append(len(prompt))
        return generate(model, tokenizer, prompt, **options)

    monkeypatch.setattr(sides, "stream_generate", counted)
    base = list(range(1, 31))
    prompts = [base, [*base[:20], 40, 41], [*base[:20], 40, 41], base]
    for prompt in prompts:
        answer = side(prompt, 4)
        first = next(answer)
        answer.close()
        assert first == next(cold(prompt, 4))
    trimmed = [30, 2, 1, 10] if architecture == "llama" else [30, 22, 22, 30]
    assert given[::2] == trimmed


@pytest.mark.exhaustive(0)
def test_what_is_done_is_said_as_often_as_promised() -> None:
    said: list[str] = []
    Bench("demo", contexts=[32, 64], rounds=2, answer=4, begin=said.append).run()
    assert len(said) == Bench.num_parts(2, 2)
    assert said[0] == "loading demo"
    assert said[-1] == "warm prompts of 64, round 2 of 2"


@pytest.mark.exhaustive(0)
def test_quick_is_one_round_of_a_short_prompt() -> None:
    result = run("--quick")
    assert result.exit_code == 0, result.output
    assert "cold prefill of 128" in result.stdout
    assert "rounds 1" in result.stdout
    assert "512" not in result.stdout
    assert result.stderr.splitlines()[0] == "bench: loading demo"
    assert "rounds 2" in run("--quick", "--rounds", "2").stdout


def test_ctrl_c_prints_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "_warm", raising(KeyboardInterrupt))
    result = run("--quick")
    assert result.exit_code == 130
    assert "cold prefill of 128" in result.stdout
    assert "cached" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--prompt-tokens", "5000"],
            "context: 5000 to 5000 tokens with an answer of 32 are out of range: at least 16, at "
            "most 2015",
        ),
        (["--prompt-tokens", "3"], "context: 3 to 3 tokens"),
        (
            ["random:many"],
            "random:many is not a size: name a random model like random:100M or random:1.5G",
        ),
        (["random:5000G"], "the device offers"),
        (["/nowhere/at/all"], "no such model"),
    ],
    ids=["too long", "too short", "no size", "too large", "no model"],
)
def test_what_can_not_be_measured_is_said(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    ends(result, 2, message)
    assert result.stdout == ""


def test_a_random_model_has_about_the_size_of_its_name() -> None:
    """It runs: anybody can compare machines without a download."""
    loaded = load_or_make("random:2M")
    assert 1e6 < num_parameters(loaded.model) < 4e6
    runner = Runner(loaded.model, loaded.tokenizer, loaded.facts, name=loaded.name, context=64)
    assert len(list(runner.generate([1, 2, 3], max_tokens=4, stop_tokens=[]))) == 4
    with pytest.raises(ModelError, match="is not a size"):
        load_or_make("random:-1M")


def test_nothing_measured_is_an_empty_table() -> None:
    assert Measurements({"model": "demo"}).table() == "model demo"


@pytest.mark.exhaustive(0)
def test_a_model_with_experts_gets_figures_without_shares(tmp_path: Path) -> None:
    """Figures have no share where experts or windows decide how much a token takes."""
    write_model(tmp_path / "m", "gpt_oss", max_position_embeddings=512)
    measurements = Bench(str(tmp_path / "m"), contexts=[100], rounds=1, answer=4).run()
    shares = {figure.name: figure.share for figure in measurements.figures}
    assert shares["cold prefill of 100"] is None
    assert shares["weights"] is not None
    assert "cold prefill of 100" in measurements.table()
