"""Programs as forks of one process that has imported what they need.

The imports are most of the time that a short program takes. A fork is a process of its own, with
its own terminal or pipes, environment, signals and exit code. On a Mac, programs are started as
Python starts them: what Metal has started does not survive a fork.

Run as a script, this module is the process that is forked.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
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
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import pexpect
from ptyprocess import PtyProcess

IMPORTS = """
mlx_lm.models.llama prompt_toolkit.shortcuts rich.live rich.markdown
mlxrunner.chat.repl mlxrunner.chat.editor mlxrunner.chat.view mlxrunner.cli.chat
mlxrunner.cli.batch mlxrunner.cli.generate mlxrunner.cli.options mlxrunner.loading
mlxrunner.testing
""".split()
"""Modules that most programs import. Importing them starts no thread."""
INTEGER = struct.Struct("i")
TESTS = os.path.dirname(os.path.dirname(__file__))


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
        pid, status = self.start(arguments, [theirs] * 3, env, cwd, is_terminal=True)
        os.close(theirs)
        terminal = _Terminal(pid, ours, status)
        terminal.setwinsize(*dimensions)
        return terminal

    def start(
        self,
        arguments: list[str],
        streams: list[int],
        env: Mapping[str, str] | None,
        cwd: Any,
        **how: Any,
    ) -> tuple[int, int]:
        """Start a program with three `streams`; return its number and what tells how it ended.

        `how`: see `_move`, and `imports`, modules that are imported before the first such fork.
        """
        status, done = os.pipe()
        request = {
            "arguments": [os.fsdecode(one) for one in arguments],
            "env": dict(os.environ if env is None else env),
            "folder": os.fsdecode(cwd or os.getcwd()),
            **how,
        }
        socket.send_fds(self._socket, [json.dumps(request).encode() + b"\n"], [*streams, done])
        os.close(done)
        return INTEGER.unpack(os.read(status, INTEGER.size))[0], status

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


@cache
def shared() -> Forks:
    """Return the process that programs of this process are forked from."""
    forks = Forks()
    atexit.register(forks.close)
    return forks


class Program(subprocess.Popen[Any]):
    """A program in Python without a terminal, `[sys.executable, ...]`, that is forked."""

    _status = -1

    def __init__(self, *arguments: Any, imports: Iterable[str] = (), **options: Any) -> None:
        self._imports = [*imports]
        super().__init__(*arguments, **options)

    def _execute_child(self, args: Any, *given: Any) -> None:
        executable, preexec_fn, _, pass_fds, cwd, env = given[:6]
        ends, is_leader = given[9:15], given[-2]  # as subprocess calls it since Python 3.11
        if sys.platform == "darwin" or executable or preexec_fn or pass_fds:
            super()._execute_child(args, *given)  # type: ignore[misc]
            return
        assert args[0] == sys.executable
        streams = [own if one < 0 else one for own, one in enumerate((ends[0], ends[3], ends[5]))]
        how = {"is_leader": is_leader, "imports": self._imports}
        self.pid, self._status = shared().start(args[1:], streams, env, cwd, **how)
        self._child_created = True
        self._close_pipe_fds(*ends)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._status < 0:
            return super()._try_wait(wait_flags)  # type: ignore[misc, no-any-return]
        if wait_flags == os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        (code,) = INTEGER.unpack(os.read(self._status, INTEGER.size))
        os.close(self._status)
        return self.pid, code << 8 if code >= 0 else -code

    def _internal_poll(self, *given: Any, **more: Any) -> int | None:
        if self._status < 0:
            return super()._internal_poll(*given, **more)  # type: ignore[misc, no-any-return]
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def run_program(*arguments: str, **options: Any) -> subprocess.CompletedProcess[Any]:
    """Do what `subprocess.run` does, for a program in Python. Its output is caught."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    given, timeout = options.pop("input", None), options.pop("timeout", None)
    if given is not None:
        streams["stdin"] = subprocess.PIPE
    with Program([sys.executable, *arguments], **streams | options) as process:
        try:
            out, err = process.communicate(given, timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


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
            part, found, *_ = socket.recv_fds(requests, 1 << 20, 4)
            if not part:
                sys.exit()
            text, files = text + part, [*files, *found]
        *streams, status = files
        request = json.loads(text)
        _import(request.pop("imports", ()))
        watcher = os.fork()
        if watcher == 0:
            requests.close()
            program = os.fork()
            if program == 0:
                os.close(status)
                return _move(streams, **request)
            for stream in streams:
                os.close(stream)
            _watch(program, status)
        for one in files:
            os.close(one)
        watchers = {one for one in {*watchers, watcher} if os.waitpid(one, os.WNOHANG) == (0, 0)}


def _import(names: Iterable[str]) -> None:
    """Import modules of the package, of others and of the tests."""
    if new := [name for name in names if name not in sys.modules]:
        sys.path.append(TESTS)
        for name in new:
            importlib.import_module(name)
        sys.path.remove(TESTS)
        gc.freeze()  # a fork shares what no collection touches


def _watch(program: int, status: int) -> None:
    """Say which process the program is and, once it has ended, how."""
    os.write(status, INTEGER.pack(program))
    os.write(status, INTEGER.pack(os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])))
    os._exit(0)


def _move(
    streams: list[int],
    arguments: list[str],
    env: dict[str, str],
    folder: str,
    is_leader: bool = False,
    is_terminal: bool = False,
) -> list[str]:
    """Go over to other streams, or a terminal, an environment and a folder."""
    if is_leader or is_terminal:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if is_terminal:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update({"MLXRUNNER_OPENBLAS": "off", **env})  # no other program can begin here
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
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


def end_at_once(code: Any) -> None:
    """End as Python does, without the time to free each object of a fork, a second of them."""
    if isinstance(code, int | None):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in sys.stdout, sys.stderr:
            stream.flush()  # where this fails, Python ends the program
        os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    _import(IMPORTS)
    try:
        run(serve())
        end_at_once(0)
    except SystemExit as error:
        end_at_once(error.code)
        raise
