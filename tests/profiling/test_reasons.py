"""Each reason of the list, produced as a user would come by it, with the program's words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.models import write_model

from mlxrunner import cli
from mlxrunner.profiling.json_schema import event_schema
from mlxrunner.profiling.reasons import PARTS, REASONS
from mlxrunner.profiling.record.profile import Profile
from mlxrunner.profiling.schema import Event
from mlxrunner.runner import Runner
from mlxrunner.testing import oracle_runner

Lines = Callable[[Path], list[dict[str, Any]]]


def run(*arguments: Any, stdin: str = "", code: int = 0) -> Result:
    result = CliRunner().invoke(cli.main, [str(argument) for argument in arguments], input=stdin)
    assert result.exit_code == code, result.stderr
    return result


def said(events: Path) -> str:
    """Return `mlxrunner explain EVENTS --last` as one line in lower case."""
    return " ".join(run("explain", events, "--last").stdout.lower().split())


@pytest.fixture
def events(tmp_path: Path) -> Path:
    """Where the events go."""
    return tmp_path / "events.jsonl"


def test_the_list_is_the_schema_s_and_has_a_sentence_each() -> None:
    """A remedy is there where there is something to mend."""
    schema = event_schema()
    reason, part = schema["properties"]["reason"], schema["$defs"]["Side"]["properties"]["part"]
    assert reason["anyOf"] == [{"enum": sorted(REASONS)}, {"type": "null"}]
    assert part["anyOf"] == [{"enum": sorted(PARTS)}, {"type": "null"}]
    assert all(reason.sentence for reason in REASONS.values())
    assert [name for name, reason in REASONS.items() if not reason.remedy] == [
        "empty",
        "prompt_shorter",
        "interrupted",
        "restored",
        "side_by_side",
    ]


def test_empty_and_prompt_shorter(events: Path, lines: Lines) -> None:
    """The first request of a process, and the same again."""
    run("generate", "-p", "Hello!", "--repeat", 2, "--events", events)
    first, second = lines(events)
    assert (first["outcome"], first["reason"], first["run"]) == ("miss", "empty", "cold-miss")
    assert (second["outcome"], second["reason"], second["run"]) == (
        "hit",
        "prompt_shorter",
        "warm-hit",
    )
    assert (first["lost_tokens"], second["lost_tokens"]) == (0, 0)
    assert "the prompt is the beginning of the entry" in said(events)


def test_nothing_lost(events: Path, lines: Lines) -> None:
    """The next turn of a chat."""
    run("chat", "--events", events, stdin="My name is Ana.\nWhat is my name?\n")
    last = lines(events)[-1]
    assert (last["outcome"], last["reason"], last["divergence"]) == ("hit", None, None)
    assert (last["command"], last["prompt_kind"], last["messages"]) == ("chat", "messages", 3)
    assert "nothing was lost" in said(events)


def test_diverged_in_each_family(
    family: Any, scripted: Callable[..., Path], events: Path, lines: Lines
) -> None:
    """A chat that begins anew with other words: role, message and part are named."""
    begin = {"mistral": "[/INST]", "harmony": "t"}.get(family.name, "\n")
    folder = scripted(family.name, begin, "fine")
    run(
        "chat",
        "-m",
        folder,
        "--events",
        events,
        "--log-text",
        "--no-reserve",
        stdin="Dear old friend\n/clear\nDear you\n",
    )
    event = lines(events)[-1]
    assert event["reason"] == "diverged"
    assert tuple(event["divergence"][name] for name in ("message", "role", "part")) == (
        0,
        "user",
        "text",
    )
    assert event["divergence"]["common"]["text"].endswith("Dear ")
    assert event["divergence"]["previous"]["text"].startswith("old friend")
    assert (
        event["lost_tokens"]
        == min(event["prompt_tokens"] - 1, event["entry_tokens"]) - event["cached_tokens"]
    )
    assert "in the text of message 0 (user)" in said(events)


def test_diverged_at_thinking_that_is_stripped(
    scripted: Callable[..., Path], events: Path, lines: Lines
) -> None:
    """Qwen 3: the model thinks, and the template leaves that out of the next prompt."""
    folder = scripted("qwen3", "\n", "<think>hm</think>Ok")
    run("chat", "-m", folder, "--events", events, "--no-reserve", stdin="Hello\nAgain\n")
    event = lines(events)[-1]
    assert event["reason"] == "diverged"
    sides = [
        tuple(event["divergence"][side][name] for name in ("message", "role", "part"))
        for side in ("previous", "current")
    ]
    assert sides == [(1, "assistant", "thinking"), (1, "assistant", "text")]
    assert "where before was the thinking block of message 1 (assistant)" in said(events)


def test_no_common_token(tmp_path: Path, events: Path, lines: Lines) -> None:
    """A model without BOS: a conversation with a system prompt begins with another token."""
    write_model(tmp_path / "model")
    command = (
        "chat",
        "-m",
        tmp_path / "model",
        "--max-tokens",
        4,
        "--no-reserve",
        "--events",
        events,
    )
    run(*command, stdin="hello\n/system Be brief.\nhello\n")
    event = lines(events)[-1]
    assert (event["outcome"], event["reason"]) == ("miss", "no_common_token")
    assert (event["divergence"]["index"], event["divergence"]["role"]) == (0, "system")
    assert event["lost_tokens"] == event["entry_tokens"]
    assert "already the first token differs" in said(events)


def test_rewind_limited(tmp_path: Path, events: Path, lines: Lines) -> None:
    """A recurrent model without checkpoints can't go back over its answer."""
    write_model(tmp_path / "model", "mamba2")
    command = (
        "generate",
        "-m",
        tmp_path / "model",
        "-p",
        "hello there",
        "--raw",
        "--max-tokens",
        4,
        "--no-reserve",
    )
    run(*command, "--repeat", 2, "--checkpoint-budget", 0, "--events", events)
    event = lines(events)[-1]
    assert (event["outcome"], event["reason"], event["rewind_limited_by"]) == (
        "miss",
        "rewind_limited",
        "recurrent",
    )
    assert event["lost_tokens"] == event["prompt_tokens"] - 1
    assert "(recurrent)" in said(events)
    assert "--checkpoint-interval" in said(events)


