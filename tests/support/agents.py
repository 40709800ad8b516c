"""Run Claude Code, Codex and opencode themselves, where `make agents` has installed them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from support.jobs import TASK

from mlxrunner.serve.launch import CLIENTS, ServerAddress

PROGRAMS = Path(__file__).parents[2] / "build" / "agents" / "node_modules" / ".bin"
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


def run_agent(
    client: str, url: str, model: str, context: int, folder: Path
) -> subprocess.CompletedProcess[str]:
    """Let a client do the task in a small project in `folder`, and return what became of it."""
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    (folder / "README.md").write_text("# A small project\n")
    found = CLIENTS[client](ServerAddress(url, model, context))
    environment = {**os.environ, **found.environment, "PWD": str(folder), "IS_SANDBOX": "1"}
    environment |= {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    environment.pop("LD_PRELOAD", None)
    return subprocess.run(
        [PROGRAMS / found.program, *found.arguments, *WORDS[client]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        stdin=subprocess.DEVNULL,
    )
