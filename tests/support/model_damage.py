"""Change one to three things in a good model folder: JSON, a template, weights, or what a file is.

`support.damage` has what is damage to files of any format.
"""

from __future__ import annotations

import contextlib
import json
import random
import struct
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from support.damage import (
    HOSTILE,
    KINDS,
    Raw,
    changed,
    device,
    encoded,
    gone,
    scrambled,
    unreadable,
)


def lines(text: str) -> list[Raw]:
    """Return the values of a table: JSON, one a line."""
    return [Raw(line) for line in text.split("\n") if line]


def kinds(base: str, **cases: Any) -> list[dict[str, Any]]:
    """Return an object of the type `base` for each value of the one case."""
    ((name, values),) = cases.items()
    return [{"type": base, name: value} for value in values]


ROPE = [
    {
        "type": kind,
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": most,
        "low_freq_factor": low,
    }
    for kind, factor, (most, low) in product(
        ["linear", "llama3", "yarn", "longrope", "su", "mrope", "dynamic", "nope", 3, None],
        [8.0, 0, -1, "2", None, Raw("NaN")],
        [(64, 1.0), (0, 0), ("x", None), (-5, "1")],
    )
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
    "(a+)+$", "(", "a{1000000}", "(?<=a+)b", "\\p{L}+|x", "(x*)*y",
    "((((((((((a*)*)*)*)*)*)*)*)*)*", "[" * 50, "\0",
]  # fmt: skip  # patterns by rows
PATTERNS = [{"Regex": pattern} for pattern in REGEXES]
NORMALIZERS = [
    *({**one, "content": "x" * 20} for one in kinds("Replace", pattern=PATTERNS)),
    {"type": "Prepend", "prepend": "a" * 100_000},
    *lines("""
{"type": "Nope"}
{"type": "Sequence", "normalizers": []}
{"type": "Precompiled", "precompiled_charsmap": "AAAA"}
{"type": "BertNormalizer"}
3
"""),
]
PRE_TOKENIZERS = [
    *({**one, "behavior": "Isolated", "invert": False} for one in kinds("Split", pattern=PATTERNS)),
    *lines("""
{"type": "ByteLevel"}
{"type": "Metaspace", "replacement": "xx"}
{"type": "Metaspace", "replacement": ""}
{"type": "Digits"}
"x"
"""),
]
MODELS = lines("""
{"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}
{"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": []}
{"type": "BPE", "vocab": {"a": -1}, "merges": []}
{"type": "BPE", "vocab": {"a": 4294967295, "</s>": 4000000000}, "merges": []}
{"type": "BPE", "vocab": {}, "merges": [], "unk_token": "none"}
{"type": "BPE", "vocab": {"a": 0}, "merges": [], "dropout": 2.0}
{"type": "BPE", "vocab": {"a": 0}, "merges": [], "byte_fallback": true, "unk_token": "a"}
{"type": "BPE", "vocab": {"a": 0}, "merges": [], "continuing_subword_prefix": "xxxxxxxxxxxxxxxx"}
{"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 9}
{"type": "Unigram", "vocab": [], "unk_id": 0}
{"type": "Unigram", "vocab": [["a", NaN], ["", -1.0]], "unk_id": 0}
{"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"}
{"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "b", "max_input_chars_per_word": 0}
{"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "b", "continuing_subword_prefix": "##"}
{"type": "Nope"}
""")
PROCESSORS = lines("""
{"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<q>", "type_id": 0}}], "pair": []}
{"type": "BertProcessing", "sep": ["x", 1000000000], "cls": ["y", 5]}
{"type": "RobertaProcessing", "sep": ["x", 1000000000], "cls": ["y", 5], "trim_offsets": true}
{"type": "Sequence", "processors": []}
{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}
""")  # noqa: E501
DECODERS = [
    *lines("""
{"type": "Nope"}
{"type": "WordPiece"}
{"type": "BPEDecoder"}
{"type": "Strip", "content": "x", "start": 1000000000, "stop": 1000000000}
{"type": "Sequence", "decoders": []}
null
{"type": "CTC"}
"""),
    {"type": "Replace", "pattern": {"Regex": "(a*)*b"}, "content": "x" * 10**5},
]
TRUNCATIONS = [
    *HOSTILE,
    *lines("""
{"max_length": 0, "strategy": "LongestFirst", "stride": 5, "direction": "Right"}
{"max_length": 1, "strategy": "LongestFirst", "stride": 0, "direction": "Left"}
"""),
]
PADDINGS = [
    *HOSTILE,
    {
        "strategy": {"Fixed": 10**6},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    },
]
QUANTIZATIONS = [
    *HOSTILE,
    *lines("""
{"bits": 4}
{"bits": 3, "group_size": 0}
{"bits": "4", "group_size": 64}
{"quant_method": "fp8"}
{"quant_method": "gptq", "bits": 4}
{"quant_method": 3}
"""),
]
MODEL_TYPES = [
    "mistral", "gemma3_text", "mamba2", "base", "cache", "../x", "x" * 300, "", "lfm2", "bert",
]  # fmt: skip  # names by rows
CLASSES = [
    "PreTrainedTokenizerFast", "LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "BertTokenizer",
    "NoSuchTokenizer", "T5Tokenizer", "LlamaTokenizerFast", "ByT5Tokenizer", "WhisperTokenizer",
    "MistralCommonTokenizer", "TokenizersBackend", 3, "",
]  # fmt: skip  # names by rows
FLAGS = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
TOKEN = {"content": "<q>", "special": True, **FLAGS}
ALL_FLAGS = dict.fromkeys(FLAGS, True)
ADDED: list[Any] = [
    [{**TOKEN, "id": i, "content": f"<{i}>"} for i in range(300, 100_300)],
    *([{**TOKEN, "id": number}] for number in (10**9, -1, 2**32 - 1, 0, 2**40)),
    [{**TOKEN, "id": 0, "content": ""}], [{"id": 5}], 3, [],
    [{**TOKEN, **ALL_FLAGS, "id": 300}], [{**TOKEN, "id": 7}, {**TOKEN, "id": 7}],
]  # fmt: skip  # damages by rows
ADDED_BY_ID: list[Any] = [
    {str(i): {"content": f"<{i}>", "special": True} for i in range(300, 100_300)},
    *lines("""
{"1000000000": {"content": "<far>"}}
{"-1": {"content": "x"}}
{"0": {"content": ""}}
{"0": "x"}
{"a": {"content": "x"}}
{"5": {"content": "e", "special": "yes"}}
[]
3
"""),
    {"99999999999999999999": {**TOKEN, "lstrip": True, "rstrip": True}},
]
FILES = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "tokenizer.model", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "model.safetensors", "model-extra.safetensors", "vocab.json",
    "merges.txt", "model.safetensors.index.json", "hf_quant_config.json", "tiktoken.model",
    "additional_chat_templates", "processor_config.json",
]  # fmt: skip  # names by rows
SETTINGS: dict[str, dict[str, list[Any]]] = {
    "config.json": {
        "rope_scaling": ROPE,
        "rope_parameters": [one | {"rope_theta": base} for one in ROPE[::9] for base in (0, "x")],
        "eos_token_id": [*HOSTILE, [10**30, -1, True, "a"], list(range(10**5))],
        "bos_token_id": HOSTILE,
        "quantization": QUANTIZATIONS,
        "quantization_config": QUANTIZATIONS,
        "text_config": [*HOSTILE, {"model_type": "llama"}],
        "layer_types": [*HOSTILE, ["full_attention"] * 10**5],
        "head_dim": HOSTILE,
        "sliding_window": HOSTILE,
        "torch_dtype": HOSTILE,
        "model_file": ["x.py", "../x", 3],
        "auto_map": [{"AutoTokenizer": ["x.Y", None]}],
        "tokenizer_class": ["Nope"],
        "model_type": MODEL_TYPES,
        "num_hidden_layers": [10**6, 10**9, 1024, 0, -3, 2.5, "2"],
    },
    "tokenizer_config.json": {
        "chat_template": [*BOMBS, *HOSTILE, [{"name": [], "template": 3}], {"default": "x"}],
        "added_tokens_decoder": ADDED_BY_ID,
        "tokenizer_class": CLASSES,
        "bos_token": [*HOSTILE, {"content": 3}, {"content": "<q>"}],
        "eos_token": [*HOSTILE, {"content": None}, "none"],
        "additional_special_tokens": [*HOSTILE, [f"<{i}>" for i in range(100_000)]],
        "extra_special_tokens": [*HOSTILE, {"x": "<x>"}, ["<y>"]],
        "chat_template_type": ["x", "../y", 3],
        "tool_parser_type": ["x", "json_tools", 3],
        "auto_map": [{"AutoTokenizer": ["x.Y", None]}],
        "name_or_path": ["/nowhere"],
        "vocab_file": ["/etc/x"],
        "tokenizer_file": ["/nowhere"],
        "fix_mistral_regex": [True],
        "backend": ["x"],
        **dict.fromkeys(
            ("model_max_length add_bos_token clean_up_tokenization_spaces unk_token pad_token "
            "legacy split_special_tokens padding_side").split(),
            HOSTILE,
        ),
    },
    "tokenizer.json": {
        "added_tokens": ADDED,
        "normalizer": NORMALIZERS,
        "pre_tokenizer": PRE_TOKENIZERS,
        "model": MODELS,
        "post_processor": PROCESSORS,
        "decoder": DECODERS,
        "truncation": TRUNCATIONS,
        "padding": PADDINGS,
        "version": HOSTILE,
    },
}  # fmt: skip  # settings by rows
"""Values that a setting of each file may have."""
OTHERS = [
    *HOSTILE,
    *({"eos_token_id": value} for value in HOSTILE),
    *({"bos_token": value, "eos_token": value} for value in HOSTILE),
    *({"chat_template": text} for text in BOMBS),
    {f"<{i}>": 300 + i for i in range(100_000)},
    {"additional_special_tokens": [f"<{i}>" for i in range(50_000)]},
    *lines("""
{"<x>": 1000000000}
{"<x>": -1}
{"weight_map": {"a": "model.safetensors"}}
{"weight_map": {"a": "../../x"}}
{"weight_map": {"a": "x\\u0000y"}}
{"weight_map": {"a": 3}}
{"quantization": {"quant_algo": "FP8"}}
{"a": {"a": {"a": {}}}}
"""),
]
"""Contents of the other JSON files."""
OTHER_FILES = [
    "generation_config.json", "special_tokens_map.json", "added_tokens.json",
    "model.safetensors.index.json", "chat_template.json", "hf_quant_config.json", "vocab.json",
    "preprocessor_config.json", "processor_config.json", "adapter_config.json",
]  # fmt: skip  # names by rows
TENSORS = [
    *HOSTILE, "F32", "F64", "F16", "BOOL", "F8_E4M3", "XX", [-8, 0], [0, 8], [0, 2**63], [2**40],
]  # fmt: skip  # values by rows
PLACES = KINDS | {"a device": gone(device), "unreadable": gone(unreadable)}
del PLACES["a link"]  # to the same content: no damage here


