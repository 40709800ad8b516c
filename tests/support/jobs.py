"""Jobs of six calls of a tool, what their requests reuse, and a record of what clients send."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from support.actor import calling

from mlxrunner.cache.tokens import common_prefix
from mlxrunner.engine.observation import Observation

STEPS = 6
TASK = "Do the six steps."
DONE = "All six steps are done."
SHARE = 0.97
"""The least share of what could be reused that has to be."""
SHELLS = {
    "Bash": "command",
    "bash": "command",
    "exec_command": "cmd",
    "shell_command": "command",
    "note": "text",
}
"""The tools that a job may use, each with the name of its argument."""


def script(prompt: str) -> str:
    """Say what a model would: call a tool six times, then end; give a title where one is due."""
    _, _, tools = prompt.partition("<|im_start|>tools\n")
    names = re.findall(r'"name": "([A-Za-z_.]+)"', tools.split("<|im_start|>")[0])
    if not names:
        return "Six steps"
    done = prompt.count("<|im_start|>tool\n")
    if done >= STEPS:
        return DONE
    tool = next(name for name in SHELLS if name in names)
    arguments = {SHELLS[tool]: f"echo step {done} >> steps.txt; tail -1 steps.txt"}
    if tool == "note":
        arguments = {"text": f"step {done}"}
    if tool in ("Bash", "bash"):
        arguments["description"] = f"Step {done}"
    return f"Now step {done}.\n" + calling(tool, arguments)


@dataclass
class Shared:
    """Counts the tokens that requests reuse, beside those that they could."""

    requests: int = 0
    tokens: int = 0
    """Tokens of all prompts."""
    reused: int = 0
    shareable: int = 0
    """Tokens of the prompts that an earlier request had at the same places."""
    _held: list[np.ndarray] = field(default_factory=list)

    def __call__(self, runner: Any, observed: Observation) -> None:
        prompt = observed.prepared.tokens
        self.requests += 1
        self.tokens += len(prompt)
        self.reused += observed.usage.cached_tokens
        most = max((common_prefix(held, prompt) for held in self._held), default=0)
        self.shareable += min(most, len(prompt) - 1)
        self._held.append(observed.entry.array.copy())

    @property
    def share(self) -> float:
        """The part of the shareable tokens that was reused."""
        return self.reused / max(1, self.shareable)


class Recorder:
    """An application that remembers the requests with a body that it hands on."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        """The path, the headers and the body of each."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body, message = b"", {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            body += message.get("body", b"")
        query = scope["query_string"].decode()
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        self.requests.append((scope["path"] + (f"?{query}" if query else ""), headers, body))
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Any:
            return messages.pop() if messages else await receive()

        await self._app(scope, again, send)
