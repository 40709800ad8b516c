"""A name leads to a checked directory: paths, hub ids, the hub's cache, and broken ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.models import error_line, save_model, tiny_config, tiny_model, write_model

from mlxrunner import ModelError
from mlxrunner.models.files import eos_tokens, read_config
from mlxrunner.models.resolve import DEMO_FOLDER, resolve

# Names


def test_demo_and_directories_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name "demo", a path, and a path from the home directory; nothing is read yet."""
    assert resolve("demo") == DEMO_FOLDER
    assert resolve(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~") == tmp_path


def test_a_directory_named_like_a_hub_id_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No look at the hub for what is on disk."""
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") == Path("org/name")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nosuchmodel", "nosuchmodel: no such model"),
        ("./no/such/folder", "./no/such/folder: no such model"),
        ("", "'': no such model"),
        ("a\nb", r"'a\nb': no such model"),
        ("a\0b", r"'a\x00b': no such model"),
        ("~nobody-has-this-name/x", "~nobody-has-this-name/x: not a usable path"),
        ("x" * 5000, "not a usable path"),
        ("org/n--n", "org/n--n: not a valid hub id"),
        ("org/.name", "org/.name: not a valid hub id"),
        ("org/name.git", "org/name.git: not a valid hub id"),
        ("örg/näme", "örg/näme: not a valid hub id"),
        ("org/" + "x" * 200, "not a valid hub id"),
        ("org/na me", "org/na me: no such model"),
        ("org/na;me", "org/na;me: no such model"),
    ],
)
def test_a_name_that_is_nothing_is_an_error_that_names_it(
    hub_cache: Path, name: str, message: str
) -> None:
    """In one line, whatever characters it has."""
    assert message in error_line(ModelError, resolve, name)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    """The message says what to name instead."""
    file = tmp_path / "model.safetensors"
    file.touch()
    assert f"{file}: is a file; name the directory" in error_line(ModelError, resolve, str(file))


# The hub


def llama(folder: Path) -> None:
    write_model(folder, tokenizer=False)


def sharded(folder: Path) -> None:
    save_model(folder, tiny_model(tiny_config()), tiny_config(), shards=2)


def sharded_in_part(folder: Path) -> None:
    sharded(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def only_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')


def test_an_unreachable_hub_is_an_error(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed port; and HF_HUB_OFFLINE is named, for whoever forgot that it is set."""
    said = error_line(ModelError, resolve, "org/name")
    assert "org/name: not in the local cache, and the hub can't be reached: " in said
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in error_line(ModelError, resolve, "org/name")


WANTED = ["config.json", "model.safetensors"]
OTHERS = ".gitattributes README.md pytorch_model.bin original/params.pth".split()


@pytest.mark.parametrize(
    ("write", "listed"),
    [
        (llama, None),
        (llama, WANTED),
        (llama, [*WANTED, *OTHERS]),
        # Somebody downloaded less than the patterns ask for; all that is needed is there.
        (llama, [*WANTED, "vocab.txt", "extra.json"]),
        (sharded, None),
    ],
    ids=(
        "no tree listing, all files, files that nobody asks for, optional files missing, sharded"
    ).split(", "),
)
def test_a_cached_repository_is_found_without_a_network(
    hub_cache: Path, cache_repository: Any, write: Any, listed: Any
) -> None:
    """huggingface_hub may remember which files the repository has, or not."""
    snapshot = cache_repository("org/name", write, listed=listed)
    assert resolve("org/name") == snapshot


@pytest.mark.parametrize(
    ("write", "listed"),
    [
        (
            sharded_in_part,
            ["config.json", *(f"model-0000{n}-of-00002.safetensors" for n in (1, 2))],
        ),
        (only_config, WANTED),
    ],
    ids=["shard missing", "weights missing"],
)
def test_an_interrupted_download_without_a_network_is_an_error(
    hub_cache: Path, cache_repository: Any, write: Any, listed: Any
) -> None:
    """It says that a part is there."""
    cache_repository("org/name", write, listed=listed)
    said = error_line(ModelError, resolve, "org/name")
    assert "org/name: only in part in the local cache, and the hub can't be reached" in said


def test_a_download_takes_what_is_needed_and_is_found_again_offline(
    hub: Any, hub_cache: Path, monkeypatch: Any
) -> None:
    """No README, no other formats; afterwards not one more request."""
    others = dict.fromkeys(("README.md", "pytorch_model.bin", "tokenizer.model"), b"x")
    hub.files = repository_files(hub_cache.parent / "source") | others
    folder = resolve("org/name")
    assert {file.name for file in folder.iterdir()} == {*WANTED, "tokenizer.model"}
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    requests = len(hub.seen)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve("org/name") == folder
    assert len(hub.seen) == requests


@pytest.mark.parametrize("listed", [None, WANTED], ids=["no tree listing", "tree listing"])
def test_an_interrupted_download_is_completed(
    hub: Any, hub_cache: Path, cache_repository: Any, listed: Any
) -> None:
    """A snapshot that lacks its weights is not taken for the model."""
    hub.files = repository_files(hub_cache.parent / "source")
    snapshot = cache_repository("org/name", only_config, listed=listed)
    assert resolve("org/name") == snapshot
    assert (snapshot / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, {"X-Error-Code": "RepoNotFound"}, b"{}"), "no such repository on the hub"),
        ((403, {"X-Error-Code": "GatedRepo"}, b"{}"), "access is restricted: accept its terms"),
        ((401, {}, b""), "the download failed"),
        ((404, {"X-Error-Code": "RevisionNotFound"}, b""), "the download failed"),
        ((404, {}, b""), "can't be reached: Client error '404"),
        ((429, {}, b""), "can't be reached: 429 Too Many Requests"),
        ((500, {}, b"oops"), "can't be reached: Server error '500"),
        ((200, {"Content-Type": "text/html"}, b"<html>please log in</html>"), "download failed"),
        ((200, {}, b"{}"), "the download failed"),
        ((200, {}, b"[]"), "the download failed"),
    ],
    ids=(
        "unknown, gated, unauthorized, no main, not a hub, too many, down, captive portal, "
        "empty object, list"
    ).split(", "),
)
def test_what_the_hub_refuses_is_one_line(hub: Any, answer: Any, message: str) -> None:
    """Each answer, sensible or not, becomes a ModelError with the id."""
    hub.answer = answer
    said = error_line(ModelError, resolve, "org/name")
    assert said.startswith("org/name: ")
    assert message in said


