"""Define the reasons why a request reused no more than it did, each with a sentence and a remedy.

`reason` of `Usage` and of every event is one of `REASONS`, or None if nothing was lost. No tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PARTS = {
    "template_header": "the template's header",
    "text": "the text",
    "picture": "a picture",
    "thinking": "the thinking block",
    "tools": "the tool list",
    "message_end": "the end mark",
    "generation_prompt": "the generation prompt",
}
"""The parts of a message, as `divergence.part` names them, in words."""


@dataclass(frozen=True)
class Reason:
    """A reason for a loss of tokens."""

    name: str
    sentence: str
    """The sentence that says what happened."""
    remedy: str = ""
    """The change that helps; empty if there is nothing to mend."""


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
        "put what changes (dates, retrieved text, counters) at the end, and send earlier turns "
        "back as they were",
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
        "the request before it was ended before its prompt was evaluated, so the rest of it was "
        "missing",
    ),
    Reason(
        "verify_failed",
        "a check against a cold run had found the entry wrong, and freed it",
        "this is a bug or broken memory: please report it with the event, and run with "
        "--verify-cache 1 to see how often",
    ),
    Reason("restored", "the entry came from a file"),
    Reason(
        "evicted",
        "it had been evaluated, and given up to make room for another request",
        "more memory or more slots (--memory, --slots), or more bytes on disk for parked "
        "conversations (--park-bytes)",
    ),
    Reason(
        "batch_order",
        "an earlier line of the batch had evaluated it, and the entry had gone on to others",
        "run the lines in prefix order (--order prefix, which is the default): it evaluates each "
        "prefix once",
    ),
    Reason(
        "line_failed",
        "it had been evaluated, and was lost because a line failed or was tried again",
        "see why lines failed: the errors are in the output",
    ),
    Reason(
        "side_by_side",
        "lines that ran at the same time evaluated the same few tokens, instead of waiting for "
        "each other",
    ),
)
PARTING = ("diverged", "no_common_token", "rewind_limited")
"""The reasons that may cost nothing, as for a line of a batch whose rest is new to all lines."""
BATCH = ("batch_order", "line_failed", "side_by_side")
"""The losses of a line to other lines, which no change of its text mends."""
REASONS: Mapping[str, Reason] = {reason.name: reason for reason in _ALL}
"""All reasons by name."""


PLACE_REMEDIES = {
    "system: text": (
        "keep the system prompt the same; what changes (a date, retrieved text) belongs into the "
        "last message"
    ),
    "text": (
        "send earlier messages back to the letter as they were; what changes belongs into the last "
        "message"
    ),
    "picture": "send earlier pictures back as they were; another one belongs into the last message",
    "thinking": (
        "the template leaves out earlier thinking: mlxrunner simulate says what keeping it would do"
    ),
    "tools": "send the same tools, in the same order and words, from the first request on",
    "template header": (
        "the message has another role, or the template's own text changes (a date, say): send the "
        "same messages, and fix the template's variables"
    ),
    "message end": (
        "a message goes on where it had ended before: send earlier messages back as they were"
    ),
    "generation prompt": (
        "the answer had begun otherwise: choose options of the template (thinking or not) once"
    ),
}
"""The remedies by the part of the message, or by role and part."""


def remedy(reason: str | None) -> str:
    """Return the change that helps against a reason; empty if there is nothing to mend."""
    return REASONS[reason].remedy if reason is not None else ""


def place_remedy(place: str) -> str:
    """Return the change that helps if tokens are lost at `place`; empty if none is known.

    `aggregate.place_of` names the places.
    """
    part = place.rpartition(": ")[2]
    return PLACE_REMEDIES.get(place, PLACE_REMEDIES.get(part, ""))


def explain(found: Mapping[str, Any], where: str = "") -> str:
    """Say in one sentence what a request did not reuse, and why.

    `found` holds the counts and causes of a request, by the names of the fields of `Event`. `where`
    is the place where prompt and entry part, such as "token 9, in the text of message 0 (user)".
    """
    ahead, detail = found["ahead_tokens"], found["freed_by"]
    counts = (
        f"{found['cached_tokens'] - ahead} of {found['prompt_tokens']} prompt tokens were reused"
    )
    if ahead:
        counts += f", {ahead} had been evaluated in advance"
    if found["reason"] is None:
        return f"nothing was lost: {counts}"
    if found["reason"] in PARTING and not found["lost_tokens"]:
        counts += "; nothing was lost by that"
    if found["reason"] == "rewind_limited":
        detail = found["rewind_limited_by"]
    sentence = REASONS[found["reason"]].sentence + (f" ({detail})" if detail else "")
    parted = f"; they part at {where}" if where else ""
    return f"{sentence}{parted}; {counts}"
