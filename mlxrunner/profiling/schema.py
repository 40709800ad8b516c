"""Define the fields of an event: one line of an events file, which describes one request.

`Event` is the only list of these fields. The check of each line that is read, the JSON schema, the
columns of `report --csv` and the table in the docs come from it. The fields are written in the
order of this class. Users read the descriptions here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from mlxrunner.results import with_new_names

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
        "see what gave it up (evicted_by); a reset is the caller's own",
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
        "conversations (--disk-cache-bytes)",
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

    `summary.place_of` names the places.
    """
    part = place.rpartition(": ")[2]
    return PLACE_REMEDIES.get(place, PLACE_REMEDIES.get(part, ""))


def explain_reuse(found: Mapping[str, Any], where: str = "") -> str:
    """Say in one sentence what a request did not reuse, and why.

    `found` holds the counts and causes of a request, by the names of the fields of `Event`. `where`
    is the place where prompt and entry part, such as "token 9, in the text of message 0 (user)".
    """
    ahead, detail = found["prefetched_tokens"], found["evicted_by"]
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
        detail = found["trim_limited_by"]
    sentence = REASONS[found["reason"]].sentence + (f" ({detail})" if detail else "")
    parted = f"; they part at {where}" if where else ""
    return f"{sentence}{parted}; {counts}"


MOST = 2**53
"""The largest count that a float holds exactly."""

if TYPE_CHECKING:
    ReasonName = str
    PartName = str
else:
    ReasonName, PartName = Literal[tuple(REASONS)], Literal[tuple(PARTS)]

Count = Annotated[int, Meta(ge=0, le=MOST)]
Ordinal = Annotated[int, Meta(ge=1, le=MOST)]
Measure = Annotated[float, Meta(ge=0, le=MOST)]
Hash = Annotated[str, Meta(pattern=r"^[0-9a-f]{8}(?!\n)$")]
"""`(?!\\n)`: in Python, `$` also matches before a line end."""


def about(text: str, unit: str | None = None) -> Meta:
    """Describe a field. The JSON schema has its unit, if there is one, as `unit`."""
    return Meta(description=text, extra_json_schema={"unit": unit} if unit else None)


@dataclass
class Side:
    """One side of a divergence: what stands there, from `index` on."""

    message: Annotated[
        Count | None,
        about(
            "Number of the message, from 0. In `previous` the answer counts as one more message. "
            "null: the prompt was not made of messages, or this side has ended."
        ),
    ]
    role: Annotated[
        str | None, about("Its role (system, user, assistant, tool ...); null where message is.")
    ]
    part: Annotated[
        PartName | None,
        about(
            "The part of the message. null: unknown (the prompt was given as token ids), or this "
            "side has ended."
        ),
    ]
    tokens: Annotated[
        list[Hash],
        Meta(max_length=16),
        about(
            "Up to 16 tokens from the index on, each as a keyed hash. Within one process equal "
            "hashes are equal tokens; the key is never stored."
        ),
    ]
    text: Annotated[str | None, about("The same tokens decoded, only with --log-text.")]
    picture: Annotated[
        Ordinal | None,
        about("Number of the picture in its message, from 1; null: no picture begins there."),
    ] = None


@dataclass
class SharedTokens:
    """The last tokens before a divergence, which both sides have."""

    tokens: Annotated[
        list[Hash], Meta(max_length=8), about("Up to 8 tokens, each as a keyed hash.")
    ]
    text: Annotated[str | None, about("The same tokens decoded, only with --log-text.")]


@dataclass
class Divergence:
    """The place where the prompt leaves the entry."""

    index: Annotated[Count, about("Index of the first token that differs.")]
    message: Annotated[
        Count | None,
        about("The message of that token: that of `current`, or of `previous` if the prompt ends."),
    ]
    role: Annotated[str | None, about("The role of that message.")]
    part: Annotated[PartName | None, about("The part of that message.")]
    common: Annotated[SharedTokens, about("The last up to 8 tokens before the index.")]
    previous: Annotated[Side, about("The entry's side, from the index on.")]
    current: Annotated[
        Side, about("The prompt's side, from the index on; the fields are those of `previous`.")
    ]
    picture: Annotated[
        Ordinal | None, about("Number of the picture in that message, from 1; null: none.")
    ] = None

    def place(self) -> str:
        """Say where the prompt leaves the entry: "in the text of message 2 (user)".

        Add the place in the entry if that is another one.
        """
        here = _place(self)
        before = _place(self.previous) if self.previous.part else here
        return here if before == here else f"{here}, where before was {before.removeprefix('in ')}"


