"""Keep the record of a batch that has ended, OUTPUT.done: what its answers were made from."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mlxrunner.errors import OutputError, ReadError
from mlxrunner.system.reading import read_json
from mlxrunner.system.writing import sealed, written

LARGEST = 2**22
"""The most bytes of OUTPUT.done, which may hold a schema or a template of the command line."""


def completion_path(store: Path) -> Path:
    """Return the path of OUTPUT.done for the store's path."""
    return store.with_suffix(".done")


@dataclass(frozen=True)
class Completion:
    """The record of a batch that has ended, kept in a small file."""

    lines: int
    """The number of lines of the input."""
    failed: int
    """The number of lines whose answer is an error."""
    size: int
    """The size of the output in bytes."""
    digest: str
    """The SHA-256 of the output, in hexadecimal."""
    made_from: dict[str, str]
    """The model, the options and the input, as in the store's `meta`."""

    @classmethod
    def read(cls, path: Path) -> Completion | None:
        """Read the record from `path`. Return None if there is no such file or it is damaged."""
        with suppress(ReadError, TypeError):
            found = cls(**read_json(path, LARGEST, sealed=True))
            if found._is_whole():
                return found
        return None

    def _is_whole(self) -> bool:
        """Return True if all fields have values of the right type."""
        counts, made_from = (self.lines, self.failed, self.size), self.made_from
        return (
            all(type(count) is int and count >= 0 for count in counts)
            and isinstance(self.digest, str)
            and isinstance(made_from, dict)
            and all(isinstance(value, str) for value in made_from.values())
        )

    def write(self, path: Path) -> None:
        """Write the whole record to the disk, with mode 0600. Raise OutputError if that fails."""
        try:
            with written(path) as stream:
                stream.write(sealed(json.dumps(asdict(self), indent=1)))
        except OSError as error:
            raise OutputError(f"{path}: can't be written: {error.strerror}") from error
