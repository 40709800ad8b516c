"""Whoever reaches the port of the guard ends nothing there: a rank that comes later is taken."""

from __future__ import annotations

import json
import re
import sys

import pytest

from mlxrunner.errors import LaunchError
from mlxrunner.ranks import guard as guards
from mlxrunner.ranks.guard import END, Hosts, guard, versions
from tests.support.ranks import free_port

FAR = "192.0.2.7"
"""An address that is nobody's: nothing is sent there."""
HELLO = json.dumps({"rank": 1, "versions": versions()}).encode() + b"\n"


def guarded(port: int, code: str) -> int:
    """Run `code` as rank 0, beside a guard that waits for rank 1 of another host."""
    begin = f"""
import os, socket
there, hello = ("127.0.0.1", {port}), {HELLO!r}
guard = socket.socket(fileno=int(os.environ["MLXRUNNER_RANK"].split(":")[1]))
"""
    end = f"guard.sendall({json.dumps(END).encode()!r} + bytes([10]))"
    hosts = Hosts(("127.0.0.1", FAR), port)
    return guard(hosts, lambda rank: [sys.executable, "-c", begin + code + end])


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xfe\n",
        b"[" * 50_000 + b"\n",
        b"9" * 5000 + b"\n",
        b'{"rank": 1e400}\n',
        b'{"rank": true}\n',
        b'{"rank": 2}\n' + HELLO,
        "b'x' * (2**20 + 2**17)",  # as code: no argument of a program is as long
    ],
    ids=["HTTP", "bytes", "deep", "digits", "infinite", "true", "another", "endless"],
)
def test_rubbish_is_closed(said: bytes | str) -> None:
    """A scanner of ports ended the command with an internal error."""
    code = f"""
said = {said if isinstance(said, str) else repr(said)}
one = socket.create_connection(there, timeout=60)
try:
    one.sendall(said)
    assert one.recv(1) == b""
except ConnectionError:
    pass
other = socket.create_connection(there, timeout=60)
other.sendall(hello)
assert other.recv(1) == bytes([10])
"""
    assert guarded(free_port(2), code) == 0


def test_silent_connections_take_no_place_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than `select` can wait for ended the command, and each was kept for its whole life."""
    monkeypatch.setattr(guards, "GREETING_S", 0.5)
    code = f"""
silent = [socket.create_connection(there, timeout=60) for _ in range({guards.MOST_WAITING + 9})]
rank = socket.create_connection(there, timeout=60)
rank.sendall(hello)
assert rank.recv(1) == bytes([10])
assert silent[0].recv(1) == b""
"""
    assert guarded(free_port(2), code) == 0


@pytest.mark.parametrize("found", [{"mlx": "\x1b]0;pwned\x07\n" + "9" * 999}, [1], 5, None])
def test_the_versions_of_another_rank_are_one_line(found: object) -> None:
    """They come from the network, and none of them reaches the terminal as it is."""
    hello = json.dumps({"rank": 1, "versions": found}).encode() + b"\n"
    code = f"""
rank = socket.create_connection(there, timeout=60)
rank.sendall({hello!r})
rank.recv(1)
"""
    with pytest.raises(LaunchError, match=re.escape("rank 1 has other versions: ")) as caught:
        guarded(free_port(2), code)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400
