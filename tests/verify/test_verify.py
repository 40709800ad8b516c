"""`mlxrunner verify` passes on every kind of layer, and names the row of wrong caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from click.testing import CliRunner, Result
from support.checks import ends, raising
from support.engine import BatchedModel, Engine, PerTokenRope
from support.models import save_model, tiny_config, tiny_model, write_model, write_tokenizer

from mlxrunner import OptionError, Runner, cli
from mlxrunner.cache.entry import CacheEntry
from mlxrunner.cache.layers.attention import FullAttentionCache, SlidingWindowCache
from mlxrunner.cache.layers.recurrent import RecurrentCache
from mlxrunner.cache.pool.causal import CausalCache
from mlxrunner.cache.prefix import EntryLease
from mlxrunner.cache.protocol import Batch
from mlxrunner.testing import oracle_runner
from mlxrunner.verify.verification import (
    NUM_PARTS,
    SCENARIOS,
    SMALLEST,
    Talk,
    Verification,
    _affordable,
)

CONTEXT = 200
TESTED = [*SCENARIOS, "overflow: moved keys", "guessed tokens", "two in parallel"]
ARCHITECTURES: dict[str, set[str]] = {
    "llama": set(),
    "gemma3_text": set(),
    "gpt_oss": set(),
    "lfm2": {"overflow: moved keys"},
    "mamba2": {"overflow: moved keys"},
    "qwen3_next": {"overflow: moved keys"},
}
"""Architectures, and the rows that can't be tested on them."""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["verify", *arguments])


def verify(
    folder: Path, architecture: str = "llama", *arguments: str, **config: Any
) -> tuple[int, dict[str, str]]:
    """The exit code, and the verdict of each row."""
    write_model(folder, architecture, **config)
    result = run(str(folder), "--context", str(CONTEXT), "--max-tokens", "6", "--json", *arguments)
    assert result.exit_code in (0, 4, 5), result.output
    report = json.loads(result.stdout)
    assert report["passed"] == (result.exit_code == 0)
    assert report["is_blind"] or result.exit_code != 5
    return result.exit_code, {row["name"]: row["verdict"] for row in report["rows"]}


def oracle_verification(*kinds: str, budget: int = 2**20) -> Verification:
    runner, other = (
        oracle_runner(kinds, context=CONTEXT, checkpoint_budget=b) for b in (budget, 0)
    )
    return Verification(runner, other, 6)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that move and checkpoints that come every few tokens."""
    monkeypatch.setattr("mlxrunner.cache.layers.extents.STEP", 8)
    monkeypatch.setattr("mlxrunner.cache.entry.SPACING", 20)


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kind_of_layer_passes(architecture: str, tmp_path: Path) -> None:
    """Every row is there, and tested where the model can do what it is about."""
    code, verdicts = verify(tmp_path / "m", architecture, max_position_embeddings=4096)
    assert code == 0
    assert list(verdicts)[1:] == TESTED
    untested = {name for name, verdict in verdicts.items() if verdict == "not tested"}
    assert untested == ARCHITECTURES[architecture]


NO_REWIND = "edit an early token,edit a middle token,edit the last token,regenerate"


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize(
    ("kinds", "untested"),
    [
        ("recurrent full", ""),
        ("composite", ""),
        ("chunked full", ""),
        ("unknown recurrent", f"{NO_REWIND},thinking left out"),
    ],
)
def test_a_model_that_hides_nothing_passes(kinds: str, untested: str) -> None:
    """The oracle's answer depends on every key in sight; layers that reuse nothing are untested."""
    report = oracle_verification(*kinds.split(), budget=0 if untested else 2**20).run()
    assert report.passed, report.table()
    assert not report.is_blind
    verdicts = {row.name: report.verdict(row) for row in report.checks}
    found = [name for name in list(SCENARIOS)[:6] if verdicts[name] == "not tested"]
    assert ",".join(found) == untested


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("context", [128, 200])
def test_answers_of_one_token_are_no_difference(context: int) -> None:
    """The answer that goes over the edge of the context leaves its prompt room for one."""
    result = run("--context", str(context), "--max-tokens", "1", "--json")
    assert result.exit_code == 0, result.stdout
    assert json.loads(result.stdout)["passed"] is True


