"""The images of a row's prompt: where the files are, and how a chat template shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runners.config.sections import DataConfig
from runners.errors import UserError
from runners.images.image_files import ImageFile, image_files
from runners.images.processor import ImageProcessor, load_processor
from runners.quickstart import DATA


def image_folder(config: DataConfig) -> Path | None:
    """The folder of a row's paths: `data.image_folder`, else that of the data; None for data of the Hub."""
    if config.image_folder:
        return Path(config.image_folder).expanduser()
    source = DATA.get(config.source) or Path(config.source).expanduser()
    return source.parent if source.is_file() else source if source.is_dir() else None


def row_images(row: Mapping[str, Any], config: DataConfig) -> tuple[ImageFile, ...]:
    """A row's images; () without `data.image`. UserError if a file is gone."""
    if not config.image:
        return ()
    try:
        return image_files(row.get(config.image), image_folder(config))
    except UserError as error:
        raise UserError(f"{config.image} {error}") from error


def processor_of(config: DataConfig, path: Path, stated: Mapping[str, Any]) -> ImageProcessor | None:
    """The image processor of a model folder and its config.json; None without `data.image`.

    Raises UserError as `load_processor` does.
    """
    return load_processor(path, stated, config.image_max_pixels) if config.image else None


def with_image_parts(messages: Sequence[Mapping[str, Any]], images: int) -> tuple[dict[str, Any], ...]:
    """The messages with so many images before the last user message's text, in the form for chat templates.

    Raises UserError if there is no user message.
    """
    last = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise UserError("a prompt with images has no user message to show them in")
    parts = [{"type": "image"}] * images + [{"type": "text", "text": messages[last]["content"]}]
    return tuple(
        {**message, "content": parts} if n == last else dict(message) for n, message in enumerate(messages)
    )
