"""Commands that say what was reused, what it saved, and why it was not more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mlxrunner.chat.commands import Command
from mlxrunner.events import Usage
from mlxrunner.profiling.reasons import REASONS
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
    early = min(conversation.evaluated_ahead, last.cached_tokens)
    ahead = f" ({early} of them while you read and typed)" if early else ""
    yield "last turn", f"{last.outcome}{reason}: {last.prompt_tokens} prompt tokens, {last.matched_tokens} matched"
    yield "", f"{last.cached_tokens} cached{ahead}, {last.evaluated_tokens} evaluated, {last.trimmed_tokens} trimmed"
    yield "", f"first token after {last.ttft_s * 1000:.0f} ms, prefill {last.prefill_rate:.0f} tokens/s"
    yield "", f"answer of {last.completion_tokens} tokens, {last.decode_rate:.0f} tokens/s"
    prompt, cached = sum(u.prompt_tokens for u in usages), sum(u.cached_tokens for u in usages)
    yield (
        "session",
        f"{len(usages)} turn{'s' * (len(usages) != 1)}; {cached} of {prompt} prompt tokens reused ({cached / prompt:.0%})",
    )
    yield "", f"which saved about {saved_seconds(usages):.1f} s"
    entry = conversation.runner.entry
    yield "entry", f"{len(entry.tokens)} of {conversation.runner.context} tokens"
    yield "", f"{size(entry.used_bytes)} used, {size(entry.nbytes)} allocated"
    yield "history", f"{conversation.policy}; drift from the template: {conversation.drift() or 'not known'}"


def saved_seconds(usages: Sequence[Usage]) -> float:
    """What evaluating the reused tokens would have taken, at the best rate that was seen: rather too little than too much."""
    rate = max((usage.prefill_rate for usage in usages), default=0.0)
    return sum(usage.cached_tokens for usage in usages) / rate if rate else 0.0


def explain(chat: Chat, argument: str) -> None:
    if not chat.conversation.usages:
        chat.say("no turn yet")
        return
    for line in explanation(chat.conversation.usages[-1]):
        chat.say(line)


def explanation(usage: Usage) -> list[str]:
    """Why a turn did not reuse more, in words."""
    lines = [f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens were reused and {usage.evaluated_tokens} evaluated"]
    if usage.reason is None:
        lines.append("nothing was lost: all that had been evaluated was reused, and only what is new was evaluated")
    else:
        reason, detail = REASONS[usage.reason], usage.rewind_limited_by if usage.reason == "rewind_limited" else usage.freed_by
        lines.append(reason.sentence + (f" ({detail})" if detail else ""))
        if reason.remedy:
            lines.append(f"what would help: {reason.remedy}")
    lost = usage.matched_tokens - usage.cached_tokens
    if lost > 1:
        lines.append(f"{lost} tokens that were known were evaluated once more")
    if usage.checkpoint is not None:
        lines.append(f"a checkpoint at token {usage.checkpoint} was used to go back")
    if usage.trimmed_tokens:
        lines.append(f"{usage.trimmed_tokens} tokens of the entry were trimmed, as the prompt goes on otherwise")
    if usage.shifted_tokens:
        again = f", {usage.reevaluated_tokens} evaluated again for it" if usage.reevaluated_tokens else ""
        lines.append(f"the context was full: {usage.shifted_tokens} of the oldest tokens were dropped{again}")
    return lines


COMMANDS = (
    Command("/stats", "", "what the last turn and the session reused and evaluated, and what that saved", stats),
    Command("/explain", "", "why the last turn did not reuse more", explain),
)
