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
from support.layered import CONTEXT, NEAR, write_kind
from support.program import program

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

    The logits after its prompts are those of a run without any reuse.
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


DYING = f"""
import os, sys
from pathlib import Path
if "MLXRUNNER_SERVE_WORKER" in os.environ:
    sys.path[:0] = [{str(Path(__file__).parents[2])!r}]
    from support.jobs import script
    from support.layered import LayeredOpening, Played
    from mlxrunner.engine.engine import Engine
    from mlxrunner.server import models
    models.ModelLoader = lambda **given: LayeredOpening(played=Played(script), **given)
    step = Engine.step
    def stepped(self):
        step(self)
        for one in self._scheduler.requests:
            done = self.tokenizer.decode(one.tokens).count("<|im_start|>tool\\n")
            mark = Path(os.environ["XDG_CACHE_HOME"], f"died-at-{{done}}")
            if done in (2, 4) and one.sampled > 2 * done - 4 and not mark.exists():
                mark.touch()
                os.abort()
    Engine.step = stepped
from mlxrunner.cli import main
main()
"""


@pytest.mark.skipif("AGENTS" not in os.environ, reason="make test-agents installs and runs them")
@pytest.mark.parametrize("client", CLIENTS)
def test_an_agent_asks_again_when_the_worker_dies(
    client: str, tokenizer: bytes, own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies before the first token of one answer, and in the middle of another one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_kind(tmp_path / "full", "full", tokenizer)
    project = tmp_path / "project"
    with program(str(tmp_path / "full"), "--slots", "4", code=DYING) as server:
        result = run_agent(client, server.url, "full", CONTEXT, project)
    assert {path.name for path in tmp_path.glob("died-at-*")} == {"died-at-2", "died-at-4"}
    assert result.returncode == 0, result.stderr
    assert DONE in result.stdout
    assert (project / "steps.txt").read_text().split() == [
        word for number in range(STEPS) for word in ("step", str(number))
    ]
