"""Queues of rows that arrive while others decode, and each row alone for comparison."""

from typing import Any

import mlx.core as mx
import numpy as np

import grpo_fn as g
from grpo_fn.prng import completion_keys
from grpo_fn.rollout import Entry, decode_queue
from grpo_fn.trees import on_host
from tests.support.generating import EOS, roll

MANY = [[7 * n + i for i in range(1, 2 + 3 * n % 11)] for n in range(8)]  # of 1 to 11 tokens
LIMITS = [20, 7, 12, 30, 1, 16, 9, 25]


def key_of(prompt, generation=0):
    """The key of a completion, as plain numbers."""
    (key,) = on_host(completion_keys(mx.random.key(0), mx.array([prompt]), mx.array([generation])))
    return tuple(key)


def entry(number, prompt, *, group=1, first=None, sampling=None, **options) -> Any:
    """Completions of prompt `number` with the keys that `generate` would use; `first` is the first row."""
    start = number * group if first is None else first
    return Entry(
        rows=tuple(range(start, start + group)),
        prompt=prompt,
        keys=tuple(key_of(number, generation) for generation in range(group)),
        sampling=sampling or g.Sampling(max_new_tokens=12, eos_ids=EOS),
        **options,
    )


def drive(policy, queue, arrivals=(), **options):
    """Decodes the queue and returns each step's columns; `arrivals` are (columns seen before, action)."""
    waiting = list(arrivals)
    columns = []
    for column in decode_queue(policy, policy.params, queue, g.Decoding(**options)):
        if column is not None:
            columns.append(column)
            while waiting and len(columns) >= waiting[0][0]:
                waiting.pop(0)[1]()
    assert not queue.busy and not waiting
    return columns


def assert_alone(policy, done, number, prompt, **options):
    """The row has the tokens, the end and (to rounding) the log-probs that `generate` gives it alone."""
    rollout = roll(policy, [prompt], prompt_numbers=[number], generations=1, **options)
    (tokens,) = rollout.completions()
    assert (done.tokens, done.finished) == (tokens, rollout.finished_b.item()), f"prompt {number}"
    assert np.abs(np.array(done.logp) - rollout.logp_bt[0, : len(tokens)]).max(initial=0.0) < 1e-4
