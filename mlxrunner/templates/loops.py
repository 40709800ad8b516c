"""Find the loops of a template whose iterations can be remembered, and let them ask first.

What an iteration writes is known from what it reads, if its body does nothing but write: the item,
attributes of `loop`, names from outside, and single items of lists, as in
`messages[loop.index0 + 1]`. `remember` changes the body of each such loop, as if the template said

    {% set found = recall(...) %}{% if found %}{{ found }}
    {% else %}{% set written %}BODY{% endset %}{{ keep(written) }}{% endif %}

and each such item to `look("messages", messages, loop.index0 + 1)`. `mlxrunner.templates.recalled`
has the three functions. A loop that reads or does anything else stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

FIT = (
    nodes.AssignBlock,
    nodes.Assign,
    nodes.BinExpr,
    nodes.Call,
    nodes.Compare,
    nodes.Concat,
    nodes.CondExpr,
    nodes.ExprStmt,
    nodes.Filter,
    nodes.For,
    nodes.Getattr,
    nodes.Getitem,
    nodes.If,
    nodes.Keyword,
    nodes.Literal,
    nodes.NSRef,
    nodes.Name,
    nodes.Operand,
    nodes.Output,
    nodes.Pair,
    nodes.Slice,
    nodes.Test,
    nodes.UnaryExpr,
)
"""The nodes that a body may have. Others leave the loop, or reach beyond the template."""
UNFIT = frozenset({"random", "sameas"})
"""Filters and tests whose result depends on more than the values."""
NAMING = {"map": 0, "select": 0, "reject": 0, "selectattr": 1, "rejectattr": 1}
"""Filters that take the name of another filter or test, and the place of that name."""
ATTRIBUTES = frozenset({"index", "index0", "first", "last", "previtem", "nextitem"})
"""The attributes of `loop` that stay the same while a conversation grows."""
FOUND, WRITTEN = "mlxrunner_found", "mlxrunner_written"


class UnfitError(Exception):
    """A loop can't be remembered."""


class Shape(NamedTuple):
    """The things that the body of a loop reads besides its item."""

    number: int
    """The number of the loop in its template."""
    attributes: tuple[str, ...]
    """Attributes of `loop`."""
    names: tuple[str, ...]
    """Names from outside whose whole values count."""
    looked: tuple[str, ...]
    """Names from outside of which the body reads single items only."""
    assigned: tuple[str, ...]
    """Names that the body assigns, and may read before: outside they have to have no value."""


class _Reads:
    """The names that a body reads and assigns."""

    def __init__(self, body: Iterable[nodes.Node]) -> None:
        """Read a body. Raise UnfitError if it does something else."""
        self.attributes: set[str] = set()
        self.whole: set[str] = set()
        self.items: set[str] = set()
        self.stored: set[str] = set()
        for node in body:
            self._read(node, is_inner=False)

    def _read(self, node: nodes.Node, *, is_inner: bool) -> None:
        """Read a node. `is_inner`: it is in the body of another loop within this one."""
        if not isinstance(node, FIT):
            raise UnfitError
        if isinstance(node, nodes.Filter | nodes.Test) and not _is_fit(node):
            raise UnfitError
        if isinstance(node, nodes.Name | nodes.NSRef):
            self._name(node, is_inner)
        elif isinstance(node, nodes.Getattr) and _is_name(node.node, "loop") and not is_inner:
            if node.attr not in ATTRIBUTES:
                raise UnfitError
            self.attributes.add(node.attr)
        elif isinstance(node, nodes.Getitem) and (name := _item_of(node)) is not None:
            self.items.add(name)
            self._read(node.arg, is_inner=is_inner)
        elif isinstance(node, nodes.For):
            if node.else_ or node.recursive:
                raise UnfitError
            for part in (node.target, node.iter, node.test):
                if part is not None:
                    self._read(part, is_inner=is_inner)
            for part in node.body:
                self._read(part, is_inner=True)
        else:
            for part in node.iter_child_nodes():
                self._read(part, is_inner=is_inner)

    def _name(self, node: nodes.Name | nodes.NSRef, is_inner: bool) -> None:
        if node.name == "loop":
            if not is_inner:
                raise UnfitError
        elif isinstance(node, nodes.Name) and node.ctx != "load":
            self.stored.add(node.name)
        else:
            self.whole.add(node.name)


