"""Change the JSON files and the templates of a model folder."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

from support.damage_values import (
    ADDED,
    BOMBS,
    CLASSES,
    DECODERS,
    MODEL_TYPES,
    MODELS,
    NORMALIZERS,
    PADDINGS,
    PRE,
    PROCESSORS,
    QUANTIZATION_CONFIGS,
    QUANTIZATIONS,
    ROPE,
    SCALARS,
    TRUNCATIONS,
    VALUES,
)


def paths_in(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:50])
        if isinstance(value, list)
        else ()
    )
    return [path for key, one in items for path in ((*prefix, key), *paths_in(one, (*prefix, key)))]


def _change_json(file: Path, choose: random.Random, values: list[Any] = VALUES) -> str:
    """One value of it, at any depth; or a name is dropped, or added."""
    try:
        content = json.loads(bytes_of(file))
        paths = paths_in(content)
        *inner, last = choose.choice(paths[:400] if choose.random() < 0.9 else paths)
    except (OSError, ValueError, IndexError):
        return f"{file.name}: left"
    place = content
    for key in inner:
        place = place[key]
    if isinstance(place, dict) and choose.random() < 0.15:
        del place[last]
        what = f"{file.name}: {[*inner, last]} dropped"
    else:
        value = choose.choice(values)
        place[last] = value
        what = f"{file.name}: {[*inner, last]} = {value!r:.60}"
    write_over(file, json.dumps(content).encode())
    return what


def write_over(file: Path, content: bytes) -> None:
    """Unless an earlier change has made something else of the file."""
    if file.is_file() or not (file.exists() or file.is_symlink()):
        file.write_bytes(content)


def config(folder: Path, choose: random.Random) -> str:
    file = folder / "config.json"
    if choose.random() < 0.25:
        content = {"model_type": "llama"}
        with contextlib.suppress(OSError, ValueError):
            content |= json.loads(bytes_of(file))
        value: Any
        name, value = choose.choice(
            [
                ("rope_scaling", choose.choice(ROPE)),
                ("rope_parameters", choose.choice(ROPE) | {"rope_theta": choose.choice(SCALARS)}),
                (
                    "eos_token_id",
                    choose.choice([*VALUES, [10**30, -1, True, "a"], list(range(10**5))]),
                ),
                ("bos_token_id", choose.choice(VALUES)),
                ("quantization", choose.choice(QUANTIZATIONS)),
                ("quantization_config", choose.choice(QUANTIZATION_CONFIGS)),
                ("text_config", choose.choice([*VALUES, content])),
                ("layer_types", choose.choice([*VALUES, ["full_attention"] * 10**5])),
                ("head_dim", choose.choice(SCALARS)),
                ("sliding_window", choose.choice(SCALARS)),
                ("torch_dtype", choose.choice(VALUES)),
                ("model_file", choose.choice(["x.py", "../x", 3])),
                ("auto_map", {"AutoTokenizer": ["x.Y", None]}),
                ("tokenizer_class", "Nope"),
                ("model_type", choose.choice(MODEL_TYPES)),
                ("num_hidden_layers", choose.choice([10**6, 10**9, 1024, 0, -3, 2.5, "2"])),
            ]
        )
        content[name] = value
        write_over(file, json.dumps(content).encode())
        return f"config.json: {name} = {value!r:.80}"
    return _change_json(file, choose)


def tokenizer_config(folder: Path, choose: random.Random) -> str:
    file = folder / "tokenizer_config.json"
    try:
        content = json.loads(bytes_of(file))
        assert isinstance(content, dict)
    except (OSError, ValueError, AssertionError):
        content = {}
    decoder = choose.choice([
        {str(i): {"content": f"<{i}>", "special": True} for i in range(300, 100_300)},
        {"1000000000": {"content": "<far>"}}, {"-1": {"content": "x"}}, {"0": {"content": ""}},
        {"0": "x"}, {"a": {"content": "x"}}, {"5": {"content": "e", "special": "yes"}}, [], 3,
        {"99999999999999999999": {"content": "y", "special": True, "lstrip": True, "rstrip": False,
            "normalized": False, "single_word": False}},
    ])  # fmt: skip  # damages by rows
    name, value = choose.choice([
        ("chat_template",
            choose.choice([*BOMBS, *VALUES, [{"name": [], "template": 3}], {"default": "x"}])),
        ("added_tokens_decoder", decoder),
        ("tokenizer_class", choose.choice(CLASSES)),
        ("bos_token", choose.choice([*VALUES, {"content": 3}, {"content": "<q>"}])),
        ("eos_token", choose.choice([*VALUES, {"content": None}, "none"])),
        ("model_max_length", choose.choice(SCALARS)),
        ("additional_special_tokens", choose.choice([*VALUES, [f"<{i}>" for i in range(100_000)]])),
        ("add_bos_token", choose.choice(SCALARS)),
        ("extra_special_tokens", choose.choice([*VALUES, {"x": "<x>"}, ["<y>"]])),
        ("chat_template_type", choose.choice(["x", "../y", 3])),
        ("tool_parser_type", choose.choice(["x", "json_tools", 3])),
        ("auto_map", {"AutoTokenizer": ["x.Y", None]}),
        ("clean_up_tokenization_spaces", choose.choice(VALUES)), ("name_or_path", "/nowhere"),
        ("fix_mistral_regex", True), ("backend", "x"), ("unk_token", choose.choice(VALUES)),
        ("pad_token", choose.choice(VALUES)), ("legacy", choose.choice(SCALARS)),
        ("vocab_file", "/etc/x"), ("tokenizer_file", "/nowhere"),
        ("split_special_tokens", choose.choice(SCALARS)), ("padding_side", choose.choice(SCALARS)),
    ])  # fmt: skip  # damages by rows
    content[name] = value
    write_over(file, json.dumps(content).encode())
    return f"tokenizer_config.json: {name} = {value!r:.80}"


def tokenizer_json(folder: Path, choose: random.Random) -> str:
    file = folder / "tokenizer.json"
    if not file.is_file() or choose.random() < 0.3:
        return _change_json(file, choose)
    try:
        content = json.loads(bytes_of(file))
        assert isinstance(content, dict)
    except (ValueError, AssertionError):
        return "tokenizer.json: left"
    name, value = choose.choice(
        [
            ("added_tokens", choose.choice(ADDED)),
            ("normalizer", choose.choice(NORMALIZERS)),
            ("pre_tokenizer", choose.choice(PRE)),
            ("model", choose.choice(MODELS)),
            ("post_processor", choose.choice(PROCESSORS)),
            ("decoder", choose.choice(DECODERS)),
            ("truncation", choose.choice(TRUNCATIONS)),
            ("padding", choose.choice(PADDINGS)),
            ("version", choose.choice(SCALARS)),
        ]
    )
    content[name] = value
    write_over(file, json.dumps(content).encode())
    return f"tokenizer.json: {name} = {value!r:.80}"


def other_json(folder: Path, choose: random.Random) -> str:
    names = (
        "generation_config.json", "special_tokens_map.json", "added_tokens.json",
        "model.safetensors.index.json", "chat_template.json", "hf_quant_config.json", "vocab.json",
        "preprocessor_config.json", "processor_config.json", "adapter_config.json",
    )  # fmt: skip  # names by rows
    file = folder / choose.choice(names)
    content = choose.choice([
        *VALUES, {"eos_token_id": choose.choice(VALUES)},
        {"bos_token": choose.choice(VALUES), "eos_token": choose.choice(VALUES)}, {"<x>": 10**9},
        {"<x>": -1}, {f"<{i}>": 300 + i for i in range(100_000)},
        {"weight_map": {"a": "model.safetensors"}}, {"weight_map": {"a": "../../x"}},
        {"weight_map": {"a": "x\0y"}}, {"weight_map": {"a": 3}},
        {"chat_template": choose.choice(BOMBS)},
        {"additional_special_tokens": [f"<{i}>" for i in range(50_000)]},
        {"quantization": {"quant_algo": "FP8"}}, {"a": {"a": {"a": {}}}},
    ])  # fmt: skip  # damages by rows
    write_over(file, json.dumps(content).encode())
    return f"{file.name} = {content!r:.80}"


def template(folder: Path, choose: random.Random) -> str:
    text = choose.choice(BOMBS)
    if choose.random() < 0.3:
        more = folder / "additional_chat_templates"
        if not more.exists() and not more.is_symlink():
            more.mkdir()
            write_over(more / "x.jinja", text.encode("utf-8", "surrogatepass"))
    write_over(folder / "chat_template.jinja", text.encode("utf-8", "surrogatepass"))
    return f"chat_template.jinja = {text!r:.60}"


def bytes_of(file: Path) -> bytes:
    if not file.is_file() or file.stat().st_size > 2**24:
        raise OSError("not a file to change")
    return file.read_bytes()
