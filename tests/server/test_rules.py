"""The rules: what they change, what they never change, and that prompts only grow."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.strict_templates import TEMPLATES, Makers

from mlxrunner.profiling.divergence import REMEDIES
from mlxrunner.server.events import ApiError, ServerRequest
from mlxrunner.server.prompts.builder import PromptBuilder
from mlxrunner.server.prompts.rules import RULES
from mlxrunner.templates.messages import common

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a file.",
        "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}},
    },
}
ROLES = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.{}; cc_entrypoint=cli;"


@pytest.fixture(params=TEMPLATES)
def family(request: pytest.FixtureRequest) -> str:
    """Each family in turn."""
    name: str = request.param
    return name


def messages_of(roles: str) -> list[dict[str, Any]]:
    """Return a conversation: s, d, u, a, c (a call), t (its result), each with its own text."""
    return [_message(role, number) for number, role in enumerate(roles)]


def _message(role: str, number: int) -> dict[str, Any]:
    if role == "c":
        function = {"name": "look", "arguments": f'{{"at": {1000 + number}}}'}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    message = {"role": ROLES[role], "content": text_of(role, number)}
    return message | ({"tool_call_id": f"call_{number - 1}"} if role == "t" else {})


def text_of(role: str, number: int) -> str:
    """Return the text that stands for a message in the prompt."""
    return str(1000 + number) if role == "c" else f"<{role}{number}>"


def asked(messages: list[dict[str, Any]], tools: bool = False, **more: Any) -> ServerRequest:
    """Return a request."""
    return ServerRequest(
        protocol="chat", model="", messages=messages, tools=[TOOL] if tools else (), **more
    )


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize(
    "roles", "u su dsu ddu ssu suasu susau sus ucts suctsctsu suctu au sau tu uu uaau uctau".split()
)
def test_every_family_takes_what_clients_send(
    makers: Makers, family: str, roles: str, tools: bool
) -> None:
    """No template refuses it, every text is there, and none is moved to the front."""
    made = makers[family].make(asked(messages_of(roles), tools))
    at = 0
    for number, role in enumerate(roles):
        found = made.rendered.find(text_of(role, number), at)
        assert found >= 0, (text_of(role, number), made.rendered)
        at = found
    assert made.prompt.text == made.rendered
    assert makers[family].tokenizer.decode(made.prompt.tokens.tolist()) == made.rendered


@settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_prompts_only_grow(makers: Makers, family: str, data: st.DataObject) -> None:
    """A conversation that continues begins with the whole text of its last prompt."""
    turns = st.lists(st.sampled_from(["ua", "usa", "sua", "uctcta", "uctsa", "uua", "usctua"]))
    ends = st.sampled_from(["u", "us", "uct", "ucts", "uctct"])
    before = "s" + "".join(data.draw(turns)) + data.draw(ends)
    after = before + "a" + "".join(data.draw(turns)) + data.draw(ends)
    tools = data.draw(st.booleans())
    maker = makers[family]
    texts = [maker.make(asked(messages_of(roles), tools)).rendered for roles in (before, after)]
    last = text_of(before[-1], len(before) - 1)
    assert common(*texts) >= texts[0].rindex(last) + len(last)


def test_each_rule_can_be_turned_off(makers: Makers) -> None:
    """The prompt is what the template makes of the messages, or the template's refusal."""
    qwen, (template, _) = makers["qwen3.5"], TEMPLATES["qwen3.5"]
    off = PromptBuilder(qwen.tokenizer, template, off=["system-in-the-middle", "billing-header"])
    with pytest.raises(ApiError, match="System message must be at the beginning") as error:
        off.make(asked(messages_of("suasu")))
    assert error.value.status == 400
    messages = [{"role": "system", "content": BILLING.format(1)}, {"role": "user", "content": "a"}]
    assert "billing" in off.make(asked(messages)).rendered
    assert "billing" not in qwen.make(asked(messages)).rendered


@pytest.mark.parametrize("behind", ["", "\n\nYou are an agent."])
def test_the_billing_header_is_left_out(makers: Makers, family: str, behind: str) -> None:
    """Alone or before the rest, so that its changes change nothing; elsewhere it is a text."""
    made = [
        makers[family].make(
            asked(
                [
                    {"role": "system", "content": BILLING.format(version) + behind},
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": BILLING.format(7)},
                ]
            )
        )
        for version in (1, 2)
    ]
    assert made[0].rendered == made[1].rendered
    assert made[0].rules[0] == "billing-header"
    assert "cc_version=2.1.7" in made[0].rendered
    assert "cc_version=2.1.1;" not in made[0].rendered


