"""What is known of a batch that has ended, in a small file beside the output (OUTPUT.done): what the answers were made from.

It takes the place of the store, so that --resume can still tell the same batch from another one.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mlxrunner.batch.output import OutputError
from mlxrunner.reading import ReadError, read_text
from mlxrunner.writing import written

LARGEST = 2**22
"""Most bytes of such a file, which may hold a schema or a template of the command line."""


def done_path(store: Path) -> Path:
    """Where it is, by the path of the store."""
    return store.with_suffix(".done")


@dataclass(frozen=True)
class Done:
    """`lines`, `failed`: of the batch; `size`, `digest`: bytes of its output, and their SHA-256.

    `made_from`: the model, the options and the input, as the store's meta.
    """

    lines: int
    failed: int
    size: int
    digest: str
    made_from: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Done | None:
        """None if there is no such file, or it is damaged."""
        with suppress(ReadError, ValueError, TypeError, RecursionError):
            done = cls(**json.loads(read_text(path, LARGEST)))
            if done._is_whole():
                return done
        return None

    def _is_whole(self) -> bool:
        counts, made_from = (self.lines, self.failed, self.size), self.made_from
        return (
            all(type(count) is int and count >= 0 for count in counts)
            and isinstance(self.digest, str)
            and isinstance(made_from, dict)
            and all(isinstance(value, str) for value in made_from.values())
        )

    def write(self, path: Path) -> None:
        """Onto the disk, whole, for its owner only (mode 0600). OutputError."""
        try:
            with written(path) as stream:
                json.dump(asdict(self), stream, indent=1)
        except OSError as error:
            raise OutputError(f"{path}: can't be written: {error.strerror}") from error
