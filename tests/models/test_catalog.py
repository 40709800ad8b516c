"""`mlxrunner models` lists what it finds in the hub's cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.models import write_model

from mlxrunner.models.resolve import CachedModel, cached_models, resolve


def model(folder: Path) -> None:
    write_model(folder)


def files(*names: str) -> Any:
    def write(folder: Path) -> None:
        for name in names:
            (folder / name).write_bytes(b"123")

    return write


def test_no_cache_is_an_empty_list(hub_cache: Path) -> None:
    """The folder has never been made."""
    assert not hub_cache.exists()
    assert cached_models() == []


def test_an_empty_cache_is_an_empty_list(hub_cache: Path) -> None:
    """Nothing was downloaded yet."""
    hub_cache.mkdir()
    assert cached_models() == []


def test_a_cached_model_is_listed_with_its_size_and_folder(
    hub_cache: Path, cache_repository: Any
) -> None:
    """The bytes of all of its files; and the name resolves to the folder."""
    snapshot = cache_repository("org/name", model)
    size = sum(file.stat().st_size for file in snapshot.iterdir())
    assert cached_models() == [CachedModel("org/name", size, snapshot)]
    assert resolve("org/name") == snapshot


def test_a_downloaded_model_is_listed(hub: Any, hub_cache: Path) -> None:
    """huggingface_hub stores links to blobs, and each is counted once."""
    write_model(hub_cache.parent / "source", tokenizer=False)
    hub.files = {file.name: file.read_bytes() for file in (hub_cache.parent / "source").iterdir()}
    folder = resolve("org/name")
    assert cached_models() == [CachedModel("org/name", sum(map(len, hub.files.values())), folder)]


@pytest.mark.parametrize("old", [f"{n:040x}" for n in range(4)])
def test_of_several_revisions_the_current_one_is_listed(
    hub_cache: Path, cache_repository: Any, old: str
) -> None:
    """The one that the name resolves to, not one that an update left behind."""
    snapshot = cache_repository("org/name", model)
    before = snapshot.parent / old
    before.mkdir()
    files("config.json", "model.safetensors")(before)
    assert [found.folder for found in cached_models()] == [snapshot] == [resolve("org/name")]


def test_models_are_listed_by_name(hub_cache: Path, cache_repository: Any) -> None:
    """The file system's order does not matter."""
    for name in ("b/x", "a/z", "a/b"):
        cache_repository(name, files("config.json", "model.safetensors"))
    assert [found.name for found in cached_models()] == ["a/b", "a/z", "b/x"]


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("config.json",),
        ("model.safetensors",),
        ("config.json", "pytorch_model.bin"),
        ("README.md",),
    ],
    ids=["nothing", "no weights", "no config", "other weights", "neither"],
)
def test_what_could_not_be_run_is_not_listed(
    hub_cache: Path, cache_repository: Any, names: tuple[str, ...]
) -> None:
    """A config.json and safetensors are the least."""
    cache_repository("org/other", files(*names))
    assert cached_models() == []


def test_other_things_in_the_cache_are_passed_over(hub_cache: Path, cache_repository: Any) -> None:
    """Data sets, half-made repositories, strange files."""
    snapshot = cache_repository("org/name", model)
    (hub_cache / "models--org--broken").mkdir()
    (hub_cache / "version.txt").write_text("1")
    data = hub_cache / "datasets--org--data" / "snapshots" / snapshot.name
    data.mkdir(parents=True)
    files("config.json", "model.safetensors")(data)
    assert [found.name for found in cached_models()] == ["org/name"]
