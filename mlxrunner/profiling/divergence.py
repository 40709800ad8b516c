"""Find where a prompt leaves what the cache holds, and name the cause.

`Divergences` finds the place of a token that differs: its message, and the part of it, from the
text. `cause_of` names the cause of the first message that differs: a date, the tools, a dropped
message ... Both compare a prompt with the request that its account was made with. A place or a
cause that can't be told stays unknown and is never guessed. No tensors.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlxrunner.cache.account import WINDOW, Lookup, PromptAccount, are_few
from mlxrunner.cache.entry import FIRST_OF_PICTURES, TokenArray
from mlxrunner.profiling.schema import NOTHING, REASONS, Divergence, SharedTokens, Side
from mlxrunner.results import CAUSED_BY_CLIENT, Usage
from mlxrunner.templates.messages import (
    PICTURE,
    SYSTEM_ROLES,
    THINKING_TAGS,
    common,
    common_end,
    system_count,
)
from mlxrunner.templates.probe import Place, Rendered, is_thinking
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.prompt import TokenizedPrompt

UNKNOWN = TokenizedPrompt(np.empty(0, np.int32))
"""Stands for a prompt of which only tokens are known."""
COMMON = 8
"""The number of shared tokens that are shown before the place."""
_LONGEST_MARK = max(len(tags.begin) for tags in THINKING_TAGS)


@dataclass
class Divergences:
    """The divergences of one runner's requests from the earlier requests of their conversations.

    Tokens are shown as hashes with a random key that is never stored: without one, trying the whole
    vocabulary would reveal them.
    """

    tokenizer: Tokenizer
    log_text: bool = False
    """True to show the text of the tokens too."""

    def __post_init__(self) -> None:
        self._key = secrets.token_bytes(16)
        self._before = UNKNOWN

    def describe(
        self,
        prepared: TokenizedPrompt,
        prompt: TokenArray,
        lookup: Lookup,
        account: PromptAccount | None = None,
    ) -> Divergence | None:
        """Return where the prompt leaves its earlier request, which `account` names.

        Without one it is where the prompt leaves the entry; but never for a client of a server,
        whose entry may be that of another one. None if one of them begins with the other.
        """
        if account is not None and account.earlier is not None:
            earlier, index = account.earlier, account.shared
            length, dropped = len(earlier.tokens), earlier.tokens[index : index + WINDOW].tolist()
            self._before = earlier.source or UNKNOWN
        elif prepared.caller is None:
            index, length, dropped = lookup.matched, lookup.entry_tokens, list(lookup.dropped)
            self._before = UNKNOWN
        else:
            return None
        if length == 0 or index >= min(len(prompt), length):
            return None
        coming = prompt[index : index + WINDOW].tolist()
        here, before = self._places(prepared, prompt, index, dropped)
        place = here if here.part is not None else before
        shared = prompt[max(0, index - COMMON) : index].tolist()
        return Divergence(
            index,
            *place[:3],
            SharedTokens(self._hashes(shared), self._text(shared)),
            Side(*before[:3], self._hashes(dropped), self._text(dropped), before.picture),
            Side(*here[:3], self._hashes(coming), self._text(coming), here.picture),
            place.picture,
        )

    def _places(
        self, prepared: TokenizedPrompt, prompt: TokenArray, index: int, dropped: Sequence[int]
    ) -> tuple[Place, Place]:
        """Return the places of the first characters that differ, in the prompt and the entry."""
        at = self._character(prepared, prompt, index)
        if at is None:
            return self._place(prepared, None), Place()
        before, text = self._before, prepared.text
        known = before.text[:at] == text[: len(before.text)][:at]
        spelled, rest = self.tokenizer.decode(dropped), before.text[at:] if known else ""
        old = spelled if spelled.startswith(rest) else rest or spelled  # as far as they go
        first = dropped[:1], prompt[index : index + 1].tolist()
        shows = any(token >= FIRST_OF_PICTURES for side in first for token in side)
        same = 0 if shows else common(old, text[at:])
        if same == len(old) and not shows:
            # All that is remembered is the same text in other tokens: compare the first two tokens.
            same = common(*map(self.tokenizer.decode, first))
        at, old = min(at + same, len(text) - 1), old[same:]
        here = self._place(prepared, at, shows)
        if not known:
            return here, Place()
        if at < len(before.text):
            return here, self._place(before, at, shows)
        if not before.messages:
            return here, Place(part="text" if before.kind == "text" else None)
        return here, Place(
            len(before.messages),
            "assistant",
            self._part_of_answer(text[len(before.text) : at], old),
        )

    def _part_of_answer(self, begun: str, rest: str) -> str:
        """Return the part of the answer with which `rest` begins, after the `begun` part."""
        shared = self._before.text[-_LONGEST_MARK:] + begun
        if is_thinking(shared + rest, len(shared)):
            return "thinking"
        ends = (self.tokenizer.decode([token]) for token in self.tokenizer.message_ends)
        whole = shared + rest
        is_end = any(
            whole.startswith(end, begin)
            for end in ends
            if end
            for begin in range(max(0, len(shared) - len(end) + 1), len(shared) + 1)
        )
        return "message_end" if is_end else "text"

    def _place(self, prepared: TokenizedPrompt, at: int | None, shows: bool = False) -> Place:
        """Return the place of character `at`. `shows`: PICTURE stands for a picture there."""
        if at is None or prepared.kind == "tokens":
            return Place()
        if prepared.kind == "text":
            return Place(part="text" if at < len(prepared.text) else None)
        text, messages = prepared.text, prepared.messages
        found = Rendered(self.tokenizer.render, messages, text, prepared.variables).place(at)
        if not shows or text[at] != PICTURE or found.message is None:
            return found
        earlier = sum(one["content"].count(PICTURE) for one in messages[: found.message])
        return found._replace(part="picture", picture=text[:at].count(PICTURE) - earlier + 1)

    def _character(self, prepared: TokenizedPrompt, prompt: TokenArray, index: int) -> int | None:
        """Return where token `index` begins in the text; None if the tokens spell another one."""
        text, decode = prepared.text, self.tokenizer.decode
        if not text:
            return None
        if len(prompt) - index <= index:
            return _from_end(text, decode(prompt[index:].tolist()))
        begins = decode(prompt[:index].tolist())
        at = _from_begin(text, begins)
        if at is None and index:  # a BOS that the tokenizer put in front
            at = _from_begin(text, begins.removeprefix(decode(prompt[:1].tolist())))
        return at

    def _hashes(self, tokens: Sequence[int]) -> list[str]:
        """Return the tokens as keyed hashes of 8 hexadecimal digits."""
        return [
            hashlib.blake2b(token.to_bytes(4, "little"), digest_size=4, key=self._key).hexdigest()
            for token in tokens
        ]

    def _text(self, tokens: Sequence[int]) -> str | None:
        """Return the text of the tokens; None if it may not be shown."""
        return self.tokenizer.decode(tokens) if self.log_text else None


def _from_begin(text: str, decoded: str) -> int | None:
    """Count the characters of `text` that the tokens spell, except for spaces; None: others."""
    whole = decoded.rstrip("\ufffd")
    if text.startswith(whole):
        return len(whole)
    letters, at = "".join(whole.split()), 0
    for letter in letters:
        while text[at : at + 1].isspace():
            at += 1
        if text[at : at + 1] != letter:
            return None
        at += 1
    spaces = len(whole) - len(whole.rstrip())
    while spaces and text[at : at + 1].isspace():
        at, spaces = at + 1, spaces - 1
    return at


def _from_end(text: str, decoded: str) -> int | None:
    """Return from where on the `decoded` tokens spell `text`; None if they spell another one."""
    whole = decoded.lstrip("\ufffd")
    spelled = len(whole) if text.endswith(whole) else _from_begin(text[::-1], whole[::-1])
    return None if spelled is None else max(0, len(text) - spelled - (whole != decoded))


REMEDIES = {
    "first-request": "Nothing is to be done: the conversation is new to this model.",
    "another-model": "Nothing is to be done, unless one model can answer the whole conversation: "
    "another one reuses nothing.",
    "template-variables": "Choose thinking and effort once for a conversation: they change its "
    "template.",
    "title-request": "Nothing is to be done: a title is asked for in a prompt of its own, and the "
    "conversation stays stored.",
    "compaction": "Nothing is to be done: a summary has replaced the conversation.",
    "tool-order": "Send the tools in the same order each time.",
    "key-order": "Turn on the rule tool-keys, which writes the keys of the tools in one order.",
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
    "message-edited": "Send {message} back unchanged: all tokens after it are evaluated again.",
    "picture-changed": "Send {picture} of {message} back unchanged: it and all tokens after "
    "it are evaluated again.",
    "changing-beginning": "Put the text that stays the same in {message} before the text that "
    "changes.",
    "asked-anew": "Nothing is to be done: only the last message is another one.",
    "message-dropped": "Keep {message} until the conversation is compacted as a whole.",
    "message-moved": "Leave a message where it stood, and put new ones at the end: {message} has "
    "moved.",
    "message-inserted": "Put new messages at the end: all tokens after {message} are "
    "evaluated again.",
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
class PromptRecord:
    """The parts of a prompt of messages that are compared with those of an earlier one."""

    tools: tuple[bytes, ...]
    """A digest of each tool."""
    variables: bytes
    """A digest of the template's other variables."""
    messages: Sequence[Mapping[str, Any]]
    digests: tuple[bytes, ...]
    """A digest of each message."""
    unordered_tools: Sequence[Any] = field(default=(), repr=False)
    """The tools as they came; empty if a rule has put their keys in order."""
    is_switched: bool = False
    """True if another model was asked the turn before."""
    has_thought: bool = False
    """True if its answer has thinking."""

    def __post_init__(self) -> None:
        self.known = frozenset(self.digests)
        is_short = not self.tools and len(self.messages) <= 4
        self.is_title = is_short and _asks(self.messages, _TITLE)
        self._found: list[Cause | None] = []

    def cause(self, account: PromptAccount, usage: Usage) -> Cause | None:
        """Return the cause for which less was reused than could be; None if there is none."""
        if not self._found:
            earlier = account.earlier
            caller = getattr(earlier.source, "caller", None) if earlier is not None else None
            self._found.append(cause_of(self, caller.record if caller else None, usage))
        return self._found[0]


