"""Templates are found wherever a model's files have them, in the order of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sample import examples
from support.tokenizers import save_byte_level

from mlxrunner import PromptError
from mlxrunner.chat.conversation import Renderer
from mlxrunner.models import fingerprint
from mlxrunner.sessions.session import History, SessionTurn
from mlxrunner.templates.rendering import read_json, read_templates
from mlxrunner.tokenizer import Tokenizer, encode_after, load_tokenizer

USER: Any = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "look"}}
PLACES = (
    "chat_template.jinja additional_chat_templates/tool_use.jinja tokenizer_config.json named "
    "chat_template.json processor_config.json"
).split()
"""The places of templates; "named" is a list of them in tokenizer_config.json."""


def source(name: str) -> str:
    return f"ü {name} {{{{ messages[0].content }}}}{{% if tools %}}{{{{ tools }}}}{{% endif %}}"


def write(folder: Path, places: tuple[str, ...]) -> None:
    """Write a template that names its place into each of some places."""
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if "tokenizer_config.json" in places:
        settings["chat_template"] = source("tokenizer_config.json")
    if "named" in places:
        named = {"default": "named", "tool_use": "named tool_use"}
        templates = [{"name": name, "template": source(one)} for name, one in named.items()]
        settings["chat_template"] = templates
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "additional_chat_templates").mkdir(parents=True, exist_ok=True)
    for place in PLACES:
        (folder / place).unlink() if place != PLACES[2] and (folder / place).exists() else None
        if place in places and place.endswith(".jinja"):
            (folder / place).write_text(source(place), encoding="utf-8")
        elif place in places and place in ("chat_template.json", "processor_config.json"):
            (folder / place).write_text(json.dumps({"chat_template": source(place)}))


def test_templates_are_found_in_the_order_of_transformers(tmp_path: Path) -> None:
    """A tokenizer has its own places first, and then those of processors."""
    from transformers import AutoTokenizer

    save_byte_level(tmp_path, ["</s>"])
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for chosen in product((False, True), repeat=len(PLACES)):
        places = tuple(place for place, is_there in zip(PLACES, chosen, strict=True) if is_there)
        write(tmp_path, places)
        found = read_templates(tmp_path, read_json(tmp_path / "tokenizer_config.json"))
        theirs = AutoTokenizer.from_pretrained(tmp_path).chat_template
        if isinstance(theirs, str):
            assert found == {"default": theirs}
        elif theirs and "default" in theirs:
            assert found == theirs
        elif not theirs and places:
            legacy = next(place for place in PLACES[4:] if place in places)
            assert found == {"default": source(legacy)}


@pytest.mark.parametrize("kind", ["byte_level", "spm_prefix"])
@pytest.mark.parametrize(
    ("places", "plain", "with_tools"),
    [
        (("chat_template.json",), "chat_template.json", "chat_template.json"),
        (("processor_config.json",), "processor_config.json", "processor_config.json"),
        (PLACES, "chat_template.jinja", "additional_chat_templates/tool_use.jinja"),
        (PLACES[2:], "named", "named tool_use"),
        (
            (PLACES[1], "tokenizer_config.json"),
            "tokenizer_config.json",
            "additional_chat_templates/tool_use.jinja",
        ),
        ((PLACES[1],), "additional_chat_templates/tool_use.jinja", PLACES[1]),
    ],
)
def test_a_prompt_is_written_by_the_template_that_is_found(
    copy_of: Callable[..., Path], kind: str, places: tuple[str, ...], plain: str, with_tools: str
) -> None:
    """The one for tools writes prompts with tools, with either library."""
    folder = copy_of(kind)
    write(folder, places)
    before = fingerprint_of_template(folder)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.render(USER) == f"ü {plain} hi"
    assert tokenizer.render(USER, tools=[TOOL]).startswith(f"ü {with_tools} hi")
    assert tokenizer.template_stops == ()
    write(folder, ("chat_template.jinja", "chat_template.json"))
    assert fingerprint_of_template(folder) != before


def fingerprint_of_template(folder: Path) -> str:
    return fingerprint._settings(folder)["template"]


@pytest.mark.parametrize("kind", ["byte_level", "spm_prefix"])
def test_a_processors_template_comes_first_for_a_model_that_sees(
    copy_of: Callable[..., Path], kind: str
) -> None:
    """It is the one that knows pictures."""
    folder = copy_of(kind)
    write(folder, ("tokenizer_config.json", "chat_template.json"))
    assert load_tokenizer(folder).render(USER) == "ü tokenizer_config.json hi"
    assert load_tokenizer(folder, of_processor=True).render(USER) == "ü chat_template.json hi"


@pytest.mark.parametrize("kind", ["byte_level", "spm_prefix"])
def test_named_templates_without_a_default_are_named(
    copy_of: Callable[..., Path], kind: str
) -> None:
    """Nothing says which of them a conversation takes."""
    templates = [{"name": name, "template": source(name)} for name in ("rag", "vision")]
    tokenizer = load_tokenizer(copy_of(kind, chat_template=templates))
    with pytest.raises(PromptError, match="rag, vision"):
        tokenizer.render(USER)


MARKS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def taking(
    directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, bool, bool], Tokenizer]:
    """Tokenizers whose marks take the white space before them, after them, or none."""
    import shutil

    from support.tokenizers import configure
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Fast

    found = {}
    for kind, left, right in product(directories, (False, True), (False, True)):
        folder = tmp_path_factory.mktemp("taking") / kind
        shutil.copytree(directories[kind], folder)
        flags = {"lstrip": left, "rstrip": right, "special": True}
        added = {str(420 + n): {"content": mark, **flags} for n, mark in enumerate(MARKS)}
        if (folder / "tokenizer.json").exists():
            fast = Fast.from_file(str(folder / "tokenizer.json"))
            fast.add_special_tokens([AddedToken(mark, normalized=False, **flags) for mark in MARKS])
            fast.save(str(folder / "tokenizer.json"))
            configure(folder, chat_template=PHI3)
        else:
            configure(folder, chat_template=PHI3, added_tokens_decoder=added)
        found[kind, left, right] = load_tokenizer(folder)
    return found


@examples(200)
@given(st.data())
def test_a_text_in_two_parts_has_the_tokens_of_the_whole(
    taking: dict[tuple[str, bool, bool], Tokenizer], data: st.DataObject
) -> None:
    """The first part ends with a mark, or with white space that the mark has taken."""
    key = data.draw(st.sampled_from(sorted(taking)))
    pieces = st.lists(st.sampled_from([*MARKS, "\n", " ", "the fox", "日", ".", "\t"]), max_size=6)
    space = data.draw(st.sampled_from(["", " ", "\n \n"])) if key[2] else ""
    before = "".join(["a", *data.draw(pieces), data.draw(st.sampled_from(MARKS)), space])
    text = "".join(data.draw(pieces))
    both = [*taking[key].encode(before), *encode_after(taking[key], before, text)]
    assert both == taking[key].encode(before + text)


@pytest.mark.parametrize(("left", "right"), list(product((False, True), repeat=2)))
def test_a_chat_adds_the_tokens_of_the_whole_rendering(
    taking: dict[tuple[str, bool, bool], Tokenizer], left: bool, right: bool
) -> None:
    """Phi-3 has a line break after each end, which its tokens take."""
    tokenizer = taking["byte_level", left, right]
    renderer, history = Renderer(tokenizer, system="be kind"), History()
    for number in range(3):
        asked = renderer.render(history, f"question {number}")
        tokens = tokenizer.encode_more("an answer<|end|>")
        turn = SessionTurn(f"question {number}", "an answer", asked.end, closing="<|end|>")
        history = history.with_turn(turn, asked.and_then("an answer<|end|>", tokens))
    messages: Any = [*history.messages("be kind"), {"role": "user", "content": "one more"}]
    whole = tokenizer.encode(tokenizer.render(messages))
    assert list(renderer.render(history, "one more").tokens) == whole
