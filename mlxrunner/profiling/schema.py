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
            "Number of the message, from 0; the answer in `previous` counts as one. null: the "
            "prompt has no messages, or this side has ended."
        ),
    ]
    role: Annotated[str | None, about("Role of the message, such as user; null where message is.")]
    part: Annotated[
        PartName | None,
        about("Part of the message; null: unknown, or this side has ended."),
    ]
    tokens: Annotated[
        list[Hash],
        Meta(max_length=16),
        about(
            "Up to 16 tokens from the index on, as keyed hashes. Within one process, equal "
            "hashes are equal tokens; the key is never stored."
        ),
    ]
    text: Annotated[str | None, about("The same tokens as text, only with --log-text.")]
    picture: Annotated[
        Ordinal | None,
        about("Number of the picture in its message, from 1; null: no picture."),
    ] = None


@dataclass
class SharedTokens:
    """The last tokens before a divergence, which both sides have."""

    tokens: Annotated[list[Hash], Meta(max_length=8), about("Up to 8 tokens, as keyed hashes.")]
    text: Annotated[str | None, about("The same tokens as text, only with --log-text.")]


@dataclass
class Divergence:
    """The place where the prompt leaves the entry."""

    index: Annotated[Count, about("Index of the first different token.")]
    message: Annotated[
        Count | None,
        about("Its message in `current`, or in `previous` if the prompt ends there."),
    ]
    role: Annotated[str | None, about("Role of that message.")]
    part: Annotated[PartName | None, about("Part of that message.")]
    common: Annotated[SharedTokens, about("The last tokens before the index.")]
    previous: Annotated[Side, about("The entry's side, from the index on.")]
    current: Annotated[Side, about("The prompt's side, with the fields of `previous`.")]
    picture: Annotated[
        Ordinal | None, about("Number of the picture in that message, from 1; null: no picture.")
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
        Literal["tokenize", "lookup", "rewind", "prefill", "decode"], about("Kind of work.")
    ]
    start_s: Annotated[Measure, about("Start, relative to the request.", "seconds")]
    duration_s: Annotated[Measure, about("Duration.", "seconds")]
    tokens: Annotated[
        Count,
        about(
            "tokenize, lookup: of the prompt; rewind: dropped; prefill: of the chunk; decode: of "
            "the answer, without its first.",
            "tokens",
        ),
    ]


@dataclass(kw_only=True)
class Verify:
    """A comparison of the request with the same request run cold (--verify-cache)."""

    equal: Annotated[
        bool | None,
        about(
            "true: the entry was right; false: it was wrong and freed; null: untested, because "
            "the tolerance covers one wrong token."
        ),
    ]
    tokens: Annotated[Count, about("Answer tokens compared.", "tokens")]
    first_difference: Annotated[
        Count | None,
        about("Number of the first answer token that differs beyond the tolerance; null: none."),
    ]
    logits_difference: Annotated[Measure, about("Largest difference of the last logits.")]
    tolerance: Annotated[Measure, about("Largest difference that counts as equal.")]
    wrong_token: Annotated[
        Measure | None,
        about("Difference of the last logits after one wrong token, measured once per process."),
    ] = None
    seconds: Annotated[
        Measure, about("Time of the comparison, not part of any other time.", "seconds")
    ]


@dataclass
class BatchLine:
    """The line of a batch that made a request."""

    number: Annotated[
        Ordinal,
        about(
            "Number of the line among the non-empty lines of all inputs, from 1; retries have "
            "the same."
        ),
    ]
    lines: Annotated[Ordinal, about("Lines of the input.", "lines")]
    refused: Annotated[Count, about("Lines refused without a request.", "lines")]
    order: Annotated[Literal["prefix", "input"], about("Value of --order.")]


NoteKind = Literal["call-unread", "call-cut", "calls-left-out", "not-strict"]
"""Remarks of a server on an answer."""


@dataclass
class ClientRequest:
    """The request of a client of `mlxrunner serve`."""

    request: Annotated[str, about("Request id, as in the header x-request-id.")]
    client: Annotated[str, about("Name of the client program; empty: unknown.")]
    session: Annotated[str | None, about("The client's id of the conversation; null: none.")]
    rules: Annotated[tuple[str, ...], about("Rules of the server that changed the prompt.")] = ()
    cause: Annotated[
        str | None,
        about("Cause of the miss on the client's side; null: unknown."),
    ] = None
    remedy: Annotated[str | None, about("Remedy for the cause; null: none.")] = None
    message: Annotated[
        Count | None, about("Number of the message with the cause, from 0; null: none.")
    ] = None
    note: Annotated[
        NoteKind | None,
        about(
            "Remark on the answer. call-unread: a tool call could not be parsed and is in the "
            "text; call-cut: the answer ended within a call, which is in the text; "
            "calls-left-out: calls after the first were left out, as the client asked; "
            "not-strict: this model's call format can't be constrained to strict schemas."
        ),
    ] = None
    replaced: Annotated[
        tuple[str, ...],
        about(
            "Types of content that the model can't be shown, replaced by short texts: picture, "
            "document, web_search_call ..."
        ),
    ] = ()


