"""The rules by which a prompt may differ from what a client sent.

Each rule has a name, a reason and a switch, and is named in the report of a request that it
changed. Nothing else about a prompt is ever changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mlxrunner.serve.prompts import rewriting
from mlxrunner.serve.prompts.probe import Probe
from mlxrunner.serve.prompts.rewriting import Draft


@dataclass(frozen=True)
class Rule:
    """A rule, as docs/serve-prefixes.md lists it."""

    name: str
    does: str
    """The effect, in one sentence."""
    reason: str
    clients: str
    """The clients or models that it is for."""
    apply: Callable[[Draft, Probe], Draft]
    """Its effect: a function that returns the same draft if there is nothing to change."""
    is_on: bool = True


RULES: tuple[Rule, ...] = (
    Rule(
        "billing-header",
        "Leaves out the line `x-anthropic-billing-header: ...` that begins the system prompt.",
        "It changes with the client's version and request, and no model needs it.",
        "Claude Code",
        rewriting.leave_out_billing,
    ),
    Rule(
        "cache-control",
        "Leaves `cache_control` marks out of the descriptions of tools.",
        "They move from request to request, and a template may write them.",
        "Claude Code, Cline",
        rewriting.leave_out_marks,
    ),
    Rule(
        "tool-keys",
        "Writes the keys of the tools' JSON in one order; the tools stay in theirs.",
        "Some clients write the same tool with other orders of keys each time.",
        "clients whose dictionaries have no order (Go, Swift)",
        rewriting.order_keys,
    ),
    Rule(
        "developer-as-system",
        "Gives messages of role `developer` the role `system`.",
        "The template has no such role, and would leave them out or refuse them.",
        "Codex; templates other than that of gpt-oss",
        rewriting.developer_as_system,
    ),
    Rule(
        "two-systems",
        "Joins system messages at the beginning into one.",
        "The template takes only one, or writes only the first.",
        "Codex, Claude Code; Gemma, Mistral, gpt-oss",
        rewriting.join_systems,
    ),
    Rule(
        "tools-as-text",
        "Describes tools at the end of the system prompt, and writes calls and results as text.",
        "The template does not write tools, so the model would not know of them.",
        "all with tools; Gemma 3, Phi-4",
        rewriting.write_tools,
    ),
    Rule(
        "calls-as-text",
        "Writes calls and results of tools as text, each in its place.",
        "The template refuses them or leaves them out in a request that describes no tools.",
        "opencode's and Claude Code's compaction",
        rewriting.write_calls,
    ),
    Rule(
        "results-behind-calls",
        "Puts each result behind its call; a call without one gets `[no result]`, and a result "
        "without a call becomes a text of the user.",
        "The template refuses a call without its result, or a result without its call.",
        "all with tools, after an interruption or a compaction; Mistral, gpt-oss",
        rewriting.pair_results,
    ),
    Rule(
        "text-in-thinking",
        "Appends the text before a call to the thinking before it.",
        "The template refuses text and thinking in one message with a call.",
        "all with tools; gpt-oss",
        rewriting.text_in_thinking,
    ),
    Rule(
        "channel-tags",
        "Writes the tag `<|channel|>` in earlier answers as `<channel>`.",
        "The template refuses an answer with such a tag, and so each later request.",
        "agents that work on chat templates; gpt-oss",
        rewriting.without_channels,
    ),
    Rule(
        "one-call-a-message",
        "Writes several calls of one message as several messages, each before its result.",
        "The template refuses a message with two calls.",
        "all with tools; Llama 3",
        rewriting.one_call_a_message,
    ),
    Rule(
        "text-beside-calls",
        "Leaves out the text of an assistant's message that has calls.",
        "The template leaves it out, and refuses it as a message of its own before the calls.",
        "all with tools; Mistral",
        rewriting.leave_out_text_beside_calls,
    ),
    Rule(
        "system-in-the-middle",
        "Writes a later system message where it stands: with the template's own header for system "
        "messages, or else in the user's message, within `<system-reminder>`.",
        "The template refuses it, leaves it out, or moves it to the front, which changes the "
        "beginning of all that was evaluated.",
        "Claude Code; Qwen 3.5, Gemma, Mistral, gpt-oss, DeepSeek",
        rewriting.keep_system_in_place,
    ),
    Rule(
        "same-roles",
        "Joins neighbouring messages of the same role.",
        "The template wants user and assistant in turn.",
        "all; Gemma, Mistral",
        rewriting.join_roles,
    ),
    Rule(
        "assistant-first",
        "Puts an empty message of the user before an assistant, or a result, that begins.",
        "The template refuses a conversation that the user does not begin.",
        "chat programs with a greeting; Gemma, Mistral, Llama 3 with tools",
        rewriting.begin_with_user,
    ),
    Rule(
        "user-after-tools",
        "Puts an empty message of the assistant between a tool's result and the user's message.",
        "The template refuses a user who writes right after a result.",
        "Claude Code; Mistral",
        rewriting.answer_after_tools,
    ),
    Rule(
        "short-call-ids",
        "Replaces the ids of calls by nine letters and digits.",
        "The template refuses others.",
        "all with tools; Mistral",
        rewriting.shorten_ids,
    ),
)
"""The rules, in the order in which they act."""


def apply(
    draft: Draft, probe: Probe, off: Iterable[str] = (), rules: Sequence[Rule] = RULES
) -> tuple[Draft, tuple[str, ...]]:
    """Return a conversation after all rules, and the names of the rules that changed it.

    `off`: the names of the rules that are off.
    """
    acted, without = [], set(off)
    for rule in rules:
        if rule.is_on and rule.name not in without:
            after = rule.apply(draft, probe)
            if after is draft:
                continue
            if after != draft or json.dumps(after.tools) != json.dumps(draft.tools):
                acted.append(rule.name)
                draft = after
    return draft, tuple(acted)
