"""Name what differs between two versions of a message: a date, an id, a number, or more."""

from __future__ import annotations

import re

from mlxrunner.serve.prompts.answer_tokens import common_end
from mlxrunner.templates.segments import common

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
    """Return the kind of the difference between two versions of a text.

    That is "billing-header", "changing-date", "changing-id", "changing-number", "grown" if the new
    text only goes on, or "other".
    """
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
