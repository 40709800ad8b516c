"""Chat templates of eight families, what they write in pieces, and tokenizers for them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import chat_template
from support.models import write_tokenizer

from mlxrunner.tokenizer import Tokenizer, load_tokenizer

Piece = tuple[str, int, str, str]
"""Text, message, role, part."""
Chat = Sequence[Mapping[str, str]]
Tools = Sequence[Mapping[str, Any]]


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _content(text: str, index: int, role: str) -> Iterator[Piece]:
    """A content as it is: its thinking block, and the rest."""
    for part in (
        re.split("(<think>.*?</think>)", text, flags=re.DOTALL) if role == "assistant" else [text]
    ):
        yield (
            part,
            index,
            role,
            "thinking" if part.startswith("<think>") and role == "assistant" else "text",
        )


def _thought(content: str) -> tuple[str, str]:
    """Its thinking, and its text, as Qwen and GLM take them apart."""
    if "</think>" not in content:
        return "", content
    return content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip(
        "\n"
    ), content.split("</think>")[-1].lstrip("\n")


def _next(chat: Chat) -> tuple[int, str, str]:
    """Whose the generation prompt is."""
    return len(chat), "assistant", "generation_prompt"


def _last_user(chat: Chat) -> int:
    return max(
        (index for index, message in enumerate(chat) if message["role"] == "user"), default=-1
    )


def _im(chat: Chat, tools: Tools, head: str, tail: str) -> Iterator[Piece]:
    """Yield the system message of the two with <|im_start|>, the tools within `head` and `tail`."""
    has_system = chat[0]["role"] == "system"
    listed = head + "".join(f"\n{_json(tool)}" for tool in tools) + tail
    if has_system:
        yield "<|im_start|>system\n", 0, "system", "template_header"
        yield chat[0]["content"], 0, "system", "text"
        if tools:
            yield f"\n\n{listed}", 0, "system", "tools"
        yield "<|im_end|>\n", 0, "system", "message_end"
    elif tools:
        yield f"<|im_start|>system\n{listed}<|im_end|>\n", 0, chat[0]["role"], "tools"


def chatml(chat: Chat, tools: Tools, **_: Any) -> Iterator[Piece]:
    """Plain <|im_start|>: thinking stays where it is."""
    yield from _im(chat, tools, "# Tools", "")
    for index, message in enumerate(chat):
        role = message["role"]
        if index or role != "system":
            yield f"<|im_start|>{role}\n", index, role, "template_header"
            yield from _content(message["content"], index, role)
            yield "<|im_end|>\n", index, role, "message_end"
    yield "<|im_start|>assistant\n", *_next(chat)


def qwen3(chat: Chat, tools: Tools, *, enable_thinking: bool = True, **_: Any) -> Iterator[Piece]:
    """Thinking of the turn under way only; tool results as a user's, side by side."""
    yield from _im(chat, tools, "# Tools\n\nYou may call functions:\n<tools>", "\n</tools>")
    for index, message in enumerate(chat):
        role, (thought, content) = message["role"], _thought(message["content"])
        if role == "tool":
            begins = chat[index - 1]["role"] != "tool"
            ends = index + 1 == len(chat) or chat[index + 1]["role"] != "tool"
            yield (
                f"{'<|im_start|>user' * begins}\n<tool_response>\n",
                index,
                role,
                "template_header",
            )
            yield message["content"], index, role, "text"
            yield (
                f"\n</tool_response>{'<|im_end|>' * ends}" + "\n" * ends,
                index,
                role,
                "message_end",
            )
        elif index or role != "system":
            yield f"<|im_start|>{role}\n", index, role, "template_header"
            if role == "assistant" and thought and index > _last_user(chat):
                yield f"<think>\n{thought}\n</think>", index, role, "thinking"
                content = f"\n\n{content}"
            yield content if role == "assistant" else message["content"], index, role, "text"
            yield "<|im_end|>\n", index, role, "message_end"
    yield (
        "<|im_start|>assistant\n" + "<think>\n\n</think>\n\n" * (not enable_thinking),
        *_next(chat),
    )


def llama3(
    chat: Chat, tools: Tools, *, date_string: str = "26 Jul 2024", **_: Any
) -> Iterator[Piece]:
    """A system message in any case, with a date; tools in the first user message."""
    first, left = chat[0]["role"], bool(tools)
    yield "<s><|start_header_id|>system<|end_header_id|>\n\n", 0, first, "template_header"
    if tools:
        yield "Environment: ipython\n", 0, first, "tools"
    yield f"Today Date: {date_string}\n\n", 0, first, "template_header"
    if first == "system":
        yield chat[0]["content"].strip(), 0, first, "text"
    yield "<|eot_id|>", 0, first, "message_end" if first == "system" else "template_header"
    for index, message in enumerate(chat):
        role = message["role"]
        if index or role != "system":
            name = "ipython" if role == "tool" else role
            yield f"<|start_header_id|>{name}<|end_header_id|>\n\n", index, role, "template_header"
            if left and role == "user":
                left, listed = False, "".join(f"{_json(tool, 4)}\n\n" for tool in tools)
                yield f"Answer with one of these functions:\n\n{listed}", index, role, "tools"
            yield from _content(message["content"].strip(), index, role)
            yield "<|eot_id|>", index, role, "message_end"
    yield "<|start_header_id|>assistant<|end_header_id|>\n\n", *_next(chat)


