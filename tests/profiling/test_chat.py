"""Events of a chat: a model that is changed in the middle, what was evaluated in advance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from support.checks import has
from support.models import write_model

from mlxrunner import cli


def test_another_model_in_the_middle_of_a_chat_says_why_nothing_was_reused(tmp_path: Path) -> None:
    """The event after `/set context` or `/model` has the reason why nothing was reused."""
    file = tmp_path / "events.jsonl"
    said = "My name is Ana.\n/set context 1024\nWhat is my name?\n"
    result = CliRunner().invoke(cli.main, ["chat", "--events", str(file)], input=said)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "Your name is Ana."
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert (first["reason"], first["command"], first["messages"]) == ("empty", "chat", 1)
    assert (second["reason"], second["messages"]) == ("options_changed", 3)
    assert second["evicted_by"] == "context: 2048 -> 1024"


def chat(file: Path, said: str, *arguments: str, data: Path) -> list[dict[str, Any]]:
    """Return the events of a chat by pipe."""
    command = ["chat", "--events", str(file), *arguments]
    result = CliRunner().invoke(cli.main, command, input=said, env={"MLXRUNNER_DATA": str(data)})
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_another_model_says_so(tmp_path: Path) -> None:
    """`/model` with the same tokenizer's text: nothing of the entry is of use to it."""
    write_model(tmp_path / "other", "llama", max_position_embeddings=512)
    first, second = chat(
        tmp_path / "e",
        f"Hello!\n/model {tmp_path / 'other'}\nHello!\n",
        "--max-tokens",
        "3",
        data=tmp_path,
    )
    assert (first["reason"], second["reason"], second["cached_tokens"]) == (
        "empty",
        "model_changed",
        0,
    )
    assert second["evicted_by"] == f"demo -> {tmp_path / 'other'}"


def test_a_session_is_restored_or_says_why_not(tmp_path: Path) -> None:
    """The first turn of the next process reuses the file, or a damaged one is given up."""
    data = tmp_path / "data"
    chat(tmp_path / "1", "My name is Ana.\n", "--session", "a", data=data)
    (restored,) = chat(tmp_path / "2", "What is my name?\n", "--session", "a", data=data)
    has(restored, reason="restored", evicted_by="session a", run="cold-restored")
    assert restored["cached_tokens"] == restored["matched_tokens"] > 0
    (cache, *_) = data.rglob("rows-*.safetensors")
    content = bytearray(cache.read_bytes())
    content[-1] ^= 1
    cache.write_bytes(content)
    (damaged,) = chat(tmp_path / "3", "What is my name?\n", "--session", "a", data=data)
    assert (damaged["outcome"], damaged["reason"]) == ("miss", "entry_freed")
    assert damaged["evicted_by"].startswith("a saved entry that could not be read")
