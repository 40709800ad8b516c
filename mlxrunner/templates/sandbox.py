"""A jinja sandbox that stops templates which take too long or make too much text.

The sandbox of transformers keeps a template from reaching files and code, but not from running for
ever. Here every step (an iteration, a call, a filter, an operator) spends from the `Budget` of the
render. What the iterations of loops have written is remembered. This knows nothing about
conversations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from hashlib import blake2b
from typing import Any

import jinja2.sandbox
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

from mlxrunner.errors import TemplateLimitError
from mlxrunner.templates.budget import (
    Budget,
    check_format,
    check_operation,
    size_of_result,
)
from mlxrunner.templates.loops import ATTRIBUTES, remember
from mlxrunner.templates.plain import Plain
from mlxrunner.templates.recalled import Memory, Recollection

MOST_SOURCE = 2**18
"""Most characters of a template; the longest ones in use have about 60,000."""
MOST_REMEMBERED = 64_000_000
"""Most bytes of what iterations have read and written."""

_BUDGET: ContextVar[Budget] = ContextVar("budget")
_RECOLLECTION: ContextVar[Recollection] = ContextVar("recollection")
_MEMORY = Memory(MOST_REMEMBERED)
_OF_DICT = frozenset(dir(dict))


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Compiles templates in such a way that they spend from the budget."""

    intercepted_binops = frozenset(jinja2.sandbox.SandboxedEnvironment.default_binop_table)

    def tick(self, text: int) -> str:
        """Spend for one run of the body of a loop or macro.

        `text` is the number of characters of its own that the body writes.
        """
        _BUDGET.get().spend(text)
        return ""

    def recall(self, shape: tuple[Any, ...], item: Any, *given: Any) -> str:
        """Return what an iteration has written that read the same, or nothing."""
        return _RECOLLECTION.get().recall(shape, item, *given)

    def keep(self, text: str) -> str:
        """Remember what an iteration has written, and return it."""
        return _RECOLLECTION.get().keep(text)

    def look(self, name: str, value: Any, at: Any) -> Any:
        """Return the item of a list, and note that an iteration has read it."""
        return _RECOLLECTION.get().look(name, value, at)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return what the template writes as `obj.attribute`."""
        if type(obj) is dict and attribute not in _OF_DICT:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if type(obj) is LoopContext and attribute in ATTRIBUTES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def made(self, value: Any) -> Any:
        return _BUDGET.get().made(value)

    def joined(self, join: Callable[[Any], str], parts: tuple[Any, ...]) -> str:
        """Return `parts` joined by the operator `~`."""
        budget = _BUDGET.get()
        budget.spend(sum(map(budget.weight, parts)))
        return join(parts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _BUDGET.get()
        budget.spend(size_of_result(budget, operator, left, right))
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
            check_operation(budget, __function.__name__, (owner, *args, *names.values()))
        return budget.made(super().call(__context, __function, *args, **names))

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @functools.wraps(wrapped)
        def checked(*args: Any, **names: Any) -> str:
            check_format(_BUDGET.get(), value.__self__, (*args, names), "{")
            return str(wrapped(*args, **names))

        return checked

    def _generate(
        self, source: nodes.Template, name: Any, filename: Any, defer_init: bool = False
    ) -> str:
        remember(source)
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

    def visit_Call(  # noqa: N802
        self, node: nodes.Call, frame: Any, forward_caller: bool = False
    ) -> None:
        if not isinstance(node.node, nodes.EnvironmentAttribute):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        self.write(f"environment.{node.node.name}(")  # our own, which needs no check
        for argument in node.args:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")

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


def render(source: str, given: Mapping[str, Plain]) -> str:
    """Return the text that the template `source` makes of the variables `given`.

    Raise TemplateLimitError if the template is stopped, or else what the template raises.
    """
    variables = {name: plain.value for name, plain in given.items()}
    budget = Budget(sum(plain.characters for plain in given.values()))
    environment = _environment()
    signs = {} if "messages" not in given else given["messages"].signs
    recollection = Recollection(
        _MEMORY, _digest(source), variables, environment.globals, environment.getitem, signs
    )
    tokens = _BUDGET.set(budget), _RECOLLECTION.set(recollection)
    try:
        pieces, size = [], 0
        for piece in compiled(source).generate(**variables):
            pieces.append(piece)
            size += len(piece)
            if size > budget.most_text:
                budget.spend(size)
        return "".join(pieces)
    finally:
        _BUDGET.reset(tokens[0])
        _RECOLLECTION.reset(tokens[1])


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
def _digest(source: str) -> bytes:
    return blake2b(source.encode(errors="surrogatepass"), digest_size=16).digest()


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
        check_operation(budget, name, (*given, *names.values()))
        return budget.made(function(*args, **names))

    return asked


def _shown(value: Any) -> Any:
    """Spend for the text that `{{ value }}` writes, and return it."""
    text = value if isinstance(value, str) else str(value)
    _BUDGET.get().spend(len(text))
    return text
