"""For all tests: a home for each, signals as in a terminal, and no process left behind."""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import logging
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import pexpect
import pytest
from ptyprocess import PtyProcess
from support import forking, sample
from support.screen import Screen, end

OF_THE_USER = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "HF_HOME", "PYTHONDONTWRITEBYTECODE"}
"""Variables that change what a test sees, beside those that begin with MLXRUNNER_ or XDG_.

The last one would have each process compile the package and its tests again.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    sample.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Forget how and by whom the suite was started."""
    sample.configure(config)
    heed_signals()
    batch_scheduling()
    sys.dont_write_bytecode = False
    for name in [*os.environ]:
        if name.startswith(("MLXRUNNER_", "XDG_")) or name in OF_THE_USER:
            del os.environ[name]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sample.deselect(config, items)


def pytest_collection_finish() -> None:
    """Leave the modules and the thousands of tests out of each later garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def heed_signals() -> None:
    """Undo what a script's background job and nohup inherit: signals that are ignored or blocked.

    The processes that tests start would inherit it, too. SIGHUP is still without effect here: a
    handler that does nothing gives it its default effect in those processes.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGTSTP,
        signal.SIGTTIN,
        signal.SIGTTOU,
        signal.SIGUSR1,
    ):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)


def batch_scheduling() -> None:
    """Let a thread that wakes up wait for its turn, here and in all that tests start, on Linux.

    Otherwise MLX's thread takes the processor from the one that gives it work, for each operation.
    This is a tenth of the processor time of tests of the engine.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(PermissionError):  # of a process that runs at idle times only
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Paths of folders that do not exist yet, in a folder of this process."""
    base = tmp_path_factory.mktemp("homes")
    return (base / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def own_home(homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a home of its own, without speeds, sessions or history of anybody else."""
    home = next(homes)
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.fixture(autouse=True)
def no_freed_buffers() -> None:
    """Drop freed buffers, so that no test is handed a larger one than it asks for."""
    mx.clear_cache()


@pytest.fixture(scope="session")
def batches() -> dict[Any, int]:
    """Bytes that the worst-case batch of the demo model took, by the settings of its runner."""
    return {}


@pytest.fixture(autouse=True)
def batch_tried_once(batches: dict[Any, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the worst-case batch of the demo model once in this process, not for each runner.

    It takes most of the time of a start. tests/memory/test_reserve.py runs it each time.
    """
    from mlxrunner import loading  # which reads variables that pytest_configure removes

    run = loading._taken

    def run_once(runner: Any) -> int:
        if runner.name != "demo":
            return run(runner)
        settings = runner.context, runner.prefill_step, runner.cache.options
        if settings not in batches:
            batches[settings] = run(runner)
        return batches[settings]

    monkeypatch.setattr(loading, "_taken", run_once)


@pytest.fixture(autouse=True)
def no_process_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End the processes that a test has started and not waited for, also when it fails."""
    started: list[subprocess.Popen[Any]] = []
    terminals: list[PtyProcess] = []
    begin, spawn = subprocess.Popen.__init__, PtyProcess.spawn

    def record(self: subprocess.Popen[Any], *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        if forking.__file__ not in self.args:  # which serves all tests of this process
            started.append(self)

    def record_terminal(*arguments: Any, **options: Any) -> PtyProcess:
        terminals.append(spawn(*arguments, **options))
        return terminals[-1]

    monkeypatch.setattr(subprocess.Popen, "__init__", record)
    monkeypatch.setattr(PtyProcess, "spawn", record_terminal)
    yield
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()
    for terminal in terminals:
        end(terminal)


@pytest.fixture(scope="session")
def spawn() -> Iterator[Callable[..., pexpect.spawn]]:
    """Start a program in a terminal as `pexpect.spawn` does, without the time for imports."""
    if sys.platform == "darwin":
        yield pexpect.spawn
        return
    yield forking.shared().spawn


@pytest.fixture
def open_screen(
    tmp_path: Path, spawn: Callable[..., pexpect.spawn]
) -> Iterator[Callable[..., Screen]]:
    """Run the program in a terminal.

    Called as `open_screen("-m", "mlxrunner", "chat")`, or with a script's name. With `imports`, the
    program imports all that it needs while the terminal is there already.
    """
    screens: list[Screen] = []

    def start(
        *arguments: str, size: tuple[int, int] = (100, 30), imports: bool = False, **env: Any
    ) -> Screen:
        variables = {"MLXRUNNER_DATA": str(tmp_path / "data"), **env}
        how = pexpect.spawn if imports else spawn
        screens.append(Screen(list(arguments), variables, size, spawn=how))
        return screens[-1]

    yield start
    for screen in screens:
        screen.kill()


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """Compute on the CPU, where models become float32, also on a machine with a GPU."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.fixture
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Yield a descriptor of a disk that is always full.

    It is of a copy of the device, so that nothing can replace the real one.
    """
    device = tmp_path_factory.mktemp("device") / "full"
    try:
        os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(1, 7))
        descriptor = os.open(device, os.O_WRONLY)
    except OSError as error:
        pytest.skip(f"makes a device, which this user may not, or not here: {error}")
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def null(tmp_path: Path) -> Path:
    """A copy of the null device."""
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o600, os.stat(os.devnull).st_rdev)
    except OSError as error:
        pytest.skip(f"makes a device, which this user may not: {error}")
    return device


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], int]:
    """Make a file another user's, and return that user's number.

    Root gives it away. Anyone else becomes another user, as far as `os.geteuid` says.
    """

    def give(path: Path) -> int:
        owner = path.stat().st_uid
        if os.geteuid() == 0:
            owner = 12345
            os.chown(path, owner, owner)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        return owner

    return give


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """Give the logger its level and handlers back, which `-v` changes in this process."""
    logger = logging.getLogger("mlxrunner")
    level, handlers, propagate = logger.level, logger.handlers[:], logger.propagate
    yield
    logger.setLevel(level)
    logger.handlers[:], logger.propagate = handlers, propagate