def test_too_short_a_context_is_refused() -> None:
    with pytest.raises(
        OptionError, match=r"context: 90 tokens are too few .* at least 104 are needed"
    ):
        Verification(oracle_runner(context=90), oracle_runner(context=90), 8)
    ends(run("--context", "20"), 2, "mlxrunner: context: 20 tokens are too few")
    assert "tokens: 0 is out of range" in run("--max-tokens", "0").stderr.replace("max_", "")


def test_a_model_that_does_not_exist_is_named() -> None:
    assert "no such model" in run("/nowhere/at/all").stderr
    assert "name a random model like random:100M" in run("random:many").stderr
    assert run("random:9999G").exit_code == 2


@pytest.mark.exhaustive(0)
def test_half_precision_and_quantized_weights_pass(tmp_path: Path) -> None:
    """The numbers of hub models are coarse, and still one wrong token is seen."""
    config = tiny_config(
        "gpt_oss", max_position_embeddings=4096, quantization={"group_size": 32, "bits": 4}
    )
    model = tiny_model(config)
    model.set_dtype(mx.bfloat16)
    nn.quantize(
        model,
        32,
        4,
        class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0,
    )
    save_model(tmp_path / "m", model, config)
    write_tokenizer(tmp_path / "m")
    result = run(str(tmp_path / "m"), "--context", str(CONTEXT), "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0, result.stdout
    assert report["epsilon"] > 0.005
    assert not report["is_blind"]


@pytest.mark.parametrize("bits", ["8", "4"])
def test_quantized_caches_pass(bits: str, tmp_path: Path) -> None:
    """Cold runs differ by more there, which is measured."""
    code, verdicts = verify(
        tmp_path / "m", "llama", "--kv-bits", bits, num_attention_heads=2, hidden_size=64
    )
    assert code == 0
    assert verdicts["append"] == "ok"
    assert verdicts["two in parallel"] == "not tested"


def keep_stale_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rewind the first row is not overwritten."""
    write = FullAttentionCache.update_and_fetch
    rewind = FullAttentionCache.rewind
    stale: dict[int, int] = {}

    def remember(self: FullAttentionCache, to: int) -> None:
        if 0 < to < self.offset:
            stale[id(self)] = to
        rewind(self, to)

    def forget_to_write(
        self: FullAttentionCache, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        place = stale.pop(id(self), None)
        old = (
            None
            if place != self.offset or self.offset == 0
            else mx.contiguous(self.keys[..., place : place + 1, :])
        )
        if old is not None:
            keys = mx.concatenate([old, keys[..., 1:, :]], axis=2)
        return write(self, keys, values)

    monkeypatch.setattr(FullAttentionCache, "rewind", remember)
    monkeypatch.setattr(FullAttentionCache, "update_and_fetch", forget_to_write)


def rotate_by_a_wrong_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rewind the model is told an offset that is one too large."""

    class Wrong:
        def __init__(self, cache: FullAttentionCache) -> None:
            self._cache = cache

        def __getattr__(self, name: str) -> Any:
            return getattr(self._cache, name)

        @property
        def offset(self) -> int:
            return self._cache.offset + (id(self._cache) in rewound)

    rewound: set[int] = set()
    rewind, free = FullAttentionCache.rewind, FullAttentionCache.free

    def remember(self: FullAttentionCache, to: int) -> None:
        if 0 < to < self.offset:
            rewound.add(id(self))
        rewind(self, to)

    def forget(self: FullAttentionCache) -> None:
        rewound.discard(id(self))
        free(self)

    monkeypatch.setattr(FullAttentionCache, "rewind", remember)
    monkeypatch.setattr(FullAttentionCache, "free", forget)
    monkeypatch.setattr(FullAttentionCache, "model_cache", property(Wrong))


def keep_a_wrong_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of the first wrong guess stay where those of the right token should be."""
    accept = EntryLease.accept

    def keep(self: EntryLease, tokens: Any) -> None:
        accept(self, tokens)
        draft = self._draft
        if draft is not None and len(tokens) < draft.tokens:
            for cache in self._cache.current.caches:
                cache.keys = mx.roll(cache.keys, 1, axis=2)  # type: ignore[attr-defined]

    monkeypatch.setattr(EntryLease, "accept", keep)


def shift_by_one_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are moved to a position beside theirs."""
    from mlxrunner.engine.backends.backend import rotators

    def wrong(model: Any, caches: Any, by: int) -> Any:
        ways = rotators(model, caches, by + 1)
        return ways and [(lambda keys, _, way=way: way(keys, by + 1)) for way in ways]

    monkeypatch.setattr("mlxrunner.engine.backends.backend.rotators", wrong)


def restore_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state comes back from its checkpoint as zeros."""
    restore = RecurrentCache.restore

    def wrong(self: RecurrentCache, snapshot: Any, offset: int) -> None:
        restore(self, snapshot, offset)
        inner = self.model_cache
        inner.cache = [None if state is None else mx.zeros_like(state) for state in inner.cache]

    monkeypatch.setattr(RecurrentCache, "restore", wrong)


def window_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rewound window loses its newest row's place: what follows is written one row too early."""
    rewind = SlidingWindowCache.rewind

    def wrong(self: SlidingWindowCache, to: int) -> None:
        rewind(self, to)
        if self._stored is not None:
            values = mx.roll(self._stored.values, 1, axis=2)
            self._stored = self._stored._replace(values=values)

    monkeypatch.setattr(SlidingWindowCache, "rewind", wrong)


def another_prompt_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence sees a token that is not its own."""
    submit = Engine.submit

    def wrong(self: Engine, prompt: list[int], **options: Any) -> Any:
        return submit(self, [*prompt[:40], 5, *prompt[41:]], **options)

    monkeypatch.setattr(Engine, "submit", wrong)


def other_places_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a sequence one position too far beyond its 40th token, shared prefix or not."""
    forward = BatchedModel.forward

    def wrong(
        self: BatchedModel, tokens: mx.array, batch: Batch, rows: Any, *, reserve: bool = False
    ) -> mx.array:
        rope = PerTokenRope.__call__
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                PerTokenRope,
                "__call__",
                lambda rope_of, x, offset=0: rope(rope_of, x, offset + (offset > 40)),
            )
            return forward(self, tokens, batch, rows, reserve=reserve)

    monkeypatch.setattr(BatchedModel, "forward", wrong)


