"""Build the prompt of a request: its messages through the model's chat template, as tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from mlxrunner.cache.entry import TokenArray, as_tokens, words
from mlxrunner.errors import (
    ContextLengthError,
    MlxrunnerError,
    PictureError,
    PicturesFullError,
    PromptError,
    ReadError,
)
from mlxrunner.models.load import LoadedModel
from mlxrunner.pictures.tokenizer import SeeingTokenizer
from mlxrunner.pictures.vision_encoder import Prepared
from mlxrunner.results import Chunk
from mlxrunner.server.events import ApiError, ServerRequest, field_error
from mlxrunner.server.prompts.answer_tokens import (
    UNKNOWN,
    AnswerTokenCache,
    PromptEncoder,
    TokenSpan,
    chain,
    message_digest,
)
from mlxrunner.server.prompts.rules import LRUCache, MemoizedFunction, PromptDraft, apply, written
from mlxrunner.server.tools.constraints import (
    ForcedCall,
    StartConstraint,
    StrictCalls,
    closed_thinking,
    forced,
)
from mlxrunner.server.tools.formats import CallFormat, Tools, format_of
from mlxrunner.server.tools.reader import AnswerSplitter, ParsedAnswer, reader_of
from mlxrunner.system.picture_files import decode_picture, picture_bytes
from mlxrunner.templates.chat_template import continued, is_continued
from mlxrunner.templates.messages import (
    PICTURE,
    UNREAD_PICTURE,
    CheckedMessages,
    PlainMessage,
    See,
    check_message,
    check_messages,
    has_picture,
    own_message,
    without_pictures,
)
from mlxrunner.templates.probe import TemplateProbe
from mlxrunner.templates.rendering import read_json, read_template
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.base import AnswerTokens
from mlxrunner.tokenizer.prompt import TokenizedPrompt, end_texts, tokenize_prompt

MOST_BYTES = 32_000_000
"""Most bytes of messages that are remembered, as they came and as they were checked."""
FORMS = frozenset({"schema", "choices"})
"""The options that hold an answer to a form."""
TAIL = 200
"""Most characters at the end of a prompt that say whether it opens the answer's thinking."""


@dataclass(frozen=True)
class BuiltPrompt:
    """A prompt that is ready to run, and what was done to make it."""

    prompt: TokenizedPrompt
    """Its text is that of its tokens."""
    options: dict[str, Any]
    """Options of `ParallelRunner.submit`."""
    rules: tuple[str, ...] = ()
    """The names of the rules that changed the prompt."""
    replaced: tuple[str, ...] = ()
    """The types of what the prompt has as short texts, since the model can't be shown it."""
    opens: str = ""
    """The end of the prompt before a forced call, which may have opened the thinking."""
    forced: ForcedCall | None = None
    """The call that the answer is held to."""
    rendered: str = ""
    """The prompt as the template wrote it, without kept answers in their places."""
    link: bytes = b""
    """A digest of all messages."""
    kept: int = 0
    """The number of answers that stand in the prompt as they were generated."""
    tools: Tools = field(default=(), repr=False)
    source: Sequence[PlainMessage] = field(default=(), repr=False)
    """The messages as the client sent them, without what no template reads."""
    digests: tuple[bytes, ...] = field(default=(), repr=False)
    """The digests of `source`."""
    lead: str = ""
    """The end of the prompt that is the beginning of the answer: words that it continues."""
    lead_tokens: TokenArray = field(default_factory=lambda: as_tokens([]), repr=False)
    """The tokens of `lead`; none if a token lies on both sides of its beginning."""


class _CheckedMessage(NamedTuple):
    message: PlainMessage
    digest: bytes


def _described(index: int, message: Mapping[str, Any], see: See | None = None) -> _CheckedMessage:
    checked = check_message(index, message, see)
    return _CheckedMessage(checked, message_digest(checked))


