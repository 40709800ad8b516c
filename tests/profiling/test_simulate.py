"""A token log replayed on paper finds what the real runner found."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from support.checks import ends, has, read_lines, refused, write_lines
from support.engine import SEED_TOKENS, Engine, after_each_chunk
from support.models import tiny_config, tiny_model

from mlxrunner import Runner, cli
from mlxrunner.models.facts import facts_of
from mlxrunner.profiling.profile import Profile
from mlxrunner.profiling.replay import simulate
from mlxrunner.profiling.replay.simulate import Replay, ReplayedRequest
from mlxrunner.profiling.replay.trials import Simulation
from mlxrunner.profiling.replay.trials import simulate as replay
from mlxrunner.profiling.tokenlog import LoggedRequest, read_token_log
from mlxrunner.testing import EOS, LAYERS, ByteTokenizer, oracle_runner

ARCHITECTURES = "llama gemma3_text gpt_oss mamba2 lfm2 jamba qwen3_next llama4".split()
ORACLES = [
    ["full"],
    ["full", "sliding"],
    ["recurrent", "full"],
    ["chunked"],
    ["composite", "sliding"],
    ["unknown", "full"],
]
SMALL: dict[str, Any] = {"prefill_step": 24, "rewind_slack": 10, "checkpoint_interval": 50}


def nested(depth: int) -> dict[str, Any]:
    """Return the line of a layer that lies in `depth` others."""
    line: dict[str, Any] = {"kind": "composite", "needs_checkpoints": False, "count": 1}
    line |= dict.fromkeys(("window", "slack", "room"))
    line |= dict.fromkeys(("row_bytes", "checkpoint_rows", "checkpoint_fixed"), 0)
    for _ in range(depth):
        line = line | {"parts": [line]}
    return line


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that move, and checkpoints that come, every few tokens."""
    monkeypatch.setattr("mlxrunner.cache.layers.extents.STEP", 8)
    monkeypatch.setattr("mlxrunner.cache.entry.SPACING", 20)


def talk(seed: str, turns: int) -> Iterator[tuple[str, list[list[int]]]]:
    """Return a conversation that continues, is edited, regenerated, cut, interrupted or restarted.

    Answers may be added.
    """
    rng = random.Random(seed)

    def message() -> list[int]:
        return [*(rng.randrange(290) for _ in range(rng.randint(1, 30))), EOS]

    messages = [message(), message()]
    kinds = ["append", "edit", "regenerate", "cut", "interrupt", "strip", "new", "reset"]
    some = rng.choices(kinds, [4, 1, 1, 1, 1, 1, 1, 1], k=turns)
    for kind in ["append", "append", "interrupt", "reset", *some]:
        if kind == "new":
            del messages[1:]
        elif kind == "edit":
            messages[rng.randrange(len(messages))][0] = rng.randrange(290)
        elif kind == "regenerate":
            del messages[2:][-1:]
        elif kind == "cut":
            del messages[rng.randint(1, len(messages)) :]
        elif kind == "interrupt":
            messages[min(1, len(messages) - 1)][0] = rng.randrange(290)  # there is much to evaluate
        elif kind == "strip":
            messages[-1] = messages[-1][2:] or [EOS]
        if kind != "regenerate" or len(messages) < 2:
            messages.append(message())
        yield kind, messages


def converse(
    runner: Runner, log: Path, seed: str, monkeypatch: pytest.MonkeyPatch, turns: int = 40
) -> list[LoggedRequest]:
    """Run such a conversation with the token log on; what was logged."""
    profile = Profile(tokens=log)
    profile.watch(runner)
    rng = random.Random(seed)
    for kind, messages in talk(seed, turns):
        prompt = [token for message in messages for token in message]
        if kind == "reset":
            runner.reset()
        if kind == "interrupt":
            _interrupted(runner, prompt, rng.randint(1, 2), monkeypatch)
        length = rng.choice([1, 2, 10, 40])
        options: dict[str, Any] = {"max_tokens": length, "stop_tokens": [], "keep": 8}
        chunks = runner.generate(prompt, overflow="shift", **options)
        pairs = zip(chunks, range(rng.choice([3, 100])), strict=False)
        answer = [chunk.token for chunk, _ in pairs]
        chunks.close()  # type: ignore[attr-defined]
        messages.append([token for token in answer if token is not None] + [EOS])
    profile.finish()
    requests = read_token_log([log])
    logged = list(requests)
    assert not requests.skipped
    return logged


