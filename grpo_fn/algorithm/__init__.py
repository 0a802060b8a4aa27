"""GRPO's equations as the papers write them: arrays and scalars in, arrays out.

This package imports only the root helpers: no model, no device, no backend.
"""

from grpo_fn.algorithm.advantages import (
    AGGREGATES,
    combine_rewards,
    discounted_returns,
    group_advantages,
    has_varied_rewards,
    overlong_penalty,
    turn_advantages,
)
from grpo_fn.algorithm.baselines import BASELINES, SCALES, Baseline
from grpo_fn.algorithm.diagnostics import LossStats, empty_stats, merge_stats
from grpo_fn.algorithm.experts import expert_shares, load_balancing_loss
from grpo_fn.algorithm.kl import ESTIMATORS, kl_estimate
from grpo_fn.algorithm.loss import LossArrays, loss_sum, policy_loss
from grpo_fn.algorithm.presets import PRESETS, Recipe, preset
from grpo_fn.algorithm.spec import (
    AGGREGATIONS,
    CHOICES,
    LossSpec,
    check_max_length,
    divided,
    divisor,
)
from grpo_fn.algorithm.surrogates import SURROGATES, Surrogate
