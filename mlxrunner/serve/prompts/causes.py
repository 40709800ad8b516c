"""Name the cause on the client's side for which a prompt reused less than the one before it.

A request is compared with the earlier one that has most messages in common with it. That takes one
digest for each message; texts are compared only where the first digest differs.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

from mlxrunner.profiling.schema import REASONS
from mlxrunner.results import Usage
from mlxrunner.serve.events import Client, ServerRequest
from mlxrunner.serve.prompts.answer_tokens import common_end, digest, message_digest
from mlxrunner.serve.prompts.builder import BuiltPrompt
from mlxrunner.serve.prompts.differences import difference, is_like
from mlxrunner.serve.prompts.lru import MemoizedFunction, footprint
from mlxrunner.serve.prompts.rules import without_billing
from mlxrunner.templates.messages import PICTURE, SYSTEM_ROLES, system_count
from mlxrunner.templates.segments import common

MOST_REQUESTS = 64
"""Most earlier requests that a new one is compared with."""
MOST_BYTES = 64_000_000
"""Most bytes of their messages."""

REMEDIES = {
    "first-request": "Nothing is to be done: the conversation is new to this model.",
    "another-model": "Ask one model for the whole conversation: another one reuses nothing.",
    "template-variables": "Choose thinking and effort once for a conversation: they change its "
    "template.",
    "title-request": "Nothing is to be done: a title is asked for in a prompt of its own, and the "
    "conversation stays stored.",
    "compaction": "Nothing is to be done: a summary has replaced the conversation.",
    "tool-order": "Send the tools in the same order each time.",
    "tools-changed": "Send the same tools from the first request on: they stand before all "
    "messages.",
    "billing-header": "Turn on the rule billing-header, which leaves this line out.",
    "changing-date": "Take the date or time out of {message}, or put it at the end of the "
    "last one.",
    "changing-id": "Take the id or path out of {message}, or keep it the same for all sessions.",
    "changing-number": "Take the changing number out of {message}, or put it at the end of the "
    "last one.",
    "system-grown": "Send reminders as messages at the end, not as more text in {message}.",
    "system-changed": "Keep {message} the same through a conversation.",
    "thinking-stripped": "Send the thinking of {message} back, or keep the template from leaving "
    "it out.",
    "message-edited": "Send {message} back as it was: all behind it has to be evaluated again.",
    "picture-changed": "Send {picture} of {message} back as it was: it and all behind it are "
    "evaluated again.",
    "asked-anew": "Nothing is to be done: only the last message is another one.",
    "message-dropped": "Keep {message} until the conversation is compacted as a whole.",
    "message-inserted": "Put new messages at the end: all behind {message} is evaluated again.",
}
"""The known causes, each with its remedy."""
_TITLE = re.compile(r"\b(?:title|topic|tags?|headline)\b", re.IGNORECASE)
_SUMMARY = re.compile(
    r"continued from a previous conversation|\bsummar(?:y|ize|ise)\b|\bcompact(?:ed|ion)?\b",
    re.IGNORECASE,
)
_LOOKED_AT = 4000
"""Characters at both ends of a text in which a title or a summary is asked for."""


@dataclass(frozen=True)
class Cause:
    """A cause of a miss."""

    name: str
    remedy: str
    """The change that helps, in one sentence."""
    message: int | None = None
    """The number of the message of the request that it is about, from 0."""


@dataclass(eq=False)
class Seen:
    """The parts of a request that are remembered."""

    model: str
    client: Client
    tools: tuple[bytes, ...]
    variables: bytes
    messages: Sequence[Mapping[str, Any]]
    digests: tuple[bytes, ...]
    nbytes: int
    """Bytes of the messages and of the tools' digests."""
    is_title: bool = False
    has_thought: bool = False
    """True if its answer has thinking."""
    previous: Seen | None = field(default=None, repr=False)
    """The request that it continues, or comes closest to."""
    known: frozenset[bytes] = frozenset()


