"""Put the outputs of all shards of a batch together, in the order of the input.

Nothing is written unless all of them are there, each once, whole and from the same batch. The
result is the output of a run without shards, with its OUTPUT.done. Two groups of lines of each
shard are in memory at most, and one file is open at a time. No tensors.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

from mlxrunner.batch.job import Completion, completion_path
from mlxrunner.batch.output import answers_in, check_writable, opened_answers, output_digest
from mlxrunner.batch.plan import Shard
from mlxrunner.batch.records import CUT
from mlxrunner.errors import DifferentRunError, OptionError, OutputError
from mlxrunner.system.writing import written

SHARD, MODEL = "--shard", "model"
"""The names of two parts of what a shard is made from. The model's name may be another path."""
GROUP = 2**16
"""The bytes of a shard that are read at once, and the rest of their last line."""
_SHOWN = 10
"""The most shards that an error names."""


@dataclass(frozen=True)
class _ShardOutput:
    """The output of a shard that has ended."""

    path: Path
    shard: Shard
    record: Completion

    @classmethod
    def at(cls, path: Path) -> _ShardOutput:
        """Read what the output was made from. Raise OutputError if it is no whole shard."""
        store = Path(f"{path}.run")
        if store.exists():
            raise OutputError(f"{path}: this shard has not ended: go on with it with --resume")
        if not path.exists():
            raise OutputError(f"{path}: is not there")
        record = Completion.read(completion_path(store))
        if record is None:
            raise OutputError(
                f"{path}: {completion_path(store).name} is missing or damaged, which says what it "
                "was made from: copy it from the machine that ran the shard, together with the "
                "output"
            )
        if SHARD not in record.made_from or CUT not in record.made_from:
            raise OutputError(f"{path}: is no shard: it was made without --shard, leave it out")
        try:
            shard = Shard.of(str(json.loads(record.made_from[SHARD])))
        except (ValueError, OptionError, RecursionError) as error:
            raise OutputError(f"{path}: its {completion_path(store).name} is damaged") from error
        return cls(path, shard, record)

    @property
    def made_from(self) -> dict[str, str]:
        """The parts of the whole batch, as a run without shards notes them."""
        made_from = self.record.made_from
        return {name: text for name, text in made_from.items() if name not in (SHARD, CUT)}

    def check_whole(self) -> None:
        """Raise OutputError if somebody has changed the output since."""
        if output_digest(self.path) != self.record.digest:
            raise OutputError(
                f"{self.path}: is not what shard {self.shard} left ({self.record.size:,} bytes "
                "then): copy it again from the machine that ran it, or run the shard again"
            )

    def answers(self) -> Iterator[tuple[int, bytes]]:
        """Yield the index and the bytes of each line."""
        for index, line, _ in answers_in(_lines(self.path), self.path):
            yield index, line


def merge(outputs: Sequence[str], output: str) -> Completion:
    """Write the answers of all shards to `output`, and return its record.

    Raise OptionError if `output` is one of them. Raise OutputError or DifferentRunError, with
    what to do, if a shard is missing, there twice, not whole or of another batch, or if the output
    is there or can't be written.
    """
    target = Path(output)
    if os.path.realpath(output) in map(os.path.realpath, outputs):
        raise OptionError(f"-o {output}: is the output of a shard; choose another file")
    record = completion_path(Path(f"{output}.run"))
    _check_new(target, record)
    shards = [_ShardOutput.at(Path(name)) for name in outputs]
    _check_same(shards)
    _check_complete(shards)
    for shard in shards:
        shard.check_whole()
    whole = _written(shards, target)
    whole.write(record)
    return whole


def _check_new(target: Path, record: Path) -> None:
    """Raise OutputError if the output is there or can't be written."""
    check_writable(target)
    check_writable(record, replaced=True)
    if Path(f"{target}.run").exists():
        raise OutputError(f"{target}.run: is there from a run that has not ended: choose another")
    if target.exists():
        raise OutputError(f"{target}: is there already: choose another -o, or remove it")


