"""Made-up pictures of coloured shapes on a grid, and questions about them with their answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw

SIDE = 3
"""Rows and columns of the grid."""
CELL = 64
"""Pixels of a cell's side."""
COLORS = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 80, 200),
    "yellow": (240, 200, 20),
}
SHAPES = ("square", "circle", "triangle")
CORNERS = {
    "top left": 0,
    "top right": SIDE - 1,
    "bottom left": SIDE * (SIDE - 1),
    "bottom right": SIDE**2 - 1,
}
ROWS = ("top", "middle", "bottom")


@dataclass(frozen=True)
class Scene:
    """The color and the shape in each cell, row by row; None where there is none."""

    cells: tuple[tuple[str, str] | None, ...]

    def count(self, color: str | None = None, shape: str | None = None) -> int:
        """Return the number of shapes of this color and kind; None is any."""
        return sum(
            one is not None and color in (None, one[0]) and shape in (None, one[1])
            for one in self.cells
        )


def scene(rng: random.Random) -> Scene:
    """Return a random scene."""
    cells: list[tuple[str, str] | None] = [None] * SIDE**2
    colors = rng.sample(sorted(COLORS), rng.randint(1, len(COLORS)))
    shapes = rng.sample(SHAPES, rng.randint(1, len(SHAPES)))
    for place in rng.sample(range(SIDE**2), rng.randint(0, SIDE**2)):
        cells[place] = rng.choice(colors), rng.choice(shapes)
    return Scene(tuple(cells))


def drawn(scene: Scene, rng: random.Random) -> Image.Image:
    """Return a picture of `scene`. Sizes, places in the cells and tones differ a little."""
    paper = tuple(rng.randint(235, 255) for _ in range(3))
    picture = Image.new("RGB", (SIDE * CELL, SIDE * CELL), paper)
    pen = ImageDraw.Draw(picture)
    for place, one in enumerate(scene.cells):
        if one is None:
            continue
        color, shape = one
        tone = tuple(min(255, max(0, part + rng.randint(-15, 15))) for part in COLORS[color])
        half = rng.uniform(0.30, 0.42) * CELL
        slack = 0.46 * CELL - half
        row, column = divmod(place, SIDE)
        x = (column + 0.5) * CELL + rng.uniform(-slack, slack)
        y = (row + 0.5) * CELL + rng.uniform(-slack, slack)
        box = (x - half, y - half, x + half, y + half)
        if shape == "square":
            pen.rectangle(box, fill=tone)
        elif shape == "circle":
            pen.ellipse(box, fill=tone)
        else:
            pen.polygon([(x, y - half), (x - half, y + half), (x + half, y + half)], fill=tone)
    return picture


@dataclass(frozen=True)
class Question:
    """A question about a picture, and its answer."""

    text: str
    answer: str


def question(scene: Scene, rng: random.Random) -> Question:
    """Return a random question about `scene`."""
    kind = rng.random()
    if kind < 0.1:
        place = rng.choice(sorted(CORNERS))
        text = f"What is in the {place} corner?"
        return Question(text, _listed([scene.cells[CORNERS[place]]]))
    if kind < 0.3:
        row = rng.randrange(SIDE)
        text = f"What is in the {ROWS[row]} row?"
        return Question(text, _listed(scene.cells[row * SIDE : (row + 1) * SIDE]))
    color, shape = _wanted(scene, rng)
    if kind < 0.4 and color and shape:
        number = scene.count(color, shape)
        return Question(f"Is there a {color} {shape}?", "Yes." if number else "No.")
    many = " ".join(filter(None, (color, f"{shape or 'shape'}s")))
    number = scene.count(color, shape)
    text = rng.choice(["How many {}?", "How many {} are there?", "How many {} do you see?"])
    if number == 1:
        return Question(text.format(many), f"There is 1 {many[:-1]}.")
    return Question(text.format(many), f"There are {number or 'no'} {many}.")


def _listed(cells: Sequence[tuple[str, str] | None]) -> str:
    """Return the sentence that names what is in these cells."""
    text = ", ".join(f"a {' '.join(one)}" if one else "nothing" for one in cells)
    return f"{text[0].upper()}{text[1:]}."


def _wanted(scene: Scene, rng: random.Random) -> tuple[str | None, str | None]:
    """Return a color and a shape to ask for; mostly such that are there."""
    there: Sequence[tuple[str, str]] = [one for one in scene.cells if one]
    if there and rng.random() < 0.7:
        color, shape = rng.choice(there)
    else:
        color, shape = rng.choice(sorted(COLORS)), rng.choice(SHAPES)
    kind = rng.random()
    return (None if 0.6 <= kind < 0.8 else color, None if kind >= 0.8 else shape)