class Causes:
    """The last requests, with which a new one is compared. Any thread may use it."""

    def __init__(self, most: int = MOST_REQUESTS) -> None:
        """Begin without requests. At most `most` are remembered."""
        self._recent: deque[Seen] = deque(maxlen=most)
        self._lock = Lock()

    def begin(self, asked: ServerRequest, made: BuiltPrompt, model: str = "") -> Seen:
        """Remember a request to `model`, and find the one that it comes closest to."""
        seen = _seen(asked, made, model)
        with self._lock:
            newest_first = reversed(self._recent)
            best = max(newest_first, key=lambda one: _likeness(seen, one), default=None)
            if best is not None and _likeness(seen, best) > (0,):
                seen.previous = replace(best, previous=None)
            self._recent.append(seen)
            total = sum(one.nbytes for one in self._recent)
            while total > MOST_BYTES and len(self._recent) > 1:
                total -= self._recent.popleft().nbytes
        return seen

    def end(self, seen: Seen, usage: Usage) -> Cause | None:
        """Return the cause for which a request reused less than it could; None if there is none."""
        return None if usage.outcome == "hit" else cause_of(seen, usage)


def _seen(asked: ServerRequest, made: BuiltPrompt, model: str) -> Seen:
    messages: Sequence[Mapping[str, Any]] = made.source
    digests = made.digests
    if "billing-header" in made.rules:
        messages = without_billing(messages)
        digests = tuple(map(message_digest, messages))
    tools = tuple(map(_tool_digest, asked.tools))
    variables = digest(
        {name: value for name, value in made.prompt.variables.items() if name != "tools"}
    )
    nbytes = made.nbytes + footprint(tools)
    seen = Seen(
        model, asked.client, tools, variables, messages, digests, nbytes, known=frozenset(digests)
    )
    seen.is_title = not tools and len(messages) <= 4 and _asks(messages, _TITLE)
    return seen


def _without_marks(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tool.items() if name != "cache_control"}


_tool_digest = MemoizedFunction(lambda tool: digest(_without_marks(tool)), MOST_BYTES)


def _asks(messages: Iterable[Mapping[str, Any]], what: re.Pattern[str]) -> bool:
    texts = (message["content"] for message in messages if message["role"] != "assistant")
    return any(what.search(text[:_LOOKED_AT] + text[-_LOOKED_AT:]) for text in texts)


def _likeness(seen: Seen, other: Seen) -> tuple[int, ...]:
    """Return how much two requests have in common, as a value that is larger for more."""
    if seen.is_title != other.is_title:
        return (0,)
    same_client = seen.client.name == other.client.name
    is_session = same_client and seen.client.session == other.client.session is not None
    is_session = is_session and not seen.is_title
    both = len(seen.known & other.known)
    if not (both or is_session or _begins_alike(seen, other)):
        return (0,)
    return (1, both, is_session, seen.model == other.model)


def _begins_alike(seen: Seen, other: Seen) -> bool:
    """Return True if the first messages of two requests are versions of one text."""
    if not seen.messages or not other.messages:
        return False
    first, second = seen.messages[0], other.messages[0]
    beginnings = second["content"][:_LOOKED_AT], first["content"][:_LOOKED_AT]
    return first["role"] == second["role"] and is_like(*beginnings)


def first_difference(seen: Seen, other: Seen) -> int:
    """Return the number of messages that two requests begin with in common."""
    pairs = enumerate(zip(seen.digests, other.digests, strict=False))
    shorter = min(len(seen.digests), len(other.digests))
    return next((number for number, (one, two) in pairs if one != two), shorter)


def cause_of(seen: Seen, usage: Usage) -> Cause | None:
    """Return the cause for which a request reused less than all of the one before it."""
    old = seen.previous
    if seen.is_title:
        return _cause("title-request")
    if old is None:
        return _cause("first-request")
    if old.model != seen.model:
        return _cause("another-model")
    at = first_difference(seen, old)
    if (summary := _summary(seen, old, at)) is not None:
        return _cause("compaction", summary)
    if at <= system_count(seen.messages) and not _continues(seen, old, at):
        return _cause("first-request")
    if old.variables != seen.variables:
        return _cause("template-variables")
    if old.tools != seen.tools:
        return _cause("tool-order" if sorted(old.tools) == sorted(seen.tools) else "tools-changed")
    if at < len(old.digests):
        return _changed(seen, old, at)
    return _grown(seen, old, usage)