def test_rewind_limited_names_the_place_in_each_family(
    family: Any,
    write_family: Callable[[Path, str], None],
    tmp_path: Path,
    events: Path,
    lines: Lines,
) -> None:
    """Where the conversation was edited, and the layer that could not go back to there."""
    write_model(tmp_path / "model", "mamba2", vocab_size=300)
    config = (tmp_path / "model" / "config.json").read_bytes()
    write_family(tmp_path / "model", family.name)
    (tmp_path / "model" / "config.json").write_bytes(config)
    command = (
        "chat",
        "-m",
        tmp_path / "model",
        "--max-tokens",
        2,
        "--no-reserve",
        "--checkpoint-budget",
        0,
        "--events",
        events,
    )
    run(*command, stdin="Dear old friend\n/clear\nDear you\n")
    event = lines(events)[-1]
    assert (event["reason"], event["rewind_limited_by"], event["cached_tokens"]) == (
        "rewind_limited",
        "recurrent",
        0,
    )
    assert tuple(event["divergence"][name] for name in ("message", "role", "part")) == (
        0,
        "user",
        "text",
    )
    assert event["lost_tokens"] == event["matched_tokens"] == event["divergence"]["index"] > 0
    assert "in the text of message 0 (user)" in said(events)


def test_entry_freed(talk: Callable[..., Any], events: Path) -> None:
    """Given up by its owner; what it would have spared is known."""
    talking = talk("chatml")
    first = talking.ask("Hello you", "fine")
    talking.runner.reset()
    event = talking.ask("Hello there", "fine")
    assert (event["outcome"], event["reason"], event["freed_by"]) == (
        "miss",
        "entry_freed",
        "a reset",
    )
    assert event["lost_tokens"] == len("Hello ")
    assert first["lost_tokens"] == 0
    assert "the entry had been given up (a reset)" in said(events)


