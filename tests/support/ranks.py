"""`mlxrunner launch --hosts` in a process of its own, with all ranks on this machine."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from tests.support.architectures import build, settings_of
from tests.support.models import save_model, write_tokenizer
from tests.support.tokenizers import CHATML
from tests.support.waiting import until


def free_port(ranks: int) -> int:
    """Return a port that is free, as are those after it that `ranks` need."""
    while True:
        with ExitStack() as held:
            first = held.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = int(first.getsockname()[1])
            try:
                for more in range(1, ranks + 1):
                    held.enter_context(socket.create_server(("127.0.0.1", port + more)))
            except (OSError, OverflowError):
                continue
            return port


def write_models(folder: Path, *kinds: str) -> Path:
    """Write tiny models that 4 ranks can share, each with its kind as the name of its folder."""
    for kind in kinds:
        settings = {**settings_of(kind), "num_attention_heads": 4, "num_key_value_heads": 4}
        settings["vocab_size"] = 300
        save_model(folder / kind, build(kind, **settings), settings)
        write_tokenizer(folder / kind, chat_template=CHATML)
    return folder


def write_hosts(folder: Path, ranks: int) -> Path:
    """Write a file of `ranks` hosts, all of them this machine."""
    file = folder / f"hosts-{ranks}.json"
    file.write_text(json.dumps([{"ips": ["127.0.0.1"]}] * ranks))
    return file


def command(hosts: Path, ranks: int, *words: str) -> list[str]:
    """Return the command line that runs `words` on `ranks` ranks."""
    launch = ["launch", "--hosts", str(hosts), "--rank-port", str(free_port(ranks))]
    return [sys.executable, "-m", "mlxrunner", *launch, "--", *words]


@contextmanager
def launched(
    folder: Path, *words: str, ranks: int = 2, typed: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `words` on `ranks` ranks until the block ends, without a terminal."""
    line = command(write_hosts(folder, ranks), ranks, *words)
    with TemporaryFile() as file:
        file.write(typed.encode())
        file.seek(0)
        process = subprocess.Popen(
            line, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ranks_of(process: subprocess.Popen[bytes]) -> list[int]:
    """Return the ids of the ranks that the guard `process` has started, in order."""
    found = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,args="], capture_output=True, check=True)
    rows = [line.split(maxsplit=2) for line in found.stdout.decode().splitlines()]
    own = str(process.pid)
    ours = [(" --rank " in args, args, int(pid)) for pid, ppid, args in rows if ppid == own]
    return [pid for *_, pid in sorted(ours)]


def wait_until_gone(*pids: int) -> None:
    """Wait until no process has one of these ids, or only a dead one that nobody waited for."""

    def are_gone() -> bool:
        one = ["ps", "-o", "stat=", "-p", ",".join(map(str, pids))]
        states = subprocess.run(one, capture_output=True, check=False).stdout.split()
        return all(state.startswith(b"Z") for state in states)

    until(are_gone, f"for the end of {pids}")
