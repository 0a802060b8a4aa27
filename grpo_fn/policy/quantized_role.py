"""Quantized roles: the sampler, or the reference, may have few-bit weights; the learner keeps its own.

The linear layers and experts inside the model's blocks are quantized, and embeddings and head if asked for.
Norms keep their precision. `dequantized` storage rounds the weights at each sync and computes with them at
full speed; `packed` keeps them small (see `packed`). Both compute with the same rounded weights.
"""

import copy
from collections.abc import Callable

import attrs
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from grpo_fn.checks import check_choice
from grpo_fn.layers import parameters_replaced
from grpo_fn.policy.head import HeadSplit
from grpo_fn.policy.layers.learned_positions import is_position_table
from grpo_fn.policy.layers.patched_layers import packed_layer
from grpo_fn.policy.layers.quantized_layers import (
    QuantMode,
    dequantize,
    packed_names,
    quantize,
)
from grpo_fn.policy.policy import Policy
from grpo_fn.trees import Tree, from_names, named_leaves

MODES: dict[str, QuantMode] = {
    "affine-8": QuantMode("affine", 8, 64),
    "affine-6": QuantMode("affine", 6, 64),
    "affine-4": QuantMode("affine", 4, 64),
    "affine-3": QuantMode("affine", 3, 64),
    "mxfp8": QuantMode("mxfp8", 8, 32),
    "mxfp4": QuantMode("mxfp4", 4, 32),
    "nvfp4": QuantMode("nvfp4", 4, 16),
}
STORAGES = ("dequantized", "packed")
GROUP_SIZES = (32, 64, 128)  # of affine modes; the other modes have fixed groups


@attrs.frozen(eq=False)
class QuantizedRole:
    """A policy with quantized weights, and how to fill it from the learner's parameters."""

    policy: Policy
    transform: Callable[[Tree], Tree]  # learner params -> this policy's params; for `sync_old`, `sync_ref`
    names: tuple[str, ...]  # the weights that are quantized
    unfit: tuple[str, ...]  # those that keep their precision, because their rows are no multiple of the group


def quantized_role(
    policy: Policy,
    name: str,
    storage: str = "dequantized",
    *,
    group_size: int = 0,
    head: bool = False,
) -> QuantizedRole:
    """A policy of the same model whose block weights are quantized.

    Args:
        policy: with its `params` (before `without_weights()`).
        name: a key of MODES, such as `affine-4`.
        storage: `dequantized` or `packed`.
        group_size: weights that share a scale; 0: the mode's own.
        head: embeddings and head too; tied ones are one matrix.

    Raises:
        ValueError: a name is unknown, the mode has no such group, the model is quantized already, or none of
            its weights can be.
    """
    check_choice("storage", storage, STORAGES)
    mode = quant_mode(name, group_size)
    if policy.params is None:
        raise ValueError(
            "the policy has no weights left to quantize: make the role before policy.without_weights()"
        )
    if is_quantized(policy.module):
        raise ValueError("the model's weights are quantized already: both roles then run the same ones")
    leaves = named_leaves(policy.module.parameters())
    wanted = [
        f"{path}.weight" for path, module in policy.module.named_modules() if quantizable(path, module, head)
    ]
    names = tuple(name for name in wanted if leaves[name].shape[-1] % mode.group_size == 0)
    if not names:
        raise ValueError(
            f"no weight can be quantized as {name}: none has rows in multiples of {mode.group_size}"
        )
    packed = storage == "packed"
    dtype = policy.compute_dtype

    def transform(params: Tree) -> Tree:
        return _transformed(params, names, mode, packed, dtype)

    role = attrs.evolve(policy, params=None, frozen=transform(policy.frozen) if policy.frozen else {})
    if packed:
        module = _packed_module(policy.module, names, leaves, mode, dtype)
        role = attrs.evolve(role, module=module, split=_packed_split(policy.split, names, mode))
    return QuantizedRole(role, transform, names, tuple(name for name in wanted if name not in names))


def quant_mode(name: str, group_size: int = 0) -> QuantMode:
    """The mode of that name, with another group size if one is given (only affine modes).

    Raises:
        ValueError: the name is unknown, or the mode has no such group.
    """
    check_choice("quantization", name, MODES)
    mode = MODES[name]
    if group_size in (0, mode.group_size):
        return mode
    if mode.mode != "affine":
        raise ValueError(
            f"group_size = {group_size}: {name} has groups of {mode.group_size} by definition; expected 0"
        )
    if group_size not in GROUP_SIZES:
        raise ValueError(
            f"group_size = {group_size}: mlx packs groups of {', '.join(map(str, GROUP_SIZES))}; expected "
            "one of these, or 0 for the mode's own"
        )
    return attrs.evolve(mode, group_size=group_size)


def is_quantized(module: nn.Module) -> bool:
    """Whether any layer's weights are packed."""
    return any(hasattr(part, "bits") for _, part in module.named_modules())


def quantizable(path: str, module: nn.Module, head: bool) -> bool:
    """Whether a role rounds this layer's weights, if its rows are multiples of the group."""
    from mlx_lm.models.switch_layers import SwitchLinear

    if head and isinstance(module, nn.Embedding):
        return not is_position_table(module)
    inside = head or any(part.isdigit() for part in path.split("."))
    return inside and isinstance(module, nn.Linear | SwitchLinear)


def _packed_module(
    module: nn.Module, names: tuple[str, ...], leaves: Tree, mode: QuantMode, dtype: mx.Dtype | None
) -> nn.Module:
    """A copy of the module's structure, without weights, with packed layers in place of the named ones."""
    with parameters_replaced(module, from_names({name: mx.zeros(()) for name in leaves})):
        structure = copy.deepcopy(module)
    parts = dict(structure.named_modules())
    paths = {name: name.removesuffix(".weight") for name in names}
    structure.update_modules(
        tree_unflatten(
            [
                (path, packed_layer(parts[path], mode, dtype or leaves[name].dtype))
                for name, path in paths.items()
            ]
        )
    )
    return structure


def _packed_split(split: HeadSplit, names: tuple[str, ...], mode: QuantMode) -> HeadSplit:
    """The split for packed weights: a packed head's matrix is several leaves and no plain product."""
    trainable = tuple(
        leaf for name in split.trainable for leaf in (packed_names(name, mode) if name in names else [name])
    )
    return attrs.evolve(split, trainable=trainable, weight=None if split.weight in names else split.weight)


def _transformed(
    tree: Tree, names: tuple[str, ...], mode: QuantMode, packed: bool, dtype: mx.Dtype | None
) -> Tree:
    wanted = set(names)
    out: dict[str, mx.array] = {}
    for name, leaf in named_leaves(tree).items():
        compute = dtype if dtype is not None and mx.issubdtype(leaf.dtype, mx.floating) else leaf.dtype
        leaf = leaf.astype(compute)
        if name not in wanted:
            out[name] = leaf
            continue
        parts = quantize(leaf, mode)
        if packed:
            out |= dict(zip(packed_names(name, mode), parts.values(), strict=True))
        else:
            out[name] = dequantize(parts, mode, compute)
    return from_names(out)
