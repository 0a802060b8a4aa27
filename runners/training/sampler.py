"""Defines `Sampler`, the state of the sampler that produces a run's completions.

The sampler uses the learner's weights, in full precision or rounded to few bits. If a format is too
coarse, the sampler switches to a finer format, and finally to full precision.
"""

from collections.abc import Mapping

import attrs

import grpo_fn as g
from grpo_fn.policy import Moments, QuantizedRole
from grpo_fn.trees import Tree
from runners.config import rules
from runners.config.loading import Config
from runners.engines.engine import Weights
from runners.models.role_quantization import is_calibrated

# The next finer format for each format; the last format is followed by full precision.
FINER = {
    "affine-3": "affine-4",
    "affine-4": "affine-6",
    "affine-6": "affine-8",
    "mxfp4": "mxfp8",
    "nvfp4": "mxfp8",
}
SAMPLE_SIZE = 0.5  # effective sample size below which a format is too coarse
FULL = "none"


@attrs.frozen(eq=False, kw_only=True)
class Sampler:
    """The current sampler of a run."""

    version: int = rules.key(0, "the update that produced its weights", "0 <= x <= 1e18")
    format: str = FULL  # the weights' format; finer than the config's if that was too coarse
    # formats of the weights that differ from `format`, by rollout.bits_budget
    formats: Mapping[str, str] | None = None
    moments: Moments | None = None  # moments of the layers' inputs, for calibrated rounding
    fallback: str | None = None  # why few-bit weights were abandoned
    rows: int = rules.key(
        0,
        "number of completions decoded together, reduced after memory has run out; 0: all",
        ">= 0",
    )
    # How the weights are rounded; None: full precision, always or until there are `moments`.
    role: QuantizedRole | None = attrs.field(
        default=None, metadata={"unsaved": "it is created again from format, formats and moments"}
    )

    @property
    def quantization(self) -> str:
        """The format to which the current weights are quantized; "none" means full precision."""
        return FULL if self.role is None else self.format

    def metrics(self) -> dict[str, str]:
        """Returns the metrics of the sampler. They are empty if its weights have never been
        quantized.
        """
        if self.format == FULL:
            return {}
        why = {} if self.fallback is None else {"rollout/fallback": self.fallback}
        return {"rollout/quantization": self.quantization, **why}


def first_sampler(config: Config, quantized: QuantizedRole | None) -> Sampler:
    """Returns the initial sampler. With calibrated rounding, it starts in full precision."""
    rows = config.rollout.max_batch
    if quantized is None:
        return Sampler(rows=rows)
    name = config.rollout.quantization
    return Sampler(format=name, rows=rows, role=None if is_calibrated(config, name) else quantized)


def rounded_as(
    sampler: Sampler,
    quantized: QuantizedRole,
    name: str,
    moments: Moments | None = None,
    formats: Mapping[str, str] | None = None,
) -> Sampler:
    """Returns the sampler after rounding its weights to this format, or each weight to its own
    format in `formats`.

    `quantized` is the role that was checked at the start; the results of this check apply to every
    format.
    """
    made = quantized.remade(name, moments, formats)
    new = made.policy
    policy = attrs.evolve(quantized.policy, module=new.module, frozen=new.frozen, split=new.split)
    role = attrs.evolve(made, policy=policy)
    return attrs.evolve(sampler, format=name, moments=moments, formats=formats, role=role)


def restored(sampler: Sampler, config: Config, quantized: QuantizedRole | None) -> Sampler:
    """Creates the role of a sampler that was read from a checkpoint, and returns the complete
    sampler.
    """
    if quantized is None or sampler.fallback is not None:
        return sampler
    name = config.rollout.quantization
    if is_calibrated(config, name) and sampler.moments is None:
        return sampler
    moments = sampler.moments if is_calibrated(config, sampler.format) else None
    if sampler.format == name and moments is None:
        return attrs.evolve(sampler, role=quantized)
    made = rounded_as(sampler, quantized, sampler.format, moments, sampler.formats)
    return attrs.evolve(made, moments=sampler.moments)


def given_up(sampler: Sampler, reason: str) -> Sampler:
    """Returns the sampler after switching it permanently to full precision."""
    return attrs.evolve(sampler, fallback=reason, role=None)


def fallback_line(sampler: Sampler) -> str:
    """Returns a message that the sampler has switched to full precision, with the reason."""
    return f"sampling continues in full precision: {sampler.format}: {sampler.fallback}"


def judged(
    sampler: Sampler, stats: g.LossStats, quantized: QuantizedRole | None, config: Config
) -> tuple[Sampler, str | None]:
    """Checks whether the sampler's format is too coarse, from an update's statistics.

    If the importance weights π/μ are too uneven, or if KL(μ ‖ π), in nats per token, exceeds
    rollout.mismatch_limit, the format is too coarse. In that case, returns the sampler in a finer
    format, or finally in full precision, and a message. Otherwise, returns the same sampler and
    None.
    """
    limit = config.rollout.mismatch_limit
    if sampler.role is None or quantized is None or not limit or not stats.num_tokens.item():
        return sampler, None
    size = float(stats.ess)
    kl = float(stats.sampling_kl_k3)
    if size >= SAMPLE_SIZE and kl <= limit:
        return sampler, None
    reason = (
        f"an effective sample size of {size:.2g} and {kl:.2g} nats per token of KL divergence from "
        f"the learner; expected at least {SAMPLE_SIZE:g}, and at most rollout.mismatch_limit = "
        f"{limit:g}"
    )
    finer = FINER.get(sampler.format)
    if finer is None:
        sampler = given_up(sampler, reason)
        return sampler, fallback_line(sampler)
    line = f"sampling continues in {finer}: {sampler.format} has {reason}"
    moments = sampler.moments if is_calibrated(config, finer) else None
    return attrs.evolve(
        rounded_as(sampler, quantized, finer, moments), moments=sampler.moments
    ), line


def weights_of(policy: g.Policy, params: Tree, sampler: Sampler) -> Weights:
    """Returns evaluated weights for an engine: the learner's `params`, rounded if the sampler uses
    rounding.
    """
    role = sampler.role
    if role is None or params is None:
        return Weights(policy, params, sampler.version, sampler.rows)
    rounded = role.transform(params)
    g.materialize(rounded)
    return Weights(role.policy, rounded, sampler.version, sampler.rows)
