"""A model's quantized form, as [rollout] and [loss] ask for it."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

import grpo_fn as g
from grpo_fn.policy import (
    MODES,
    Moments,
    QuantizedRole,
    added,
    folded,
    input_moments,
    quantized_role,
)
from grpo_fn.trees import Tree
from runners.config.loading import Config
from runners.errors import UserError

CALIBRATED_BITS = 6  # rounding to nearest is near enough with more
SLICE_TOKENS, CALIBRATION_TOKENS = 4096, 16_384  # tokens of a pass for the moments, and of all
Calibration = Callable[[Tree, g.Batch], Moments]


def make_quantized_role(config: Config, policy: g.Policy, key: str, name: str, storage: str) -> QuantizedRole:
    """A quantized policy with the config's group size. UserError, at `key`, if that is impossible."""
    try:
        return quantized_role(
            policy,
            name,
            storage,
            group_size=config.rollout.group_size_of(name),
            head=config.rollout.quantize_head,
        )
    except ValueError as error:
        raise UserError(f"{config.where(key)}: {error}") from error


def is_calibrated(config: Config, name: str) -> bool:
    """Whether weights of that format are rounded with their inputs' moments: affine ones of few bits, and
    without images, whose features the moments would lack."""
    few = name.startswith("affine") and MODES[name].bits <= CALIBRATED_BITS
    return few and config.rollout.calibration == "activations" and not config.data.image


def calibration_of(policy: g.Policy, role: QuantizedRole) -> Calibration:
    """The function that gives the moments of a role's layers over rows of a batch, as many as are needed."""
    group = role.mode.group_size

    def moments(params: Tree, batch: g.Batch) -> Moments:
        lengths_b = _lengths(batch)
        rows = max(1, SLICE_TOKENS // batch.tokens_bl.shape[1])
        found: dict[str, mx.array] = {}
        tokens = 0
        for start in range(0, lengths_b.shape[0], rows):
            part = slice(start, start + rows)
            some = input_moments(policy, params, batch.tokens_bl[part], lengths_b[part], role.names, group)
            found = added(found, some)
            tokens += int(lengths_b[part].sum())
            if tokens >= CALIBRATION_TOKENS:
                break
        return folded(found)

    return moments


def _lengths(batch: g.Batch) -> mx.array:
    """Tokens of each row up to the last one that counts."""
    counted_bt = mx.arange(1, batch.mask_bt.shape[1] + 1) * batch.mask_bt
    return batch.prompt_lengths_b + counted_bt.max(axis=1)


def unfit_notice(key: str, role: QuantizedRole) -> tuple[str, ...]:
    """A line on how many weights keep their precision because no group fits their rows."""
    if not role.unfit:
        return ()
    count = len(role.unfit)
    return (
        f"{key}: {count} of {count + len(role.names)} weights keep full precision, as their rows are no "
        f"multiple of the group (the first: {role.unfit[0]}); a smaller rollout.group_size may fit them",
    )
