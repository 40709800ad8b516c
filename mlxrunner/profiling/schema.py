"""Define the fields of an event: one line of an events file, which describes one request.

`Event` is the only list of these fields. The check of each line that is read, the JSON schema, the
columns of `report --csv` and the table in the docs come from it. The fields are written in the
order of this class. Users read the text below each field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
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
    Reason("empty", "nothing was cached yet"),
    Reason(
        "no_common_token",
        "the first token already differs from the cached one",
        "keep the beginning the same: template, BOS, system prompt",
    ),
    Reason(
        "diverged",
        "the prompt leaves the cached text in the middle",
        "put changing text (dates, retrieved text, counters) at the end, and send earlier "
        "turns back unchanged",
    ),
    Reason("prompt_shorter", "the prompt is the beginning of the cached text"),
    Reason(
        "rewind_limited",
        "a layer could not be rewound as far back as the match",
        "a larger rewind_slack, a smaller checkpoint_interval, or a larger checkpoint_budget",
    ),
    Reason(
        "entry_freed",
        "the cache was freed",
        "see evicted_by for the cause; a reset is the caller's own",
    ),
    Reason(
        "model_changed",
        "another model was loaded, which can't use the cache of the one before",
        "send one model all its prompts before the next, or run two processes",
    ),
    Reason(
        "options_changed",
        "the model was loaded again with options that change its cache",
        "choose --context, --kv-bits and the others once, at start",
    ),
    Reason(
        "interrupted",
        "the previous prefill was interrupted, so the rest of the prompt was missing",
    ),
    Reason(
        "verify_failed",
        "a check against a cold run found the cache wrong and freed it",
        "this is a bug or broken memory: please report it with the event, and run with "
        "--verify-cache 1 to see how often",
    ),
    Reason("restored", "the cache came from a file"),
    Reason(
        "restarted",
        "the program or the model was started again, and the disk cache does not hold the prompt",
        "a disk cache that is large enough (--disk-cache-bytes, no --no-disk-cache), in Python one "
        "that is kept (disk_cache_dir)",
    ),
    Reason(
        "evicted",
        "the conversation was evicted to make room for another request",
        "more memory or more slots (--memory, --slots), or a larger disk cache "
        "(--disk-cache-bytes)",
    ),
    Reason(
        "batch_order",
        "an earlier line of the batch had evaluated it, before the cache was used for other lines",
        "run the lines in prefix order (--order prefix, the default), which evaluates each "
        "prefix once",
    ),
    Reason(
        "line_failed",
        "the cache was lost because a line failed or was tried again",
        "see why lines failed: the errors are in the output",
    ),
    Reason(
        "side_by_side",
        "parallel requests evaluated the same few tokens instead of waiting for each other",
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
        "keep the system prompt the same, and put changing text (a date, retrieved text) "
        "into the last message"
    ),
    "text": ("send earlier messages back unchanged, and put changing text into the last message"),
    "picture": "send earlier pictures back unchanged, and put new ones into the last message",
    "thinking": (
        "the template drops earlier thinking: mlxrunner simulate shows the effect of keeping it"
    ),
    "tools": "send the same tools, in the same order and words, from the first request on",
    "template header": (
        "the message has another role, or the template's own text changes (a date, say): send the "
        "same messages, and fix the template's variables"
    ),
    "message end": (
        "a message continues after its earlier end: send earlier messages back unchanged"
    ),
    "generation prompt": (
        "the answer began differently: choose template options (thinking or not) once"
    ),
}
"""The remedies by the part of the message, or by role and part."""
LAST_MESSAGE_REMEDY = "put the text that stays the same before the text that changes"


NOTHING = "Nothing is to be done"
"""The beginning of the remedies of causes that are as they should be."""
HABITS = {
    "template-variables": "changes thinking or effort",
    "tool-order": "sends its tools in another order",
    "key-order": "writes the keys of its tools in another order",
    "tools-changed": "sends other tools",
    "billing-header": "writes a billing header into {message}",
    "changing-date": "writes a date or time into {message}",
    "changing-id": "writes an id or path into {message}",
    "changing-number": "writes a number into {message}",
    "system-grown": "adds text to {message}",
    "system-changed": "changes {message}",
    "thinking-stripped": "leaves out the thinking of {message}",
    "message-edited": "edits {message}",
    "changing-beginning": "changes the beginning of {message}",
    "picture-changed": "changes a picture of {message}",
    "message-dropped": "leaves out {message}",
    "message-moved": "moves {message}",
    "message-inserted": "inserts {message}",
}
"""The words of a headline for what a client does, by the cause."""


def remedy(reason: str | None, *, has_one_entry: bool = False) -> str:
    """Return the change that helps against a reason; empty if there is nothing to mend.

    `has_one_entry`: the runner answers one request at a time, so that no setting keeps more.
    """
    if reason is None or (reason == "evicted" and has_one_entry):
        return ""
    return REASONS[reason].remedy


def place_remedy(place: str) -> str:
    """Return the change that helps if tokens are lost at `place`; empty if none is known."""
    part = place.rpartition(": ")[2]
    return PLACE_REMEDIES.get(place, PLACE_REMEDIES.get(part, ""))


def explain_reuse(found: Mapping[str, Any], where: str = "") -> str:
    """Say in one sentence what a request did not reuse, and why.

    `found` holds the counts and causes of a request, by the names of the fields of `Event`. `where`
    is the place where prompt and entry part, such as "token 9, in the text of message 0 (user)".
    """
    ahead, detail = found["prefetched_tokens"], found["evicted_by"]
    cached, prompt = found["cached_tokens"] - ahead, found["prompt_tokens"]
    counts = f"{cached:,} of {prompt:,} prompt tokens were reused"
    if ahead:
        counts += f", {ahead:,} had been evaluated in advance"
    missed, displaced = found["missed_tokens"], found["displaced_tokens"]
    if missed:
        counts += f", {missed:,} missed"
    if displaced:
        counts += f", {displaced:,} displaced"
    if missed or displaced:
        counts += f", {found['new_tokens']:,} new"
    if found["reason"] is None and not displaced:
        again = "not all was reused that had been evaluated before"
        return f"{again if missed else 'nothing was lost'}: {counts}"
    if found["reason"] is None:
        return f"text moved after a change{f' at {where}' if where else ''}; {counts}"
    if found["reason"] in PARTING and not (missed or displaced):
        counts += "; nothing was lost by that"
    if found["reason"] == "rewind_limited":
        detail = found["trim_limited_by"]
    sentence = REASONS[found["reason"]].sentence + (f" ({detail})" if detail else "")
    if found["reason"] == "evicted" and not detail:
        sentence = "other text has taken the place of what was evaluated before"
    parted = f"; they part at {where}" if where else ""
    return f"{sentence}{parted}; {counts}"


MOST = 2**53
"""The largest count that a float holds exactly."""

if TYPE_CHECKING:
    ReasonName = str
    PartName = str
else:
    ReasonName, PartName = Literal[tuple(REASONS)], Literal[tuple(PARTS)]

Pieces = list[tuple[str, bool]]
"""The pieces of a text; True for those that the other side has as well."""
MOST_WORDS = 200
"""The most words of a side that are compared and shown. Comparing takes their cube at worst."""
LONGEST_WORD = 400
"""The most characters of a word that are shown."""
Count = Annotated[int, Meta(ge=0, le=MOST)]
Ordinal = Annotated[int, Meta(ge=1, le=MOST)]
Measure = Annotated[float, Meta(ge=0, le=MOST)]
Hash = Annotated[str, Meta(pattern=r"^[0-9a-f]{8}(?!\n)$")]
"""`(?!\\n)`: in Python, `$` also matches before a line end."""


@dataclass
class Side:
    """One side of a divergence: what stands there, from `index` on."""

    message: Count | None
    """Number of the message, from 0; the answer in `previous` counts as one. null: the prompt has
    no messages, or this side has ended."""
    role: str | None
    """Role of the message, such as user; null where message is."""
    part: PartName | None
    """Part of the message; null: unknown, or this side has ended."""
    tokens: Annotated[list[Hash], Meta(max_length=16)]
    """Up to 16 tokens from the index on, as keyed hashes. Within one process, equal hashes are
    equal tokens; the key is never stored."""
    text: str | None
    """The same tokens as text, only with --log-text."""
    picture: Ordinal | None = None
    """Number of the picture in its message, from 1; null: no picture."""


@dataclass
class SharedTokens:
    """The last tokens before a divergence, which both sides have."""

    tokens: Annotated[list[Hash], Meta(max_length=8)]
    """Up to 8 tokens, as keyed hashes."""
    text: str | None
    """The same tokens as text, only with --log-text."""


@dataclass
class Divergence:
    """The place where the prompt leaves its earlier request; in a batch, the entry."""

    index: Count
    """Index of the first different token."""
    message: Count | None
    """Its message in `current`, or in `previous` if the prompt ends there."""
    role: str | None
    """Role of that message."""
    part: PartName | None
    """Part of that message."""
    common: SharedTokens
    """The last tokens before the index."""
    previous: Side
    """The earlier side, from the index on."""
    current: Side
    """The prompt's side, with the fields of `previous`."""
    picture: Ordinal | None = None
    """Number of the picture in that message, from 1; null: no picture."""

    def compared(self) -> tuple[bool, str, Pieces, Pieces]:
        """Return True for text, False for hashes; those before; and both sides in pieces."""
        common, sides = self.common, (self.previous, self.current)
        if common.text is None and all(side.text is None for side in sides):
            before, *hashes = (
                [f"{one[:LONGEST_WORD]} " for one in part.tokens] for part in (common, *sides)
            )
            return False, "".join(before), *compare(*hashes)
        texts = (cut_words(side.text or "") for side in sides)
        return True, (common.text or "")[-LONGEST_WORD:], *compare(*texts)

    def place(self) -> str:
        """Say where the prompt leaves the entry, in it and, if that differs, in the entry."""
        here = _place(self)
        before = _place(self.previous) if self.previous.part else here
        return here if before == here else f"{here}, where before was {before.removeprefix('in ')}"


