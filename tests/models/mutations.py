"""Model folders with one to three things changed in a good one, broken or made to do harm.

`python tests/models/mutations.py SEED COUNT FOLDER` tries COUNT of them, and prints a line for each
that does not end in one clear line. The test runs a few of them.
"""

from __future__ import annotations

import importlib
import os
import random
import shutil
import sys
from pathlib import Path


def write_bases(root: Path) -> list[Path]:
    """Write good folders: architectures with the simple tokenizer, a Llama with each tokenizer."""
    from support.models import ARCHITECTURES, write_model, write_tokenizer
    from support.tokenizers import KINDS

    chat = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    folders = []
    for kind in ARCHITECTURES:
        write_model(root / kind, kind, tokenizer=False)
        write_tokenizer(root / kind, chat_template=chat)
        folders.append(root / kind)
    for name, write in KINDS.items():
        write_model(root / name, "llama", tokenizer=False, vocab_size=432)
        write(root / name)
        folders.append(root / name)
    return folders


def commands(folder: Path) -> list[list[str]]:
    asked = ["-p", "hi there aaaaaaaaaaaaaaaaaaaaaaaaaa", "--max-tokens", "2"]
    name = str(folder)
    return [["show", name], ["plan", name], ["generate", "-m", name, *asked]]


def complaint(code: int, said: str) -> str:
    """Return what is wrong with how a command ended, or ""."""
    if code not in (0, 1, 2):
        return f"exit code {code}"
    signs = ("internal error", "Traceback", "panicked", "Segmentation")
    word = next((word for word in signs if word in said), "")
    lines = [line for line in said.splitlines() if line.startswith("mlxrunner: ")]
    if word or len(lines) > 1 or (code == 1 and not lines) or len(said) > 6000:
        return word or f"{len(said)} characters, {len(lines)} lines of errors"
    return ""


def main(seed: int, count: int, root: Path) -> int:
    """Each folder in a process of its own, forked from one that has imported everything."""
    from support.model_damage import damage

    for name in "mlx_lm.utils sentencepiece transformers mlxrunner.cli mlxrunner.runner".split():
        importlib.import_module(name)

    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    bases, found = sorted(path for path in (root / "bases").iterdir()), 0
    for number in range(seed, seed + count):
        choose = random.Random(number)
        base, folder, said = choose.choice(bases), root / f"f{number}", root / f"f{number}.said"
        shutil.copytree(base, folder)
        what = damage(folder, choose)
        for command in commands(folder):
            child = os.fork()
            if not child:
                _run(command, said)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            text = said.read_bytes().decode(errors="replace")
            wrong = complaint(code, text)
            if wrong:
                found += 1
                print(
                    f"{number} {base.name} {command[0]} [{wrong}] {what}\n    "
                    f"{' '.join(text.split())[:300]}",
                    flush=True,
                )
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                path.chmod(0o600)
        shutil.rmtree(folder, ignore_errors=True)
        said.unlink()
    print(f"{count} folders, {found} complaints", flush=True)
    return found


def _run(command: list[str], said: Path) -> None:
    """Run a command with a limit on memory and one of a minute, and end this process."""
    import resource
    import signal

    signal.alarm(60)
    resource.setrlimit(resource.RLIMIT_AS, (12 * 2**30,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    code = 99
    try:
        from mlxrunner.cli import main as program

        program(command)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # for `support`
    root = Path(sys.argv[3])
    if not (root / "bases").exists():
        (root / "bases").mkdir(parents=True)
        write_bases(root / "bases")
        sys.exit(0)
    main(int(sys.argv[1]), int(sys.argv[2]), root)
