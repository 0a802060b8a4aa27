"""Processes images for models that accept them: computes an image's tokens in a prompt, and its
pixels as patches.

mlx-vlm processes the images, with the settings in the model folder's preprocessor_config.json.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from runners.errors import UserError, first_lines, show, user_errors
from runners.images.image_files import ImageFile, image_size, read_image
from runners.machine.versions import import_extra

# model_type -> mlx-vlm's processor, in its module processing_{model_type}
FAMILIES: dict[str, str] = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
}


def has_vision(config: Mapping[str, Any]) -> bool:
    """Returns whether a config.json has a vision part."""
    return bool(config.get("vision_config") or config.get("img_processor"))


def check_family(config: Mapping[str, Any], path: Path) -> str:
    """Returns a config.json's model_type if the model accepts images. Raises UserError, with a list
    of supported types, for any other model.
    """
    kind = config.get("model_type")
    known = f"model_type {' and '.join(FAMILIES)}"
    if not has_vision(config):
        raise UserError(
            f"{path}: config.json has no vision_config; prompts with images require a model of "
            f"{known}"
        )
    if kind not in FAMILIES:
        raise UserError(
            f"{path}: prompts with images: expected a model of {known}, found model_type "
            f'{show(kind)} (data.image = "" trains its language part on text, if mlx-lm '
            "supports it)"
        )
    return str(kind)


def mrope_sections(config: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    """Returns the number of frequencies for time, row and column, from config.json. Raises
    UserError if these numbers are missing.
    """
    for table in (config, config.get("text_config") or {}):
        for key in ("rope_scaling", "rope_parameters"):
            found = (table.get(key) or {}).get("mrope_section")
            if isinstance(found, list) and all(isinstance(number, int) for number in found):
                return tuple(found)
    raise UserError(
        f"{path}/config.json: rope_scaling has no mrope_section, a list of three integers"
    )


def with_text_keys(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Returns a config.json with the text part's keys also at its root, where mlx-vlm reads them
    for these families.

    The config is unchanged if it has no separate text part. Raises UserError if `mrope_section` is
    missing.
    """
    text = config.get("text_config")
    if not text:
        return dict(config)
    theta = text.get("rope_theta") or (text.get("rope_parameters") or {}).get("rope_theta")
    return {
        **text,
        **({"rope_theta": theta} if theta else {}),
        **config,
        "rope_scaling": {"type": "mrope", "mrope_section": list(mrope_sections(config, path))},
    }


def mlx_vlm_module(name: str) -> Any:
    """Imports a module of mlx-vlm, such as "models.qwen2_vl". Raises UserError if mlx-vlm is not
    installed.
    """
    return import_extra(f"mlx_vlm.{name}", "vlm", "prompts with images require mlx-vlm")


Grid = tuple[int, int, int]  # time, rows, columns


@attrs.frozen(eq=False)
class ImageProcessor:
    """Prepares images for a model's prompts and its vision tower."""

    processor: Any  # mlx-vlm's image processor
    image_token: int  # the id in a prompt for each cell of an image
    # max_pixels, to which images are scaled down; empty: the processor's own bound
    options: dict[str, int]
    template: str | None  # the processor's chat template, which may differ from the tokenizer's

    def count_tokens(self, file: ImageFile) -> int:
        """Returns an image's number of tokens in a prompt, which depends only on the image's size.

        Raises UserError if the file is not an image.
        """
        rows, columns = image_size(file)
        with user_errors(_rejects(file), ValueError):
            return int(self.processor.num_image_tokens(rows, columns, **self.options))

    def patches(self, file: ImageFile) -> tuple[np.ndarray, Grid]:
        """Returns patches [N,C] float32, and their grid: time, rows, columns.

        Raises UserError if the file is not an image.
        """
        with user_errors(_rejects(file), ValueError):
            found = self.processor(images=[read_image(file)], **self.options)
        time, rows, columns = (int(number) for number in np.array(found["image_grid_thw"])[0])
        return np.array(found["pixel_values"], np.float32), (time, rows, columns)

    def expanded(self, tokens: Sequence[int], images: Sequence[ImageFile]) -> tuple[int, ...]:
        """Returns the prompt's tokens, with each image's placeholder expanded to all tokens of the
        image.

        Raises UserError unless the prompt has one placeholder per image.
        """
        shown = list(tokens).count(self.image_token)
        if shown != len(images):
            raise UserError(
                f"the prompt contains {shown} placeholders for the {len(images)} images of its row "
                f"({', '.join(image.name for image in images)}): the chat template must render "
                f"each image once, and the question must not contain the image token"
            )
        counts = iter([self.count_tokens(image) for image in images])
        found: list[int] = []
        for token in tokens:
            found += [token] * next(counts) if token == self.image_token else [token]
        return tuple(found)


def _rejects(file: ImageFile) -> str:
    return f"{file.place}: the image processor rejects it"


def load_processor(path: Path, config: Mapping[str, Any], max_pixels: int = 0) -> ImageProcessor:
    """Loads the image processor from a model folder with this config.json. Raises UserError if the
    model does not accept images, if mlx-vlm is not installed, or if the folder's settings cannot be
    read.
    """
    kind = check_family(config, path)
    if not any((path / f"{name}_config.json").is_file() for name in ("preprocessor", "processor")):
        raise UserError(
            f"{path}: preprocessor_config.json, which contains the sizes of images, is missing"
        )
    processing = mlx_vlm_module(f"models.{kind}.processing_{kind}")
    image_token = config.get("image_token_id")
    if not isinstance(image_token, int):
        raise UserError(f"{path}/config.json: image_token_id: expected a token id, found none")
    # mlx-vlm and transformers may fail in any way on untrusted files
    with user_errors(f"{path}: the image processor cannot be loaded", Exception, why=first_lines):
        found = getattr(processing, FAMILIES[kind]).from_pretrained(str(path))
        processor = found.image_processor
        template = found.chat_template
    return ImageProcessor(
        processor,
        image_token,
        {"max_pixels": max_pixels} if max_pixels else {},
        template if isinstance(template, str) else None,
    )
