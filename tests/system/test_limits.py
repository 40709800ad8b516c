"""Limits of the process and its cgroup bound the device's offer, so a plan fails, not a run."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxrunner.system import device
from mlxrunner.system.device import ADDRESSES, Limit

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
GB = 2**30


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Return a function that writes the test's own files of /proc and /sys/fs/cgroup.

    Without them there are no limits.
    """
    monkeypatch.setattr(device, "PROC", tmp_path / "proc")
    monkeypatch.setattr(device, "CGROUPS", tmp_path / "cgroup")

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    return write


def test_where_nothing_can_be_read_there_is_no_limit(system: object) -> None:
    """macOS has nothing to read."""
    assert device.limits() == []
    assert device._available(7) == 7


def test_the_machine_offers_what_is_available(system: Callable[[dict[str, str]], None]) -> None:
    """Not what is free: files are given up."""
    system({"proc/meminfo": "MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:    5 kB\n"})
    assert device.limits() == [Limit("the machine", 5 * 1024)]


@pytest.mark.parametrize(
    ("own", "above", "left"),
    [
        ("max", "max", None),
        (str(4 * GB), "max", 2 * GB),
        ("max", str(3 * GB), GB),
        (str(3 * GB), str(4 * GB), GB),
        (str(GB), "max", 0),
    ],
)
def test_a_cgroup_offers_what_it_has_not_taken(
    own: str, above: str, left: int | None, system: Callable[[dict[str, str]], None]
) -> None:
    """Version 2 offers the narrowest of all levels without file pages, and never less than 0."""
    group = {
        "memory.current": str(3 * GB),
        "memory.stat": f"anon {2 * GB}\ninactive_file {GB // 2}\nactive_file {GB // 2}\n",
    }
    system(
        {
            "proc/self/cgroup": "0::/a/b\n",
            **{f"cgroup/a/b/{name}": text for name, text in group.items()},
            **{f"cgroup/a/{name}": text for name, text in group.items()},
            "cgroup/a/b/memory.max": own + "\n",
            "cgroup/a/memory.max": above + "\n",
        }
    )
    assert [limit.nbytes for limit in device.limits()][:1] == ([] if left is None else [left])


@pytest.mark.parametrize("path", ["/docker/x", "/"])
def test_version_1_of_cgroups_counts_as_well(
    path: str, system: Callable[[dict[str, str]], None]
) -> None:
    """In a container its files are those of the root, whatever path is said."""
    system(
        {
            "proc/self/cgroup": f"5:cpu:/x\n4:hugetlb,memory:{path}\n",
            "cgroup/memory/memory.limit_in_bytes": f"{2 * GB}\n",
            "cgroup/memory/memory.usage_in_bytes": f"{GB}\n",
        }
    )
    assert device.limits() == [Limit("the cgroup", GB)]
    system({"cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"})
    assert device.limits() == []


@pytest.mark.parametrize(("kind", "column"), [("RLIMIT_AS", 0), ("RLIMIT_DATA", 5)])
def test_the_limits_of_the_process_count_from_what_it_has_taken(
    kind: str,
    column: int,
    system: Callable[[dict[str, str]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`ulimit -v` and `ulimit -d`; some addresses are left for what is no memory."""
    pages = ["1"] * 7
    pages[column] = "1000"
    system({"proc/self/statm": " ".join(pages)})
    asked = getattr(resource, kind)
    monkeypatch.setattr(
        resource,
        "getrlimit",
        lambda which: (GB, GB) if which == asked else (resource.RLIM_INFINITY,) * 2,
    )
    taken = 1000 * resource.getpagesize() + ADDRESSES
    assert [limit.nbytes for limit in device.limits()] == [GB - taken]


@linux
@pytest.mark.parametrize(
    "command", [["plan", "demo"], ["generate", "-p", "hi", "--max-tokens", "2", "--reserve"]]
)
def test_a_limited_process_says_that_it_does_not_fit(command: list[str]) -> None:
    """A failed allocation of MLX would be a segmentation fault."""
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30,) * 2); from "
        "mlxrunner.cli import main; main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *command, "--context", "600000"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr[-500:]
    assert "does not fit" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@linux
def test_doctor_names_the_limit() -> None:
    """It says which one it is, as nobody sees it otherwise."""
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (5 * 2**30,) * 2)\n"
        "from mlxrunner.system.device import findings; print(findings()[2].value)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    if "cgroup" not in done.stdout:
        assert done.stdout.strip().endswith("(limited by ulimit -v)")