def test_a_hub_that_hangs_up_is_one_line(hub: Any) -> None:
    """The HTTP library's own exceptions don't get through."""
    hub.hang_up = True
    assert "org/name: the download failed" in error_line(ModelError, resolve, "org/name")


def repository_files(folder: Path) -> dict[str, bytes]:
    write_model(folder, tokenizer=False)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# config.json


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "missing"),
        (b"", "not readable as JSON"),
        (b"{", "not readable as JSON"),
        (b"\xff\xfe", "not readable as JSON"),
        (b"[" * 100_000, "not readable as JSON"),
        (b"[]", "has no model_type"),
        (b"null", "has no model_type"),
        (b"{}", "has no model_type"),
        (b'{"model_type": 3}', "has no model_type"),
    ],
    ids=(
        "missing, empty, cut off, not UTF-8, too deep, list, null, no model_type, "
        "model_type is a number"
    ).split(", "),
)
def test_a_config_that_says_no_model_type_is_an_error_that_names_the_file(
    tmp_path: Path, content: Any, message: str
) -> None:
    """Anything else may be in config.json."""
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    assert f"{tmp_path / 'config.json'}: {message}" in error_line(ModelError, read_config, tmp_path)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, []),
        ({"eos_token_id": 2}, None, [2]),
        ({"eos_token_id": [2, 5]}, None, [2, 5]),
        ({"eos_token_id": None}, b'{"eos_token_id": 7}', [7]),
        ({"eos_token_id": 2}, b'{"eos_token_id": [2, 7]}', [2, 7]),
        ({"text_config": {"eos_token_id": 9}}, None, [9]),
        ({"eos_token_id": 0}, None, [0]),
        ({"eos_token_id": ["</s>", 2]}, None, [2]),
        ({"eos_token_id": 2}, b'{"eos_token_id": [7, 99999999]}', [2, 7]),
        ({"eos_token_id": 2}, b"[1]", [2]),
        ({"eos_token_id": 2}, b"{broken", [2]),
    ],
    ids=(
        "none, one, list, generation only, both, text_config, zero, text, too large for an id, "
        "generation is a list, generation is broken"
    ).split(", "),
)
def test_end_tokens_are_collected_from_all_places(
    tmp_path: Path, config: Any, generation: Any, expected: list[int]
) -> None:
    """config.json, its text_config and generation_config.json; what is not an id is passed over."""
    if generation is not None:
        (tmp_path / "generation_config.json").write_bytes(generation)
    assert list(eos_tokens(tmp_path, config)) == expected
