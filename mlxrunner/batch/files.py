"""The files of a batch: input, output, and the store beside the output, which also keeps a second run away."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from mlxrunner.batch.done import Done, done_path
from mlxrunner.batch.fingerprint import INPUT, check_same
from mlxrunner.batch.job import STANDARD, Job
from mlxrunner.batch.output import Output, OutputError
from mlxrunner.batch.store import Store, StoreError
from mlxrunner.errors import MlxrunnerError, PromptError
from mlxrunner.reading import ReadError, open_file, open_given, say_if_waiting
from mlxrunner.writing import check_own


@contextmanager
def opened_input(job: Job) -> Iterator[BinaryIO]:
    """PromptError if it can't be read."""
    if job.input == STANDARD:
        if sys.stdin is None:
            raise PromptError("standard input is closed")
        say_if_waiting(sys.stdin.buffer, "standard input")
        yield sys.stdin.buffer
        return
    try:
        with open_given(job.input) as stream:
            say_if_waiting(stream, job.input)
            yield stream
    except ReadError as error:
        raise PromptError(str(error)) from error
    except OSError as error:
        raise PromptError(f"{job.input}: can't be read: {error.strerror or error}") from error


def _input_digest(job: Job) -> str | None:
    """SHA-256 of the input as it is now; None if it was standard input and nothing comes from there any more: the store has it."""
    if job.input == STANDARD and (sys.stdin is None or sys.stdin.isatty()):
        return None
    with opened_input(job) as stream:
        digest, size = _digest(stream)
    return digest if size or job.input != STANDARD else None


def _digest(stream: BinaryIO) -> tuple[str, int]:
    """SHA-256 of the rest of a stream, and its bytes."""
    found, size = hashlib.sha256(), 0
    while part := stream.read(2**20):
        found.update(part)
        size += len(part)
    return found.hexdigest(), size


def open_output(job: Job) -> Output:
    if job.store_path is not None:
        return Output.open(Path(job.output))
    return Output.streaming(None if job.output == STANDARD else Path(job.output))


@contextmanager
def opened_store(job: Job) -> Iterator[Store]:
    """The store: a new one, or that of a run that is gone on with. What was begun here and has no answer leaves nothing behind.

    OutputError if there are answers already and nobody asked to go on; StoreError if another run is writing to the same output.
    """
    path, output = job.store_path, Path(job.output)
    if path is None:
        with Store.create() as store:
            yield store
        return
    _check(done_path(path), replaced=True)  # it is written last: an error then would come too late
    is_new, was_there = not path.exists(), output.exists()
    with _new(output, path) if is_new else _existing(job, path) as store:
        try:
            yield store
        except BaseException:
            with suppress(MlxrunnerError, OSError):
                if not store.is_complete or (is_new and not store.counts.done):
                    path.unlink()
                    if not was_there and not output.stat().st_size:
                        output.unlink()
            raise


def _check(file: Path, *, replaced: bool = False) -> None:
    try:
        check_own(file, replaced=replaced)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise OutputError(f"{file}: can't be written: {error.strerror}") from error


def _existing(job: Job, path: Path) -> Store:
    store = Store.open(path)
    if store.is_complete and not job.resume:
        store.close()
        raise OutputError(
            f"{path}: is there from a run that has not ended: go on with it with --resume, or remove it and {job.output} to begin again"
        )
    return store


def _new(output: Path, path: Path) -> Store:
    _check(output)
    if output.exists() and output.stat().st_size:
        raise OutputError(f"{output}: is there already: choose another -o, or remove it")
    try:
        return Store.create(path)
    except StoreError as error:
        raise OutputError(f"{output}: can't be written: {error}") from error


def finished(job: Job, parts: Mapping[str, str]) -> Done | None:
    """To be gone on with, but the run has ended: what is known of it. `parts`: what this one would be made from, but for the input.

    DifferentRunError if that is something else; OutputError if nobody knows, or somebody has written to the output since. None if
    there is a store, or nothing at all.
    """
    path, output = job.store_path, Path(job.output)
    if (
        not job.resume
        or path is None
        or path.exists()
        or not output.exists()
        or not (size := output.stat().st_size)
    ):
        return None
    record, again = done_path(path), "choose another -o, or remove it to begin again"
    done = Done.read(record)
    if done is None:
        raise OutputError(
            f"{output}: is there, and neither {path.name} nor {record.name}, which say what it was made from: {again}"
        )
    check_made_from(job, done.made_from, parts)
    if size != done.size:
        raise OutputError(
            f"{output}: has {size} bytes, and the run that wrote it left {done.size}: {again}"
        )
    if _output_digest(output) != done.digest:
        raise OutputError(f"{output}: is not what the run left, somebody has changed it: {again}")
    return done


def _output_digest(output: Path) -> str:
    try:
        descriptor, _ = open_file(output)
        with os.fdopen(descriptor, "rb") as stream:
            return _digest(stream)[0]
    except ReadError as error:
        raise OutputError(str(error)) from error
    except OSError as error:
        raise OutputError(f"{output}: can't be read: {error.strerror}") from error


def finish(job: Job, store: Store, output: Output) -> None:
    """Everything is in the output and on the disk: of the store only what the answers were made from stays. OutputError."""
    path, counts = job.store_path, store.counts
    if path is not None:
        Done(counts.lines, counts.failed, output.size, output.digest, store.meta).write(
            done_path(path)
        )
        path.unlink()


def check_made_from(job: Job, was: Mapping[str, str], parts: Mapping[str, str]) -> None:
    """DifferentRunError unless the run that is to be gone on with was begun with these parts and the input as it is now."""
    now = _input_digest(job)
    check_same(was, {**parts, INPUT: was.get(INPUT, "") if now is None else now}, job.output)


@contextmanager
def store_to_plan(job: Job) -> Iterator[Store]:
    """The store of the run that is to be gone on with, if its input is complete; else a temporary one. Nothing is written to the former."""
    path = job.store_path
    if job.resume and path is not None and path.exists():
        with Store.open(path) as store:
            if store.is_complete:
                yield store
                return
    with Store.create() as store:
        yield store
