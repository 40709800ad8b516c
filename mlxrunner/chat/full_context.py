"""Say what a full context, or a limit, has cut off, and what to do. This never imports mlx."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mlxrunner.results import Chunk
from mlxrunner.terminal.text import count_of

if TYPE_CHECKING:
    from mlxrunner.chat.conversation import Conversation


def full_context(
    conversation: Conversation, first: int, last: Chunk, options: dict[str, Any]
) -> Iterator[str]:
    """Yield a line for each thing that a full context, or a limit, has cut off from a turn.

    `first` is the first turn that was in the prompt before, and `last` the last chunk of the
    answer. `options` are those of this answer alone.
    """
    usage = last.usage
    if usage is None:
        return
    context = conversation.runner.context
    dropped = usage.cache.shifted_tokens
    left_out = conversation.history.first - first
    if dropped or left_out > 0:
        what = count_of(dropped, "token") if dropped else count_of(left_out, "turn")
        were = "was" if (dropped or left_out) == 1 else "were"
        yield (
            f"(the context of {context} tokens was full: the oldest {what} {were} dropped, and the "
            f"model does not see {'it' if were == 'was' else 'them'} any more; "
            f"{more_room(conversation)})"
        )
    if last.finish_reason == "length":
        most = (conversation.effective | options).get("max_tokens")
        if most is not None and usage.completion_tokens >= most:
            yield (
                f"(cut off at max_tokens {most}: /set max_tokens {2 * most} allows more, "
                f"/retry max_tokens={2 * most} answers again)"
            )
        else:
            yield (
                f"(cut off at the end of the context of {context} tokens: "
                f"{more_room(conversation)})"
            )


def more_room(conversation: Conversation) -> str:
    """Return the commands that make room in a full context."""
    runner = conversation.runner
    longer = f"/set context {min(2 * runner.context, runner.facts.context)} makes it longer, "
    is_longest = runner.context >= runner.facts.context
    return f"{'' if is_longest else longer}/undo takes turns back, /clear all of them"
