"""Chat templates of published families, shortened, and the tokens with which they end turns.

They keep how the published ones write and end the assistant's turns: an answer, its thinking, its
calls of tools.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from support.chat_templates import chat_template
from support.models import write_tokenizer

_ENDS: dict[str, set[str]] = {
    "phi3": {"<|end|>"},
    "phi3_old": {"<|end|>"},
    "phi4": {"<|im_end|>"},
    "phi4mini": {"<|end|>"},
    "qwen25": {"<|im_end|>"},
    "llama31": {"<|eot_id|>", "<|eom_id|>"},
    "gemma3": {"<end_of_turn>"},
    "gemma4": {"<turn|>"},
    "gemma4b": {"<turn|>"},
    "gptoss": {"<|call|>", "<|return|>"},
    "mistral": {"<EOS>"},
    "zephyr": {"<EOS>"},
    "cohere7": {"<|END_OF_TURN_TOKEN|>"},
    "deepseek": {"<EOS>"},
    "minimax": {"[e~["},
    "granite": {"<|end_of_text|>"},
    "kimi": {"<|im_end|>"},
    "glm45": set(),
    "olmo": {"<EOS>"},
    "llama2": {"<EOS>"},
    "vicuna": {"</s>"},
    "notlast": {"<|im_end|>"},
    "always": {"<|im_end|>"},
    "drops": set(),
    "refuse": set(),
}
ENDS = {name: (chat_template("turns", name), ends) for name, ends in _ENDS.items()}
"""The template of each family, with the tokens that end its turns."""
MARKS = re.compile(
    r"<EOS>|<BOS>|</?(?:think|tool_call|s|tool_response|arg_key|arg_value|sop|tools)>|<\|[^<>|]*\|>"
    r"|<｜[^｜]*｜>|<(?:start|end)_of_turn>|<\|[a-z_]+>|<[a-z_]+\|>|\[/?[A-Z_]+\]|\[gMASK\]|\[e~\["
    r"|\]~!b\[|\]~b\]|</?minimax:tool_call>"
)
"""The special tokens of all families."""


def marks_of(template: str) -> list[str]:
    """Return the special tokens of a template, with those that end and begin a sequence."""
    return sorted({"<BOS>", "<EOS>", "<|endoftext|>", *MARKS.findall(template)})


def write_turns(folder: Path, template: str, **config: Any) -> Path:
    """Write a tokenizer with a token per byte, and one per mark of `template`."""
    from tokenizers import Tokenizer as Fast

    write_tokenizer(folder, chat_template=template, eos_token="<EOS>", bos_token="<BOS>", **config)
    fast = Fast.from_file(str(folder / "tokenizer.json"))
    fast.add_special_tokens(marks_of(template))
    fast.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder
