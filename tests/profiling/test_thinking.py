"""Variants of a replay: prompts with thinking kept or stripped, and guesses as the runner makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.events import run

from mlxrunner import Runner
from mlxrunner.profiling.profile import Profile
from mlxrunner.profiling.replay.simulate import ReplayedRequest
from mlxrunner.profiling.replay.trials import Guesses, Rewriter
from mlxrunner.profiling.tokenlog import read_token_log
from mlxrunner.testing import ByteTokenizer, oracle_runner

THINK, END_THINK, END, LINE = 901, 902, 903, 10
PROCESS: dict[str, Any] = {
    "thinking": [{"begin": [THINK], "end": [END_THINK]}],
    "message_ends": [END],
}


def request(prompt: list[int], answer: list[int]) -> ReplayedRequest:
    return ReplayedRequest(np.array(prompt, np.int32), np.array(answer, np.int32), len(prompt))


def turns(*, kept: bool, opened: bool = False) -> list[ReplayedRequest]:
    """Return three turns of a thinking model.

    `kept`: later prompts repeat the thinking; `opened`: the template opens the block.
    """
    history: list[int] = [1, 2, END]
    made = []
    for turn in range(3):
        user = [100 + turn] * 5 + [END]
        answer = [*range(200 + turn, 240 + turn, 10), END]
        block = [THINK, LINE, *[300 + turn] * 4, END_THINK, LINE]
        head = 2 if opened else 0
        prompt = [*history, *user, 50, *block[:head]]
        made.append(request(prompt, [*block[head:], *answer[:-1]]))
        history = [*history, *user, 50, *(block if kept else []), *answer]
    return made


@pytest.mark.parametrize(
    "opened", [False, True], ids=["the model opens it", "the template opens it"]
)
def test_thinking_is_put_back_where_the_log_shows_what_was_left_out(opened: bool) -> None:
    stripped, kept = turns(kept=False, opened=opened), turns(kept=True, opened=opened)
    rewriter = Rewriter(PROCESS, "kept")
    again = [rewriter.rewrite(one) for one in stripped]
    assert [one.prompt.tolist() for one in again] == [one.prompt.tolist() for one in kept]
    assert [one.evaluated for one in again] == [len(one.prompt) for one in again]
    assert rewriter.changed == 2


def test_thinking_is_stripped_from_earlier_messages_only() -> None:
    """Whole blocks before the last message are stripped; open and empty ones stay."""
    rewriter = Rewriter(PROCESS, "stripped")
    prompt = [1, END, THINK, 5, 6, END_THINK, 7, END, 8, END, THINK, LINE, END_THINK]
    rest = [1, END, 7, END, 8, END, THINK, LINE, END_THINK]
    assert rewriter.rewrite(request(prompt, [])).prompt.tolist() == rest
    unfinished = [1, END, THINK, 5, 6, END]
    assert rewriter.rewrite(request(unfinished, [])).prompt.tolist() == unfinished
    assert rewriter.changed == 1


@pytest.mark.parametrize("way", ["kept", "stripped"])
def test_without_thinking_nothing_changes(way: Any) -> None:
    for process in (PROCESS, {"thinking": [], "message_ends": []}):
        rewriter = Rewriter(process, way)
        made = [
            request([1, 2, END, 3], [4, 5, END]),
            request([1, 2, END, 3, 4, 5, END, 6], [7]),
            request([9], [1]),
        ]
        assert [rewriter.rewrite(one) for one in made] == made
        assert rewriter.changed == 0


def test_a_prompt_that_differs_elsewhere_stays_as_it_is() -> None:
    """An edited message is no stripped thinking."""
    rewriter = Rewriter(PROCESS, "kept")
    first, second, _ = turns(kept=False)
    rewriter.rewrite(first)
    edited = second.prompt.copy()
    edited[4] = 77
    assert rewriter.rewrite(request(edited.tolist(), [])).prompt.tolist() == edited.tolist()


class ThinkingTokenizer(ByteTokenizer):
    """Bytes, and two marks as tokens of their own."""

    def encode_more(self, text: str) -> list[int]:
        tokens: list[int] = []
        for place, part in enumerate(text.replace("</think>", "\x01\x02").split("\x01")):
            piece = part
            if place:
                tokens, piece = [*tokens, 297], part[1:]
            for index, rest in enumerate(piece.split("<think>")):
                tokens += [296] * (index > 0) + super().encode_more(rest)
        return tokens


def test_simulate_says_what_keeping_or_stripping_would_do(tmp_path: Path) -> None:
    """Through the command: kept prompts reuse everything, stripped ones lose each answer."""
    runner = oracle_runner()
    runner.tokenizer = ThinkingTokenizer()
    profile = Profile(tokens=tmp_path / "log")
    profile.watch(runner)
    history: list[int] = []
    for turn in range(4):
        history += [*range(10 * turn, 10 * turn + 10), 299]
        chunks = list(runner.generate(history, max_tokens=8, stop_tokens=[]))
        said = (chunk.token for chunk in chunks if chunk.token is not None and chunk.token < 290)
        history += [296, *said, 297, 7, 8, 299]
        list(runner.generate([*history, 1], max_tokens=1, stop_tokens=[]))
    profile.finish()
    result = run("simulate", tmp_path / "log", "--json")
    rows = {row["name"]: row for row in json.loads(result.stdout)["rows"]}
    assert "thinking kept" not in rows  # they were: nothing would change
    assert rows["thinking stripped"]["prompt"] < rows["as it was run"]["prompt"]
    assert rows["thinking stripped"]["cached"] < rows["as it was run"]["cached"]


PROMPTS = [
    *["My name is Zorblin. What is my name?"] * 2,
    *["Tell me a story about a bird and a bird."] * 2,
    "Say the same: one two three one two three one two three",
]


def test_a_log_is_guessed_as_its_runner_guessed(tmp_path: Path) -> None:
    """Passes, and guessed and right tokens of each source, in answers of full length."""
    file = tmp_path / "log"
    guesses, expected = Guesses(), []
    with Runner.load("demo", reserve=False) as runner:
        Profile(tokens=file).watch(runner)
        for text in PROMPTS:
            for count in (60, 40):
                options = {"max_tokens": count, "stop_tokens": [], "speculate": "lookup"}
                usage = runner.complete(text, **options).usage
                drafts = {one.source: (one.drafted, one.accepted) for one in usage.drafts}
                right = sum(accepted for _, accepted in drafts.values())
                expected.append((count - 1 - right, drafts))
    found = []
    for logged in read_token_log([file]):
        guesses.add(logged, is_beside=False)
        counts = {name: (one.drafted, one.accepted) for name, one in guesses.by_source.items()}
        found.append((guesses.passes, counts))
        guesses.passes = 0
        guesses.by_source.clear()
    assert found == expected
    assert {source for _, drafts in found for source in drafts} == {"earlier", "lookup"}


def test_simulate_says_what_guesses_save(tmp_path: Path) -> None:
    file = tmp_path / "log"
    with Runner.load("demo", reserve=False) as runner:
        Profile(tokens=file).watch(runner)
        for _ in range(2):
            runner.complete(PROMPTS[0], max_tokens=20, stop_tokens=[])
    command = ("simulate", file, "--speculate", "lookup")
    said, found = run(*command), json.loads(run(*command, "--json").stdout)["guesses"]
    assert found["tokens"] == 2 * 19
    assert found["passes"] == 38 - sum(one["accepted"] for one in found["drafts"]) < 30
    words = " ".join(said.stdout.split())
    assert f"{found['passes']} forward passes for the answers instead of 38." in words
    assert "guesses" not in json.loads(run("simulate", file, "--json").stdout)