def damage(folder: Path, choose: random.Random) -> str:
    """Change one to three things in `folder`; return which."""
    count = choose.choice((1, 1, 1, 2, 3))
    return "; ".join(choose.choice(CHANGES)(folder, choose) for _ in range(count))


def setting(folder: Path, choose: random.Random) -> str:
    """Give a setting of a JSON file another value, or change any value in it."""
    name = choose.choice(list(SETTINGS))
    file, content = folder / name, {}
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(bytes_of(file))
    if content and choose.random() < 0.5:
        what = changed(choose, content, HOSTILE)
    elif isinstance(content, dict):
        key, values = choose.choice(list(SETTINGS[name].items()))
        content[key] = choose.choice(values)
        what = f"{key} = {content[key]!r:.80}"
    else:
        return f"{name}: left"
    write_over(file, encoded(content).encode())
    return f"{name}: {what}"


def other_json(folder: Path, choose: random.Random) -> str:
    file, content = folder / choose.choice(OTHER_FILES), choose.choice(OTHERS)
    write_over(file, encoded(content).encode())
    return f"{file.name} = {content!r:.80}"


def template(folder: Path, choose: random.Random) -> str:
    text = choose.choice(BOMBS)
    content = text.encode("utf-8", "surrogatepass")
    more = folder / "additional_chat_templates"
    if choose.random() < 0.3 and not more.exists() and not more.is_symlink():
        more.mkdir()
        write_over(more / "x.jinja", content)
    write_over(folder / "chat_template.jinja", content)
    return f"chat_template.jinja = {text!r:.60}"