def cut_words(text: str) -> list[str]:
    """Cut a text into words, runs of blanks and single other characters."""
    return re.findall(r"\w+|[^\S\n]+|[^\w\s]|\n", text)


def compare(left: list[str], right: list[str]) -> tuple[Pieces, Pieces]:
    """Cut the first words of both sides into pieces that the other one has as well, or has not."""
    compared = left[:MOST_WORDS], right[:MOST_WORDS]
    matcher = SequenceMatcher(None, *compared, autojunk=False)
    sides: tuple[Pieces, Pieces] = ([], [])
    for kind, left_begin, left_end, right_begin, right_end in matcher.get_opcodes():
        cut = left[left_begin:left_end], right[right_begin:right_end]
        for side, pieces in zip(sides, cut, strict=True):
            if pieces:
                side.append(("".join(map(_shortened, pieces)), kind == "equal"))
    for side, whole in zip(sides, (left, right), strict=True):
        if len(whole) > MOST_WORDS:
            side.append((f" ... and {len(whole) - MOST_WORDS:,} more", True))
    return _joined(sides[0]), _joined(sides[1])


def _joined(pieces: Pieces) -> Pieces:
    """Return pieces without common blanks between two that differ: these are one."""
    found: Pieces = []
    for place, (piece, is_common) in enumerate(pieces):
        is_last = place == len(pieces) - 1
        is_gap = is_common and piece.isspace() and bool(found) and not found[-1][1] and not is_last
        if found and not found[-1][1] and (is_gap or not is_common):
            found[-1] = (found[-1][0] + piece, False)
        else:
            found.append((piece, is_common))
    return found