def llama4(chat: Chat, tools: Tools, **_: Any) -> Iterator[Piece]:
    """Tools in front of the system prompt."""
    first = chat[0]["role"]
    yield "<|begin_of_text|>", 0, first, "template_header"
    listed = "Environment: ipython\n" + "".join(f"{_json(tool, 4)}\n\n" for tool in tools)
    if first == "system":
        yield "<|header_start|>system<|header_end|>\n\n", 0, first, "template_header"
        yield listed if tools else "", 0, first, "tools"
        yield chat[0]["content"].strip(), 0, first, "text"
        yield "<|eot|>", 0, first, "message_end"
    elif tools:
        yield f"<|header_start|>system<|header_end|>\n\n{listed}<|eot|>", 0, first, "tools"
    for index, message in enumerate(chat):
        role = message["role"]
        if index or role != "system":
            yield (
                f"<|header_start|>{'ipython' if role == 'tool' else role}<|header_end|>\n\n",
                index,
                role,
                "template_header",
            )
            yield from _content(message["content"], index, role)
            yield "<|eot|>", index, role, "message_end"
    yield "<|header_start|>assistant<|header_end|>\n\n", *_next(chat)


def gemma(chat: Chat, tools: Tools, **_: Any) -> Iterator[Piece]:
    """No system message: its text goes in front of the first user message. No tools."""
    folds = chat[0]["role"] == "system"
    yield "<s>", 0, chat[0]["role"], "template_header"
    for index, message in enumerate(chat):
        role = message["role"]
        content = message["content"].strip()
        if folds and index == 0:
            continue
        owner = (
            (0, "system") if folds and index == 1 and chat[0]["content"].strip() else (index, role)
        )
        yield (
            f"<start_of_turn>{'model' if role == 'assistant' else role}\n",
            *owner,
            "template_header",
        )
        if folds and index == 1 and chat[0]["content"].strip():
            yield chat[0]["content"].lstrip(), 0, "system", "text"
            yield "\n\n" if content else "", index, role, "template_header"
        yield from _content(content, index, role)
        yield "<end_of_turn>\n", index, role, "message_end"
    yield "<start_of_turn>model\n", *_next(chat)


def mistral(chat: Chat, tools: Tools, **_: Any) -> Iterator[Piece]:
    """The system prompt goes into the last user message, and tools in front of it."""
    has_system = chat[0]["role"] == "system" and chat[0]["content"]
    begins = "<s>"
    for index, message in enumerate(chat):
        role, content = message["role"], message["content"]
        if role == "user":
            takes_system = has_system and index + 1 == len(chat)
            owner = (0, "system") if takes_system else (index, role)
            yield begins, *owner, "template_header"
            if tools and index == _last_user(chat):
                yield f"[AVAILABLE_TOOLS] {_json(tools)}[/AVAILABLE_TOOLS]", *owner, "tools"
            yield "[INST] ", *owner, "template_header"
            if takes_system:
                yield chat[0]["content"], 0, "system", "text"
                yield "\n\n", index, role, "template_header"
            yield content, index, role, "text"
            yield "[/INST]", index, role, "message_end"
        elif role == "assistant":
            yield f"{begins} ", index, role, "template_header"
            yield from _content(content.strip(), index, role)
            yield "</s>", index, role, "message_end"
        elif role == "tool":
            yield f"{begins}[TOOL_RESULTS] ", index, role, "template_header"
            yield content, index, role, "text"
            yield "[/TOOL_RESULTS]", index, role, "message_end"
        begins = "" if role != "system" else begins


def harmony(chat: Chat, tools: Tools, **_: Any) -> Iterator[Piece]:
    """Yield gpt-oss's pieces, with a system message of its own and channels.

    An answer that was generated ends otherwise than one that is sent back.
    """
    first = chat[0]["role"]
    yield "<|start|>system<|message|>You are a model. Reasoning: low", 0, first, "template_header"
    if tools:
        yield (
            "\nCalls to these tools must go to the commentary channel: 'functions'.",
            0,
            first,
            "tools",
        )
    yield "<|end|>", 0, first, "template_header"
    listed = (
        "\n\n# Tools\n\nnamespace functions {\n"
        + "".join(f"{_json(tool)}\n" for tool in tools)
        + "}"
    )
    if first == "system":
        yield "<|start|>developer<|message|># Instructions\n\n", 0, first, "template_header"
        yield chat[0]["content"], 0, first, "text"
        yield listed if tools else "", 0, first, "tools"
        yield "<|end|>", 0, first, "message_end"
    elif tools:
        yield f"<|start|>developer<|message|>{listed}<|end|>", 0, first, "tools"
    for index, message in enumerate(chat):
        role = message["role"]
        if index or role != "system":
            names = {
                "assistant": "assistant<|channel|>final",
                "tool": "functions to=assistant<|channel|>commentary",
            }
            yield f"<|start|>{names.get(role, role)}<|message|>", index, role, "template_header"
            yield from _content(message["content"], index, role)
            yield "<|end|>", index, role, "message_end"
    yield "<|start|>assistant", *_next(chat)


