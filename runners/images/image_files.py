"""What a data set's column of images holds: paths, or the bytes of a file."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from runners.errors import UserError, first_line, show

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 1 << 28  # of an image's file
_WANTED = "a path, a list of paths, or what a Hub data set has for images (bytes)"


@attrs.frozen
class ImageFile:
    """One image, not opened yet."""

    name: str  # as messages and logs call it: the path as the data has it, or a digest
    path: Path | None = None
    data: bytes | None = attrs.field(default=None, repr=False)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        if self.path is not None:
            return self.path.stat().st_size
        return len(self.data or b"")


def image_files(value: Any, folder: Path) -> tuple[ImageFile, ...]:
    """The images of a row's column; paths are relative to `folder`. Nothing is opened.

    None, an empty text and an empty list are no images. Raises UserError, without the row's place, for a
    value of another kind, and for a path where there is no file.
    """
    if value is None or value == "":
        return ()
    if isinstance(value, list | tuple):
        return tuple(file for item in value for file in image_files(item, folder))
    if isinstance(value, Mapping):
        named, data = value.get("path"), value.get("bytes")
        if isinstance(data, bytes | bytearray):
            name = named if isinstance(named, str) and named else hashlib.sha256(data).hexdigest()[:16]
            return (ImageFile(name, data=bytes(data)),)
        value = named
    if isinstance(value, bytes | bytearray):
        return (ImageFile(hashlib.sha256(value).hexdigest()[:16], data=bytes(value)),)
    if not isinstance(value, str):
        raise UserError(f"is {type(value).__name__}; wanted {_WANTED}")
    path = Path(value).expanduser()
    path = path if path.is_absolute() else folder / path
    try:
        size = path.stat().st_size if path.is_file() else None
    except (OSError, ValueError) as error:  # a name that is too long, or with a zero byte in it
        raise UserError(f"names {show(value)}: {first_line(error)}") from error
    if size is None:
        what = "a folder" if path.is_dir() else "no file"
        raise UserError(f"names {show(value)}, but there is {what} {path}")
    if size > MAX_BYTES:
        raise UserError(f"names {show(value)}, a file of {size:,} bytes; wanted {MAX_BYTES:,} at most")
    return (ImageFile(value, path=path),)


def image_fault(value: Any, folder: Path) -> str:
    """What is wrong with a row's images, as far as is seen without opening them; empty: nothing."""
    try:
        image_files(value, folder)
    except UserError as error:
        return str(error)
    return ""


def image_size(file: ImageFile) -> tuple[int, int]:
    """Rows and columns of pixels, from the file's head. UserError for what is no image."""
    with _opened(file) as image:
        columns, rows = image.size
    return rows, columns


def read_image(file: ImageFile) -> Image:
    """The pixels in RGB. UserError for what is no image."""
    image = _opened(file)
    try:
        return image.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:  # SyntaxError: a broken PNG
        raise _unreadable(file, error) from error
    finally:
        image.close()


def _opened(file: ImageFile) -> Image:
    from PIL import Image

    try:
        return Image.open(file.path if file.data is None else io.BytesIO(file.data))  # type: ignore[arg-type]
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: ImageFile, error: BaseException) -> UserError:
    where = file.name if file.path is None else file.path
    return UserError(f"{where}: cannot be read as an image ({first_line(error)})")
