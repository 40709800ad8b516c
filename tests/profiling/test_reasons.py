"""Each reason of the list, produced as a user would come by it, with the program's words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.checks import ends, has, read_lines
from support.events import run, said, watched
from support.models import write_model

from event_schema import event_schema
from mlxrunner import cli
from mlxrunner.profiling.profile import Profile
from mlxrunner.profiling.schema import PARTS, REASONS, Event, explain_reuse
from mlxrunner.runner import Runner
from mlxrunner.testing import oracle_runner


def place(side: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(side[name] for name in ("message", "role", "part"))


def ask(runner: Runner, prompt: Any, count: int = 1, **options: Any) -> Any:
    """Answer a prompt. Return the last chunk."""
    return list(runner.generate(prompt, max_tokens=count, **options))[-1]


def interrupt(runner: Runner, prompt: list[int], after: int = 0) -> None:
    """Interrupt a prefill after this number of tokens."""

    def press(done: int, total: int) -> None:
        if done >= after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(runner, prompt, 2, progress=press)


def test_the_list_is_the_schema_s_and_has_a_sentence_each() -> None:
    """A remedy is there where there is something to mend."""
    schema = event_schema()
    reason, part = schema["properties"]["reason"], schema["$defs"]["Side"]["properties"]["part"]
    assert reason["anyOf"] == [{"enum": sorted(REASONS)}, {"type": "null"}]
    assert part["anyOf"] == [{"enum": sorted(PARTS)}, {"type": "null"}]
    assert all(reason.sentence for reason in REASONS.values())
    without = [name for name, reason in REASONS.items() if not reason.remedy]
    assert without == "empty prompt_shorter interrupted restored side_by_side".split()


def test_empty_and_prompt_shorter(events: Path) -> None:
    run("generate", "-p", "Hello!", "--repeat", 2, "--events", events)
    first, second = read_lines(events)
    has(first, outcome="miss", reason="empty", run="cold-miss", lost_tokens=0)
    has(second, outcome="hit", reason="prompt_shorter", run="warm-hit", lost_tokens=0)
    assert "the prompt is the beginning of the cached text" in said(events)


def test_nothing_lost(events: Path) -> None:
    run("chat", "--events", events, stdin="My name is Ana.\nWhat is my name?\n")
    last = read_lines(events)[-1]
    has(last, outcome="hit", reason=None, divergence=None)
    has(last, command="chat", prompt_kind="messages", messages=3)
    assert "nothing was lost" in said(events)


@pytest.mark.parametrize(
    ("missed", "words"),
    [(0, "nothing was lost: "), (1, "not all was reused that had been evaluated")],
)
def test_missed_tokens_without_a_reason_are_not_nothing(missed: int, words: str) -> None:
    counts = dict.fromkeys(("prefetched_tokens", "displaced_tokens"), 0) | {"new_tokens": 1}
    counts |= {"prompt_tokens": 2 + missed, "cached_tokens": 1, "missed_tokens": missed}
    told = explain_reuse(counts | {"reason": None, "evicted_by": None})
    assert told.startswith(words)


def test_diverged(events: Path) -> None:
    """A chat that begins again with other words: role, message and part are named."""
    said_in = "Dear old friend\n/clear\nDear you\n"
    run("chat", "--events", events, "--log-text", stdin=said_in)
    event = read_lines(events)[-1]
    assert event["reason"] == "diverged"
    assert place(event["divergence"]) == (0, "user", "text")
    assert event["divergence"]["previous"]["text"].lstrip().startswith("old friend")
    assert event["missed_tokens"] == event["displaced_tokens"] == 0  # the words are new
    assert "in the text of message 0 (user)" in said(events)


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


def test_rewind_limited(
    write_family: Callable[[Path, str], None], tmp_path: Path, events: Path
) -> None:
    """Where the conversation was edited, and the layer that could not go back to there."""
    write_model(tmp_path / "model", "mamba2", vocab_size=300)
    config = (tmp_path / "model" / "config.json").read_bytes()
    write_family(tmp_path / "model", "chatml")
    (tmp_path / "model" / "config.json").write_bytes(config)
    options = "--max-tokens 2 --no-reserve --set checkpoint_budget=0"
    command = f"chat -m {tmp_path}/model {options} --events {events}"
    run(*command.split(), stdin="Dear old friend\n/clear\nDear you\n")
    event = read_lines(events)[-1]
    has(event, outcome="miss", reason="rewind_limited", trim_limited_by="recurrent")
    has(event, cached_tokens=0)
    assert place(event["divergence"]) == (0, "user", "text")
    assert event["lost_tokens"] == event["matched_tokens"] == event["divergence"]["index"] > 0
    told = said(events)
    assert "in the text of message 0 (user)" in told
    assert "(recurrent)" in told
    assert "checkpoint_interval" in told


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
        ask(runner, "My name is Ana.", 2)
    profile.finish()
    _, options, model, again = read_lines(events)
    has(options, reason="options_changed", run="warm-miss", evicted_by="kv_bits: None -> 8")
    assert options["lost_tokens"] == options["prompt_tokens"] - 1
    has(model, reason="model_changed", evicted_by="demo -> other")
    has(again, reason="options_changed", evicted_by="loaded again")
    assert len({event["fingerprint"] for event in (options, model, again)}) == 1
    explained = Event.of(options).explain()
    assert explained.startswith("the model was loaded again with options that change its ")
    assert "cache (kv_bits: None -> 8)" in explained
    assert Event.of(model).explain().startswith("another model was loaded")


def test_restored(events: Path) -> None:
    """An entry that came from a file; once, and only where nothing else was lost."""
    runner, profile = oracle_runner(), Profile(events=events)
    profile.watch(runner)
    ask(runner, [1, 2, 3], 2)
    told = list(runner.entry.tokens)
    for prompt in ([*told, 9], [*told, 8, 8], [1, 7]):
        other = oracle_runner()
        ask(other, [1, 2, 3], 2)
        runner.cache.adopt(other.entry.export(), "chat.session")
        ask(runner, prompt)
    ask(runner, [1, 7, 6])
    _, first, second, parted, last = read_lines(events)
    has(first, reason="restored", run="warm-restored", evicted_by="chat.session")
    has(second, reason="restored")
    has(parted, reason="diverged", run="warm-restored")
    has(last, reason=None, run="warm-hit")
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
    run(*command, "--verify-cache", 1)  # without --verify-strict it is only reported
    assert read_lines(events)[-1]["reason"] == "verify_failed"


def test_other_options_in_the_middle_of_a_chat_say_why_nothing_was_reused(events: Path) -> None:
    said_in = "My name is Ana.\n/set context 1024\nWhat is my name?\n"
    result = run("chat", "--events", events, stdin=said_in)
    assert result.stdout.splitlines()[-1] == "Your name is Ana."
    first, second = read_lines(events)
    has(first, reason="empty", command="chat", messages=1)
    has(second, reason="options_changed", messages=3, evicted_by="context: 2048 -> 1024")


def test_another_model_says_so(tmp_path: Path, events: Path) -> None:
    """`/model` with the same tokenizer's text: nothing of the entry is of use to it."""
    write_model(tmp_path / "other", "llama", max_position_embeddings=512)
    said_in = f"Hello!\n/model {tmp_path / 'other'}\nHello!\n"
    run("chat", "--events", events, "--max-tokens", 3, stdin=said_in)
    first, second = read_lines(events)
    assert (first["reason"], second["reason"]) == ("empty", "model_changed")
    has(second, cached_tokens=0, evicted_by=f"demo -> {tmp_path / 'other'}")


