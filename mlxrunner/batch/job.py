"""Define a batch over files: its options, its input, output and store, and how a run is resumed.

The store (OUTPUT.run) keeps a second run away. It is removed when all answers are in the output. A
small file (OUTPUT.done) then records what the answers were made from, so that `--resume` can tell
the same batch from another one.

`--retry-failed` has a store of its own, OUTPUT.retry, with the input and the good answers, copied
from the output. A new file, OUTPUT.retried, gets all answers and takes the output's place when none
is missing. The output is the old one or the new one at any moment.

`merge_shards` puts the outputs of all shards together. No tensors.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import msgspec

from mlxrunner.batch.inputs import STANDARD, Inputs, digest_of, is_same_or_within
from mlxrunner.batch.options import FileOptions
from mlxrunner.batch.output import (
    AnswerFile,
    answers_in,
    check_writable,
    opened_answers,
    output_digest,
)
from mlxrunner.batch.plan import Shard
from mlxrunner.batch.store import CUT, Store
from mlxrunner.batch.tables import Columns, Template
from mlxrunner.errors import (
    DifferentRunError,
    MlxrunnerError,
    OptionError,
    OutputError,
    ReadError,
    StoreError,
)
from mlxrunner.models.fingerprint import model_parts, option_parts
from mlxrunner.models.resolve import resolve
from mlxrunner.options import EngineSettings, check_raw
from mlxrunner.system.reading import read_json
from mlxrunner.system.writing import is_stream, missing_folder, sealed, write_errors_as, written

LARGEST = 2**22
"""The most bytes of OUTPUT.done, which may hold a schema or a template of the command line."""
Count = Annotated[int, msgspec.Meta(ge=0)]


def completion_path(store: Path) -> Path:
    """Return the path of OUTPUT.done for the store's path."""
    return store.with_suffix(".done")


@dataclass(frozen=True)
class Completion:
    """The record of a batch that has ended, kept in a small file."""

    lines: Count
    failed: Count
    """The number of lines whose answer is an error."""
    size: Count
    """The size of the output in bytes."""
    digest: str
    """The SHA-256 of the output, in hexadecimal."""
    made_from: dict[str, str]
    """The model, the options and the input, as in the store's `meta`."""

    @classmethod
    def read(cls, path: Path) -> Completion | None:
        """Read the record from `path`. Return None if there is no such file or it is damaged."""
        with suppress(ReadError, ValueError):
            return msgspec.convert(read_json(path, LARGEST, sealed=True), cls)
        return None

    def write(self, path: Path) -> None:
        """Write the whole record to the disk, with mode 0600. Raise OutputError if that fails."""
        with write_errors_as(OutputError, path), written(path) as stream:
            stream.write(sealed(json.dumps(asdict(self), indent=1)))


INPUT = "input"
"""The name of the input's SHA-256 among the parts."""
ANSWERS = "answers"
"""The name, among the parts of OUTPUT.retry, of the SHA-256 of the output that is retried."""
RETRIED = ".retried"
"""The suffix of the new output of `retry_failed`, until it takes the place of the old one."""
_SHOWN = 80


