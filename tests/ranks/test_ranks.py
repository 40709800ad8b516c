"""A model over several ranks: equal to one process after every ending, and no rank left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from click.testing import CliRunner

from mlxrunner import cli
from mlxrunner.errors import LaunchError, ModelError, NotSupportedError, OptionError
from mlxrunner.models.files import ModelShard
from mlxrunner.models.fingerprint import by_files
from mlxrunner.ranks import ranks
from mlxrunner.ranks.guard import guard, read_hosts, versions
from mlxrunner.ranks.ranks import LeadingModel, RankTokens, checked_folder, follow, join
from mlxrunner.runner import Runner
from tests.support.architectures import build, settings_of
from tests.support.models import save_model, tiny_config, write_model, write_tokenizer
from tests.support.ranks import (
    free_port,
    launched,
    ranks_of,
    wait_until_gone,
    write_hosts,
    write_models,
)
from tests.support.ranks_history import NOISE
from tests.support.shares import sharing
from tests.support.waiting import until

TENSOR, PIPELINE = "tensor-parallel", "pipeline"
ASK = ("generate", "--tensor-parallel", "--raw", "-m")
ALONE = "is for a model on one machine: leave it out with --hosts"


@pytest.mark.parametrize(
    ("ranks", "way", "kinds"),
    [
        pytest.param(2, TENSOR, ("llama", "deepseek_v3"), id="2"),
        pytest.param(4, TENSOR, ("qwen3",), id="4"),
        pytest.param(2, PIPELINE, ("qwen2", "qwen3_moe"), id="2, pipeline"),
    ],
)
@pytest.mark.exhaustive(0)
def test_warm_histories_are_equal_after_every_ending(
    ranks: int, way: str, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    """Answers that were closed, failed or interrupted leave all ranks with what the entry holds.

    So do those of an engine whose conversations take turns, copy from each other and are given up.
    One start of the ranks runs all models, one after the other. The ring of MLX polls its sockets:
    4 ranks on few cores are slow, and have one short answer.
    """
    models = write_models(tmp_path / "models", *kinds)
    turns = 4 if ranks == 2 else 1
    history = [sys.executable, "-m", "tests.support.ranks_history", str(models)]
    line = [*history, str(write_hosts(tmp_path, ranks)), str(free_port(ranks)), str(turns), way]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(each) for each in done.stdout.splitlines()]
    assert [one["model"] for one in found] == [kind for kind in sorted(kinds) for _ in range(2)]
    for one in found:
        assert sum(one["ended"].values()) >= turns
        assert turns == 1 or all(one["ended"].values())
        assert turns == 1 or all(one.get("told", {}).values())
        assert one["compared"] > 0
        assert turns == 1 or one["reused"] > 0  # of a single turn the answers may all fail
        assert one["worst"] < NOISE
    assert sum(one["reused"] for one in found) > 0


@pytest.mark.exhaustive(0)
def test_a_chat_is_that_of_one_process(tmp_path: Path) -> None:
    """Its turns, another model in the middle, and what its entry reuses."""
    models = write_models(tmp_path, "llama", "qwen3")
    typed = f"Hello\nand more\n/model {models / 'qwen3'}\nagain\n/model none\nonce more\n"
    ask = ["chat", "--max-tokens", "4", "-m", str(models / "llama")]
    with launched(tmp_path, *ask, "--tensor-parallel", typed=typed) as process:
        said, told = process.communicate()
    whole = CliRunner().invoke(cli.main, ask, input=typed)
    assert process.returncode == whole.exit_code
    assert said.decode() == whole.stdout
    assert told.decode() == whole.stderr


@pytest.mark.exhaustive(0)
def test_verify_runs_on_all_ranks(tmp_path: Path) -> None:
    """Each row is tested, but for what several ranks do not do."""
    model = write_models(tmp_path, "llama") / "llama"
    ask = ["verify", "--tensor-parallel", "--context", "96", "--max-tokens", "4", "--json"]
    with launched(tmp_path, *ask, str(model)) as process:
        said, told = process.communicate()
    assert process.returncode == 0, told
    verdicts = {row["name"]: row["verdict"] for row in json.loads(said)["rows"]}
    left = {"restored from a file", "overflow: moved keys", "two in parallel"}
    assert {name for name, verdict in verdicts.items() if verdict != "ok"} == left


@pytest.mark.parametrize(("kind", "way"), [("llama", TENSOR), ("qwen2", PIPELINE)])
@pytest.mark.exhaustive(0)
def test_a_bench_measures_all_ranks(kind: str, way: str, tmp_path: Path) -> None:
    """It has the figures of a bench alone, evaluates as much, and says how many ranks there are."""
    model = str(write_models(tmp_path, kind) / kind)
    ask = ["bench", "--quick", "--context", "40", "--speculate", "lookup", "--json", model]
    with launched(tmp_path, *ask, f"--{way}") as process:
        said, told = process.communicate()
    assert process.returncode == 0, told
    whole = json.loads(CliRunner().invoke(cli.main, ask).stdout)
    found = json.loads(said)
    assert (found["ranks"], found["sharing"]) == (2, way)
    columns = ("name", "unit", "evaluated", "passes")
    ours, alone = (
        [[figure[column] for column in columns] for figure in one["figures"]]
        for one in (found, whole)
    )
    assert ours == alone
    weights, entry = (
        [figure["median"] for figure in one["figures"][-2:]] for one in (found, whole)
    )
    assert all(0 < part < all_of_it for part, all_of_it in zip(weights, entry, strict=True))


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("is_lost", [False, True], ids=["interrupted", "a rank is lost"])
def test_a_bench_that_ends_early_leaves_no_rank(is_lost: bool, tmp_path: Path) -> None:
    """After Ctrl-C it prints what was measured, after the loss of a rank one line."""
    model = str(write_models(tmp_path, "llama") / "llama")
    ask = ["bench", "--quick", "--context", "40", "--rounds", "9999", "--json", model]
    with launched(tmp_path, *ask, "--tensor-parallel") as process:
        assert process.stderr is not None
        while b"round 2 of" not in process.stderr.readline():
            assert process.poll() is None
        ranks = ranks_of(process)
        if is_lost:
            os.kill(ranks[1], signal.SIGKILL)
        else:
            process.send_signal(signal.SIGINT)
        said, told = process.communicate()
        if is_lost:
            assert process.returncode == 1
            assert b"mlxrunner: rank 1 (127.0.0.1): has ended by signal 9\n" in told
        else:
            assert process.returncode == 130
            assert json.loads(said)["figures"][0]["name"] == "load"
        wait_until_gone(*ranks)


def test_another_entry_begins_at_the_first_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks hold one entry: they can't continue with another one."""
    for name in ("MLX_RANK", "MLX_HOSTFILE"):  # a test in this process may have joined a ring
        monkeypatch.delenv(name, raising=False)
    write_model(tmp_path)
    told: list[Any] = []
    held, group = RankTokens(), mx.distributed.init()
    one, other = (Runner.load(tmp_path, reserve=False) for _ in range(2))
    for each in (one, other):
        caches = partial(lambda runner: {0: runner.entry.caches}, each)
        each.model = LeadingModel(each.model, caches, group, told.append, held)
    prompt = [5, 6, 7]
    list(one.generate(prompt, max_tokens=1))
    list(one.generate([*prompt, 8], max_tokens=1))
    assert told[-1] == [3, 1]
    list(other.generate(prompt, max_tokens=1))
    with pytest.raises(NotSupportedError, match="hold 0 tokens of the cache, which has 4"):
        list(one.generate([*prompt, 8, 9], max_tokens=1))
    one.reset()
    list(one.generate([*prompt, 8, 9], max_tokens=1))
    assert told[-1] == [0, 5] or told[-2][0] == 0


