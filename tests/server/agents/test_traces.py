"""The agents' requests, recorded with other words, on real layers of three kinds.

The agents need not be installed for that. `UPDATE_TRACES=1 make test-agents` records them again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import httpx
import pytest
from support.jobs import SHARE, STEPS, OtherWords, Shared, read_trace
from support.layered import NEAR

from mlxrunner.server.launch import CLIENTS

from .conftest import Layered

REPLAYED = {"sliding": "codex", "gated-delta": "claude", "mamba": "opencode"}
"""The client whose trace is replayed on a kind of layers. Live, each is on all four of them."""


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("layered", REPLAYED, indirect=True)
def test_a_trace_is_reused_as_the_agent_s_requests_were(
    layered: Layered, report: Callable[[str, str, Shared], None]
) -> None:
    """Every request is answered whole, and 97 % of what could be reused is.

    The logits after the prompts are those of a run without any reuse.
    """
    shared, client = layered.begin(), REPLAYED[layered.kind]
    sent = read_trace(client)
    for one in sent:
        answer = httpx.post(
            layered.url + one.path, headers=one.headers, json=one.body, timeout=None
        )
        assert answer.status_code == 200, answer.text
    report(f"{client}, replayed", layered.kind, shared)
    assert STEPS < shared.requests <= len(sent)
    assert all(told.place >= len(told.answer) for told in layered.played.told)
    assert shared.reused >= SHARE * shared.shareable > 0
    assert layered.played.most_different(layered.model) < NEAR


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.exhaustive(3)
def test_a_trace_tells_nothing_of_its_machine(client: str) -> None:
    """It has no path of it, and no name of its system."""
    text = json.dumps(read_trace(client))
    assert (
        re.findall(r"(?i)\b(?:tmp|home|root|work|users|pytest|debian|linux|darwin)\b", text) == []
    )
    assert len(text) > 100_000


def test_other_words() -> None:
    """The same word is the same other word everywhere, as long; what a server looks at stays."""
    other = OtherWords()
    found = other.of({"role": "user", "content": "Look at Look, LOOK. 2026 <system-reminder>"})
    first, second, third = re.findall(r"\b[A-Za-z]{4}\b", found["content"])[:3]
    assert (first.lower(), len(first)) == (third.lower(), 4)
    assert (first, third) == (second, first.upper())
    assert first.lower() != "look"
    assert "2026" not in found["content"]
    assert found["content"].endswith("<system-reminder>")
    call = {"type": "tool_use", "id": "a", "name": "Bash", "input": {"command": "echo step"}}
    assert other.of([call]) == [call]