class PromptBuilder:
    """Makes prompts for one model, and splits its answers. Any thread may use it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str = "",
        parser: str | None = None,
        *,
        off: Iterable[str] = (),
        folder: Path | None = None,
    ) -> None:
        """Make a maker for a model's `tokenizer` and chat `template`.

        `parser`: the name of mlx-lm's parser of tool calls, if the model's files name one. `off`:
        the names of the rules that are off. `folder`: the folder of pictures that may be named.
        """
        self.tokenizer = tokenizer
        self.probe = TemplateProbe(tokenizer.render, template)
        self.form: CallFormat = format_of(template, tokenizer, parser)
        self.kept = AnswerTokenCache()
        self._strict = StrictCalls(self.form.name, tokenizer)
        self._template = template
        self._encoder = PromptEncoder(tokenizer)
        self._known = MemoizedFunction(partial(_described, 0), MOST_BYTES)
        self._off = frozenset(off)
        self._picture_reader = (
            PictureReader(tokenizer, folder) if isinstance(tokenizer, SeeingTokenizer) else None
        )

    @classmethod
    def of(
        cls, loaded: LoadedModel, *, off: Iterable[str] = (), folder: Path | None = None
    ) -> PromptBuilder:
        """Make a maker for a loaded model. `off` and `folder` are those of a maker."""
        config = read_json(loaded.folder / "tokenizer_config.json")
        sees = isinstance(loaded.tokenizer, SeeingTokenizer)
        template = read_template(loaded.folder, config, of_processor=sees) or ""
        parser = config.get("tool_parser_type")
        name = parser if isinstance(parser, str) else None
        return cls(loaded.tokenizer, template, name, off=off, folder=folder)

    def make(self, asked: ServerRequest, context: int | None = None) -> BuiltPrompt:
        """Make the prompt of a request. Raise ApiError if the model can't take it.

        Raise PictureError if it can't see a picture, and ContextLengthError if the prompt certainly
        leaves no room in `context` tokens. None: no limit.
        """
        try:
            if asked.prompt is None:
                return self._conversation(asked, time.perf_counter(), context)
            prompt = tokenize_prompt(self.tokenizer, asked.prompt, context=context)
            return BuiltPrompt(prompt, dict(asked.options), opens=prompt.text[-TAIL:])
        except (PictureError, ContextLengthError):
            raise  # they have codes of their own
        except MlxrunnerError as error:
            raise ApiError(400, str(error)) from error
        except RecursionError as error:
            message = "messages or tools are nested too deeply: write them with fewer levels"
            raise ApiError(400, message) from error

    def splitter(self, made: BuiltPrompt, asked: ServerRequest) -> AnswerSplitter:
        """Return a splitter for the answer to a prompt."""
        call = made.forced
        form = self.form if asked.tools and asked.tool_choice.mode != "none" else None
        form = form if call is None else call.form
        return AnswerSplitter(
            partial(reader_of, form, asked.tools, made.opens),
            asked.id,
            self.tokenizer.decode,
            parallel=asked.parallel_calls,
            around=("", "") if call is None else (call.before, call.after),
            note=self._strict.note(asked.tools) if asked.tools and form is self.form else None,
            said=made.lead if call is None else "",
        )

    def keep(self, made: BuiltPrompt, chunks: Sequence[Chunk], *, is_cut: bool = False) -> None:
        """Remember the tokens of an answer as they were generated.

        `is_cut`: its client left before its end.
        """
        if not made.rendered or (made.forced is not None and not made.forced.is_own):
            return
        if made.lead and (made.forced is not None or not len(made.lead_tokens)):
            return
        before = made.prompt.tokens[: len(made.prompt.tokens) - len(made.lead_tokens)]
        context = words(before[-8:]).tolist()
        stream = self.tokenizer.stream(context)
        lead = [Chunk(stream.add(token), token) for token in words(made.lead_tokens).tolist()]
        chunks = [*lead, *chunks]
        answer = AnswerTokens.of(chunks, self.tokenizer, context)
        if not is_cut and answer.text != "".join(chunk.text for chunk in chunks):
            return  # it ends within a token
        said = ParsedAnswer.of(answer.text, self.form, made.tools, made.opens)
        self.kept.keep(made.link, made.rendered, answer, said, is_cut=is_cut)

    def _conversation(self, asked: ServerRequest, began: float, context: int | None) -> BuiltPrompt:
        shown = None if self._picture_reader is None else RequestPictures(self._picture_reader)
        known, unseen = self._checked(asked.messages, shown)
        source = [one.message for one in known]
        draft = PromptDraft(list(map(self._with_thinking, source)), list(map(dict, asked.tools)))
        is_open = is_continued(source, asked.options.get("continue_final_message"))
        words_of = ("content", "reasoning_content", "thinking")
        if is_open and not any(source[-1].get(name) for name in words_of):
            draft, is_open = replace(draft, messages=draft.messages[:-1]), False
        draft, rules = apply(draft, self.probe, self._off)
        variables = _variables(asked, draft)
        begun = partial(self._begun, variables, shown, is_open)
        text, header = begun(draft)
        digests = {id(one.message): one.digest for one in known}
        links = chain([digests.get(id(one)) or self._digest(one) for one in draft.messages])
        fills = self.kept.fills(
            text,
            links,
            lambda number: _without(draft, number, begun),
            lambda prompt, answer: ParsedAnswer.of(answer, self.form, asked.tools, prompt[-TAIL:]),
        )
        # Words that are continued are the model's own tokens, or the template's, but not of both.
        fills = [fill for fill in fills if fill.end <= header or fill.end == len(text)]
        choice, call = asked.tool_choice, None
        if choice.mode in ("required", "named"):
            call = forced(choice, asked.tools, self.form, text)
        # A form holds from the first token on, and clients look for it after the thinking.
        closed = closed_thinking(text) if asked.options.keys() & FORMS else ""
        closed = closed if call is None else call.closed
        rendered = text + (call.opening if call is not None else closed)
        tokens, whole = self._encoder.encode(rendered, fills, context)
        lead, lead_tokens = text[header:], as_tokens([])
        if is_open:
            self._check_open(asked, call, text, header)
            lead_tokens = self._lead(text, header, fills, tokens)
        said: Any = draft.messages
        views = [] if shown is None else shown.of(said)
        if shown is not None and views:
            tokens, whole, said = shown.placed(tokens, whole, said)
        opens = (text[:header] + closed)[-TAIL:]
        constraint = self._constraint(asked, tokens, opens)
        seconds = time.perf_counter() - began
        prompt = TokenizedPrompt(tokens, "messages", said, whole, variables, seconds)
        return BuiltPrompt(
            replace(prompt, constraint=constraint, pictures=len(views), views=views),
            {**asked.options, **self._limits(asked, call)},
            rules,
            tuple(sorted({*asked.replaced, *unseen})),
            opens,
            call,
            text[:header] if is_open else rendered,
            links[-2] if is_open else links[-1],
            len(fills),
            asked.tools,
            source,
            tuple(one.digest for one in known),
            lead,
            lead_tokens,
        )

    def _begun(
        self,
        variables: Mapping[str, Any],
        shown: RequestPictures | None,
        is_open: bool,
        draft: PromptDraft,
    ) -> tuple[str, int]:
        """Return the text of a conversation, and its length up to the answer.

        `is_open`: the answer continues the last message, which is a part of it.
        """

        def render(messages: Sequence[Any], **more: Any) -> str:
            own = replace(draft, messages=list(messages))
            return self._text(own, {**variables, **more}, shown)

        if not is_open:
            text = render(draft.messages)
            return text, len(text)
        found = continued(render, draft.messages, end_texts(self.tokenizer))
        return found.text, found.header

    def _check_open(
        self, asked: ServerRequest, call: ForcedCall | None, text: str, header: int
    ) -> None:
        """Raise ApiError if a call or a form has to begin within thinking."""
        reader = reader_of(self.form, asked.tools, text[:header][-TAIL:])
        for _ in reader.add(text[header:]):
            pass
        if reader.is_thinking and (call is not None or asked.options.keys() & FORMS):
            raise field_error(
                "messages",
                "the last message is thinking without an end, and the answer has to be "
                "a tool call or of a given form: end the thinking, or leave the message out",
            )

    def _lead(
        self, text: str, header: int, fills: Sequence[TokenSpan], tokens: TokenArray
    ) -> TokenArray:
        """Return the tokens of the words that are continued, as `tokens` ends with them.

        There are none if a token lies on both sides of their beginning.
        """
        before = [fill for fill in fills if fill.end <= header]
        own, _ = self._encoder.encode(text[:header], before)
        is_whole = len(own) < len(tokens) and bool((tokens[: len(own)] == own).all())
        return tokens[len(own) :] if is_whole else as_tokens([])

    def _checked(
        self, messages: Sequence[Mapping[str, Any]], shown: RequestPictures | None
    ) -> tuple[Sequence[_CheckedMessage], Sequence[str]]:
        """Return the messages of a client, checked, and the types of what texts stand for.

        Raise PromptError or PictureError.
        """
        if not messages:
            check_messages(messages)  # raises
        known, unseen, own = list[_CheckedMessage](), list[str](), own_message(messages)
        reader = self._picture_reader
        marker = None if reader is None else reader.tokenizer.sight.marker
        for index, message in enumerate(messages):
            if marker and not (index == own and has_picture(message)):
                message = _without_marker(message, marker)
            if has_picture(message) and index != own:
                message, count = _seen_before(index, message, shown)
                unseen += ["picture"] * count
            if has_picture(message):
                known.append(_seen(index, message, shown))
                continue
            try:
                known.append(self._known(message))
            except PromptError:
                check_message(index, message)  # names it
                raise
        return known, unseen

    def _digest(self, message: Mapping[str, Any]) -> bytes:
        return message_digest(message) if "pictures" in message else self._known(message).digest

    def _text(
        self, draft: PromptDraft, variables: Mapping[str, Any], shown: RequestPictures | None
    ) -> str:
        messages: Any = draft.messages  # the rules keep them plain
        text = self.tokenizer.render(CheckedMessages(messages), **variables)
        text = written(text, draft, self.probe)
        return text if shown is None else shown.filled(text, messages)

    def _with_thinking(self, message: Any) -> dict[str, Any]:
        """Return a message with its thinking where the template looks for it, or without it."""
        plain: dict[str, Any] = message
        if "reasoning_content" not in message:
            return plain  # the same one: its digest is known
        plain = {**message}
        thought = plain.pop("reasoning_content")
        if thought and self.probe.takes_thinking:
            plain["reasoning_content"] = thought
        elif thought and "message.thinking" in self._template:
            plain["thinking"] = thought
        elif thought and self.probe.splits_thinking:
            plain["content"] = f"<think>\n{thought}\n</think>\n\n{plain['content']}"
        return plain

    def _constraint(
        self, asked: ServerRequest, tokens: TokenArray, opens: str
    ) -> StartConstraint | None:
        """Return what holds the calls of strict tools, unless another form holds the answer."""
        is_free = asked.tool_choice.mode == "auto" and not asked.options.keys() & FORMS
        if not (asked.tools and is_free):
            return None
        return self._strict.constraint(asked.tools, words(tokens[-8:]).tolist(), opens)

    def _limits(self, asked: ServerRequest, call: ForcedCall | None) -> dict[str, Any]:
        """Return the options that hold an answer to a call, or keep it from one."""
        if call is not None:
            return {"schema": call.schema}
        if asked.tools and asked.tool_choice.mode == "none" and self.form.start:
            given = asked.options.get("stop") or ()
            return {"stop": [*([given] if isinstance(given, str) else given), self.form.start]}
        return {}


def _without(
    draft: PromptDraft, number: int, begun: Callable[[PromptDraft], tuple[str, int]]
) -> str | None:
    """Return the text with `UNKNOWN` in place of an answer, or None if that is refused."""
    messages = list(draft.messages)
    messages[number] = {"role": "assistant", "content": UNKNOWN}
    try:
        return begun(replace(draft, messages=messages))[0]
    except PromptError:
        return None


def _without_marker(value: Any, marker: str) -> Any:
    """Return a message whose texts don't hold the text that stands for a picture."""
    if isinstance(value, str):
        return value.replace(marker, f"{marker[:1]} {marker[1:]}") if marker in value else value
    if isinstance(value, Mapping):
        return {key: _without_marker(one, marker) for key, one in value.items()}
    return [_without_marker(one, marker) for one in value] if isinstance(value, list) else value