def no_walls_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once there are 40 tokens, a query sees those of the other sequence, too."""
    mask = CausalCache.mask.fget  # type: ignore[attr-defined]  # a property

    def wrong(self: CausalCache) -> mx.array:
        found: mx.array = mask(self)
        return mx.ones_like(found) if found.shape[-1] > 40 else found

    monkeypatch.setattr(CausalCache, "mask", property(wrong))
    monkeypatch.setattr(CausalCache, "split", lambda self, worth: None)


def a_shared_token_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take one token from a shared prefix only, and leave other prompts right."""
    monkeypatch.setattr(CausalCache, "can_resume", lambda self, sequence, position: True)
    copy = CausalCache.copy_prefix

    def wrong(self: CausalCache, source: int, target: int, length: int) -> None:
        copy(self, source, target, max(length - 1, 0))

    monkeypatch.setattr(CausalCache, "copy_prefix", wrong)


EDITED = {"edit an early token", "edit a middle token"}
FAULTS: list[tuple[Any, str, set[str]]] = [
    (keep_stale_keys, "llama", EDITED | {"edit the last token"}),
    (
        rotate_by_a_wrong_offset,
        "llama",
        {"edit an early token", "regenerate", "thinking left out"},
    ),
    (shift_by_one_less, "llama", {"overflow: moved keys"}),
    (keep_a_wrong_guess, "llama", {"guessed tokens"}),
    (restore_nothing, "lfm2", EDITED | {"thinking left out"}),
    (window_off_by_one, "gemma3_text", {"edit the last token", "regenerate"}),
    (another_prompt_in_parallel, "llama", {"two in parallel"}),
    (other_places_in_parallel, "llama", {"two in parallel"}),
    (no_walls_in_parallel, "llama", {"two in parallel"}),
    (a_shared_token_too_few, "llama", {"two in parallel"}),
]


