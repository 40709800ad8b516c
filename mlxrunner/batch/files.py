"""The files of a batch: input, output, and the store beside the output, which also keeps a second run away."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from mlxrunner.batch.job import STANDARD, Job
from mlxrunner.batch.lines import LineReader
from mlxrunner.batch.output import Output, OutputError
from mlxrunner.batch.store import Counts, Store, StoreError
from mlxrunner.errors import MlxrunnerError, PromptError


@contextmanager
def opened_input(job: Job) -> Iterator[BinaryIO]:
    """PromptError if it can't be read."""
    if job.input == STANDARD:
        yield sys.stdin.buffer
        return
    try:
        with open(job.input, "rb") as stream:
            yield stream
    except OSError as error:
        raise PromptError(f"{job.input}: can't be read: {error.strerror}") from error


def digest(job: Job) -> str | None:
    """SHA-256 of the input as it is now; None if it was standard input and nothing comes from there any more: the store has it."""
    if job.input == STANDARD and sys.stdin.isatty():
        return None
    found, size = hashlib.sha256(), 0
    with opened_input(job) as stream:
        while part := stream.read(2**20):
            found.update(part)
            size += len(part)
    return found.hexdigest() if size or job.input != STANDARD else None


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


def _existing(job: Job, path: Path) -> Store:
    store = Store.open(path)
    if store.is_complete and not job.resume:
        store.close()
        raise OutputError(
            f"{path}: is there from a run that has not ended: go on with it with --resume, or remove it and {job.output} to begin again"
        )
    return store


def _new(output: Path, path: Path) -> Store:
    if output.exists() and output.stat().st_size:
        raise OutputError(f"{output}: is there already: choose another -o, or remove it")
    try:
        return Store.create(path)
    except StoreError as error:
        raise OutputError(f"{output}: can't be written: {error}") from error


def complete_already(job: Job) -> Counts | None:
    """To be gone on with, but there is an output and no store: what it has, if that is an answer for each line of the input.

    OutputError if it is not; None if there is a store, or nothing at all.
    """
    path, output = job.store_path, Path(job.output)
    if path is None or path.exists() or not output.exists() or not output.stat().st_size:
        return None
    written = failed = 0
    with output.open("rb") as answers:
        for line in answers:
            written += line.endswith(b"\n")
            failed += _is_failure(line)
    with opened_input(job) as stream:
        lines = sum(1 for _ in LineReader(stream, template=job.template))
    if written != lines:
        raise OutputError(
            f"{output}: has {written} lines for {lines} of the input, and there is no {path.name} to go on from: "
            "move it away to begin again"
        )
    return Counts(lines, 0, lines, failed)


def _is_failure(line: bytes) -> bool:
    with suppress(ValueError, AttributeError, RecursionError):
        return json.loads(line).get("error") is not None
    return False
