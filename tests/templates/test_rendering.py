"""Chat templates run in a sandbox, the plain one stands in, and bad messages are errors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.models import error_line

from mlxrunner import PromptError
from mlxrunner.tokenizer import Tokenizer, load_tokenizer

USER: Any = [{"role": "user", "content": "hi"}]


def test_a_conversation_is_rendered_by_the_models_template(tokenizer: Tokenizer, kind: str) -> None:
    """With its own names for roles and tokens."""
    expected = {
        "byte_level": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        "byte_level_bos": "<|begin_of_text|><|start_header_id|>user"
        "<|end_header_id|>\n\nhi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "spm_plain": "<s><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    }.get(kind, "<s>[INST] hi [/INST]")
    assert tokenizer.render(USER) == expected
    assert tokenizer.template_stops == ()


def test_the_mark_of_the_answer_is_left_out_on_request(tokenizers: dict[str, Tokenizer]) -> None:
    """A conversation that is to be continued by the user."""
    for kind in ("spm_plain", "byte_level"):
        whole, open_end = (
            tokenizers[kind].render(USER),
            tokenizers[kind].render(USER, add_generation_prompt=False),
        )
        assert whole.startswith(open_end)
        assert len(open_end) < len(whole)


@pytest.mark.parametrize("kind", ["spm_plain", "spm_prefix", "metaspace"])
def test_a_system_prompt_that_the_template_refuses_is_put_before_the_user(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    """It begins the first user message, with a blank line after it."""
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        *USER,
        {"role": "assistant", "content": "ok"},
        *USER,
    ]
    folded: Any = [{"role": "user", "content": "Be brief.\n\nhi"}, *messages[2:]]
    assert tokenizers[kind].render(messages) == tokenizers[kind].render(folded)
    assert messages[0]["role"] == "system"


@pytest.mark.parametrize("kind", ["spm_prefix", "metaspace"])
def test_what_the_template_raises_is_a_prompt_error_in_its_words(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    """One line."""
    for messages in ([{"role": "tool", "content": "x"}], [{"role": "system", "content": "x"}]):
        with pytest.raises(
            PromptError, match="Only user and assistant roles are supported!"
        ) as error:
            tokenizers[kind].render(messages)  # type: ignore[arg-type]
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["spm_prefix", "byte_level"])
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "chat template can't be read, line 1"),
        ("{{ messages[9].content }}", "refuses this conversation"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ raise_exception('two\nlines') }}", "two lines"),
        ("{% for i in range(10**9) %}{% endfor %}", "refuses this conversation"),
    ],
    ids=["broken", "out of range", "division", "two lines", "endless"],
)
def test_a_template_that_fails_is_a_prompt_error(
    copy_of: Callable[..., Path], kind: str, template: str, message: str
) -> None:
    """One line, whatever went wrong inside."""
    tokenizer = load_tokenizer(copy_of(kind, chat_template=template))
    assert message in error_line(PromptError, tokenizer.render, USER)


@pytest.mark.parametrize("kind", ["spm_prefix", "byte_level"])
@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ raise_exception.__code__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ ('%s' | attr('format')).__globals__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '{0.__class__}'.format_map({'0': 1}) }}",
        "{{ ''|attr('__class__')|attr('__mro__') }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
    ],
)
def test_a_template_gets_nothing_out_of_its_sandbox(
    copy_of: Callable[..., Path], kind: str, template: str
) -> None:
    """An error, or nothing: no class, no module, no file."""
    tokenizer = load_tokenizer(copy_of(kind, chat_template=template))
    try:
        text = tokenizer.render(USER)
    except PromptError:
        return
    assert text == ""


@pytest.mark.parametrize("kind", ["spm_prefix", "byte_level"])
def test_a_template_can_not_change_the_conversation(
    copy_of: Callable[..., Path], kind: str
) -> None:
    """A change of its messages is an error or does not reach ours."""
    tokenizer = load_tokenizer(
        copy_of(
            kind, chat_template="{% set x = messages.append(1) %}{% set y = messages[0].clear() %}x"
        )
    )
    messages = [{"role": "user", "content": "hi"}]
    with suppress(PromptError):
        tokenizer.render(messages)  # type: ignore[arg-type]
    assert messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("kind", ["spm_prefix", "byte_level"])
def test_without_a_template_there_is_a_plain_one(copy_of: Callable[..., Path], kind: str) -> None:
    """With the strings that end an answer then; a system prompt needs no folding."""
    tokenizer = load_tokenizer(copy_of(kind, chat_template=None))
    messages: Any = [{"role": "system", "content": "Be brief."}, *USER]
    assert tokenizer.render(messages) == "System: Be brief.\nUser: hi\nAssistant:"
    assert (
        tokenizer.render(messages, add_generation_prompt=False) == "System: Be brief.\nUser: hi\n"
    )
    assert tokenizer.template_stops == ("\nUser:", "\nSystem:")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "the conversation is empty"),
        (["hi"], "message 0 has to be"),
        ([None], "message 0 has to be"),
        ([*USER, 3], "message 1 has to be"),
        ([*USER, *USER, {"role": "user"}], "message 2: content has to be a text or a list"),
        ([{"content": "x"}], "message 0 has to be"),
        ([{"role": 3, "content": "x"}], "message 0 has to be"),
        ([{"role": "user", "content": None}], "message 0: content has to be a text or a list"),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 0: content of type 'image'"),
        ([{"role": "user", "content": b"hi"}], "message 0: content has to be a text or a list"),
        ([{"role": "user\n" * 100, "content": 1}], "message 0: content has to be a text"),
        (["two\nlines"], "message 0 has to be"),
    ],
    ids=(
        "empty, text, null, number, no content, no role, role is a number, content is null, "
        "content is a list, content is bytes, long, two lines"
    ).split(", "),
)
def test_a_bad_message_is_a_prompt_error_with_its_index(
    tokenizer: Tokenizer, messages: Any, message: str
) -> None:
    """One short line, with or without a template."""
    said = error_line(PromptError, tokenizer.render, messages)
    assert message in said
    assert len(said) < 200


def test_more_than_role_and_content_is_passed_over(tokenizer: Tokenizer) -> None:
    """Names, times and the like don't reach the template."""
    assert tokenizer.render([{"role": "user", "content": "hi", "name": "x"}]) == tokenizer.render(
        USER
    )  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize("kind", ["spm_prefix", "byte_level"])
def test_a_template_is_told_what_it_may_look_at(copy_of: Callable[..., Path], kind: str) -> None:
    """`enable_thinking` is one; a variable that it does not look at changes nothing."""
    template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if enable_thinking is defined and "
        "not enable_thinking %}!{% endif %}"
    )
    tokenizer = load_tokenizer(copy_of(kind, chat_template=template))
    assert tokenizer.render(USER, enable_thinking=True, nonsense=3) == "hi"
    assert tokenizer.render(USER, enable_thinking=False) == "hi!"