def _asks(messages: Iterable[Mapping[str, Any]], what: re.Pattern[str]) -> bool:
    texts = (message["content"] for message in messages if message["role"] != "assistant")
    return any(what.search(text[:_LOOKED_AT] + text[-_LOOKED_AT:]) for text in texts)


def first_difference(prompt: PromptRecord, other: PromptRecord) -> int:
    """Return the number of messages that two requests begin with in common."""
    pairs = enumerate(zip(prompt.digests, other.digests, strict=False))
    shorter = min(len(prompt.digests), len(other.digests))
    return next((number for number, (one, two) in pairs if one != two), shorter)


def cause_of(prompt: PromptRecord, old: PromptRecord | None, usage: Usage) -> Cause | None:
    """Return the cause for which a prompt reused less than it could; None if there is none.

    `old`: the earlier request of its conversation. A prompt of which no token is displaced, and few
    are missed, has at most a cause against which nothing is to be done.
    """
    found = None if usage.outcome == "hit" else _cause_of(prompt, old, usage)
    is_few = are_few(usage.missed_tokens, usage.cached_tokens) or usage.reason == "side_by_side"
    is_passing = usage.reason in (None, "empty", "evicted", "side_by_side", *CAUSED_BY_CLIENT)
    is_cheap = not usage.displaced_tokens and ((is_few and is_passing) or not usage.missed_tokens)
    if found is not None and is_cheap and not found.remedy.startswith(NOTHING):
        return None
    if found is not None and found.name == "first-request" and not is_few:
        return _of_program(usage) or found  # it is new to this process only
    return found


