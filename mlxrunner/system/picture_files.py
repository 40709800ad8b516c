"""Read a picture that a stranger may have made into plain RGB pixels, from a file or from text.

A bound holds for the bytes of the file and for its pixels, before any of them is decoded. What a
viewer would show is what the model gets: turned as EXIF says, on white where it is transparent, the
first frame of an animation. A text is base64, a data URL, or the URL of a file in an allowed
folder; nothing is fetched from the network.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import warnings
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from mlxrunner.errors import OptionError, PictureError, reason
from mlxrunner.system.imports import how_to_install
from mlxrunner.system.reading import read_bytes
from mlxrunner.terminal.output import one_line, size

Pixels = NDArray[np.uint8]
"""The pixels of a picture, `[height, width, 3]`."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""The formats that are read, by Pillow's names."""
MOST_BYTES = 2**26
"""Most bytes of a file."""
MOST_PIXELS = 50_000_000
"""Most pixels: 150 MB once decoded."""
DECODED_BYTES = 3 * 3 * MOST_PIXELS
"""Most bytes of a picture while it is read: as it is stored, turned, and as it is seen."""
DEEP = {"I;16": 16, "I;16B": 16, "I;16L": 16, "I": 16}
"""Bits of a grey value, by those of Pillow's modes that it would cut off at 255."""


def open_picture(path: str | os.PathLike[str]) -> Pixels:
    """Return the pixels of a picture file.

    Raise PictureError if it can't be used, and OptionError if Pillow is not installed.
    """
    name = one_line(os.fspath(path))
    content = read_bytes(Path(path), MOST_BYTES)
    return decode_picture(content, name)


def pixels_of(image: Any, name: str) -> Pixels:
    """Return the pixels of a path, of the bytes of a file, or of pixels.

    Raise PictureError, which calls the picture `name`, if it can't be used, and OptionError if
    Pillow is not installed.
    """
    if isinstance(image, bytes):
        return decode_picture(image, name)
    if isinstance(image, str | os.PathLike):
        return open_picture(image)
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.shape[2:] == (3,):
        _check_size(name, image.shape[1], image.shape[0])
        return image
    raise PictureError(
        f"{name}: a picture is a path, the bytes of a file, or pixels [height, width, 3] of type "
        f"uint8, not {type(image).__name__}"
    )


def decode_picture(content: bytes, name: str) -> Pixels:
    """Return the pixels of the picture in `content`, which errors call `name`.

    Raise PictureError if it can't be used, and OptionError if Pillow is not installed.
    """
    if len(content) > MOST_BYTES:
        raise PictureError(f"{name}: {size(len(content))} are more than {size(MOST_BYTES)}")
    image_module = _pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            encoded = io.BytesIO(content)
            with image_module.open(encoded, formats=FORMATS) as picture:  # opens: bytes
                _check_size(name, *picture.size)
                return _rgb(image_module, picture)
    except PictureError:
        raise
    except image_module.UnidentifiedImageError as error:
        raise PictureError(f"{name}: not a picture of a known format: {', '.join(FORMATS)}") from (
            error
        )
    except Exception as error:  # a broken file may raise anything
        raise PictureError(f"{name}: the picture is damaged: {reason(error, 200)}") from error


def encoded(pixels: Pixels) -> bytes:
    """Return the PNG of a picture."""
    return small_png(pixels, max(pixels.shape))[0]


def small_png(pixels: Pixels, most: int) -> tuple[bytes, int]:
    """Return a PNG of at most `most` rows and columns, and its width."""
    picture = _pillow().fromarray(pixels)
    picture.thumbnail((most, most))
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return stream.getvalue(), picture.width


def _check_size(name: str, width: int, height: int) -> None:
    if not width or not height:
        raise PictureError(f"{name}: the picture has no pixels ({width} x {height})")
    if width * height > MOST_PIXELS:
        raise PictureError(
            f"{name}: {width} x {height} are {width * height:,} pixels, more than "
            f"{MOST_PIXELS:,}: make it smaller"
        )


def _rgb(image_module: Any, picture: Any) -> Pixels:
    """Return the first frame as a viewer shows it."""
    from PIL import ImageOps

    picture.load()
    shown = ImageOps.exif_transpose(picture)
    if shown.mode in DEEP:
        shown = image_module.fromarray((np.asarray(shown).astype(np.int64) >> 8).astype(np.uint8))
    if shown.mode in ("RGBA", "LA", "PA") or "transparency" in shown.info:
        seen = shown.convert("RGBA")
        white = image_module.new("RGBA", seen.size, (255, 255, 255, 255))
        shown = image_module.alpha_composite(white, seen)
    return np.asarray(shown.convert("RGB"))


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise OptionError(f"pictures need mlx-vlm: {how_to_install('vision')}") from error
    Image.MAX_IMAGE_PIXELS = None  # our own bound is checked before anything is decoded
    return Image


_IS_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
LONGEST = 4096
"""Most characters of the URL of a file."""


def picture_bytes(text: str, name: str, folder: Path | None = None) -> bytes:
    """Return the file of a picture that is given as `text`, which errors call `name`.

    `folder`: files in it may be named by `file:` URLs, also as `file:photo.png`; None: no files.
    Raise PictureError, and ReadError for a file that can't be read.
    """
    if _IS_URL.match(text) is None:
        return _decoded(text, name)
    scheme = text.partition(":")[0].lower()
    if scheme == "data":
        head, comma, content = text.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise PictureError(
                f"{name}: a data URL has to begin as data:image/png;base64, and not as "
                f"{text[:40]!r}"
            )
        return _decoded(content, name)
    if scheme == "file":
        return _file(text, name, folder)
    raise PictureError(
        f"{name}: {one_line(text[:80])} is not fetched, as nothing is: send the picture itself, as "
        "data:image/png;base64,..."
    )


def _decoded(content: str, name: str) -> bytes:
    if len(content) > MOST_BYTES // 3 * 4 + 2**16:  # room for line breaks
        raise PictureError(f"{name}: it has more than {size(MOST_BYTES)}: make it smaller")
    try:
        return base64.b64decode(re.sub(r"\s+", "", content), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError(f"{name}: its base64 is wrong: {error}") from error


def _file(url: str, name: str, folder: Path | None) -> bytes:
    """Return the content of the file of a URL, which has to lie in `folder`."""
    if folder is None:
        raise PictureError(
            f"{name}: no files are opened: send the picture itself, as data:image/png;base64,..., "
            "or allow a folder with --picture-folder"
        )
    try:
        parts = urlsplit(url[:LONGEST])
        path = Path(os.path.realpath(folder / unquote(parts.path)))
        is_inside = parts.netloc in ("", "localhost") and path.is_relative_to(
            os.path.realpath(folder)
        )
    except ValueError:  # a NUL, or a wrong address
        is_inside = False
    if not is_inside:
        raise PictureError(
            f"{name}: {one_line(url[:200])} is not in the folder {one_line(str(folder))}, from "
            "which pictures may be read"
        )
    return read_bytes(path, MOST_BYTES)