@dataclass(frozen=True, kw_only=True)
class Job(FileOptions):
    """A batch over files.

    Creating it raises OptionError for a mistake that shows before anything is read.
    """

    inputs: Sequence[str]
    """The paths of the inputs, or "-" for standard input."""
    output: str = STANDARD
    """The path of the output, or "-" for standard output."""
    model: str = "demo"
    loading: Mapping[str, Any] = field(default_factory=dict)
    """Options of `Runner.load`."""
    several: Mapping[str, Any] = field(default_factory=dict)
    """Settings for several lines at a time (EngineSettings), such as `memory` and `max_step_ms`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        EngineSettings.of(max_sequences=1, **self.several)
        if self.raw:
            check_raw(self.defaults, self.system)
        if self.inputs.count(STANDARD) > 1:
            raise OptionError("standard input is there twice: it can be read once")
        self.lines()
        if self.resume and self.store_path is None:
            raise OptionError(
                "--resume needs an output file: a run whose answers went to standard output or a "
                "device can't resume"
            )
        self._check_shard()
        self._check_pictures()
        if self.retry_failed and self.store_path is None:
            raise OptionError(
                "--retry-failed needs an output file: it replaces the failed lines of a finished "
                "output"
            )
        for name in self.inputs:
            if STANDARD not in (name, self.output) and is_same_or_within(self.output, name):
                within = "in the input" if os.path.isdir(name) else "the input"
                raise OptionError(f"{self.output}: is {within}; choose another file for the output")
        self._check_reports()

    def _check_shard(self) -> None:
        """Raise OptionError if `shard` is not a part, or does not go with the output."""
        if self.shard is None:
            return
        Shard.of(self.shard)
        if self.workers is not None:
            raise OptionError(
                "--workers runs all parts of a batch, and --shard one of them: use one of the two"
            )
        if self.store_path is None:
            raise OptionError(
                "--shard needs an output file: `mlxrunner batch merge` puts the files together"
            )
        if self.output_order != "input":
            raise OptionError(
                "--shard needs --output-order input: `mlxrunner batch merge` puts answers together "
                "in the order of the input"
            )

    def _check_pictures(self) -> None:
        """Raise OptionError for what a model that sees pictures can't do."""
        if self.picture_folder is not None and not self.pictures:
            raise OptionError("--picture-folder is for --pictures: give both, or none")
        if not self.pictures:
            return
        if self.workers is not None:
            raise OptionError(
                "--workers: models that see pictures run in one process: use --shard, or leave it "
                "out"
            )
        if self.parallel not in (None, 1):
            raise OptionError(
                f"--parallel {self.parallel}: a model that sees pictures runs one line at a time: "
                "leave it out"
            )

    def lines(self) -> Inputs:
        """Return the lines of the inputs. Raise OptionError for options that don't fit them."""
        columns = Columns(
            None if self.prompt_template is None else Template(self.prompt_template),
            self.prompt_column,
            self.messages_column,
            self.id_column,
        )
        return Inputs(self.inputs, self, columns, self.delimiter)

    def _check_reports(self) -> None:
        """Raise OptionError if a report has no file of its own, or if a folder is missing."""
        if folder := missing_folder(self.output):
            raise OptionError(f"{self.output}: can't be written: there is no folder {folder}")
        ends = ("", ".run", ".done", ".retry", RETRIED)
        taken = {*map(_real, self.inputs), *(_real(f"{self.output}{end}") for end in ends)}
        for name in ("progress_file", "summary"):
            file = getattr(self, name)
            if file is None:
                continue
            flag = f"--{name.replace('_', '-')} {file}"
            if file == STANDARD:
                raise OptionError(
                    f"{flag}: it does not mean standard output here: choose another name"
                )
            if folder := missing_folder(file):
                raise OptionError(f"{flag}: there is no folder {folder}")
            if _real(file) in taken:
                raise OptionError(
                    f"{flag}: choose a file of its own, which is not that of the input, the "
                    "answers or another report"
                )
            taken.add(_real(file))

    @property
    def store_path(self) -> Path | None:
        """The path OUTPUT.run, with `retry_failed` OUTPUT.retry; None if the output is a stream."""
        if self.output == STANDARD or is_stream(self.output):
            return None
        return Path(f"{self.output}.{'retry' if self.retry_failed else 'run'}")

    @property
    def trust_remote_code(self) -> bool:
        """True if the model's own Python code may run."""
        return bool(self.loading.get("trust_remote_code"))

    def parts(self) -> dict[str, str]:
        """Return by name everything but the input that the answers depend on.

        The number of lines at a time and their order are not among it. Raise ModelError if the
        model can't be found.
        """
        loading = {name: self.loading.get(name) for name in ("context", "kv_bits")}
        lines = {
            "system": self.system,
            "raw": self.raw or None,
            "pictures": _seen_by() if self.pictures else None,
            "prompt_template": self.prompt_template,
            "prompt_column": self.prompt_column,
            "messages_column": self.messages_column,
            "id_column": self.id_column,
            "delimiter": self.delimiter,
            "shard": None if self.shard is None else str(Shard.of(self.shard)),
        }
        written = {"output_order": self.output_order, "no_usage": not self.usage or None}
        options = {**self.defaults, **loading, **lines, **written}
        return model_parts(self.model, resolve(self.model)) | option_parts(options)


