"""Templates make the text that transformers makes, and those without end are stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxrunner import PromptError
from mlxrunner.errors import TemplateLimitError
from mlxrunner.templates import rendering, sandbox
from mlxrunner.templates.rendering import RenderProcesses, TemplateError, render_jinja
from mlxrunner.tokenizer import load_tokenizer

MESSAGES: Any = [
    {"role": "system", "content": "  Be brief.\n"},
    {"role": "user", "content": "<b>hi</b> & {{ 1 }}"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nhello"},
    {"role": "user", "content": "ü" * 50},
]
EVERYDAY = {
    "namespace, reversed, split": (
        "{%- set ns = namespace(last=-1, seen='') %}{%- for m in messages[::-1] %}{%- if m.role == "
        "'user' and ns.last < 0 %}"
        "{%- set ns.last = messages|length - 1 - loop.index0 %}{%- endif %}{%- endfor %}"
        "{%- for m in messages %}{{ m.content.split('</think>')[-1].lstrip('\\n') ~ loop.index ~ "
        "(loop.index0 > ns.last) }}"
        "{%- set ns.seen = ns.seen + m.role %}{%- endfor %}{{ ns.seen }}"
    ),
    "macro, call, recursion": (
        "{% macro one(m, deep=2) %}[{{ m.role }}{% if deep %}{{ one(m, deep - 1) }}{% endif %}{{ "
        "caller() if caller }}]{% endmacro %}"
        "{% for m in messages %}{% call one(m) %}!{% endcall %}{% endfor %}"
    ),
    "filters and tests": (
        "{{ messages|map(attribute='role')|unique|join(', ')|title }} {{ "
        "messages|selectattr('role', 'equalto', 'user')|list|length }}"
        "{{ messages[1].content|trim|upper|replace('B', 'x')|indent(4) }} {{ "
        "messages[0]|tojson(indent=2) }} {{ none|default('d') }}"
        "{{ messages|groupby('role')|first|first }} {{ 'abc' is in 'xabcx' }} {{ [3, 1]|sort }} {{ "
        "(1, 2)|sum }} {{ '%s-%03d'|format('a', 7) }}"
    ),
    "methods": "{{ '{}:{:>5}'.format('a', 3) ~ '%s|%r' % ('x', [1]) ~ 'ab'.center(9, '*') ~ "
    "dict(a=1, b=[2]).items()|list ~ '-'.join(['a', 'b']) }}",
    "blocks": "{% set x %}{% for m in messages %}{{ m.role }},{% endfor %}{% endset %}"
    "{% filter upper %}{{ x }}{% endfilter %}{{ x|length }}",
    "loop controls": "{% for m in messages if m.role != 'system' %}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{{ loop.cycle('a', 'b') }}{% else %}none{% "
    "endfor %}",
    "arithmetic": "{{ (2 ** 10 - 24) // 3 % 7 * 'ab' ~ 7 / 2 ~ [1] * 3 ~ -5 ~ ('a' 'b') "
    "~ 1.5|round }}",
    "escaping": "{% autoescape true %}{{ messages[1].content ~ '<' }}{{ '<i>'|safe }}"
    "{% endautoescape %}",
    "generation": "{% generation %}{{ messages[2].content }}{% endgeneration %}",
    "values": "{{ none }}{{ true }}{{ undefined_name }}{{ [1, 'a', {'b': (1,)}] }}"
    "{{ add_generation_prompt }}{{ bos_token }}{{ tools }}",
}


@pytest.mark.parametrize("template", EVERYDAY.values(), ids=EVERYDAY)
def test_a_template_makes_the_same_text_as_in_transformers(template: str) -> None:
    """It may use anything."""
    from transformers.utils.chat_template_utils import render_jinja_template

    theirs: Any = render_jinja_template(
        [MESSAGES], chat_template=template, add_generation_prompt=True, bos_token="<s>"
    )
    assert render_jinja(template, MESSAGES, True, bos_token="<s>") == theirs[0][0]


def test_a_template_has_the_names_that_it_has_in_transformers() -> None:
    """Filters, tests, functions and tags, and the white space around them."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    theirs: Any = _compile_jinja_template("").environment
    ours = sandbox.Sandbox()
    assert isinstance(ours, type(theirs))
    assert ours.tests == theirs.tests
    assert ours.globals.keys() == theirs.globals.keys()
    tags = [[one.tags for one in box.iter_extensions()] for box in (ours, theirs)]
    assert tags[0] == tags[1]
    for name in ("trim_blocks", "lstrip_blocks", "keep_trailing_newline", "finalize"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.filters.keys() == theirs.filters.keys()
    filters = ours.filters
    assert all(filters[name] is theirs.filters[name] for name in filters if name != "tojson")


def test_the_templates_of_the_other_tests_make_the_same_text(templates: dict[str, str]) -> None:
    """Those of four families."""
    from transformers.utils.chat_template_utils import render_jinja_template

    for template in templates.values():
        theirs: Any = render_jinja_template(
            [MESSAGES[1:]], chat_template=template, add_generation_prompt=False, eos_token="</s>"
        )
        assert render_jinja(template, MESSAGES[1:], False, eos_token="</s>") == theirs[0][0]


AGAIN = "{% for i in range(100000) %}"
LARGE = {
    "padding": "{{ 'a'.center(5 * 10**9) }}",
    "repeated text": "{{ 'x' * 10**10 }}",
    "doubled": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}"
    "{% endfor %}{{ ns.x }}",
    "written in loops": AGAIN + AGAIN + "x" * 50 + "{% endfor %}{% endfor %}",
    "replaced": "{{ ('a' * 200000).replace('a', 'b' * 200000) }}",
    "keys": "{{ dict.fromkeys(range(100000), 'x' * 10000) }}",
}


