"""From prompts to completions: prefill, decoding steps, the decoding loop, the sampler.

Imports `grpo_fn.policy`, the backends' interface and the root helpers; not `grpo_fn.algorithm` or
`grpo_fn.learner`.
"""

from grpo_fn.rollout.categorical import RANDOM_NUMBERS
from grpo_fn.rollout.decode_loop import Decoding, FindStop
from grpo_fn.rollout.decode_step import CacheSteps, Steps, shared_steps
from grpo_fn.rollout.extend import EXTEND_TOKENS, LEAST_EXTENSION
from grpo_fn.rollout.generation import generate
from grpo_fn.rollout.prefill import PREFILL_TOKENS
from grpo_fn.rollout.sampler import Sampler, draw_bits, drawing, mark_seen, penalize, sample, seen_tokens
from grpo_fn.rollout.turns import Replies, Respond

__all__ = [
    "EXTEND_TOKENS",
    "LEAST_EXTENSION",
    "PREFILL_TOKENS",
    "RANDOM_NUMBERS",
    "CacheSteps",
    "Decoding",
    "FindStop",
    "Replies",
    "Respond",
    "Sampler",
    "Steps",
    "draw_bits",
    "drawing",
    "generate",
    "mark_seen",
    "penalize",
    "sample",
    "seen_tokens",
    "shared_steps",
]
