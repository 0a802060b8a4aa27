"""The vision-language models that take images, and the mlx-vlm processor of each."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runners.errors import UserError, first_line, show
from runners.machine.versions import install_hint

FAMILIES: dict[str, str] = {  # model_type -> mlx-vlm's processor, in its module processing_{model_type}
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
}


def has_vision(config: Mapping[str, Any]) -> bool:
    """Whether a config.json has a vision part."""
    return bool(config.get("vision_config") or config.get("img_processor"))


def check_family(config: Mapping[str, Any], path: Path) -> str:
    """The model_type of a config.json whose model takes images; UserError, with a list, for any other."""
    kind = config.get("model_type")
    known = f"model_type {' and '.join(FAMILIES)}"
    if kind in FAMILIES and has_vision(config):
        return str(kind)
    if not has_vision(config):
        raise UserError(
            f"{path}: config.json has no vision_config; prompts with images need a model of {known}"
        )
    raise UserError(
        f"{path}: prompts with images: expected a model of {known}, found model_type {show(kind)} "
        '(data.image = "" trains its language part on text, where mlx-lm knows it)'
    )


def mrope_sections(config: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    """How many frequencies encode time, row and column, from config.json; UserError if they are missing."""
    for table in (config, config.get("text_config") or {}):
        for key in ("rope_scaling", "rope_parameters"):
            found = (table.get(key) or {}).get("mrope_section")
            if isinstance(found, list) and all(isinstance(number, int) for number in found):
                return tuple(found)
    raise UserError(f"{path}/config.json: rope_scaling has no mrope_section, a list of three integers")


def with_text_keys(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """A config.json with the text part's keys also at its root, where mlx-vlm reads them for these families.

    Without a separate text part it is unchanged. UserError without `mrope_section`.
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


def mlx_vlm_module(name: str, what: str = "prompts with images need") -> Any:
    """A module of mlx-vlm, such as "models.qwen2_vl". UserError, which begins with `what`, if mlx-vlm is not
    installed."""
    try:
        return importlib.import_module(f"mlx_vlm.{name}")
    except ImportError as error:
        missing = (error.name or "").partition(".")[0] == "mlx_vlm"
        reason = "" if missing else f" ({first_line(error)})"
        raise UserError(f"{what} mlx-vlm: {install_hint('vlm')}{reason}") from error
