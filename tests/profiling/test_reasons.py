"""Each reason of the list, produced as a user would come by it, with the program's words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.checks import ends, has, read_lines
from support.events import run, said
from support.models import write_model

from event_schema import event_schema
from mlxrunner import cli
from mlxrunner.profiling.profile import Profile
from mlxrunner.profiling.schema import PARTS, REASONS, Event
from mlxrunner.runner import Runner
from mlxrunner.testing import oracle_runner


def place(side: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(side[name] for name in ("message", "role", "part"))


def test_the_list_is_the_schema_s_and_has_a_sentence_each() -> None:
    """A remedy is there where there is something to mend."""
    schema = event_schema()
    reason, part = schema["properties"]["reason"], schema["$defs"]["Side"]["properties"]["part"]
    assert reason["anyOf"] == [{"enum": sorted(REASONS)}, {"type": "null"}]
    assert part["anyOf"] == [{"enum": sorted(PARTS)}, {"type": "null"}]
    assert all(reason.sentence for reason in REASONS.values())
    assert [
        name for name, reason in REASONS.items() if not reason.remedy
    ] == "empty prompt_shorter interrupted restored side_by_side".split()


def test_empty_and_prompt_shorter(events: Path) -> None:
    """The first request of a process, and the same again."""
    run("generate", "-p", "Hello!", "--repeat", 2, "--events", events)
    first, second = read_lines(events)
    assert (first["outcome"], first["reason"], first["run"]) == ("miss", "empty", "cold-miss")
    assert (second["outcome"], second["reason"]) == ("hit", "prompt_shorter")
    assert second["run"] == "warm-hit"
    assert (first["lost_tokens"], second["lost_tokens"]) == (0, 0)
    assert "the prompt is the beginning of the cached text" in said(events)


def test_nothing_lost(events: Path) -> None:
    """The next turn of a chat."""
    run("chat", "--events", events, stdin="My name is Ana.\nWhat is my name?\n")
    last = read_lines(events)[-1]
    assert (last["outcome"], last["reason"], last["divergence"]) == ("hit", None, None)
    assert (last["command"], last["prompt_kind"], last["messages"]) == ("chat", "messages", 3)
    assert "nothing was lost" in said(events)


def test_diverged_in_each_family(family: Any, scripted: Callable[..., Path], events: Path) -> None:
    """A chat that begins anew with other words: role, message and part are named."""
    begin = {"mistral": "[/INST]", "harmony": "t"}.get(family.name, "\n")
    folder = scripted(family.name, begin, "fine")
    command = f"chat -m {folder} --events {events} --log-text --no-reserve"
    run(*command.split(), stdin="Dear old friend\n/clear\nDear you\n")
    event = read_lines(events)[-1]
    assert event["reason"] == "diverged"
    assert place(event["divergence"]) == (0, "user", "text")
    assert event["divergence"]["common"]["text"].endswith("Dear ")
    assert event["divergence"]["previous"]["text"].startswith("old friend")
    assert event["missed_tokens"] == event["displaced_tokens"] == 0  # the words are new
    assert "in the text of message 0 (user)" in said(events)


def test_diverged_at_thinking_that_is_stripped(scripted: Callable[..., Path], events: Path) -> None:
    """Qwen 3: the model thinks, and the template leaves that out of the next prompt."""
    folder = scripted("qwen3", "\n", "<think>hm</think>Ok")
    run("chat", "-m", folder, "--events", events, "--no-reserve", stdin="Hello\nAgain\n")
    event = read_lines(events)[-1]
    assert event["reason"] == "diverged"
    sides = [place(event["divergence"][side]) for side in ("previous", "current")]
    assert sides == [(1, "assistant", "thinking"), (1, "assistant", "text")]
    assert "where before was the thinking block of message 1 (assistant)" in said(events)


def test_no_common_token(tmp_path: Path, events: Path) -> None:
    """A model without BOS: a conversation with a system prompt begins with another token."""
    write_model(tmp_path / "model")
    command = f"chat -m {tmp_path}/model --max-tokens 4 --no-reserve --events {events}"
    run(*command.split(), stdin="hello\n/system Be brief.\nhello\n")
    event = read_lines(events)[-1]
    assert (event["outcome"], event["reason"]) == ("miss", "no_common_token")
    assert (event["divergence"]["index"], event["divergence"]["role"]) == (0, "system")
    assert event["missed_tokens"] == 0
    assert event["displaced_tokens"] >= len("hello")  # in tokens of a character
    assert "the first token already differs" in said(events)


def test_rewind_limited(tmp_path: Path, events: Path) -> None:
    """A recurrent model without checkpoints can't go back over its answer."""
    write_model(tmp_path / "model", "mamba2")
    command = f"generate -m {tmp_path}/model -p hello --raw --max-tokens 4 --no-reserve"
    run(*command.split(), "--repeat", 2, "--set", "checkpoint_budget=0", "--events", events)
    event = read_lines(events)[-1]
    assert (event["outcome"], event["reason"]) == ("miss", "rewind_limited")
    assert event["trim_limited_by"] == "recurrent"
    assert event["lost_tokens"] == event["prompt_tokens"] - 1
    assert "(recurrent)" in said(events)
    assert "checkpoint_interval" in said(events)


