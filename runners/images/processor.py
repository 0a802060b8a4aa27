"""A model's image processor: how many tokens an image takes in a prompt, and its pixels as patches.

The work is mlx-vlm's, with the numbers of the model folder's preprocessor_config.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from runners.errors import UserError, first_lines
from runners.images.families import FAMILIES, check_family, mlx_vlm_module
from runners.images.image_files import ImageFile, image_size, read_image

Grid = tuple[int, int, int]  # time, rows, columns


@attrs.frozen(eq=False)
class ImageProcessor:
    """Prepares images for a model's prompts and its vision tower."""

    processor: Any  # mlx-vlm's image processor
    image_token: int  # the id in a prompt for each cell of an image
    max_pixels: int  # images are scaled down to it; 0: the processor's own bound
    template: str | None  # the processor's chat template, which may differ from the tokenizer's

    def count_tokens(self, file: ImageFile) -> int:
        """Tokens of an image in a prompt, from its size alone. UserError if the file is not an image."""
        rows, columns = image_size(file)
        try:
            return int(self.processor.num_image_tokens(rows, columns, **self._options))
        except ValueError as error:
            raise self._refused(file, error) from error

    def patches(self, file: ImageFile) -> tuple[np.ndarray, Grid]:
        """Patches [N,C] float32, and their grid: time, rows, columns. UserError if it is not an image."""
        try:
            found = self.processor(images=[read_image(file)], **self._options)
        except ValueError as error:
            raise self._refused(file, error) from error
        time, rows, columns = (int(number) for number in np.array(found["image_grid_thw"])[0])
        return np.array(found["pixel_values"], np.float32), (time, rows, columns)

    def cells(self, grid: Grid) -> Grid:
        """The grid of tokens for a grid of patches."""
        time, rows, columns = grid
        merge = int(self.processor.merge_size)
        return time, rows // merge, columns // merge

    def expanded(self, tokens: Sequence[int], images: Sequence[ImageFile]) -> tuple[int, ...]:
        """The prompt with all image tokens of each image. UserError unless it has one for each image."""
        shown = list(tokens).count(self.image_token)
        if shown != len(images):
            raise UserError(
                f"the prompt has {shown} places for the {len(images)} images of its row "
                f"({', '.join(image.name for image in images)}): the chat template has to show each image "
                "once, and the question must not hold the image token"
            )
        counts = iter([self.count_tokens(image) for image in images])
        found: list[int] = []
        for token in tokens:
            found += [token] * next(counts) if token == self.image_token else [token]
        return tuple(found)

    @property
    def _options(self) -> dict[str, int]:
        return {"max_pixels": self.max_pixels} if self.max_pixels else {}

    def _refused(self, file: ImageFile, error: Exception) -> UserError:
        return UserError(f"{file.path or file.name}: the image processor refuses it ({error})")


def load_processor(path: Path, config: Mapping[str, Any], max_pixels: int = 0) -> ImageProcessor:
    """The image processor of a model folder with this config.json. UserError for a model that takes no
    images, without mlx-vlm, and if the folder's settings cannot be read."""
    kind = check_family(config, path)
    if not any((path / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        raise UserError(f"{path}: preprocessor_config.json is missing; it has the sizes of images")
    processing = mlx_vlm_module(f"models.{kind}.processing_{kind}")
    image_token = config.get("image_token_id")
    if not isinstance(image_token, int):
        raise UserError(f"{path}/config.json: image_token_id: expected a token id, found none")
    try:
        found = getattr(processing, FAMILIES[kind]).from_pretrained(str(path))
        processor, template = found.image_processor, found.chat_template
    except Exception as error:  # mlx-vlm and transformers may fail in any way on untrusted files
        raise UserError(f"{path}: the image processor cannot be loaded: {first_lines(str(error))}") from error
    return ImageProcessor(processor, image_token, max_pixels, template if isinstance(template, str) else None)
