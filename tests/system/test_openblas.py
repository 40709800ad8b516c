"""The program starts again with OpenBLAS before it loads a model, and hands nothing on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlxrunner.system import openblas

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has LD_PRELOAD")
CODE = """
import os, sys
from mlxrunner.system import openblas
openblas.find = lambda: {path!r}
starts = os.environ.get("STARTS", "0")
os.environ["STARTS"] = str(int(starts) + 1)
openblas.prefer()
names = ("LD_PRELOAD", "OPENBLAS_NUM_THREADS", openblas._BEFORE)
print(os.environ["STARTS"], [os.environ.get(name) for name in names], sys.argv[1:])
print(open("/proc/self/environ").read().count({path!r}), sorted(openblas.for_children()))
"""


@pytest.fixture
def library(tmp_path: Path) -> str:
    """A library that does nothing."""
    path = tmp_path / "libopenblas.so"
    source = tmp_path / "empty.c"
    source.write_text("int nothing;\n")
    command = ["cc", "-shared", "-fPIC", "-o", str(path), str(source)]
    if not openblas.find() and subprocess.run(command).returncode:
        pytest.skip("needs a C compiler")
    return openblas.find() or str(path)


def started(path: str, *arguments: str, **variables: str) -> list[str]:
    """Return what a program says that prefers the library at `path`."""
    kept = {name: one for name, one in os.environ.items() if not name.startswith(("LD_", "OPENB"))}
    command = [sys.executable, "-c", CODE.format(path=path), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, env=kept | variables, check=True)
    return run.stdout.splitlines()


def test_a_command_that_loads_a_model_starts_again_once(library: str) -> None:
    """With its arguments; the variables are gone afterwards, except for workers of its own."""
    first, second = started(library, "chat", "a b", "--plain")
    assert first == "2 [None, None, None] ['chat', 'a b', '--plain']"
    assert second == "1 ['LD_PRELOAD', 'OPENBLAS_NUM_THREADS']"


def test_variables_of_the_user_come_back(library: str) -> None:
    """A library that the user preloads stays, behind ours."""
    variables = {"LD_PRELOAD": "libm.so.6", "OPENBLAS_NUM_THREADS": "2"}
    first, second = started(library, "run", **variables)
    assert first == "2 ['libm.so.6', '2', None] ['run']"
    assert second.startswith("1 ")


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["models"], {}),
        (["--version"], {}),
        ([], {}),
        (["chat"], {"MLXRUNNER_OPENBLAS": "0"}),
        (["chat"], {"MLXRUNNER_OPENBLAS": "off"}),
    ],
)
def test_other_commands_and_who_turns_it_off_start_once(
    library: str, arguments: list[str], variables: dict[str, str]
) -> None:
    """Nothing is preloaded."""
    assert started(library, *arguments, **variables) == [
        f"1 [None, None, None] {arguments}",
        "0 []",
    ]


def test_a_blas_that_the_user_preloads_is_left_alone(library: str) -> None:
    """It may be another one."""
    first, _ = started(library, "chat", LD_PRELOAD=library)
    assert first == f"1 ['{library}', None, None] ['chat']"


def test_a_library_that_is_missing_changes_nothing(tmp_path: Path) -> None:
    """Nothing is written to stderr by the loader either."""
    assert started(str(tmp_path / "gone.so"), "chat")[0] == "1 [None, None, None] ['chat']"
