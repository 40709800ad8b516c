"""Events of a chat: a model that is changed in the middle, what was evaluated in advance."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_another_model_in_the_middle_of_a_chat_says_why_nothing_was_reused(tmp_path: Path) -> None:
    """`/set context` loads the same model again, `/model` another: the next event has the reason."""
    file = tmp_path / "events.jsonl"
    said = "My name is Ana.\n/set context 1024\nWhat is my name?\n"
    command = [sys.executable, "-m", "mlxrunner", "chat", "--events", str(file)]
    result = subprocess.run(command, input=said, capture_output=True, text=True, check=True, timeout=300)
    assert result.stdout.splitlines()[-1] == "Your name is Ana."
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert (first["reason"], first["command"], first["messages"]) == ("empty", "chat", 1)
    assert (second["reason"], second["messages"]) == ("options_changed", 3)
    assert second["freed_by"] == "context: 2048 -> 1024"
