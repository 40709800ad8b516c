"""Turn the chunks of an answer into events: thinking, text and tool calls."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator

from mlxrunner.results import Chunk
from mlxrunner.serve.events import (
    CallArguments,
    CallBegan,
    CallEnded,
    Event,
    Note,
    Text,
    Thought,
    Token,
)
from mlxrunner.serve.prompts.channels import ChannelReader
from mlxrunner.serve.prompts.formats import Call, Piece
from mlxrunner.serve.prompts.reader import AnswerReader
from mlxrunner.templates.segments import common


class AnswerSplitter:
    """Splits the chunks of one answer into events."""

    def __init__(
        self,
        reader: AnswerReader | ChannelReader,
        request: str,
        decode: Callable[[list[int]], str],
        *,
        parallel: bool = True,
        around: tuple[str, str] = ("", ""),
        note: Note | None = None,
        said: str = "",
        again: Callable[[], AnswerReader | ChannelReader] | None = None,
    ) -> None:
        """Begin an answer. `request`: its id, which the ids of its calls are made of.

        `decode`: that of the tokenizer, for log-probabilities. Without `parallel`, calls after the
        first one are left out. `around`: texts that the reader is given before it, and after
        a whole one. `note`: what is to be said of it anyway. `said`: the beginning of the answer,
        which the client has written and gets no events of; `again` makes a reader like `reader`.
        """
        self._unsaid = {"text": "", "thought": ""}
        if said and again is not None:
            self._unsaid = _held_back(reader, again(), said)
        self._before, self._after = around
        self._note = note
        self._reader, self._request, self._decode, self._parallel = (
            reader,
            request,
            decode,
            parallel,
        )
        self._tokens: list[Token] = []
        self._left_out = 0
        self.calls: list[tuple[str, Call]] = []
        """The calls so far, with their ids."""
        self.thinking_tokens = 0
        """Tokens of the answer that were thinking."""

    @property
    def is_done(self) -> bool:
        """True if all that follows is left out: the answer may have one call, and has it."""
        return bool(self.calls) and not self._parallel

    @property
    def note(self) -> Note | None:
        """The reason why a text was not read as a call, or calls were left out; or None."""
        if self._left_out:
            left_out = f"{self._left_out} tool calls after the first were left out"
            return Note("calls-left-out", left_out)
        return self._reader.note or self._note

    def add(self, chunk: Chunk) -> Iterator[Event]:
        """Take the next chunk, and yield the events that are certain now."""
        if self._reader.is_thinking:
            self.thinking_tokens += 1
        if chunk.logprob is not None and chunk.token is not None:
            self._tokens.append(self._token(chunk, chunk.token, chunk.logprob))
        text, self._before = self._before + chunk.text, ""
        yield from self._events(self._reader.add(text) if text else [])

    def finish(self, *, is_whole: bool = True) -> Iterator[Event]:
        """End the answer, and yield the rest. `is_whole`: the model ended it, not a limit."""
        after = self._after if is_whole else ""
        yield from self._events(self._reader.add(after) if after else [])
        yield from self._events(self._reader.finish(is_whole=is_whole))
        if self._tokens:
            yield Text("", self._take_tokens())

    def _events(self, pieces: Iterable[Piece]) -> Iterator[Event]:
        for piece in pieces:
            if piece.call is not None:
                self._unsaid = {"text": "", "thought": ""}
                yield from self._call(piece.call)
                continue
            if self._unsaid[piece.kind]:
                piece = self._without_said(piece)
            if not piece.text:
                continue
            if piece.kind == "thought":
                self._tokens = []
                yield Thought(piece.text)
            elif not self.is_done:
                yield Text(piece.text, self._take_tokens())

    def _without_said(self, piece: Piece) -> Piece:
        """Return a piece without what its client has written, which the reader had held back."""
        held = self._unsaid[piece.kind]
        count = common(held, piece.text)
        is_same = count == min(len(held), len(piece.text))
        self._unsaid[piece.kind] = held[count:] if is_same else ""
        return piece._replace(text=piece.text[count:]) if is_same else piece

    def _call(self, call: Call) -> Iterator[Event]:
        index = len(self.calls)
        if self.is_done:
            self._left_out += 1
            return
        identity = call.id
        if identity is None or identity in {known for known, _ in self.calls}:
            identity = call_id(self._request, index)
        self.calls.append((identity, call))
        yield CallBegan(index, identity, call.name)
        yield CallArguments(index, call.arguments)
        yield CallEnded(index)

    def _token(self, chunk: Chunk, token: int, logprob: float) -> Token:
        top = tuple(
            (self._decode([one]), one, value) for one, value in (chunk.top_logprobs or {}).items()
        )
        return Token(self._decode([token]), token, logprob, top)

    def _take_tokens(self) -> tuple[Token, ...]:
        tokens, self._tokens = tuple(self._tokens), []
        return tokens


def _held_back(
    reader: AnswerReader | ChannelReader, other: AnswerReader | ChannelReader, said: str
) -> dict[str, str]:
    """Give `said` to a reader, and return what it holds back of it, by the kind of the piece."""
    shown, whole = list(reader.add(said)), [*other.add(said), *other.finish(is_whole=False)]
    return {
        kind: _joined(whole, kind).removeprefix(_joined(shown, kind))
        for kind in ("text", "thought")
    }


def _joined(pieces: Iterable[Piece], kind: str) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == kind)


def call_id(request: str, index: int) -> str:
    """Return the id of call number `index` of a request: the same each time."""
    return "call_" + hashlib.sha256(f"{request}:{index}".encode()).hexdigest()[:24]
