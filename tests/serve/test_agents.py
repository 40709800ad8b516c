"""Claude Code, Codex and opencode themselves do a job of six tool calls on the server.

`make test-agents` installs them. A model that plays a part answers, through the real engine. They
run in a network of their own, where only this machine can be reached.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.actor import calling, playing
from support.scripted import serving

from mlxrunner.cache.tokens import common_prefix
from mlxrunner.config.serving import ServeSettings
from mlxrunner.engine.observation import Observation
from mlxrunner.serve.answering.house import House
from mlxrunner.serve.answering.names import ModelNames
from mlxrunner.serve.launch import CLIENTS, Server
from mlxrunner.serve.server import application
from mlxrunner.serve.watch.record import Record

PROGRAMS = Path(__file__).parents[2] / "build" / "agents" / "node_modules" / ".bin"
STEPS = 6
TASK = "Do the six steps."
PATIENCE_S = 240
WORDS = {
    "claude": ["-p", TASK, "--dangerously-skip-permissions"],
    "codex": [
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        TASK,
    ],
    "opencode": ["run", TASK],
}
"""The words behind each client's own settings."""
SHELLS = {
    "Bash": "command",
    "bash": "command",
    "exec_command": "cmd",
    "shell_command": "command",
}
"""The tools that run a command, each with the name of its argument."""


def script(prompt: str) -> str:
    """Say what a model would: call a shell six times, then end; give a title where one is due."""
    _, _, tools = prompt.partition("<|im_start|>tools\n")
    names = re.findall(r'"name": "([A-Za-z_.]+)"', tools.split("\x1e")[0])
    if not names:
        return "Six steps"
    done = prompt.count("<|im_start|>tool\n")
    if done >= STEPS:
        return "All six steps are done."
    tool = next(name for name in SHELLS if name in names)
    arguments = {SHELLS[tool]: f"echo step {done} >> steps.txt; tail -1 steps.txt"}
    if tool in ("Bash", "bash"):
        arguments["description"] = f"Step {done}"
    return f"Now step {done}.\n" + calling(tool, arguments)


class Shared:
    """Counts the tokens that requests reuse, beside those that they could."""

    def __init__(self) -> None:
        self.prompts, self.reused, self.shareable = 0, 0, 0
        self._held: list[np.ndarray] = []

    def __call__(self, runner: Any, observed: Observation) -> None:
        prompt = observed.prepared.tokens
        self.prompts += 1
        self.reused += observed.usage.cached_tokens
        most = max((common_prefix(held, prompt) for held in self._held), default=0)
        self.shareable += min(most, len(prompt) - 1)
        self._held.append(observed.entry.array.copy())


@pytest.fixture
def shared() -> Shared:
    return Shared()


@pytest.fixture
def url(shared: Shared) -> Iterator[str]:
    """The address of a server whose model follows the script."""
    settings = ServeSettings(parks=False)
    record = Record()
    house = House(ModelNames("actor"), playing(script)(settings=settings), record.watch)
    house.load_first().runner.observers.append(shared)
    with serving(application(house, record, settings)) as address:
        yield address


@pytest.mark.skipif(not PROGRAMS.is_dir(), reason="make test-agents installs the clients with npm")
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_does_a_job_of_six_tool_calls(
    client: str, url: str, shared: Shared, own_home: Path, tmp_path: Path
) -> None:
    """The files say so, its last words say so, and 97 % of what could be reused was."""
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / "README.md").write_text("# A small project\n")
    found = CLIENTS[client](Server(url, "actor", 200_000))
    environment = {**os.environ, **found.environment, "PWD": str(tmp_path), "IS_SANDBOX": "1"}
    environment |= {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    environment.pop("LD_PRELOAD", None)
    result = subprocess.run(
        [PROGRAMS / found.program, *found.arguments, *WORDS[client]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stderr
    assert "All six steps are done." in result.stdout
    steps = (tmp_path / "steps.txt").read_text().split("\n")
    assert steps == [*(f"step {number}" for number in range(STEPS)), ""]
    assert shared.prompts > STEPS
    assert shared.reused >= 0.97 * shared.shareable
