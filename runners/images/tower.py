"""Runs a model's vision tower: loads its frozen weights from the folder, and computes image
features.
"""

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import attrs
import mlx.core as mx
import mlx.nn as nn

from grpo_fn.images import PromptImages, multimodal_positions
from grpo_fn.policy import use_multimodal_rope
from grpo_fn.trees import named_leaves
from runners.errors import UserError, first_lines, user_errors
from runners.files.json_files import read_json
from runners.files.tensor_files import weight_files
from runners.images.image_files import ImageFile
from runners.images.processor import (
    Grid,
    ImageProcessor,
    check_family,
    load_processor,
    mlx_vlm_module,
    mrope_sections,
)

TOWER_PREFIX = "vision_tower."  # prefix of its weights' names in mlx-vlm
_PREFIXES = (TOWER_PREFIX, "visual.", "model.visual.", "model.vision_tower.")
CACHE_BYTES = 1 << 28  # for cached features, which repeated prompts reuse


@attrs.define(eq=False)
class VisionPart:
    """A model's vision part, processor and tower, which is never trained."""

    path: Path  # the model's folder
    module: nn.Module  # mlx-vlm's vision tower, in the model's compute dtype
    processor: ImageProcessor
    dtype: mx.Dtype
    _cache: OrderedDict[ImageFile, tuple[mx.array, Grid]] = attrs.field(
        init=False, factory=OrderedDict
    )

    def see(self, prompts: Sequence[Any]) -> list[PromptImages | None] | None:
        """Computes image features for each prompt. A prompt has `tokens` and `images`. Returns None
        if no prompt has images.

        Raises UserError if a file is not an image, or has changed since the prompt was created.
        """
        if not any(prompt.images for prompt in prompts):
            return None
        return [self._of_prompt(prompt) if prompt.images else None for prompt in prompts]

    def weights(self) -> dict[str, mx.array]:
        """Reads the tower's weights from the folder, with mlx-vlm's names and layout."""
        return {
            f"{TOWER_PREFIX}{name}": leaf
            for name, leaf in read_tower(self.path, self.module).items()
        }

    def _of_prompt(self, prompt: Any) -> PromptImages:
        features, grids = zip(*(self._features(file) for file in prompt.images), strict=True)
        image_token = self.processor.image_token
        places = tuple(n for n, token in enumerate(prompt.tokens) if token == image_token)
        names = ", ".join(file.name for file in prompt.images)
        with user_errors(f"{names}: its size has changed since the run started", ValueError):
            positions = multimodal_positions(prompt.tokens, image_token, grids)
            return PromptImages(mx.concatenate(list(features)), places, positions)

    def _features(self, file: ImageFile) -> tuple[mx.array, Grid]:
        """Returns an image's features [F,D] and its grid."""
        if file in self._cache:
            self._cache.move_to_end(file)
            return self._cache[file]
        patches, grid = self.processor.patches(file)
        time, rows, columns = grid
        merge = int(self.processor.processor.merge_size)
        features = self.module(mx.array(patches).astype(self.dtype), mx.array([grid]))
        features = mx.stop_gradient(features.astype(self.dtype))
        mx.eval(features)
        found = self._cache[file] = features, (time, rows // merge, columns // merge)
        while (
            sum(each.nbytes for each, _ in self._cache.values()) > CACHE_BYTES
            and len(self._cache) > 1
        ):
            self._cache.popitem(last=False)
        return found


def prepare_vision(
    module: nn.Module, path: Path, dtype: mx.Dtype, max_pixels: int = 0
) -> VisionPart:
    """Loads the vision part from a model folder, in the model's compute dtype. Also changes
    `module`, the model's language part from mlx-lm, so that it accepts image positions. Images are
    scaled down to `max_pixels`, unless that is 0.

    Raises the errors of `load_processor`, and UserError if positions do not fit the module, or if
    weights are missing or do not fit the tower.
    """
    config = read_json(path / "config.json")
    kind = check_family(config, path)
    processor = load_processor(path, config, max_pixels)
    tower = _new_tower(kind, config, path)
    weights = read_tower(path, tower)
    packed = {name.removesuffix(".scales") for name in weights if name.endswith(".scales")}
    if packed:
        stated = config.get("quantization") or {}
        options = {key: stated[key] for key in ("group_size", "bits", "mode") if key in stated}
        nn.quantize(tower, **options, class_predicate=lambda name, layer: name in packed)
    known = named_leaves(tower.parameters()).keys() & weights.keys()
    with user_errors(f"{path}: its images cannot be used", ValueError, why=first_lines):
        use_multimodal_rope(module, mrope_sections(config, path))
        tower.load_weights([(name, weights[name]) for name in known])
    tower.freeze()
    tower.set_dtype(dtype)
    mx.eval(tower.parameters())
    return VisionPart(path, tower, processor, dtype)


def tower_bytes(config: Mapping[str, Any], path: Path, dtype: mx.Dtype) -> int:
    """Returns the size in bytes of the vision tower that a config.json describes, in that dtype. No
    weights are read or computed.
    """
    module = _new_tower(check_family(config, path), config, path)
    return sum(leaf.size for leaf in named_leaves(module.parameters()).values()) * dtype.size


def _new_tower(kind: str, config: Mapping[str, Any], path: Path) -> Any:
    family = mlx_vlm_module(f"models.{kind}")
    # Newer files have the text part's type here, or none.
    stated = copy.deepcopy(config["vision_config"]) | {"model_type": kind}
    kinds = (ValueError, KeyError, TypeError, AttributeError)
    what = f"{path}/config.json: mlx-vlm cannot read vision_config"
    with user_errors(what, *kinds, why=first_lines):
        return family.VisionModel(family.VisionConfig.from_dict(stated))


def read_tower(path: Path, module: Any) -> dict[str, mx.array]:
    """Reads the tower's weights lazily, under mlx-vlm's names without a prefix."""
    found: dict[str, mx.array] = {}
    for file in weight_files(path):
        leaves = cast("dict[str, mx.array]", mx.load(str(file)))
        for prefix in _PREFIXES:
            inside = (name for name in leaves if name.startswith(prefix))
            found |= {name.removeprefix(prefix): leaves[name] for name in inside}
    if not found:
        raise UserError(
            f"{path}: the weights of the vision tower (visual.* or vision_tower.*) are missing; "
            f"was only the language part converted?"
        )
    return module.sanitize(found)