ENDLESS = {
    "loops": AGAIN * 4 + "{% endfor %}" * 4,
    "conditions": AGAIN + "{% for k in range(100000) if k < 0 %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
    "{% endmacro %}{{ m(100) }}",
    "callers": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call m() %}" * 60
    + "{% endcall %}" * 60,
    "filters": AGAIN + "{% set x = range(100000)|select('equalto', -1)|list %}{% endfor %}",
    "choices": "{{ range(100000)|select('in', range(100000)|list)|list }}",
    "conditions of a loop": "{% for i in range(100000) if i in range(100000)|list %}{% endfor %}",
    "comparisons": "{% set a = ['a' * 1000] * 900 %}{% set b = ['a' * 1000] * 900 %}"
    + AGAIN * 2
    + "{% if a == b %}{% endif %}{% endfor %}{% endfor %}",
    "growing lists": "{% set ns = namespace(x=[]) %}"
    + AGAIN
    + "{% set ns.x = ns.x + [i] %}{% endfor %}",
}


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[RenderProcesses]:
    """Child processes with little time."""
    made = RenderProcesses(0.1)
    monkeypatch.setattr(rendering, "PROCESSES", made)
    yield made
    made.close()


@pytest.mark.parametrize("template", (LARGE | ENDLESS).values(), ids=LARGE | ENDLESS)
def test_a_template_without_end_is_stopped_and_takes_nothing_from_the_next(
    template: str, processes: RenderProcesses
) -> None:
    """By the time of the processor, which a busy machine does not shorten, or by its memory."""
    for _ in range(2):
        with pytest.raises(TemplateLimitError, match="it was stopped "):
            render_jinja(template, MESSAGES, True)
    assert render_jinja("{{ 'x'.center(3) }}{{ messages[0].role }}", MESSAGES, True) == " x system"
    assert render_jinja("{{ messages[0].role }}", MESSAGES, True) == "system"


def test_a_template_that_makes_much_of_little_is_refused() -> None:
    """The limit grows with the conversation."""
    with pytest.raises(TemplateLimitError, match=r"it made 999,999 characters out of \d+ bytes"):
        render_jinja("{{ 'x' * 999999 }}", MESSAGES, True)
    with pytest.raises(TemplateLimitError, match="it has 327,680 characters"):
        render_jinja("{# #}" * 2**16, MESSAGES, True)


@pytest.mark.parametrize(
    "template",
    [
        "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
        "{{ 1" + "+1" * 5000 + " }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    ],
    ids=["brackets", "blocks", "sums", "macro", "loop"],
)
def test_what_is_nested_too_deeply_is_an_ordinary_error(template: str) -> None:
    """Python raises it, and a conversation turns it into one line."""
    with pytest.raises((RecursionError, TemplateError), match="recursion"):
        render_jinja(template, MESSAGES, True)


def test_much_text_given_may_become_much_text() -> None:
    """The limits grow with the conversation."""
    long: Any = [{"role": "user", "content": "word " * 500_000}] * 2
    assert (
        len(
            render_jinja(
                "{% for m in messages %}{{ m.content|trim }}{{ m.content }}{% endfor %}", long, True
            )
        )
        == 9_999_998
    )


def test_names_and_things_that_are_no_data_reach_no_template() -> None:
    """An object is the name of its kind."""
    assert render_jinja("{{ thing }}{{ kind }}", MESSAGES, True, thing=Path("x"), kind=True) in (
        "<PosixPath>True",
        "<WindowsPath>True",
    )


@pytest.mark.parametrize("kind", ["tokenizer.json", "tokenizer.model"])
def test_a_conversation_ends_in_one_line(kind: str, tmp_path: Path, copy_of: Any) -> None:
    """With every library, and with what to do."""
    folder: Path = copy_of(
        "byte_level" if kind == "tokenizer.json" else "spm_plain",
        chat_template="{{ 'x' * 10**10 }}",
    )
    with pytest.raises(
        PromptError, match=r"chat template does not end well: it was stopped .* memory; .*--raw"
    ) as error:
        load_tokenizer(folder).render(MESSAGES)
    assert "\n" not in str(error.value)
