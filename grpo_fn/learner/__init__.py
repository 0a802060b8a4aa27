"""The learner: a run's state, batches, and pure steps from one state to the next.

This package imports `grpo_fn.algorithm`, `grpo_fn.policy`, the backends' interface and the root
helpers; not `grpo_fn.rollout`.
"""

from grpo_fn.learner.batch import Batch, as_teacher_reads, batch_of, make_batch
from grpo_fn.learner.batch_rows import drop_inactive, minibatches, take_rows
from grpo_fn.learner.forward_steps import (
    RoutingStats,
    Teacher,
    chosen_experts,
    make_logprob_step,
    routing_stats,
)
from grpo_fn.learner.grad_step import SFT, GradStep, make_grad_step, make_sft_step
from grpo_fn.learner.logprobs.completion_states import can_share
from grpo_fn.learner.logprobs.token_logprobs import (
    Head,
    chunk_rows,
    reverse_kl,
    token_logprobs,
    token_logprobs_and_entropy,
)
from grpo_fn.learner.optimizer import SCHEDULES, Optimizer, Rates, adamw, warmup_schedule
from grpo_fn.learner.packing import (
    Packer,
    Row,
    Shape,
    halve_batch,
    piece_tokens,
    shape_of,
    split_batch,
)
from grpo_fn.learner.ranks.reduce import (
    Collectives,
    MlxCollectives,
    all_reduce,
    collectives,
    deal,
    pieces_of_rank,
    share,
)
from grpo_fn.learner.state import TrainState, init_state, sync_old, sync_ref
from grpo_fn.learner.update_step import UpdateStats, make_update_step
from grpo_fn.rounding import stochastic_round
