"""What a batch over files was asked for, and what its answers depend on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mlxrunner.batch.fingerprint import model_parts, option_parts
from mlxrunner.batch.store import Order
from mlxrunner.config import GenerateOptions
from mlxrunner.errors import OptionError
from mlxrunner.models.resolve import resolve
from mlxrunner.writing import is_stream

STANDARD = "-"
"""Standard input or output."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What `mlxrunner batch` was asked for; its --help says what each is. `loading`: of `Runner.load`; `defaults`: of `Runner.generate`.

    OptionError for what can be known to be wrong before anything is read.
    """

    input: str
    output: str = STANDARD
    model: str = "demo"
    loading: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    raw: bool = False
    template: str | None = None
    order: Order = "prefix"
    output_order: Literal["input", "done"] = "input"
    parallel: int | None = None
    retries: int = 0
    timeout: float | None = None
    max_errors: int | None = None
    strict: bool = False
    usage: bool = True
    resume: bool = False

    def __post_init__(self) -> None:
        GenerateOptions.of(**self.defaults)
        if self.max_errors is not None and self.max_errors < 1:
            raise OptionError(
                f"max_errors: {self.max_errors} is out of range, it has to be at least 1"
            )
        if self.raw and self.system:
            raise OptionError(
                "--system needs the chat template, which --raw leaves out: use one of them"
            )
        if self.template is None and self.input.lower().endswith(".csv"):
            raise OptionError(
                'a CSV file needs --prompt-template "... {column} ...", which says what to ask about a row'
            )
        if self.resume and self.store_path is None:
            raise OptionError(
                "--resume needs an output file: what went to standard output or a device can't be gone on with"
            )
        is_same = False
        with suppress(OSError, ValueError):  # the latter: a NUL in a name
            is_same = self.input != STANDARD and os.path.samefile(self.input, self.output)
        if is_same:
            raise OptionError(f"{self.output}: is the input; choose another file for the output")

    @property
    def store_path(self) -> Path | None:
        """Beside the output; None where that is a stream."""
        return (
            None
            if self.output == STANDARD or is_stream(self.output)
            else Path(f"{self.output}.run")
        )

    @property
    def trust_remote_code(self) -> bool:
        return bool(self.loading.get("trust_remote_code"))

    def parts(self) -> dict[str, str]:
        """What the answers depend on beside the input. How many lines run at a time, and in which order, is not among it. ModelError."""
        loading = {name: self.loading.get(name) for name in ("context", "kv_bits")}
        lines = {"system": self.system, "raw": self.raw or None, "prompt_template": self.template}
        written = {"output_order": self.output_order, "no_usage": not self.usage or None}
        options = option_parts({**self.defaults, **loading, **lines, **written})
        return {**model_parts(self.model, resolve(self.model)), **options}
