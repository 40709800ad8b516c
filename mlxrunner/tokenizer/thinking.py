"""What models write around their thinking, in one list: for the chat, which shows it apart, and for profiling, which names it."""

from __future__ import annotations

ANALYSIS = "<|channel|>analysis<|message|>"
THINKING = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|channel>thought", "<channel|>"),
    ("[THINK]", "[/THINK]"),
    (ANALYSIS, "<|end|>"),
)
"""What begins a thinking block and what ends it. That of gpt-oss (`ANALYSIS`) is a message of its own; another one follows."""
