"""Quantized roles. The weights of the sampler or the reference model can have few bits; the
learner's weights are never rounded.

The linear layers and experts inside the model's blocks are quantized, and optionally embeddings and
head. Norms keep their precision. `dequantized` storage rounds the weights at each sync and computes
with them at full speed; `packed` stores them packed, which needs less memory. Both storages compute
with the same rounded weights.

Each weight can have its own format, which is chosen by the effect of rounding on log-probs, within
a budget of bits.
"""

import copy
from collections.abc import Callable, Mapping

import attrs
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from grpo_fn.checks import check_choice
from grpo_fn.layers import parameters_replaced
from grpo_fn.policy.calibration import Carries, Moments, carries_of, round_calibrated
from grpo_fn.policy.head import HeadSplit
from grpo_fn.policy.layers.model_fixes import is_position_table
from grpo_fn.policy.layers.patched_layers import packed_layer
from grpo_fn.policy.layers.quantized_layers import QuantMode, dequantize, packed_names, quantize
from grpo_fn.policy.policy import Policy
from grpo_fn.trees import Tree, flat, from_names, materialize, named_leaves

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
PROBES = 4  # gradients of the log-probs with random signs
LEVELS = {3: "affine-3", 4: "affine-4", 6: "affine-6", 8: "affine-8"}
GROUP_SIZES = (32, 64, 128)  # for affine modes; the other modes have fixed group sizes


@attrs.frozen(eq=False)
class QuantizedRole:
    """A policy with quantized weights, and the function that computes these from the learner's
    parameters.
    """

    policy: Policy
    # learner params -> this policy's params; for `sync_old`, `sync_ref`
    transform: Callable[[Tree], Tree]
    modes: Mapping[str, QuantMode]  # formats of the quantized weights
    unfit: tuple[str, ...]  # not quantized, because the row length is no multiple of the group size
    # (name, moments, formats, storage) -> the same role, created with these arguments
    remade: Callable[..., "QuantizedRole"]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the quantized weights."""
        return tuple(self.modes)

    def bits(self, params: Tree) -> float:
        """Returns the average bits per quantized weight, including its share of scales; `params`
        determine the sizes.
        """
        sizes = {
            name: leaf.size for name, leaf in named_leaves(params).items() if name in self.modes
        }
        return sum(self.modes[name].bits_stored * size for name, size in sizes.items()) / sum(
            sizes.values()
        )


def quantized_role(
    policy: Policy,
    name: str,
    storage: str = "dequantized",
    *,
    group_size: int = 0,
    head: bool = False,
    moments: Moments | None = None,
    formats: Mapping[str, str] | None = None,
) -> QuantizedRole:
    """Creates a policy for the same model, with quantized weights in its blocks.

    Args:
        policy: the policy with its `params` (before `without_weights()`).
        name: a key of MODES, such as `affine-4`.
        storage: `dequantized` or `packed`.
        group_size: number of weights that share a scale; 0 means the mode's own.
        head: whether embeddings and head are also quantized; if they are tied, they are a single
            matrix.
        moments: see `input_moments`. Weights without moments are rounded to nearest; with None, all
            weights are.
        formats: the formats of weights that do not use `name`; the group size must be the same.

    Raises:
        ValueError: a name is unknown, the mode does not support the group or calibrated rounding,
            the model is already quantized, or none of its weights can be.
    """
    check_choice("storage", storage, STORAGES)
    if policy.params is None:
        raise ValueError(
            "the policy has no weights to quantize: create the role before policy.without_weights()"
        )
    if is_quantized(policy.module):
        raise ValueError(
            "the model's weights are already quantized: both roles then use the same weights"
        )
    leaves = named_leaves(policy.module.parameters())
    dtypes = {leaf_name: policy.compute_dtype or leaf.dtype for leaf_name, leaf in leaves.items()}
    widths = {
        f"{path}.weight": leaves[f"{path}.weight"].shape[-1]
        for path, module in policy.module.named_modules()
        if quantizable(path, module, head)
    }
    del leaves
    policy = attrs.evolve(policy, params=None)

    def made(
        name: str,
        moments: Moments | None = None,
        formats: Mapping[str, str] | None = None,
        storage: str = storage,
    ) -> QuantizedRole:
        mode = quant_mode(name, group_size)
        if moments is not None and mode.mode != "affine":
            raise ValueError(f"calibrated rounding supports only affine formats; found {name}")
        modes = {
            each: quant_mode((formats or {}).get(each, name), group_size)
            for each, width in widths.items()
            if width % mode.group_size == 0
        }
        if not modes:
            raise ValueError(
                f"no weight can be quantized as {name}, because no row's length is a multiple of "
                f"{mode.group_size}"
            )
        carries = carries_of(
            {each: moments[each] for each in modes if each in moments} if moments else {}
        )

        def transform(params: Tree) -> Tree:
            return _transformed(params, modes, carries, storage == "packed", policy.compute_dtype)

        role = attrs.evolve(policy, frozen=transform(policy.frozen) if policy.frozen else {})
        if storage == "packed":
            module = _packed_module(policy.module, modes, dtypes)
            role = attrs.evolve(role, module=module, split=_packed_split(policy.split, modes))
        unfit = tuple(each for each in widths if each not in modes)
        return QuantizedRole(role, transform, modes, unfit, made)

    return made(name, moments, formats)


def quant_mode(name: str, group_size: int = 0) -> QuantMode:
    """Returns the mode with this name, optionally with a different group size (affine modes only).

    Raises:
        ValueError: the name is unknown, or the mode does not support the group.
    """
    check_choice("quantization", name, MODES)
    mode = MODES[name]
    if group_size in (0, mode.group_size):
        return mode
    if mode.mode != "affine":
        raise ValueError(
            f"group_size = {group_size}: the group size of {name} is always {mode.group_size}; "
            f"expected 0"
        )
    if group_size not in GROUP_SIZES:
        raise ValueError(
            f"group_size = {group_size}: mlx packs groups of {', '.join(map(str, GROUP_SIZES))}; "
            "expected one of these, or 0 for the mode's own"
        )
    return attrs.evolve(mode, group_size=group_size)


def is_quantized(module: nn.Module) -> bool:
    """Returns whether any layer's weights are packed."""
    return any(hasattr(part, "bits") for _, part in module.named_modules())


