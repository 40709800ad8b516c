"""A hub cache of the test's own, and a hub on the loopback interface that serves a directory."""

from __future__ import annotations

import hashlib
import http.server
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.models import EOS, write_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with nothing wrong, to be copied."""
    folder = tmp_path_factory.mktemp("whole")
    write_model(folder, eos_token_id=EOS)
    return folder


@pytest.fixture
def folder(tmp_path: Path, whole: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give huggingface_hub a cache folder that is still missing, and a closed port as the hub."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _cache_manager

    folder = tmp_path / "hub"
    for module in (constants, _cache_manager):
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    set_endpoint(monkeypatch, "http://127.0.0.1:9")
    return folder


def set_endpoint(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Do what HF_ENDPOINT does in a fresh process."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )


@pytest.fixture
def cache_repository(hub_cache: Path) -> Callable[..., Path]:
    """Return a function that fabricates a cached repository and returns its snapshot.

    `write` fills the snapshot; `listed` are the files that the hub was seen to have.
    """

    def make(name: str, write: Callable[[Path], Any], *, listed: list[str] | None = None) -> Path:
        repository = hub_cache / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        write(snapshot)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(COMMIT)
        if listed is not None:
            (repository / "trees").mkdir()
            files = {path: {"size": 1, "blob_id": "0" * 40} for path in listed}
            (repository / "trees" / f"{COMMIT}.json").write_text(
                json.dumps({"format_version": 1, "files": files})
            )
        return snapshot

    return make


@dataclass
class Hub:
    """A hub of `files` by path.

    `answer` is a status, headers and a body that answer everything instead; `seen` are the
    requests. Weights are stored as large files. Each number of `cuts` is the bytes after
    which the connection of one download of weights ends. `before_cut` is called then.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    before_cut: Callable[[], object] = lambda: None
    has_ranges: bool = True
    address: str = ""
    ranges: list[str] = field(default_factory=list)
    answer: tuple[int, dict[str, str], bytes] | None = None
    hang_up: bool = False
    seen: list[str] = field(default_factory=list)

    def downloaded(self) -> set[str]:
        return {
            path.rsplit("/", 1)[1]
            for method, path in map(str.split, self.seen)
            if method == "GET" and "/resolve/" in path
        }


class _Handler(http.server.BaseHTTPRequestHandler):
    def __init__(self, hub: Hub, *args: Any) -> None:
        self.hub = hub
        super().__init__(*args)

    def do_GET(self) -> None:
        self.hub.seen.append(f"{self.command} {self.path}")
        if self.hub.hang_up:
            self.close_connection = True
            return
        self.reply(*(self.hub.answer or self.page()))

    do_HEAD = do_GET  # noqa: N815  # the name that http.server calls

    def page(self) -> tuple[int, dict[str, str], bytes]:
        path, kind = self.path.split("?")[0], {"Content-Type": "application/json"}
        if "/tree/" in path:
            entries = [_entry(p, b) for p, b in self.hub.files.items()]
            return 200, kind, json.dumps(entries).encode()
        if path.startswith("/api/models/org/name"):
            return 200, kind, json.dumps({"id": "org/name", "sha": COMMIT, "siblings": []}).encode()
        name = path.partition(f"/resolve/{COMMIT}/")[2]
        body = self.hub.files.get(name)
        if body is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        headers = {"ETag": f'"{_digest(body)}"', "X-Repo-Commit": COMMIT}
        if _is_large(name):
            headers["X-Linked-Etag"] = f'"{_large_digest(body)}"'
            headers["X-Linked-Size"] = str(len(body))
        wanted = self.headers["Range"]
        if wanted is None or not self.hub.has_ranges:
            return 200, headers, body
        self.hub.ranges.append(wanted)
        begin = int(wanted.removeprefix("bytes=").removesuffix("-"))
        headers["Content-Range"] = f"bytes {begin}-{len(body) - 1}/{len(body)}"
        return 206, headers, body[begin:]

    def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.cuts and _is_large(self.path):
            self.wfile.write(body[: self.hub.cuts.pop(0)])
            self.wfile.flush()
            self.hub.before_cut()
            self.close_connection = True
            return
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None: ...


def _entry(path: str, body: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(body), "oid": _digest(body)}
    if _is_large(path):
        entry["lfs"] = {"oid": _large_digest(body), "size": len(body), "pointerSize": 134}
    return entry


def _is_large(path: str) -> bool:
    return path.endswith(".safetensors")


def _large_digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _digest(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


@pytest.fixture
def hub(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the one repository org/name."""
    hub = Hub()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, hub))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    set_endpoint(monkeypatch, hub.address)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()
