"""Chat templates of our own making, after those of six families, on a byte tokenizer that has their marks as tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from families import GEMMA

from mlxrunner.testing_models import save_model, tiny_config, tiny_model, write_tokenizer
from mlxrunner.tokenizer import Tokenizer, load_tokenizer

CHATML = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if not (loop.first and message.role == 'system') %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA3 = """\
<s><|start_header_id|>system<|end_header_id|>

Today Date: {{ date_string | default('26 Jul 2024') }}

{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}<|eot_id|>
{%- for message in messages %}
{%- if not (loop.first and message.role == 'system') %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

MISTRAL = """\
<s>{% set system = messages[0].content if messages[0].role == 'system' else none %}
{%- for message in messages %}
{%- if message.role == 'user' %}[INST] {% if loop.last and system %}{{ system }}

{% endif %}{{ message.content }}[/INST]
{%- elif message.role == 'assistant' %} {{ message.content | trim }}</s>
{%- endif %}
{%- endfor %}"""

QWEN3 = """\
{%- set last = namespace(query=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.query = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = message.content %}
{%- set thought = '' %}
{%- if message.role == 'assistant' and '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and loop.index0 > last.query and thought %}<think>
{{ thought }}
</think>

{% endif %}{{ content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

HARMONY = """\
<|start|>system<|message|>You are a model. Reasoning: low<|end|>
{%- for message in messages %}
{%- if message.role == 'system' %}<|start|>developer<|message|># Instructions

{{ message.content }}<|end|>
{%- elif message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "qwen3": QWEN3,
    "harmony": HARMONY,
}
MARKS = [
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>",
    "[INST]", "[/INST]", "<think>", "</think>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>",
]  # fmt: skip
ENDS = {
    "chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "mistral": "</s>", "qwen3": "<|im_end|>", "harmony": "<|return|>",
}  # fmt: skip


def write_family(folder: Path, family: str) -> None:
    """The tokenizer of a family: a token per byte, and one per mark."""
    from tokenizers import Tokenizer as Fast

    write_tokenizer(folder, chat_template=TEMPLATES[family], eos_token=ENDS[family])
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
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """One of each family."""
    root = tmp_path_factory.mktemp("families")
    for name in TEMPLATES:
        write_family(root / name, name)
    return {name: load_tokenizer(root / name) for name in TEMPLATES}


@pytest.fixture(params=sorted(TEMPLATES))
def family(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]) -> Family:
    """Each family in turn."""
    return Family(request.param, tokenizers[request.param])


@pytest.fixture
def scripted(tmp_path: Path) -> Callable[..., Path]:
    """Writes a model directory whose answer is a script: a Llama that looks at nothing but the last token.

    `script`: texts, each of one token's worth or more; each token is followed by the next, the last one by the family's end. Tokens have
    to be different from each other, and the first is what the generation prompt ends with.
    """

    def write(family: str, begin: str, script: str, name: str = "model") -> Path:
        folder = tmp_path / name
        width = 288
        config = tiny_config(
            "llama",
            hidden_size=width,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=2048,
        )
        model: Any = tiny_model(config)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight = mx.zeros_like(layer.self_attn.o_proj.weight)
            layer.mlp.down_proj.weight = mx.zeros_like(layer.mlp.down_proj.weight)
        model.model.embed_tokens.weight = mx.eye(width)
        model.model.norm.weight = mx.ones(width)
        folder.mkdir()
        write_family(folder, family)
        tokenizer = load_tokenizer(folder)
        tokens = [tokenizer.encode_more(begin)[-1], *tokenizer.encode_more(script + ENDS[family])]
        assert len(set(tokens)) == len(tokens), tokenizer.decode(tokens)
        head = mx.zeros((width, width))
        for before, after in pairwise(tokens):
            head[after, before] = 1.0
        model.lm_head.weight = head
        (folder / "config.json").unlink()
        save_model(folder, model, config)
        return folder

    return write


def lines(file: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(name="lines")
def _lines() -> Callable[[Path], list[dict[str, Any]]]:
    """Reads the JSON lines of a file."""
    return lines


class Talk:
    """A tiny model of a family whose answers are dictated, watched by a profile; `ask` gives the event of a request."""

    def __init__(self, tokenizer: Tokenizer, file: Path, **options: Any) -> None:
        from mlxrunner.models.facts import facts_of
        from mlxrunner.profiling.profile import Profile
        from mlxrunner.runner import Runner

        config = tiny_config("llama", max_position_embeddings=2048)
        model = tiny_model(config)
        self.runner = Runner(model, tokenizer, facts_of(model, config), name="tiny")
        self.file, self.profile = file, Profile("python", events=file, **options)
        self.profile.attach(self.runner)

    def ask(self, prompt: Any, answer: str = "", **options: Any) -> dict[str, Any]:
        """The event of a request that is answered with `answer`."""
        tokenizer = self.runner.tokenizer
        wanted = [*tokenizer.encode_more(answer), sorted(tokenizer.stop_tokens)[-1]]
        start = len(self.runner.tokenize(prompt))

        def dictate(tokens: Any, logits: Any) -> Any:
            return mx.where(
                mx.arange(logits.shape[-1])
                == wanted[min(tokens.shape[0] - start, len(wanted) - 1)],
                0.0,
                -mx.inf,
            )[None]

        assert (
            "".join(
                chunk.text
                for chunk in self.runner.generate(prompt, logits_processors=[dictate], **options)
            )
            == answer
        )
        return lines(self.file)[-1]


@pytest.fixture
def talk(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> Callable[..., Talk]:
    """Makes a Talk with a family's tokenizer; options of the Profile."""
    return lambda family, **options: Talk(tokenizers[family], tmp_path / "events.jsonl", **options)