@dataclass
class DraftCounts:
    """Tokens that one source guessed of the answer."""

    source: Annotated[
        Literal["lookup", "earlier", "form", "model"],
        about(
            "lookup: repeated text; earlier: the text that the entry held before; form: the only "
            "text that a schema or choices allow; model: a draft model."
        ),
    ]
    drafted: Annotated[Count, about("Drafted tokens.", "tokens")]
    accepted: Annotated[Count, about("Drafted tokens that were accepted.", "tokens")]


@dataclass
class Eviction:
    """A conversation that was given up to make room for the request."""

    tokens: Annotated[Count, about("Tokens of the conversation.", "tokens")]
    slot: Annotated[Count, about("Number of its slot.")]
    cause: Annotated[
        Literal["slot", "memory"],
        about("slot: the request needed a slot; memory: it needed bytes."),
    ]
    parked: Annotated[bool, about("true: it is in the disk cache; false: it was discarded.")]


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

    schema: Annotated[Literal["mlxrunner/events"], about("Kind of the line.")]
    version: Annotated[Literal[1], about("Version of the fields.")]
    id: Annotated[
        str,
        Meta(pattern=r"^[0-9a-f]{12,20}(?!\n)$"),
        about("Identifies the request: its number, then its process."),
    ]
    time: Annotated[
        str,
        Meta(extra_json_schema={"format": "date-time"}),
        about("Start of the request: UTC, RFC 3339 with microseconds."),
    ]
    process: Annotated[
        str,
        Meta(pattern=r"^[0-9a-f]{8}(?!\n)$"),
        about("Identifies the profile that wrote the line, one per process and runner."),
    ]
    command: Annotated[str, about("generate, chat, batch, serve or python.")]
    model: Annotated[str, about("Name of the model, as given.")]
    max_sequences: Annotated[
        Ordinal,
        about(
            "Requests that the runner can run at once. With more than one, times of requests "
            "overlap.",
            "requests",
        ),
    ]
    fingerprint: Annotated[
        str,
        Meta(pattern=r"^[0-9a-f]{16}(?!\n)$"),
        about(
            "Digest of the architecture, the weights (shapes and a sample) and the options of "
            "the caches; not of tokenizer and chat template. Times of equal fingerprints can be "
            "compared."
        ),
    ]
    number: Annotated[Ordinal, about("Number of the request in its process, from 1.")]
    prompt_kind: Annotated[Literal["messages", "text", "tokens"], about("Type of the prompt.")]
    messages: Annotated[
        Ordinal | None,
        about("Messages in the prompt; null without messages.", "messages"),
    ]
    finish: Annotated[
        Literal["stop", "length", "interrupted", "error"],
        about(
            "End of the request. interrupted: by Ctrl-C, a cancelled request or a closed iterator."
        ),
    ]
    error: Annotated[
        str | None, about("Name of the exception if finish is error. Its text is never logged.")
    ]
    entry_tokens: Annotated[Count, about("Length of the entry before the request.", "tokens")]
    entry_tokens_after: Annotated[Count, about("Length of the entry after the request.", "tokens")]
    prompt_tokens: Annotated[Count, about("Length of the prompt.", "tokens")]
    matched_tokens: Annotated[
        Count,
        about(
            "Longest common prefix of prompt and entry.",
            "tokens",
        ),
    ]
    cached_tokens: Annotated[
        Count,
        about(
            "Prompt tokens from the cache: saved_tokens + prefetched_tokens.",
            "tokens",
        ),
    ]
    prefetched_tokens: Annotated[
        Count,
        about(
            "Cached tokens that were evaluated in advance since the last request, as a chat does "
            "while its user types.",
            "tokens",
        ),
    ]
    evaluated_tokens: Annotated[
        Count,
        about(
            "Prompt tokens that this request evaluated: prompt_tokens - cached_tokens, or fewer "
            "if the prefill was interrupted.",
            "tokens",
        ),
    ]
    trimmed_tokens: Annotated[Count, about("Tokens dropped from the entry to rewind it.", "tokens")]
    completion_tokens: Annotated[Count, about("Length of the answer.", "tokens")]
    shifted_tokens: Annotated[Count, about("Tokens dropped from a full context.", "tokens")]
    reevaluated_tokens: Annotated[
        Count,
        about(
            "Tokens evaluated again after a shift, where a layer could not move them.",
            "tokens",
        ),
    ]
    lost_tokens: Annotated[
        Count,
        about(
            "Prompt tokens that could have been reused without `reason`. In a batch: tokens that "
            "other lines had evaluated; the sum is what was evaluated beyond the tree of all "
            "prefixes. 0 for empty, prompt_shorter, interrupted and restored.",
            "tokens",
        ),
    ]
    outcome: Annotated[
        Literal["hit", "partial", "miss"],
        about(
            "hit: everything that could be reused was; partial: less; miss: nothing. Tokens "
            "evaluated in advance don't count."
        ),
    ]
    reason: Annotated[
        ReasonName | None,
        about(
            "Reason why not more was reused, or restored if the entry came from a file; null: "
            "nothing was lost."
        ),
    ]
    evicted_by: Annotated[
        str | None,
        about(
            "Cause of a lost entry: the change ('demo -> other', 'kv_bits: None -> 8'), the "
            "request that needed the room ('request 12', as in `submitted`), 'the budget', or "
            "'disk_cache_bytes' (evicted from disk). For restored: the file."
        ),
    ]
    trim_limited_by: Annotated[
        str | None, about("Kind of the layer that could not be trimmed to the match.")
    ]
    checkpoint: Annotated[
        Count | None, about("Offset of the checkpoint that was used; null: none.", "tokens")
    ]
    used_bytes: Annotated[Count, about("Bytes of the entry's tokens after the request.", "bytes")]
    cache_bytes: Annotated[
        Count, about("Bytes allocated for caches and checkpoints after the request.", "bytes")
    ]
    peak_bytes: Annotated[Count, about("Peak of all MLX memory during the request.", "bytes")]
    saved_tokens: Annotated[
        Count,
        about(
            "Reused tokens: cached_tokens - prefetched_tokens.",
            "tokens",
        ),
    ]
    saved_s: Annotated[
        Measure | None,
        about(
            "Estimated time to evaluate the saved tokens, from the prefills of this process; "
            "null while too little was measured, or with parallel requests.",
            "seconds",
        ),
    ]
    run: Annotated[
        str,
        Meta(pattern=r"^(cold|warm)-(miss|partial|hit|restored)(?!\n)$"),
        about(
            "cold: first request of its process, warm: a later one; then the outcome, or "
            "restored for the first request on an entry from a file."
        ),
    ]
    divergence: Annotated[
        Divergence | None,
        about(
            "Place where the prompt leaves the entry; null: nothing was lost, or there was no "
            "entry."
        ),
    ]
    tokenize_s: Annotated[Measure, about("Time to render and tokenize the prompt.", "seconds")]
    lookup_s: Annotated[
        Measure,
        about(
            "Time to find the common prefix and rewind the layers.",
            "seconds",
        ),
    ]
    prefill_s: Annotated[
        Measure | None,
        about("Time from the first chunk to the first token; null: no token.", "seconds"),
    ]
    ttft_s: Annotated[
        Measure | None,
        about("Time to first token; null: no token.", "seconds"),
    ]
    decode_s: Annotated[
        Measure | None,
        about("Time from the first token to the last; null: no token.", "seconds"),
    ]
    total_s: Annotated[Measure, about("Time of the whole request.", "seconds")]
    profile_s: Annotated[
        Measure, about("Time to make this event, not part of any other time.", "seconds")
    ]
    prefill_rate: Annotated[
        Measure | None,
        about("Prompt processing speed over evaluated tokens; null: unknown.", "tokens/s"),
    ]
    decode_rate: Annotated[
        Measure | None,
        about(
            "Generation speed without the first token; null with fewer than two tokens.",
            "tokens/s",
        ),
    ]
    request_bytes: Annotated[
        Count,
        about(
            "Peak of this request alone: peak_bytes minus the memory in use at its start.", "bytes"
        ),
    ]
    spans: Annotated[
        list[Span],
        about(
            "Time spans of the request, in order: tokenize, lookup, rewind, one prefill per "
            "chunk, decode."
        ),
    ]
    verify: Annotated[
        Verify | None,
        about("Comparison with a cold run (--verify-cache); null: not chosen."),
    ]
    line: Annotated[
        BatchLine | None,
        about("Line of a batch; null for other requests."),
    ] = None
    submitted: Annotated[
        Ordinal | None,
        about(
            "Number of the request in a parallel runner, from 1; null for a runner of one at a "
            "time."
        ),
    ] = None
    restored_tokens: Annotated[
        Count,
        about(
            "Cached tokens that were read from the disk cache.",
            "tokens",
        ),
    ] = 0
    draft_passes: Annotated[
        Count,
        about("Forward passes that checked drafted tokens."),
    ] = 0
    drafts: Annotated[
        tuple[DraftCounts, ...],
        about("Drafted tokens (speculative decoding), by source."),
    ] = ()
    evicted: Annotated[
        tuple[Eviction, ...],
        about("Conversations evicted to make room for this request."),
    ] = ()
    caller: Annotated[
        ClientRequest | None,
        about("Client of `mlxrunner serve`; null for other commands."),
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
