"""Quantizes a model for its roles, as [rollout] and [loss] configure."""

from collections import Counter
from collections.abc import Mapping

import mlx.core as mx

import grpo_fn as g
from grpo_fn.policy import (
    MODES,
    Moments,
    QuantizedRole,
    added,
    folded,
    formats_within,
    input_moments,
    quant_mode,
    quantized_role,
    rounding_effects,
)
from grpo_fn.trees import Tree, named_leaves
from runners.config.loading import Config
from runners.errors import user_errors

CALIBRATED_BITS = 6  # with more bits, rounding to nearest is accurate enough
SLICE_TOKENS = 4096  # tokens per pass that computes moments
CALIBRATION_TOKENS = 16_384  # tokens in all passes
BUDGET_TOKENS = 1024  # tokens whose logits are computed at once, to measure the effect of rounding


def make_quantized_role(
    config: Config, policy: g.Policy, key: str, storage: str, notices: list[str]
) -> QuantizedRole | None:
    """Returns the quantized role that `rollout.quantization` or `loss.ref_quantization` configures,
    or None.

    A notice states how many weights keep their precision because the group size does not divide
    their row length. Raises UserError, with the key, if the policy's model cannot be quantized in
    this way.
    """
    section, _, option = key.partition(".")
    name = getattr(getattr(config, section), option)
    if name == "none":
        return None
    with user_errors(config.where(key), ValueError):
        role = quantized_role(
            policy,
            name,
            storage,
            group_size=config.rollout.group_size_of(name),
            head=config.rollout.quantize_head,
        )
    count = len(role.unfit)
    if count:
        notices.append(
            f"{key}: {count} of {count + len(role.names)} weights keep full precision, because "
            f"their row length is not a multiple of the group size (the first: {role.unfit[0]}); "
            f"a smaller rollout.group_size may divide it"
        )
    return role


def is_calibrated(config: Config, name: str) -> bool:
    """Returns whether weights in that format are rounded using their inputs' moments. Only affine
    formats of few bits use moments, and runs with images never use them, because the moments would
    not include image features.
    """
    few = name.startswith("affine") and MODES[name].bits <= CALIBRATED_BITS
    return few and config.rollout.calibration == "activations" and not config.data.image


def measured_moments(
    policy: g.Policy, role: QuantizedRole, params: Tree, batch: g.Batch
) -> Moments:
    """Computes the input moments for a role's layers, over as many rows of a batch as are
    needed.
    """
    group = next(iter(role.modes.values())).group_size
    lengths_b = _lengths(batch)
    rows = max(1, SLICE_TOKENS // batch.tokens_bl.shape[1])
    found: dict[str, mx.array] = {}
    tokens = 0
    for start in range(0, lengths_b.shape[0], rows):
        part = slice(start, start + rows)
        found = added(
            found,
            input_moments(
                policy, params, batch.tokens_bl[part], lengths_b[part], role.names, group
            ),
        )
        tokens += int(lengths_b[part].sum())
        if tokens >= CALIBRATION_TOKENS:
            break
    return folded(found)


def budgeted_formats(
    config: Config,
    policy: g.Policy,
    role: QuantizedRole,
    params: Tree,
    batch: g.Batch,
    moments: Moments,
) -> dict[str, str]:
    """Chooses the sampler's formats within rollout.bits_budget from a batch and its moments."""
    rows = max(1, BUDGET_TOKENS // batch.tokens_bl.shape[1])
    mode = next(iter(role.modes.values()))
    plain = role.remade(config.rollout.quantization, moments, storage="dequantized")
    tokens_bl, lengths_b = batch.tokens_bl[:rows], _lengths(batch)[:rows]
    key = mx.random.key(config.run.seed)
    effects = rounding_effects(policy, params, plain, tokens_bl, lengths_b, key)
    leaves = named_leaves(params) | named_leaves(policy.frozen)
    sizes = {each: leaves[each].size for each in effects}
    return formats_within(effects, sizes, mode.bits, mode.group_size, config.rollout.bits_budget)


def formats_line(config: Config, formats: Mapping[str, str], policy: g.Policy, params: Tree) -> str:
    """Returns a line with the number of weights in each rollout.bits_budget format, and their
    average bits.
    """
    leaves = named_leaves(params) | named_leaves(policy.frozen)
    bits = {
        name: quant_mode(form, config.rollout.group_size).bits_stored
        for name, form in formats.items()
    }
    mean = sum(bits[name] * leaves[name].size for name in bits) / sum(
        leaves[name].size for name in bits
    )
    counts = ", ".join(f"{n} in {form}" for form, n in sorted(Counter(formats.values()).items()))
    return (
        f"rollout.bits_budget = {config.rollout.bits_budget:g}: {mean:.3g} bits on average; "
        f"weights: {counts}"
    )


def _lengths(batch: g.Batch) -> mx.array:
    """Returns each row's number of tokens up to the last unmasked one."""
    return batch.prompt_lengths_b + (mx.arange(1, batch.mask_bt.shape[1] + 1) * batch.mask_bt).max(
        axis=1
    )
