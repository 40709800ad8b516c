"""Importing mlx-lm leaves the limit of open files alone, and transformers reads its files once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def limits_after(before: tuple[int, int], imports: str) -> str:
    """Return the limits of a process that begins with `before` and runs `imports`."""
    code = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, {before})\n"
        "own = resource.setrlimit\n"
        f"{imports}\n"
        "assert resource.setrlimit is own\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.strip()


SAMPLING = "import mlxrunner.engine.sampling"


@pytest.mark.parametrize(
    ("before", "imports", "after"),
    [
        ((5000, 6000), SAMPLING, "5000 6000"),
        ((300, 6000), SAMPLING, "2048 6000"),
        ((300, 400), SAMPLING, "400 400"),
        ((5000, 6000), "import mlxrunner, mlx_lm.utils", "5000 6000"),
    ],
    ids=["enough", "few", "no more allowed", "mlx-lm itself"],
)
def test_importing_mlx_lm_lowers_no_limit(
    before: tuple[int, int], imports: str, after: str
) -> None:
    """It may raise the limit, as mlx-lm wants it, within what the user may have."""
    assert limits_after(before, imports) == after


STRUCTURE = (
    "import transformers.utils.import_utils as found; from pathlib import Path\n"
    "models = str(Path(found.__file__).parents[1] / 'models')\n"
    "for path in (models, models + '/__init__.py'):\n"
    "    for prefix in (None, 'models'):\n"
    "        said = found.define_import_structure(path, prefix)\n"
    "        names = {name: sorted(of) for one in said.values() for name, of in one.items()}\n"
    "        print(sorted(map(sorted, said)), sorted(names.items()))\n"
    "from transformers import AutoTokenizer, LlamaConfig\n"
)


def structure(imports: str) -> str:
    """Return what transformers finds in its own files, in a process that runs `imports` first."""
    command = [sys.executable, "-c", f"{imports}\n{STRUCTURE}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def own() -> str:
    """Return what transformers finds alone."""
    return structure("pass")


@pytest.mark.exhaustive(0)
def test_transformers_files_are_read_once_and_say_the_same(own: str, own_home: Path) -> None:
    """A damaged file is read again; one of another version stays beside it."""
    kept = own_home / ".cache" / "mlxrunner" / "transformers.json"
    assert not kept.exists()
    assert structure("import mlxrunner") == own
    assert kept.stat().st_mode & 0o777 == 0o600
    written = kept.read_bytes()
    forbid = (
        "import mlxrunner.system.foreign as mended\nimport mlxrunner.system.folders as folders\n"
    )
    assert structure(f"{forbid}folders.CacheFile.keep = None") == own
    kept.write_bytes(written.replace(b"LlamaConfig", b"LlamaConfit"))
    assert structure("import mlxrunner") == own
    assert kept.read_bytes() == written


def test_a_home_that_can_not_be_written_changes_nothing(own: str, own_home: Path) -> None:
    """A cache that is no folder is left alone, too."""
    (own_home / ".cache").write_text("no folder")
    assert structure("import mlxrunner") == own
