"""Write the parts of the page: panels, legends and tables.

Titles, names of columns and legends are the program's own. All other text is escaped here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote

from mlxrunner.profiling.report import svg
from mlxrunner.profiling.report.svg import safe

FIGURES = frozenset(
    """
    requests from prompt matched cached evaluated lost tokens time p50 p90 p99 median slowest
    used allocated peak lines failed cut at_a_time reused best
    """.split()
)
"""The columns of figures, which are aligned at the right."""
FOREIGN = frozenset(["place", "model", "client", "session"])
"""The columns of texts that a file brings, which may have very long words."""


def panel(title: str, text: str, *parts: str, is_wide: bool = False) -> str:
    """Return a panel with a title, a sentence about it, and its parts."""
    kind = "panel wide" if is_wide else "panel"
    return (
        f'<section class="{kind}"><h2>{title}</h2><p>{safe(text)}</p>' + "\n".join(parts)
    ) + "</section>"


def figure(title: str, text: str, legend: str, plot: svg.Plot, table: str, **more: bool) -> str:
    """Return a panel with a plot, its legend, and its figures as a table."""
    return panel(title, text, legend, plot.render(title, text), folded(table), **more)


def folded(table: str, name: str = "The same as a table") -> str:
    """Return a table that is shown when its reader asks for it."""
    inner = f'<div class="scroll">{table}</div>'
    return f"<details><summary>{name}</summary>{inner}</details>"


def legend(names: Mapping[str, str]) -> str:
    """Return a legend; `names` are by the shapes that they explain, as SVG in 14 x 14 pixels."""
    keys = "".join(
        f'<li><svg viewBox="0 0 14 14" aria-hidden="true">{shape}</svg>{name}</li>'
        for shape, name in names.items()
    )
    return f'<ul class="legend">{keys}</ul>'


class Link(NamedTuple):
    """A cell of a table that leads to another page."""

    text: str
    path: str


def table(columns: Sequence[str], rows: Iterable[Sequence[str | Link]], *, kind: str = "") -> str:
    """Return a table; cells of the columns in FIGURES are aligned at the right.

    A table of the kind "stack" becomes a list of its rows where there is little room.
    """
    kinds = [
        ' class="figure"' if name in FIGURES else ' class="foreign"' if name in FOREIGN else ""
        for name in columns
    ]
    heads = "".join(
        f'<th scope="col"{align}>{name}</th>' for name, align in zip(columns, kinds, strict=True)
    )
    labels = [f' data-name="{name}"' if kind == "stack" else "" for name in columns]
    body = "".join(
        "<tr>"
        + "".join(f"<td{k}{n}>{_cell(v)}</td>" for v, k, n in zip(row, kinds, labels, strict=True))
        + "</tr>\n"
        for row in rows
    )
    if not body:
        return "<p>None.</p>"
    of_kind = f' class="{kind}"' if kind else ""
    return f"<table{of_kind}><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: str | Link) -> str:
    if isinstance(value, Link):
        return f'<a href="{safe(quote(value.path))}">{safe(value.text)}</a>'
    return safe(value)


def bars_table(
    first: str,
    columns: Sequence[str],
    rows: Iterable[tuple[str, Mapping[str, float], Sequence[str], str]],
) -> str:
    """Return a table with a bar in each row, and below each row a sentence.

    `first` names the first column, and `columns` those of figures behind the bars.
    """
    heads = "".join(f'<th scope="col" class="figure">{name}</th>' for name in columns)
    body = ""
    for name, shares, figures, words in rows:
        cells = "".join(f'<td class="figure">{safe(one)}</td>' for one in figures)
        more = ' class="more"' if words else ""
        body += (
            f'<tr{more}><th scope="row">{safe(name)}</th>'
            f'<td class="bars">{svg.bar(shares)}</td>{cells}</tr>\n'
        )
        if words:
            body += f'<tr><td class="words" colspan="{2 + len(columns)}">{words}</td></tr>\n'
    head = f'<th scope="col">{first}</th><th></th>{heads}'
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
