"""Quantized roles: the policy that rolls out may have few-bit weights; the learner keeps its own.

What is quantized: the linear layers inside the model's blocks. Embeddings, norms and the head keep their
precision. `dequantized` storage rounds the weights once a sync and computes at full speed with them; `packed`
keeps them small and computes with mlx's quantized products. Both sample from the same rounded weights.
"""

import copy
from collections.abc import Callable

import attrs
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from grpo_fn.guards import check_choice
from grpo_fn.policy import Policy
from grpo_fn.trees import Tree, from_names, named_leaves


@attrs.frozen
class QuantMode:
    """One of mlx's quantized formats."""

    mode: str  # affine | mxfp4 | mxfp8 | nvfp4
    bits: int
    group_size: int  # weights that share a scale


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


@attrs.frozen(eq=False)
class QuantizedRole:
    """A policy with quantized weights, and how to fill it from the learner's parameters."""

    policy: Policy
    transform: Callable[[Tree], Tree]  # learner params -> this policy's params; for `sync_old`
    names: tuple[str, ...]  # the weights that are quantized


def quantize(weight: mx.array, mode: QuantMode) -> dict[str, mx.array]:
    """A matrix [out,in] as packed weights, scales and, in affine modes, biases."""
    packed = mx.quantize(weight, group_size=mode.group_size, bits=mode.bits, mode=mode.mode)
    return dict(zip(("weight", "scales", "biases"), packed, strict=False))


def dequantize(packed: dict[str, mx.array], mode: QuantMode, dtype: mx.Dtype) -> mx.array:
    """The matrix that `quantize` stands for."""
    return mx.dequantize(
        packed["weight"],
        packed["scales"],
        packed.get("biases"),
        group_size=mode.group_size,
        bits=mode.bits,
        mode=mode.mode,
        dtype=dtype,
    )


def quantized_role(policy: Policy, name: str, storage: str = "dequantized") -> QuantizedRole:
    """A policy of the same model whose block weights are quantized.

    Args:
        policy: with its `params` (not yet a `skeleton()`).
        name: a key of MODES, such as `affine-4`.
        storage: `dequantized` or `packed`.

    Raises:
        ValueError: a name is unknown, the model is quantized already, or no weight can be.
    """
    check_choice("quantization", name, MODES)
    check_choice("storage", storage, STORAGES)
    mode = MODES[name]
    if policy.params is None:
        raise ValueError("a skeleton has no weights left to quantize: make the role before policy.skeleton()")
    if any(hasattr(module, "bits") for _, module in policy.module.named_modules()):
        raise ValueError("the model's weights are quantized already: both roles then run the same ones")
    leaves = named_leaves(policy.module.parameters())
    names = tuple(
        f"{path}.weight"
        for path, module in policy.module.named_modules()
        if isinstance(module, nn.Linear)
        and any(part.isdigit() for part in path.split("."))
        and leaves[f"{path}.weight"].shape[-1] % mode.group_size == 0
    )
    if not names:
        raise ValueError(
            f"no weight can be quantized as {name}: none has rows in multiples of {mode.group_size}"
        )
    packed = storage == "packed"

    def transform(params: Tree) -> Tree:
        return _transformed(params, names, mode, packed, policy.compute_dtype)

    frozen = transform(policy.frozen) if policy.frozen else {}
    module = _packed_module(policy.module, names, leaves, mode) if packed else policy.module
    role = attrs.evolve(policy, module=module, params=None, frozen=frozen)
    return QuantizedRole(role, transform, names)


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
            stem = name.removesuffix("weight")
            out |= {stem + part: array for part, array in parts.items()}
        else:
            out[name] = dequantize(parts, mode, compute)
    return from_names(out)


def _packed_module(
    module: nn.Module, names: tuple[str, ...], leaves: dict[str, mx.array], mode: QuantMode
) -> nn.Module:
    """A copy of the module's structure, without weights, with quantized layers in place."""
    saved = module.parameters()
    module.update(from_names({name: mx.zeros(()) for name in leaves}))
    try:
        structure = copy.deepcopy(module)
    finally:
        module.update(saved)
    replaced = []
    for name in names:
        path = name.removesuffix(".weight")
        out_size, in_size = leaves[name].shape
        layer = nn.QuantizedLinear(
            in_size, out_size, f"{path}.bias" in leaves, mode.group_size, mode.bits, mode.mode
        )
        layer.update({key: mx.zeros(()) for key in layer.parameters()})
        replaced.append((path, layer))
    structure.update_modules(tree_unflatten(replaced))
    return structure
