"""The policy that samples: quantized weights while their numbers are good, else the learner's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import mlx.core as mx

import grpo_fn as g
from grpo_fn.policy import QuantizedRole, is_quantized
from grpo_fn.trees import Tree
from runners.config.loading import Config
from runners.models.role_quantization import make_quantized_role, unfit_notice

Sample = Callable[[g.Policy, Tree], g.Rollout]


class RolloutRole:
    """The policy that samples, and the weights that it was made from.

    `fallback` is its only state: None, or why the quantized weights were given up. After that the role is the
    learner's policy.
    """

    def __init__(
        self,
        full: g.Policy,
        quantized: QuantizedRole | None = None,
        *,
        name: str = "none",
        limit: float = 0.0,
        vocabulary: int = 0,
    ) -> None:
        """A role in full precision, or a quantized one.

        Args:
            full: the learner's policy.
            quantized: the same model with few-bit weights; None: there is no such role.
            name: its `rollout.quantization`.
            limit: mean |Δ log p| per token, in nats, above which it is given up; 0: never.
            vocabulary: token ids that the model knows; 0: not checked.
        """
        self.full, self._quantized, self._name = full, quantized, name
        self._limit, self._vocabulary = limit, vocabulary
        self.anchor: Tree = None  # the learner's weights that the role's were made from: π_old
        self.fallback: str | None = None
        self._news: list[str] = []
        self.agree: Callable[[str | None], str | None] = lambda fault: fault  # any rank's fault

    @property
    def quantization(self) -> str:
        """The current sampler's quantization: "none" is full precision."""
        return self._name if self._quantized is not None and self.fallback is None else "none"

    @property
    def policy(self) -> g.Policy:
        """The function that samples now."""
        return self._quantized.policy if self._quantized and self.fallback is None else self.full

    @property
    def transform(self) -> Callable[[Tree], Tree] | None:
        """From the learner's parameters to the sampler's; None: they are the same."""
        return self._quantized.transform if self._quantized and self.fallback is None else None

    def decode_as(self, policy: g.Policy) -> None:
        """Sample with this policy from now on: the quantized role with plainer operations."""
        assert self._quantized is not None
        self._quantized = attrs.evolve(self._quantized, policy=policy)

    def sync(self, state: g.TrainState) -> g.TrainState:
        """π_old ← π_θ, rounded again where the role is quantized."""
        self.anchor = state.params
        return g.sync_old(state, self.transform)

    def after_fallback(self, state: g.TrainState) -> g.TrainState:
        """The state with the `old_params` that the role samples with now: after a fallback, unrounded."""
        if self.fallback is None or state.old_params is None:
            return state
        return attrs.evolve(state, old_params=self.anchor)

    def draw(self, sample: Sample, params: Tree) -> g.Rollout:
        """A rollout with the role's parameters; if their numbers fail, repeated in full precision."""
        if self.quantization != "none":
            rollout = sample(self.policy, params)
            fault = self.agree(self._fault(rollout))
            if fault is None:
                return rollout
            self._give_up(f"{fault}; the rollout was sampled again")
        elif self.fallback is None:
            return sample(self.full, params)
        # `params` may be older than the fallback.
        return sample(self.full, self.anchor)

    def judge(self, stats: g.LossStats) -> None:
        """Gives the quantized weights up if the learner found them too far from its own."""
        difference = float(stats.logp_diff_mean)
        if self.quantization != "none" and 0 < self._limit < difference:
            self._give_up(
                f"its log-probs are {difference:.3g} nats a token from the learner's on average, above "
                f"rollout.mismatch_limit = {self._limit:g}"
            )

    def news(self) -> list[str]:
        """The events since the last call, a line each."""
        news, self._news = self._news, []
        return news

    def metrics(self) -> dict[str, str]:
        """Metrics of runs whose sampler is or was quantized."""
        if self._quantized is None:
            return {}
        why = {} if self.fallback is None else {"rollout/fallback": self.fallback}
        return {"rollout/quantization": self.quantization, **why}

    def facts(self) -> dict[str, str | None]:
        """The role's state, for a checkpoint."""
        return {"rollout_fallback": self.fallback}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Continues with the state in a checkpoint's `facts`."""
        self.fallback = facts.get("rollout_fallback")

    def _fault(self, rollout: g.Rollout) -> str | None:
        tokens_bt = rollout.tokens_bt
        finite = mx.isfinite(rollout.logp_bt).all()
        known = (tokens_bt >= 0).all()
        if self._vocabulary:
            known = known & (tokens_bt < self._vocabulary).all()
        if not finite.item():
            return "its log-probs are not finite"
        return None if known.item() else "it drew a token that the model does not have"

    def _give_up(self, reason: str) -> None:
        self._news.append(
            f"sampling continues in full precision: rollout.quantization = {self._name}: {reason}"
        )
        self.fallback = reason


def make_rollout_role(
    config: Config, policy: g.Policy, *, vocabulary: int
) -> tuple[RolloutRole, tuple[str, ...]]:
    """The role that [rollout] asks for, and notices about it.

    Args:
        config: its rollout.quantization is a mode or "none".
        policy: the learner's, with its parameters.
        vocabulary: token ids that the model knows.

    Raises UserError if the model cannot be quantized so.
    """
    rollout = config.rollout
    if rollout.quantization == "none":
        return RolloutRole(policy), ()
    if is_quantized(policy.module):
        # With adapters on packed weights there is nothing to round: the weights are quantized already.
        return RolloutRole(policy), (
            f"rollout.quantization = {rollout.quantization} has no effect: the model's weights are quantized "
            "already, and sampler and learner use the same ones",
        )
    role = make_quantized_role(config, policy, "rollout.quantization", rollout.quantization, rollout.storage)
    rollout_role = RolloutRole(
        policy, role, name=rollout.quantization, limit=rollout.mismatch_limit, vocabulary=vocabulary
    )
    return rollout_role, unfit_notice("rollout.quantization", role)


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
