"""Values that files of a model folder don't expect, or that do harm."""

from __future__ import annotations

from typing import Any

SCALARS: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 10**3, 10**6, 10**9, 2**31, 2**32, 2**63, 10**30,
    -(10**9), 0.0, 0.5, -1.5, 1e308, float("nan"), float("inf"), -float("inf"), "", "x", "0",
    "</s>", "<s>", "\0", "\ud83d", "a\nb", "x" * 3000, "../../x", "llama", "default",
]  # fmt: skip  # values by rows
VALUES: list[Any] = [
    *SCALARS,
    [],
    {},
    [None],
    [0],
    [1, 2],
    ["a"],
    {"a": 1},
    [[]],
    [{}],
    {"type": "yarn"},
    [True] * 1000,
]
ROPE: list[Any] = [
    {
        "type": kind,
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": most,
        "low_freq_factor": low,
    }
    for kind in ("linear", "llama3", "yarn", "longrope", "su", "mrope", "dynamic", "nope", 3, None)
    for factor in (8.0, 0, -1, "2", None, float("nan"))
    for most, low in ((64, 1.0), (0, 0), ("x", None), (-5, "1"))
]
BOMBS = [
    "{{ 'x' * 10**10 }}", "{{ 'a'.center(5 * 10**9) }}", "{% if %}", "{{ messages[9].content }}",
    "{{ raise_exception('no') }}", "", "{{",
    "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
    "{{ lipsum() }}", "{{ 1 / 0 }}", "{% include 'x' %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "\0",
    "{{ bos_token * 3 }}{{ eos_token.content }}", "x" * 100_000, "{{ '\\ud83d' }}",
]  # fmt: skip  # templates by rows
REGEXES = [
    "(a+)+$",
    "(",
    "a{1000000}",
    "(?<=a+)b",
    "\\p{L}+|x",
    "(x*)*y",
    "((((((((((a*)*)*)*)*)*)*)*)*)*",
    "[" * 50,
    "\0",
]
NORMALIZERS: list[Any] = [
    {"type": "Replace", "pattern": {"Regex": pattern}, "content": "x" * 20} for pattern in REGEXES
] + [
    {"type": "Prepend", "prepend": "a" * 100_000},
    {"type": "Nope"},
    {"type": "Sequence", "normalizers": []},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "BertNormalizer"},
    3,
]
PRE: list[Any] = [
    {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    for pattern in REGEXES
] + [
    {"type": "ByteLevel"},
    {"type": "Metaspace", "replacement": "xx"},
    {"type": "Metaspace", "replacement": ""},
    {"type": "Digits"},
    "x",
]
MODELS = [
    {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]},
    {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": []},
    {"type": "BPE", "vocab": {"a": -1}, "merges": []},
    {"type": "BPE", "vocab": {"a": 4_294_967_295, "</s>": 4_000_000_000}, "merges": []},
    {"type": "BPE", "vocab": {}, "merges": [], "unk_token": "none"},
    {"type": "BPE", "vocab": {"a": 0}, "merges": [], "dropout": 2.0},
    {
        "type": "BPE",
        "vocab": {"a": 0},
        "merges": [],
        "byte_fallback": True,
        "unk_token": "a",
        "continuing_subword_prefix": "x" * 100,
    },
    {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 9},
    {"type": "Unigram", "vocab": [], "unk_id": 0},
    {"type": "Unigram", "vocab": [["a", float("nan")], ["", -1.0]], "unk_id": 0},
    {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"},
    {
        "type": "WordPiece",
        "vocab": {"a": 0},
        "unk_token": "b",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 0,
    },
    {"type": "Nope"},
]
PROCESSORS = [
    {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<q>", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    },
    {"type": "BertProcessing", "sep": ["x", 10**9], "cls": ["y", 5]},
    {
        "type": "RobertaProcessing",
        "sep": ["x", 10**9],
        "cls": ["y", 5],
        "trim_offsets": True,
        "add_prefix_space": True,
    },
    {"type": "Sequence", "processors": []},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
]
QUANTIZATIONS: list[Any] = [
    *VALUES,
    {"bits": 4},
    {"bits": 3, "group_size": 0},
    {"bits": "4", "group_size": 64},
]
QUANTIZATION_CONFIGS: list[Any] = [
    *VALUES,
    {"quant_method": "fp8"},
    {"quant_method": "gptq", "bits": 4},
    {"quant_method": 3},
]
MODEL_TYPES = [
    "mistral", "gemma3_text", "mamba2", "base", "cache", "../x", "x" * 300, "", "lfm2", "bert",
]  # fmt: skip  # names by rows
TOKEN = {
    "content": "<q>",
    "special": True,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "single_word": False,
}
ADDED: list[Any] = [
    [{"id": i, **TOKEN, "content": f"<{i}>"} for i in range(300, 100_300)],
    [{"id": 10**9, **TOKEN}], [{"id": -1, **TOKEN}], [{"id": 2**32 - 1, **TOKEN}],
    [{"id": 0, **TOKEN, "content": ""}], [{"id": 0, **TOKEN}], [{"id": 5}], 3, [],
    [{"id": 2**40, **TOKEN}],
    [{"id": 300, **TOKEN, "normalized": True, "single_word": True, "lstrip": True,
        "rstrip": True}], [{"id": 7, **TOKEN}, {"id": 7, **TOKEN}],
]  # fmt: skip  # damages by rows
DECODERS: list[Any] = [
    {"type": "Nope"},
    {"type": "WordPiece"},
    {"type": "BPEDecoder"},
    {"type": "Strip", "content": "x", "start": 10**9, "stop": 10**9},
    {"type": "Sequence", "decoders": []},
    None,
    {"type": "CTC"},
    {"type": "Replace", "pattern": {"Regex": "(a*)*b"}, "content": "x" * 10**5},
]
TRUNCATIONS: list[Any] = [
    *VALUES,
    {"max_length": 0, "strategy": "LongestFirst", "stride": 5, "direction": "Right"},
    {"max_length": 1, "strategy": "LongestFirst", "stride": 0, "direction": "Left"},
]
PADDINGS: list[Any] = [
    *VALUES,
    {
        "strategy": {"Fixed": 10**6},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    },
]
CLASSES = [
    "PreTrainedTokenizerFast", "LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "BertTokenizer",
    "NoSuchTokenizer", "T5Tokenizer", "LlamaTokenizerFast", "ByT5Tokenizer", "WhisperTokenizer",
    "MistralCommonTokenizer", "TokenizersBackend", 3, "",
]  # fmt: skip  # names by rows


NAMES = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "tokenizer.model", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "model.safetensors", "model-extra.safetensors", "vocab.json",
    "merges.txt", "model.safetensors.index.json", "hf_quant_config.json", "tiktoken.model",
    "additional_chat_templates", "processor_config.json",
]  # fmt: skip  # names by rows