def _shortened(word: str) -> str:
    return word if len(word) <= LONGEST_WORD else f"{word[:LONGEST_WORD]}..."


@dataclass
class Span:
    """A stretch of a request's time."""

    name: Literal["tokenize", "lookup", "rewind", "prefill", "decode"]
    """Kind of work."""
    start_s: Measure
    """Start, relative to the request."""
    duration_s: Measure
    """Duration."""
    tokens: Count
    """tokenize, lookup: of the prompt; rewind: dropped; prefill: of the chunk; decode: of the
    answer, without its first."""


@dataclass(kw_only=True)
class Verify:
    """A comparison of the request with the same request run cold (--verify-cache)."""

    equal: bool | None
    """true: the entry was right; false: it was wrong and freed; null: untested, because the
    tolerance covers one wrong token."""
    tokens: Count
    """Answer tokens compared."""
    first_difference: Count | None
    """Number of the first answer token that differs beyond the tolerance; null: none."""
    logits_difference: Measure
    """Largest difference of the last logits."""
    tolerance: Measure
    """Largest difference that counts as equal."""
    wrong_token: Measure | None = None
    """Difference of the last logits after one wrong token, measured once per process."""
    seconds: Measure
    """Time of the comparison, not part of any other time."""


@dataclass
class BatchLine:
    """The line of a batch that made a request."""

    number: Ordinal
    """Number of the line among the non-empty lines of all inputs, from 1; retries have the same."""
    lines: Ordinal
    """Lines of the input."""
    refused: Count
    """Lines refused without a request."""
    order: Literal["prefix", "input"]
    """Value of --order."""


NoteKind = Literal["call-unread", "call-cut", "calls-left-out", "not-strict"]
"""Remarks of a server on an answer."""


