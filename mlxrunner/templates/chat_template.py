"""Render a conversation in a form that its chat template takes, and check that nothing is lost.

Templates differ in what they take: contents as texts or as lists of parts, a system message or
none, arguments of calls as objects or as JSON texts. Each form is tried until one is taken. What a
message says and the rendered text does not contain is an error: the model would not know of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from mlxrunner.errors import MlxrunnerError, OptionError, PromptError, TemplateLimitError
from mlxrunner.results import logger
from mlxrunner.templates.ends import CALL_ID, TOOL
from mlxrunner.templates.messages import PlainMessage, check_messages, system_count
from mlxrunner.templates.rendering import Render
from mlxrunner.templates.thinking import THINKING_TAGS

SHORT = 16
"""Characters of a text that is not sure to be a message's own, wherever it is found."""
HEAD = 24
"""Characters of a content that are looked for first."""
MOST_LOOKS = 8
"""Times that a rendered text may be searched as a whole for contents that are not in it."""
MOST_PROVEN = 4096
"""Most places in conversations of which it is remembered that the template writes them."""
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
"""The roles that a template is asked about."""
ANSWER = ("<answer>", "</answer>")
"""The texts around the answer of Hunyuan, whose template drops all else."""
JOINT = "\n\n"
"""The text between two contents that become one."""
_MARK = "qzj{}x"
"""Stands for a text: letters and a number, which no filter changes."""
_PARTS_SHOWN = ("'type': 'text'", '"type": "text"')
"""Signs that a template wrote a list of parts as it is."""
Messages = list[dict[str, Any]]
Key = tuple[Any, ...]


class MessageFormat(NamedTuple):
    """A form in which a template may take a conversation."""

    parts: frozenset[str] = frozenset()
    """Roles whose contents are lists of parts."""
    has_text_arguments: bool = False
    """True if the arguments of calls are JSON texts."""
    is_split: bool = False
    """True if a text beside calls is a message of its own before them."""
    is_folded: bool = False
    """True if the system prompt begins the first user message."""
    is_silent: bool = False
    """True if a message with calls and no text has None for its content."""

    def of(self, messages: Sequence[PlainMessage]) -> Messages:
        """Return `messages` in this form."""
        shaped: Messages = [dict(message) for message in messages]
        if self.is_folded:
            shaped = _folded(shaped)
        if self.is_split:
            shaped = [one for message in shaped for one in _split(message)]
        if self.has_text_arguments:
            shaped = [_with_text_arguments(message) for message in shaped]
        if self.is_silent:
            shaped = [
                one | {"content": None} if _calls(one) and not one["content"] else one
                for one in shaped
            ]
        return [
            message | {"content": [{"type": "text", "text": message["content"]}]}
            if message["role"] in self.parts and (message["content"] or not _calls(message))
            else message
            for message in shaped
        ]


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
        # A system prompt is no reason for a refusal that is the same without it.
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
        has_text, is_silent = self._call_form if _has_calls(messages) else (False, False)
        first = MessageFormat(self._parts, has_text, is_silent=is_silent)
        yield first
        if self._render is None:
            return
        shares = any(message["content"] and _calls(message) for message in messages)
        others = product(
            dict.fromkeys((first.parts, frozenset[str](), ROLES, ROLES - {"system"})),
            (first.has_text_arguments, not first.has_text_arguments)
            if _has_calls(messages)
            else (False,),
            (False, True) if shares else (False,),
            (False, True) if _can_fold(messages) else (False,),
            (is_silent,),
        )
        yield from (form for one in others if (form := MessageFormat(*one)) != first)

    @cached_property
    def _parts(self) -> frozenset[str]:
        """The roles whose contents the template writes only if they are lists of parts."""
        if self._writes("u", MessageFormat()):
            return frozenset()
        roles = {"user": "u", "system": "su", "assistant": "uau", "tool": "uct"}
        as_parts = frozenset(ROLES)
        return frozenset(
            role
            for role, letters in roles.items()
            if not self._writes(letters, MessageFormat(as_parts - {role}), role)
            and self._writes(letters, MessageFormat(as_parts), role)
        )

    @cached_property
    def _call_form(self) -> tuple[bool, bool]:
        """The form of calls: if arguments are JSON texts, and if the content beside is None.

        Each is True only if the template writes the JSON of a call so, and not otherwise.
        """
        shown = json.dumps(_ARGUMENTS, ensure_ascii=False)
        for is_silent in (False, True):
            objects, texts = (
                self._probed("uct", MessageFormat(self._parts, has_text, is_silent=is_silent)) or ""
                for has_text in (False, True)
            )
            is_text = shown in texts and (
                not objects or (str(_ARGUMENTS) in objects and shown not in objects)
            )
            if is_text or _ARGUMENTS["p"] in objects:
                return is_text, is_silent
        return False, False

    def _probed(self, letters: str, form: MessageFormat) -> str | None:
        """Return the text of a conversation of marks in a form, or None if it is refused.

        Raise TemplateLimitError if the template was stopped: each further question would take as
        long.
        """
        messages: Any = [_probe_message(letter, n) for n, letter in enumerate(letters)]
        for tools in (None, [TOOL]):
            try:
                return self._written(form.of(messages), True, {"tools": tools})
            except TemplateLimitError:
                raise
            except Exception:
                continue
        return None

    def _writes(self, letters: str, form: MessageFormat, role: str = "user") -> bool:
        """Return True if the template writes all marks of a role, and not as lists."""
        text = self._probed(letters, form)
        if text is None or any(sign in text for sign in _PARTS_SHOWN):
            return False
        names = {"u": "user", "s": "system", "a": "assistant", "t": "tool", "c": ""}
        return all(_MARK.format(n) in text for n, one in enumerate(letters) if names[one] == role)

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
        """Return all that the template writes, as it shows with a mark behind each text."""
        mark = _unused_mark(rendering)
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
            if _calls(message):
                marks[Lost(n, "tool_calls")] = tuple(
                    mark.format(f"{n}{kind}{number}")
                    for number, call in enumerate(_calls(message))
                    for kind in ("na" if call["function"]["arguments"] else "n")
                )
        return {one for one, own in marks.items() if all(found in text for found in own)}


