"""Define the fields of an event: one line of an events file, which describes one request.

`Event` is the only list of these fields. The check of each line that is read, the JSON schema, the
columns of `report --csv` and the table in the docs come from it. The fields are written in the
order of this class. Users read the descriptions here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from mlxrunner.profiling.event_parts import (
    BatchLine,
    ClientRequest,
    Count,
    Divergence,
    Draft,
    Eviction,
    Measure,
    Ordinal,
    ReasonName,
    Span,
    Verify,
    about,
)
from mlxrunner.profiling.reasons import explain

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
            "Prompt tokens that this request did not evaluate: saved_tokens + ahead_tokens.",
            "tokens",
        ),
    ]
    ahead_tokens: Annotated[
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
            "null: nothing was lost. mlxrunner.profiling.reasons has a sentence and a remedy for "
            "each."
        ),
    ]
    freed_by: Annotated[
        str | None,
        about(
            "The cause of a lost entry (entry_freed, verify_failed), the change (model_changed: "
            "'demo -> other'; options_changed: 'kv_bits: None -> 8'), the request that the entry "
            "made room for (evicted: 'request 12', as in its `submitted`, 'the budget', or "
            "'park_bytes': it was parked and given up there), or the file that the entry came from "
            "(restored)."
        ),
    ]
    rewind_limited_by: Annotated[
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
            "ahead_tokens.",
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
        tuple[Draft, ...],
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

        Raise ValueError, with the name of the field, if a field is missing or has an impossible
        value.
        """
        return msgspec.convert(line, cls).checked()

    def checked(self) -> Event:
        """Return the event itself.

        Raise ValueError if its counts can't belong to one prompt, or its rate can't have been
        measured.
        """
        saved, ahead, cached = self.saved_tokens, self.ahead_tokens, self.cached_tokens
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
        return explain(vars(self), where)
