"""Render a conversation in a form that its chat template takes, and check that nothing is lost.

Templates differ in what they take: contents as texts or as lists of parts, a system message or
none, arguments of calls as objects or as JSON texts. Each form is tried until one is taken. What a
message says and the rendered text does not contain is an error: the model would not know of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from mlxrunner.errors import MlxrunnerError, OptionError, PromptError, TemplateLimitError
from mlxrunner.results import logger
from mlxrunner.templates.messages import (
    ROLES,
    THINKING_TAGS,
    MessageFormat,
    Messages,
    PlainMessage,
    calls_of,
    can_fold,
    check_messages,
    common,
    opens_thinking,
)
from mlxrunner.templates.probe import MARK, PARTS_SHOWN, FormatProbe, rendered
from mlxrunner.templates.rendering import Render

SHORT = 16
"""Characters of a text that is not sure to be a message's own, wherever it is found."""
HEAD = 24
"""Characters of a content that are looked for first."""
MOST_LOOKS = 8
"""Times that a rendered text may be searched as a whole for contents that are not in it."""
MOST_PROVEN = 4096
"""Most places in conversations of which it is remembered that the template writes them."""
ANSWER = ("<answer>", "</answer>")
"""The texts around the answer of Hunyuan, whose template drops all else."""
Key = tuple[Any, ...]


class Lost(NamedTuple):
    """Something of a request that a rendered text does not contain."""

    message: int | None
    """The index of its message; None for the tools."""
    what: str
    """"content", "tool_calls" or "tools"."""


@dataclass(frozen=True)
class _Rendering:
    """A conversation, the form that its template got, and the text that it wrote."""

    messages: Sequence[PlainMessage]
    form: MessageFormat
    add_generation_prompt: bool
    variables: Mapping[str, Any]
    text: str

    @property
    def tools(self) -> Sequence[Any]:
        """The tools that the request describes."""
        return self.variables.get("tools") or ()

    @property
    def frame(self) -> Key:
        """Return all about the request but its messages that may decide what is written."""
        roles = self.messages[0]["role"], self.messages[-1]["role"]
        has_user = any(message["role"] == "user" for message in self.messages)
        names = tuple(map(_name, self.tools))
        return (*roles, has_user, self.add_generation_prompt, self.form, names)

    def place(self, index: int, what: str) -> Key:
        """Return all about a message but its text that may decide if it is written."""
        messages, last = self.messages, len(self.messages) - 1
        before = messages[index - 1]["role"] if index else ""
        after = messages[index + 1]["role"] if index < last else ""
        message = messages[index]
        return what, before, message["role"], after, len(message.get("tool_calls", ()))


