"""GRPO as pure functions on MLX: compiled steps take an immutable TrainState and return a new one.

The import has one side effect: on a Linux CPU, it loads the machine's BLAS, which must be loaded
before MLX.

`X as X` makes a name public for type checkers.
"""

import grpo_fn.backends  # noqa: F401 (first: it loads the BLAS before MLX)
from grpo_fn.algorithm import PRESETS as PRESETS
from grpo_fn.algorithm import LossSpec as LossSpec
from grpo_fn.algorithm import LossStats as LossStats
from grpo_fn.algorithm import combine_rewards as combine_rewards
from grpo_fn.algorithm import group_advantages as group_advantages
from grpo_fn.algorithm import merge_stats as merge_stats
from grpo_fn.algorithm import overlong_penalty as overlong_penalty
from grpo_fn.algorithm import policy_loss as policy_loss
from grpo_fn.algorithm import preset as preset
from grpo_fn.algorithm import turn_advantages as turn_advantages
from grpo_fn.compile import compiled as compiled
from grpo_fn.completions import Rollout as Rollout
from grpo_fn.completions import given_rollout as given_rollout
from grpo_fn.completions import join_rollouts as join_rollouts
from grpo_fn.completions import spread_over_turns as spread_over_turns
from grpo_fn.completions import take_groups as take_groups
from grpo_fn.learner import Batch as Batch
from grpo_fn.learner import GradStep as GradStep
from grpo_fn.learner import Optimizer as Optimizer
from grpo_fn.learner import Rates as Rates
from grpo_fn.learner import TrainState as TrainState
from grpo_fn.learner import UpdateStats as UpdateStats
from grpo_fn.learner import adamw as adamw
from grpo_fn.learner import all_reduce as all_reduce
from grpo_fn.learner import batch_of as batch_of
from grpo_fn.learner import drop_inactive as drop_inactive
from grpo_fn.learner import init_state as init_state
from grpo_fn.learner import make_batch as make_batch
from grpo_fn.learner import make_grad_step as make_grad_step
from grpo_fn.learner import make_logprob_step as make_logprob_step
from grpo_fn.learner import make_sft_step as make_sft_step
from grpo_fn.learner import make_update_step as make_update_step
from grpo_fn.learner import minibatches as minibatches
from grpo_fn.learner import split_batch as split_batch
from grpo_fn.learner import sync_old as sync_old
from grpo_fn.learner import sync_ref as sync_ref
from grpo_fn.learner import token_logprobs as token_logprobs
from grpo_fn.learner import token_logprobs_and_entropy as token_logprobs_and_entropy
from grpo_fn.learner import warmup_schedule as warmup_schedule
from grpo_fn.policy import Policy as Policy
from grpo_fn.policy_check import CheckedPolicy as CheckedPolicy
from grpo_fn.policy_check import check_policy as check_policy
from grpo_fn.prng import fold_in as fold_in
from grpo_fn.rollout import Decoding as Decoding
from grpo_fn.rollout import Sampling as Sampling
from grpo_fn.rollout import generate as generate
from grpo_fn.trees import arrays_of as arrays_of
from grpo_fn.trees import map_arrays as map_arrays
from grpo_fn.trees import materialize as materialize
from grpo_fn.trees import named_leaves as named_leaves

__version__ = "0.1.0"
