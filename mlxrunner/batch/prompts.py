"""Turn the prompts of a batch into tokens, and count what each shares with the prompts before it.

A prompt is compared only with the one before it, whose tokens the one entry holds. Prefix order
goes depth-first through the tree of their prefixes. Each prompt then follows the one with which it
shares most, and every node of the tree is evaluated once. No cache of any size evaluates fewer
tokens.

No store and no line in memory holds a picture decoded. A line keeps the text that names it (base64,
or a URL), and with its tokens the picture's SHA-256 and the ids of its positions, so that the ids
mean the same after a restart. No tensors.
"""

from __future__ import annotations

import base64
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from mlxrunner.batch.options import Order
from mlxrunner.batch.store import InputLine, LineCounts, Store, StoredLine, place_of
from mlxrunner.cache.account import Earlier
from mlxrunner.cache.entry import TokenArray, common_prefix
from mlxrunner.errors import MlxrunnerError, OptionError, PromptError
from mlxrunner.options import GenerateOptions
from mlxrunner.pictures.table import Picture
from mlxrunner.system.picture_files import (
    MOST_BYTES,
    decode_picture,
    encoded,
    picture_bytes,
    pixels_of,
)
from mlxrunner.system.reading import read_bytes
from mlxrunner.templates.messages import CheckedMessages, PlainMessage, check_messages
from mlxrunner.terminal.output import one_line
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.prompt import (
    LineOfBatch,
    Prompt,
    TokenizedPrompt,
    check_length,
    check_tokens,
    sees,
    shift_of,
    tokenize_prompt,
)

if TYPE_CHECKING:
    from mlxrunner.pictures.vision_encoder import Prepared


RECENT = 64
"""The number of lines that are remembered.

In prefix order, no line shares more with an earlier line than with the last of these.
"""


def tokenize_lines(
    store: Store,
    lines: Iterable[InputLine],
    tokenizer: Tokenizer,
    *,
    context: int,
    defaults: Mapping[str, Any] | None = None,
    picture_folder: str | None = None,
) -> bool:
    """Add the lines to the store with their tokens. Call the store's `finish` afterwards.

    `context` is the most tokens of a prompt and its answer, `defaults` are the options of the
    batch, and `picture_folder` is the folder of pictures that lines name. A line gets an error if
    the tokenizer or the chat template refuses its prompt, or if the prompt leaves no room in the
    context. Where a full context is shifted, only the part that the shift keeps has to leave room.
    Return True if the context of a line will be shifted. Then the lines have to run in the order of
    their tokens: what a shifted line shares with others is not what its tokens share.
    """
    is_shifted = False
    for line in lines:
        found: dict[str, Any] = {"prompt": None}
        if line.prompt is not None and line.error is None:
            try:
                found = _tokenize(
                    line, line.prompt, tokenizer, defaults or {}, picture_folder, context
                )
                is_shifted |= len(found["tokens"]) >= context
            except (PromptError, OptionError) as problem:
                found["error"] = f"{place_of(line.number)}: {one_line(str(problem))}"
        store.add(StoredLine(**vars(line) | found))
    return is_shifted


def is_text(prompt: Prompt) -> TypeGuard[str | Sequence[PlainMessage]]:
    """Return True for a text or messages, False for tokens."""
    return isinstance(prompt, str) or (
        isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    )


def _tokenize(
    line: InputLine,
    given: Prompt,
    tokenizer: Tokenizer,
    defaults: Mapping[str, Any],
    picture_folder: str | None,
    context: int,
) -> dict[str, Any]:
    """Return the fields of a stored line that come from its prompt.

    Only messages get the template variables and tools of the defaults. The options get the number
    of tokens that a shift keeps by default, since only the messages tell where the system prompt
    ends. Raise OptionError, or PromptError, also for a prompt that leaves no room in `context`.
    """
    together = {**defaults, **line.options}
    is_shifted = together.get("overflow") == "shift"
    has_messages = is_text(given) and not isinstance(given, str)
    options = GenerateOptions.of(**(together if has_messages else line.options))
    variables, continues = options.variables, options.continue_final_message
    kept: Any = given
    if shows(given):
        prompt, kept = tokenized(kept, tokenizer, variables, picture_folder, continues)
    else:
        room = None if is_shifted else context
        prompt = tokenize_prompt(tokenizer, given, variables, room, continues)
    check_tokens(prompt.tokens, has_pictures=prompt.pictures > 0)
    found: dict[str, Any] = {"tokens": prompt.tokens, "prompt": kept if is_text(kept) else None}
    if not is_shifted:
        check_length(prompt.tokens, context)
    elif shift := shift_of(GenerateOptions.of(**together), tokenizer, prompt, context):
        found["options"] = {**line.options, "keep": shift.keep}
    return found


