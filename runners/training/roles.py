"""The policy of the KL term."""

from __future__ import annotations

from collections.abc import Callable

import attrs

import grpo_fn as g
from grpo_fn.trees import Tree
from runners.config.loading import Config
from runners.models.role_quantization import make_quantized_role, unfit_notice


@attrs.frozen(eq=False)
class ReferenceRole:
    """The policy of the KL term, and how its parameters are made from the learner's."""

    policy: g.Policy | None  # None: the learner's own function
    transform: Callable[[Tree], Tree] | None  # None: the same parameters
    notices: tuple[str, ...] = ()

    def params(self, params: Tree) -> Tree:
        """The reference's parameters."""
        return params if self.transform is None else self.transform(params)


def make_reference_role(config: Config, policy: g.Policy) -> ReferenceRole:
    """The role that loss.ref_quantization asks for; `policy` holds the parameters.

    Raises UserError if the model cannot be quantized so.
    """
    key, name = "loss.ref_quantization", config.loss.ref_quantization
    if name == "none":
        return ReferenceRole(None, None)
    role = make_quantized_role(config, policy, key, name, config.loss.ref_storage)
    return ReferenceRole(role.policy, role.transform, unfit_notice(key, role))
