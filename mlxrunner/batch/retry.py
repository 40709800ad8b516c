"""Run the failed lines of a finished batch again, and put their answers into the output.

The store OUTPUT.retry holds the input and the good answers, copied from the output. A new file,
OUTPUT.retried, gets all answers and takes the output's place when none is missing. The output is
the old one or the new one at any moment, and a retry that was killed can go on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from mlxrunner.batch.job import (
    ANSWERS,
    RETRIED,
    Completion,
    Job,
    as_before,
    check_same,
    check_writable,
    completion_path,
    opened_answers,
    output_digest,
)
from mlxrunner.batch.output import AnswerFile
from mlxrunner.batch.store import Store
from mlxrunner.errors import MlxrunnerError, OutputError, StoreError


def finished(job: Job, parts: Mapping[str, str]) -> Completion:
    """Return the record of the finished output whose failed lines are to be run again.

    `parts` is what this run would be made from beside the input. Raise OutputError if the run has
    not finished, if its record is missing, or if the output has been changed since. Raise
    DifferentRunError if it was made from something else.
    """
    output, path = Path(job.output), completion_path(Path(f"{job.output}.retry"))
    if (running := Path(f"{output}.run")).exists():
        raise OutputError(
            f"{running}: is there from a run that has not ended: go on with it with --resume; "
            "--retry-failed is for a finished output"
        )
    if not output.exists():
        raise OutputError(f"{output}: is not there: --retry-failed is for a finished output")
    found = Completion.read(path)
    if found is None:
        raise OutputError(
            f"{output}: {path.name} is missing or damaged, which says what the answers were made "
            "from: --retry-failed can't tell which lines to run; choose another -o"
        )
    check_same(found.made_from, as_before(parts, found.made_from), job.output)
    if output_digest(output) != found.digest and not _has_taken_place(job, found):
        raise OutputError(
            f"{output}: is not what the run left, somebody has changed it: choose another -o, or "
            "remove it to begin again"
        )
    return found


def _has_taken_place(job: Job, found: Completion) -> bool:
    """Return True if the output is the new one, and only the record is still the old one."""
    path = job.store_path
    if path is None or not path.exists():
        return False
    with Store.open(path) as store:
        if not store.is_complete or store.meta.get(ANSWERS) != found.digest or store.counts.left:
            return False
        digest = hashlib.sha256()
        for answer in store.answers(job.output_order):
            digest.update(answer.body + b"\n")
    return digest.hexdigest() == output_digest(Path(job.output))


@contextmanager
def opened_retry(job: Job, found: Completion) -> Iterator[Store]:
    """Open the store OUTPUT.retry, a new one or that of the retry that was cut off.

    If the block fails, a store without a complete input is removed. Raise OutputError if a file
    can't be written, and StoreError if another retry of the same output is running.
    """
    path, output = job.store_path, Path(job.output)
    assert path is not None  # Job refuses a stream
    for file in (output, completion_path(path)):
        check_writable(file, replaced=True)
    if path.exists():
        _remove_stale(path, found)
    with Store.open(path) if path.exists() else _new(path) as store:
        try:
            yield store
        except BaseException:
            with suppress(MlxrunnerError, OSError):
                if not store.is_complete:
                    path.unlink()
            raise


def _new(path: Path) -> Store:
    """Create the store of a retry. Raise OutputError if it or its new output can't be made."""
    new = path.with_suffix(RETRIED)
    if new.exists():
        raise OutputError(f"{new}: is there already: remove it, --retry-failed needs the name")
    try:
        return Store.create(path)
    except StoreError as error:
        raise OutputError(f"{path.with_suffix('')}: can't be written: {error}") from error


def _remove_stale(path: Path, found: Completion) -> None:
    """Remove the files of a retry of other answers than those that the output has now."""
    with Store.open(path) as store:
        if not store.is_complete or store.meta.get(ANSWERS) == found.digest:
            return
        path.with_suffix(RETRIED).unlink(missing_ok=True)
        path.unlink()


def copy_answers(job: Job, store: Store, found: Completion) -> None:
    """Copy the good answers of the output into a store whose lines were all added.

    The store's `finish` keeps them together with the lines. Raise OutputError if the output is not
    what the run left.
    """
    output, digest, lines = Path(job.output), hashlib.sha256(), 0
    with opened_answers(output) as stream:
        for index, line, failed in answers_in(stream, output):
            digest.update(line)
            lines += 1
            if not failed:
                store.record(index, line.removesuffix(b"\n"))
    if digest.hexdigest() != found.digest or lines != found.lines:
        raise OutputError(f"{output}: somebody has changed it while --retry-failed read it")


def answers_in(lines: Iterable[bytes], output: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Yield for each line of the output its index, its bytes, and True if it is an error."""
    for number, line in enumerate(lines, 1):
        try:
            answer = json.loads(line)
            own = "index" in answer
            index = answer["index"] if own else int(answer["id"].removeprefix("batch_req_"))
            if type(index) is not int:
                raise TypeError
            yield index, line, answer.get("error") is not None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise OutputError(
                f"{output}: line {number} is not an answer of this program"
            ) from error


def made_from(store: Store) -> dict[str, str]:
    """Return what the answers in a store are made from."""
    return {name: text for name, text in store.meta.items() if name != ANSWERS}


def complete(job: Job, store: Store, output: AnswerFile) -> None:
    """Put the whole output onto the disk, write OUTPUT.done and remove the store.

    Raise OutputError if a file can't be written.
    """
    output.seal()
    path, counts = job.store_path, store.counts
    if path is None:
        return
    if job.retry_failed:
        output.rename(Path(job.output))
    found = Completion(counts.lines, counts.failed, output.size, output.digest, made_from(store))
    found.write(completion_path(path))
    path.unlink()
    # SQLite removes it when the store is closed; a process that is killed before would leave it.
    path.with_name(f"{path.name}-journal").unlink(missing_ok=True)
