"""Six families of chat templates on a byte tokenizer that has their marks as tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.families import KINDS
from support.models import write_tokenizer

from mlxrunner.tokenizer import Tokenizer, load_tokenizer

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
