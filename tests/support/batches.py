"""Lines, stores and runs of batches."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from support.models import tiny_config, tiny_model

from mlxrunner import BatchRequest, BatchResult, cli
from mlxrunner.batch.inputs import LONGEST, lines_of_records, read_records
from mlxrunner.batch.options import BatchOptions
from mlxrunner.batch.store import BriefLine, InputLine, Store, StoredAnswer, StoredLine
from mlxrunner.batch.tables import Columns, Template
from mlxrunner.cache.entry import as_tokens
from mlxrunner.models.facts import facts_of


def read(
    content: bytes | str,
    *,
    template: str | None = None,
    delimiter: str = ",",
    longest: int = LONGEST,
    **options: Any,
) -> list[InputLine]:
    """Return the lines of a content: JSON lines, or a table for a template."""
    stream = io.BytesIO(content.encode() if isinstance(content, str) else content)
    columns = None if template is None else Columns(Template(template))
    records = read_records(stream, columns, delimiter, longest)
    return list(lines_of_records(records, BatchOptions(**options), longest))


def one(record: Any, **settings: Any) -> InputLine:
    (line,) = read(json.dumps(record), **settings)
    return line


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def entry(index: int, tokens: Sequence[int], **fields: object) -> StoredLine:
    return StoredLine(index, index + 1, tokens=as_tokens(tokens), **fields)  # type: ignore[arg-type]


def filled(prompts: Iterable[Sequence[int] | StoredLine], path: Path | None = None) -> Store:
    """Return a store with these lines, or with lines that have these tokens."""
    store = Store.create(path)
    for index, one in enumerate(prompts):
        store.add(one if isinstance(one, StoredLine) else entry(index, one))
    store.finish({"model": "demo"})
    return store


def indices(found: Iterable[StoredLine | BriefLine | StoredAnswer]) -> list[int]:
    return [one.index for one in found]


def run(*arguments: object, stdin: str = "") -> Result:
    return CliRunner().invoke(
        cli.main, ["batch", "--no-reserve", *map(str, arguments)], input=stdin
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a new folder with twelve questions, of which the sixth is broken."""
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text(lines(12, broken=(5,)))
    return tmp_path


def lines(count: int, *, seed: int = 0, broken: tuple[int, ...] = ()) -> str:
    """Return questions with shared beginnings and short answers, greedy or with a seed."""
    chosen = random.Random(seed)
    written = []
    for index in range(count):
        name = chosen.choice(["Ana", "Bo", "Zorblin", "Mira"])
        line: dict[str, Any] = {
            "id": index,
            "prompt": f"My name is {name}. What is my name? {chosen.randrange(1000)}",
            "max_tokens": 4,
        }
        if index % 3 == 0:
            line |= {"temperature": 1.0, "seed": index}
        written.append("no JSON" if index in broken else json.dumps(line))
    return "\n".join(written) + "\n"


OUT, STORE, WHOLE = Path("out.jsonl"), Path("out.jsonl.run"), Path("whole.jsonl")
"""The answers and the store of a run that may be stopped, and the answers of `unbroken`."""
_DONE: dict[tuple[object, ...], tuple[Result, dict[str, bytes]]] = {}


def once(*arguments: object) -> Result:
    """Run the command on in.jsonl; after a run that was done in this process, copy its files."""
    key = (Path("in.jsonl").read_bytes(), *arguments)
    if key not in _DONE:
        before = set(Path().iterdir())
        result = run(*arguments)
        _DONE[key] = result, {one.name: one.read_bytes() for one in {*Path().iterdir()} - before}
    result, files = _DONE[key]
    for name, content in files.items():
        Path(name).touch(0o600)
        Path(name).write_bytes(content)
    return result


def unbroken(*arguments: object) -> bytes:
    """Answer in.jsonl whole, into whole.jsonl. Return the answers."""
    result = once("in.jsonl", "-o", WHOLE, "--no-usage", "--parallel", 1, *arguments)
    assert result.exit_code in (0, 3), result.stderr
    return WHOLE.read_bytes()


TYPED = ("in.jsonl", "-o", "out.jsonl", "--no-usage", "--parallel", 1)


def stop_in_the_middle(*arguments: object) -> None:
    """Break the sixth line in input order: five answers and an error are there, six lines left."""
    result = once(*TYPED, "--order", "input", "--max-errors", 1, *arguments)
    assert result.exit_code == 1, result.stderr
    assert "stopped: 6 of 12 lines are done (--max-errors 1)" in result.stderr
    assert "to continue: " in result.stderr
    assert STORE.stat().st_mode & 0o777 == 0o600
    assert len(OUT.read_bytes().splitlines()) == 6


def resume(*arguments: object) -> Result:
    return run(*TYPED, "--resume", *arguments)


def llama() -> tuple[Any, Any]:
    config = tiny_config(vocab_size=300)
    model = tiny_model(config)
    return model, facts_of(model, config)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Two beginnings, ends of different lengths, shuffled."""
    random = np.random.default_rng(seed)
    begins = [random.integers(0, 250, 40).tolist() for _ in range(2)]
    return [begins[i % 2] + random.integers(0, 250, 1 + i % 7).tolist() for i in range(count)]


def requests(count: int = 12, **options: Any) -> list[BatchRequest]:
    return [BatchRequest(prompt, options, f"r{i}") for i, prompt in enumerate(prompts(count))]


def texts(results: list[BatchResult]) -> list[Any]:
    return [
        (
            result.index,
            result.id,
            result.result and result.result.tokens,
            result.error and str(result.error),
        )
        for result in results
    ]
