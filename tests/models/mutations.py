"""Model folders with one to three things changed in a good one, broken or made to do harm.

`python tests/models/mutations.py SEED COUNT FOLDER` tries COUNT of them, and prints a line for each
that does not end in one clear line. The test runs a few of them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
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


def mutate(folder: Path, choose: random.Random) -> str:
    """Change one to three things in `folder`; says which."""
    return "; ".join(
        choose.choice(CHANGES)(folder, choose) for _ in range(choose.choice((1, 1, 1, 2, 3)))
    )


def _paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:50])
        if isinstance(value, list)
        else ()
    )
    return [path for key, one in items for path in ((*prefix, key), *_paths(one, (*prefix, key)))]


def _change_json(file: Path, choose: random.Random, values: list[Any] = VALUES) -> str:
    """One value of it, at any depth; or a name is dropped, or added."""
    try:
        content = json.loads(_bytes(file))
        paths = _paths(content)
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
    _write(file, json.dumps(content).encode())
    return what


def _write(file: Path, content: bytes) -> None:
    """Unless an earlier change has made something else of the file."""
    if file.is_file() or not (file.exists() or file.is_symlink()):
        file.write_bytes(content)


def config(folder: Path, choose: random.Random) -> str:
    file = folder / "config.json"
    if choose.random() < 0.25:
        content = {"model_type": "llama"}
        with contextlib.suppress(OSError, ValueError):
            content |= json.loads(_bytes(file))
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
        _write(file, json.dumps(content).encode())
        return f"config.json: {name} = {value!r:.80}"
    return _change_json(file, choose)


def tokenizer_config(folder: Path, choose: random.Random) -> str:
    file = folder / "tokenizer_config.json"
    try:
        content = json.loads(_bytes(file))
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
    _write(file, json.dumps(content).encode())
    return f"tokenizer_config.json: {name} = {value!r:.80}"


def tokenizer_json(folder: Path, choose: random.Random) -> str:
    file = folder / "tokenizer.json"
    if not file.is_file() or choose.random() < 0.3:
        return _change_json(file, choose)
    try:
        content = json.loads(_bytes(file))
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
    _write(file, json.dumps(content).encode())
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
    _write(file, json.dumps(content).encode())
    return f"{file.name} = {content!r:.80}"


def template(folder: Path, choose: random.Random) -> str:
    text = choose.choice(BOMBS)
    if choose.random() < 0.3:
        more = folder / "additional_chat_templates"
        if not more.exists() and not more.is_symlink():
            more.mkdir()
            _write(more / "x.jinja", text.encode("utf-8", "surrogatepass"))
    _write(folder / "chat_template.jinja", text.encode("utf-8", "surrogatepass"))
    return f"chat_template.jinja = {text!r:.60}"


def _bytes(file: Path) -> bytes:
    if not file.is_file() or file.stat().st_size > 2**24:
        raise OSError("not a file to change")
    return file.read_bytes()


def header(folder: Path, choose: random.Random) -> str:
    """Change the header of the weights: its JSON, or its length."""
    file = folder / "model.safetensors"
    try:
        data = _bytes(file)
        length = struct.unpack("<Q", data[:8])[0]
        content = json.loads(data[8 : 8 + length])
    except (OSError, ValueError, struct.error):
        return "model.safetensors: left"
    if choose.random() < 0.2:
        length = choose.choice([0, 1, 7, 2**31, 2**63, 2**64 - 1, length - 1, length + 1])
        file.write_bytes(struct.pack("<Q", length) + data[8:])
        return f"model.safetensors: length {length}"
    paths = _paths(content)
    *inner, last = choose.choice(paths) if paths else ("a",)
    place = content
    for key in inner:
        place = place[key]
    value = choose.choice(
        [
            *VALUES,
            "F32",
            "F64",
            "F16",
            "BOOL",
            "F8_E4M3",
            "XX",
            [-8, 0],
            [0, 8],
            [0, 2**63],
            [2**40],
        ]
    )
    place[last] = value
    text = json.dumps(content).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return f"model.safetensors: {[*inner, last]} = {value!r:.60}"


def data(folder: Path, choose: random.Random) -> str:
    """Change the data of the weights: not one number, or other bytes."""
    file = folder / "model.safetensors"
    try:
        content = bytearray(_bytes(file))
    except OSError:
        return "model.safetensors: left"
    if len(content) > 8 and choose.random() < 0.5:
        begin = 8 + min(len(content), int.from_bytes(content[:8], "little"))
        content[begin:] = choose.choice((b"\xff", b"\0", b"\x7f")) * (len(content) - begin)
    elif content:
        for _ in range(50):
            content[choose.randrange(len(content))] = choose.randrange(256)
    file.write_bytes(content)
    return "model.safetensors: bytes"


def damage(folder: Path, choose: random.Random) -> str:
    """Cut, emptied, or with other bytes in it: any file."""
    files = [
        file
        for file in sorted(folder.iterdir())
        if file.is_file() and not file.is_symlink() and file.stat().st_size < 2**24
    ]
    if not files:
        return "nothing there"
    file, how = choose.choice(files), choose.choice(("cut", "empty", "bytes", "more", "zeros"))
    content = bytearray(file.read_bytes())
    if how == "cut":
        del content[choose.randrange(len(content) + 1) :]
    elif how == "empty":
        content.clear()
    elif how == "more":
        content += content[:1000]
    elif how == "zeros":
        content[:] = bytes(len(content))
    else:
        for _ in range(min(len(content), choose.choice((1, 3, 20)))):
            content[choose.randrange(len(content))] = choose.randrange(256)
    file.write_bytes(content)
    return f"{file.name}: {how}"


NAMES = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "tokenizer.model", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "model.safetensors", "model-extra.safetensors", "vocab.json",
    "merges.txt", "model.safetensors.index.json", "hf_quant_config.json", "tiktoken.model",
    "additional_chat_templates", "processor_config.json",
]  # fmt: skip  # names by rows


def kind_of_file(folder: Path, choose: random.Random) -> str:
    """Put a FIFO, a directory, a broken link or a device in the place of any file."""
    file, how = (
        folder / choose.choice(NAMES),
        choose.choice(
            ("fifo", "folder", "dangling", "loop", "device", "unreadable", "link to fifo", "hole")
        ),
    )
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    with contextlib.suppress(FileNotFoundError):
        file.unlink()
    if how == "fifo":
        os.mkfifo(file)
    elif how == "folder":
        file.mkdir()
    elif how == "dangling":
        file.symlink_to("nowhere")
    elif how == "loop":
        file.symlink_to(file.name)
    elif how == "link to fifo":
        if not (folder / "pipe").exists():
            os.mkfifo(folder / "pipe")
        file.symlink_to("pipe")
    elif how == "hole":
        with file.open("wb") as stream:
            stream.truncate(2**36)
    elif how == "unreadable":
        file.write_text("{}")
        file.chmod(0)
    else:
        with contextlib.suppress(OSError):  # who is not root can't
            os.mknod(file, 0o20666, os.makedev(1, 5))
    return f"{file.name}: {how}"


CHANGES: list[Callable[[Path, random.Random], str]] = [
    config, config, config, config, tokenizer_config, tokenizer_config, tokenizer_json,
    tokenizer_json, other_json, template, header, data, damage, kind_of_file,
]  # fmt: skip  # weights by repetition


def write_bases(root: Path) -> list[Path]:
    """Write good folders: architectures with the simple tokenizer, a Llama with each tokenizer."""
    from support.models import ARCHITECTURES, write_model, write_tokenizer
    from support.tokenizers import KINDS

    chat = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    folders = []
    for kind in ARCHITECTURES:
        write_model(root / kind, kind, tokenizer=False)
        write_tokenizer(root / kind, chat_template=chat)
        folders.append(root / kind)
    for name, write in KINDS.items():
        write_model(root / name, "llama", tokenizer=False, vocab_size=432)
        write(root / name)
        folders.append(root / name)
    return folders


def commands(folder: Path) -> list[list[str]]:
    return [
        ["show", str(folder)],
        ["plan", str(folder)],
        [
            "generate",
            "-m",
            str(folder),
            "-p",
            "hi there aaaaaaaaaaaaaaaaaaaaaaaaaa",
            "--max-tokens",
            "2",
        ],
    ]


def complaint(code: int | None, said: str) -> str:
    """Return what is wrong with how a command ended, or ""."""
    if code not in (0, 1, 2):
        return f"exit code {code}"
    word = next(
        (
            word
            for word in ("internal error", "Traceback", "panicked", "Segmentation")
            if word in said
        ),
        "",
    )
    lines = [line for line in said.splitlines() if line.startswith("mlxrunner: ")]
    if word or len(lines) > 1 or (code == 1 and not lines) or len(said) > 6000:
        return word or f"{len(said)} characters, {len(lines)} lines of errors"
    return ""


def main(seed: int, count: int, root: Path) -> int:
    """Each folder in a process of its own, forked from one that has imported everything."""
    import signal
    import time

    for name in (
        "mlx_lm.utils",
        "sentencepiece",
        "transformers",
        "mlxrunner.cli",
        "mlxrunner.runner",
    ):
        importlib.import_module(name)

    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    bases, found = sorted(path for path in (root / "bases").iterdir()), 0
    for number in range(seed, seed + count):
        choose = random.Random(number)
        base, folder, said = choose.choice(bases), root / f"f{number}", root / f"f{number}.said"
        shutil.copytree(base, folder)
        what = mutate(folder, choose)
        for command in commands(folder):
            begin = time.monotonic()
            child = os.fork()
            if not child:
                _run(command, said)
            code: int | None = None
            while time.monotonic() - begin < 60:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    code = os.waitstatus_to_exitcode(status)
                    break
                time.sleep(0.01)
            else:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            text = said.read_bytes().decode(errors="replace")
            wrong = complaint(code, text)
            if wrong:
                found += 1
                print(
                    f"{number} {base.name} {command[0]} [{wrong}] {what}\n    "
                    f"{' '.join(text.split())[:300]}",
                    flush=True,
                )
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                path.chmod(0o600)
        shutil.rmtree(folder, ignore_errors=True)
        said.unlink()
    print(f"{count} folders, {found} complaints", flush=True)
    return found


def _run(command: list[str], said: Path) -> None:
    """In a process of its own, with limits on memory and on a processor's time."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (12 * 2**30,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    code = 99
    try:
        from mlxrunner.cli import main as program

        program(command)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # for `support`
    root = Path(sys.argv[3])
    if not (root / "bases").exists():
        (root / "bases").mkdir(parents=True)
        write_bases(root / "bases")
        sys.exit(0)
    main(int(sys.argv[1]), int(sys.argv[2]), root)