def _cause_of(prompt: PromptRecord, old: PromptRecord | None, usage: Usage) -> Cause | None:
    if prompt.is_title:
        return _cause("title-request")
    if old is None:
        return _cause("another-model" if prompt.is_switched else "first-request")
    at = first_difference(prompt, old)
    if (summary := _summary(prompt, old, at)) is not None:
        return _cause("compaction", summary)
    if at <= system_count(prompt.messages) and not _continues(prompt, old, at):
        return _cause("first-request")
    if old.variables != prompt.variables:
        return _cause("template-variables")
    if old.tools != prompt.tools:
        return _cause(
            "tool-order" if sorted(old.tools) == sorted(prompt.tools) else "tools-changed"
        )
    tools = old.unordered_tools, prompt.unordered_tools  # equal ones, as they came
    if usage.displaced_tokens and all(tools) and json.dumps(tools[0]) != json.dumps(tools[1]):
        return _cause("key-order")
    if at < len(old.digests):
        return _changed(prompt, old, at)
    return _grown(prompt, old, usage)


def _continues(prompt: PromptRecord, old: PromptRecord, at: int) -> bool:
    """Return True if a request is a version of the old one, not a new conversation."""
    if at >= min(len(prompt.digests), len(old.digests)):
        return True
    rest = set(prompt.digests[at:]) & set(old.digests[at:])
    return bool(rest) or is_like(old.messages[at]["content"], prompt.messages[at]["content"])