def remember(template: nodes.Template) -> None:
    """Let all loops of a template that are fit ask the memory before they write."""
    macros = list(template.find_all((nodes.Macro, nodes.CallBlock)))
    called = (one for macro in macros for one in macro.find_all((nodes.Filter, nodes.Test)))
    if not all(_is_fit(one) for one in called if isinstance(one, nodes.Filter | nodes.Test)):
        return
    named = [name for macro in macros for name in macro.find_all((nodes.Name, nodes.NSRef))]
    in_macros = {name.name for name in named if isinstance(name, nodes.Name | nodes.NSRef)}
    outside = set(_assigned(template.body)) | {
        macro.name for macro in macros if isinstance(macro, nodes.Macro)
    }
    for number, loop in enumerate(_loops(template.body)):
        try:
            shape = _shape(number, loop, in_macros, outside)
        except UnfitError:
            continue
        _rewrite(loop, shape)


def _is_fit(node: nodes.Filter | nodes.Test) -> bool:
    """Return True if the result of a filter or test depends on nothing but the values."""
    if node.name not in NAMING:
        return node.name not in UNFIT
    place = NAMING[node.name]
    named = node.args[place] if place < len(node.args) else nodes.Const(None)
    if node.dyn_args is not None or not isinstance(named, nodes.Const):
        return False
    return named.value not in UNFIT | NAMING.keys()


def _shape(number: int, loop: nodes.For, in_macros: set[str], outside: set[str]) -> Shape:
    """Return what the body of a loop reads. Raise UnfitError if it can't be remembered."""
    target, writes = loop.target, any(True for _ in loop.find_all(nodes.Output))
    if loop.else_ or loop.recursive or not isinstance(target, nodes.Name) or not writes:
        raise UnfitError
    reads = _Reads(loop.body)
    own = reads.stored | {target.name}
    assigned = own & in_macros | reads.stored & (reads.whole | reads.items)
    if assigned & outside or target.name in reads.stored:
        raise UnfitError
    looked = reads.items - own
    names = (reads.whole | in_macros) - own - {"loop"}
    ordered = (tuple(sorted(one)) for one in (reads.attributes, names, looked, assigned))
    return Shape(number, *ordered)


def _rewrite(loop: nodes.For, shape: Shape) -> None:
    line = loop.lineno
    items = _Items(shape.looked)
    body = [items.visit(node) for node in loop.body]
    given = [
        nodes.Const(tuple(shape)),
        nodes.Name(getattr(loop.target, "name"), "load"),  # noqa: B009  # it is a Name
        *(nodes.Getattr(nodes.Name("loop", "load"), one, "load") for one in shape.attributes),
        *(nodes.Name(name, "load") for name in (*shape.names, *shape.looked)),
    ]
    found, written = nodes.Name(FOUND, "load"), nodes.Name(WRITTEN, "load")
    anew = [
        nodes.AssignBlock(nodes.Name(WRITTEN, "store"), None, body, lineno=line),
        nodes.Output([_call("keep", written)], lineno=line),
    ]
    loop.body = [
        nodes.Assign(nodes.Name(FOUND, "store"), _call("recall", *given), lineno=line),
        nodes.If(found, [nodes.Output([found], lineno=line)], [], anew, lineno=line),
    ]


class _Items(NodeTransformer):
    """Replaces items of lists by calls of `look`."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        name = _item_of(node)
        if name is None or name not in self._names:
            return node
        return _call("look", nodes.Const(name), node.node, node.arg)


def _call(name: str, *given: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(given), [], None, None)


def _loops(body: Iterable[nodes.Node]) -> Iterator[nodes.For]:
    """Yield the loops that are in no other loop and no macro."""
    for node in body:
        if isinstance(node, nodes.For):
            yield node
        elif isinstance(node, nodes.If):
            yield from _loops([*node.body, *node.elif_, *node.else_])


def _assigned(body: Iterable[nodes.Node]) -> Iterator[str]:
    """Yield the names that are assigned outside of loops and macros."""
    for node in body:
        if isinstance(node, nodes.Name) and node.ctx != "load":
            yield node.name
        elif not isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
            yield from _assigned(node.iter_child_nodes())


def _item_of(node: nodes.Getitem) -> str | None:
    """Return the name of the list of which one item is read, or None."""
    is_item = isinstance(node.node, nodes.Name) and not isinstance(node.arg, nodes.Slice)
    named: Any = node.node
    return named.name if is_item and named.name != "loop" and node.ctx == "load" else None


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name
