"""Why a request reused no more than it did: the closed list, each with a sentence and a remedy. Plain data, no tensors.

`reason` of `Usage` and of every event is one of `REASONS`, or None where nothing was lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PARTS = {
    "template_header": "the template's header",
    "text": "the text",
    "thinking": "the thinking block",
    "tools": "the tool list",
    "message_end": "the end mark",
    "generation_prompt": "the generation prompt",
}
"""Parts of a message, as `divergence.part` names them."""


@dataclass(frozen=True)
class Reason:
    """`sentence`: what happened; `remedy`: what to change, empty where there is nothing to mend."""

    name: str
    sentence: str
    remedy: str = ""


_ALL = (
    Reason("empty", "there was no entry yet"),
    Reason(
        "no_common_token",
        "already the first token differs from the entry's",
        "keep what comes first the same: the same template, the same BOS, the same system prompt",
    ),
    Reason(
        "diverged",
        "the prompt leaves the entry in the middle",
        "put what changes (dates, retrieved text, counters) at the end, and send earlier turns back as they were",
    ),
    Reason("prompt_shorter", "the prompt is the beginning of the entry, which was rewound to it"),
    Reason(
        "rewind_limited",
        "a layer could not be rewound as far back as the match",
        "a larger --rewind-slack, a smaller --checkpoint-interval, or a larger --checkpoint-budget",
    ),
    Reason(
        "entry_freed",
        "the entry had been given up",
        "see what gave it up (freed_by); a reset is the caller's own",
    ),
    Reason(
        "model_changed",
        "another model was loaded: what the one before it evaluated is of no use to it",
        "ask one model all its prompts before going on to the next, or run two processes",
    ),
    Reason(
        "options_changed",
        "the model was loaded again with options that change what is stored",
        "choose --context, --kv-bits and the others once, at start",
    ),
    Reason(
        "interrupted",
        "the request before it was ended before its prompt was evaluated, so the rest of it was missing",
    ),
    Reason(
        "verify_failed",
        "a check against a cold run had found the entry wrong, and freed it",
        "this is a bug or broken memory: please report it with the event, and run with --verify-cache 1 to see how often",
    ),
    Reason("restored", "the entry came from a file"),
    Reason(
        "batch_order",
        "an earlier line of the batch had evaluated it, and the entry had gone on to others",
        "run the lines in prefix order (--order prefix, which is the default): it evaluates each prefix once",
    ),
    Reason(
        "line_failed",
        "it had been evaluated, and was lost because a line failed or was tried again",
        "see why lines failed: the errors are in the output",
    ),
    Reason(
        "side_by_side",
        "lines that ran at the same time evaluated the same few tokens, instead of waiting for each other",
    ),
)
PARTING = ("diverged", "no_common_token", "rewind_limited")
"""These may have cost nothing: of a line of a batch, where the rest of the prompt is new to all lines."""
BATCH = ("batch_order", "line_failed", "side_by_side")
"""Losses of a line to other lines: where it parts from the entry is no matter of its text."""
REASONS: Mapping[str, Reason] = {reason.name: reason for reason in _ALL}


def explain(event: Mapping[str, Any]) -> str:
    """One sentence on what `event` (a dict of an events file, or of a Usage) did not reuse, and where; plain text of this program's making.

    Names that come from the file (roles, kinds, what freed the entry) are in it as they are: filter them before a terminal.
    """
    ahead = event["ahead_tokens"]
    counts = (
        f"{event['cached_tokens'] - ahead} of {event['prompt_tokens']} prompt tokens were reused"
    )
    if ahead:
        counts += f", {ahead} had been evaluated in advance"
    if event["reason"] is None:
        return f"nothing was lost: {counts}"
    sentence = REASONS[event["reason"]].sentence
    if event["reason"] in PARTING and not event["lost_tokens"]:
        counts += "; nothing was lost by that"
    detail = (
        event["rewind_limited_by"] if event["reason"] == "rewind_limited" else event["freed_by"]
    )
    if detail:
        sentence += f" ({detail})"
    if divergence := event.get("divergence"):
        sentence += f"; they part at token {divergence['index']}, {place(divergence)}"
    return f"{sentence}; {counts}"


def place(divergence: Mapping[str, Any]) -> str:
    """Where a divergence lies: "in the text of message 2 (user)", and what was there before, if that is something else."""
    here = _place(divergence)
    before = _place(divergence["previous"]) if divergence["previous"]["part"] else here
    return here if before == here else f"{here}, where before was {before.removeprefix('in ')}"


def _place(side: Mapping[str, Any]) -> str:
    if side["part"] is None:
        return (
            "in a prompt without known parts"
            if side["message"] is None
            else f"in message {side['message']}"
        )
    part = f"in {PARTS[side['part']]}"
    if side["message"] is None or side["part"] == "generation_prompt":
        return part
    return f"{part} of message {side['message']} ({side['role']})"