def _interrupted(
    runner: Runner, prompt: list[int], passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while that pass of the prefill is evaluated."""
    left = [passes]

    def count(caches: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        after_each_chunk(count, patch)
        with suppress(KeyboardInterrupt):
            list(runner.generate(prompt, max_tokens=2, stop_tokens=[], overflow="shift", keep=8))


def assert_agrees(logged: list[LoggedRequest]) -> set[str | None]:
    """Check what matched and was cached, and the entry around it; return the reasons.

    The entry's checkpoints are compared before and after each request.
    """
    again = Replay(logged[0].process)
    seen = set()
    for one in logged:
        found, facts = again.run(ReplayedRequest.of(one)), one.facts
        has(facts, matched=found.matched, cached=found.cached, entry_before=found.entry_tokens)
        has(facts, entry_after=len(again.tokens), checkpoints=again.checkpoints)
        seen.add(found.reason)
    return seen


def tiny_runner(architecture: str, **options: Any) -> Runner:
    config = tiny_config(architecture, max_position_embeddings=16384, vocab_size=300)
    model = tiny_model(config)
    return Runner(model, ByteTokenizer(), facts_of(model, config), **{**SMALL, **options})


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_replay_agrees_with_the_runner_on_real_architectures(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request of a long conversation agrees exactly, for all kinds of layers."""
    logged = converse(tiny_runner(architecture), tmp_path / "log", architecture, monkeypatch)
    assert {"diverged", "entry_freed", None} <= assert_agrees(logged)
    was_interrupted = [one.facts["evaluated"] < len(one.prompt) for one in logged]
    assert any(was_interrupted)
    assert any(one.facts["checkpoints"] for one in logged) == (architecture != "llama")


def test_each_kind_of_layer_is_replayed() -> None:
    """A new kind without a row in the table would not be."""
    assert {kind for kinds in ORACLES for kind in kinds} == LAYERS.keys()


@pytest.mark.parametrize("budget", [2**30, 2000, 0], ids=["large", "small", "none"])
@pytest.mark.parametrize("kinds", ORACLES, ids="+".join)
def test_a_replay_agrees_whatever_the_budget_for_checkpoints(
    kinds: list[str], budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every kind of layer cache there is; the same checkpoints are kept and given up."""
    runner = oracle_runner(kinds, checkpoint_budget=budget, **SMALL)
    assert_agrees(converse(runner, tmp_path / "log", "+".join(kinds) + str(budget), monkeypatch))


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "oracle"])
def test_a_replay_agrees_in_a_full_context(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens dropped before or during an answer are replayed, moved or evaluated again."""
    runner = oracle_runner(["full", "sliding"], context=200, **SMALL)
    runner = runner if name == "oracle" else tiny_runner(name, context=200)
    logged = converse(runner, tmp_path / "log", name, monkeypatch, turns=70)
    assert any(one.facts["shifted"] for one in logged)
    assert_agrees(logged)


def test_the_constants_are_the_pipelines() -> None:
    """A replay that cuts chunks elsewhere would be wrong about states."""
    assert simulate.SEED_TOKENS == SEED_TOKENS


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    runner = oracle_runner(["full", "sliding", "recurrent"], **SMALL)
    converse(runner, tmp_path / "log", "some", monkeypatch, 30)
    return tmp_path / "log"


def row(simulation: Simulation, name: str) -> Any:
    return next(one for one in simulation.rows if one.what.name == name)


def test_settings_that_are_those_of_the_run_change_nothing(log: Path) -> None:
    """The same rate again, with the interval, the slack and the one entry that there were."""
    simulation = replay([log], entries=[1], intervals=[50], slacks=[10])
    assert simulation.agreed == simulation.requests
    names = ("as it was run", "1 entries", "interval 50", "slack 10")
    assert {row(simulation, name).cached for name in names} == {simulation.rows[0].cached}


def log_of(file: Path, *models: tuple[list[str], bool]) -> None:
    """Ask each model the same edited prompts and return the log.

    A model is the kinds of its layers, and whether it begins a process of its own.
    """
    profile = None
    for number, (kinds, is_new) in enumerate(models):
        if profile is None or is_new:
            profile = Profile(tokens=file)
        runner = oracle_runner(kinds, **SMALL)
        runner.name = f"model {number}"
        profile.watch(runner)
        for place in (0, 120, 30, 90, 60):
            prompt = [1 + i % 250 for i in range(150)]
            prompt[place] += 1
            list(runner.generate(prompt, max_tokens=3))


@pytest.mark.parametrize("is_new", [False, True], ids=["one process", "two"])
@pytest.mark.parametrize("first", [["full"], ["full", "sliding"]], ids=["full", "sliding"])
def test_each_model_is_replayed_with_its_own_layers(
    tmp_path: Path, first: list[str], is_new: bool
) -> None:
    """Changes that act on any layer are tried, and no model finds what another evaluated."""
    second = ["full", "sliding"] if first == ["full"] else ["full"]
    log_of(tmp_path / "log", (first, True), (second, is_new))
    log_of(tmp_path / "1", (first, True))
    log_of(tmp_path / "2", (second, True))
    together = replay([tmp_path / "log"], intervals=[10], slacks=[100])
    alone = [replay([tmp_path / name], intervals=[10], slacks=[100]) for name in "12"]
    assert together.agreed == together.requests == 10
    names = [one.what.name for one in together.rows]
    assert names[-3:] == ["sorted by prefix", "interval 10", "slack 100"]
    for one in together.rows:
        found = [{row.what: row.cached for row in each.rows} for each in alone]
        first = [each.rows[0].cached for each in alone]
        wanted = (own.get(one.what, as_run) for own, as_run in zip(found, first, strict=True))
        assert one.cached == sum(wanted)
    assert row(together, "interval 10").cached > together.rows[0].cached


def test_options_with_nothing_to_act_on_are_said(tmp_path: Path) -> None:
    log_of(tmp_path / "full", (["full"], True))
    log_of(tmp_path / "recurrent", (["recurrent"], True))
    options = ("--checkpoint-interval", "10", "--rewind-slack", "9")
    slots = run(tmp_path / "full", "--slots", "2").stderr
    assert "--slots has nothing to act on: no requests in the log ran side by side\n" in slots
    both = run(tmp_path / "full", *options)
    idle = "has nothing to act on: no layer in the log"
    every = f"mlxrunner: --checkpoint-interval {idle} takes checkpoints\n"
    ends(both, 0, every, f"mlxrunner: --rewind-slack {idle} has a window\n")
    assert "slack 9" not in both.stdout
    one = run(tmp_path / "recurrent", *options)
    assert one.stderr.count("nothing to act on") == 1
    assert "interval 10" in one.stdout


def test_other_slacks_and_intervals_are_what_a_runner_with_them_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first runner's log in a second one's settings gives what the second one did."""
    prompts = [list(chain.from_iterable(messages)) for _, messages in talk("same", 40)]

    def run(name: str, **options: Any) -> list[LoggedRequest]:
        runner = oracle_runner(["full", "sliding"], **{**SMALL, **options})
        profile = Profile(tokens=tmp_path / name)
        profile.watch(runner)
        for prompt in prompts:
            list(runner.generate(prompt, max_tokens=3, stop_tokens=[]))
        profile.finish()
        return list(read_token_log([tmp_path / name]))

    first = run("first")
    for name, option, value in (
        ("slack", "rewind_slack", 60),
        ("interval", "checkpoint_interval", 13),
    ):
        again = Replay(first[0].process, **{name: value})
        found = [again.run(ReplayedRequest.of(one)).cached for one in first]
        assert found == [one.facts["cached"] for one in run(name, **{option: value})]


def request(*tokens: int, answer: tuple[int, ...] = ()) -> ReplayedRequest:
    return ReplayedRequest(np.array(tokens, np.int32), np.array(answer, np.int32), len(tokens))


def process(**changes: Any) -> dict[str, Any]:
    layer = nested(0) | {"kind": "full", "count": 2, "row_bytes": 8}
    settings: dict[str, Any] = {"context": 4096, "prefill_step": 8, "checkpoint_interval": 50}
    settings |= {"checkpoint_budget": 0, "rewind_slack": 10, "message_ends": [], "thinking": []}
    return {"process": "p", "layers": [layer], **settings, **changes}


def test_two_entries_hold_two_conversations() -> None:
    """One entry alternates, two hold two conversations, and a third evicts the oldest used."""
    first, second, third = ([number * 100 + i for i in range(20)] for number in (1, 2, 3))

    def cached(entries: int, *prompts: list[int]) -> str:
        again = Replay(process(), entries=entries)
        return " ".join(str(again.run(request(*prompt)).cached) for prompt in prompts)

    two = [first, second, [*first, 1], [*second, 2]]
    three = [first, second, [*first, 1], third, [*second, 2], [*first, 3]]
    assert (cached(1, *two), cached(2, *two)) == ("0 0 0 0", "0 0 20 20")
    assert (cached(2, *three), cached(3, *three)) == ("0 0 20 0 0 0", "0 0 20 0 20 20")


def test_a_conversation_that_shares_little_goes_on_in_a_copy() -> None:
    """The common tokens are reused, and the first conversation stays whole."""
    system = list(range(10))
    first, second = [*system, *range(100, 130)], [*system, *range(200, 230)]
    again = Replay(process(), entries=2)
    prompts = (first, second, [*first, 1], [*second, 2])
    assert [again.run(request(*prompt)).cached for prompt in prompts] == [0, 10, 40, 40]


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.main, ["simulate", *map(str, arguments)], env={"COLUMNS": "100"})


def test_the_command_prints_a_table(log: Path) -> None:
    result = run(log)
    assert (result.exit_code, result.stderr) == (0, "")
    wanted = "as it was run,2 entries,8 entries,sorted by prefix,interval 12,interval 200,slack 0"
    for name in f"{wanted},slack 40,found exactly".split(","):
        assert name in result.stdout
    assert "3 entries" in run(log, "--entries", "3").stdout


def test_the_command_prints_json(log: Path) -> None:
    options = "--json --entries 2 --checkpoint-interval 10 --rewind-slack 99".split()
    found = json.loads(run(log, *options).stdout)
    assert found["agreed"] == found["requests"]
    names = ",".join(one["name"] for one in found["rows"])
    assert names == "as it was run,2 entries,sorted by prefix,interval 10,slack 99"
    assert all(one["cached"] + one["evaluated"] == one["prompt"] for one in found["rows"])


def test_a_log_without_anything_to_replay_is_one_clear_line(tmp_path: Path) -> None:
    for content, message in (
        (None, "no such file"),
        (b"", "it takes a file that --log-tokens wrote"),
        (b"{}\n", "1 of something else"),
    ):
        file = tmp_path / "log.jsonl"
        if content is not None:
            file.write_bytes(content)
        refused(run(file), message)


NONSENSE: list[dict[str, Any]] = [
    *({name: 0} for name in ("prefill_step", "checkpoint_interval", "context")),
    *({"layers": layers} for layers in ([{}], [7], [nested(440)])),
    {"thinking": [{"begin": "x"}]},
    {"layers": []},
]


@pytest.mark.parametrize("changes", NONSENSE, ids=lambda changes: str(changes)[:40])
def test_a_log_that_makes_no_sense_is_refused(log: Path, changes: dict[str, Any]) -> None:
    """Zero steps, broken layers, or an older log without layers: counted, never a crash."""
    lines = read_lines(log)
    write_lines(log, (line | (changes if line["kind"] == "process" else {}) for line in lines))
    older = "of parallel requests, which have no cache of their own"
    ends(run(log), 2, older if changes == {"layers": []} else "no requests")


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_oss"])
def test_requests_side_by_side_of_older_logs_are_replayed_one_at_a_time(
    architecture: str, tmp_path: Path
) -> None:
    """Rows of older logs are replayed one at a time, but for the first, which is in the log."""
    log, rng = tmp_path / "log", random.Random(architecture)
    shared = [rng.randrange(290) for _ in range(120)]
    requests = []
    for number in range(20):
        prompt = [*shared[: 20 * (number % 6)], *(rng.randrange(290) for _ in range(9))]
        requests.append((prompt, {"max_tokens": rng.choice([1, 2, 9]), "stop_tokens": []}))
    config = tiny_config(architecture, max_position_embeddings=512, vocab_size=300)
    model = tiny_model(config)
    parts = model, ByteTokenizer(), facts_of(model, config)
    with (
        Engine(*parts, max_sequences=3, context=160) as several,
        Profile(tokens=log).watch(several),
    ):
        results = list(several.run_each(requests))
    lines = read_lines(log)
    for line in lines:
        line.pop("scheduling", None)
    write_lines(log, lines)
    simulation = replay([log])
    has(simulation, requests=20, side_by_side=20, only_logged=20, agreed=0)
    assert simulation.rows[0].cached == sum(result.usage.cached_tokens for result in results)

    alone = Runner(*parts, context=160)
    usages = [alone.complete(prompt, **options).usage for prompt, options in requests]
    cached = sum(usage.cached_tokens for usage in usages)
    assert row(simulation, "one at a time").cached == cached
    assert "20 requests ran side by side" in run(log).stdout
    assert json.loads(run(log, "--json").stdout)["side_by_side"] == 20


def test_broken_lines_are_skipped_with_a_count(log: Path) -> None:
    lines = log.read_text().splitlines()
    lines[3] = lines[3][:40]
    log.write_text("\n".join(lines) + "\n")
    ends(run(log), 0, "1 broken or cut off", "that continue a lost one")


def test_an_entry_from_elsewhere_is_said(log: Path) -> None:
    """A log whose first requests are missing can't be replayed exactly, and the table says so."""
    lines = read_lines(log)
    lines[1] |= {"matched": 5, "cached": 5, "entry_before": 5}
    write_lines(log, lines)
    said = " ".join(run(log).stdout.split())
    assert f"{len(lines) - 2} of {len(lines) - 1} requests found exactly" in said


def test_what_is_never_reused_is_never_reused_with_other_settings(tmp_path: Path) -> None:
    """A model that depends on its chunks is cold in any order and with any number of entries."""
    config = tiny_config("llama", vocab_size=300)
    model, log = tiny_model(config), tmp_path / "log.jsonl"
    facts = replace(facts_of(model, config), depends_on_chunks=True)
    profile = Profile(tokens=log)
    runner = Runner(model, ByteTokenizer(), facts, name="dependent", context=200)
    profile.watch(runner)
    beginning = list(range(40))
    for prompt in ([*beginning, 9], [7, *beginning], [*beginning, 8, 8], beginning):
        list(runner.generate(prompt, max_tokens=3, stop_tokens=[]))
    profile.finish()
    made = replay([log], (1, 2, 8), (), ())
    assert {(row.cached, row.evaluated) for row in made.rows} == {(0, 41 + 41 + 42 + 40)}
    (first, *_) = read_token_log([log])
    assert first.process["never_reused"] is True
    lone = Replay(first.process, entries=4)
    for _ in range(2):
        assert lone.run(ReplayedRequest(first.prompt, first.answer, len(first.prompt))).reused == 0