def weights(folder: Path, choose: random.Random) -> str:
    """Change the header of the weights, its length, or their data."""
    file = folder / "model.safetensors"
    try:
        content = bytes_of(file)
        (length,) = struct.unpack("<Q", content[:8])
        header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    except (OSError, ValueError, struct.error):
        return "model.safetensors: left"
    match choose.randrange(3):
        case 0:
            other = choose.choice([0, 1, 7, 2**31, 2**63, 2**64 - 1, length - 1, length + 1])
            file.write_bytes(struct.pack("<Q", other) + content[8:])
            return f"model.safetensors: length {other}"
        case 1:
            what = changed(choose, header, TENSORS)
            text = encoded(header).encode()
            file.write_bytes(struct.pack("<Q", len(text)) + text + data)
            return f"model.safetensors: {what}"
    data = choose.choice((b"\xff", b"\0", b"\x7f")) * len(data)
    file.write_bytes(content[: 8 + length] + data)
    return "model.safetensors: bytes"


def content(folder: Path, choose: random.Random) -> str:
    """Scramble any file, or empty it."""
    files = [file for file in sorted(folder.iterdir()) if is_small_file(file)]
    if not files:
        return "nothing there"
    file = choose.choice(files)
    file.write_bytes(scrambled(choose, file.read_bytes()) if choose.random() < 0.8 else b"")
    return f"{file.name}: scrambled"


def kind_of_file(folder: Path, choose: random.Random) -> str:
    """Put a FIFO, a directory, a broken link or a device in the place of any file."""
    name, what = choose.choice(FILES), choose.choice(list(PLACES))
    with contextlib.suppress(OSError):  # who is not root makes no device; there is one pipe
        PLACES[what](folder / name)
    return f"{name}: {what}"


CHANGES: list[Callable[[Path, random.Random], str]] = [
    *[setting] * 8, other_json, template, *[weights] * 2, content, kind_of_file,
]  # fmt: skip  # by how often


def is_small_file(file: Path) -> bool:
    return file.is_file() and not file.is_symlink() and file.stat().st_size < 2**24


def bytes_of(file: Path) -> bytes:
    if not file.is_file() or file.stat().st_size > 2**24:
        raise OSError("not a file to change")
    return file.read_bytes()


def write_over(file: Path, content: bytes) -> None:
    """Write a file, unless an earlier change has made something else of it."""
    if file.is_file() or not (file.exists() or file.is_symlink()):
        file.write_bytes(content)