def _summary(prompt: PromptRecord, old: PromptRecord, at: int) -> int | None:
    """Return the number of a message that asks for a summary, or is one; None if there is none."""
    if len(old.digests) <= system_count(old.messages) + 1:  # a question has nothing to sum up
        return None
    first = max(at, system_count(prompt.messages))
    new = [n for n, one in enumerate(prompt.digests) if n >= first and one not in old.known]
    found = [n for n in new if _asks([prompt.messages[n]], _SUMMARY)]
    is_shorter = len(prompt.digests) < len(old.digests)
    is_question = bool(found) and found[0] == len(prompt.digests) - 1
    return found[0] if found and (is_shorter or (is_question and at < len(old.digests))) else None


def _changed(prompt: PromptRecord, old: PromptRecord, at: int) -> Cause:
    """Return the cause for which message `at` of the old request is not there any more."""
    if at == len(prompt.digests):
        return _cause("message-dropped", at)
    before, after = old.messages[at], prompt.messages[at]
    if prompt.digests[at] in old.digests[at + 1 :] and old.digests[at] not in prompt.digests[at:]:
        return _cause("message-dropped", at)
    if old.digests[at] in prompt.digests[at + 1 :]:
        place = prompt.digests.index(old.digests[at], at + 1)
        if prompt.digests[at] in old.digests[at + 1 :]:
            return _cause("message-moved", at if place == at + 1 else place)
        return _cause("message-inserted", at)
    if before["role"] != after["role"]:
        return _cause("message-edited", at)
    picture = _changed_picture(before, after)
    if picture is not None and at < len(prompt.digests) - 1:
        return _cause("picture-changed", at, picture)
    kind = difference(before["content"], after["content"])
    is_asked_anew = at == len(prompt.digests) - 1 and after["role"] not in SYSTEM_ROLES
    if is_asked_anew and not _has_rest(before["content"], after["content"]):
        is_first = at <= system_count(prompt.messages)
        return _cause("first-request") if is_first else _cause("asked-anew", at)
    if kind in REMEDIES:
        return _cause(kind, at)
    if after["role"] not in SYSTEM_ROLES:
        return _cause("changing-beginning" if is_asked_anew else "message-edited", at)
    return _cause("system-grown" if kind == "grown" else "system-changed", at)


def _changed_picture(before: Mapping[str, Any], after: Mapping[str, Any]) -> int | None:
    """Return the number, from 1, of the first picture that differs before the texts do."""
    same = before["content"][: common(before["content"], after["content"])].count(PICTURE)
    pairs = zip(before.get("pictures", ()), after.get("pictures", ()), strict=False)
    changed = (number for number, (old, new) in enumerate(pairs) if old != new)
    return next((number + 1 for number in changed if number < same), None)


def _has_rest(old: str, new: str) -> bool:
    """Return True if most of a text stands after what differs from its old version."""
    begin = common(old, new)
    return 2 * common_end(old[begin:], new[begin:]) > len(new)


def _grown(prompt: PromptRecord, old: PromptRecord, usage: Usage) -> Cause | None:
    """Return the cause of a loss in a conversation that only continued."""
    end = len(old.digests)
    pairs = enumerate(zip(old.messages, prompt.messages, strict=False))
    lost = [n for n, (was, now) in pairs if _thought(was) and not _thought(now)]
    is_lost = old.has_thought and end < len(prompt.messages) and not _thought(prompt.messages[end])
    if is_lost and prompt.messages[end]["role"] == "assistant":
        lost.append(end)
    if not lost and usage.reason in ("diverged", "rewind_limited"):
        lost = [n for n, message in enumerate(prompt.messages[:-1]) if _thought(message)][-1:]
    if lost:
        return _cause("thinking-stripped", lost[0])
    return _of_program(usage)


