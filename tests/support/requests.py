"""Requests as coding agents send them, short."""

from __future__ import annotations

from typing import Any

from support.scripted import FUNCTION, PARAMETERS, TOOL

from mlxrunner.batch.openai_format import sealed

READ = {"name": "read", "description": "Read a file", "input_schema": PARAMETERS}
OPENCODE: dict[str, Any] = {
    "max_tokens": 32000,
    "top_p": 1,
    "stream_options": {"include_usage": True},
    "tool_choice": "auto",
    "tools": [TOOL],
    "messages": [
        {"role": "system", "content": "You are opencode."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Fix "}, {"type": "text", "text": "it."}],
        },
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Read it.",
            "tool_calls": [
                {
                    "id": "call_0",
                    "type": "function",
                    "function": {"name": "read", "arguments": '{"path": "a"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": "text of a"},
        {"role": "developer", "content": "Be brief."},
    ],
}
CLAUDE_CODE: dict[str, Any] = {
    "max_tokens": 32000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli"},
        {
            "type": "text",
            "text": "You are Claude Code.",
            "cache_control": {"type": "ephemeral", "ttl": "1h"},
        },
    ],
    "tools": [READ, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "metadata": {"user_id": "user_abc_session_def"},
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>a</system-reminder>"},
                {"type": "text", "text": "Fix it.", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Read it.", "signature": "msg_1"},
                {"type": "text", "text": "I read it."},
                {"type": "tool_use", "id": "call_0", "name": "read", "input": {"path": "a"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "call_0",
                    "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}],
                },
                {"type": "tool_result", "tool_use_id": "call_1", "is_error": True, "content": ""},
                {"type": "text", "text": "Go on."},
            ],
        },
        {"role": "system", "content": "The date changed."},
    ],
}
SPAWN = {"type": "function", "name": "spawn", "parameters": {"type": "object"}}
COLLAB = {"type": "namespace", "name": "collab", "description": "Agents"}


def item(role: str, kind: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


CODEX: dict[str, Any] = {
    "instructions": "You are Codex.",
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "conversation-1",
    "client_metadata": {"x-codex-installation-id": "1"},
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "text": {"verbosity": "low"},
    "tools": [
        {"type": "function", **FUNCTION, "strict": False},
        {"type": "web_search", "external_web_access": False},
        {**COLLAB, "tools": [SPAWN, {"type": "custom", "name": "patch"}]},
    ],
    "input": [
        item("developer", "input_text", "Permissions."),
        item("developer", "input_text", "Skills."),
        item("user", "input_text", "Fix it."),
        {"type": "reasoning", "summary": [], "encrypted_content": sealed("Read it.")},
        item("assistant", "output_text", "I read it."),
        {"type": "function_call", "call_id": "call_0", "name": "read", "arguments": "{}"},
        {
            "type": "function_call",
            "call_id": "call_1",
            "namespace": "collab",
            "name": "spawn",
            "arguments": "{}",
        },
        {"type": "function_call_output", "call_id": "call_0", "output": "text of a"},
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": [{"type": "input_text", "text": "done"}],
        },
    ],
}
