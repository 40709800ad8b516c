"""`mlxrunner models`: what it finds in the hub's cache, what it knows of it, and removal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.checks import ends, has, refused
from support.models import write_model
from support.waiting import PATIENCE_S

from mlxrunner import Runner, cli
from mlxrunner.loading import context_and_plan
from mlxrunner.memory.plan import choose
from mlxrunner.models.download import repositories
from mlxrunner.models.resolve import CachedModel, cached_models, last_use, remember_use, resolve


def run(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(cli.main, ["models", *arguments], input=stdin)


def model(folder: Path) -> None:
    write_model(folder)


def broken(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "\\u001b[2J"}')
    (folder / "model.safetensors").write_bytes(b"1")


def files(*names: str) -> Any:
    def write(folder: Path) -> None:
        for name in names:
            (folder / name).write_bytes(b"123")

    return write


NEEDED = ("config.json", "model.safetensors")


def test_no_cache_is_an_empty_list(hub_cache: Path) -> None:
    """The folder has never been made, or nothing was downloaded yet."""
    assert cached_models() == []
    hub_cache.mkdir()
    assert cached_models() == []


def test_a_downloaded_model_is_listed(hub: Any, hub_cache: Path) -> None:
    """huggingface_hub stores links to blobs, and each is counted once."""
    write_model(hub_cache.parent / "source", tokenizer=False)
    hub.files = {file.name: file.read_bytes() for file in (hub_cache.parent / "source").iterdir()}
    folder = resolve("org/name")
    assert cached_models() == [CachedModel("org/name", sum(map(len, hub.files.values())), folder)]


@pytest.mark.parametrize("old", [f"{n:040x}" for n in range(4)])
def test_of_several_revisions_the_current_one_is_listed(cache_repository: Any, old: str) -> None:
    """The one that the name resolves to, not one that an update left behind."""
    snapshot = cache_repository("org/name", model)
    before = snapshot.parent / old
    before.mkdir()
    files(*NEEDED)(before)
    assert [found.folder for found in cached_models()] == [snapshot] == [resolve("org/name")]


def test_models_that_can_be_run_are_listed_by_name(hub_cache: Path, cache_repository: Any) -> None:
    """A config.json and safetensors are the least. Whatever else is there is passed over."""
    for name in ("b/x", "a/z", "a/b"):
        cache_repository(name, files(*NEEDED))
    lacking = ((), NEEDED[:1], NEEDED[1:], ("config.json", "pytorch_model.bin"), ("README.md",))
    for number, names in enumerate(lacking):
        cache_repository(f"org/{number}", files(*names))
    (hub_cache / "models--org--broken").mkdir()
    (hub_cache / "version.txt").write_text("1")
    data = hub_cache / "datasets--org--data" / "snapshots" / ("0" * 40)
    data.mkdir(parents=True)
    files(*NEEDED)(data)
    assert [found.name for found in cached_models()] == ["a/b", "a/z", "b/x"]


@pytest.fixture
def cached(cache_repository: Any) -> Path:
    """A model in the hub cache; its folder."""
    folder: Path = cache_repository("org/name", model)
    return folder


def test_a_model_is_listed_with_what_is_known_of_it(cached: Path) -> None:
    """Size, context, last use, and if it fits; nothing is loaded for that."""
    (row,) = json.loads(run("--json").stdout)
    size, context = sum(file.stat().st_size for file in cached.iterdir()), row["context"]
    has(row, name="org/name", bytes=size, folder=str(cached), last_used=None, problem=None)
    has(row, fits=True, largest_context=context)
    assert len(row) == 8
    line = run().stdout
    assert line.split()[2:] == ["org/name", str(row["context"]), "tokens", "never", "used", "fits"]


def test_the_last_use_is_that_of_this_program(cached: Path, own_home: Path) -> None:
    """Loading a model notes it; looking at one, or a backup that reads it, does not."""
    CliRunner().invoke(cli.main, ["show", "org/name"])
    assert last_use("org/name") is None
    before = datetime.now(UTC).timestamp()
    with Runner.load("org/name"):
        used = last_use("org/name")
    assert used is not None
    assert used >= before - 1
    (row,) = json.loads(run("--json").stdout)
    assert row["last_used"] == datetime.fromtimestamp(round(used), UTC).isoformat()
    moment = datetime.fromtimestamp(round(used)).strftime("%Y-%m-%d %H:%M")
    assert f"used {moment}" in run().stdout
    (note,) = (own_home / ".cache" / "mlxrunner" / "used").iterdir()
    assert (note.stat().st_mode & 0o777, note.stat().st_size) == (0o600, 0)


def test_a_use_that_cannot_be_noted_stops_nothing(cached: Path, own_home: Path) -> None:
    """The folder for it is a file."""
    (own_home / ".cache").write_text("")
    remember_use("org/name")
    assert last_use("org/name") is None


@pytest.mark.parametrize(
    ("less", "words"),
    [(0, "fits"), (1, "fits with a context of 511 tokens"), (None, "does not fit")],
    ids=["all", "a part", "nothing"],
)
def test_it_says_if_a_model_fits(
    cached: Path, monkeypatch: pytest.MonkeyPatch, less: int | None, words: str
) -> None:
    """By the memory plan, which `mlxrunner plan` shows whole."""
    monkeypatch.setattr("mlxrunner.loading.choose", partial(choose, smallest=2**20))
    context, plan = context_and_plan("org/name")
    assert context == 512
    offered = 1000 if less is None else plan.total - less
    monkeypatch.setattr("mlxrunner.system.device.offered_bytes", lambda: offered)
    (row,) = json.loads(run("--json").stdout)
    assert run().stdout.rstrip("\n").endswith(f"  {words}")
    assert row["fits"] is (less is not None)
    assert row["largest_context"] == (0 if less is None else context - less)


def test_a_model_that_cannot_be_run_is_listed_with_the_reason(cache_repository: Any) -> None:
    """Among others; and its settings cannot control the terminal."""
    cache_repository("org/broken", broken)
    (line,) = run().stdout.splitlines()
    assert "org/broken" in line
    assert "can't be run: " in line
    assert "\x1b" not in line
    (row,) = json.loads(run("--json").stdout)
    assert row["problem"]


def test_rm_asks_before_it_removes(cached: Path, open_screen: Any, hub_cache: Path) -> None:
    """With the size; a no removes nothing and is exit code 1."""
    arguments = ["-m", "mlxrunner", "models", "rm", "org/name"]
    for answer, code in (("n", 1), ("y", 0)):
        screen = open_screen(*arguments, imports=True, HF_HUB_CACHE=str(hub_cache))
        screen.until("remove org/name (").child.send(f"{answer}\r")
        assert screen.end() == code
        assert cached.is_dir() == (answer == "n")


def test_rm_without_a_terminal_needs_yes(cached: Path) -> None:
    """Nobody could answer."""
    ends(run("rm", "org/name", stdin="y\n"), 2, "--yes removes without asking")
    assert cached.is_dir()


def test_rm_says_how_much_became_free(cached: Path, hub_cache: Path, cache_repository: Any) -> None:
    """Every revision, what a cut-off download left, and the note of its use; nothing else."""
    other = cache_repository("org/other", model)
    remember_use("org/name")
    blobs = hub_cache / "models--org--name" / "blobs"
    blobs.mkdir()
    (blobs / ("0" * 64 + ".mlxrunner.incomplete")).write_bytes(b"1" * 7_000_000)
    old = cached.parent / ("1" * 40)
    old.mkdir()
    (old / "model.safetensors").write_bytes(b"1" * 2_000_000)
    result = run("rm", "--yes", "org/name")
    ends(result, 0)
    assert result.stdout.startswith("org/name: 9.")
    assert result.stdout.endswith(" MB freed\n")
    assert repositories() == ["org/other"]
    assert other.is_dir()
    assert last_use("org/name") is None
    assert not (hub_cache / "models--org--name").exists()


def test_rm_removes_what_was_downloaded_only_in_part(hub_cache: Path) -> None:
    """It is not in the list of models."""
    blobs = hub_cache / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / ("0" * 64 + ".mlxrunner.incomplete")).write_bytes(b"1" * 1000)
    assert run("rm", "--yes", "org/name").stdout == "org/name: 1 kB freed\n"
    assert repositories() == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("demo", "not a model of the hub cache"),
        ("/tmp", "not a model of the hub cache"),
        (".", "not a model of the hub cache"),
        ("../other", "not in the hub cache"),
        ("org/missing", "not in the hub cache"),
        ("org/link", "is a link"),
    ],
)
def test_rm_touches_nothing_outside_the_cache(
    cached: Path, hub_cache: Path, tmp_path: Path, name: str, why: str
) -> None:
    """It removes no model that is named together with a wrong one either."""
    outside = tmp_path / "outside"
    write_model(outside)
    (hub_cache / "models--org--link").symlink_to(outside)
    refused(run("rm", "--yes", "org/name", name), why)
    assert cached.is_dir()
    assert (outside / "config.json").is_file()


def test_a_link_within_a_model_leads_nowhere(cached: Path, tmp_path: Path) -> None:
    """Its target stays, and does not count as freed."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "big").write_bytes(b"1" * 5_000_000)
    (cached / "folder").symlink_to(outside)
    (cached / "big").symlink_to(outside / "big")
    result = run("rm", "--yes", "org/name")
    ends(result, 0)
    assert " kB freed" in result.stdout
    assert (outside / "big").is_file()


def test_a_process_that_has_loaded_a_model_keeps_it(cached: Path, hub_cache: Path) -> None:
    """It answers after the removal as before."""
    command = [sys.executable, "-m", "mlxrunner", *"chat -m org/name --max-tokens 4".split()]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    env = {**os.environ, "HF_HUB_CACHE": str(hub_cache)}
    chat = subprocess.Popen(command, text=True, env=env, **pipes)
    assert chat.stdin is not None
    assert chat.stdout is not None
    chat.stdin.write("a\n")
    chat.stdin.flush()
    assert chat.stdout.readline()
    assert run("rm", "--yes", "org/name").exit_code == 0
    answers, _ = chat.communicate("a\n", timeout=PATIENCE_S)
    assert answers
    assert chat.returncode == 0


def test_json_is_for_the_list_only(hub_cache: Path) -> None:
    """`models --json rm` is an error, not a table."""
    ends(run("--json", "rm", "--yes", "org/name"), 2, "--json lists models")