def _seen_before(
    index: int, message: Mapping[str, Any], shown: RequestPictures | None
) -> tuple[Mapping[str, Any], int]:
    """Return a message without the pictures that can't be seen, and their number.

    It is not what the user has just sent: a client repeats it whatever it is told. Raise
    PicturesFullError if there is no room for a picture at the moment.
    """
    if shown is None or message.get("role") not in SHOW:
        count = sum(part["type"] == "image" for part in message["content"])
        return {**message, "content": without_pictures(message["content"])}, count
    found, count = list[dict[str, Any]](), 0
    for part in message["content"]:
        if part["type"] == "text":
            found.append({"type": "text", "text": part["text"].replace(PICTURE, "\ufffd")})
            continue
        try:
            shown.see(part["image"], f"message {index}")
        except PicturesFullError:
            raise
        except (PictureError, ReadError):
            part, count = {"type": "text", "text": UNREAD_PICTURE}, count + 1
        found.append(part)
    return {**message, "content": found}, count


def _seen(index: int, message: Mapping[str, Any], shown: RequestPictures | None) -> _CheckedMessage:
    """Return a message with pictures, checked. Raise PromptError or PictureError."""
    if shown is None:
        raise PictureError(
            f"message {index} has a picture, and this model sees none here: start the server with "
            "--pictures, and ask a model that sees"
        )
    if message.get("role") not in SHOW:
        raise PromptError(
            f"message {index}: a message of role {message.get('role')!r:.80} can't have pictures, "
            f"only one of {' or '.join(SHOW)}"
        )
    return _described(index, message, shown.see)