def quantizable(path: str, module: nn.Module, head: bool) -> bool:
    """Returns whether a role rounds this layer's weights, provided that its row length is a
    multiple of the group size.
    """
    from mlx_lm.models.switch_layers import SwitchLinear

    if head and isinstance(module, nn.Embedding):
        return not is_position_table(module)
    inside = head or any(part.isdigit() for part in path.split("."))
    return inside and isinstance(module, nn.Linear | SwitchLinear)


def _packed_module(
    module: nn.Module, modes: Mapping[str, QuantMode], dtypes: Mapping[str, mx.Dtype]
) -> nn.Module:
    """Copies the module's structure without weights; packed layers replace the named layers."""
    with parameters_replaced(module, from_names({name: mx.zeros(()) for name in dtypes})):
        structure = copy.deepcopy(module)
    parts = dict(structure.named_modules())
    paths = {name: name.removesuffix(".weight") for name in modes}
    packed = [
        (path, packed_layer(parts[path], modes[name], dtypes[name])) for name, path in paths.items()
    ]
    structure.update_modules(tree_unflatten(packed))
    return structure


def _packed_split(split: HeadSplit, modes: Mapping[str, QuantMode]) -> HeadSplit:
    """Returns the split for packed weights; the matrix of a packed head consists of several leaves,
    and the head is not a plain product.
    """
    names = [
        packed_names(name, modes[name]) if name in modes else [name] for name in split.trainable
    ]
    weight = None if split.weight in modes else split.weight
    return attrs.evolve(split, trainable=tuple(flat(names)), weight=weight)


def _transformed(
    tree: Tree,
    modes: Mapping[str, QuantMode],
    carries: Carries,
    packed: bool,
    dtype: mx.Dtype | None,
) -> Tree:
    leaves = {
        name: leaf.astype(dtype)
        if dtype is not None and mx.issubdtype(leaf.dtype, mx.floating)
        else leaf
        for name, leaf in named_leaves(tree).items()
    }
    rounded: dict[str, dict[str, mx.array]] = {}
    for mode in dict.fromkeys(modes[name] for name in carries):
        chosen = {name: leaves[name] for name in carries if name in leaves and modes[name] == mode}
        rounded |= round_calibrated(chosen, carries, mode)
    out: dict[str, mx.array] = {}
    for name, leaf in leaves.items():
        if name not in modes:
            out[name] = leaf
            continue
        mode = modes[name]
        parts = rounded[name] if name in rounded else quantize(leaf, mode)
        if packed:
            out |= dict(zip(packed_names(name, mode), parts.values(), strict=True))
        else:
            out[name] = dequantize(parts, mode, leaf.dtype)
    return from_names(out)


