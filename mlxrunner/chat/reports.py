"""Commands that say what was reused, what it saved, and why it was not more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mlxrunner.chat.commands import Command
from mlxrunner.events import Usage
from mlxrunner.profiling import reasons
from mlxrunner.profiling.curve import PrefillCurve
from mlxrunner.profiling.wording import remedy, seconds
from mlxrunner.terminal import size

if TYPE_CHECKING:
    from mlxrunner.chat.conversation import Conversation
    from mlxrunner.chat.repl import Chat


def stats(chat: Chat, argument: str) -> None:
    conversation, usages = chat.conversation, chat.conversation.usages
    if not usages:
        chat.say("no turn yet")
        return
    for name, line in table(conversation, usages):
        chat.say(f"{name:11}{line}")


def table(conversation: Conversation, usages: Sequence[Usage]) -> Iterator[tuple[str, str]]:
    """The lines of /stats."""
    last = usages[-1]
    why = last.freed_by or last.rewind_limited_by
    reason = f" ({last.reason}{f': {why}' if why else ''})" if last.reason else ""
    ahead = f" ({last.ahead_tokens} of them while you read and typed)" if last.ahead_tokens else ""
    yield (
        "last turn",
        f"{last.outcome}{reason}: {last.prompt_tokens} prompt tokens, {last.matched_tokens} matched",
    )
    yield (
        "",
        f"{last.cached_tokens} cached{ahead}, {last.evaluated_tokens} evaluated, {last.trimmed_tokens} trimmed",
    )
    yield (
        "",
        f"first token after {last.ttft_s * 1000:.0f} ms, prefill {last.prefill_rate:.0f} tokens/s",
    )
    yield "", f"answer of {last.completion_tokens} tokens, {last.decode_rate:.0f} tokens/s"
    prompt, cached = (
        sum(u.prompt_tokens for u in usages),
        sum(u.cached_tokens - u.ahead_tokens for u in usages),
    )
    yield (
        "session",
        f"{len(usages)} turn{'s' * (len(usages) != 1)}; {cached} of {prompt} prompt tokens reused ({cached / prompt:.0%})",
    )
    yield (
        "",
        f"which saved about {seconds(saved_seconds(usages, conversation.runner.prefill_step))}",
    )
    entry = conversation.runner.entry
    yield "entry", f"{len(entry.tokens)} of {conversation.runner.context} tokens"
    yield "", f"{size(entry.used_bytes)} used, {size(entry.nbytes)} allocated"
    yield (
        "history",
        f"{conversation.policy}; drift from the template: {conversation.drift() or 'not known'}",
    )


def saved_seconds(usages: Sequence[Usage], step: int) -> float:
    """What evaluating the reused tokens would have taken, in chunks of `step`, as far as the prefills that were seen can tell."""
    curve, saved = PrefillCurve(), 0.0
    for usage in usages:
        if usage.evaluated_tokens and not usage.reevaluated_tokens:
            curve.add(
                usage.cached_tokens, usage.cached_tokens + usage.evaluated_tokens, usage.prefill_s
            )
        saved += curve.seconds(usage.cached_tokens - usage.ahead_tokens, step) or 0.0
    return saved


def explain(chat: Chat, argument: str) -> None:
    if not chat.conversation.usages:
        chat.say("no turn yet")
        return
    for line in explanation(chat.conversation.usages[-1]):
        chat.say(line)


def explanation(usage: Usage) -> list[str]:
    """Why a turn did not reuse more, in words."""
    lines = [reasons.explain(usage.as_dict())]
    if mend := remedy(usage.reason):
        lines.append(f"what would help: {mend}")
    if usage.lost_tokens:
        lines.append(f"{usage.lost_tokens} tokens were evaluated that need not have been")
    if usage.checkpoint is not None:
        lines.append(f"a checkpoint at token {usage.checkpoint} was used to go back")
    if usage.trimmed_tokens:
        lines.append(
            f"{usage.trimmed_tokens} tokens of the entry were trimmed, as the prompt goes on otherwise"
        )
    if usage.shifted_tokens:
        again = (
            f", {usage.reevaluated_tokens} evaluated again for it"
            if usage.reevaluated_tokens
            else ""
        )
        lines.append(
            f"the context was full: {usage.shifted_tokens} of the oldest tokens were dropped{again}"
        )
    return lines


COMMANDS = (
    Command(
        "/stats",
        "",
        "what the last turn and the session reused and evaluated, and what that saved",
        stats,
    ),
    Command("/explain", "", "why the last turn did not reuse more", explain),
)
