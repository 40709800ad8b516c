"""A jinja sandbox that stops templates which take too long or make too much text.

The sandbox of transformers keeps a template from reaching files and code, but not from running for
ever. Here every step (an iteration, a call, a filter, an operator) spends from the `Budget` of the
render. No step is large: its result is measured, and estimated in advance where it could be huge.
This knows nothing about conversations.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jinja2.sandbox
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.utils import Namespace

from mlxrunner.errors import TemplateLimitError

MOST_SOURCE = 2**18
"""Most characters of a template; the longest ones in use have about 60,000."""
MOST_SECONDS = 5.0
"""Most seconds of processor time for one render.

A conversation of a million characters takes milliseconds.
"""
LEAST_SECONDS = 0.1
"""Seconds that a template keeps, even if it was stopped again and again."""
LEAST_TEXT = 2**18
"""Characters of the longest text that a template may make without being given any."""
TEXT_SHARE = 4
"""Characters of the longest text that a template may make, per character given to it.

The limit is LEAST_TEXT more than that.
"""
LEAST_WORK = 2**26
"""Characters of all texts together that a template may make without being given any."""
WORK_SHARE = 128
"""Characters of all texts together that a template may make, per character given to it.

The limit is LEAST_WORK more than that.
"""
MOST_WIDTH = 10_000
"""Largest width of padding, indents and the like, in characters."""
MOST_BITS = 2**12
"""Most bits of a whole number."""
STEPS_A_LOOK = 16
"""Steps between two looks at the clock."""
MOST_SLOW = 10_000
"""Most characters for a filter that takes quadratic time."""
SLOW = frozenset({"striptags", "urlize", "wordwrap", "pprint", "xmlattr"})
"""Filters that take quadratic time."""
WIDTHS = frozenset(
    {
        "center",
        "indent",
        "wordwrap",
        "batch",
        "slice",
        "tojson",
        "ljust",
        "rjust",
        "zfill",
        "expandtabs",
        "to_bytes",
    }
)
"""Filters and methods whose whole numbers are widths or counts."""
BACKWARDS = frozenset(
    {"rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip", "trim"}
)
"""Filters and methods that take time in proportion to the product of two lengths."""
CONTAINERS: Any = (
    list,
    tuple,
    dict,
    set,
    frozenset,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
SIZED: Any = (str, bytes, range, *CONTAINERS)
WIDE_FIELD = {
    "{": re.compile(r"\{[^{}:]*:[^{}]*(?:\d{5}|\{)"),
    "%": re.compile(r"(?<!\d)\d{5,}(?:\.\d*)?[hlL]?[A-Za-z]|%[^%A-Za-z(]*\*"),
}
"""Fields of a format whose width has five digits or is computed, by the sign that begins them.