def _seen_by() -> str:
    """Return the version of mlx-vlm, on which depends what a model sees."""
    try:
        return f"mlx-vlm {version('mlx-vlm')}"
    except PackageNotFoundError:
        return ""


def _real(name: str) -> str:
    """Return the path of a file without links; the name itself if it is not that of a file."""
    try:
        return os.path.realpath(name)
    except (OSError, ValueError):
        return name


def open_output(job: Job) -> AnswerFile:
    """Open the file or the stream for the answers. Raise OutputError if that fails."""
    if job.store_path is not None:
        new = job.store_path.with_suffix(RETRIED)
        return AnswerFile.open(new if job.retry_failed else Path(job.output))
    return AnswerFile.streaming(None if job.output == STANDARD else Path(job.output))


@contextmanager
def opened_store(job: Job, retried: Completion | None = None) -> Iterator[Store]:
    """Open the store: a new one, or that of the run or the retry that was cut off.

    `retried` is the record of the output whose failed lines run again. If the block fails, a store
    without a complete input is removed, and so is a new store without answers, unless it is that of
    a retry. An output file that is new and empty goes with it. Raise OutputError if there are
    answers already and `resume` is not set, or if a file can't be written. Raise StoreError if
    another run is writing to the same output.
    """
    path, output = job.store_path, Path(job.output)
    if path is None:
        with Store.create() as store:
            yield store
        return
    # OUTPUT.done is written last, when an error would come too late.
    check_writable(completion_path(path), replaced=True)
    if retried is not None:
        check_writable(output, replaced=True)
        _remove_stale(path, retried)
    is_new, was_there = not path.exists(), output.exists()
    with _new_store(job, path) if is_new else _existing_store(job, path) as store:
        try:
            yield store
        except BaseException:
            is_own = is_new and retried is None
            with suppress(MlxrunnerError, OSError):
                if not store.is_complete or (is_own and not store.counts.done):
                    path.unlink()
                    if not was_there and not output.stat().st_size:
                        output.unlink()
            raise


def _existing_store(job: Job, path: Path) -> Store:
    store = Store.open(path)
    if store.is_complete and not job.resume and not job.retry_failed:
        store.close()
        raise OutputError(
            f"{path}: belongs to an unfinished run: continue it with --resume, or remove it "
            f"and {job.output} to start again"
        )
    return store


def _new_store(job: Job, path: Path) -> Store:
    """Create the store. Raise OutputError if it or its output is there or can't be made."""
    output = Path(job.output)
    if job.retry_failed:
        new, remedy = path.with_suffix(RETRIED), "remove it, --retry-failed needs the name"
    else:
        new, remedy = output, "choose another -o, or remove it"
        check_writable(output)
    if new.exists() and (job.retry_failed or new.stat().st_size):
        raise OutputError(f"{new}: is there already: {remedy}")
    try:
        return Store.create(path)
    except StoreError as error:
        raise OutputError(f"{output}: can't be written: {error}") from error


def _remove_stale(path: Path, retried: Completion) -> None:
    """Remove the files of a retry of other answers than those that the output has now."""
    if not path.exists():
        return
    with Store.open(path) as store:
        if store.is_complete and store.meta.get(ANSWERS) != retried.digest:
            path.with_suffix(RETRIED).unlink(missing_ok=True)
            path.unlink()


@contextmanager
def store_to_plan(job: Job, retried: Completion | None = None) -> Iterator[Store]:
    """Open the store of the run that is resumed if its input is complete, else a temporary store.

    `retried` is that of `opened_store`. Nothing is written to the store of the run.
    """
    path = job.store_path
    if (job.resume or job.retry_failed) and path is not None and path.exists():
        with Store.open(path) as store:
            answers = None if retried is None else retried.digest
            if store.is_complete and store.meta.get(ANSWERS) == answers:
                yield store
                return
    with Store.create() as store:
        yield store


