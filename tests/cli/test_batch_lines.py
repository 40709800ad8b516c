"""Lines of `mlxrunner batch` ask for forms of answers, and for what other programs' lines do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.batch_command import answers, openai, run, run_lines, write
from support.checks import ends, has
from support.models import write_model, write_tokenizer

pytestmark = pytest.mark.usefixtures("folder")


def test_openai_batch_files_end_to_end() -> None:
    """Answered in that format, errors too."""
    bodies = ({"max_tokens": 3}, {"max_completion_tokens": 3}, {"n": 2})
    lines = [openai(f"q{n}", "Hello!", **body) for n, body in enumerate(bodies, start=1)]
    result = run_lines("--parallel 1", *lines)
    one, two, three = answers()
    assert result.exit_code == 3
    assert [line["custom_id"] for line in (one, two, three)] == ["q1", "q2", "q3"]
    body, other = (line["response"]["body"] for line in (one, two))
    assert (one["error"], one["response"]["status_code"]) == (None, 200)
    assert body["object"] == "chat.completion"
    content = other["choices"][0]["message"]["content"]
    assert body["choices"][0]["message"] == {"role": "assistant", "content": content}
    assert body["choices"][0]["finish_reason"] == "length"
    cached = {one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (body, other)}
    assert cached == {0, body["usage"]["prompt_tokens"] - 1}
    assert three["response"]["status_code"] == 400
    assert three["error"]["code"] == "invalid_request_error"
    assert three["error"]["message"].startswith("line 3: ")


@pytest.mark.parametrize("broken", [0, 1])
def test_a_line_that_cannot_be_read_is_answered_in_the_format_of_the_file(broken: int) -> None:
    """The format is that of the first line that can be read; the answer has no custom_id."""
    lines: list[Any] = [openai("q1", "Hello!", max_tokens=3)]
    lines.insert(broken, "{not JSON")
    run_lines("", *lines)
    found = answers()[broken]
    assert (found["custom_id"], found["response"]["status_code"]) == (None, 400)
    assert found["error"]["message"].startswith(f"line {broken + 1}: not JSON")


def test_choices_and_schemas() -> None:
    """For all lines, and for one."""
    either = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    write(either | {"additionalProperties": False}, file="schema.json")
    shaped = {"type": "json_schema", "json_schema": {"schema": {"type": "boolean"}}}
    forms = ({}, {"choices": ["red", "blue"]}, {"response_format": shaped})
    write(*({"prompt": "Hello!", **form} for form in forms))
    run("in.jsonl -o out.jsonl --choices yes,no --max-tokens 30")
    assert answers()[0]["text"] in ("yes", "no")
    assert answers()[1]["text"] in ("red", "blue")
    run("in.jsonl -o shaped.jsonl --schema schema.json --max-tokens 60")
    assert isinstance(json.loads(answers("shaped.jsonl")[0]["text"])["a"], int)
    assert answers("shaped.jsonl")[2]["text"] in ("true", "false")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("--choices a,b", {"response_format": {"type": "json_object"}}),
        ("--schema schema.json", {"choices": ["yes", "no"]}),
        ("--choices a,b", {"response_format": {"type": "text"}}),
        ("--schema schema.json", {"response_format": {"type": "text"}}),
    ],
)
def test_the_form_of_a_line_takes_the_place_of_the_batch_s(
    given: str, line: dict[str, Any]
) -> None:
    """Also one of the other kind, or none."""
    Path("schema.json").write_text('{"enum": [1]}')
    ends(run_lines(f"--max-tokens 4 {given}", {"prompt": "Hello!"} | line), 0)
    assert answers()[0]["text"] not in ("a", "b", "1")


TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}:"
    "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}; "
    "{% endfor %}{% if style %}{{ style }}{% endif %}"
)


TOOL = {"type": "function", "function": {"name": "weather"}}


def test_template_variables_and_tools_become_part_of_the_prompt() -> None:
    """From the command line, a line of ours and one of OpenAI; each is answered as alone."""
    write_model(Path("tiny"), max_position_embeddings=2048, vocab_size=300)
    write_tokenizer(Path("tiny"), chat_template=TEMPLATE)
    Path("tools.json").write_text(json.dumps([TOOL]))
    talk = [{"role": "user", "content": "Hi"}]
    call = {"function": {"name": "weather", "arguments": "{}"}}
    asked = {"role": "assistant", "tool_calls": [call]}
    brief = {"tools": [TOOL], "chat_template_kwargs": {"style": "brief"}}
    lines = [
        {"id": "default", "messages": talk},
        {"id": "own", "messages": [*talk, asked], "template": {"style": "long"}, "tools": []},
        openai("openai", "Hi", **brief),
        {"id": "refused", "messages": talk, "tools": ["weather"]},
    ]
    options = "--max-tokens 3 --chat-template-var style=terse --tools tools.json"
    ends(run_lines(f"-m tiny --events events {options}", *lines), 3)
    default, own, of_openai, refused = answers()
    listed = json.dumps([TOOL])
    prompts = (
        f"{listed}user:Hi; terse",
        'user:Hi; assistant:{"name": "weather", "arguments": {}}; long',
        f"{listed}user:Hi; brief",
    )
    usages = [default["usage"], own["usage"], of_openai["response"]["body"]["usage"]]
    assert [usage["prompt_tokens"] for usage in usages] == list(map(len, prompts))
    assert "tools: number 0 has to be a JSON object" in refused["error"]


@pytest.mark.parametrize("option", ["--chat-template-var a=1", "--tools tools.json"])
def test_raw_prompts_have_no_template_to_set_variables_of(option: str) -> None:
    """Refused before anything is read."""
    Path("tools.json").write_text(json.dumps([TOOL]))
    said = f"{option.split()[0]} needs the chat template, which --raw leaves out"
    ends(run_lines(f"--raw {option}", {"prompt": "a"}), 2, said)


def test_lines_of_the_responses_api_are_answered_with_its_response_object() -> None:
    """With output items and usage; a line that can't be run has the error of the API."""
    body = {"model": "m", "input": "My name is Ana. What is my name?"}
    cut = {"max_output_tokens": 2, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/responses", "body": {**body, **more}}
        for name, more in (("a", {}), ("b", cut), ("c", {"background": True}))
    ]
    run_lines("", *lines, "no json")
    whole, short, refused, broken = answers()
    assert (whole["custom_id"], whole["response"]["status_code"]) == ("a", 200)
    found = whole["response"]["body"]
    has(found, object="response", status="completed", model="demo")
    (item,) = found["output"]
    text = {"type": "output_text", "text": "Your name is Ana.", "annotations": []}
    has(item, type="message", role="assistant", status="completed", content=[text])
    usage = found["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    found, reason = short["response"]["body"], {"reason": "max_output_tokens"}
    has(found, status="incomplete", max_output_tokens=2, incomplete_details=reason)
    (content,) = found["output"][0]["content"]
    assert [len(token["top_logprobs"]) for token in content["logprobs"]] == [1, 1]
    assert refused["response"]["status_code"] == broken["response"]["status_code"] == 400
    assert "background: True is not supported" in refused["error"]["message"]


def test_token_ids_and_lists_of_prompts_are_answered() -> None:
    """A list has an answer for each of its prompts, with its number after the id."""
    from mlxrunner.models.load import tokenizer_of

    run(f"{write({'prompt': 'Hello!'})} -o plain.jsonl --raw --max-tokens 3")
    tokens = [int(token) for token in tokenizer_of("demo").encode("Hello!")]
    lines = [{"id": "t", "prompt": tokens}, {"id": "l", "prompt": ["Hello!", tokens, [2**31 - 1]]}]
    run_lines("--raw --max-tokens 3", *lines)
    (plain,) = answers("plain.jsonl")
    *good, bad = answers()
    found = [(line["id"], line["text"]) for line in good]
    assert found == [(name, plain["text"]) for name in ("t", "l/0", "l/1")]
    assert (bad["id"], bad["index"]) == ("l/2", 3)
    assert "beyond the model's vocabulary" in bad["error"]
