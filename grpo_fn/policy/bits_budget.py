"""Bits where they are needed: each weight's format by what its rounding does to log-probs, in a budget."""

from collections.abc import Mapping

import mlx.core as mx

from grpo_fn.policy.policy import Policy
from grpo_fn.policy.quantized_role import QuantizedRole
from grpo_fn.trees import Tree, from_names, materialize, named_leaves

PROBES = 4  # gradients of the log-probs with random signs
LEVELS = {3: "affine-3", 4: "affine-4", 6: "affine-6", 8: "affine-8"}


def rounding_effects(
    policy: Policy, params: Tree, role: QuantizedRole, tokens_bl: mx.array, lengths_b: mx.array, key: mx.array
) -> dict[str, float]:
    """The mean square of a token's change in log-prob if one weight alone is rounded, to first order.

    With random signs r the gradient g of Σ r·log p gives E⟨g,δ⟩² = Σ (δ log p)² over the tokens, for the
    change δ of a weight. The rows of a weight are taken as independent, which needs fewer probes.

    Args:
        policy, params: in full precision.
        role: its rounding, with dequantized storage.
        tokens_bl, lengths_b: rows of the model's own tokens, padded on the right.
        key: of the signs.
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
        z_nv = head.function(head.params, hidden_btd.reshape(-1, hidden_btd.shape[-1])).astype(mx.float32)
        targets_n1 = tokens_bl[:, 1:].reshape(-1, 1)
        logp_n = mx.take_along_axis(z_nv, targets_n1, axis=-1)[:, 0] - mx.logsumexp(z_nv, axis=-1)
        return (logp_n * signs_bt.reshape(-1)).sum()

    sums = dict.fromkeys(weights, 0.0)
    for probe in mx.random.split(key, PROBES):
        signs_bt = mx.where(mx.random.bernoulli(0.5, counts_bt.shape, key=probe), 1.0, -1.0) * counts_bt
        gradients = mx.grad(signed)(weights, signs_bt)
        found = {
            name: mx.square(
                ((rounded[name] - weights[name]) * gradient).astype(mx.float32).sum(axis=-1)
            ).sum()
            for name, gradient in gradients.items()
        }
        materialize(found)
        for name, effect in found.items():
            sums[name] += float(effect) / (PROBES * float(counts_bt.sum()))
    return sums


def formats_within(
    effects: Mapping[str, float], sizes: Mapping[str, int], bits: int, group_size: int, budget: float
) -> dict[str, str]:
    """The format of each weight, so that all effects together are least within an average of `budget` bits.

    An effect is taken to shrink fourfold with each bit. Bits go where they help most for their size.

    Args:
        effects: of rounding each weight to `bits` bits; sizes: how many numbers each has.
        group_size: weights that share a scale and a bias of 16 bits each.
        budget: with these.

    Raises ValueError if not even the coarsest format fits.
    """
    shared, levels = 32 / group_size, list(LEVELS)
    chosen = dict.fromkeys(effects, 0)
    left = (budget - shared - levels[0]) * sum(sizes[name] for name in effects)
    if left < 0:
        raise ValueError(f"budget: expected at least {levels[0] + shared:g} bits, found {budget:g}")

    def gain(name: str) -> float:
        now, then = levels[chosen[name]], levels[chosen[name] + 1]
        return effects[name] * (4.0 ** (bits - now) - 4.0 ** (bits - then)) / (sizes[name] * (then - now))

    open_names = set(effects)
    while open_names:
        name = max(sorted(open_names), key=gain)
        cost = (levels[chosen[name] + 1] - levels[chosen[name]]) * sizes[name]
        if cost <= left:
            left, chosen[name] = left - cost, chosen[name] + 1
        if cost > left or chosen[name] == len(levels) - 1:
            open_names.discard(name)
    return {name: LEVELS[levels[level]] for name, level in chosen.items()}