def finished_run(job: Job, parts: Mapping[str, str]) -> tuple[Completion | None, Completion | None]:
    """Return the record of a run that has nothing left to do, and that of the run to retry.

    At most one of them is not None. `parts` is what this run would be made from beside the input.
    Raise DifferentRunError if the ended run was made from something else. Raise OutputError if its
    record is missing or the output has been changed since.
    """
    if not job.retry_failed:
        return _to_resume(job, parts), None
    found = _to_retry(job, parts)
    return (None, found) if found.failed else (found, None)


def _to_resume(job: Job, parts: Mapping[str, str]) -> Completion | None:
    """Return the record of the run that is resumed, if that run has ended."""
    path, output = job.store_path, Path(job.output)
    if not job.resume or path is None or path.exists() or not output.exists():
        return None
    size = output.stat().st_size
    if not size:
        return None
    record, again = completion_path(path), "choose another -o, or remove it to begin again"
    found = Completion.read(record)
    if found is None:
        raise OutputError(
            f"{output}: is there, and neither {path.name} nor {record.name}, which say what it was "
            f"made from: {again}"
        )
    check_made_from(job, found.made_from, parts)
    is_same = output_digest(output) == found.digest
    if not is_same and path.with_suffix(".retry").exists():
        raise OutputError(
            f"{output}: a run with --retry-failed was interrupted while it replaced the "
            "output: repeat --retry-failed"
        )
    if size != found.size:
        raise OutputError(
            f"{output}: has {size} bytes, and the run that wrote it left {found.size}: {again}"
        )
    if not is_same:
        raise OutputError(f"{output}: was changed after the run: {again}")
    return found