@dataclass
class ClientRequest:
    """The request of a client of `mlxrunner serve`."""

    request: str
    """Request id, as in the header x-request-id."""
    client: str
    """Name of the client program; empty: unknown."""
    session: str | None
    """The client's id of the conversation; null: none."""
    rules: tuple[str, ...] = ()
    """Rules of the server that changed the prompt."""
    cause: str | None = None
    """Cause of the miss on the client's side; null: unknown."""
    remedy: str | None = None
    """Remedy for the cause; null: none."""
    message: Count | None = None
    """Number of the message with the cause, from 0; null: none."""
    note: NoteKind | None = None
    """Remark on the answer. call-unread: a tool call could not be parsed and is in the text;
    call-cut: the answer ended within a call, which is in the text; calls-left-out: calls after the
    first were left out, as the client asked; not-strict: this model's call format can't be
    constrained to strict schemas."""
    replaced: tuple[str, ...] = ()
    """Types of content that the model can't be shown, replaced by short texts: picture, document,
    web_search_call ..."""


@dataclass
class DraftCounts:
    """Tokens that one source guessed of the answer."""

    source: Literal["lookup", "earlier", "form", "model"]
    """lookup: repeated text; earlier: the text that the entry held before; form: the only text that
    a schema or choices allow; model: a draft model."""
    drafted: Count
    """Drafted tokens."""
    accepted: Count
    """Drafted tokens that were accepted."""


