"""Define the parts of an event: the types of its fields, and the objects within it.

`mlxrunner.profiling.schema` puts them together. Users read the descriptions here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from mlxrunner.profiling.reasons import PARTS, REASONS

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
class Common:
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
    common: Annotated[Common, about("The last up to 8 tokens before the index.")]
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
class Draft:
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
