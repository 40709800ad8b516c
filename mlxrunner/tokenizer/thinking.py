"""The marks that models put around their thinking: for the chat, which shows it apart, and for profiling, which names it."""

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
"""Begin and end of a thinking block. That of gpt-oss (`ANALYSIS`) is a message of its own; another one follows."""