def _continues(seen: Seen, old: Seen, at: int) -> bool:
    """Return True if a request is a version of the old one, not a new conversation."""
    if at >= min(len(seen.digests), len(old.digests)):
        return True
    rest = set(seen.digests[at:]) & set(old.digests[at:])
    return bool(rest) or is_like(old.messages[at]["content"], seen.messages[at]["content"])


def _summary(seen: Seen, old: Seen, at: int) -> int | None:
    """Return the number of a message that asks for a summary, or is one; None if there is none."""
    first = max(at, system_count(seen.messages))
    new = [n for n, one in enumerate(seen.digests) if n >= first and one not in old.known]
    found = [n for n in new if _asks([seen.messages[n]], _SUMMARY)]
    is_shorter = len(seen.digests) < len(old.digests)
    is_question = bool(found) and found[0] == len(seen.digests) - 1
    return found[0] if found and (is_shorter or (is_question and at < len(old.digests))) else None


def _changed(seen: Seen, old: Seen, at: int) -> Cause:
    """Return the cause for which message `at` of the old request is not there any more."""
    if at == len(seen.digests):
        return _cause("message-dropped", at)
    before, after = old.messages[at], seen.messages[at]
    if seen.digests[at] in old.digests[at + 1 :] and old.digests[at] not in seen.digests[at:]:
        return _cause("message-dropped", at)
    if old.digests[at] in seen.digests[at + 1 :]:
        return _cause("message-inserted", at)
    if before["role"] != after["role"]:
        return _cause("message-edited", at)
    picture = _changed_picture(before, after)
    if picture is not None and at < len(seen.digests) - 1:
        return _cause("picture-changed", at, picture)
    kind = difference(before["content"], after["content"])
    is_asked_anew = at == len(seen.digests) - 1 and after["role"] not in SYSTEM_ROLES
    if is_asked_anew and not _has_rest(before["content"], after["content"]):
        is_first = at <= system_count(seen.messages)
        return _cause("first-request") if is_first else _cause("asked-anew", at)
    if kind in REMEDIES:
        return _cause(kind, at)
    if after["role"] not in SYSTEM_ROLES:
        return _cause("message-edited", at)
    return _cause("system-grown" if kind == "grown" else "system-changed", at)


def _changed_picture(before: Mapping[str, Any], after: Mapping[str, Any]) -> int | None:
    """Return the number, from 1, of the first picture that is another one before the texts differ.

    None if there is none.
    """
    same = before["content"][: common(before["content"], after["content"])].count(PICTURE)
    pairs = zip(before.get("pictures", ()), after.get("pictures", ()), strict=False)
    changed = (number for number, (old, new) in enumerate(pairs) if old != new)
    return next((number + 1 for number in changed if number < same), None)


def _has_rest(old: str, new: str) -> bool:
    """Return True if most of a text stands behind what differs from its old version."""
    begin = common(old, new)
    return 2 * common_end(old[begin:], new[begin:]) > len(new)


def _grown(seen: Seen, old: Seen, usage: Usage) -> Cause | None:
    """Return the cause of a loss in a conversation that only went on."""
    end = len(old.digests)
    pairs = enumerate(zip(old.messages, seen.messages, strict=False))
    lost = [n for n, (was, now) in pairs if _thought(was) and not _thought(now)]
    is_lost = old.has_thought and end < len(seen.messages) and not _thought(seen.messages[end])
    if is_lost and seen.messages[end]["role"] == "assistant":
        lost.append(end)
    if not lost and usage.reason in ("diverged", "rewind_limited"):
        lost = [n for n, message in enumerate(seen.messages[:-1]) if _thought(message)][-1:]
    if lost:
        return _cause("thinking-stripped", lost[0])
    if usage.reason is None or usage.reason not in REASONS or usage.reason == "diverged":
        return None
    reason = REASONS[usage.reason]
    return Cause(reason.name.replace("_", "-"), _sentence(reason.remedy or reason.sentence))


def _thought(message: Mapping[str, Any]) -> bool:
    return bool(message.get("reasoning_content"))


def _cause(name: str, message: int | None = None, picture: int | None = None) -> Cause:
    named = "the prompt" if message is None else f"message {message}"
    shown = f"picture {picture}"
    return Cause(name, REMEDIES[name].format(message=named, picture=shown), message)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