@dataclass
class Span:
    """A stretch of a request's time."""

    name: Annotated[
        Literal["tokenize", "lookup", "rewind", "prefill", "decode"], about("Name of the work.")
    ]
    start_s: Annotated[Measure, about("Start, after the start of the request.", "seconds")]
    duration_s: Annotated[Measure, about("Duration.", "seconds")]
    tokens: Annotated[
        Count,
        about(
            "tokenize, lookup: of the prompt; rewind: dropped; prefill: of the chunk; decode: of "
            "the answer after its first.",
            "tokens",
        ),
    ]


@dataclass(kw_only=True)
class Verify:
    """A comparison of the request with the same request run cold (--verify-cache)."""

    equal: Annotated[
        bool | None,
        about(
            "true: the entry was right; false: it was wrong, and was freed; null: untested, since "
            "the effect of one wrong token is within the tolerance."
        ),
    ]
    tokens: Annotated[Count, about("Answer tokens that were compared.", "tokens")]
    first_difference: Annotated[
        Count | None,
        about(
            "Number of the first answer token that differs by more than the tolerance explains; "
            "null: none."
        ),
    ]
    logits_difference: Annotated[Measure, about("Largest difference of the last logits.")]
    tolerance: Annotated[Measure, about("The largest difference that counts as none.")]
    wrong_token: Annotated[
        Measure | None,
        about(
            "Difference of the last logits that one wrong token makes, measured once in a process. "
            "Missing in older events."
        ),
    ] = None
    seconds: Annotated[
        Measure, about("Time of the comparison; it is in no other time of the event.", "seconds")
    ]


@dataclass
class BatchLine:
    """The line of a batch that made a request."""

    number: Annotated[
        Ordinal,
        about(
            "Number of the line among those of all inputs that are not empty, from 1; each try of "
            "it has the same."
        ),
    ]
    lines: Annotated[Ordinal, about("Lines of the input.", "lines")]
    refused: Annotated[
        Count, about("Those of them that can't be run. They make no request.", "lines")
    ]
    order: Annotated[
        Literal["prefix", "input"], about("The order in which the lines run, as of --order.")
    ]


NoteKind = Literal["call-unread", "call-cut", "calls-left-out", "not-strict"]
"""Remarks of a server on an answer."""


@dataclass
class ClientRequest:
    """The request of a client of `mlxrunner serve`."""

    request: Annotated[
        str, about("Id of the request, as in the header x-request-id of its response.")
    ]
    client: Annotated[str, about("Name of the client's program; empty: it does not say.")]
    session: Annotated[
        str | None, about("The client's own name of the conversation; null: it gives none.")
    ]
    rules: Annotated[
        tuple[str, ...], about("Names of the rules of the server that changed the prompt.")
    ] = ()
    cause: Annotated[
        str | None,
        about("Known cause on the client's side for which little was reused; null: none is known."),
    ] = None
    remedy: Annotated[str | None, about("What to do about the cause; null without one.")] = None
    message: Annotated[
        Count | None, about("Number of the message that the cause is about, from 0; null: none.")
    ] = None
    note: Annotated[
        NoteKind | None,
        about(
            "Remark on the answer; null without one. call-unread: a tool call is in the text, "
            "because it could not be read; call-cut: because the answer ended within it; "
            "calls-left-out: the client wanted one call, and there were more; not-strict: calls of "
            "strict tools can't be held to their schemas in this model's form."
        ),
    ] = None
    replaced: Annotated[
        tuple[str, ...],
        about(
            "Types of the parts and items of the conversation that stand in the prompt as short "
            "texts, because the model can't be shown them: picture, document, web_search_call ... "
            "Missing in older events."
        ),
    ] = ()


@dataclass
class DraftCounts:
    """Tokens that one source guessed of the answer."""

    source: Annotated[
        Literal["lookup", "earlier", "form", "model"],
        about(
            "lookup: the text itself, where it repeats; earlier: the text that the entry held "
            "before; form: what a schema or choices leave no other text for; model: a draft model."
        ),
    ]
    drafted: Annotated[Count, about("Tokens that were checked.", "tokens")]
    accepted: Annotated[Count, about("Tokens that were right.", "tokens")]


@dataclass
class Eviction:
    """A conversation that was given up to make room for the request."""

    tokens: Annotated[Count, about("Tokens that it had.", "tokens")]
    slot: Annotated[Count, about("Number of the slot that held it.")]
    cause: Annotated[
        Literal["slot", "memory"],
        about("The need of the request: slot, a slot of its own; memory, the bytes."),
    ]
    parked: Annotated[
        bool, about("true: it is on disk, and comes back with its next request; false: it is lost.")
    ]


