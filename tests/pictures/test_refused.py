"""Programs that see no pictures refuse them, and open no file that a stranger names."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrunner import ParallelRunner, PromptError
from mlxrunner.templates.messages import check_message, check_messages

PICTURE: dict[str, Any] = {
    "role": "user",
    "content": [{"type": "image", "image": "/no/such/file"}, {"type": "text", "text": "hi"}],
}


def test_messages_of_strangers_have_no_pictures() -> None:
    """Serve and batches check each message so: a path in it is never looked at."""
    for check in (lambda: check_message(0, PICTURE), lambda: check_messages([PICTURE])):
        with pytest.raises(PromptError, match="content of type 'image' is not supported"):
            check()


def test_a_runner_of_several_sequences_says_how_it_would_see() -> None:
    """The file is not even opened."""
    with (
        ParallelRunner.load("demo", max_sequences=2, context=256, reserve=False) as runner,
        pytest.raises(PromptError, match="ParallelRunner\\.load"),
    ):
        runner.submit([PICTURE])
