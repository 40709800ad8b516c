"""Read the sampling and the stop strings that a model's generation_config.json suggests.

The file may come from anybody. A value that cannot be used is left out, and named in one line.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxrunner.config.option import about
from mlxrunner.errors import MissingFileError, OptionError, ReadError
from mlxrunner.options import GenerateOptions
from mlxrunner.system.reading import is_there, read_json

FILE = "generation_config.json"
LARGEST = 2**20
"""Most bytes of the file that are read. The files in use have a few hundred."""
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The options that are taken from the file, under the same names."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
}
"""Values that change nothing."""
FILTERS = ("top_p", "top_k", "min_p")
"""The options that only matter where tokens are sampled."""


@dataclass(frozen=True)
class Suggestion:
    """The options that a model suggests."""

    options: dict[str, Any] = field(default_factory=dict)
    """Options of a request. It is empty if the model suggests nothing."""
    problem: str | None = None
    """One line about what is ignored, or None."""


def stop_strings(folder: Path) -> tuple[str, ...]:
    """Return the texts before which an answer of the model in `folder` ends.

    These are `stop_strings`. Texts that cannot be used are left out: `suggestion_of` names them.
    """
    with suppress(ReadError):
        found = read_json(folder / FILE, LARGEST)
        return _stop_strings(found) if isinstance(found, dict) else ()
    return ()


def _stop_strings(found: dict[str, Any]) -> tuple[str, ...]:
    given = found.get("stop_strings")
    listed = given if isinstance(given, list) else [given]
    return tuple(dict.fromkeys(text for text in listed if isinstance(text, str) and text))


def suggestion_of(folder: Path) -> Suggestion:
    """Return the sampling that the model in `folder` suggests.

    `do_sample: false` means greedy. `do_sample: true` without a temperature means 1.0, as it does
    in transformers.
    """
    file = folder / FILE
    try:
        found = read_json(file, LARGEST)
    except MissingFileError as error:
        return Suggestion(problem=f"{error}: it is ignored" if is_there(file) else None)
    except ReadError as error:
        return Suggestion(problem=f"{error}; its sampling is ignored")
    if not isinstance(found, dict):
        return Suggestion(problem=f"{file}: not a JSON object: its sampling is ignored")
    options, problems = _read(found)
    if found.get("do_sample") is False:
        options = {"temperature": 0.0} | {
            name: value for name, value in options.items() if name not in ("temperature", *FILTERS)
        }
    elif found.get("do_sample") is True:
        options = {"temperature": 1.0} | options
    problem = f"{file}: ignored: {'; '.join(problems)}" if problems else None
    return Suggestion(options, problem)


def _read(found: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the usable options, and a reason for each one that is not."""
    options, problems = {}, []
    for name in NAMES:
        value = found.get(name)
        if value is None or (type(value) in (int, float) and value in NEUTRAL.get(name, ())):
            continue
        try:
            about(GenerateOptions.__dataclass_fields__[name]).check(name, value)
        except OptionError as error:
            problems.append(f"{error!s:.120}")
        else:
            options[name] = float(value) if name != "top_k" else value
    if found.get("do_sample") not in (None, True, False):
        problems.append(f"do_sample: {found['do_sample']!r:.80} is neither true nor false")
    given = found.get("stop_strings")
    listed = given if isinstance(given, list) else [given]
    if given is not None and not all(isinstance(text, str) and text for text in listed):
        problems.append(f"stop_strings: {given!r:.80} is not a list of texts")
    return options, problems