def test_a_session_is_restored_or_says_why_not(tmp_path: Path) -> None:
    """The first turn of the next process reuses the file, or a damaged one is given up."""
    data = tmp_path / "data"

    def ask(name: str, text: str) -> dict[str, Any]:
        """Return the event of a turn in a process of its own."""
        command = ["chat", "--events", str(tmp_path / name), "--session", "a"]
        env = {"MLXRUNNER_DATA": str(data)}
        ends(CliRunner().invoke(cli.main, command, input=text, env=env), 0)
        (event,) = read_lines(tmp_path / name)
        return event

    ask("1", "My name is Ana.\n")
    restored = ask("2", "What is my name?\n")
    has(restored, reason="restored", evicted_by="session a", run="cold-restored")
    assert restored["cached_tokens"] == restored["matched_tokens"] > 0
    (cache, *_) = data.rglob("rows-*.safetensors")
    content = bytearray(cache.read_bytes())
    content[-1] ^= 1
    cache.write_bytes(content)
    damaged = ask("3", "What is my name?\n")
    has(damaged, outcome="miss", reason="entry_freed")
    assert damaged["evicted_by"].startswith("a saved cache that could not be read")


def test_interrupted() -> None:
    """A prefill that Ctrl-C ends counts what it finished, and nothing else is lost."""
    runner, seen = watched(prefill_step=8)
    prompt = list(range(1, 41))
    interrupt(runner, prompt, 16)
    ask(runner, prompt, 2)
    ask(runner, [*prompt[:30], 90, 91], 2)
    stopped, event, later = seen
    has(stopped, finish="interrupted", completion_tokens=0, entry_tokens_after=16)
    has(stopped, evaluated_tokens=16, lost_tokens=0, ttft_s=None, decode_s=None, prefill_s=None)
    assert [span.tokens for span in stopped.spans if span.name == "prefill"] == [8, 8]
    has(event, reason="interrupted", cached_tokens=16, evaluated_tokens=24, lost_tokens=0)
    assert later.reason == "diverged"
    assert event.explain().startswith("the previous prefill was interrupted")