def _to_retry(job: Job, parts: Mapping[str, str]) -> Completion:
    """Return the record of the finished output whose failed lines are to be run again."""
    output, path = Path(job.output), completion_path(Path(f"{job.output}.retry"))
    if (running := Path(f"{output}.run")).exists():
        raise OutputError(
            f"{running}: belongs to an unfinished run: continue it with --resume; "
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
    check_same(found.made_from, _as_before(parts, found.made_from), job.output)
    if output_digest(output) != found.digest and not _has_taken_place(job, found):
        raise OutputError(
            f"{output}: was changed after the run: choose another -o, or remove it to start again"
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


def check_same(was: Mapping[str, str], now: Mapping[str, str], what: str) -> None:
    """Raise DifferentRunError, with both values, for the first part that is not the same.

    `what` names the output of the run that is resumed.
    """
    for name in [*now, *(name for name in was if name not in now)]:
        if was.get(name) != now.get(name):
            before, after = _shown(was.get(name)), _shown(now.get(name))
            raise DifferentRunError(
                f"{what} was begun with another {name}: {before} then, {after} now; --resume needs "
                "the same, or choose another -o"
            )


def _shown(value: str | None) -> str:
    if value is None:
        return "not set"
    return value if len(value) <= _SHOWN else f"{value[:_SHOWN]} ..."


def check_made_from(job: Job, was: Mapping[str, str], parts: Mapping[str, str]) -> None:
    """Raise DifferentRunError unless the resumed run has the same parts and the same input."""
    now, parts = digest_of(job.inputs), _as_before(parts, was)
    check_same(was, parts if now is None else {**parts, INPUT: now}, job.output)


def _as_before(parts: Mapping[str, str], was: Mapping[str, str]) -> dict[str, str]:
    """Return the parts of a resumed run, with the input and the cut that it had."""
    cut = {CUT: was[CUT]} if CUT in was else {}
    return {**parts, INPUT: was.get(INPUT, ""), **cut}


def made_from(store: Store) -> dict[str, str]:
    """Return what the answers in a store are made from."""
    return {name: text for name, text in store.meta.items() if name != ANSWERS}


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


SHARD, MODEL = "--shard", "model"
"""The names of two parts of what a shard is made from. The model's name may be another path."""
GROUP = 2**16
"""The bytes of a shard that are read at once, and the rest of their last line."""
MOST_NAMED = 10


@dataclass(frozen=True)
class ShardOutput:
    """The output of a shard that has ended."""

    path: Path
    shard: Shard
    record: Completion

    @classmethod
    def at(cls, path: Path) -> ShardOutput:
        """Read what the output was made from. Raise OutputError if it is not a whole shard."""
        store = Path(f"{path}.run")
        if store.exists():
            raise OutputError(f"{path}: this shard has not ended: continue it with --resume")
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
            raise OutputError(f"{path}: is not a shard: it was made without --shard, leave it out")
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
        for index, line, _ in answers_in(_lines_in_groups(self.path), self.path):
            yield index, line


def merge_shards(outputs: Sequence[str], output: str) -> Completion:
    """Write the answers of all shards to `output` in the order of the input; return its record.

    Nothing is written unless all of them are there, each once, whole and from the same batch. The
    result is the output of a run without shards, with its OUTPUT.done. Two groups of lines of each
    shard are in memory at most, and one file is open at a time.

    Raise OptionError if `output` is one of them. Raise OutputError or DifferentRunError, with
    what to do, if a shard is missing, there twice, not whole or of another batch, or if the output
    is there or can't be written.
    """
    target = Path(output)
    if os.path.realpath(output) in map(os.path.realpath, outputs):
        raise OptionError(f"-o {output}: is the output of a shard; choose another file")
    record = completion_path(Path(f"{output}.run"))
    _check_new(target, record)
    shards = [ShardOutput.at(Path(name)) for name in outputs]
    _check_alike(shards)
    _check_complete(shards)
    for shard in shards:
        shard.check_whole()
    whole = _merged(shards, target)
    whole.write(record)
    return whole


def _check_new(target: Path, record: Path) -> None:
    check_writable(target)
    check_writable(record, replaced=True)
    if Path(f"{target}.run").exists():
        raise OutputError(f"{target}.run: is there from a run that has not ended: choose another")
    if target.exists():
        raise OutputError(f"{target}: is there already: choose another -o, or remove it")


def _check_alike(shards: Sequence[ShardOutput]) -> None:
    """Raise DifferentRunError if a shard is not of the same batch, or was cut in another way."""
    first = shards[0]
    for other in shards[1:]:
        names = (name for name in {**first.made_from, **other.made_from} if name != MODEL)
        name = next((n for n in names if first.made_from.get(n) != other.made_from.get(n)), None)
        if name is not None:
            raise DifferentRunError(
                f"{other.path}: was made from another {name} than {first.path}: "
                f"{_shown(other.made_from.get(name))} there, "
                f"{_shown(first.made_from.get(name))} here: run shard {other.shard} again with the "
                "same, or leave out the foreign one"
            )
        if other.shard.count != first.shard.count:
            raise DifferentRunError(
                f"{other.path} is shard {other.shard} and {first.path} is shard {first.shard}: all "
                "have to be parts of the same number"
            )
        if other.record.made_from[CUT] != first.record.made_from[CUT]:
            raise DifferentRunError(
                f"{other.path}: its machine partitioned the batch differently than that of "
                f"{first.path}: run the shards again, with the same version of mlxrunner and "
                "the same --context"
            )


def _check_complete(shards: Sequence[ShardOutput]) -> None:
    found: dict[Shard, ShardOutput] = {}
    for one in shards:
        if one.shard in found:
            raise OutputError(
                f"{found[one.shard].path} and {one.path} are both shard {one.shard}: leave one out"
            )
        found[one.shard] = one
    count = shards[0].shard.count
    missing = [shard for n in range(count) if (shard := Shard(n + 1, count)) not in found]
    if missing:
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        raise OutputError(
            f"{'shard' if len(missing) == 1 else 'shards'} "
            f"{', '.join(map(str, missing[:MOST_NAMED]))}{more} "
            f"{'is' if len(missing) == 1 else 'are'} missing: name "
            f"{'its output' if len(missing) == 1 else 'their outputs'}, too"
        )


def _merged(shards: Sequence[ShardOutput], target: Path) -> Completion:
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


def _lines_in_groups(output: Path) -> Iterator[bytes]:
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
