"""Lines of `mlxrunner batch` ask for forms of answers, and for what other programs' lines do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.batch_command import answers, openai, run, write
from support.checks import ends
from support.models import write_model, write_tokenizer

pytestmark = pytest.mark.usefixtures("folder")


def test_openai_batch_files_end_to_end() -> None:
    """Answered in that format, errors too."""
    lines = [
        openai("q1", "Hello!", max_tokens=3),
        openai("q2", "Hello!", max_completion_tokens=3),
        openai("q3", "Hello!", n=2),
    ]
    result = run(write(*lines), "-o", "out.jsonl", "--parallel", 1)
    one, two, three = answers()
    assert result.exit_code == 3
    assert [line["custom_id"] for line in (one, two, three)] == ["q1", "q2", "q3"]
    body = one["response"]["body"]
    assert (one["error"], one["response"]["status_code"], body["object"]) == (
        None,
        200,
        "chat.completion",
    )
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": two["response"]["body"]["choices"][0]["message"]["content"],
    }
    assert body["choices"][0]["finish_reason"] == "length"
    assert {
        line["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"]
        for line in (one, two)
    } == {0, body["usage"]["prompt_tokens"] - 1}
    assert (three["response"]["status_code"], three["error"]["code"]) == (
        400,
        "invalid_request_error",
    )
    assert three["error"]["message"].startswith("line 3: ")


@pytest.mark.parametrize("broken", [0, 1])
def test_a_line_that_cannot_be_read_is_answered_in_the_format_of_the_file(broken: int) -> None:
    """The format is that of the first line that can be read; the answer has no custom_id."""
    lines: list[Any] = [openai("q1", "Hello!", max_tokens=3)]
    lines.insert(broken, "{not JSON")
    run(write(*lines), "-o", "out.jsonl")
    found = answers()[broken]
    assert (found["custom_id"], found["response"]["status_code"]) == (None, 400)
    assert found["error"]["message"].startswith(f"line {broken + 1}: not JSON")


def test_choices_and_schemas() -> None:
    """For all lines, and for one."""
    Path("schema.json").write_text(
        '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], '
        '"additionalProperties": false}'
    )
    shaped = {"type": "json_schema", "json_schema": {"schema": {"type": "boolean"}}}
    lines = [
        {"prompt": "Hello!"},
        {"prompt": "Hello!", "choices": ["red", "blue"]},
        {"prompt": "Hello!", "response_format": shaped},
    ]
    run(write(*lines), "-o", "out.jsonl", "--choices", "yes,no", "--max-tokens", 30)
    assert [answers()[0]["text"] in ("yes", "no"), answers()[1]["text"] in ("red", "blue")] == [
        True,
        True,
    ]
    run("in.jsonl", "-o", "shaped.jsonl", "--schema", "schema.json", "--max-tokens", 60)
    assert isinstance(json.loads(answers("shaped.jsonl")[0]["text"])["a"], int)
    assert answers("shaped.jsonl")[2]["text"] in ("true", "false")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["--choices", "a,b"], {"response_format": {"type": "json_object"}}),
        (["--schema", "schema.json"], {"choices": ["yes", "no"]}),
        (["--choices", "a,b"], {"response_format": {"type": "text"}}),
        (["--schema", "schema.json"], {"response_format": {"type": "text"}}),
    ],
)
def test_the_form_of_a_line_takes_the_place_of_the_batch_s(
    given: list[str], line: dict[str, Any]
) -> None:
    """Also one of the other kind, or none."""
    Path("schema.json").write_text('{"enum": [1]}')
    ends(run(write({"prompt": "Hello!"} | line), "-o", "out.jsonl", "--max-tokens", 4, *given), 0)
    assert answers()[0]["text"] not in ("a", "b", "1")


TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content "
    "}}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}; "
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
    body = {"messages": talk, "tools": [TOOL], "chat_template_kwargs": {"style": "brief"}}
    url = "/v1/chat/completions"
    lines = [
        {"id": "default", "messages": talk},
        {"id": "own", "messages": [*talk, asked], "template": {"style": "long"}, "tools": []},
        {"custom_id": "openai", "method": "POST", "url": url, "body": body},
        {"id": "refused", "messages": talk, "tools": ["weather"]},
    ]
    options = ("--max-tokens", 3, "--chat-template-var", "style=terse", "--tools", "tools.json")
    ends(run(write(*lines), "-o", "out.jsonl", "-m", "tiny", "--events", "events", *options), 3)
    default, own, openai, refused = answers()
    listed = json.dumps([TOOL])
    lengths = [
        len(text)
        for text in (
            f"{listed}user:Hi; terse",
            'user:Hi; assistant:{"name": "weather", "arguments": {}}; long',
            f"{listed}user:Hi; brief",
        )
    ]
    usages = [default["usage"], own["usage"], openai["response"]["body"]["usage"]]
    assert [usage["prompt_tokens"] for usage in usages] == lengths
    assert "tools: number 0 has to be a JSON object" in refused["error"]


def test_raw_prompts_have_no_template_to_set_variables_of() -> None:
    """Refused before anything is read."""
    for option in (("--chat-template-var", "a=1"), ("--tools", "tools.json")):
        Path("tools.json").write_text(json.dumps([TOOL]))
        ends(
            run(write({"prompt": "a"}), "-o", "out.jsonl", "--raw", *option),
            2,
            f"{option[0]} needs the chat template, which --raw leaves out",
        )


def test_lines_of_the_responses_api_are_answered_with_its_response_object() -> None:
    """With output items and usage; a line that can't be run has the error of the API."""
    body = {"model": "m", "input": "My name is Ana. What is my name?"}
    cut = {"max_output_tokens": 2, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/responses", "body": {**body, **more}}
        for name, more in (("a", {}), ("b", cut), ("c", {"background": True}))
    ]
    run(write(*lines, "no json"), "-o", "out.jsonl")
    whole, short, refused, broken = answers()
    found = whole["response"]["body"]
    assert (whole["custom_id"], whole["response"]["status_code"]) == ("a", 200)
    assert (found["object"], found["status"], found["model"]) == ("response", "completed", "demo")
    (item,) = found["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [
        {"type": "output_text", "text": "Your name is Ana.", "annotations": []}
    ]
    usage = found["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    found = short["response"]["body"]
    assert (found["status"], found["max_output_tokens"]) == ("incomplete", 2)
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    (content,) = found["output"][0]["content"]
    assert [len(token["top_logprobs"]) for token in content["logprobs"]] == [1, 1]
    assert refused["response"]["status_code"] == 400
    assert "background: True is not supported" in refused["error"]["message"]
    assert broken["response"]["status_code"] == 400


def test_token_ids_and_lists_of_prompts_are_answered() -> None:
    """A list has an answer for each of its prompts, with its number behind the id."""
    run(write({"prompt": "Hello!"}), "-o", "plain.jsonl", "--raw", "--max-tokens", 3)
    from mlxrunner.models.load import tokenizer_of

    tokens = [int(token) for token in tokenizer_of("demo").encode("Hello!")]
    lines = [{"id": "t", "prompt": tokens}, {"id": "l", "prompt": ["Hello!", tokens, [2**31 - 1]]}]
    run(write(*lines), "-o", "out.jsonl", "--raw", "--max-tokens", 3)
    (plain,) = answers("plain.jsonl")
    *good, bad = answers()
    assert [(line["id"], line["text"]) for line in good] == [
        (name, plain["text"]) for name in ("t", "l/0", "l/1")
    ]
    assert (bad["id"], bad["index"]) == ("l/2", 3)
    assert "beyond the model's vocabulary" in bad["error"]