def _variables(asked: ServerRequest, draft: PromptDraft) -> dict[str, Any]:
    variables = dict(asked.variables)
    if draft.tools:
        variables["tools"] = draft.tools
    if asked.thinking is not None:
        variables.setdefault("enable_thinking", asked.thinking)
    if asked.effort is not None:
        variables.setdefault("reasoning_effort", asked.effort)
    return variables


MOST_DIGEST_BYTES = 4_000_000
"""Most bytes of the digests of files that are remembered."""
SHOW = ("user", "tool")
"""The roles whose messages may have pictures."""


class PictureReader:
    """Reads the pictures of all requests to a model. Any thread may use it."""

    def __init__(self, tokenizer: SeeingTokenizer, folder: Path | None = None) -> None:
        """Prepare pictures with `tokenizer`. `folder`: the folder of files that may be named."""
        self.tokenizer = tokenizer
        self._folder = folder
        self._known = LRUCache[bytes](MOST_DIGEST_BYTES)
        self._one_at_a_time = Lock()

    def read(self, image: Any, name: str) -> Prepared:
        """Return the picture of a message's part, which errors call `name`.

        Raise PictureError if it can't be used or seen.
        """
        if not isinstance(image, str):
            raise PictureError(f"{name}: a picture has to be base64, or a data URL")
        content = picture_bytes(image, name, self._folder)
        file = blake2b(content, digest_size=16).digest()
        digest = self._known.get(file)
        found = None if digest is None else self.tokenizer.sight.held(digest)
        if found is None:
            with self._one_at_a_time:  # the plan has room for one that is decoded
                found = self.tokenizer.sight.prepare(decode_picture(content, name))
            self._known.put(file, found.picture.digest)
        return found