@dataclass
class Eviction:
    """A conversation that was given up to make room for the request."""

    tokens: Count
    """Tokens of the conversation."""
    slot: Count
    """Number of its slot."""
    cause: Literal["slot", "memory"]
    """slot: the request needed a slot; memory: it needed bytes."""
    parked: bool
    """true: it is in the disk cache; false: it was discarded."""


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

    schema: Literal["mlxrunner/events"]
    """Kind of the line."""
    version: Literal[1]
    """Version of the fields."""
    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{12,20}(?!\n)$")]
    """Identifies the request: its number, then its process."""
    time: Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
    """Start of the request: UTC, RFC 3339 with microseconds."""
    process: Annotated[str, Meta(pattern=r"^[0-9a-f]{8}(?!\n)$")]
    """Identifies the profile that wrote the line, one per process and runner."""
    command: str
    """generate, chat, batch, serve or python."""
    model: str
    """Name of the model, as given."""
    max_sequences: Ordinal
    """Requests that the runner can run at once. With more than one, times of requests overlap."""
    fingerprint: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}(?!\n)$")]
    """Digest of the architecture, the weights (shapes and a sample) and the options of the caches;
    not of tokenizer and chat template. Times of equal fingerprints can be compared."""
    number: Ordinal
    """Number of the request in its process, from 1."""
    prompt_kind: Literal["messages", "text", "tokens"]
    """Type of the prompt."""
    messages: Ordinal | None
    """Messages in the prompt; null without messages."""
    finish: Literal["stop", "length", "interrupted", "error"]
    """End of the request. interrupted: by Ctrl-C, a cancelled request or a closed iterator."""
    error: str | None
    """Name of the exception if finish is error. Its text is never logged."""
    entry_tokens: Count
    """Length of the entry before the request."""
    entry_tokens_after: Count
    """Length of the entry after the request."""
    prompt_tokens: Count
    """Length of the prompt."""
    matched_tokens: Count
    """Longest common prefix of prompt and entry."""
    cached_tokens: Count
    """Prompt tokens from the cache: saved_tokens + prefetched_tokens."""
    prefetched_tokens: Count
    """Cached tokens that were evaluated in advance since the last request, as a chat does while its
    user types."""
    evaluated_tokens: Count
    """Prompt tokens that this request evaluated: prompt_tokens - cached_tokens, or fewer if the
    prefill was interrupted."""
    trimmed_tokens: Count
    """Tokens dropped from the entry to rewind it."""
    completion_tokens: Count
    """Length of the answer."""
    shifted_tokens: Count
    """Tokens dropped from a full context."""
    reevaluated_tokens: Count
    """Tokens evaluated again after a shift, where a layer could not move them."""
    lost_tokens: Count
    """Deprecated, until 0.4: missed_tokens + displaced_tokens."""
    outcome: Literal["hit", "partial", "miss"]
    """hit: everything that could be reused was; partial: less; miss: nothing. Tokens evaluated in
    advance don't count."""
    reason: ReasonName | None
    """Reason why not more was reused, or restored if the entry came from a file; null: nothing was
    lost."""
    evicted_by: str | None
    """Cause of a lost entry: the change ('demo -> other', 'kv_bits: None -> 8'), the request that
    needed the room ('request 12', as in `submitted`), 'the budget', 'disk_cache_bytes' (evicted
    from disk), or 'a failed write' to disk. For restored: the file."""
    trim_limited_by: str | None
    """Kind of the layer that could not be trimmed to the match."""
    checkpoint: Count | None
    """Offset of the checkpoint that was used; null: none."""
    used_bytes: Count
    """Bytes of the entry's tokens after the request."""
    cache_bytes: Count
    """Bytes allocated for caches and checkpoints after the request."""
    peak_bytes: Count
    """Peak of all MLX memory during the request."""
    saved_tokens: Count
    """Reused tokens: cached_tokens - prefetched_tokens."""
    saved_s: Measure | None
    """Estimated time to evaluate the saved tokens, from the prefills of this process; null while
    too little was measured, or with parallel requests."""
    run: Annotated[str, Meta(pattern=r"^(cold|warm)-(miss|partial|hit|restored)(?!\n)$")]
    """cold: first request of its process, warm: a later one; then the outcome, or restored for the
    first request on an entry from a file."""
    divergence: Divergence | None
    """Place where the prompt leaves the earlier request of its conversation, in a batch the entry;
    null: it continues from there, or there is none."""
    tokenize_s: Measure
    """Time to render and tokenize the prompt."""
    lookup_s: Measure
    """Time to find the common prefix and rewind the layers."""
    prefill_s: Measure | None
    """Time from the first chunk to the first token; null: no token."""
    ttft_s: Measure | None
    """Time to first token; null: no token."""
    decode_s: Measure | None
    """Time from the first token to the last; null: no token."""
    total_s: Measure
    """Time of the whole request."""
    profile_s: Measure
    """Time to make this event, not part of any other time."""
    prefill_rate: Measure | None
    """Prompt processing speed over evaluated tokens; null: unknown."""
    decode_rate: Measure | None
    """Generation speed without the first token; null with fewer than two tokens."""
    request_bytes: Count
    """Peak of this request alone: peak_bytes minus the memory in use at its start."""
    spans: list[Span]
    """Time spans of the request, in order: tokenize, lookup, rewind, one prefill per chunk,
    decode."""
    verify: Verify | None
    """Comparison with a cold run (--verify-cache); null: not chosen."""
    line: BatchLine | None = None
    """Line of a batch; null for other requests."""
    submitted: Ordinal | None = None
    """Number of the request in a parallel runner, from 1; null for a runner of one at a time."""
    restored_tokens: Count = 0
    """Cached tokens that were read from the disk cache."""
    draft_passes: Count = 0
    """Forward passes that checked drafted tokens."""
    drafts: tuple[DraftCounts, ...] = ()
    """Drafted tokens (speculative decoding), by source."""
    evicted: tuple[Eviction, ...] = ()
    """Conversations evicted to make room for this request."""
    caller: ClientRequest | None = None
    """Client of `mlxrunner serve`; null for other commands."""
    missed_tokens: Count = 0
    """Prompt tokens on a prefix that was evaluated before, but was no longer held, or could not be
    reused (see `reason`). The program or its settings can change that."""
    displaced_tokens: Count = 0
    """Prompt tokens that the earlier request of the same conversation had, too, after the place
    where the prompt leaves it (see `divergence`), in runs of at least 16. The client can change
    that."""
    new_tokens: Count = 0
    """The other prompt tokens: cached + missed + displaced + new = prompt."""
    index_is_full: bool = False
    """true: the index of evaluated prefixes has reached its bound, and what it forgot counts as
    new."""

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Event:
        """Check a parsed line of an events file and return its event. Drop unknown fields.

        A field may have its name of 0.2.

        Raise ValueError, with the name of the field, if a field is missing or has an impossible
        value.
        """
        return msgspec.convert(with_new_names(line), cls).checked()

    def checked(self) -> Event:
        """Return the event. Raise ValueError if its counts or its rate can't have been measured."""
        saved, ahead, cached = self.saved_tokens, self.prefetched_tokens, self.cached_tokens
        evaluated, prompt, lost = self.evaluated_tokens, self.prompt_tokens, self.lost_tokens
        missed, displaced, new = self.missed_tokens, self.displaced_tokens, self.new_tokens
        if saved + ahead != cached:
            raise ValueError(f"saved {saved} + ahead {ahead} tokens are not the {cached} cached")
        if cached + evaluated > prompt:
            raise ValueError(f"cached {cached} + evaluated {evaluated} tokens exceed {prompt}")
        if cached + missed + displaced + new != prompt:
            raise ValueError(
                f"cached {cached} + missed {missed} + displaced {displaced} + new {new} tokens "
                f"are not the {prompt} of the prompt"
            )
        if lost != missed + displaced:
            raise ValueError(f"lost {lost} tokens are not missed {missed} + displaced {displaced}")
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
