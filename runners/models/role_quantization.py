"""A model's quantized form, as [rollout] and [loss] ask for it."""

from __future__ import annotations

import grpo_fn as g
from grpo_fn.policy import QuantizedRole, quantized_role
from runners.config.loading import Config
from runners.errors import UserError


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


def unfit_notice(key: str, role: QuantizedRole) -> tuple[str, ...]:
    """A line on how many weights keep their precision because no group fits their rows."""
    if not role.unfit:
        return ()
    count = len(role.unfit)
    return (
        f"{key}: {count} of {count + len(role.names)} weights keep full precision, as their rows are no "
        f"multiple of the group (the first: {role.unfit[0]}); a smaller rollout.group_size may fit them",
    )