def test_model_changed_and_options_changed(events: Path, lines: Lines) -> None:
    """Another model or other options in one process are the reason; the profile goes with them."""
    profile = Profile(events=events)
    for name, bits in (("demo", None), ("demo", 8), ("other", 8), ("other", 8)):
        runner = Runner.load("demo", kv_bits=bits, reserve=False, context=512)
        runner.name = name
        profile.watch(runner)
        list(runner.generate("My name is Ana.", max_tokens=2))
    profile.finish()
    _, options, model, again = lines(events)
    assert (options["reason"], options["freed_by"], options["run"]) == (
        "options_changed",
        "kv_bits: None -> 8",
        "warm-miss",
    )
    assert options["lost_tokens"] == options["prompt_tokens"] - 1
    assert (model["reason"], model["freed_by"]) == ("model_changed", "demo -> other")
    assert (again["reason"], again["freed_by"]) == ("options_changed", "loaded again")
    assert len({event["fingerprint"] for event in (options, model, again)}) == 1
    assert (
        Event.of(options)
        .explain()
        .startswith(
            "the model was loaded again with options that change what is stored (kv_bits: None -> "
            "8)"
        )
    )
    assert Event.of(model).explain().startswith("another model was loaded")


def test_interrupted(events: Path, lines: Lines) -> None:
    """A prefill that Ctrl-C ends counts what it finished, and nothing else is lost."""
    runner, profile = oracle_runner(prefill_step=8), Profile(events=events)
    profile.watch(runner)
    prompt = list(range(1, 41))

    def press(done: int, total: int) -> None:
        if done == 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(runner.generate(prompt, max_tokens=2, progress=press))
    list(runner.generate(prompt, max_tokens=2))
    list(runner.generate([*prompt[:30], 90, 91], max_tokens=2))
    stopped, event, later = lines(events)
    assert (stopped["finish"], stopped["completion_tokens"], stopped["entry_tokens_after"]) == (
        "interrupted",
        0,
        16,
    )
    assert (stopped["ttft_s"], stopped["decode_s"], stopped["prefill_s"]) == (None, None, None)
    assert [span["tokens"] for span in stopped["spans"] if span["name"] == "prefill"] == [8, 8]
    assert (stopped["evaluated_tokens"], stopped["lost_tokens"]) == (16, 0)
    assert (
        event["reason"],
        event["cached_tokens"],
        event["evaluated_tokens"],
        event["lost_tokens"],
    ) == ("interrupted", 16, 24, 0)
    assert later["reason"] == "diverged"
    assert (
        Event.of(event)
        .explain()
        .startswith("the request before it was ended before its prompt was evaluated")
    )


def test_what_was_evaluated_in_advance_is_no_interrupted_request(
    events: Path, lines: Lines
) -> None:
    """It is there or not yet there; nothing was lost, and nothing was saved."""
    runner, profile = oracle_runner(prefill_step=8), Profile(events=events)
    profile.watch(runner)
    asked = iter([False, False, True])
    assert 0 < runner.evaluate(list(range(1, 41)), cancelled=lambda: next(asked)) < 40
    list(runner.generate(list(range(1, 41)), max_tokens=2))
    (event,) = lines(events)
    assert (event["outcome"], event["reason"], event["lost_tokens"]) == ("miss", "empty", 0)
    assert (event["saved_tokens"], event["saved_s"]) == (0, 0.0)
    assert event["ahead_tokens"] == event["cached_tokens"] > 0


# The program, which takes a second for each forward pass until a file is there.
SLOW = """
import sys, time
from pathlib import Path
from mlxrunner.cli import main
from mlxrunner.engine.pipeline import Pipeline

forward, file = Pipeline._forward, Path(sys.argv.pop(1))

def slowly(self, *arguments, **options):
    for _ in range(100):
        if not file.exists():
            time.sleep(0.01)
    return forward(self, *arguments, **options)

Pipeline._forward = slowly
main()
"""


