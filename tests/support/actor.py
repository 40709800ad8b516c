"""A model that plays a part: its answers are written by the test, its caches are real.

The model keeps each token in its key-value cache, and reads what its mask shows of the
conversation from there. So a stale, missing or doubled key changes what it says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from mlxrunner import ParallelRunner
from mlxrunner.models.facts import ModelFacts
from mlxrunner.models.load import LoadedModel, LoadProgress, tell_nobody
from mlxrunner.server.models import ModelLoader, ServedModel
from mlxrunner.server.prompts.builder import PromptBuilder
from mlxrunner.templates.rendering import jinja_renderer
from mlxrunner.tokenizer.base import EOS, VOCAB, ByteTokenizer

GUESSED = 16
"""The most tokens of a pass that checks guesses."""
BEGIN = "<|im_start|>assistant\n"
"""The text before an answer."""
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "\x1e\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for tool_call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": {{ tool_call.function.name | tojson }}, '
    '"arguments": {{ tool_call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "\x1e\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template in the manner of Qwen's."""
Script = Callable[[str], str]
"""A function from the text of a prompt to the whole answer."""


class Actor:
    """A model whose answers are those of a script."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.layers = ["full"]
        self.forwards: list[int] = []
        """The number of tokens of each forward pass so far."""

    def make_cache(self) -> list[Any]:
        return [KVCache()]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """Return logits `[1, n, VOCAB]`.

        Only the last GUESSED rows of each sequence are of use.
        """
        n = tokens.shape[1]
        self.forwards.append(n)
        mask = cache[0].make_mask(n, return_array=True, window_size=None)
        offset = cache[0].offset
        places = offset if isinstance(offset, mx.array) else mx.arange(offset, offset + n)
        row = mx.stack([tokens[0], places]).astype(mx.float32).T[None, None]
        keys, _ = cache[0].update_and_fetch(row, row)
        cells, places = np.array(keys[0, 0].T).astype(np.int64)
        if mask is None:
            mask = mx.array(True)
        seen = np.array(mx.broadcast_to(mask, (1, 1, n, len(cells)))[0, 0])
        logits = np.zeros((1, n, VOCAB), np.float32)
        follows = np.append((seen[1:] >= seen[:-1]).all(axis=1), False)
        ends = np.flatnonzero(~follows)  # the last row of each sequence
        for row_number in {end - back for end in ends for back in range(min(end + 1, GUESSED))}:
            visible = seen[row_number]
            order = np.argsort(places[visible])  # cells lie in any order
            logits[0, row_number, self._next(cells[visible][order])] = 50.0
        return mx.array(logits)

    def parameters(self) -> dict[str, mx.array]:
        return {}

    def _next(self, seen: np.ndarray) -> int:
        """Return the token after those that the cache holds."""
        text = bytes(np.where(seen == EOS, 0x1E, np.minimum(seen, 255)).astype(np.uint8))
        begin = text.rfind(BEGIN.encode())
        if begin < 0:
            return EOS
        begin += len(BEGIN)
        answer = self.script(text[:begin].decode("utf-8", "replace")).encode()
        said = text[begin:]
        return answer[len(said)] if answer.startswith(said) and len(answer) > len(said) else EOS


class ActorTokenizer(ByteTokenizer):
    """The byte tokenizer with a chat template that knows tools."""

    def render(self, messages: Any, *, add_generation_prompt: bool = True, **variables: Any) -> str:
        return jinja_renderer(TEMPLATE, {})(messages, add_generation_prompt, **variables)


class ActorOpening(ModelLoader):
    """An opening whose models all play the same part."""

    script: Script = staticmethod(lambda text: "Done.")

    def least(self, name: str) -> int:
        return 0

    def load(self, name: str, room: int, progress: LoadProgress = tell_nobody) -> ServedModel:
        model, tokenizer = Actor(type(self).script), ActorTokenizer()
        context = self.runner.get("context") or 250_000
        facts = ModelFacts("actor", context, True, {"full": 1}, VOCAB)
        runner = ParallelRunner(
            model,
            tokenizer,
            facts,
            max_sequences=self.settings.slots or 8,
            context=context,
            name=name,
        )
        loaded = LoadedModel(name, Path("/nowhere"), model, tokenizer, facts, {})
        maker = PromptBuilder(tokenizer, TEMPLATE, "json_tools")
        return ServedModel(name, loaded, runner, 1, "actor", maker, {})


def playing(script: Script) -> type[ActorOpening]:
    """Return the kind of opening whose models follow `script`."""
    return type("Playing", (ActorOpening,), {"script": staticmethod(script)})


def calling(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the text of a tool call as the actor writes it."""

    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': dict(arguments)})}\n</tool_call>"