def test_rewind_limited_names_the_place_in_each_family(
    family: Any, write_family: Callable[[Path, str], None], tmp_path: Path, events: Path
) -> None:
    """Where the conversation was edited, and the layer that could not go back to there."""
    write_model(tmp_path / "model", "mamba2", vocab_size=300)
    config = (tmp_path / "model" / "config.json").read_bytes()
    write_family(tmp_path / "model", family.name)
    (tmp_path / "model" / "config.json").write_bytes(config)
    options = "--max-tokens 2 --no-reserve --set checkpoint_budget=0"
    command = f"chat -m {tmp_path}/model {options} --events {events}"
    run(*command.split(), stdin="Dear old friend\n/clear\nDear you\n")
    event = read_lines(events)[-1]
    assert (event["reason"], event["trim_limited_by"]) == ("rewind_limited", "recurrent")
    assert event["cached_tokens"] == 0
    assert place(event["divergence"]) == (0, "user", "text")
    assert event["lost_tokens"] == event["matched_tokens"] == event["divergence"]["index"] > 0
    assert "in the text of message 0 (user)" in said(events)


def test_entry_freed(talk: Callable[..., Any], events: Path) -> None:
    """Given up by its owner; what it would have spared is known."""
    talking = talk("chatml")
    first = talking.ask("Hello you", "fine")
    talking.runner.reset()
    event = talking.ask("Hello there", "fine")
    assert (event["outcome"], event["reason"]) == ("miss", "entry_freed")
    assert event["evicted_by"] == "a reset"
    assert event["lost_tokens"] == len("Hello ")
    assert first["lost_tokens"] == 0
    assert "the cache was freed (a reset)" in said(events)


def test_model_changed_and_options_changed(events: Path) -> None:
    """Another model or other options in one process are the reason; the profile goes with them."""
    profile = Profile(events=events)
    for name, bits in (("demo", None), ("demo", 8), ("other", 8), ("other", 8)):
        runner = Runner.load("demo", kv_bits=bits, reserve=False, context=512)
        runner.name = name
        profile.watch(runner)
        list(runner.generate("My name is Ana.", max_tokens=2))
    profile.finish()
    _, options, model, again = read_lines(events)
    assert (options["reason"], options["run"]) == ("options_changed", "warm-miss")
    assert options["evicted_by"] == "kv_bits: None -> 8"
    assert options["lost_tokens"] == options["prompt_tokens"] - 1
    assert (model["reason"], model["evicted_by"]) == ("model_changed", "demo -> other")
    assert (again["reason"], again["evicted_by"]) == ("options_changed", "loaded again")
    assert len({event["fingerprint"] for event in (options, model, again)}) == 1
    explained = Event.of(options).explain()
    assert explained.startswith("the model was loaded again with options that change its ")
    assert "cache (kv_bits: None -> 8)" in explained
    assert Event.of(model).explain().startswith("another model was loaded")


def test_restored(events: Path) -> None:
    """An entry that came from a file; once, and only where nothing else was lost."""
    runner, profile = oracle_runner(), Profile(events=events)
    profile.watch(runner)
    list(runner.generate([1, 2, 3], max_tokens=2))
    told = list(runner.entry.tokens)
    for prompt in ([*told, 9], [*told, 8, 8], [1, 7]):
        other = oracle_runner()
        list(other.generate([1, 2, 3], max_tokens=2))
        runner.cache.adopt(other.entry.export(), "chat.session")
        list(runner.generate(prompt, max_tokens=1))
    list(runner.generate([1, 7, 6], max_tokens=1))
    _, first, second, parted, last = read_lines(events)
    assert (first["reason"], first["run"]) == ("restored", "warm-restored")
    assert first["evicted_by"] == "chat.session"
    assert second["reason"] == "restored"
    assert (parted["reason"], parted["run"]) == ("diverged", "warm-restored")
    assert (last["reason"], last["run"]) == (None, "warm-hit")
    assert Event.of(first).explain().startswith("the cache came from a file (chat.session)")


