"""Tokenizer directories of every kind, trained on a few sentences.

Two kinds are of SentencePiece, four of tokenizers.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.models import change_json

from mlxrunner.tokenizer import Tokenizer, load_tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog, again and again",
    "a model reads tokens and writes tokens, one after the other",
    "def hello(name):\n    return 'hello ' + name  # twice\n\n",
    "größer als früher: ein Käfer über der Straße",
    "日本語のテキストと中文文本",
    "emoji 😀😀 and 🙂🙂 and more 😀🙂",
] * 8

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] "
    "}}<|end_header_id|>\n\n"
    "{{ message['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}[INST] {{ "
    "message['content'] }} [/INST]"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% "
    "endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not "
    "supported') }}{% endif %}"
    "{% for message in messages %}<start_of_turn>{{ 'model' if message['role'] == 'assistant' else "
    "message['role'] }}\n"
    "{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt "
    "%}<start_of_turn>model\n{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA}


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    """Chat templates, as models have them."""
    return TEMPLATES


def train_sentencepiece(**options: Any) -> bytes:
    """Train a tokenizer.model like Llama's: BPE, byte fallback, the text as it is.

    Its ids: <unk> 0, <s> 1, </s> 2, then symbols, then bytes.
    """
    import sentencepiece

    model = io.BytesIO()
    settings = {
        "model_type": "bpe",
        "vocab_size": 420,
        "byte_fallback": True,
        "character_coverage": 0.99,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
        "num_threads": 1,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, **(settings | options)
    )
    return model.getvalue()


def spm_prefix(folder: Path) -> None:
    """Llama 2, Mistral: a space in front of every text."""
    symbols = {"user_defined_symbols": ["<ud>"], "control_symbols": ["<ctl>"]}
    (folder / "tokenizer.model").write_bytes(train_sentencepiece(**symbols))
    configure(folder, bos_token="<s>", eos_token={"content": "</s>"}, chat_template=MISTRAL)


def spm_plain(folder: Path) -> None:
    """Gemma: no space in front; the marks of a turn are user-defined symbols."""
    symbols = {
        "user_defined_symbols": ["<start_of_turn>", "<end_of_turn>"],
        "add_dummy_prefix": False,
    }
    (folder / "tokenizer.model").write_bytes(train_sentencepiece(**symbols))
    configure(folder, chat_template=GEMMA)


def byte_level(folder: Path) -> None:
    """Qwen: no BOS."""
    save_byte_level(folder, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    configure(folder, eos_token="<|endoftext|>", chat_template=CHATML)


def byte_level_bos(folder: Path) -> None:
    """Llama 3: the post-processor adds BOS."""
    specials = [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ]
    save_byte_level(folder, specials, bos=specials[0])
    configure(folder, bos_token=specials[0], eos_token=specials[1], chat_template=LLAMA3)


def metaspace(folder: Path) -> None:
    """Write Llama 2 and Mistral as tokenizer.json.

    A space goes in front of the beginning only; decoding puts bytes together again.
    """
    from tokenizers import pre_tokenizers

    save_byte_fallback(folder, None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False))


def metaspace_legacy(folder: Path) -> None:
    """The older conversion: a space in front of every text between special tokens."""
    from tokenizers import normalizers

    save_byte_fallback(
        folder,
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        None,
    )


def save_byte_level(folder: Path, specials: list[str], bos: str | None = None) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(specials)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tokenizer.token_to_id(bos))],
        )
    tokenizer.save(str(folder / "tokenizer.json"))


def save_byte_fallback(folder: Path, normalizer: Any, pre_tokenizer: Any) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=200, limit_alphabet=60, show_progress=False)
    )
    learned = json.loads(trained.to_str())["model"]
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *sorted(learned["vocab"], key=learned["vocab"].get),
    ]
    vocab = {piece: token for token, piece in enumerate(dict.fromkeys(pieces))}
    merges = [tuple(merge) for merge in learned["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    configure(folder, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=MISTRAL)


def configure(folder: Path, **settings: Any) -> None:
    """Write tokenizer_config.json again or change it; None takes a setting away."""
    file = folder / "tokenizer_config.json"
    given = {} if file.exists() else {"tokenizer_class": "PreTrainedTokenizerFast"}
    change_json(file, **given | settings)


KINDS: dict[str, Callable[[Path], None]] = {
    "spm_prefix": spm_prefix,
    "spm_plain": spm_plain,
    "byte_level": byte_level,
    "byte_level_bos": byte_level_bos,
    "metaspace": metaspace,
    "metaspace_legacy": metaspace_legacy,
}


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One directory for each kind. Not to be written to."""
    root = tmp_path_factory.mktemp("tokenizers")
    for name, write in KINDS.items():
        (root / name).mkdir()
        write(root / name)
        (root / name / "config.json").write_text('{"model_type": "llama"}')
    return {name: root / name for name in KINDS}


@pytest.fixture(scope="session")
def tokenizers(directories: dict[str, Path]) -> dict[str, Tokenizer]:
    """A loaded tokenizer of each kind."""
    return {name: load_tokenizer(folder) for name, folder in directories.items()}


@pytest.fixture
def copy_of(directories: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies one kind's directory with changed settings.

    The settings are those of its tokenizer_config.json; None takes one away.
    """
    import shutil

    def copy(kind: str, **settings: Any) -> Path:
        folder = Path(shutil.copytree(directories[kind], tmp_path / kind, dirs_exist_ok=True))
        configure(folder, **settings)
        return folder

    return copy


Load = Callable[..., Tokenizer]


@pytest.fixture
def loaded(copy_of: Callable[..., Path]) -> Load:
    """Return a function that loads a kind of tokenizer with changed settings, as `copy_of`."""
    return lambda kind, **settings: load_tokenizer(copy_of(kind, **settings))


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of tokenizer in turn."""
    name: str = request.param
    return name


@pytest.fixture
def tokenizer(tokenizers: dict[str, Tokenizer], kind: str) -> Tokenizer:
    """A tokenizer of each kind in turn."""
    return tokenizers[kind]