class RequestPictures:
    """The pictures of one request."""

    def __init__(self, reader: PictureReader) -> None:
        self._picture_reader = reader
        self._by_name: dict[str, Prepared] = {}

    def see(self, image: Any, name: str) -> str:
        """Read a picture, and return its digest, which stands for it. Raise PictureError."""
        found = self._picture_reader.read(image, name)
        digest = found.picture.digest.hex()
        self._by_name[digest] = found
        return digest

    def of(self, messages: Sequence[Mapping[str, Any]]) -> list[Prepared]:
        """Return the pictures of `messages`, in order."""
        names = [name for message in messages for name in message.get("pictures", ())]
        return [self._by_name[name] for name in names]

    def filled(self, text: str, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return rendered `messages` with the text of each picture. Raise PromptError."""
        pictures = self.of(messages)
        return self._picture_reader.tokenizer.filled(text, pictures) if pictures else text

    def placed(
        self, tokens: TokenArray, text: str, messages: Any
    ) -> tuple[TokenArray, str, list[PlainMessage]]:
        """Return the tokens of a filled text with the positions of the pictures of `messages`.

        Text and messages follow as observers get them. Raise PromptError.
        """
        tokenizer, pictures = self._picture_reader.tokenizer, self.of(messages)
        placed = tokenizer.sight.placed(tokens, pictures)
        return placed, tokenizer.spelled(text, pictures), tokenizer.worded(messages, pictures)
