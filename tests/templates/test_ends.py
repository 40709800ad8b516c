"""The tokens with which templates end the assistant's turns, found by rendering them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models import write_model
from support.sample import examples
from support.turn_templates import ENDS, write_turns

from mlxrunner import Runner
from mlxrunner.errors import OptionError, PromptError
from mlxrunner.templates import rendering
from mlxrunner.templates.probe import CALL_ID, TOOL
from mlxrunner.tokenizer import Tokenizer, load_tokenizer

FAMILIES = [name for name in ENDS if name not in ("refuse", "drops")]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    """Loads the tokenizer of a family, once."""
    root, known = tmp_path_factory.mktemp("ends"), dict[str, Tokenizer]()

    def load(name: str) -> Tokenizer:
        if name not in known:
            (root / name).mkdir()
            known[name] = load_tokenizer(write_turns(root / name, ENDS[name][0]))
        return known[name]

    return load


def names(tokenizer: Tokenizer) -> set[str]:
    """Return the texts of the tokens that the chat template ends turns with."""
    found = (t for t, places in tokenizer.ends.items() if "chat template" in places)
    return {tokenizer.decode([token]) for token in found}


@pytest.mark.exhaustive(8)
@pytest.mark.parametrize("family", ENDS)
def test_a_template_ends_turns_with_its_own_tokens(
    loaded: Callable[[str], Tokenizer], family: str
) -> None:
    """The end of a sequence that the files name is an end, too."""
    tokenizer = loaded(family)
    assert names(tokenizer) == ENDS[family][1]
    assert {tokenizer.decode([token]) for token in tokenizer.stop_tokens} == {
        "<EOS>",
        *ENDS[family][1],
    }


texts = st.text("abc .\n", min_size=1, max_size=8).filter(str.strip)
calls = st.builds(
    lambda value: {
        "type": "function",
        "id": CALL_ID,
        "function": {"name": "probetool", "arguments": {"p": value}},
    },
    texts,
)
answers = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": texts},
    optional={"reasoning_content": texts, "thinking": texts},
) | st.fixed_dictionaries(
    {
        "role": st.just("assistant"),
        "content": st.just(""),
        "tool_calls": st.lists(calls, min_size=1, max_size=2),
    }
)


@examples(120)
@given(family=st.sampled_from(FAMILIES), turns=st.lists(answers, min_size=1, max_size=3))
def test_an_end_stands_only_at_the_end_of_a_turn(
    loaded: Callable[[str], Tokenizer], family: str, turns: list[dict[str, Any]]
) -> None:
    """The template writes an end after all words of the last turn, or none."""
    tokenizer, messages = loaded(family), list[Any]()
    for number, turn in enumerate(turns):
        messages += [{"role": "user", "content": f"q{number}"}, turn]
        if "tool_calls" in turn and number < len(turns) - 1:
            messages += [{"role": "tool", "content": "r", "tool_call_id": CALL_ID, "name": "x"}]
            messages += [{"role": "assistant", "content": "done"}]
    tools: Any = {"tools": [TOOL]} if any("tool_calls" in turn for turn in turns) else {}
    try:
        before = tokenizer.render(messages[:-1], **tools)
        whole = tokenizer.render(messages, add_generation_prompt=False, **tools)
    except (PromptError, OptionError):  # tools for some, and two calls for others
        return
    header, turn_tokens = (
        tokenizer.encode_more(text.rpartition(f"q{len(turns) - 1}")[2]) for text in (before, whole)
    )
    pairs = zip(header, turn_tokens, strict=False)
    begins = next((n for n, (a, b) in enumerate(pairs) if a != b), len(header))
    written = {t for t, places in tokenizer.ends.items() if "chat template" in places}
    at = [n for n, token in enumerate(turn_tokens) if token in written and n >= begins]
    rest = tokenizer.decode(turn_tokens[at[0] :]) if at else ""
    for token in tokenizer.stop_tokens:
        rest = rest.replace(tokenizer.decode([token]), "")
    # Of several calls, some templates write each as a turn.
    begins_another = "<|im_start|>", "<|start|>assistant", "<|start_header_id|>assistant"
    assert not rest.strip() or rest.strip().startswith(begins_another)


def test_no_token_is_added_without_special_tokens(tmp_path: Path) -> None:
    """The letters of an end are no token; nor is white space that a tokenizer has added."""
    folder = write_turns(tmp_path, "{% for m in messages %}{{ m.content }}$end$\n\n{% endfor %}")
    tokenizer = load_tokenizer(folder)
    assert names(tokenizer) == set()


def test_a_template_that_is_stopped_adds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs one render, and the model loads."""
    endless = (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}<|end|>"
    )
    monkeypatch.setattr(rendering, "PROCESSES", made := rendering.RenderProcesses(0.1))
    assert names(load_tokenizer(write_turns(tmp_path, endless))) == set()
    made.close()


def test_all_files_name_ends(tmp_path: Path) -> None:
    """Each end says where it comes from. The tokenizer's own counts, whatever the others name."""
    write_model(tmp_path, eos_token_id=7, text_config={"eos_token_id": [8]})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    with Runner.load(str(tmp_path)) as runner:
        assert runner.tokenizer.ends == {
            7: ("config.json", "generation_config.json"),
            8: ("config.json",),
            9: ("generation_config.json",),
            257: ("tokenizer_config.json",),
        }