def _of_program(usage: Usage) -> Cause | None:
    """Return the cause of a loss that is not the client's; None if nothing can be done about it."""
    if usage.reason is None or usage.reason not in REASONS:
        return None
    if usage.reason in ("diverged", "side_by_side"):
        return None
    if usage.reason == "evicted" and are_few(usage.missed_tokens, usage.cached_tokens):
        return None
    reason = REASONS[usage.reason]
    text = reason.remedy or reason.sentence
    return Cause(reason.name.replace("_", "-"), f"{text[:1].upper()}{text[1:]}.")


def _thought(message: Mapping[str, Any]) -> bool:
    return bool(message.get("reasoning_content"))


def _cause(name: str, message: int | None = None, picture: int | None = None) -> Cause:
    named = "the prompt" if message is None else f"message {message}"
    shown = f"picture {picture}"
    return Cause(name, REMEDIES[name].format(message=named, picture=shown), message)


NEAR = 60
"""Characters beside a difference that are looked at: a date may begin before its first change."""
MOST = 8000
"""Most characters of a difference that may be dates, ids or numbers."""
_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*")
_MONTH = "(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_DAY = "(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?"
_DATE = re.compile(
    r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?)?"
    r"|\d{1,2}[./]\d{1,2}[./]\d{2,4}"
    r"|\d{1,2}:\d\d(?::\d\d)?(?:\s?[ap]\.?m\.?)?"
    rf"|\b{_DAY}\b,?|\b{_MONTH}\b\.?(?:\s+\d{{1,2}}\b)?(?:,?\s+\d{{4}})?|\b\d{{1,2}}\s+{_MONTH}\b"
    r"|\b1[5-9]\d{8}(?:\d{3})?\b",
    re.IGNORECASE,
)
_ID = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
    r"|(?:[A-Za-z]:)?(?:[/\\][\w.@~+-]+)+[/\\]?"
    r"|\b(?=[0-9a-f]*\d)[0-9a-f]{7,}\b|\b(?=\w*\d)(?=\w*[A-Za-z])\w{12,}\b",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d[\d,._]*")


def difference(old: str, new: str) -> str:
    """Return the kind of the difference of a text: a name of REMEDIES, "grown", or "other"."""
    if "x-anthropic-billing-header" in old and _BILLING.sub("", old) == _BILLING.sub("", new):
        return "billing-header"
    first, second = _windows(old, new)
    is_short = max(len(first), len(second)) <= MOST and first.split() != second.split()
    for kind, masks in (
        ("changing-date", (_DATE,)),
        ("changing-id", (_ID,)),
        ("changing-id", (_DATE, _ID)),
        ("changing-number", (_DATE, _ID, _NUMBER)),
    ):
        if is_short and _masked(first, masks) == _masked(second, masks):
            return kind
    return "grown" if old.strip() and new.startswith(old.rstrip()) else "other"


def is_like(old: str, new: str) -> bool:
    """Return True if two texts begin and end alike, over at least a third of the longer one."""
    half = -(-max(len(old), len(new)) // 6)  # what one end has at least: most texts have neither
    if old[:half] != new[:half] and old[-half:] != new[-half:]:
        return False
    begin = common(old, new)
    shared = begin + common_end(old[begin:], new[begin:])
    return 3 * shared >= max(len(old), len(new))


def _masked(text: str, masks: tuple[re.Pattern[str], ...]) -> str:
    for mask in masks:
        text = mask.sub("\0", text)
    text = re.sub("\0(?:[\\s,]*\0)+", "\0", text)
    return " ".join(text.split())


def _windows(old: str, new: str) -> tuple[str, str]:
    """Return the parts of two texts that differ, with what is near, from word to word."""
    begin = common(old, new)
    after = common_end(old[begin:], new[begin:])
    begin = max(begin - NEAR, 0)
    begin = old.rfind(" ", 0, begin) + 1 if begin else 0
    after = max(after - NEAR, 0)
    if after:
        space = old.find(" ", len(old) - after)
        after = 0 if space < 0 else len(old) - space
    return old[begin : len(old) - after], new[begin : len(new) - after]