# The program, which takes a second for each forward pass until a file is there.
SLOW = """
import sys, time
from pathlib import Path
from mlxrunner.cli import main
from mlxrunner.engine.backends.backend import SequentialModel

forward, file = SequentialModel._pass, Path(sys.argv.pop(1))

def slowly(self, *arguments, **options):
    for _ in range(100):
        if not file.exists():
            time.sleep(0.01)
    return forward(self, *arguments, **options)

SequentialModel._pass = slowly
main()
"""


@pytest.mark.exhaustive(0)
def test_interrupted_in_a_terminal(open_screen: Any, events: Path, tmp_path: Path) -> None:
    """A long message, Ctrl-C while it is evaluated, and the same message again."""
    go_on = tmp_path / "go on"
    options = ("--set", "no_type_ahead=true", "--prefill-step", "4", "--events", str(events))
    screen = open_screen("-c", SLOW, str(go_on), "chat", *options, size=(200, 40))
    for requests in (1, 2):
        screen.prompt()
        screen.child.send("and then " * 30 + "\r")
        if requests == 1:
            screen.until("evaluating")
            screen.child.sendintr()
            screen.until("interrupted")
            go_on.touch()
        screen.until(lambda n=requests: events.exists() and len(read_lines(events)) == n)
    stopped, again = read_lines(events)
    held = stopped["entry_tokens_after"]
    has(stopped, finish="interrupted", completion_tokens=0)
    assert stopped["evaluated_tokens"] == held - stopped["cached_tokens"]
    has(again, reason="interrupted", cached_tokens=held, outcome="hit", lost_tokens=0)
    assert "previous prefill was interrupted" in said(events)


def test_what_an_interrupted_request_lost_is_counted_once() -> None:
    """The rest of an interrupted request is evaluated by the next one and counted once."""
    runner, seen = watched(prefill_step=50, context=2000)
    ask(runner, [1] * 1000)
    prompt = [1] * 500 + [2] * 500
    interrupt(runner, prompt, 550)
    ask(runner, prompt)
    counts = [(event.reason, event.evaluated_tokens, event.lost_tokens) for event in seen[1:]]
    assert counts == [("diverged", 50, 0), ("interrupted", 450, 0)]


def test_interrupted_before_anything_was_evaluated() -> None:
    """The entry is empty then, and that is why; for another prompt it is just empty."""
    runner = oracle_runner(prefill_step=64)
    for prompt, reason in (([1, 2, 3, 4], "interrupted"), ([5, 6], "empty")):
        runner.reset()
        interrupt(runner, [1, 2, 3, 4])
        usage = ask(runner, prompt, 2).usage
        assert (usage.reason, usage.cache.lost_tokens) == (reason, 0)


def test_what_was_evaluated_in_advance_is_no_interrupted_request() -> None:
    """It is there or not yet there; nothing was lost, and nothing was saved."""
    runner, seen = watched(prefill_step=8)
    asked = iter([False, False, True])
    assert 0 < runner.evaluate(list(range(1, 41)), cancelled=lambda: next(asked)) < 40
    ask(runner, list(range(1, 41)), 2)
    (event,) = seen
    has(event, outcome="miss", reason="empty", lost_tokens=0, saved_tokens=0, saved_s=0.0)
    assert event.prefetched_tokens == event.cached_tokens > 0


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
    open_screen: Any, events: Path, tmp_path: Path
) -> None:
    """A turn, /clear, another one, all of it evaluated while it is typed."""
    evaluated = tmp_path / "evaluated"
    options = ("--set", "no_input_history=true", "--events", str(events))
    screen = open_screen("-c", TELLS, str(evaluated), "chat", *options)
    ana, tom = "My name is Ana and I live in Rome.", "My name is Tom and I live in Oslo."
    for text in (ana, "/clear", tom):
        screen.prompt()
        screen.child.send(text)
        if not text.startswith("/"):
            begin = text[:25]
            screen.until(lambda b=begin: evaluated.exists() and b in evaluated.read_text())
        screen.child.send("\r")
    screen.until(lambda: len(read_lines(events)) == 2)
    first, second = read_lines(events)
    assert (first["run"], first["saved_tokens"]) == ("cold-miss", 0)
    assert (second["run"], second["reason"]) == ("warm-partial", "diverged")
    assert second["divergence"].items() >= {"message": 0, "role": "user", "part": "text"}.items()
    assert second["missed_tokens"] == second["displaced_tokens"] == 0
    assert min(first["prefetched_tokens"], second["prefetched_tokens"]) > 0


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "given up unread"])
def test_what_is_evaluated_in_advance_leaves_the_explanation_to_the_request(is_read: bool) -> None:
    """In a chat something is evaluated before nearly every turn. Nothing is restored unread."""
    runner, seen = watched()
    other = oracle_runner()
    ask(other, [1, 2, 3], 2)
    told = list(other.entry.tokens)
    runner.cache.adopt(other.entry.export(), "session a")
    if is_read:
        runner.evaluate([*told, 9])
    else:
        runner.reset()
    ask(runner, [*told, 9, 8])
    reason, kind = ("restored", "restored") if is_read else ("entry_freed", "miss")
    has(seen[0], reason=reason, run=f"cold-{kind}")