def _check_same(shards: Sequence[_ShardOutput]) -> None:
    """Raise DifferentRunError if a shard is not of the same batch, or was cut in another way."""
    first = shards[0]
    for other in shards[1:]:
        name = _difference(first.made_from, other.made_from)
        if name is not None:
            raise DifferentRunError(
                f"{other.path}: was made from another {name} than {first.path}: "
                f"{_shown(other.made_from, name)} there, {_shown(first.made_from, name)} here: run "
                f"shard {other.shard} again with the same, or leave out the foreign one"
            )
        if other.shard.count != first.shard.count:
            raise DifferentRunError(
                f"{other.path} is shard {other.shard} and {first.path} is shard {first.shard}: all "
                "have to be parts of the same number"
            )
        if other.record.made_from[CUT] != first.record.made_from[CUT]:
            raise DifferentRunError(
                f"{other.path}: its machine cut the batch in another way than that of "
                f"{first.path}: run the shards again, with the same version of mlxrunner and the "
                "same --context"
            )


def _difference(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """Return the first part that differs, but for the model's name; None if there is none."""
    names = (name for name in {**one, **other} if name != MODEL)
    return next((name for name in names if one.get(name) != other.get(name)), None)


def _shown(made_from: Mapping[str, str], name: str) -> str:
    """Return the value of a part for an error."""
    return f"{made_from.get(name, 'not set'):.80}"


def _check_complete(shards: Sequence[_ShardOutput]) -> None:
    """Raise OutputError if a shard is there twice, or is missing."""
    found: dict[Shard, _ShardOutput] = {}
    for one in shards:
        if one.shard in found:
            raise OutputError(
                f"{found[one.shard].path} and {one.path} are both shard {one.shard}: leave one out"
            )
        found[one.shard] = one
    count = shards[0].shard.count
    missing = [shard for n in range(count) if (shard := Shard(n + 1, count)) not in found]
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise OutputError(
            f"{'shard' if len(missing) == 1 else 'shards'} "
            f"{', '.join(map(str, missing[:_SHOWN]))}{more} "
            f"{'is' if len(missing) == 1 else 'are'} missing: name "
            f"{'its output' if len(missing) == 1 else 'their outputs'}, too"
        )


def _written(shards: Sequence[_ShardOutput], target: Path) -> Completion:
    """Write all lines to `target` in the order of their indexes, and return the record of it."""
    digest, size, lines = hashlib.sha256(), 0, 0
    answers = heapq.merge(*(shard.answers() for shard in shards), key=itemgetter(0))
    try:
        with written(target, force=False) as stream:
            for index, line in answers:
                if index != lines:
                    raise OutputError(
                        f"{target}: nothing is written: line {min(index, lines)} of the batch is "
                        f"{'missing' if index > lines else 'there twice'}; run the shards again"
                    )
                stream.buffer.write(line)  # type: ignore[attr-defined]  # a text stream has one
                digest.update(line)
                lines, size = lines + 1, size + len(line)
            if lines != sum(shard.record.lines for shard in shards):
                raise OutputError(f"{target}: nothing is written: lines of the shards are missing")
    except FileExistsError as error:
        raise OutputError(f"{target}: is there already: choose another -o") from error
    except OSError as error:
        raise OutputError(f"{target}: can't be written: {error.strerror}") from error
    failed = sum(shard.record.failed for shard in shards)
    first = min(shards, key=lambda shard: shard.shard)
    return replace(
        first.record,
        lines=lines,
        failed=failed,
        size=size,
        digest=digest.hexdigest(),
        made_from=first.made_from,
    )


def _lines(output: Path) -> Iterator[bytes]:
    """Yield the lines of a file, which is open only while a group of them is read."""
    place = 0
    while True:
        with opened_answers(output) as stream:
            stream.seek(place)
            lines = stream.readlines(GROUP)
        if not lines:
            return
        place += sum(map(len, lines))
        yield from lines