def _place(side: Side | Divergence) -> str:
    """Return the place of a side in words."""
    if side.part is None:
        return (
            "in a prompt without known parts"
            if side.message is None
            else f"in message {side.message}"
        )
    part = f"in {part_of(side)}"
    if side.message is None or side.part == "generation_prompt":
        return part
    return f"{part} of message {side.message} ({side.role})"


def part_of(side: Side | Divergence) -> str:
    """Return the part of a side in words: "the text", "picture 2". It has to be known."""
    assert side.part is not None
    return PARTS[side.part] if side.picture is None else f"picture {side.picture}"


SCHEMA: Literal["mlxrunner/events"] = "mlxrunner/events"
VERSION: Literal[1] = 1
SLOWEST_RATE = 0.05
"""The least rate in tokens per second: rates are rounded to tenths, so a smaller one is 0."""


@dataclass(kw_only=True)
class Event:
    """The tokens that one request reused, the reason why not more, and the cost."""

    schema: Annotated[Literal["mlxrunner/events"], about("The kind of this line.")]
    version: Annotated[
        Literal[1], about("Version of the fields. Readers skip and count lines of other versions.")
    ]
    id: Annotated[
        str,
        Meta(pattern=r"^[0-9a-f]{12,20}(?!\n)$"),
        about("Identifies the request: its number, and then its process."),
    ]
    time: Annotated[
        str,
        Meta(extra_json_schema={"format": "date-time"}),
        about("Start of the request: UTC, RFC 3339 with microseconds."),
    ]
    process: Annotated[
        str,
        Meta(pattern=r"^[0-9a-f]{8}(?!\n)$"),
        about("Identifies the profile that wrote the line: one per process and runner."),
    ]
    command: Annotated[str, about("generate, chat, batch, serve, or python for the library.")]
    model: Annotated[str, about("The model as it was named.")]
    max_sequences: Annotated[
        Ordinal,
        about(
            "Requests that the runner can run at once. With more than one, the times of requests "
            "overlap.",
            "requests",
        ),
    ]
    fingerprint: Annotated[
        str,
        Meta(pattern=r"^[0-9a-f]{16}(?!\n)$"),
        about(
            "Digest of the model's architecture, of the shapes and a sample of its weights, and of "
            "the options that decide what is stored; not of its tokenizer and chat template. Times "
            "of equal fingerprints can be compared."
        ),
    ]
    number: Annotated[Ordinal, about("Number of the request among those of `process`, from 1.")]
    prompt_kind: Annotated[
        Literal["messages", "text", "tokens"], about("The form in which the prompt was given.")
    ]
    messages: Annotated[
        Ordinal | None,
        about("Messages in the prompt; null if it was not made of messages.", "messages"),
    ]
    finish: Annotated[
        Literal["stop", "length", "interrupted", "error"],
        about(
            "Reason for the end of the request. interrupted: by Ctrl-C, a cancelled request or a "
            "closed iterator; error: by an exception."
        ),
    ]
    error: Annotated[
        str | None, about("Name of the exception if finish is error; its text is never logged.")
    ]
    entry_tokens: Annotated[
        Count, about("Length of the entry, as the request before had left it.", "tokens")
    ]
    entry_tokens_after: Annotated[Count, about("Length of the entry after the request.", "tokens")]
    prompt_tokens: Annotated[Count, about("Length of the prompt.", "tokens")]
    matched_tokens: Annotated[
        Count,
        about(
            "Longest common prefix of the prompt and the entry, as the request before had left it.",
            "tokens",
        ),
    ]
    cached_tokens: Annotated[
        Count,
        about(
            "Prompt tokens that this request did not evaluate: saved_tokens + prefetched_tokens.",
            "tokens",
        ),
    ]
    prefetched_tokens: Annotated[
        Count,
        about(
            "Cached tokens that were evaluated in advance, after the request before, as a chat "
            "does while its user types. Somebody had to evaluate them, so they are not saved.",
            "tokens",
        ),
    ]
    evaluated_tokens: Annotated[
        Count,
        about(
            "Prompt tokens that this request ran through the model: prompt_tokens - cached_tokens, "
            "or fewer if its prefill was ended early.",
            "tokens",
        ),
    ]
    trimmed_tokens: Annotated[
        Count, about("Tokens dropped from the entry to get back to the cached ones.", "tokens")
    ]
    completion_tokens: Annotated[Count, about("Length of the answer.", "tokens")]
    shifted_tokens: Annotated[
        Count, about("Tokens dropped from the middle because the context was full.", "tokens")
    ]
    reevaluated_tokens: Annotated[
        Count,
        about(
            "Tokens evaluated again because of a shift, where a layer could not move them.",
            "tokens",
        ),
    ]
    lost_tokens: Annotated[
        Count,
        about(
            "Prompt tokens evaluated because of `reason`: how many more could have been reused at "
            "most without it. For a line of a batch: those of its tokens that earlier lines had "
            "evaluated, which another order or a cache could have kept; the sum is all that was "
            "evaluated beyond the tree of all prefixes. 0 for empty, prompt_shorter, interrupted "
            "(the rest had to be evaluated in any case) and restored.",
            "tokens",
        ),
    ]
    outcome: Annotated[
        Literal["hit", "partial", "miss"],
        about(
            "hit: all that could be reused was; partial: less; miss: nothing. It is judged by "
            "saved_tokens: what was evaluated in advance makes no hit."
        ),
    ]
    reason: Annotated[
        ReasonName | None,
        about(
            "The reason for which not more was reused, or restored if the entry came from a file; "
            "null: nothing was lost. mlxrunner.profiling.schema has a sentence and a remedy for "
            "each."
        ),
    ]
    evicted_by: Annotated[
        str | None,
        about(
            "The cause of a lost entry (entry_freed, verify_failed), the change (model_changed: "
            "'demo -> other'; options_changed: 'kv_bits: None -> 8'), the request that the entry "
            "made room for (evicted: 'request 12', as in its `submitted`, 'the budget', or "
            "'disk_cache_bytes': it was offloaded to disk and evicted there), or the file that the "
            "entry came from (restored)."
        ),
    ]
    trim_limited_by: Annotated[
        str | None, about("Kind of the layer that could not go back to the match.")
    ]
    checkpoint: Annotated[
        Count | None, about("Offset of the checkpoint that was used; null if none was.", "tokens")
    ]
    used_bytes: Annotated[
        Count, about("Part of the entry's caches that holds tokens, after the request.", "bytes")
    ]
    cache_bytes: Annotated[
        Count, about("Bytes allocated for caches and checkpoints, after the request.", "bytes")
    ]
    peak_bytes: Annotated[Count, about("Peak of all MLX memory during the request.", "bytes")]
    saved_tokens: Annotated[
        Count,
        about(
            "Prompt tokens that the entry saved from being evaluated again: cached_tokens - "
            "prefetched_tokens.",
            "tokens",
        ),
    ]
    saved_s: Annotated[
        Measure | None,
        about(
            "Estimated time to evaluate the saved tokens, from a curve fitted to the prefills of "
            "this process; null while too little was measured.",
            "seconds",
        ),
    ]
    run: Annotated[
        str,
        Meta(pattern=r"^(cold|warm)-(miss|partial|hit|restored)(?!\n)$"),
        about(
            "cold: the first request of its process, warm: a later one; then the outcome, or "
            "restored for the first request on an entry that came from a file."
        ),
    ]
    divergence: Annotated[
        Divergence | None,
        about(
            "The place where the prompt leaves the entry; null if it does not (nothing was lost, "
            "or there was no entry)."
        ),
    ]
    tokenize_s: Annotated[Measure, about("Time to render and tokenize the prompt.", "seconds")]
    lookup_s: Annotated[
        Measure,
        about(
            "Time to find the common prefix and rewind the layers; the spans tell the two apart.",
            "seconds",
        ),
    ]
    prefill_s: Annotated[
        Measure | None,
        about("Time from the first chunk to the first token; null if there was none.", "seconds"),
    ]
    ttft_s: Annotated[
        Measure | None,
        about("Time from the request to the first token; null if there was none.", "seconds"),
    ]
    decode_s: Annotated[
        Measure | None,
        about("Time from the first token to the last; null if there was none.", "seconds"),
    ]
    total_s: Annotated[Measure, about("Time from the request to its end.", "seconds")]
    profile_s: Annotated[
        Measure, about("Time to make this event; it is in no other time of the event.", "seconds")
    ]
    prefill_rate: Annotated[
        Measure | None,
        about("Speed over the prompt tokens that were evaluated; null if unknown.", "tokens/s"),
    ]
    decode_rate: Annotated[
        Measure | None,
        about(
            "Speed over the answer without its first token, which belongs to the prefill; null "
            "with fewer than two tokens.",
            "tokens/s",
        ),
    ]
    request_bytes: Annotated[
        Count,
        about(
            "Peak of this request alone: peak_bytes less the memory in use when it began.", "bytes"
        ),
    ]
    spans: Annotated[
        list[Span],
        about(
            "The stretches of the request, by their begin. There is a prefill span for each chunk, "
            "the last of which ends with the first token; after a shift that evaluated tokens "
            "again, some lie inside decode."
        ),
    ]
    verify: Annotated[
        Verify | None,
        about("The same request run again cold (--verify-cache); null if it was not chosen."),
    ]
    line: Annotated[
        BatchLine | None,
        about("The line of a batch; null for other requests. Missing in older events."),
    ] = None
    submitted: Annotated[
        Ordinal | None,
        about(
            "Number of the request among those that a runner of several at once began, from 1; "
            "null for a runner of one at a time. Missing in older events."
        ),
    ] = None
    restored_tokens: Annotated[
        Count,
        about(
            "Cached tokens that came back from disk, where the conversation had been parked. "
            "Missing in older events.",
            "tokens",
        ),
    ] = 0
    draft_passes: Annotated[
        Count,
        about(
            "Forward passes that checked guessed tokens of the answer, several at once. Missing in "
            "older events."
        ),
    ] = 0
    drafts: Annotated[
        tuple[DraftCounts, ...],
        about("Guessed tokens of the answer, by their source. Missing in older events."),
    ] = ()
    evicted: Annotated[
        tuple[Eviction, ...],
        about(
            "The conversations that were given up to make room for this request. Missing in older "
            "events."
        ),
    ] = ()
    caller: Annotated[
        ClientRequest | None,
        about(
            "The client of `mlxrunner serve` and its request; null for other commands. Missing in "
            "older events."
        ),
    ] = None

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Event:
        """Check a parsed line of an events file and return its event. Drop unknown fields.

        A field may have its name of 0.2.

        Raise ValueError, with the name of the field, if a field is missing or has an impossible
        value.
        """
        return msgspec.convert(with_new_names(line), cls).checked()

    def checked(self) -> Event:
        """Return the event itself.

        Raise ValueError if its counts can't belong to one prompt, or its rate can't have been
        measured.
        """
        saved, ahead, cached = self.saved_tokens, self.prefetched_tokens, self.cached_tokens
        evaluated, prompt, lost = self.evaluated_tokens, self.prompt_tokens, self.lost_tokens
        if saved + ahead != cached:
            raise ValueError(f"saved {saved} + ahead {ahead} tokens are not the {cached} cached")
        if cached + evaluated > prompt:
            raise ValueError(f"cached {cached} + evaluated {evaluated} tokens exceed {prompt}")
        if lost > evaluated + ahead:
            raise ValueError(f"lost {lost} tokens exceed evaluated {evaluated} + ahead {ahead}")
        if 0 < (self.prefill_rate or 0) < SLOWEST_RATE:
            raise ValueError(f"prefill_rate {self.prefill_rate} is below {SLOWEST_RATE}")
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, nested ones too, in the order in which they are written."""
        return asdict(self)

    def explain(self) -> str:
        """Say in one sentence what was not reused, why, and where prompt and entry part.

        The sentence holds names from the file (roles, kinds, what freed the entry) as they are.
        Filter them before they reach a terminal.
        """
        parted = self.divergence
        where = f"token {parted.index}, {parted.place()}" if parted else ""
        return explain_reuse(vars(self), where)


def event_schema() -> dict[str, Any]:
    """Return the JSON schema of an event (draft 2020-12).

    It allows no unknown fields, although readers of events do.
    """
    _, parts = msgspec.json.schema_components([Event], ref_template="#/$defs/{name}")
    for part in parts.values():
        part["additionalProperties"] = False
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA,
        "title": "mlxrunner event",
        "description": f"One line of an events file. Version {VERSION}.",
    }
    event = parts.pop("Event")
    return {**event, **head, "$defs": parts}


def field_rows() -> list[tuple[str, str, str]]:
    """List (name, unit, description) of each field for the docs.

    The fields of a nested object follow it once: `divergence.index`, `spans[].name`.
    """
    schema = event_schema()
    parts = schema["$defs"]

    def rows(path: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
        for name, about_it in fields.items():
            yield f"{path}{name}", about_it.get("unit", ""), about_it["description"]
            dot = "[]." if about_it.get("type") == "array" else "."
            for one in (about_it, about_it.get("items", {}), *about_it.get("anyOf", ())):
                part = parts.pop(one.get("$ref", "").removeprefix("#/$defs/"), None)
                if part is not None:
                    yield from rows(f"{path}{name}{dot}", part["properties"])

    return list(rows("", schema["properties"]))
