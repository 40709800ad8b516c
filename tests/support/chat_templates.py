"""Chat templates of our own making, in files: they do what published ones of each family do.

`published` has what decides if a text reaches the prompt: the roles that are refused, folded or
left out, contents as texts or parts, arguments as objects or JSON texts, results as JSON, thinking
that is dropped. `turns` has how the assistant's turns end, `strict` how tools are called.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "chat_templates"


def chat_template(kind: str, name: str) -> str:
    """Return a template. `kind` is its folder."""
    return (FOLDER / kind / f"{name}.jinja").read_text()


PUBLISHED = {
    file.stem: chat_template("published", file.stem)
    for file in sorted((FOLDER / "published").glob("*.jinja"))
}
"""The templates by family, besides those of `strict_templates`."""
