"""Run language models from a terminal on MLX, and reuse what an earlier prompt has evaluated.

>>> from mlxrunner import Runner
>>> runner = Runner.load("demo")
>>> for chunk in runner.generate([{"role": "user", "content": "Hello!"}]):
...     print(chunk.text, end="")

Importing this package imports neither mlx nor mlx-lm nor numpy: the first use of a name does.
"""

from __future__ import annotations

from mlxrunner.system.imports import mend_imports

TYPE_CHECKING = False  # as in typing, which takes time to import
if TYPE_CHECKING:
    from typing import Any

    from mlxrunner.batch.execution import BatchRequest, BatchResult, run_batch
    from mlxrunner.engine.parallel_runner import Handle, ParallelRunner
    from mlxrunner.engine.thread import Stats
    from mlxrunner.errors import (
        BrokenLineError,
        BusyError,
        CacheFullError,
        CancelledError,
        ClosedError,
        ContextFullError,
        ContextLengthError,
        CutOffError,
        DamagedStoreError,
        DifferentRunError,
        EngineError,
        FormError,
        LaunchError,
        LogitsError,
        MemoryPlanError,
        MissingFileError,
        MlxrunnerError,
        ModelError,
        NoFreeSlotError,
        NoSuchModelError,
        NotSupportedError,
        OptionError,
        OutputClosedError,
        OutputError,
        PictureError,
        PicturesFullError,
        PromptError,
        ReadError,
        RequestError,
        SessionError,
        StepFailedError,
        StoreError,
        TemplateLimitError,
        TimeLimitError,
        VerifyError,
        WrongThreadError,
    )
    from mlxrunner.memory.plan import Plan
    from mlxrunner.options import GenerateKwargs, GenerateOptions, RunnerKwargs, RunnerSettings
    from mlxrunner.profiling.profile import Profile
    from mlxrunner.results import Chunk, Result, Usage
    from mlxrunner.runner import Runner
    from mlxrunner.templates.messages import Message

__all__ = [
    "BatchRequest",
    "BatchResult",
    "BrokenLineError",
    "BusyError",
    "CacheFullError",
    "CancelledError",
    "Chunk",
    "ClosedError",
    "ContextFullError",
    "ContextLengthError",
    "CutOffError",
    "DamagedStoreError",
    "DifferentRunError",
    "EngineError",
    "FormError",
    "GenerateKwargs",
    "GenerateOptions",
    "Handle",
    "LaunchError",
    "LogitsError",
    "MemoryPlanError",
    "Message",
    "MissingFileError",
    "MlxrunnerError",
    "ModelError",
    "NoFreeSlotError",
    "NoSuchModelError",
    "NotSupportedError",
    "OptionError",
    "OutputClosedError",
    "OutputError",
    "ParallelRunner",
    "PictureError",
    "PicturesFullError",
    "Plan",
    "Profile",
    "PromptError",
    "ReadError",
    "RequestError",
    "Result",
    "Runner",
    "RunnerKwargs",
    "RunnerSettings",
    "SessionError",
    "Stats",
    "StepFailedError",
    "StoreError",
    "TemplateLimitError",
    "TimeLimitError",
    "Usage",
    "VerifyError",
    "WrongThreadError",
    "run_batch",
]
_HOMES = {
    "BatchRequest": "batch.execution",
    "BatchResult": "batch.execution",
    "Chunk": "results",
    "GenerateKwargs": "options",
    "GenerateOptions": "options",
    "Handle": "engine.parallel_runner",
    "Message": "templates.messages",
    "ParallelRunner": "engine.parallel_runner",
    "Plan": "memory.plan",
    "Profile": "profiling.profile",
    "Result": "results",
    "Runner": "runner",
    "RunnerKwargs": "options",
    "RunnerSettings": "options",
    "Stats": "engine.thread",
    "Usage": "results",
    "run_batch": "batch.execution",
}
"""The module of each name that is not an error."""
mend_imports()  # before any module imports mlx-lm


def __getattr__(name: str) -> Any:
    if name not in (*__all__, "FileError", "ObserverError", "WriteError"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