@pytest.mark.parametrize(
    ("lost", "number", "line"),
    [
        (1, signal.SIGKILL, b"rank 1 (127.0.0.1): has ended by signal 9\n"),
        (1, signal.SIGSTOP, b"rank 1 (127.0.0.1): has been stopped for 5 s\n"),
        (0, signal.SIGKILL, b"rank 0 (127.0.0.1): has ended by signal 9\n"),
        (0, signal.SIGSTOP, b"rank 0 (127.0.0.1): has been stopped for 5 s\n"),
    ],
    ids=["1, killed", "1, stopped", "0, killed", "0, stopped"],
)
@pytest.mark.exhaustive(0)
def test_a_lost_rank_is_one_line(lost: int, number: int, line: bytes, tmp_path: Path) -> None:
    """A rank that was killed or is frozen ends the command, and no rank is there afterwards."""
    write_model(tmp_path / "model")
    with launched(tmp_path, *ASK, str(tmp_path / "model"), "--repeat", "9999", "Hello") as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        ranks = ranks_of(process)
        os.kill(ranks[lost], number)
        said = process.communicate()[1]
        assert process.returncode == 1
        assert b"mlxrunner: " + line in said  # the ring tells of its sockets before it
        wait_until_gone(*ranks)


@pytest.mark.exhaustive(0)
def test_a_rank_that_is_frozen_while_it_joins_the_ring_ends_the_command(tmp_path: Path) -> None:
    """Rank 0 waits within MLX for it then, with Python's lock held, and nobody reads its output."""
    write_model(tmp_path / "model")
    with launched(tmp_path, *ASK, str(tmp_path / "model"), "Hello") as process:
        until(lambda: len(ranks_of(process)) == 2, "for both ranks")
        ranks = ranks_of(process)
        os.kill(ranks[1], signal.SIGSTOP)
        assert process.wait() == 1
        wait_until_gone(*ranks)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.exhaustive(1)
