"""Conversations that end with the assistant's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.families import KINDS
from support.sample import examples
from support.turn_templates import ENDS, write_turns

from mlxrunner import PromptError, Runner
from mlxrunner.server.events import ServerRequest
from mlxrunner.server.prompts.builder import PromptBuilder
from mlxrunner.tokenizer import Tokenizer, load_tokenizer
from mlxrunner.tokenizer.prompt import tokenize_prompt

TEMPLATES = {
    name: one[0] for name, one in ENDS.items() if name not in ("refuse", "drops", "always")
}
TEMPLATES |= {f"test {name}": kind.template for name, kind in KINDS.items()}
USER = {"role": "user", "content": "Q?"}
NAME = [{"role": "user", "content": "My name is Bo. What is my name?"}]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    """Loads the tokenizer of a family, once."""
    root, known = tmp_path_factory.mktemp("continuing"), dict[str, Tokenizer]()

    def load(name: str) -> Tokenizer:
        if name not in known:
            folder = root / name.replace(" ", "_")
            known[name] = load_tokenizer(write_turns(folder, TEMPLATES[name]))
        return known[name]

    return load


words = st.text('ab{" .\n', min_size=1, max_size=9).filter(lambda text: text[0] in 'ab{"')


@examples(80)
@given(family=st.sampled_from(sorted(TEMPLATES)), said=words, is_long=st.booleans())
def test_a_prompt_ends_with_the_words(
    loaded: Callable[[str], Tokenizer], family: str, said: str, is_long: bool
) -> None:
    """It is the tokens of its whole text, in Python and in the server, and no end is after it."""
    tokenizer = loaded(family)
    before = [USER, {"role": "assistant", "content": "A."}, USER] if is_long else [USER]
    messages: list[Any] = [*before, {"role": "assistant", "content": said}]
    prompt = tokenize_prompt(tokenizer, messages)
    assert prompt.text.endswith(said)
    assert prompt.tokens.tolist() == tokenizer.encode(prompt.text)
    asked = ServerRequest(protocol="chat", model="", id="r", messages=messages)
    made = PromptBuilder(tokenizer, TEMPLATES[family]).make(asked)
    assert made.prompt.tokens.tolist() == prompt.tokens.tolist()
    assert made.lead.endswith(said)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (
            "{{ raise_exception('no') if messages[-1].role == 'assistant' }}"
            "{{ messages[0].content }}",
            "can't end there",
        ),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "leaves out this content",
        ),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %} Be brief!"
            "{% if add_generation_prompt %}>{% endif %}",
            "writes other text after it",
        ),
        (
            "{% for m in messages %}{{ m.content | upper if m.role == 'assistant' else m.content }}"
            "{% endfor %}",
            "can't",
        ),
    ],
)
@pytest.mark.exhaustive(4)
def test_a_template_that_cannot_continue_is_an_error(
    tmp_path: Any, template: str, why: str
) -> None:
    """The message says what the template does, and what to do."""
    tokenizer = load_tokenizer(write_turns(tmp_path, template))
    messages: list[Any] = [USER, {"role": "assistant", "content": "words"}]
    with pytest.raises(PromptError, match=why):
        tokenize_prompt(tokenizer, messages)
    assert tokenize_prompt(tokenizer, [USER]).text


def test_python_continues_the_words() -> None:
    """Warm and cold, with the option, and with an empty message."""
    with Runner.load("demo", context=256) as runner:
        for said in ("Your name", "Your na", "Y"):
            messages: list[Any] = [*NAME, {"role": "assistant", "content": said}]
            warm = runner.complete(messages).text
            runner.reset()
            assert said + runner.complete(messages).text == said + warm == "Your name is Bo."
        again = runner.complete(messages, continue_final_message=False).text
        assert again != warm
        empty: list[Any] = [*NAME, {"role": "assistant", "content": ""}]
        assert runner.complete(empty).text == "Your name is Bo."
        with pytest.raises(PromptError, match="of the assistant, and it is of role 'user'"):
            runner.complete(NAME, continue_final_message=True)
