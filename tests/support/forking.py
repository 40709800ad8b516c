"""Programs in a terminal, as forks of one process that has imported what they need.

The imports are most of the time that a short chat takes. A fork is a process of its own, with its
own terminal, environment, signals and exit code. On a Mac, programs are started anew: what Metal
has started does not survive a fork.

Run as a script, this module is the process that is forked.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import runpy
import select
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from typing import Any

import pexpect
from ptyprocess import PtyProcess

IMPORTS = """
mlx_lm.models.llama prompt_toolkit.shortcuts rich.live rich.markdown
mlxrunner.chat.repl mlxrunner.chat.editor mlxrunner.chat.markdown mlxrunner.cli.chat
mlxrunner.cli.generate mlxrunner.cli.options mlxrunner.loading mlxrunner.testing
""".split()
"""Modules that most programs import. Importing them starts no thread."""
INTEGER = struct.Struct("i")


class Forks:
    """The process that is forked, and a way to ask it for a program."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair()
        self._process = subprocess.Popen([sys.executable, "-P", __file__], stdin=other)
        other.close()

    def spawn(self, command: str, arguments: list[str], **options: Any) -> pexpect.spawn:
        """Do what `pexpect.spawn` does, for a program in Python."""
        assert command == sys.executable
        return _Spawn(self._start, command, arguments, **options)

    def _start(
        self,
        arguments: list[str],
        env: dict[str, str],
        cwd: str | None,
        dimensions: tuple[int, int],
    ) -> _Terminal:
        ours, theirs = pty.openpty()
        status, done = os.pipe()
        request = {"arguments": arguments, "env": env, "folder": cwd or os.getcwd()}
        socket.send_fds(self._socket, [json.dumps(request).encode() + b"\n"], [theirs, done])
        os.close(theirs)
        os.close(done)
        terminal = _Terminal(INTEGER.unpack(os.read(status, INTEGER.size))[0], ours, status)
        terminal.setwinsize(*dimensions)
        return terminal

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


class _Spawn(pexpect.spawn):
    """A program that is forked, with the methods of one that is started."""

    def __init__(self, start: Callable[..., _Terminal], *arguments: Any, **options: Any) -> None:
        self._start = start
        super().__init__(*arguments, **options)

    def _spawnpty(self, args: list[bytes], *, env: Any, cwd: Any, **options: Any) -> _Terminal:
        return self._start([os.fsdecode(one) for one in args[1:]], env, cwd, options["dimensions"])


class _Terminal(PtyProcess):
    """A terminal whose program is no child of this process: `status` says when it ends."""

    def __init__(self, pid: int, fd: int, status: int) -> None:
        super().__init__(pid, fd)
        self._status = status

    def isalive(self) -> bool:
        if not self.terminated and (
            self.flag_eof or select.select([self._status], [], [], 0)[0] != []
        ):
            self.wait()
        return not self.terminated

    def wait(self) -> int | None:
        if not self.terminated:
            (code,) = INTEGER.unpack(os.read(self._status, INTEGER.size))
            os.close(self._status)
            self.exitstatus, self.signalstatus = (None, -code) if code < 0 else (code, None)
            self.terminated = True
        return self.exitstatus


def serve() -> list[str]:
    """Fork for each request. Return its arguments, in the fork; exit at the end of the requests."""
    requests, watchers = socket.socket(fileno=0), set[int]()
    while True:
        text, files = b"", []
        while not text.endswith(b"\n"):
            part, found, *_ = socket.recv_fds(requests, 1 << 20, 2)
            if not part:
                sys.exit()
            text, files = text + part, [*files, *found]
        terminal, status = files
        watcher = os.fork()
        if watcher == 0:
            requests.close()
            program = os.fork()
            if program == 0:
                os.close(status)
                return _move(terminal, **json.loads(text))
            os.close(terminal)
            _watch(program, status)
        os.close(terminal)
        os.close(status)
        watchers = {one for one in {*watchers, watcher} if os.waitpid(one, os.WNOHANG) == (0, 0)}


def _watch(program: int, status: int) -> None:
    """Say which process the program is and, once it has ended, how."""
    os.write(status, INTEGER.pack(program))
    os.write(status, INTEGER.pack(os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])))
    os._exit(0)


def _move(terminal: int, arguments: list[str], env: dict[str, str], folder: str) -> list[str]:
    """Go over to a terminal, an environment and a folder."""
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for stream in range(3):
        os.dup2(terminal, stream)
    os.close(terminal)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update({"MLXRUNNER_OPENBLAS": "off", **env})  # no other program can begin here
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", 1, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(  # noqa: SIM115
        2, "w", 1, errors="backslashreplace", closefd=False
    )
    return arguments


def run(arguments: list[str]) -> None:
    """Run `-m MODULE`, `-c CODE` or SCRIPT with its arguments, as Python does."""
    kind, *rest = arguments
    if kind == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(kind))
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    for name in IMPORTS:
        __import__(name)
    run(serve())
