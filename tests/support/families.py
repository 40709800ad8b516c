"""Eight families of chat templates: each with its template, its pieces and its special tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from support.family_pieces import Piece, chatml, gemma, glm, harmony, llama3, llama4, mistral, qwen3
from support.family_templates import CHATML, GEMMA, GLM, HARMONY, LLAMA3, LLAMA4, MISTRAL, QWEN3


@dataclass(frozen=True)
class Kind:
    """A family with its template and its special tokens.

    `marks`: its special tokens, the last of them ends an answer. `thinks`: an answer with thinking,
    as such a model writes it.
    """

    template: str
    pieces: Callable[..., Iterator[Piece]]
    marks: tuple[str, ...]
    thinks: str = "<think>\n{}\n</think>\n\n{}"
    has_tools: bool = True


_IM = ("<|im_start|>", "<think>", "</think>", "<|im_end|>")
KINDS: Mapping[str, Kind] = {
    "chatml": Kind(CHATML, chatml, _IM),
    "qwen3": Kind(QWEN3, qwen3, _IM),
    "llama3": Kind(LLAMA3, llama3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "llama4": Kind(
        LLAMA4, llama4, ("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>")
    ),
    "gemma": Kind(GEMMA, gemma, ("<start_of_turn>", "<end_of_turn>"), has_tools=False),
    "mistral": Kind(
        MISTRAL,
        mistral,
        (
            "[INST]",
            "[/INST]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
            "[TOOL_CALLS]",
            "</s>",
        ),
    ),
    "harmony": Kind(
        HARMONY,
        harmony,
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"),
        "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}",
    ),
    "glm": Kind(
        GLM,
        glm,
        (
            "[gMASK]",
            "<sop>",
            "<|system|>",
            "<|assistant|>",
            "<|observation|>",
            "<think>",
            "</think>",
            "<|user|>",
        ),
        "\n<think>{}</think>\n{}",
    ),
}