@dataclass(frozen=True)
class PromptCost:
    """The tokens of prompts that run one after the other with one entry.

    For sorted prompts `evaluated == nodes + repeats`: if the entry holds a whole prompt, its last
    token is evaluated again for its logits. `nodes` and `repeats` describe all prompts only if they
    are sorted.
    """

    prompts: int = 0
    tokens: int = 0
    evaluated: int = 0
    """The tokens that are evaluated with one entry, in this order."""
    nodes: int = 0
    """The nodes of the tree of their prefixes."""
    repeats: int = 0
    """The number of prompts that the prompt before them begins with."""


def cost(prompts: Iterable[TokenArray]) -> PromptCost:
    """Return the cost of the prompts in this order, beginning with an empty entry.

    Two prompts are in memory at a time.
    """
    entry = np.empty(0, np.int32)
    count = tokens = evaluated = nodes = repeats = 0
    for prompt in prompts:
        shared = common_prefix(entry, prompt)
        count += 1
        tokens += len(prompt)
        nodes += len(prompt) - shared
        evaluated += len(prompt) - min(shared, len(prompt) - 1)
        repeats += shared == len(prompt)
        entry = prompt
    return PromptCost(count, tokens, evaluated, nodes, repeats)


@dataclass
class _StartedLine:
    index: int
    tokens: TokenArray
    reached: int
    """The number of its tokens that are evaluated, or will be."""


class EarlierLines:
    """The lines that have begun, to tell how much of the next one was evaluated before.

    Another order or a larger cache could have kept that part. Over all lines, the tokens lost this
    way are those evaluated beyond the tree of their prefixes.
    """

    def __init__(
        self,
        known: array[int] | None = None,
        *,
        parallel: bool = False,
        counts: LineCounts | None = None,
    ) -> None:
        """Take `known`, the result of `shared_before`; None if the lines run in prefix order.

        `parallel` says that several lines run at a time. `counts` are those of the store.
        """
        self._counts = counts
        self._known, self._recent = known, deque[_StartedLine](maxlen=RECENT)
        self._reason = "batch_order" if known is not None else "line_failed"
        if parallel and known is None:
            self._reason = "side_by_side"

    @classmethod
    def of(cls, store: Store, order: Order, *, parallel: bool) -> EarlierLines:
        """Return a new one for the lines of `store`, which run in `order`."""
        counts, known = store.counts, None
        if order == "input":
            known = shared_before(store.pending("prefix"), store.size)
        return cls(known, parallel=parallel, counts=counts)

    def line(self, number: int) -> LineOfBatch | None:
        """Return line `number` of the input for observers; None if the input is not known."""
        if self._counts is None:
            return None
        order: Order = "prefix" if self._known is None else "input"
        return LineOfBatch(number, self._counts.lines, self._counts.broken, order)

    def begin(self, index: int, tokens: TokenArray) -> Earlier:
        """Begin line `index` with these tokens, and return how much of it earlier lines share."""
        own = next((line for line in self._recent if line.index == index), None)
        shared = self._shared(index, tokens)
        if own is not None:
            self._recent.remove(own)
        self._recent.append(_StartedLine(index, tokens, len(tokens)))
        if own is not None and own.reached > shared:
            return Earlier(own.reached, "line_failed")
        return Earlier(shared, self._reason)

    def failed(self, index: int, reached: int) -> None:
        """End line `index` early, after `reached` of its tokens were evaluated or reused."""
        for line in self._recent:
            if line.index == index:
                line.reached = min(reached, len(line.tokens))

    def _shared(self, index: int, tokens: TokenArray) -> int:
        if self._known is not None:
            return self._known[index]
        return max(
            (
                min(common_prefix(line.tokens, tokens), line.reached)
                for line in self._recent
                if line.index != index
            ),
            default=0,
        )


