"""CSV in a prompt template follows Python's csv rules.

Rows have the numbers of the file's lines; each bad row is one error.
"""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import batches
from support.checks import has

from mlxrunner.batch.store import InputLine
from mlxrunner.batch.tables import Columns, Template, read_table
from mlxrunner.errors import OptionError


def read(content: bytes | str, template: str = "{a}", **settings: Any) -> list[InputLine]:
    return batches.read(content, template=template, raw=True, **settings)


def test_rows_become_prompts() -> None:
    """A row's values fill the template, its first line is its number, and column `id` is its id."""
    content = 'id,name,place\nx1,Bo,"here, there"\n\nx2,"two\r\nlines ""quoted""",\n,Al,{name}\n'
    assert read(content, "Who is {name} at {place}? {{{name}}}") == [
        InputLine(0, 2, "Who is Bo at here, there? {Bo}", "x1"),
        InputLine(1, 4, 'Who is two\r\nlines "quoted" at ? {two\r\nlines "quoted"}', "x2"),
        InputLine(2, 6, "Who is Al at {name}? {Al}"),
    ]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_header_as_spreadsheets_write_it(mark: bytes) -> None:
    """With a byte order mark, spaces around names, quotes, names with spaces, Windows line ends."""
    (line,) = read(mark + b'"a", first name \r\n1,2\r\n', "{a} {first name}")
    assert line.prompt == "1 2"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (b"1", "row 2 has 1 values and the header 2 columns: none for 'b' (is a comma missing?)"),
        (
            b"1,2,3",
            "row 2 has 3 values and the header 2 columns: '3' follows the last, 'b' (are "
            "quotes missing?)",
        ),
        (b'"1"x,2', "not a CSV row: ',' expected after '\"'"),
        (b"\xff,2", "not a CSV row: it is not UTF-8"),
        (b"1\0,2", "not a CSV row: there is a NUL byte in it: is it a text file?"),
        (b"1,2" + b"x" * 200, "not a CSV row: a row is longer than 100 bytes"),
        (b"1\r,2", "not a CSV row: there is a carriage return in it that ends no line"),
        (b",2", "prompt is empty"),
    ],
)
def test_a_bad_row_is_one_error(row: bytes, problem: str) -> None:
    """With its number, and the rows around it are read."""
    first, bad, last = read(b"a,b\n1,2\n" + row + b"\n3,4\n", longest=100)
    assert (first, last) == (InputLine(0, 2, "1"), InputLine(2, 4, "3"))
    assert str(bad.error).startswith(f"line 3: {problem}")


@pytest.mark.parametrize(
    ("delimiter", "kind", "hint"),
    [("\t", "TSV file", "a tab"), (";", "table", "';'"), (",", "CSV file", "a comma")],
)
def test_errors_name_the_delimiter(delimiter: str, kind: str, hint: str) -> None:
    """A row of a TSV file does not lack a comma."""
    lines = [f"a{delimiter}b\n".encode(), b"1\n"]
    ((_, problem),) = read_table(lines, Columns(prompt="a"), 100, delimiter)
    assert f"none for 'b' (is {hint} missing?)" in str(problem)
    with pytest.raises(OptionError, match=f"the {kind} has no column 'c'"):
        list(read_table(lines, Columns(prompt="c"), 100, delimiter))


@pytest.mark.parametrize(
    ("row", "name"), [("7", "7"), ("7,a", "7"), ("7,a,b,c", "7"), (",a", None)]
)
def test_a_row_of_another_length_keeps_its_id(row: str, name: str | None) -> None:
    """Its id can be found in the answers."""
    (bad,) = read(f"id,a,b\n{row}\n")
    assert bad.id == name
    assert str(bad.error).startswith("line 2: row 1 has ")