@pytest.mark.exhaustive(2)
@pytest.mark.parametrize(("break_it", "architecture", "rows"), FAULTS)
def test_a_wrong_cache_is_found(
    break_it: Any,
    architecture: str,
    rows: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit code 4, the rows named, and those that it does not concern are not."""
    break_it(monkeypatch)
    code, verdicts = verify(tmp_path / "m", architecture, max_position_embeddings=4096)
    different = {name for name, verdict in verdicts.items() if verdict == "DIFFERENT"}
    assert code == 4
    assert rows <= different
    assert "the same cold run twice" not in different


def test_the_table_names_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_shared_token_too_few(monkeypatch)
    write_model(tmp_path / "m", max_position_embeddings=4096)
    table = run(str(tmp_path / "m"), "--context", str(CONTEXT), "--max-tokens", "6")
    ends(table, 4)
    assert "\nDIFFERENT: two in parallel." in table.stdout


def test_a_tokenizer_without_words_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = oracle_runner(context=CONTEXT)
    monkeypatch.setattr(runner.tokenizer, "encode_more", lambda text: [10**6] if text else [])
    talk = Talk(runner, 6)
    assert len(talk.base) == CONTEXT - 50
    assert max(talk.base) < runner.facts.vocab
    pairs = zip(talk.base, talk.changed(70), strict=True)
    assert [place for place, (old, new) in enumerate(pairs) if old != new] == [70]


def test_an_untrue_entry_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits do not matter: the next request would be wrong."""
    true = Runner.entry.fget  # type: ignore[attr-defined]  # a property

    def one_token_short(runner: Runner) -> CacheEntry:
        entry = CacheEntry(caches=true(runner).caches)
        entry.tokens.extend(list(true(runner).tokens)[:-1])
        return entry

    monkeypatch.setattr(Runner, "entry", property(one_token_short))
    report = oracle_verification("full", "recurrent").run()
    assert not report.passed
    assert "append, edit an early token" in report.table().splitlines()[-1]
    assert "DIFFERENT: the cache holds 176 tokens, but its layers are at [177]" in report.table()


def test_ctrl_c_prints_what_was_found_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that it is not all; the exit code is that of an interrupt."""

    monkeypatch.setitem(SCENARIOS, "regenerate", raising(KeyboardInterrupt))
    result = run("--context", "160")
    assert result.exit_code == 130
    assert "edit the last token" in result.stdout
    assert "Interrupted after 5 rows." in result.stdout
    assert "changes nothing" not in result.stdout


@pytest.mark.exhaustive(0)
def test_what_is_done_is_said_on_stderr() -> None:
    """A line a step where that is no terminal; stdout has the table and nothing else."""
    result = run("--context", "160", "--max-tokens", "4")
    assert result.exit_code == 0, result.output
    lines = [line.removeprefix("verify: ") for line in result.stderr.splitlines()]
    first = ["loading demo", "measuring the model's speed", "the same cold run twice"]
    assert lines == [*first, *TESTED]
    assert len(lines) == NUM_PARTS
    assert result.stdout.startswith("demo on ")
    assert "15 of 15 rows tested, and reuse changes nothing in them." in result.stdout


def test_the_context_is_chosen_by_the_speed() -> None:
    """Two minutes for everybody: longer prompts on faster devices, up to a bound."""
    slow, fast = (_affordable(2048, 1 / rate, 10 / rate, 56) for rate in (30, 3000))
    assert 2 * SMALLEST + 56 <= slow < fast <= 2048
    assert _affordable(2048, 1e-6, 1e-6, 56) == 2048
    assert _affordable(512, 1.0, 1.0, 56) == 2 * SMALLEST + 56
