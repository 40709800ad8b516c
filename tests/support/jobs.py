"""Jobs of six tool calls, the coding agents, and their recorded requests."""

from __future__ import annotations

import json
import lzma
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from support.actor import calling

from mlxrunner.cache.entry import common_prefix
from mlxrunner.engine.request import Observation
from mlxrunner.server.launch import CLIENTS, ServerAddress

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


PROGRAMS = Path(__file__).parents[2] / "build" / "agents" / "node_modules" / ".bin"
PATIENCE_S = 240
WORDS = {
    "claude": ["-p", TASK, "--dangerously-skip-permissions"],
    "codex": ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK],
    "opencode": ["run", TASK],
}
"""The words after each client's own settings."""


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


ROOT = Path(__file__).parents[2]
TRACES = ROOT / "tests" / "server" / "agents" / "traces"
"""The folder of the traces. Each is JSON Lines, packed with xz: a request a line."""
WORD = re.compile(r"x-anthropic-billing-header|</?system-reminder>|[A-Za-z]{2,}|[0-9]+")
KEPT_KEYS = frozenset(
    """
    type role name id call_id tool_call_id tool_use_id arguments enum required stream format
    tool_choice include effort verbosity summary keep ttl service_tier $schema pattern const
    """.split()
)
"""Keys whose values stay as they are."""
KEPT_TYPES = ("tool_use", "tool_result", "function_call", "function_call_output", "output_text")
"""Types of parts that stay as they are: the script's own words, and the results of its calls."""
TELLING = frozenset("tmp home root work users pytest debian linux darwin".split())
"""Words that no trace has: they would tell of a machine."""
HEADERS = ("user-agent", "content-type", "anthropic-version", "anthropic-beta")
"""Headers that stay, each up to the first space: the name of the system stands after it."""


class Sent(NamedTuple):
    """A request of a trace."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


def read_trace(client: str) -> list[Sent]:
    """Return the requests of a client, in their order."""
    with lzma.open(TRACES / f"{client}.jsonl.xz", "rt", encoding="utf-8") as lines:
        return [Sent(**json.loads(line)) for line in lines]


def write_trace(client: str, requests: Sequence[tuple[str, dict[str, str], bytes]]) -> None:
    """Write the requests of a client with other words."""
    other = OtherWords()
    TRACES.mkdir(exist_ok=True)
    with lzma.open(TRACES / f"{client}.jsonl.xz", "wt", encoding="utf-8", preset=9) as lines:
        for path, headers, body in requests:
            kept = {name: headers[name].split(" ")[0] for name in HEADERS if name in headers}
            sent = Sent(path, kept, {**other.of(json.loads(body)), "model": ""})
            lines.write(json.dumps(sent._asdict()) + "\n")


class OtherWords:
    """Puts words of this project's pages in the places of others."""

    def __init__(self) -> None:
        text = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
        self._words: dict[int, list[str]] = defaultdict(list)
        for word in sorted(set(re.findall(r"\b[a-z]{2,}\b", text)) - TELLING):
            self._words[len(word)].append(word)

    def of(self, value: Any) -> Any:
        """Return a value of JSON with other words."""
        if isinstance(value, str):
            return WORD.sub(lambda found: self._other(found[0]), value)
        if isinstance(value, list):
            return [self.of(one) for one in value]
        if not isinstance(value, dict) or value.get("type") in KEPT_TYPES:
            return value
        if value.get("role") in ("assistant", "tool"):
            return value
        return {
            key: one if key in KEPT_KEYS and not isinstance(one, dict) else self.of(one)
            for key, one in value.items()
        }

    def _other(self, word: str) -> str:
        """Return the word that stands for `word`."""
        if "-" in word or len(word) < 2:
            return word
        number = int.from_bytes(blake2b(word.lower().encode(), digest_size=8).digest())
        if word.isdigit():
            return str(number)[-len(word) :].rjust(len(word), "0")
        found = self._words.get(len(word))
        if found is None:
            return self._other(word[:8]) + self._other(word[8:])
        other = found[number % len(found)]
        return other.upper() if word.isupper() else other.title() if word.istitle() else other