def shuffled(value: Any, order: random.Random) -> Any:
    """Return the same JSON with other orders of keys."""
    if isinstance(value, dict):
        names = order.sample(sorted(value), len(value))
        return {name: shuffled(value[name], order) for name in names}
    return value


def test_the_order_of_a_tools_keys_has_no_effect(makers: Makers, family: str) -> None:
    """Marks for caches have none, too; the order of the tools stays."""
    texts = set()
    for seed in range(5):
        tool = shuffled(TOOL, random.Random(seed))
        if seed % 2:
            tool["cache_control"] = {"type": "ephemeral"}
        other = {"type": "function", "function": {"name": "a_tool", "parameters": {}}}
        request = ServerRequest(
            protocol="chat", model="", messages=messages_of("su"), tools=[tool, other]
        )
        made = makers[family].make(request)
        assert ("cache-control" in made.rules) == bool(seed % 2)
        texts.add(made.rendered)
    (text,) = texts
    assert text.index("look") < text.index("a_tool")


def test_a_system_message_in_the_middle_has_the_familys_own_header(makers: Makers) -> None:
    """Elsewhere the user's message carries it."""
    texts = {
        family: maker.make(asked(messages_of("suasu"))).rendered for family, maker in makers.items()
    }
    assert "<|im_start|>system\n<s3><|im_end|>\n" in texts["qwen3.5"]
    assert texts["qwen3.5"] == texts["qwen3"]
    assert "<|start|>developer<|message|><s3><|end|>" in texts["gpt-oss"]
    reminder = "<system-reminder>\n<s3>\n</system-reminder>"
    assert f"[INST]{reminder}\n\n<u4>[/INST]" in texts["mistral"]
    assert f"<start_of_turn>user\n{reminder}\n\n<u4><end_of_turn>" in texts["gemma3"]
    assert f"<｜User｜>{reminder}<｜User｜><u4>" in texts["deepseek"]


def test_a_reminder_does_not_strip_thinking(makers: Makers) -> None:
    """It is not taken for the last question, up to which Qwen's template leaves out thinking."""
    for family in ("qwen3", "qwen3.5"):
        messages = messages_of("sucts")
        messages[2]["reasoning_content"] = "I have to look."
        assert "I have to look." in makers[family].make(asked(messages, True)).rendered
        messages.append({"role": "user", "content": "thanks"})
        assert "I have to look." not in makers[family].make(asked(messages, True)).rendered


def test_several_calls_of_one_message(makers: Makers, family: str) -> None:
    """Llama 3 and gpt-oss have them one by one, each before its result."""
    messages = messages_of("succtt")
    messages[2]["tool_calls"] += messages.pop(3)["tool_calls"]
    messages[3]["tool_call_id"], messages[4]["tool_call_id"] = "call_2", "call_3"
    made = makers[family].make(asked(messages, True))
    split = "one-call-a-message" in made.rules
    assert split == (family in ("llama3", "gpt-oss"))
    order = ("1002", "<t4>", "1003", "<t5>") if split else ("1002", "1003", "<t4>", "<t5>")
    places = [made.rendered.index(text) for text in order]
    assert places == sorted(places)


def test_a_name_is_written_or_the_answer_says_that_it_is_not(makers: Makers, family: str) -> None:
    """None of these templates writes the name of an author."""
    messages = messages_of("su")
    plain = makers[family].make(asked(messages))
    messages[1]["name"] = "Zorblin"
    made = makers[family].make(asked(messages))
    assert ("no-names" in made.rules, "no-names" in plain.rules) == (True, False)
    assert made.rendered == plain.rendered


def test_the_rules_have_names_reasons_and_clients() -> None:
    """Each name once, each text a sentence."""
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.does.endswith(".")
        assert rule.reason.endswith(".")
        assert rule.clients


PAGE = (Path(__file__).parents[2] / "docs" / "serve-prefixes.md").read_text()


def test_the_docs_list_every_rule() -> None:
    """In the order in which they act, to the letter, and no other."""
    rows = [
        f"| `{rule.name}` | {rule.does} | {rule.reason} | {rule.clients} | on |" for rule in RULES
    ]
    assert "\n".join(rows) + "\n\n" in PAGE


def test_the_docs_list_every_cause() -> None:
    """With its remedy."""
    rows = [
        f"| `{name}` | {remedy.format(message='the message', picture='the picture')} |"
        for name, remedy in REMEDIES.items()
    ]
    assert "\n".join(rows) + "\n\n" in PAGE