_ARGUMENTS = {"p": _MARK.format("v")}


def _probe_message(letter: str, number: int) -> dict[str, Any]:
    content = _MARK.format(number)
    if letter == "c":
        function = {"name": "probetool", "arguments": _ARGUMENTS}
        call = {"type": "function", "id": CALL_ID, "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if letter == "t":
        own = {"tool_call_id": CALL_ID, "name": "probetool"}
        return {"role": "tool", "content": content, **own}
    role = {"s": "system", "u": "user", "a": "assistant"}[letter]
    return {"role": role, "content": content}


def _calls(message: Mapping[str, Any]) -> Sequence[Any]:
    calls: Sequence[Any] = message.get("tool_calls") or ()
    return calls


def _has_calls(messages: Sequence[PlainMessage]) -> bool:
    return any(map(_calls, messages))


def _can_fold(messages: Sequence[PlainMessage]) -> bool:
    count = system_count(messages, ("system",))
    return 0 < count < len(messages) and messages[count]["role"] == "user"


def _folded(messages: Messages) -> Messages:
    """Return messages whose system prompt begins the first user message."""
    count = system_count(messages, ("system",))
    texts = [message["content"] for message in messages[: count + 1]]
    return [messages[count] | {"content": JOINT.join(texts)}, *messages[count + 1 :]]


def _split(message: dict[str, Any]) -> Messages:
    """Return a message as two: its text, and its calls."""
    if not (message["content"] and _calls(message)):
        return [message]
    text = {name: value for name, value in message.items() if name != "tool_calls"}
    calls = {"role": message["role"], "content": "", "tool_calls": message["tool_calls"]}
    return [text, calls]


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if not _calls(message):
        return message
    return message | {"tool_calls": [_with_text(call) for call in message["tool_calls"]]}


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return call | {"function": call["function"] | {"arguments": text}}


def _shows_parts(rendering: _Rendering) -> bool:
    """Return True if the template wrote a list of parts as it is."""
    return bool(rendering.form.parts) and any(
        sign in rendering.text and not any(sign in one["content"] for one in rendering.messages)
        for sign in _PARTS_SHOWN
    )


def _doubts(rendering: _Rendering, proven: set[Key]) -> dict[Lost, Key]:
    """Return what may not be in the text, each with the key of its proof, unless it is `proven`.

    A content is certain if it is long and found behind the one before it, and a system prompt if it
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
    """A search for contents in a rendered text, each behind the one before.

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
        if all(call["function"]["name"] in text for call in _calls(message)):
            found.add(Lost(n, "tool_calls"))
    if all(_name(tool) in text for tool in rendering.tools):
        found.add(Lost(None, "tools"))
    return found


def _unused_mark(rendering: _Rendering) -> str:
    """Return a mark whose letters are not in the text."""
    mark = _MARK
    while mark.partition("{")[0] in rendering.text:
        mark = "q" + mark
    return mark


def _with_marks(mark: str, number: int, message: PlainMessage) -> dict[str, Any]:
    """Return a message with a mark behind its content, its calls' names and in their arguments."""
    marked: dict[str, Any] = dict(message)
    if message["content"].strip():
        content = message["content"]
        end = visible_span(content)[1] if message["role"] == "assistant" else len(content)
        marked["content"] = content[:end] + mark.format(f"{number}c") + content[end:]
    if _calls(message):
        marked["tool_calls"] = [
            _with_argument(
                _renamed(call, mark.format(f"{number}n{index}")), mark.format(f"{number}a{index}")
            )
            for index, call in enumerate(message["tool_calls"])
        ]
    return marked


def _with_argument(call: dict[str, Any], mark: str) -> dict[str, Any]:
    """Return a call with a mark behind each argument that is a text, and as one more argument."""
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
    """Return a tool or a call with a mark behind the name of its function."""
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
        if len(_calls(message)) > 1:
            return PromptError(
                f"tool_calls: the model's chat template does not use all {len(_calls(message))} of "
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
