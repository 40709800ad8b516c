"""The line of a key in a TOML file, however the key is written."""

from __future__ import annotations

import pytest

from mlxrunner.config.file import line_of

TEXT = '''# a comment = 0
model = "a"   # "b" = 1

[options]
top-p = 0.5
"odd key" = 1
stop = [
  "x = 1",
]
template.enable_thinking = false

[models."mlx-community/Qwen3-4B"]
temperature = 0.6
[ models . 'b c' ]
temperature = 0.7

[prompts]
long = """
[options]
temperature = 9
"""
short = """one line"""
inline = { a = 1, b = 2 }

[templates.sum]
prompt = "x"
'''


@pytest.mark.exhaustive(20)
@pytest.mark.parametrize(
    ("key", "line"),
    [
        (("model",), 2),
        (("options",), 4),
        (("options", "top-p"), 5),
        (("options", "odd key"), 6),
        (("options", "stop"), 7),
        (("options", "template"), 10),
        (("models", "mlx-community/Qwen3-4B", "temperature"), 13),
        (("models", "b c", "temperature"), 15),
        (("prompts", "long"), 18),
        (("prompts", "short"), 22),
        (("prompts", "inline", "b"), 23),
        (("templates", "sum"), 25),
        (("templates", "sum", "prompt"), 26),
        (("options", "temperature"), 4),
        (("nowhere",), 1),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else None,
)
def test_the_line_of_a_key(key: tuple[str, ...], line: int) -> None:
    """Text that only looks like a key, in a comment or a longer text, is none."""
    assert line_of(TEXT, key) == line


def test_line_ends_of_windows_count_once() -> None:
    """A carriage return is part of the line end."""
    assert line_of(TEXT.replace("\n", "\r\n"), ("models", "b c", "temperature")) == 15
