"""GRPO as pure functions on MLX: an immutable TrainState, and compiled steps that return a new one.

Importing it has one effect: on a Linux CPU it loads the machine's BLAS, before it imports MLX.
"""

import grpo_fn.backends.cpu  # noqa: F401 (first: all others import MLX)
from grpo_fn.algorithm.advantages import combine_rewards, group_advantages, overlong_penalty
from grpo_fn.algorithm.diagnostics import LossStats, merge_stats
from grpo_fn.algorithm.kl import kl_estimate
from grpo_fn.algorithm.loss import policy_loss
from grpo_fn.algorithm.spec import PRESETS, LossSpec, Recipe, preset
from grpo_fn.compile import Compiled, compiled
from grpo_fn.completions import Rollout, join_rollouts, take_groups
from grpo_fn.learner.batch import Batch, drop_inactive, make_batch, minibatches
from grpo_fn.learner.micro_batches import halved, shape_of, split_batch
from grpo_fn.learner.optimizer import Optimizer, adamw, warmup_schedule
from grpo_fn.learner.packing import Shape
from grpo_fn.learner.rounding import stochastic_round
from grpo_fn.learner.state import TrainState, init_state, sync_old, sync_ref
from grpo_fn.learner.steps import GradStep, UpdateStats, make_grad_step, make_logprob_step, make_update_step
from grpo_fn.learner.token_logprobs import Head, token_logprobs, token_logprobs_and_entropy
from grpo_fn.policy.policy import Policy
from grpo_fn.prng import fold_in
from grpo_fn.rollout.generate import generate
from grpo_fn.rollout.sampler import Sampler, sample
from grpo_fn.trees import materialize

__all__ = [
    "PRESETS",
    "Batch",
    "Compiled",
    "GradStep",
    "Head",
    "LossSpec",
    "LossStats",
    "Optimizer",
    "Policy",
    "Recipe",
    "Rollout",
    "Sampler",
    "Shape",
    "TrainState",
    "UpdateStats",
    "adamw",
    "combine_rewards",
    "compiled",
    "drop_inactive",
    "fold_in",
    "generate",
    "group_advantages",
    "halved",
    "init_state",
    "join_rollouts",
    "kl_estimate",
    "make_batch",
    "make_grad_step",
    "make_logprob_step",
    "make_update_step",
    "materialize",
    "merge_stats",
    "minibatches",
    "overlong_penalty",
    "policy_loss",
    "preset",
    "sample",
    "shape_of",
    "split_batch",
    "stochastic_round",
    "sync_old",
    "sync_ref",
    "take_groups",
    "token_logprobs",
    "token_logprobs_and_entropy",
    "warmup_schedule",
]