@pytest.mark.exhaustive(0)
def test_interrupted_in_a_terminal(
    open_screen: Any, events: Path, lines: Lines, tmp_path: Path
) -> None:
    """A long message, Ctrl-C while it is evaluated, and the same message again."""
    go_on = tmp_path / "go on"
    options = ("--no-type-ahead", "--prefill-step", "4", "--events", str(events))
    screen = open_screen("-c", SLOW, str(go_on), "chat", *options, size=(200, 40))
    for requests in (1, 2):
        screen.prompt()
        screen.child.send("and then " * 30 + "\r")
        if requests == 1:
            screen.until("evaluating")
            screen.child.sendintr()
            screen.until("interrupted")
            go_on.touch()
        screen.until(lambda requests=requests: events.exists() and len(lines(events)) == requests)
    stopped, again = lines(events)
    assert (stopped["finish"], stopped["completion_tokens"]) == ("interrupted", 0)
    assert again["reason"] == "interrupted"
    assert again["cached_tokens"] == stopped["entry_tokens_after"]
    assert stopped["evaluated_tokens"] == stopped["entry_tokens_after"] - stopped["cached_tokens"]
    assert (again["outcome"], again["lost_tokens"]) == ("hit", 0)
    assert "was ended before its prompt was evaluated" in said(events)


# The program, which adds each prompt that was evaluated in advance to a file once that is done.
TELLS = """
import sys
from mlxrunner.cli import main
from mlxrunner.runner import Runner

evaluate, file = Runner.evaluate, sys.argv.pop(1)

def told(self, prompt, **options):
    count = evaluate(self, prompt, **options)
    with open(file, "a") as stream:
        stream.write(self.tokenizer.decode(self.entry.tokens))
    return count

Runner.evaluate = told
main()
"""


def test_typing_ahead_hides_no_loss_in_a_terminal(
    open_screen: Any, events: Path, lines: Lines, tmp_path: Path
) -> None:
    """A turn, /clear, another one, all of it evaluated while it is typed."""
    evaluated = tmp_path / "evaluated"
    screen = open_screen(
        "-c", TELLS, str(evaluated), "chat", "--no-history", "--events", str(events)
    )
    for text in (
        "My name is Ana and I live in Rome.",
        "/clear",
        "My name is Tom and I live in Oslo.",
    ):
        screen.prompt()
        screen.child.send(text)
        screen.until(
            lambda text=text: (
                text.startswith("/") or (evaluated.exists() and text[:25] in evaluated.read_text())
            )
        )
        screen.child.send("\r")
    screen.until(lambda: len(lines(events)) == 2)
    first, second = lines(events)
    assert (first["run"], first["saved_tokens"]) == ("cold-miss", 0)
    assert (second["run"], second["reason"]) == ("warm-partial", "diverged")
    assert second["divergence"].items() >= {"message": 0, "role": "user", "part": "text"}.items()
    assert second["lost_tokens"] > 20
    assert first["ahead_tokens"] > 0
    assert second["ahead_tokens"] > 0


def test_what_an_interrupted_request_lost_is_counted_once() -> None:
    """The rest of an interrupted request is evaluated by the next one and counted once."""
    runner, seen = oracle_runner(prefill_step=50, context=2000), []
    Profile(sinks=[seen.append]).watch(runner)
    list(runner.generate([1] * 1000, max_tokens=1))
    prompt = [1] * 500 + [2] * 500

    def press(done: int, total: int) -> None:
        if done == 550:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(runner.generate(prompt, max_tokens=1, progress=press))
    list(runner.generate(prompt, max_tokens=1))
    counts = [(event.reason, event.evaluated_tokens, event.lost_tokens) for event in seen[1:]]
    assert counts == [("diverged", 50, 50), ("interrupted", 450, 0)]


