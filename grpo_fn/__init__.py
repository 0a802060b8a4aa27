"""GRPO as pure functions on MLX: an immutable TrainState, and compiled steps that return a new one.

Importing it has one effect: on a Linux CPU it loads the machine's BLAS, which must be loaded before MLX.
"""

import grpo_fn.backends  # noqa: F401 (first: it loads the BLAS before MLX)
from grpo_fn.algorithm import (
    PRESETS,
    LossSpec,
    LossStats,
    combine_rewards,
    group_advantages,
    merge_stats,
    overlong_penalty,
    policy_loss,
    preset,
    turn_advantages,
)
from grpo_fn.compile import compiled
from grpo_fn.completions import Rollout, given_rollout, join_rollouts, spread_over_turns, take_groups
from grpo_fn.learner import (
    Batch,
    GradStep,
    Optimizer,
    TrainState,
    UpdateStats,
    adamw,
    all_reduce,
    drop_inactive,
    init_state,
    make_batch,
    make_grad_step,
    make_logprob_step,
    make_sft_step,
    make_update_step,
    minibatches,
    split_batch,
    sync_old,
    sync_ref,
    token_logprobs,
    token_logprobs_and_entropy,
    warmup_schedule,
)
from grpo_fn.policy import Policy
from grpo_fn.policy_check import CheckedPolicy, check_policy
from grpo_fn.prng import fold_in
from grpo_fn.rollout import Decoding, Sampling, generate
from grpo_fn.trees import arrays_of, map_arrays, materialize, named_leaves

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 (in groups)
    # the algorithm: advantages and the loss
    "PRESETS",
    "LossSpec",
    "LossStats",
    "combine_rewards",
    "group_advantages",
    "merge_stats",
    "overlong_penalty",
    "policy_loss",
    "preset",
    "turn_advantages",
    # the model, and completions from it
    "CheckedPolicy",
    "Decoding",
    "Policy",
    "Rollout",
    "Sampling",
    "check_policy",
    "generate",
    "given_rollout",
    "join_rollouts",
    "spread_over_turns",
    "take_groups",
    # batches for the learner
    "Batch",
    "drop_inactive",
    "make_batch",
    "minibatches",
    "split_batch",
    # the state, and the steps from one state to the next
    "GradStep",
    "Optimizer",
    "TrainState",
    "UpdateStats",
    "adamw",
    "all_reduce",
    "init_state",
    "make_grad_step",
    "make_logprob_step",
    "make_sft_step",
    "make_update_step",
    "sync_old",
    "sync_ref",
    "token_logprobs",
    "token_logprobs_and_entropy",
    "warmup_schedule",
    # tools for a custom loop: random keys, compiling, saving a state
    "arrays_of",
    "compiled",
    "fold_in",
    "map_arrays",
    "materialize",
    "named_leaves",
]
