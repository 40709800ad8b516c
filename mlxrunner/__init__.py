"""Language models in a terminal on MLX, with one prefix-cache entry that always says what it reused.

>>> from mlxrunner import Runner
>>> runner = Runner.load("demo")
>>> for chunk in runner.generate([{"role": "user", "content": "Hello!"}]):
...     print(chunk.text, end="")

Importing this package imports neither mlx nor mlx-lm; the first use of a name does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxrunner.batch.request import BatchRequest, BatchResult
    from mlxrunner.batch.run import run_batch
    from mlxrunner.errors import (
        BusyError,
        ContextLengthError,
        FormError,
        MemoryPlanError,
        MlxrunnerError,
        ModelError,
        OptionError,
        PromptError,
    )
    from mlxrunner.events import Chunk, Usage
    from mlxrunner.runner import Runner
    from mlxrunner.tokenizer import Message

__all__ = [
    "BatchRequest",
    "BatchResult",
    "BusyError",
    "Chunk",
    "ContextFullError",
    "ContextLengthError",
    "FormError",
    "MemoryPlanError",
    "Message",
    "MlxrunnerError",
    "ModelError",
    "OptionError",
    "PromptError",
    "Runner",
    "Usage",
    "run_batch",
]
_HOMES = {
    "BatchRequest": "batch.request",
    "BatchResult": "batch.request",
    "Chunk": "events",
    "Message": "tokenizer",
    "Runner": "runner",
    "Usage": "events",
    "run_batch": "batch.run",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