def test_a_port_of_the_ring_in_use_is_one_line(rank: int, tmp_path: Path) -> None:
    """It names the ports that the ranks need, whichever of them finds its own one taken."""
    write_model(tmp_path / "model")
    first = free_port(2)
    words = ["--rank-port", str(first), "--", *ASK, str(tmp_path / "model"), "Hello"]
    line = [sys.executable, "-m", "mlxrunner", "launch", "--hosts", str(write_hosts(tmp_path, 2))]
    with socket.create_server(("127.0.0.1", first + 1 + rank)):
        done = subprocess.run([*line, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"the ranks need the ports {first + 1} to {first + 2}, one each" in done.stderr
    assert "internal error" not in done.stderr


def test_an_address_of_another_machine_is_named(tmp_path: Path) -> None:
    """Another port would help no rank whose own address is elsewhere."""
    file = tmp_path / "hosts.json"
    file.write_text('[{"ips": ["192.0.2.1"]}, {"ips": ["127.0.0.1"]}]')
    hosts = read_hosts(str(file), free_port(2))
    with pytest.raises(LaunchError, match=r"192\.0\.2\.1 is not an address of this machine"):
        join(hosts, 0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
@pytest.mark.exhaustive(0)
def test_no_rank_is_left_behind(number: int, code: int, tmp_path: Path) -> None:
    """Ctrl-C, or the end of the guard, ends all ranks."""
    write_model(tmp_path / "model")
    with launched(tmp_path, *ASK, str(tmp_path / "model"), "--repeat", "9999", "Hello") as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        ranks = ranks_of(process)
        process.send_signal(number)
        said = process.communicate()[1]
        assert process.returncode == code
        assert b"mlxrunner:" not in said
        wait_until_gone(*ranks)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("generate Hi", "say how the hosts share the model: add --tensor-parallel or --pipeline"),
        (
            "generate --pipeline --tensor-parallel Hi",
            "--tensor-parallel and --pipeline contradict each other: use one of them",
        ),
        (
            "batch --tensor-parallel",
            "batch does not run with --hosts: generate, chat, serve, bench and verify do",
        ),
        *(
            (f"{words} demo", f"{words.split()[2]} {ALONE}")
            for words in ("generate --tensor-parallel --n 2", "bench --pipeline --vs mlx-lm")
        ),
        *(
            (f"serve --tensor-parallel {option}", f"{option.split()[0]} {ALONE}")
            for option in (
                "--disk-cache-bytes 1000000",
                "--pictures",
                "--unit systemd",
                "--kv-bits 8",
            )
        ),
    ],
)
def test_what_ranks_do_not_do_is_refused(words: str, said: str, tmp_path: Path) -> None:
    """It is refused before a rank starts."""
    hosts = str(write_hosts(tmp_path, 2))
    done = CliRunner().invoke(cli.main, ["launch", "--hosts", hosts, "--", *words.split()])
    assert (done.exit_code, done.stderr) == (2, f"mlxrunner: {said}\n")


@pytest.mark.parametrize(
    ("kind", "config", "way", "said"),
    [
        ("gemma3_text", {}, TENSOR, "can't share the architecture 'gemma3_text' among ranks by"),
        ("llama", {}, PIPELINE, "can't share the architecture 'llama' among ranks by --pipeline"),
        ("llama", {"num_key_value_heads": 1}, TENSOR, "num_key_value_heads is 1, which 2 ranks"),
        ("qwen2", {"num_hidden_layers": 1}, PIPELINE, "1 layers are too few for 2 ranks"),
    ],
)
def test_a_model_that_cannot_be_shared_is_refused(
    kind: str, config: dict[str, int], way: Any, said: str, tmp_path: Path
) -> None:
    """Its config.json says so, before weights are read."""
    settings = tiny_config(kind, **config)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    part = ModelShard(0, 2, way)
    with sharing(part), pytest.raises(ModelError, match=re.escape(said)):
        checked_folder(str(tmp_path), part)


@pytest.mark.exhaustive(0)
def test_each_rank_says_what_it_has(tmp_path: Path) -> None:
    """With three layers, one rank has two; the answer is that of one process."""
    settings = {**settings_of("qwen2"), "num_hidden_layers": 3, "vocab_size": 300}
    save_model(tmp_path / "model", build("qwen2", **settings), settings)
    write_tokenizer(tmp_path / "model")
    ask = ["generate", "-v", "--raw", "--greedy", "--max-tokens", "5", "-m"]
    with launched(tmp_path, *ask, str(tmp_path / "model"), "--pipeline", "Hello") as process:
        said, told = process.communicate()
    whole = CliRunner().invoke(cli.main, [*ask, str(tmp_path / "model"), "Hello"])
    assert said == whole.stdout_bytes
    line = r"rank (\d): weights of (\d+) kB, caches of (\d+) B for each token, room for (\d+)"
    found = [tuple(map(int, one)) for one in re.findall(line, told.decode())]
    row = 2 * settings["num_key_value_heads"] * settings["head_dim"] * 4
    assert [(rank, token) for rank, _, token, _ in found] == [(0, 2 * row), (1, row)]
    assert found[0][1] > found[1][1]
    assert {room for *_, room in found} == {settings["max_position_embeddings"]}


def test_another_model_is_refused(tmp_path: Path) -> None:
    """A rank compares the fingerprint of its files with that of the first rank."""
    write_model(tmp_path / "one")
    write_model(tmp_path / "other", seed=1)
    first, part = by_files(tmp_path / "one"), ModelShard(1, 2, "tensor-parallel")
    with sharing(part):
        assert checked_folder(str(tmp_path / "one"), part, first) == tmp_path / "one"
        with pytest.raises(LaunchError, match="not the model of rank 0: weights"):
            checked_folder(str(tmp_path / "other"), part, first)


def test_random_weights_are_refused() -> None:
    with pytest.raises(ModelError, match="random:1M: ranks share no random weights: name a folder"):
        checked_folder("random:1M", ModelShard(0, 2, "pipeline"))


def test_a_rank_says_for_whom_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It waits for two minutes, and nobody knows why otherwise."""
    monkeypatch.setattr(ranks, "WAIT_S", 0)
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    with pytest.raises(LaunchError, match="can't be reached"):
        follow(read_hosts(str(write_hosts(tmp_path, 2)), port), 1)
    assert capfd.readouterr().err == f"mlxrunner: rank 1: waiting for rank 0 at 127.0.0.1:{port}\n"


def test_the_help_of_a_command_needs_no_way(tmp_path: Path) -> None:
    """Without hosts, the options of ranks name the command that takes them."""
    hosts = str(write_hosts(tmp_path, 2))
    done = CliRunner().invoke(cli.main, ["launch", "--hosts", hosts, "--", "generate", "--help"])
    assert (done.exit_code, done.stderr) == (0, "")
    for way in (TENSOR, PIPELINE):
        done = CliRunner().invoke(cli.main, ["generate", f"--{way}", "Hi"])
        assert "launch --hosts" in done.stderr


def test_a_rank_of_another_version_is_refused(tmp_path: Path) -> None:
    """The line names both versions."""
    hello = {"rank": 1, "versions": {**versions(), "mlx": "0.1"}}
    code = (
        "import os, socket; number = int(os.environ['MLXRUNNER_RANK'].split(':')[1]); "
        "s = socket.socket(fileno=number); "
        f"s.sendall({json.dumps(hello).encode()!r} + bytes([10])); s.recv(1)"
    )
    hosts = read_hosts(str(write_hosts(tmp_path, 2)), 41000)
    said = re.escape(f"rank 1 has other versions: mlx 0.1 (rank 0: {versions()['mlx']})")
    idle = "import time; time.sleep(999)"
    with pytest.raises(LaunchError, match=said):
        guard(hosts, lambda rank: [sys.executable, "-c", code if rank else idle])


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        '[{"ips": ["host"]}]',
        '[{"ips": []}]',
        "3",
        '[{"ips": [1]}, {"ips": [2]}]',
        '[{"ips": ["::1"]}, {"ips": ["fe80::1%\\u001b[2J"]}]',
    ],
)
def test_a_broken_file_of_hosts_is_one_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    file.write_text(text)
    with pytest.raises(OptionError, match="it has to be a list such as"):
        read_hosts(str(file), 41000)
