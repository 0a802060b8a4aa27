"""Samples completions for prompts: prefill, decoding steps, the decode loop, sampling.

This package imports `grpo_fn.policy`, the backends' interface and the root helpers; not
`grpo_fn.algorithm` or `grpo_fn.learner`.
"""

from grpo_fn.completions import Ended, rollout_of
from grpo_fn.rollout.decode_loop import Column, Columns, Decoding, decode_queue
from grpo_fn.rollout.decode_step import PREFILL_TOKENS
from grpo_fn.rollout.generation import Interrupted, decode, generate
from grpo_fn.rollout.row_queue import Entry, RowQueue, check_entry
from grpo_fn.rollout.sampling import FindStop, Sampling, draw, draw_bits
from grpo_fn.rollout.turns import Replies, Respond