def test_verify_failed(events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rewind that spoils what is stored is found, reported and mended, with its own exit code."""
    from mlxrunner.cache.layers.attention import FullAttentionCache

    honest = FullAttentionCache.rewind

    def spoil(cache: Any, to: int) -> None:
        honest(cache, to)
        if to:
            cache.keys[..., : to // 2, :] = -cache.keys[..., : to // 2, :]

    monkeypatch.setattr(FullAttentionCache, "rewind", spoil)
    asked = "My name is Ana. What is my name?"
    command = ("generate", "-p", asked, "--repeat", 3, "--events", events)
    failed = run(*command, "--verify-cache", 1, "--verify-strict", code=4)
    assert failed.stderr.startswith(
        "mlxrunner: 1 of 1 verified requests gave something else when they were run again cold"
    )
    _, wrong, after = read_lines(events)
    assert wrong["verify"]["equal"] is False
    assert wrong["verify"]["logits_difference"] > wrong["verify"]["tolerance"]
    assert (after["outcome"], after["reason"]) == ("miss", "verify_failed")
    assert after["lost_tokens"] == after["prompt_tokens"] - 1
    assert after["evicted_by"].startswith("request 2 run again cold: ")
    assert "found the cache wrong" in said(events)
    assert (
        run(*command, "--verify-cache", 1).exit_code == 0
    )  # without --verify-strict it is only reported
    assert json.loads(events.read_text().splitlines()[-1])["reason"] == "verify_failed"


def test_another_model_in_the_middle_of_a_chat_says_why_nothing_was_reused(tmp_path: Path) -> None:
    """The event after `/set context` or `/model` has the reason why nothing was reused."""
    file = tmp_path / "events.jsonl"
    said = "My name is Ana.\n/set context 1024\nWhat is my name?\n"
    result = CliRunner().invoke(cli.main, ["chat", "--events", str(file)], input=said)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "Your name is Ana."
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert (first["reason"], first["command"], first["messages"]) == ("empty", "chat", 1)
    assert (second["reason"], second["messages"]) == ("options_changed", 3)
    assert second["evicted_by"] == "context: 2048 -> 1024"


def chat(file: Path, said: str, *arguments: str, data: Path) -> list[dict[str, Any]]:
    """Return the events of a chat by pipe."""
    command = ["chat", "--events", str(file), *arguments]
    ends(CliRunner().invoke(cli.main, command, input=said, env={"MLXRUNNER_DATA": str(data)}), 0)
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_another_model_says_so(tmp_path: Path) -> None:
    """`/model` with the same tokenizer's text: nothing of the entry is of use to it."""
    write_model(tmp_path / "other", "llama", max_position_embeddings=512)
    first, second = chat(
        tmp_path / "e",
        f"Hello!\n/model {tmp_path / 'other'}\nHello!\n",
        "--max-tokens",
        "3",
        data=tmp_path,
    )
    assert (first["reason"], second["reason"], second["cached_tokens"]) == (
        "empty",
        "model_changed",
        0,
    )
    assert second["evicted_by"] == f"demo -> {tmp_path / 'other'}"


def test_a_session_is_restored_or_says_why_not(tmp_path: Path) -> None:
    """The first turn of the next process reuses the file, or a damaged one is given up."""
    data = tmp_path / "data"
    chat(tmp_path / "1", "My name is Ana.\n", "--session", "a", data=data)
    (restored,) = chat(tmp_path / "2", "What is my name?\n", "--session", "a", data=data)
    has(restored, reason="restored", evicted_by="session a", run="cold-restored")
    assert restored["cached_tokens"] == restored["matched_tokens"] > 0
    (cache, *_) = data.rglob("rows-*.safetensors")
    content = bytearray(cache.read_bytes())
    content[-1] ^= 1
    cache.write_bytes(content)
    (damaged,) = chat(tmp_path / "3", "What is my name?\n", "--session", "a", data=data)
    assert (damaged["outcome"], damaged["reason"]) == ("miss", "entry_freed")
    assert damaged["evicted_by"].startswith("a saved cache that could not be read")
