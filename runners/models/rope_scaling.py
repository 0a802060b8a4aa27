"""A rotary embedding's scaling: from transformers' rope_parameters to mlx-lm's rope_scaling."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from runners.errors import UserError, show

# The types that mlx-lm's `initialize_rope` computes like transformers.
SCALED = frozenset({"default", "linear", "dynamic", "llama3", "yarn", "longrope"})
PLAIN = frozenset({"default"})
_ORIGINAL = "original_max_position_embeddings"


def scaling_keys(
    whole: Mapping[str, Any], config: Mapping[str, Any], module: str, known: frozenset[str]
) -> dict[str, Any] | None:
    """rope_scaling in mlx-lm's spelling; None for no scaling.

    Args:
        whole: rope_parameters, of one type of layer if they differ.
        config: the whole config.json.
        module: mlx-lm's, for messages.
        known: the rope_types that the module computes.

    Raises UserError if the module would compute something else, and if `config` already has a different
    rope_scaling.
    """
    kind = rope_type(whole)
    if kind not in known:
        raise unread(module, f"rope_type = {show(kind)}")
    scaling = None if kind == "default" else _scaling(kind, whole, config, module)
    if config.get("rope_scaling"):
        _check_agreement(as_table(config["rope_scaling"], "rope_scaling"), whole, scaling or {})
    return scaling


def rope_type(table: Mapping[str, Any]) -> str:
    """The type of a table, by its new name or its old one."""
    kind = table.get("rope_type", table.get("type")) or "default"
    if not isinstance(kind, str):
        raise UserError(f"rope_parameters: rope_type: expected a name, found {show(kind)}")
    return kind


def as_table(value: Any, name: str) -> Mapping[str, Any]:
    """The value itself; UserError unless it is a JSON object."""
    if not isinstance(value, Mapping):
        raise UserError(f"{name}: expected an object, found {show(value)}")
    return value


def as_number(value: Any, name: str, *, zero: bool = False) -> Any:
    """The value itself; UserError unless it is a positive number, or 0 if that is allowed."""
    number = -1.0
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # an integer of hundreds of digits
            number = float(value)
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        raise UserError(f"rope_parameters: {name}: expected a positive number, found {show(value)}")
    return value


def unread(module: str, what: str) -> UserError:
    """The error for something that an mlx-lm module does not compute."""
    return UserError(f"rope_parameters: mlx-lm's {module} does not compute {what}")


def _scaling(kind: str, whole: Mapping[str, Any], config: Mapping[str, Any], module: str) -> dict[str, Any]:
    left_out = ("rope_theta", "partial_rotary_factor", "rope_type", "type")
    scaling = {key: value for key, value in whole.items() if key not in left_out and value is not None}
    # Some modules read one name, some the other.
    scaling = {"rope_type": kind, "type": kind, **scaling}
    if kind in ("llama3", "yarn", "longrope"):
        length = scaling.get(_ORIGINAL, config.get("max_position_embeddings"))
        scaling[_ORIGINAL] = as_number(config.get(_ORIGINAL) or length, _ORIGINAL)
    if "factor" in scaling:
        # Whole numbers fail assertions in some modules.
        scaling["factor"] = float(as_number(scaling["factor"], "factor"))
    elif kind == "yarn":
        scaling["factor"] = _growth(config, scaling)
    elif kind != "longrope":
        raise UserError(f"rope_parameters: rope_type = {show(kind)} without factor")
    if kind == "yarn":
        scaling |= _yarn(scaling, module)
    if kind == "longrope":
        _check_longrope(scaling, config, module)
    return scaling


def _yarn(scaling: Mapping[str, Any], module: str) -> dict[str, Any]:
    """The mscale that gives mlx-lm the same factor on attention as transformers.

    With f(m) = 0.1·m·ln(factor) + 1, mlx-lm computes f(mscale or 1) / f(mscale_all_dim or 0). transformers
    takes attention_factor, or f(mscale) / f(mscale_all_dim) where both are given, or f(1).
    """
    if scaling.get("truncate", True) is not True:
        raise unread(module, f"truncate = {show(scaling['truncate'])}")
    stated, other = (
        as_number(scaling.get(name, 0), name, zero=True) for name in ("mscale", "mscale_all_dim")
    )
    slope = 0.1 * math.log(max(scaling["factor"], 1))

    def magnitude(mscale: float) -> float:
        return slope * mscale + 1

    usual = magnitude(stated) / magnitude(other) if stated and other else magnitude(1)
    wanted = as_number(scaling.get("attention_factor", usual), "attention_factor")
    # An explicit mscale of 0 means 0 in mlx-lm.
    if math.isclose(wanted, magnitude(scaling.get("mscale", 1)) / magnitude(other)):
        return {}
    if not slope:
        raise unread(module, f"attention_factor = {show(wanted)} with a factor of 1")
    return {"mscale": (wanted * magnitude(other) - 1) / slope}


def _check_longrope(scaling: Mapping[str, Any], config: Mapping[str, Any], module: str) -> None:
    """mlx-lm takes the factor on attention from the two lengths, or from long_mscale."""
    for name in ("short_factor", "long_factor"):
        if not isinstance(scaling.get(name), list):
            raise UserError(f"rope_parameters: {name}: expected a list, found {show(scaling.get(name))}")
    if scaling.get("long_mscale"):
        return

    def magnitude(factor: float) -> float:
        length = scaling[_ORIGINAL]
        return math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 < length else 1.0

    computed = magnitude(_growth(config, scaling))
    usual = magnitude(scaling["factor"]) if "factor" in scaling else computed
    wanted = as_number(scaling.get("attention_factor", usual), "attention_factor")
    if not math.isclose(wanted, computed, rel_tol=1e-6):
        raise unread(module, f"a factor of {wanted:.4g} on attention (it computes {computed:.4g})")


def _growth(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> float:
    length = as_number(config.get("max_position_embeddings"), "max_position_embeddings")
    return float(length) / float(scaling[_ORIGINAL])


def _check_agreement(scaling: Mapping[str, Any], whole: Mapping[str, Any], built: Mapping[str, Any]) -> None:
    """If a config has both spellings, transformers uses rope_scaling, so they have to agree."""
    same = {"mrope": "default", "su": "longrope"}  # other names of one computation, as far as text goes
    kinds = [same.get(kind, kind) for kind in (rope_type(scaling), rope_type(whole))]
    pairs = [("rope_type", *kinds)] if kinds[0] != kinds[1] else []
    shared = (scaling.keys() & whole.keys()) - {"rope_type", "type"}
    pairs += [(key, scaling[key], whole[key]) for key in sorted(shared)]
    for key, one, other in pairs:
        if one != other and one != built.get(key, other):
            raise UserError(
                f"rope_scaling and rope_parameters disagree: {key} is {show(one)} and {show(other)}; "
                "expected one of the two tables, or both alike"
            )
