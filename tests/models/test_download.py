"""A model comes from the hub: with progress, only if the disk has room, and it continues if cut."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.checks import ends, refused
from support.models import write_model
from support.waiting import PATIENCE_S, until

from mlxrunner import cli
from mlxrunner.errors import ModelError
from mlxrunner.models import download
from mlxrunner.models.resolve import cached_models, pull, resolve

SECRET = "code of the model"


@pytest.fixture
def llama_hub(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hub has a tiny Llama, and files of other formats. A file comes in small pieces."""
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    write_model(tmp_path / "source")
    hub.files = {file.name: file.read_bytes() for file in (tmp_path / "source").iterdir()} | {
        "README.md": b"x",
        "pytorch_model.bin": b"x",
        "chat_template.jinja": b"{{ messages }}",
        "modeling.py": SECRET.encode(),
    }
    return hub


def run(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(cli.main, ["models", *arguments], input=stdin)


def weights(hub: Any) -> bytes:
    return bytes(hub.files["model.safetensors"])


def pulled(hub: Any) -> Path:
    """Download the model, whose weights have to come as the hub has them. Return its folder."""
    folder = pull("org/name")
    assert (folder / "model.safetensors").read_bytes() == weights(hub)
    return folder


def partial_file(hub_cache: Path) -> Path:
    (found,) = hub_cache.glob(f"models--org--name/blobs/*{download.PARTIAL}")
    return found


def test_pull_fetches_what_a_model_needs(llama_hub: Any, hub_cache: Path) -> None:
    """Weights, settings, tokenizer and template; no code, no other weights, no README."""
    result = run("pull", "org/name")
    ends(result, 0, "model.safetensors: ")
    (found,) = cached_models()
    assert result.stdout == (f"org/name: {download.size(found.nbytes)} in {found.folder}\n")
    names = {file.name for file in found.folder.iterdir()}
    assert {"config.json", "model.safetensors", "chat_template.jinja"} <= names
    assert not {"README.md", "pytorch_model.bin", "modeling.py"} & names
    assert resolve("org/name") == found.folder
    assert not list(hub_cache.rglob(f"*{download.PARTIAL}"))


def test_code_comes_only_for_who_trusts_it(llama_hub: Any) -> None:
    """With --trust-remote-code, also where the model is in the cache without it."""
    folder = pull("org/name")
    assert not (folder / "modeling.py").exists()
    assert resolve("org/name", with_code=True) == folder
    assert (folder / "modeling.py").read_text() == SECRET


def test_a_second_pull_fetches_nothing(llama_hub: Any) -> None:
    """It asks the hub for a newer revision, and there is none.

    Several users may share the cache: who can read its folder can read a file of it.
    """
    blob = (pull("org/name") / "model.safetensors").resolve()
    assert blob.stat().st_mode & 0o777 == blob.parent.stat().st_mode & 0o666
    llama_hub.seen.clear()
    assert run("pull", "org/name").exit_code == 0
    assert llama_hub.downloaded() == set()
    assert llama_hub.seen


def test_a_caller_is_told_how_far_each_file_is(llama_hub: Any) -> None:
    """The last call for a file says that it is whole."""
    told: list[tuple[str, int, int]] = []
    pull("org/name", tell=lambda *step: told.append(step))
    *steps, last = [step for step in told if step[0] == "model.safetensors"]
    size = len(weights(llama_hub))
    assert last == ("model.safetensors", size, size)
    assert len(steps) >= 10


def test_a_caller_ends_the_download_by_an_error(llama_hub: Any, hub_cache: Path) -> None:
    """The part that came stays, and the next run continues there."""

    def tell(file: str, present: int, whole: int) -> None:
        if file == "model.safetensors" and present > whole / 2:
            raise RuntimeError("enough")

    with pytest.raises(ModelError, match="enough"):
        pull("org/name", tell=tell)
    assert partial_file(hub_cache).stat().st_size > 0
    pulled(llama_hub)


def test_a_connection_that_is_cut_goes_on(llama_hub: Any) -> None:
    """In the same run, from the byte where it was cut."""
    llama_hub.cuts = [200_000]
    pulled(llama_hub)
    assert llama_hub.ranges == ["bytes=200000-"]


def cut_off(hub: Any, hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Pull while every connection is cut, until it is given up. Return the bytes that came."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between two tries
    hub.cuts = [1000, *([0] * 20)]
    with pytest.raises(ModelError, match=r"the download failed: .*; .* are on the disk: try again"):
        pull("org/name")
    hub.cuts = []
    return partial_file(hub_cache).stat().st_size


def test_a_later_run_goes_on_where_one_was_cut_off(
    llama_hub: Any, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """huggingface_hub alone would begin the file again."""
    came = cut_off(llama_hub, hub_cache, monkeypatch)
    assert came == 1000
    llama_hub.ranges.clear()
    pulled(llama_hub)
    assert llama_hub.ranges == ["bytes=1000-"]
    assert not list(hub_cache.rglob(f"*{download.PARTIAL}"))


@pytest.mark.parametrize("case", ["a hub without ranges", "a part that is too long"])
def test_a_part_that_cannot_go_on_is_begun_again(
    case: str, llama_hub: Any, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is right. Somebody may have written to the part."""
    cut_off(llama_hub, hub_cache, monkeypatch)
    if case == "a hub without ranges":
        llama_hub.has_ranges = False
    else:
        partial_file(hub_cache).write_bytes(b"?" * (len(weights(llama_hub)) + 1))
    pulled(llama_hub)


def test_a_part_that_was_changed_is_found_out(
    llama_hub: Any, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two parts that do not fit together are never the model; the next run begins again."""
    cut_off(llama_hub, hub_cache, monkeypatch)
    partial_file(hub_cache).write_bytes(b"?" * 1000)
    with pytest.raises(ModelError, match=r"model.safetensors came damaged: its SHA-256"):
        pull("org/name")
    assert cached_models() == []
    pulled(llama_hub)


def test_a_disk_that_is_too_small_is_refused_before(
    llama_hub: Any, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both sizes, and without a byte of the model."""
    usage = shutil.disk_usage("/")._replace(free=5000)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    left_out = (".md", ".bin", ".py")
    files = [body for name, body in llama_hub.files.items() if not name.endswith(left_out)]
    needed = download.size(sum(map(len, files)))
    said = f"org/name: {needed} have to be downloaded, and 5 kB are free"
    ends(run("pull", "org/name"), 2, said)
    assert llama_hub.downloaded() == set()
    assert not hub_cache.exists() or not list(hub_cache.rglob("*.safetensors"))


def test_only_what_is_missing_needs_room(
    llama_hub: Any, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that an earlier run left count."""
    cut_off(llama_hub, hub_cache, monkeypatch)
    names = ("model.safetensors", "config.json", "chat_template.jinja")
    left = sum(len(llama_hub.files[name]) for name in names)
    usage = shutil.disk_usage("/")._replace(free=left - 1000)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    assert pull("org/name").is_dir()


def test_two_pulls_at_once_do_not_write_one_file(
    llama_hub: Any, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one says so, and so does `rm`."""
    cut_off(llama_hub, hub_cache, monkeypatch)
    with partial_file(hub_cache).open("r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match="another process is downloading it"):
            pull("org/name")
        ends(run("rm", "--yes", "org/name"), 2, "is being downloaded")
    assert pull("org/name").is_dir()


def test_ctrl_c_keeps_what_came_and_says_so(llama_hub: Any, hub_cache: Path) -> None:
    """Exit code 130, no traceback; the next run continues from there."""
    llama_hub.files["model.safetensors"] = os.urandom(25_000_000)

    def program() -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "mlxrunner", "models", "pull", "org/name"]
        places = {"HF_ENDPOINT": llama_hub.address, "HF_HUB_CACHE": str(hub_cache)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env={**os.environ, **places}, text=True, **pipes)

    def press() -> None:
        until(lambda: list(hub_cache.rglob(f"*{download.PARTIAL}")))
        until(lambda: partial_file(hub_cache).stat().st_size >= 20_000_000)
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_S)

    llama_hub.cuts, llama_hub.before_cut = [22_000_000], press
    process = program()
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert errors.splitlines()[-1].startswith("stopped: ")
    assert errors.splitlines()[-1].endswith("the same command resumes")
    assert "Traceback" not in errors
    again = program()
    _, errors = again.communicate(timeout=PATIENCE_S)
    assert again.returncode == 0, errors
    (begun,) = llama_hub.ranges
    assert int(begun.removeprefix("bytes=").removesuffix("-")) >= 20_000_000
    (folder,) = hub_cache.glob("models--org--name/snapshots/*")
    assert (folder / "model.safetensors").read_bytes() == weights(llama_hub)


@pytest.mark.parametrize("name", ["demo", "/tmp", "a/b/c", "../x/y", "", "org/na\nme"])
def test_what_is_no_hub_id_is_not_pulled(hub_cache: Path, name: str) -> None:
    """One line, exit code 2."""
    refused(run("pull", name), "not a hub id, which has the form OWNER/NAME")


def test_only_weights_that_the_index_names_are_fetched(llama_hub: Any, hub_cache: Path) -> None:
    """Strays stay on the hub, and the model is found again without asking it."""
    whole = llama_hub.files.pop("model.safetensors")
    index = {"weight_map": dict.fromkeys(read_tensors(whole), "parts/weights.safetensors")}
    llama_hub.files |= {
        "parts/weights.safetensors": whole,
        "model_old.safetensors": whole,
        "model.safetensors.index.json": json.dumps(index).encode(),
    }
    folder = pull("org/name")
    assert (folder / "parts/weights.safetensors").read_bytes() == whole
    assert not (folder / "model_old.safetensors").exists()
    llama_hub.seen.clear()
    assert resolve("org/name") == folder
    assert llama_hub.seen == []


def test_a_stale_index_on_the_hub_does_not_hide_the_weights(llama_hub: Any) -> None:
    """It names files that the repository lacks."""
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    llama_hub.files["model.safetensors.index.json"] = json.dumps(index).encode()
    assert resolve("org/name") == pulled(llama_hub)


def read_tensors(content: bytes) -> list[str]:
    length = int.from_bytes(content[:8], "little")
    return [name for name in json.loads(content[8 : 8 + length]) if name != "__metadata__"]