def shared_before(lines: Iterable[StoredLine], count: int) -> array[int]:
    """Return for each of `count` lines the tokens that it shares with any line before it.

    `lines` come in prefix order. Among the lines that come earlier in the input, the nearest on
    each side in prefix order share most.
    """
    found = array("q", bytes(8 * count))
    # Each line on the stack comes earlier in the input than the line above it. The second number
    # is that of the tokens that it shares with the line below.
    stack: list[tuple[int, int]] = []
    before: TokenArray | None = None
    for line in lines:
        if line.error is not None:
            continue
        shared = 0 if before is None else common_prefix(before, line.tokens)
        before = line.tokens
        while stack and stack[-1][0] > line.index:
            index, below = stack.pop()
            found[index] = max(found[index], shared)
            shared = min(shared, below)
        shared = shared if stack else 0
        found[line.index] = shared
        stack.append((line.index, shared))
    return found


def portable(image: Any, name: str) -> str:
    """Return the text for a picture of a program: a path, the bytes of a file, or pixels.

    Raise PictureError or ReadError.
    """
    if isinstance(image, str | os.PathLike):
        content = read_bytes(Path(image), MOST_BYTES)
    elif isinstance(image, bytes):
        content = image
    else:
        content = encoded(pixels_of(image, name))
    return base64.b64encode(content).decode()


def shows(prompt: Any) -> bool:
    """Return True if a prompt has messages with pictures."""
    return isinstance(prompt, list | tuple) and any(
        isinstance(message, Mapping) and message.get("pictures") for message in prompt
    )


def tokenized(
    messages: Sequence[PlainMessage],
    tokenizer: Any,
    variables: Mapping[str, Any],
    folder: str | None,
    continues: bool | None = None,
) -> tuple[TokenizedPrompt, list[PlainMessage]]:
    """Return the prompt of a line with pictures, and its messages as they are stored.

    `folder`: the folder of files that lines may name. `continues` is that of `tokenize_prompt`.
    Raise PromptError.
    """
    if not sees(tokenizer):
        raise PromptError("its messages have pictures, and the model was loaded without its eyes")
    numbers = count(1)
    shown = _with_pictures(messages, lambda text: _pixels(next(numbers), text, folder))
    prompt = tokenize_prompt(tokenizer, CheckedMessages(shown), variables, None, continues)
    left = iter(prompt.views)
    return prompt, _with_pictures(messages, lambda text: _row(text, next(left)))


def _with_pictures(messages: Sequence[PlainMessage], made: Callable[[Any], Any]) -> Any:
    """Return the messages with what `made` returns for each of their pictures."""
    return [
        {**one, "pictures": list(map(made, one["pictures"]))} if one.get("pictures") else one
        for one in messages
    ]


def again(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, folder: str | None
) -> tuple[list[Prepared], list[PlainMessage]]:
    """Return the pictures of a stored line, and its messages as observers get them.

    Raise PromptError if a picture can't be read any more, or is another one.
    """
    rows = [row for message in messages for row in message.get("pictures", ())]
    found: list[Prepared] = []
    for number, row in enumerate(rows, 1):
        frames = row["grid"]
        grid: Any = None if frames is None else tuple(frames)
        picture = Picture(bytes.fromhex(row["digest"]), row["first"], row["count"], grid)
        pixels = _pixels(number, row["image"], folder)
        if tokenizer.sight.digest_of(pixels) != picture.digest:  # another one must take no ids
            raise PromptError(
                f"picture {number} of the line has changed since the batch was read: restore "
                "the file, or start again with another -o"
            )
        tokenizer.sight.table.restore(picture)
        found.append(tokenizer.sight.prepare(pixels))
    said: Any = messages
    return found, tokenizer.worded(said, found)


def _pixels(number: int, text: str, folder: str | None) -> Any:
    name = f"picture {number}"
    try:
        content = picture_bytes(text, name, None if folder is None else Path(folder))
        return decode_picture(content, name)
    except MlxrunnerError as error:
        raise PromptError(str(error)) from error


def _row(text: str, one: Prepared) -> dict[str, Any]:
    picture = one.picture
    return {
        "image": text,
        "digest": picture.digest.hex(),
        "first": picture.first,
        "count": picture.count,
        "grid": picture.grid,
    }


def messages_of(prompt: Any) -> list[PlainMessage]:
    """Return the messages of a program with each picture as a text. Raise PromptError."""
    try:
        return check_messages(prompt, portable)
    except PromptError:
        raise
    except MlxrunnerError as error:
        raise PromptError(str(error)) from error
