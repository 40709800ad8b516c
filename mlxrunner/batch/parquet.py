"""Write the answers of a finished batch as a Parquet file.

While a batch runs, JSON lines are the truth: a Parquet file has its index at the end, and can't be
continued. It is made of them in one go, and takes its name when it is on the disk. No model here.
"""

from __future__ import annotations

import io
import json
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

from mlxrunner.batch.job import check_writable, opened_answers
from mlxrunner.errors import OptionError, OutputError
from mlxrunner.system.writing import written

PARQUET = ".parquet"
"""The end of the name of an output that is written as Parquet."""
ROWS = 1000
"""The number of rows of a group, and of those in memory at once."""
COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens")
_THEIRS = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens"}


def lines_path(output: str) -> str:
    """Return the path of the JSON lines beside a Parquet output."""
    return f"{output}.jsonl"


def check_parquet(output: str, *, goes_on: bool) -> None:
    """Raise an error for a Parquet output that can't be written, before anything runs.

    `goes_on` says that the run is continued, so that the file may be there. Raise OptionError if
    pyarrow is missing, and OutputError if the file is there or can't be replaced.
    """
    try:
        import pyarrow  # noqa: F401  # asks only if it is there
    except ImportError as error:
        raise OptionError(f"-o {output}: Parquet needs pyarrow: pip install pyarrow") from error
    check_writable(Path(output), replaced=True)
    if Path(output).exists() and not goes_on:
        raise OutputError(f"{output}: is there already: choose another -o, or remove it")


def write_parquet(output: str) -> None:
    """Write the answers in the JSON lines beside it to `output`, in place of what is there.

    Raise OutputError if a file can't be read or written. The old file is then unchanged.
    """
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    lines = Path(lines_path(output))
    with opened_answers(lines) as stream:
        schema = _schema(stream)
        stream.seek(0)
        rows = (_row(line) for line in stream)
        try:
            with (
                written(Path(output)) as text,
                ParquetWriter(
                    cast(io.TextIOWrapper, text).buffer, schema, compression="zstd"
                ) as writer,
            ):
                while group := list(islice(rows, ROWS)):
                    writer.write_table(pyarrow.Table.from_pylist(_typed(group, schema), schema))
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = getattr(error, "strerror", None) or " ".join(str(error).split())[:300]
            raise OutputError(
                f"{output}: can't be written: {why}; the answers are in {lines}"
            ) from error


def _schema(stream: BinaryIO) -> Any:
    """Return the columns. Ids are whole numbers if all of them are, or else texts."""
    import pyarrow

    ids = {type(_row(line)["id"]) for line in stream} - {type(None)}
    text, whole = pyarrow.string(), pyarrow.int64()
    return pyarrow.schema(
        [
            ("id", whole if ids == {int} else text),
            ("index", whole),
            ("text", text),
            ("finish_reason", text),
            ("error", text),
            *((name, whole) for name in COUNTS),
            ("line", text),
        ]
    )


def _typed(rows: list[dict[str, Any]], schema: Any) -> list[dict[str, Any]]:
    """Return the rows with ids as the column has them."""
    if str(schema.field("id").type) == "int64":
        return rows
    return [row if row["id"] is None else row | {"id": str(row["id"])} for row in rows]


def _row(line: bytes) -> dict[str, Any]:
    """Return the row of a line of answers: what most want of it, and the whole line."""
    answer = json.loads(line)
    row = _openai_row(answer) if "custom_id" in answer else _plain_row(answer)
    return row | {"line": line.decode().rstrip("\n")}


def _plain_row(answer: dict[str, Any]) -> dict[str, Any]:
    names = ("id", "index", "text", "finish_reason", "error")
    usage = answer.get("usage") or {}
    return {name: answer.get(name) for name in names} | {n: usage.get(n) for n in COUNTS}


def _openai_row(answer: dict[str, Any]) -> dict[str, Any]:
    body, error = answer["response"]["body"], answer["error"]
    usage = body.get("usage") or {}
    text, finish = _openai_text(body) if error is None else (None, None)
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    counts = {name: usage.get(name, usage.get(_THEIRS.get(name, ""))) for name in COUNTS}
    return {
        "id": answer["custom_id"],
        "index": int(answer["id"].removeprefix("batch_req_")),
        "text": text,
        "finish_reason": finish,
        "error": None if error is None else error["message"],
        **counts,
        "cached_tokens": details.get("cached_tokens"),
    }


def _openai_text(body: dict[str, Any]) -> tuple[str, str]:
    """Return the text of a body of OpenAI's APIs, and the reason for its end."""
    if "output" in body:
        finish = "length" if body["status"] == "incomplete" else "stop"
        return body["output"][0]["content"][0]["text"], finish
    choice = body["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return text, choice["finish_reason"]
