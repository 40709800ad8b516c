"""Claude Code, Codex and opencode themselves do a job of six tool calls on the server.

`make test-agents` installs them. They run in a network of their own, where only this machine can be
reached. The models have random weights and real layers of four kinds: a script chooses what they
say, and they evaluate and keep it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import DONE, SHARE, STEPS, Shared, run_agent, write_trace
from support.layered import CONTEXT, NEAR

from mlxrunner.server.launch import CLIENTS

from .conftest import Layered


@pytest.mark.skipif("AGENTS" not in os.environ, reason="make test-agents installs and runs them")
@pytest.mark.parametrize("client", CLIENTS)
def test_an_agent_does_a_job_of_six_tool_calls(
    client: str,
    layered: Layered,
    own_home: Path,
    tmp_path: Path,
    report: Callable[[str, str, Shared], None],
) -> None:
    """The files say so, its last words say so, and 97 % of what could be reused was.

    The logits behind its prompts are those of a run without any reuse.
    """
    shared = layered.begin()
    result = run_agent(client, layered.url, layered.kind, CONTEXT, tmp_path)
    assert result.returncode == 0, result.stderr
    assert DONE in result.stdout
    steps = (tmp_path / "steps.txt").read_text().split("\n")
    assert steps == [*(f"step {number}" for number in range(STEPS)), ""]
    report(client, layered.kind, shared)
    assert shared.requests > STEPS
    assert shared.reused >= SHARE * shared.shareable > 0
    assert layered.played.most_different(layered.model) < NEAR
    if "UPDATE_TRACES" in os.environ and layered.kind == "full":
        write_trace(client, layered.recorder.requests)
