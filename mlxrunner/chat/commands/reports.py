"""Commands that show what was reused, what that saved, and why it was not more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mlxrunner.chat.commands.table import ChatContext, Command
from mlxrunner.profiling.schema import explain_reuse, remedy
from mlxrunner.results import Usage
from mlxrunner.system.speed import PrefillCurve
from mlxrunner.terminal.text import count_of, seconds, size

if TYPE_CHECKING:
    from mlxrunner.chat.conversation import Conversation


def stats(chat: ChatContext, argument: str) -> None:
    conversation, usages = chat.conversation, chat.conversation.usages
    if not usages:
        chat.say("no turn yet")
        return
    for name, line in table(conversation, usages):
        chat.say(f"{name:11}{line}")


def table(conversation: Conversation, usages: Sequence[Usage]) -> Iterator[tuple[str, str]]:
    """Yield the lines of /stats, each with its title."""
    last = usages[-1]
    why = last.cache.evicted_by or last.cache.trim_limited_by
    reason = f" ({last.reason}{f': {why}' if why else ''})" if last.reason else ""
    ahead = (
        f" ({last.cache.prefetched_tokens} of them while you read and typed)"
        if last.cache.prefetched_tokens
        else ""
    )
    cache, timing = last.cache, last.timing
    yield (
        "last turn",
        f"{last.outcome}{reason}: {last.prompt_tokens} prompt tokens, "
        f"{cache.matched_tokens} matched",
    )
    yield (
        "",
        f"{last.cached_tokens} cached{ahead}, {last.evaluated_tokens} evaluated, "
        f"{cache.trimmed_tokens} trimmed",
    )
    yield (
        "",
        f"first token after {timing.ttft_s * 1000:.0f} ms, "
        f"prefill {timing.prefill_rate:.0f} tokens/s",
    )
    yield (
        "",
        f"answer of {last.completion_tokens} tokens, {last.timing.decode_rate:.0f} tokens/s"
        f"{drafted(last)}",
    )
    prompt, cached = (
        sum(u.prompt_tokens for u in usages),
        sum(u.cached_tokens - u.cache.prefetched_tokens for u in usages),
    )
    yield (
        "session",
        f"{count_of(len(usages), 'turn')}; {cached} of {prompt} prompt tokens reused "
        f"({cached / prompt:.0%})",
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
    """Return the seconds that evaluating the reused tokens in chunks of `step` would have taken.

    The measured prefills give the estimate.
    """
    curve, saved = PrefillCurve(), 0.0
    for usage in usages:
        if usage.evaluated_tokens and not usage.cache.reevaluated_tokens:
            curve.add(
                usage.cached_tokens,
                usage.cached_tokens + usage.evaluated_tokens,
                usage.timing.prefill_s,
            )
        saved += curve.seconds(usage.cached_tokens - usage.cache.prefetched_tokens, step) or 0.0
    return saved


def drafted(usage: Usage) -> str:
    """Return how many tokens of an answer were guessed right, or "" if none was guessed."""
    if not usage.drafts:
        return ""
    right = sum(use.accepted for use in usage.drafts)
    passes = "1 pass" if usage.draft_passes == 1 else f"{usage.draft_passes} passes"
    return f", {right} of them guessed right in {passes}"


def explain(chat: ChatContext, argument: str) -> None:
    if not chat.conversation.usages:
        chat.say("no turn yet")
        return
    for line in explanation(chat.conversation.usages[-1]):
        chat.say(line)


def explanation(usage: Usage) -> list[str]:
    """Return lines that say why a turn did not reuse more."""
    lines = [explain_reuse(usage.as_dict())]
    if mend := remedy(usage.reason):
        lines.append(f"what would help: {mend}")
    if usage.cache.lost_tokens:
        lines.append(f"{usage.cache.lost_tokens} tokens were evaluated that need not have been")
    if usage.cache.checkpoint is not None:
        lines.append(f"a checkpoint at token {usage.cache.checkpoint} was used to go back")
    if usage.cache.trimmed_tokens:
        lines.append(
            f"{usage.cache.trimmed_tokens} tokens of the entry were trimmed, "
            "as the prompt goes on otherwise"
        )
    if usage.cache.shifted_tokens:
        again = (
            f", {usage.cache.reevaluated_tokens} evaluated again for it"
            if usage.cache.reevaluated_tokens
            else ""
        )
        lines.append(
            f"the context was full: {usage.cache.shifted_tokens} of the oldest tokens "
            f"were dropped{again}"
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