class ChatTemplate:
    """The chat template of one model. Any thread may use it."""

    def __init__(self, render: Render | None) -> None:
        """Render with `render`; None: in a plain format, because the model has no template."""
        self._render = render
        self._proven: dict[Key, set[Key]] = {}
        self._is_missing = render is None
        self._probe = FormatProbe(self._written)

    def text(
        self,
        messages: Sequence[PlainMessage],
        *,
        add_generation_prompt: bool = True,
        is_partial: bool = False,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation, or of a part of one, which may lack what follows.

        A template without a system role (Gemma 2, some of Mistral) gets the system text in front of
        the first user message. Raise TemplateLimitError if the template was stopped, PromptError if
        it refuses the conversation, or leaves out a part of it that is not `is_partial`, and
        OptionError if it leaves out the tools.
        """
        plain = check_messages(messages)
        problem: MlxrunnerError | None = None
        refusals = dict[bool, MlxrunnerError]()
        first: str | None = None
        for form in self._forms(plain):
            try:
                text = self._written(form.of(plain), add_generation_prompt, variables)
            except TemplateLimitError:
                raise
            except Exception as error:
                refusals.setdefault(form.is_folded, _refusal(error))
                continue
            rendering = _Rendering(plain, form, add_generation_prompt, variables, text)
            if _shows_parts(rendering):
                continue
            lost = self._lost(rendering)
            if lost is None:
                return text
            if first is None:
                first = text
                problem = _explained(lost, rendering)
        if is_partial and first is not None:
            return first
        # A system prompt is not a reason for a refusal that is the same without it.
        raise (
            problem
            or refusals.get(True)
            or refusals.get(False)
            or PromptError("the model's chat template refuses this conversation")
        )

    def unchecked(
        self,
        messages: Sequence[PlainMessage],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation in the likeliest form, whatever it leaves out.

        Raise PromptError if the template refuses it, and TemplateLimitError if it was stopped.
        """
        plain = check_messages(messages)
        try:
            return self._written(
                next(self._forms(plain)).of(plain), add_generation_prompt, variables
            )
        except TemplateLimitError:
            raise
        except Exception as error:
            raise _refusal(error) from error

    def _written(
        self, messages: Messages, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        if self._render is not None:
            try:
                return self._render(messages, add_generation_prompt, **variables)
            except TemplateLimitError as error:
                raise TemplateLimitError(
                    f"the model's chat template does not end well: {error}; another model, or --raw"
                ) from error
        if self._is_missing:
            self._is_missing = False
            logger.warning(
                "the model has no chat template: messages are written as User: TEXT, Assistant: "
                "TEXT; for a model that is not made for chats, --raw continues a text"
            )
        lines = "".join(f"{one['role'].capitalize()}: {one['content']}\n" for one in messages)
        return lines + ("Assistant:" if add_generation_prompt else "")

    def _forms(self, messages: Sequence[PlainMessage]) -> Iterator[MessageFormat]:
        """Yield the forms that a conversation may have, the likeliest first."""
        has_calls = any(map(calls_of, messages))
        has_text, is_silent = self._probe.of_calls if has_calls else (False, False)
        first = MessageFormat(self._probe.parts, has_text, is_silent=is_silent)
        yield first
        if self._render is None:
            return
        shares = any(message["content"] and calls_of(message) for message in messages)
        has_several = any(len(calls_of(message)) > 1 for message in messages)
        others = product(
            dict.fromkeys((first.parts, frozenset[str](), ROLES, ROLES - {"system"})),
            (first.has_text_arguments, not first.has_text_arguments) if has_calls else (False,),
            (False, True) if shares else (False,),
            (False, True) if can_fold(messages) else (False,),
            (is_silent,),
            (False, True) if has_several else (False,),
        )
        yield from (form for one in others if (form := MessageFormat(*one)) != first)

    def _lost(self, rendering: _Rendering) -> Lost | None:
        """Return something that the text does not contain; None if it has everything.

        What was proven once, with a mark in its place, is remembered for the next prompts.
        """
        proven = self._proven.setdefault(rendering.frame, set())
        doubts = _doubts(rendering, proven)
        if not doubts:
            return None
        marked = self._marked(rendering)
        missing = [one for one in doubts if one not in marked]
        lost = max(missing, key=lambda one: one.what) if missing else None  # tools first
        if sum(map(len, self._proven.values())) + len(self._proven) > MOST_PROVEN:
            self._proven.clear()
        if lost is None:
            proven.update(doubts.values())
        return lost

    def _marked(self, rendering: _Rendering) -> set[Lost]:
        """Return all that the template writes, as it shows with a mark after each text."""
        mark = MARK
        while mark.partition("{")[0] in rendering.text:  # its letters have to be the mark's alone
            mark = "q" + mark
        messages: Any = [_with_marks(mark, n, one) for n, one in enumerate(rendering.messages)]
        variables = dict(rendering.variables)
        if rendering.tools:
            variables["tools"] = [_renamed(tool, mark.format("t")) for tool in rendering.tools]
        try:
            text = self._written(
                rendering.form.of(messages), rendering.add_generation_prompt, variables
            )
        except Exception:
            return _found(rendering)
        marks: dict[Lost, tuple[str, ...]] = (
            {Lost(None, "tools"): (mark.format("t"),)} if rendering.tools else {}
        )
        for n, message in enumerate(rendering.messages):
            marks[Lost(n, "content")] = (mark.format(f"{n}c"),)
            if calls_of(message):
                marks[Lost(n, "tool_calls")] = tuple(
                    mark.format(f"{n}{kind}{number}")
                    for number, call in enumerate(calls_of(message))
                    for kind in ("na" if call["function"]["arguments"] else "n")
                )
        return {one for one, own in marks.items() if all(found in text for found in own)}


def _shows_parts(rendering: _Rendering) -> bool:
    """Return True if the template wrote a list of parts as it is."""
    return bool(rendering.form.parts) and any(
        sign in rendering.text and not any(sign in one["content"] for one in rendering.messages)
        for sign in PARTS_SHOWN
    )


def _doubts(rendering: _Rendering, proven: set[Key]) -> dict[Lost, Key]:
    """Return what may not be in the text, each with the key of its proof, unless it is `proven`.

    A content is certain if it is long and found after the one before it, and a system prompt if it
    is long and no other message has it, too. Everything else is written if the template writes a
    mark in its place.
    """
    text, at, doubts, is_in_order = rendering.text, 0, dict[Lost, Key](), True
    search = _Search(text)
    for n, message in enumerate(rendering.messages):
        if message.get("tool_calls"):
            doubts[Lost(n, "tool_calls")] = rendering.place(n, "tool_calls")
        found, content = search.find_message(message, at)
        size = len(content)
        if size < SHORT or found < 0 or _is_elsewhere(rendering.messages, n):
            if not content.strip():
                continue
            is_known = found >= 0 or search.find(content, 0) >= 0
            key = rendering.place(n, "content") if is_known else (n, hash(content))
            doubts[Lost(n, "content")] = key
            is_in_order = is_in_order and (found >= 0 or message["role"] == "system")
        if found >= 0 and message["role"] != "system":  # a system prompt may be moved to the end
            at = found + size
    if not is_in_order:  # a text that is left out may be found in place of a later one
        every = [n for n, one in enumerate(rendering.messages) if _required(one)]
        doubts = {Lost(n, "content"): rendering.place(n, "content") for n in every} | doubts
    if rendering.tools:
        is_found = all(_name(tool) in text for tool in rendering.tools)
        doubts[Lost(None, "tools")] = ("tools", is_found)
    return {lost: key for lost, key in doubts.items() if key not in proven}


def _is_elsewhere(messages: Sequence[PlainMessage], index: int) -> bool:
    """Return True if a system prompt may be found in what another message says."""
    own = messages[index]["content"].strip()
    return messages[index]["role"] == "system" and any(
        own in one["content"] for n, one in enumerate(messages) if n != index
    )


class _Search:
    """A search for contents in a rendered text, each after the one before.

    It ends after MOST_LOOKS texts, so that its time is linear. Behind them nothing is found, and
    marks have to prove what is written.
    """

    def __init__(self, text: str) -> None:
        self._text, self._left = text, MOST_LOOKS * len(text)

    def find(self, content: str, at: int) -> int:
        """Return the place of a content from `at` on; -1 if it is not found."""
        # Look for the beginning first: to look for a long text takes time before it begins.
        head = content[:HEAD]
        found = self._text.find(head, at, at + self._left + len(head))
        if found >= 0 and not self._text.startswith(content, found):
            found = self._text.find(content, found, at + self._left + len(content))
        passed = (len(self._text) if found < 0 else found) - at
        self._left = max(0, self._left - passed)
        return found

    def find_message(self, message: PlainMessage, at: int) -> tuple[int, str]:
        """Return the place of a message's content from `at` on, and the content as it stands there.

        A template may trim it, leave out thinking, and write JSON.
        """
        own = _required(message)
        escaped = (json.dumps(own, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True))
        for spelling in dict.fromkeys((own, *escaped)):
            if (found := self.find(spelling, at)) >= 0:
                return found, spelling
        return -1, own


def visible_span(answer: str) -> tuple[int, int]:
    """Return where the text of an assistant begins and ends that a template has to write.

    It may leave out thinking, also if that was cut off, and what is around an `<answer>`.
    """
    ends = [answer.rfind(tags.end) + len(tags.end) for tags in THINKING_TAGS if tags.end in answer]
    begin = max(ends, default=0)
    cuts = [answer.find(tags.begin, begin) for tags in THINKING_TAGS]
    end = min((at for at in cuts if at >= 0), default=len(answer))
    opened, closed = (answer.rfind(tag, begin, end) for tag in ANSWER)
    if 0 <= opened < closed:
        begin, end = opened + len(ANSWER[0]), closed
    return begin, end


def _required(message: PlainMessage) -> str:
    """Return what of a content a template has to write."""
    content = message["content"]
    is_answer = message["role"] == "assistant"
    return (content[slice(*visible_span(content))] if is_answer else content).strip()


def _found(rendering: _Rendering) -> set[Lost]:
    """Return all that is found in the text as it is, for a template that refuses marks."""
    text, found = rendering.text, set[Lost]()
    for n, message in enumerate(rendering.messages):
        if message["content"].strip() in text or _required(message) in text:
            found.add(Lost(n, "content"))
        if all(call["function"]["name"] in text for call in calls_of(message)):
            found.add(Lost(n, "tool_calls"))
    if all(_name(tool) in text for tool in rendering.tools):
        found.add(Lost(None, "tools"))
    return found


def _with_marks(mark: str, number: int, message: PlainMessage) -> dict[str, Any]:
    """Return a message with a mark after its content, its calls' names and in their arguments."""
    marked: dict[str, Any] = dict(message)
    if message["content"].strip():
        content = message["content"]
        end = visible_span(content)[1] if message["role"] == "assistant" else len(content)
        marked["content"] = content[:end] + mark.format(f"{number}c") + content[end:]
    if calls_of(message):
        marked["tool_calls"] = [
            _with_argument(
                _renamed(call, mark.format(f"{number}n{index}")), mark.format(f"{number}a{index}")
            )
            for index, call in enumerate(message["tool_calls"])
        ]
    return marked


def _with_argument(call: dict[str, Any], mark: str) -> dict[str, Any]:
    """Return a call with a mark after each argument that is a text, and as one more argument."""
    function = call["function"]
    given = {
        name: value + mark if isinstance(value, str) else value
        for name, value in function["arguments"].items()
    }
    return call | {"function": function | {"arguments": {**given, mark: mark}}}


def _name(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def _renamed(tool: Any, mark: str) -> Any:
    """Return a tool or a call with a mark after the name of its function."""
    if not _name(tool):
        return tool
    if "function" not in tool:
        return tool | {"name": tool["name"] + mark}
    return tool | {"function": {**tool["function"], "name": _name(tool) + mark}}


def _refusal(error: Exception) -> PromptError:
    why = " ".join(str(error).split()) or type(error).__name__
    line = getattr(error, "lineno", None)
    refusal = PromptError(
        f"the model's chat template refuses this conversation: {why}"
        if line is None
        else f"the model's chat template can't be read, line {line}: {why}: download it again, or "
        "use --raw"
    )
    refusal.__cause__ = error
    return refusal


def _explained(lost: Lost, rendering: _Rendering) -> MlxrunnerError:
    """Return the error for a part of a request that the template leaves out."""
    if lost.message is None:
        return OptionError(
            f"tools: the model's chat template does not use them, and {len(rendering.tools)} "
            "are given: leave them out, or describe them in the system prompt"
        )
    message = rendering.messages[lost.message]
    if lost.what == "tool_calls":
        count = len(calls_of(message))
        if count > 1:
            return PromptError(
                f"tool_calls: the model's chat template does not use all {count} of "
                f"message {lost.message}: write one call in a message, each before its result, or "
                "write them into its content"
            )
        return PromptError(
            f"tool_calls: the model's chat template does not use them, and message {lost.message} "
            "has some: write them into its content"
        )
    shown = " ".join(message["content"].split())
    return PromptError(
        f"message {lost.message}: the model's chat template leaves out this content of role "
        f"{message['role']!r:.80}: {shown[:60]!r}: write it into a message of the user, or use "
        "a model whose template takes it"
    )


_END = "\ue0f8\ue0f9"
"""Stands after the words that are continued: private characters, which no template changes."""
_TAGS = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")
REMEDY = (
    "end it with a message of the user, or ask for a new message of the assistant "
    "(continue_final_message: false)"
)


class Continued(NamedTuple):
    """A rendered conversation that ends within the assistant's turn."""

    text: str
    """The text up to the end of the words that are continued."""
    header: int
    """Characters of `text` up to the place where the model's own answer would begin."""
    words: int
    """Characters of `text` before the words that are continued."""


def is_continued(messages: Sequence[Mapping[str, Any]], wanted: bool | None = None) -> bool:
    """Return True if an answer to `messages` continues the last of them.

    `wanted`: as the caller asks for it; None: whenever the last message is the assistant's and has
    no tool calls. Raise PromptError if it is wanted and can't be.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        if wanted:
            raise PromptError(
                "continue_final_message needs a last message of the assistant, and it is of role "
                f"{last.get('role')!r:.80}: leave it out, as well as add_generation_prompt: false"
            )
        return False
    if wanted is False or (last.get("tool_calls") and not wanted):
        return False
    if last.get("tool_calls"):
        raise PromptError(
            f"message {len(messages) - 1}: the conversation ends with tool calls, which have no "
            f"words to be continued: add their results, or {REMEDY}"
        )
    return True


def continued(
    render: Render, messages: Sequence[Mapping[str, Any]], ends: Iterable[str] = ()
) -> Continued:
    """Return the text of `messages`, whose last one is the assistant's, up to its end.

    `ends`: the texts of tokens that end messages. An empty last message is left out. Raise
    PromptError if the template can't write it so.
    """
    *before, last = messages
    words, thought = str(last.get("content") or ""), _thought(last)
    if not words and not thought:
        if not before:
            raise PromptError("message 0: the assistant's words are empty, and nothing is before")
        text = render(before)
        return Continued(text, len(text), len(text))
    begun = rendered(render, before, True) if before else None
    tags = next((tags for tags in THINKING_TAGS if words.lstrip().startswith(tags.begin)), None)
    if begun is not None and words and not thought and (tags or _skips_thinking(begun)):
        own = words.lstrip() if tags else words
        head = begun
        if tags and begun.rstrip().endswith(tags.begin):
            head = begun.rstrip().removesuffix(tags.begin)
        return Continued(head + own, min(len(begun), len(head + own)), len(head))
    if (
        begun is not None
        and not words
        and any(begun.rstrip().endswith(tags.begin) for tags in THINKING_TAGS)
    ):
        return Continued(begun + thought, len(begun), len(begun))
    found = _written_before_mark(render, messages, words, thought, begun, ends)
    header = (
        len(begun)
        if begun is not None and found.text.startswith(begun)
        else common(begun or "", found.text[: found.words])
    )
    return found._replace(header=min(header, found.words))


def _thought(message: Mapping[str, Any]) -> str:
    return str(message.get("reasoning_content") or message.get("thinking") or "")


def _skips_thinking(begun: str) -> bool:
    """Return True if a generation prompt ends with thinking that is closed."""
    opened = any(begun.rstrip().endswith(tags.begin) for tags in THINKING_TAGS)
    return opens_thinking(begun) and not opened


def _written_before_mark(
    render: Render,
    messages: Sequence[Mapping[str, Any]],
    words: str,
    thought: str,
    begun: str | None,
    ends: Iterable[str],
) -> Continued:
    """Return what the template writes before the end of the last message's words.

    Without words, its thinking is continued.
    """
    last = {**messages[-1], "content": words + _END if words else ""}
    if not words:
        for name in ("reasoning_content", "thinking"):
            if last.get(name):
                last[name] = thought + _END
    number, said = len(messages) - 1, words or thought
    try:
        text = render([*messages[:-1], last], add_generation_prompt=False)
    except TemplateLimitError:
        raise
    except PromptError as error:  # in its words, without the mark as it is or as `repr` shows it
        why = str(error).replace(_END, "").replace(repr(_END)[1:-1], "")
        raise PromptError(
            f"message {number}: the conversation ends with the assistant's words, and the model's "
            f"chat template can't end there ({why}): {REMEDY}"
        ) from error
    head, found, tail = text.partition(_END)
    why = ""
    if not found or _END in tail:
        why = "leaves it out" if not found else "writes it twice"
    elif not head.endswith(said):
        said = said.lstrip()
        why = "" if head.endswith(said) else "writes other words for it"
    if not why and begun is not None and head == begun + said:
        return Continued(head, 0, len(head) - len(said))
    if not why and _is_text(tail, ends):
        why = "writes other text after it"
    if why:
        what = "words" if words else "thinking"
        raise PromptError(
            f"message {number}: the answer can't continue the assistant's {what} "
            f"{said[:40]!r}, because the model's chat template {why}: {REMEDY}"
        )
    return Continued(head, 0, len(head) - len(said))


def _is_text(tail: str, ends: Iterable[str]) -> bool:
    """Return True if `tail` has more than end tokens, other tags and white space."""
    for end in sorted(filter(str.strip, ends), key=len, reverse=True):
        tail = tail.replace(end, "")
    return bool(_TAGS.sub("", tail).strip())