Both patterns match in time linear in the length of the text.
"""


@dataclass
class Patience:
    """The time that one template may take for a render."""

    seconds: float = field(default_factory=lambda: MOST_SECONDS)
    """Seconds of processor time. Each time the template is stopped, it loses half of them."""

    def lose(self) -> None:
        """Halve the time, because the template may be asked for many prompts."""
        self.seconds = max(LEAST_SECONDS, self.seconds / 2)


class Budget:
    """The time and the text that one render has left."""

    def __init__(self, given: int, patience: Patience | None = None) -> None:
        """Allow a render of variables that have `given` characters together."""
        self._patience = patience or Patience()
        self.most_text = LEAST_TEXT + TEXT_SHARE * given
        self._given = given
        self._work_left = LEAST_WORK + WORK_SHARE * given
        self._deadline = time.thread_time() + self._patience.seconds
        self._steps = 0
        self._weights: dict[int, tuple[int, Any]] = {}

    def spend(self, text: int = 0) -> None:
        """Count one step that makes `text` characters.

        Raise TemplateLimitError if the render has used up its time or its text.
        """
        self._steps += 1
        if self._steps % STEPS_A_LOOK == 0 and time.thread_time() > self._deadline:
            seconds = self._patience.seconds
            self._patience.lose()
            raise TemplateLimitError(f"it was stopped after {seconds:.2g} seconds")
        self._work_left -= text
        if text > self.most_text or self._work_left < 0:
            raise TemplateLimitError(
                f"it was stopped when it made more than {self.most_text:,} characters "
                f"out of {self._given:,}"
            )

    def made(self, value: Any) -> Any:
        """Spend for the new `value` and return it. Raise TemplateLimitError if it is too large."""
        if isinstance(value, str | bytes):
            self.spend(len(value))
        elif isinstance(value, CONTAINERS):
            if self.weight(value) > self.most_text:
                self.spend(self.weight(value))
            self.spend(len(value))
        elif isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise TemplateLimitError(
                f"it was stopped when it made a number of more than {MOST_BITS} bits"
            )
        return value

    def weight(self, value: Any) -> int:
        """Return about how many characters `value` has when it is written out.

        A list that occurs twice in another list counts twice.
        """
        if isinstance(value, str | bytes):
            return len(value) + 1
        if not isinstance(value, CONTAINERS):
            return 1
        known = self._weights.get(id(value))
        if known is None:
            parts: Iterable[Any] = (
                value if not isinstance(value, dict) else (*value.keys(), *value.values())
            )
            # Keep the value, so that no other one gets its id.
            known = self._weights[id(value)] = 1 + sum(map(self.weight, parts)), value
        return known[0]


_BUDGET: ContextVar[Budget] = ContextVar("budget")


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Compiles templates in such a way that they spend from the budget."""

    intercepted_binops = frozenset(jinja2.sandbox.SandboxedEnvironment.default_binop_table)

    def tick(self, text: int) -> str:
        """Spend for one run of the body of a loop or macro.

        `text` is the number of characters of its own that the body writes.
        """
        _BUDGET.get().spend(text)
        return ""

    def made(self, value: Any) -> Any:
        return _BUDGET.get().made(value)

    def joined(self, join: Callable[[Any], str], parts: tuple[Any, ...]) -> str:
        """Return `parts` joined by the operator `~`."""
        budget = _BUDGET.get()
        budget.spend(sum(map(budget.weight, parts)))
        return join(parts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _BUDGET.get()
        budget.spend(_size_of_result(budget, operator, left, right))
        return budget.made(super().call_binop(context, operator, left, right))

    def call(  # jinja names the parameters so
        __self,  # noqa: N805
        __context: Any,
        __function: Any,
        *args: Any,
        **names: Any,
    ) -> Any:
        budget, owner = _BUDGET.get(), getattr(__function, "__self__", None)
        if isinstance(owner, str | bytes | int):
            _check_operation(budget, __function.__name__, (owner, *args, *names.values()))
        return budget.made(super().call(__context, __function, *args, **names))

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @functools.wraps(wrapped)
        def checked(*args: Any, **names: Any) -> str:
            _check_format(_BUDGET.get(), value.__self__, (*args, names), "{")
            return str(wrapped(*args, **names))

        return checked

    def _generate(
        self, source: nodes.Template, name: Any, filename: Any, defer_init: bool = False
    ) -> str:
        repeated: list[Any] = list(source.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
        for node in repeated:
            size = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
            tick = nodes.Call(
                nodes.EnvironmentAttribute("tick"), [nodes.Const(size)], [], None, None
            )
            node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return super()._generate(source, name, filename, defer_init)


class _Code(CodeGenerator):
    """Generates Python code for a template; it measures what `Environment` cannot intercept."""

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:  # noqa: N802
        join = "(markup_join if context.eval_ctx.autoescape else str_join)"
        self.write(f"environment.joined({join}, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def _measured(self, visit: Callable[[Any, Any], None], node: Any, frame: Any) -> None:
        self.write("environment.made(")
        visit(node, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Any) -> None:  # noqa: N802
        self._measured(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Any) -> None:  # noqa: N802
        self._measured(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Any) -> None:  # noqa: N802
        if node.ctx == "load":
            self._measured(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)


Environment.code_generator_class = _Code


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Return the text that the template `source` makes of `variables`.

    Raise TemplateLimitError if the template is stopped, or else what the template raises.
    """
    budget = Budget(_characters(variables), _patience(source))
    token = _BUDGET.set(budget)
    try:
        pieces, size = [], 0
        for piece in compiled(source).generate(**variables):
            pieces.append(piece)
            size += len(piece)
            if size > budget.most_text:
                budget.spend(size)
        return "".join(pieces)
    finally:
        _BUDGET.reset(token)


@functools.lru_cache(maxsize=16)
def compiled(source: str) -> jinja2.Template:
    """Return the template `source`, ready to render.

    Compiling computes constant parts, within the budget of the render that asks for it.
    """
    if len(source) > MOST_SOURCE:
        raise TemplateLimitError(
            f"it has {len(source):,} characters, more than the {MOST_SOURCE:,} "
            "that a template may have"
        )
    return _environment().from_string(source)


@functools.lru_cache(maxsize=16)
def _patience(source: str) -> Patience:
    """Return the patience with the template `source`, kept for the last 16 templates in use."""
    return Patience()


@functools.lru_cache(maxsize=1)
def _environment() -> Environment:
    """Return an environment with the filters, names, tags and white space of transformers' own."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    theirs: Any = _compile_jinja_template("").environment
    extensions = [type(extension) for extension in theirs.extensions.values()]
    ours = Environment(
        trim_blocks=theirs.trim_blocks,
        lstrip_blocks=theirs.lstrip_blocks,
        extensions=extensions,
        finalize=_shown,
    )
    ours.globals.update(theirs.globals)
    del ours.globals["lipsum"]
    ours.globals["namespace"] = _namespace(theirs.globals["namespace"])
    ours.filters = {name: _bounded(name, function) for name, function in theirs.filters.items()}
    ours.tests = {name: _bounded(name, function) for name, function in theirs.tests.items()}
    return ours


def _namespace(base: type[Namespace]) -> type[Namespace]:
    """Return a `namespace` that does not write out its values, because it may hold itself."""

    class Short(base):  # type: ignore[misc, valid-type]
        def __repr__(self) -> str:
            return "<Namespace>"

    return Short


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or test that spends before and after. It keeps the marks of jinja."""

    @functools.wraps(function)
    def asked(*args: Any, **names: Any) -> Any:
        budget = _BUDGET.get()
        given = args[1:] if getattr(function, "jinja_pass_arg", None) else args
        _check_operation(budget, name, (*given, *names.values()))
        return budget.made(function(*args, **names))

    return asked


def _shown(value: Any) -> Any:
    """Spend for the text that `{{ value }}` writes, and return it."""
    text = value if isinstance(value, str) else str(value)
    _BUDGET.get().spend(len(text))
    return text


def _size_of_result(budget: Budget, operator: str, left: Any, right: Any) -> int:
    """Return the characters that an operator makes, or 0 if not more than its operands have.

    Raise TemplateLimitError for a huge number or a format that is too wide.
    """
    if operator == "*":
        for text, times in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(text, str | bytes | list | tuple):
                return max(0, times) * budget.weight(text)
    if operator == "%" and isinstance(left, str | bytes):
        _check_format(
            budget, left if isinstance(left, str) else left.decode("latin-1"), (right,), "%"
        )
    if (
        operator == "**"
        and isinstance(left, int)
        and isinstance(right, int)
        and left.bit_length() * right > MOST_BITS
    ):
        raise TemplateLimitError(
            f"it was stopped when it made a number of more than {MOST_BITS} bits"
        )
    return 0


def _check_operation(budget: Budget, name: str, given: tuple[Any, ...]) -> None:
    """Spend for a filter, test or method before it runs on the values `given`.

    The first value is the one that it works on. Raise TemplateLimitError if it makes too much.
    """
    first, rest = (given[0], given[1:]) if given else (None, ())
    size = len(first) if isinstance(first, SIZED) else 1
    texts = [len(value) for value in rest if isinstance(value, str | bytes)]
    budget.spend()
    if name in SLOW and budget.weight(first) > MOST_SLOW:
        raise TemplateLimitError(
            f"{name}: {budget.weight(first):,} characters are more than {MOST_SLOW:,}"
        )
    if name in BACKWARDS and texts:
        budget.spend(size * max(texts) // 64)
    if name in WIDTHS:
        _check_widths(budget, name, size, rest)
    if name == "round" and any(isinstance(value, int) and abs(value) > 100 for value in rest):
        raise TemplateLimitError("round: more than 100 digits")
    if name == "sum" and any(isinstance(value, CONTAINERS) for value in rest):
        raise TemplateLimitError("sum: adds numbers only")
    if name == "format":
        _check_format(budget, str(first), rest, "%{")
    if name == "replace" and len(texts) >= 2 and isinstance(first, str):
        old = next(value for value in rest if isinstance(value, str | bytes))
        budget.spend((first.count(old) if isinstance(old, str) else size) * texts[1])
    if name == "join":
        budget.spend(_joined_size(budget, first, rest))
    if name == "translate":
        budget.spend(size * max((budget.weight(value) for value in rest), default=0))


def _joined_size(budget: Budget, first: Any, rest: tuple[Any, ...]) -> int:
    """Return the characters that `join` makes.

    The filter gets the parts first, the method gets them second.
    """
    parts, mark = (
        (rest[0], first)
        if isinstance(first, str) and rest and not isinstance(rest[0], str)
        else (first, "")
    )
    marks = [value for value in (mark, *rest) if isinstance(value, str)]
    count = len(parts) if isinstance(parts, SIZED) else jinja2.sandbox.MAX_RANGE
    return budget.weight(parts) + count * max(map(len, marks), default=0)


def _check_widths(budget: Budget, name: str, size: int, rest: tuple[Any, ...]) -> None:
    for width in (value for value in rest if isinstance(value, int)):
        if abs(width) > MOST_WIDTH:
            raise TemplateLimitError(f"{name}: {str(width)[:20]} is more than {MOST_WIDTH:,}")
        if name in ("indent", "expandtabs", "tojson"):
            budget.spend(size * abs(width) // 16)


def _check_format(budget: Budget, text: str, given: tuple[Any, ...], mark: str) -> None:
    """Spend for a format. Raise TemplateLimitError if a width has five digits or is computed."""
    if any(WIDE_FIELD[sign].search(text) for sign in mark):
        raise TemplateLimitError("a format with a width of five digits, or one that is computed")
    fields = sum(text.count(sign) for sign in mark)
    budget.spend(len(text) + fields * max(map(budget.weight, given), default=0))


def _characters(value: Any) -> int:
    """Return the number of characters of all texts in `value`, names included."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_characters(name) + _characters(one) for name, one in value.items())
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else 0