def test_interrupted_before_anything_was_evaluated() -> None:
    """The entry is empty then, and that is why; for another prompt it is just empty."""
    runner = oracle_runner(prefill_step=64)
    for prompt, reason, lost in (([1, 2, 3, 4], "interrupted", 0), ([5, 6], "empty", 0)):
        runner.reset()

        def press(done: int, total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            list(runner.generate([1, 2, 3, 4], max_tokens=2, progress=press))
        usage = list(runner.generate(prompt, max_tokens=2))[-1].usage
        assert usage is not None
        assert (usage.reason, usage.cache.lost_tokens) == (reason, lost)


def test_restored(events: Path, lines: Lines) -> None:
    """An entry that came from a file; once, and only where nothing else was lost."""
    runner, profile = oracle_runner(), Profile(events=events)
    profile.watch(runner)
    list(runner.generate([1, 2, 3], max_tokens=2))
    told = list(runner.entry.tokens)
    for prompt in ([*told, 9], [*told, 9, 8], [1, 7]):
        other = oracle_runner()
        list(other.generate([1, 2, 3], max_tokens=2))
        runner.cache.adopt(other.entry.export(), "chat.session")
        list(runner.generate(prompt, max_tokens=1))
    list(runner.generate([1, 7, 6], max_tokens=1))
    _, first, second, parted, last = lines(events)
    assert (first["reason"], first["freed_by"], first["run"]) == (
        "restored",
        "chat.session",
        "warm-restored",
    )
    assert second["reason"] == "restored"
    assert (parted["reason"], parted["run"]) == ("diverged", "warm-restored")
    assert (last["reason"], last["run"]) == (None, "warm-hit")
    assert Event.of(first).explain().startswith("the entry came from a file (chat.session)")


def test_verify_failed(events: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rewind that spoils what is stored is found, reported and mended, with its own exit code."""
    from mlxrunner.cache.layers.full import FullAttentionCache

    honest = FullAttentionCache.rewind

    def spoil(cache: Any, to: int) -> None:
        honest(cache, to)
        if to:
            cache.keys[..., : to // 2, :] = -cache.keys[..., : to // 2, :]

    monkeypatch.setattr(FullAttentionCache, "rewind", spoil)
    command = (
        "generate",
        "-p",
        "My name is Ana. What is my name?",
        "--repeat",
        3,
        "--events",
        events,
    )
    failed = run(*command, "--verify-cache", 1, "--strict", code=4)
    assert failed.stderr.startswith(
        "mlxrunner: 1 of 1 verified requests gave something else when they were run again cold"
    )
    _, wrong, after = lines(events)
    assert wrong["verify"]["equal"] is False
    assert wrong["verify"]["logits_difference"] > wrong["verify"]["tolerance"]
    assert (after["outcome"], after["reason"]) == ("miss", "verify_failed")
    assert after["lost_tokens"] == after["prompt_tokens"] - 1
    assert after["freed_by"].startswith("request 2 run again cold: ")
    assert "had found the entry wrong" in said(events)
    assert run(*command, "--verify-cache", 1).exit_code == 0  # without --strict it is only reported
    assert json.loads(events.read_text().splitlines()[-1])["reason"] == "verify_failed"


def test_what_is_evaluated_in_advance_leaves_the_explanation_to_the_request(
    events: Path, lines: Lines
) -> None:
    """In a chat something is evaluated before nearly every turn."""
    runner, other, profile = oracle_runner(), oracle_runner(), Profile(events=events)
    profile.watch(runner)
    list(other.generate([1, 2, 3], max_tokens=2))
    told = list(other.entry.tokens)
    runner.cache.adopt(other.entry.export(), "session a")
    runner.evaluate([*told, 9])
    list(runner.generate([*told, 9, 8], max_tokens=1))
    (event,) = lines(events)
    assert (event["reason"], event["run"]) == ("restored", "cold-restored")


def test_a_restored_entry_that_was_given_up_unread_says_so(events: Path, lines: Lines) -> None:
    """Nothing was restored then."""
    runner, other, profile = oracle_runner(), oracle_runner(), Profile(events=events)
    profile.watch(runner)
    list(other.generate([1, 2, 3], max_tokens=2))
    runner.cache.adopt(other.entry.export(), "session a")
    runner.reset()
    list(runner.generate([1, 2, 3], max_tokens=1))
    (event,) = lines(events)
    assert (event["outcome"], event["reason"], event["run"]) == ("miss", "entry_freed", "cold-miss")


def test_a_draft_that_was_evaluated_and_not_sent_costs_nothing(events: Path, lines: Lines) -> None:
    """An unsent draft loses nothing of the last request, and its used part is not saved."""
    runner, profile = Runner.load("demo", reserve=False), Profile(events=events, log_text=True)
    profile.watch(runner)
    messages = [{"role": "user", "content": "My name is Ana."}]
    answer = "".join(chunk.text for chunk in runner.generate(messages))
    messages.append({"role": "assistant", "content": answer})
    runner.evaluate(
        [*messages, {"role": "user", "content": "I have a parrot and much more to say about it"}]
    )
    list(runner.generate([*messages, {"role": "user", "content": "I have a dog."}]))
    _, event = lines(events)
    assert (event["outcome"], event["reason"], event["divergence"], event["lost_tokens"]) == (
        "hit",
        None,
        None,
        0,
    )
    assert event["saved_tokens"] == event["entry_tokens"] == event["matched_tokens"]
    assert 0 < event["ahead_tokens"] < event["prompt_tokens"] - event["saved_tokens"]


@pytest.mark.parametrize(
    "drafts", [[], [""], ["you"], ["me", "you"]], ids=["none", "before", "typed", "changed"]
)
def test_what_is_evaluated_in_advance_hides_no_loss(
    family: Any, talk: Callable[..., Any], drafts: list[str]
) -> None:
    """A conversation that begins anew: the same reason, place and loss as without it."""
    talking = talk(family.name, log_text=True)
    talking.ask([{"role": "user", "content": "Dear old friend"}], "fine")
    for draft in drafts:
        talking.runner.evaluate([{"role": "user", "content": "Dear " + draft}])
    event = talking.ask([{"role": "user", "content": "Dear you"}], "fine")
    place = {"message": 0, "role": "user", "part": "text"}
    assert (event["reason"], event["outcome"], event["run"]) == (
        "diverged",
        "partial",
        "warm-partial",
    )
    assert event["divergence"].items() >= place.items()
    assert event["divergence"]["previous"].items() >= place.items()
    assert event["divergence"]["previous"]["text"].startswith("old friend")
    assert (
        event["saved_tokens"]
        <= event["matched_tokens"]
        == event["divergence"]["index"]
        <= event["saved_tokens"] + 1
    )
    assert (
        event["lost_tokens"]
        == min(event["prompt_tokens"] - 1, event["entry_tokens"]) - event["saved_tokens"]
    )
    assert (event["ahead_tokens"] > 0) == ("you" in drafts)


def test_what_was_evaluated_in_advance_for_nothing_may_be_what_freed_the_rest() -> None:
    """A draft that leaves the entry early, or cannot be taken back, is what freed the rest."""
    for kind, budget, reason in (("full", 0, "entry_freed"), ("recurrent", 0, "rewind_limited")):
        runner, seen = oracle_runner((kind,), checkpoint_budget=budget), []
        Profile(sinks=[seen.append]).watch(runner)
        prompt = list(range(1, 41))
        list(runner.generate(prompt, max_tokens=1))
        runner.evaluate([*prompt[:30], 99])
        list(runner.generate([*prompt, 98], max_tokens=2))
        event = seen[-1]
        kept = 30 if kind == "full" else 0
        assert (event.reason, event.saved_tokens, event.lost_tokens) == (
            reason,
            kept,
            40 - kept,
        )
        assert event.rewind_limited_by == (None if kind == "full" else kind)


def test_a_reset_after_something_was_evaluated_in_advance_says_what_it_cost() -> None:
    """The tokens of the last request count, not those of the draft."""
    runner, seen = oracle_runner(), []
    Profile(sinks=[seen.append]).watch(runner)
    list(runner.generate([1, 2, 3, 4], max_tokens=1))
    runner.evaluate([1, 2, 9, 9])
    runner.reset()
    list(runner.generate([1, 2, 3, 5], max_tokens=1))
    assert (seen[-1].reason, seen[-1].lost_tokens, seen[-1].ahead_tokens) == (
        "entry_freed",
        3,
        0,
    )


def test_a_shift_moves_what_was_evaluated_in_advance_too() -> None:
    """A full context before the request: the share of the draft is no saving."""
    runner, seen = Runner.load("demo", reserve=False, context=64), []
    Profile(sinks=[seen.append]).watch(runner)
    prompt = list(range(1, 41))
    list(runner.generate(prompt, max_tokens=1))
    runner.evaluate([*prompt, *range(101, 121)])
    list(runner.generate([*prompt, *range(101, 131)], max_tokens=1, overflow="shift", keep=4))
    event = seen[-1]
    assert event.shifted_tokens > 0
    assert event.ahead_tokens == 20
    assert event.saved_tokens == event.cached_tokens - 20 == 40 - event.shifted_tokens


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    """Return lines about two documents in turn: in input order each prefix is evaluated again."""
    file = tmp_path / "in.jsonl"
    texts = [f"{'abcdefgh'[number % 2] * 60} question {number}" for number in range(8)]
    file.write_text("".join(json.dumps({"prompt": text, "max_tokens": 2}) + "\n" for text in texts))
    return file


def told(events: Path, page: Path) -> tuple[dict[str, Any], str, str, str]:
    """The report as JSON, in words and as a page, and all that `explain` says of each event."""
    made = json.loads(run("report", events, "--json").stdout)
    words = " ".join(run("report", events, "--html", page).stdout.split())
    ids = [json.loads(line)["id"] for line in events.read_text().splitlines()]
    explained = " ".join(" ".join(run("explain", events, one).stdout for one in ids).split())
    return made, words, page.read_text().lower(), explained


@pytest.mark.parametrize("parallel", [1, 4])
def test_a_batch_that_evaluates_the_tree_has_lost_nothing(
    parallel: int, batch: Path, events: Path, tmp_path: Path, lines: Lines
) -> None:
    """Report, page and explain say the same, and tell nobody to change anything."""
    run("batch", batch, "-o", tmp_path / "out", "--parallel", parallel, "--events", events)
    made, words, page, explained = told(events, tmp_path / "page.html")
    assert made["tokens"]["lost"] <= (0 if parallel == 1 else 16)
    assert {reason for reason, loss in made["reasons"].items() if loss["tokens"]} <= {
        "side_by_side"
    }
    for text in (words, page, explained):
        assert "put what changes" not in text
        assert "send earlier messages back" not in text
    assert "What to change" not in explained
    assert "nothing was lost by that" in explained


def test_a_batch_in_input_order_is_told_to_sort(
    batch: Path, events: Path, tmp_path: Path, lines: Lines
) -> None:
    """The loss is against the tree; its remedy is the order, not the text of the prompts."""
    run(
        "batch",
        batch,
        "-o",
        tmp_path / "out",
        "--parallel",
        1,
        "--order",
        "input",
        "--events",
        events,
    )
    made, words, page, explained = told(events, tmp_path / "page.html")
    plan = json.loads(run("batch", batch, "--plan", "--json").stdout)
    assert made["tokens"]["lost"] == made["tokens"]["evaluated"] - plan["evaluated_at_best"] > 0
    assert made["reasons"]["batch_order"]["tokens"] == made["tokens"]["lost"]
    assert list(made["places"]) == ["(evaluated for other lines)"]
    for text in (words, page, explained):
        assert "run the lines in prefix order" in text
        assert "send earlier messages back" not in text