def glm(chat: Chat, tools: Tools, *, enable_thinking: bool = True, **_: Any) -> Iterator[Piece]:
    """Yield GLM's pieces, where a message ends at the next one's role.

    Earlier answers have an empty thinking block.
    """
    yield "[gMASK]<sop>", 0, chat[0]["role"], "template_header"
    if tools:
        listed = "".join(f"{_json(tool)}\n" for tool in tools)
        yield f"<|system|>\n# Tools\n<tools>\n{listed}</tools>", 0, chat[0]["role"], "tools"
    for index, message in enumerate(chat):
        role, content = message["role"], message["content"]
        if role == "user":
            yield "<|user|>\n", index, role, "template_header"
            yield content, index, role, "text"
            if not enable_thinking and not content.endswith("/nothink"):
                yield "/nothink", index, role, "message_end"
        elif role == "assistant":
            thought, rest = _thought(content)
            yield "<|assistant|>\n", index, role, "template_header"
            thought = thought.strip() if index > _last_user(chat) else ""
            yield f"<think>{thought}</think>", index, role, "thinking"
            if rest.strip():
                yield "\n", index, role, "text" if thought else "template_header"
                yield rest.strip(), index, role, "text"
        elif role == "tool":
            header = "<|observation|>" * (chat[index - 1]["role"] != "tool") + "\n<tool_response>\n"
            yield header, index, role, "template_header"
            yield content, index, role, "text"
            yield "\n</tool_response>", index, role, "message_end"
        else:
            yield "<|system|>\n", index, role, "template_header"
            yield content, index, role, "text"
    yield "<|assistant|>" + "\n<think></think>" * (not enable_thinking), *_next(chat)


@dataclass(frozen=True)
class Kind:
    """A family with its template and its special tokens.

    `marks`: its special tokens, the last of them ends an answer. `thinks`: an answer with thinking,
    as such a model writes it.
    """

    pieces: Callable[..., Iterator[Piece]]
    marks: Sequence[str]
    thinks: str = "<think>\n{}\n</think>\n\n{}"
    has_tools: bool = True

    @property
    def template(self) -> str:
        return chat_template("families", self.pieces.__name__)


_IM = ("<|im_start|>", "<think>", "</think>", "<|im_end|>")
_BRACKETS = "[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]"
_GLM = "[gMASK] <sop> <|system|> <|assistant|> <|observation|> <think> </think> <|user|>"
KINDS: Mapping[str, Kind] = {
    "chatml": Kind(chatml, _IM),
    "qwen3": Kind(qwen3, _IM),
    "llama3": Kind(llama3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "llama4": Kind(llama4, ("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>")),
    "gemma": Kind(gemma, ("<start_of_turn>", "<end_of_turn>"), has_tools=False),
    "mistral": Kind(mistral, (*_BRACKETS.split(), "[TOOL_CALLS]", "</s>")),
    "harmony": Kind(
        harmony,
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"),
        "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}",
    ),
    "glm": Kind(glm, _GLM.split(), "\n<think>{}</think>\n{}"),
}


FAMILIES = ("chatml", "gemma", "harmony", "llama3", "mistral", "qwen3")
MARKS = sorted({mark for family in FAMILIES for mark in KINDS[family].marks})
ENDS = {family: KINDS[family].marks[-1] for family in FAMILIES}


def write_family(folder: Path, family: str) -> None:
    """The tokenizer of a family: a token per byte, and one per mark."""
    from tokenizers import Tokenizer as Fast

    write_tokenizer(folder, chat_template=KINDS[family].template, eos_token=ENDS[family])
    fast = Fast.from_file(str(folder / "tokenizer.json"))
    fast.add_special_tokens(MARKS)
    fast.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"model_type": "llama"}')


@pytest.fixture(name="write_family")
def _write_family() -> Callable[[Path, str], None]:
    """Writes the tokenizer of a family into a folder."""
    return write_family


@dataclass(frozen=True)
class Family:
    """A family's tokenizer, loaded."""

    name: str
    tokenizer: Tokenizer


@pytest.fixture(scope="session")
def family_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """One of each family."""
    root = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        write_family(root / name, name)
    return {name: load_tokenizer(root / name) for name in FAMILIES}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, family_tokenizers: dict[str, Tokenizer]) -> Family:
    """Each family in turn."""
    return Family(request.param, family_tokenizers[request.param])