def rounding_effects(
    policy: Policy,
    params: Tree,
    role: QuantizedRole,
    tokens_bl: mx.array,
    lengths_b: mx.array,
    key: mx.array,
) -> dict[str, float]:
    """Estimates, to first order, the mean square of the tokens' change in log-prob if a single
    weight matrix is rounded.

    With random signs r, the gradient g of Σ r·log p satisfies E⟨g,δ⟩² = Σ (δ log p)² over the
    tokens for a change δ of a weight. The rows of a weight are treated as independent, which
    requires fewer probes.

    Args:
        policy, params: the model in full precision.
        role: the rounding, with dequantized storage.
        tokens_bl, lengths_b: rows of the model's own tokens, padded on the right.
        key: the random key for the signs.
    """
    leaves = {**named_leaves(policy.cast(policy.frozen)), **named_leaves(policy.cast(params))}
    rounded = {**named_leaves(role.policy.frozen), **named_leaves(role.transform(params))}
    weights = {name: leaves[name] for name in role.names}
    trained = named_leaves(params).keys()
    counts_bt = mx.arange(1, tokens_bl.shape[1])[None] < lengths_b[:, None]

    def signed(weights: dict[str, mx.array], signs_bt: mx.array) -> mx.array:
        merged = leaves | weights
        full = from_names({name: merged[name] for name in trained})
        frozen = from_names({name: leaf for name, leaf in merged.items() if name not in trained})
        hidden_btd = policy.hidden(full, tokens_bl[:, :-1], frozen)
        head = policy.head(full, frozen)
        z_nv = head.function(head.params, hidden_btd.reshape(-1, hidden_btd.shape[-1])).astype(
            mx.float32
        )
        targets_n1 = tokens_bl[:, 1:].reshape(-1, 1)
        logp_n = mx.take_along_axis(z_nv, targets_n1, axis=-1)[:, 0] - mx.logsumexp(z_nv, axis=-1)
        return (logp_n * signs_bt.reshape(-1)).sum()

    sums = dict.fromkeys(weights, 0.0)
    for probe in mx.random.split(key, PROBES):
        signs_bt = (
            mx.where(mx.random.bernoulli(0.5, counts_bt.shape, key=probe), 1.0, -1.0) * counts_bt
        )
        gradients = mx.grad(signed)(weights, signs_bt)
        changes = {name: (rounded[name] - weights[name]) * gradients[name] for name in weights}
        found = {
            n: mx.square(change.astype(mx.float32).sum(axis=-1)).sum()
            for n, change in changes.items()
        }
        materialize(found)
        for name, effect in found.items():
            sums[name] += float(effect) / (PROBES * float(counts_bt.sum()))
    return sums


def formats_within(
    effects: Mapping[str, float],
    sizes: Mapping[str, int],
    bits: int,
    group_size: int,
    budget: float,
) -> dict[str, str]:
    """Chooses a format for each weight that minimizes the sum of effects within an average of
    `budget` bits.

    An effect is assumed to decrease fourfold with each bit. Bits are assigned where they help most
    relative to their size.

    Args:
        effects: the effect of rounding each weight to `bits` bits. sizes: the number of entries in
            each weight.
        group_size: number of weights that share a scale and a bias of 16 bits each.
        budget: average bits per weight, including scales and biases.

    Raises ValueError if not even the coarsest format fits the budget.
    """
    shared = 32 / group_size
    levels = list(LEVELS)
    chosen = dict.fromkeys(effects, 0)
    left = (budget - shared - levels[0]) * sum(sizes[name] for name in effects)
    if left < 0:
        raise ValueError(f"budget: expected at least {levels[0] + shared:g} bits, found {budget:g}")

    def gain(name: str) -> float:
        now, then = levels[chosen[name]], levels[chosen[name] + 1]
        return (
            effects[name]
            * (4.0 ** (bits - now) - 4.0 ** (bits - then))
            / (sizes[name] * (then - now))
        )

    open_names = set(effects)
    while open_names:
        name = max(sorted(open_names), key=gain)
        cost = (levels[chosen[name] + 1] - levels[chosen[name]]) * sizes[name]
        if cost <= left:
            left -= cost
            chosen[name] += 1
        if cost > left or chosen[name] == len(levels) - 1:
            open_names.discard(name)
    return {name: LEVELS[levels[level]] for name, level in chosen.items()}
