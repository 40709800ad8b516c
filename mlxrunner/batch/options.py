"""The options of a batch, each described once.

`run_batch`, the command line and its `--help` are made from the fields. Knows nothing about lines,
files or models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from mlxrunner.config.option import check_fields, option
from mlxrunner.options import GenerateOptions

Order = Literal["prefix", "input"]
"""The order in which lines run: depth-first through the tree of their prefixes, or as they came."""
OutputOrder = Literal["input", "done"]
"""The order in which answers are written: that of the input, or as they end."""
ORDERS: tuple[Order, ...] = get_args(Order)
OUTPUT_ORDERS: tuple[OutputOrder, ...] = get_args(OutputOrder)


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The options for all lines of a batch. Creating it raises OptionError if one is wrong."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Options of `GenerateOptions` for lines that do not give them.

    With a default seed S, line number i (from 0) gets the seed S + i.
    """
    system: str | None = option(
        None, str, "The system prompt of lines that bring none.", metavar="TEXT"
    )
    raw: bool = option(False, bool, "Prompts are plain text to be continued: no chat template.")
    pictures: bool = option(
        False, bool, "Load the model with its encoder: messages may have pictures."
    )
    picture_folder: str | None = option(
        None,
        str,
        "Read pictures that lines name as file:PATH, from this folder only.",
        metavar="FOLDER",
    )
    order: Order = option(
        "prefix",
        str,
        "Run lines so that each reuses most of the one before, or as they come.",
        among=ORDERS,
    )
    output_order: OutputOrder = option(
        "input",
        str,
        "Write answers in the order of the input, or as they finish.",
        among=OUTPUT_ORDERS,
    )
    retries: int = option(
        0,
        int,
        "Try a line that failed N times more.",
        low=0,
        metavar="N",
    )
    timeout: float | None = option(
        None, float, "Most seconds for each line (each try).", above=0, metavar="SECONDS"
    )

    def __post_init__(self) -> None:
        GenerateOptions.of(**self.defaults)
        check_fields(self)

    def of_line(self, index: int, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of line `index` (from 0). Its `own` options replace the defaults."""
        options = {**self.defaults, **own}
        if options.get("seed") is not None and own.get("seed") is None:
            options["seed"] = (self.defaults["seed"] + index) % 2**64
        return options


@dataclass(frozen=True, kw_only=True)
class FileOptions(BatchOptions):
    """The further options of a batch that is read from a file and written to one."""

    prompt_template: str | None = option(
        None,
        str,
        'INPUT is a table; each row is put into TEXT: "... {column} ...".',
        metavar="TEXT",
    )
    prompt_column: str | None = option(
        None, str, "The column of a table that has the prompts.", metavar="NAME"
    )
    messages_column: str | None = option(
        None, str, "The column of a table that has the messages.", metavar="NAME"
    )
    id_column: str | None = option(
        None, str, "The column of a table that has the ids. [default: id]", metavar="NAME"
    )
    delimiter: str | None = option(
        None,
        str,
        "What separates the values of a table of text: a character, or tab. [default: a comma; in "
        ".tsv a tab]",
        metavar="CHAR",
    )
    parallel: int | None = option(
        None,
        int,
        "Run N lines at a time.  [default: the fastest number that fits]",
        low=1,
        metavar="N",
    )
    max_errors: int | None = option(
        None, int, "Stop when N lines of this run have failed.", low=1, metavar="N"
    )
    shard: str | None = option(
        None,
        str,
        "Run part I of N equal parts of the batch; `batch merge` puts their outputs together.",
        metavar="I/N",
    )
    workers: int | None = option(
        None,
        int,
        "Answer the lines in N processes of this machine. With --plan: say how they are cut.",
        low=1,
        metavar="N",
    )
    strict: bool = option(
        False,
        bool,
        "Run nothing if a line can't be run.",
    )
    usage: bool = option(
        True, bool, "Leave out counts and times: the same answers are the same bytes."
    )
    resume: bool = option(False, bool, "Continue a run that was stopped or killed.")
    progress_file: str | None = option(
        None, str, "Write the state of the run to FILE, once a second, as JSON.", metavar="FILE"
    )
    summary: str | None = option(
        None,
        str,
        "At the end, write tokens, seconds, reuse and failures to FILE, as JSON.",
        metavar="FILE",
    )
    retry_failed: bool = option(
        False, bool, "Run only the failed lines of a finished output, and replace them there."
    )