def test_a_prompt_is_no_longer_than_a_line_may_be() -> None:
    """A template that names a column too often makes an error of that row, which keeps its id."""
    (one, other) = read(f"id,a\nx,{'z' * 90}\ny,z\n", "{a}" * 5, longest=100)
    has(one, id="x", error="line 2: row 1 makes a prompt of 465 characters, and 100 are the most")
    assert (other.id, other.prompt) == ("y", "zzzzz")


def test_a_quote_that_is_never_closed() -> None:
    """The rest of the file is one bad row, and what is read is bounded."""
    first, bad = read('a,b\n1,2\n"3,4\n' + "5,6\n" * 10)
    assert (first.prompt, bad.number) == ("1", 3)
    assert bad.error == "line 3: not a CSV row: unexpected end of data"
    lines = read('a,b\n1,2\n"3,4\n' + "5,6\n" * 100, longest=100)
    assert str(lines[1].error).endswith(" a row is longer than 100 bytes (is a quote missing?)")
    assert lines[-1].prompt == "5"


def test_a_value_longer_than_csv_takes_by_default() -> None:
    """Documents fit into a row; the csv module's limit for everybody else stays as it was."""
    before = csv.field_size_limit()
    (line,) = read("a\n" + "x" * 300_000 + "\n")
    assert len(line.prompt) == 300_000
    assert csv.field_size_limit() == before


@pytest.mark.parametrize(
    ("content", "template", "problem"),
    [
        ("a,b\n1,2\n", "{c} {a} {d}", "the CSV file has no column 'c', 'd': it has 'a', 'b'"),
        ("a,a\n1,2\n", "{a}", "the CSV file has more than one column 'a': number 1 and 2"),
        ("id,a, id\n1,2,3\n", "{a}", "the CSV file has more than one column 'id': number 1 and 3"),
        (
            "a,b\r1,2\r3,4\r",
            "{a}",
            "there is a carriage return in it that ends no line: lines have to end with LF or CRLF",
        ),
        ("\n\r\n", "{a}", "the CSV file has no header"),
        ("", "{a}", "the CSV file has no header: its first line has to name the columns"),
        ("\n", "{a}", "the CSV file has no header"),
        ('"a"x\n', "{a}", "the CSV file's header can't be read: ',' expected after '\"'"),
        (b"\xff\n", "{a}", "the CSV file's header can't be read: it is not UTF-8"),
        ("a\n1\n", "no columns", "the prompt template has no {column} in it: 'no columns'"),
        ("a\n1\n", "{a} {", "the prompt template has a '{' at character 4"),
        ("a\n1\n", "{a} }", "the prompt template has a '}' at character 4"),
        ("a\n1\n", "{} {a}", "the prompt template has a '{}' at character 0"),
    ],
)
def test_what_concerns_the_whole_file(content: bytes | str, template: str, problem: str) -> None:
    """A template that does not fit, or no header, is an error that names the columns."""
    with pytest.raises(OptionError) as caught:
        read(content, template)
    assert problem in str(caught.value)


ROW = st.dictionaries(
    st.text("ab {}[].!:0", min_size=1), st.text(max_size=5), min_size=1, max_size=3
)


@given(ROW)
def test_what_values_contain_is_not_looked_at(row: dict[str, str]) -> None:
    """Braces in values stay as they are; a column may have any name without braces."""
    columns = [name for name in row if not {"{", "}"} & set(name)]
    if columns:
        template = Template("{{" + "|".join(f"{{{name}}}" for name in columns) + "}}")
        assert template.columns == columns
        assert template.fill(row) == "{" + "|".join(row[name] for name in columns) + "}"


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


@given(st.lists(st.lists(TEXTS, min_size=2, max_size=2)))
def test_what_csv_writes_is_read_back(rows: list[list[str]]) -> None:
    """Texts may have quotes, commas and line ends of any kind."""
    stream = io.StringIO(newline="")
    csv.writer(stream, quoting=csv.QUOTE_ALL).writerows([["a", "b"], *rows])
    lines = read(stream.getvalue(), "x{a}{b}")
    assert [line.prompt for line in lines] == [f"x{a}{b}" for a, b in rows]