def test_a_draft_that_was_evaluated_and_not_sent_costs_nothing() -> None:
    """An unsent draft loses nothing of the last request, and its used part is not saved."""
    runner, seen = Runner.load("demo", reserve=False), list[Event]()
    Profile(sinks=[seen.append], log_text=True).watch(runner)
    messages = [{"role": "user", "content": "My name is Ana."}]
    answer = "".join(chunk.text for chunk in runner.generate(messages))
    messages.append({"role": "assistant", "content": answer})
    draft = "I have a parrot and much more to say about it"
    runner.evaluate([*messages, {"role": "user", "content": draft}])
    list(runner.generate([*messages, {"role": "user", "content": "I have a dog."}]))
    event = seen[1]
    has(event, outcome="hit", reason=None, divergence=None, lost_tokens=0)
    assert event.saved_tokens == event.entry_tokens == event.matched_tokens
    assert 0 < event.prefetched_tokens < event.prompt_tokens - event.saved_tokens


@pytest.mark.parametrize(
    "drafts", [[], [""], ["you"], ["me", "you"]], ids=["none", "before", "typed", "changed"]
)
def test_what_is_evaluated_in_advance_hides_no_loss(
    family: Any, talk: Callable[..., Any], drafts: list[str]
) -> None:
    """A conversation that begins again: the same reason, place and loss as without it."""
    talking = talk(family.name, log_text=True)
    talking.ask([{"role": "user", "content": "Dear old friend"}], "fine")
    for draft in drafts:
        talking.runner.evaluate([{"role": "user", "content": "Dear " + draft}])
    event = talking.ask([{"role": "user", "content": "Dear you"}], "fine")
    place = {"message": 0, "role": "user", "part": "text"}
    has(event, reason="diverged", outcome="partial", run="warm-partial")
    assert event["divergence"].items() >= place.items()
    assert event["divergence"]["previous"].items() >= place.items()
    assert event["divergence"]["previous"]["text"].startswith("old friend")
    index, saved = event["divergence"]["index"], event["saved_tokens"]
    assert saved <= event["matched_tokens"] == index <= saved + 1
    assert event["displaced_tokens"] == 0  # the words are new
    assert event["missed_tokens"] == max(0, event["matched_tokens"] - event["cached_tokens"])
    assert (event["prefetched_tokens"] > 0) == ("you" in drafts)


def test_what_was_evaluated_in_advance_for_nothing_may_be_what_freed_the_rest() -> None:
    """A draft that leaves the entry early, or cannot be taken back, is what freed the rest."""
    for kind, budget, reason in (("full", 0, "entry_freed"), ("recurrent", 0, "rewind_limited")):
        runner, seen = watched((kind,), checkpoint_budget=budget)
        prompt = list(range(1, 41))
        ask(runner, prompt)
        runner.evaluate([*prompt[:30], 99])
        ask(runner, [*prompt, 98], 2)
        event = seen[-1]
        kept = 30 if kind == "full" else 0
        has(event, reason=reason, saved_tokens=kept, missed_tokens=40 - event.cached_tokens)
        assert event.trim_limited_by == (None if kind == "full" else kind)


def test_a_reset_after_something_was_evaluated_in_advance_says_what_it_cost() -> None:
    """The tokens of the last request count, not those of the draft."""
    runner, seen = watched()
    ask(runner, [1, 2, 3, 4])
    runner.evaluate([1, 2, 9, 9])
    runner.reset()
    ask(runner, [1, 2, 3, 5])
    has(seen[-1], reason="entry_freed", lost_tokens=3, prefetched_tokens=0)


def test_a_shift_moves_what_was_evaluated_in_advance_too() -> None:
    """A full context before the request: the share of the draft is no saving."""
    runner, seen = Runner.load("demo", reserve=False, context=64), list[Event]()
    Profile(sinks=[seen.append]).watch(runner)
    prompt = list(range(1, 41))
    ask(runner, prompt)
    runner.evaluate([*prompt, *range(101, 121)])
    ask(runner, [*prompt, *range(101, 131)], overflow="shift", keep=4)
    event = seen[-1]
    assert event.shifted_tokens > 0
    assert event.prefetched_tokens == 20
    assert event.saved_tokens == event.cached_tokens - 20 == 40 - event.shifted_tokens
