"""Reads image files from a data set's column, which contains paths or bytes."""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from runners.errors import UserError, first_line, show, user_errors

if TYPE_CHECKING:
    from PIL.Image import Image

# other formats, such as EPS, may start programs
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_TURNED = (5, 6, 7, 8)  # values of EXIF's orientation that swap rows and columns
_ORIENTATION = 0x0112  # read if EXIF is before the pixels, as cameras write it


@attrs.frozen
class ImageFile:
    """One image, which is not opened yet."""

    name: str  # in messages and logs: the path as in the data, or a digest
    path: Path | None = None
    data: bytes | None = attrs.field(default=None, repr=False)

    @property
    def place(self) -> Path | str:
        """The image's path or, for bytes, its name."""
        return self.path or self.name


def image_files(value: Any, folder: Path | None) -> tuple[ImageFile, ...]:
    """Returns the images in a row's column, without opening them. Paths are relative to `folder`
    and must stay inside it.

    None, an empty text and an empty list mean no images. Raises UserError, without the row's
    location, for a value of another type, a path outside the folder, or a missing file.
    """
    if value is None or value == "":
        return ()
    if isinstance(value, list | tuple):
        return tuple(chain.from_iterable(image_files(item, folder) for item in value))
    name = ""
    if isinstance(value, Mapping):  # a Hub data set's
        name = value.get("path")
        data = value.get("bytes")
        value = name if data is None else data
    if isinstance(value, bytes | bytearray):
        digest = hashlib.sha256(value).hexdigest()[:16]
        return (ImageFile(name if isinstance(name, str) and name else digest, data=bytes(value)),)
    if not isinstance(value, str):
        raise UserError(f"expected paths, or an image's bytes, found {type(value).__name__}")
    if folder is None:
        raise UserError(
            f"names {show(value)}, a path; expected bytes, or data.image_folder for data from "
            "the Hub"
        )
    path = folder / Path(value).expanduser()
    # too long, a zero byte, circular links
    with user_errors(f"names {show(value)}", OSError, ValueError, RuntimeError, why=first_line):
        inside = path.resolve().is_relative_to(folder.resolve())
        there = path.is_file()
    if not inside:
        raise UserError(
            f"names {show(value)}, which is outside {folder}, but images are only read inside the "
            f"folder; data.image_folder sets another folder"
        )
    if not there:
        raise UserError(f"names {show(value)}, but there is no file {path}")
    return (ImageFile(value, path=path),)


def image_size(file: ImageFile) -> tuple[int, int]:
    """Returns an image's height and width in pixels, in upright orientation, from the file's
    header.

    Raises UserError if the file is not an image.
    """
    with _opened(file) as image:
        columns, rows = image.size
        turned = "exif" in image.info and image.getexif().get(_ORIENTATION) in _TURNED
    return (columns, rows) if turned else (rows, columns)


def read_image(file: ImageFile) -> Image:
    """Returns the pixels in RGB, in upright orientation. Raises UserError if the file is not an
    image.
    """
    from PIL import ImageOps

    with _opened(file) as image:
        return (ImageOps.exif_transpose(image) if "exif" in image.info else image).convert("RGB")


@contextmanager
def _opened(file: ImageFile) -> Iterator[Image]:
    """Opens an image file if its format is known and Pillow considers its size safe. Raises
    UserError for any error in the block.
    """
    from PIL import Image

    try:
        with warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning):
            image = Image.open(file.path or io.BytesIO(file.data or b""), formats=FORMATS)
        with image:
            yield image
    except Exception as error:  # Pillow may fail in any way on an untrusted file
        raise UserError(
            f"{file.place}: cannot be read as an image ({first_line(error)})"
        ) from error
