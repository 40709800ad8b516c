"""Requests that agents have sent, recorded with other words, to be replayed without the agents.

The clients' prompts belong to their makers, and tell of the machine that they ran on. So a trace
has other words in their places: the same word is the same other word everywhere, as long, so that
requests share what they shared. Roles, names of tools, schemas, calls and results stay.
"""

from __future__ import annotations

import json
import lzma
import re
from collections import defaultdict
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
TRACES = ROOT / "tests" / "serve" / "agents" / "traces"
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
"""Headers that stay, each up to the first space: the name of the system stands behind it."""


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
