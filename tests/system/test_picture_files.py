"""Files that strangers made: plain pixels, or one line that says why not."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs the extra vision")

from PIL import Image

from mlxrunner.errors import PictureError, ReadError
from mlxrunner.system import picture_files
from mlxrunner.system.picture_files import decode_picture, open_picture, pixels_of

RED = (255, 0, 0)


def saved(picture: Any, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


def bomb(width: int, height: int) -> bytes:
    """Return a small PNG that says it is large."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IEND", b"")


@pytest.mark.exhaustive(12)
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (saved(Image.new("RGB", (3, 2), RED)), RED),
        (saved(Image.new("RGB", (3, 2), RED), "BMP"), RED),
        (saved(Image.new("CMYK", (3, 2), (0, 255, 255, 0)), "TIFF"), RED),
        (saved(Image.new("L", (3, 2), 7)), (7, 7, 7)),
        (saved(Image.new("1", (3, 2), 1)), (255, 255, 255)),
        (saved(Image.fromarray(np.full((2, 3), 0x8000, np.uint16))), (128, 128, 128)),
        (saved(Image.new("RGBA", (3, 2), (*RED, 0))), (255, 255, 255)),
        (saved(Image.new("LA", (3, 2), (0, 255))), (0, 0, 0)),
        (saved(Image.new("RGB", (3, 2), RED).convert("P"), "GIF"), RED),
        (
            saved(
                Image.new("RGB", (3, 2), RED),
                "GIF",
                save_all=True,
                append_images=[Image.new("RGB", (3, 2))],
            ),
            RED,
        ),
    ],
    ids="png bmp cmyk grey bits deep clear grey-alpha palette animated".split(),
)
def test_what_a_viewer_shows_is_what_the_model_gets(
    content: bytes, expected: tuple[int, ...]
) -> None:
    """Plain RGB, on white, the first frame."""
    pixels = decode_picture(content, "a")
    assert pixels.shape == (2, 3, 3)
    assert pixels.dtype == np.uint8
    assert (pixels == expected).all()


def test_a_picture_is_turned_as_exif_says() -> None:
    """Phones store pictures as the sensor was held."""
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter to the right
    content = saved(Image.new("RGB", (3, 2), RED), "JPEG", exif=exif)
    assert decode_picture(content, "a").shape == (3, 2, 3)


@pytest.mark.exhaustive(6)
@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "not a picture of a known format"),
        (b"hello", "not a picture of a known format: PNG, JPEG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a picture of a known format"),
        (saved(Image.fromarray(np.arange(3000, dtype=np.uint8).reshape(50, 60)))[:90], "damaged"),
        (bomb(60_000, 60_000), "60000 x 60000 are 3,600,000,000 pixels, more than 50,000,000"),
        (bomb(0, 5), "a: "),
    ],
    ids="empty text svg cut bomb none".split(),
)
def test_what_is_no_picture_is_refused_in_one_line(content: bytes, match: str) -> None:
    """Before anything large is decoded."""
    with pytest.raises(PictureError, match=match) as caught:
        decode_picture(content, "a")
    assert "\n" not in str(caught.value)


def test_reading_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the project's one opener, which reads no special file either."""
    file = tmp_path / "a.png"
    file.write_bytes(saved(Image.new("RGB", (3, 2), RED)))
    assert (open_picture(file) == RED).all()
    monkeypatch.setattr(picture_files, "MOST_BYTES", 10)
    with pytest.raises(ReadError):
        open_picture(file)
    with pytest.raises(PictureError, match="are more than 10 B"):
        decode_picture(file.read_bytes(), "a")
    with pytest.raises(ReadError):
        open_picture(tmp_path)


@pytest.mark.parametrize(
    "wrong", [7, None, np.zeros((2, 2), np.uint8), np.zeros((2, 2, 3)), np.zeros((2, 2, 4))]
)
def test_what_stands_for_a_picture(wrong: Any) -> None:
    """A path, the bytes of a file, or pixels."""
    with pytest.raises(PictureError, match="message 0: a picture is a path, the bytes of a file"):
        pixels_of(wrong, "message 0")
    with pytest.raises(PictureError, match="no pixels"):
        pixels_of(np.zeros((0, 2, 3), np.uint8), "message 0")
