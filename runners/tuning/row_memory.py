"""How many completions can be decoded together in the free memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

import grpo_fn as g
from grpo_fn.policy import plain_caches, sharing_pays
from grpo_fn.trees import Tree, arrays_of, named_leaves, nbytes
from runners.config.loading import Config
from runners.data.prompts import Example
from runners.data.stream import PromptStream

USABLE = 0.8  # share of the free memory for decoding; the rest is for the allocator and the prefill
_COPIES = 2  # a KV buffer is copied when it grows, and at each step if steps are pipelined
_SAMPLING = 3  # the sampler holds so many float32 arrays of a row's vocabulary at once
_ROOM = 256  # a KV buffer grows by at most so many tokens
_SEEN = 2  # tokens of the call from which the caches' bytes are read


@attrs.frozen(eq=False, kw_only=True)
class Workload:
    """One batch step's decoding, without the prompts' contents, which do not matter."""

    policy: g.Policy
    params: Tree  # the sampler's parameters
    lengths: tuple[int, ...]  # tokens of each prompt of the first batch step
    num_generations: int
    max_new_tokens: int

    @classmethod
    def of(cls, config: Config, policy: g.Policy, params: Tree, examples: Sequence[Example]) -> Workload:
        """A run's first batch step; `examples` are all that it trains on."""
        first = PromptStream(examples, config.run.seed).take(config.optim.batch_size)
        return cls(
            policy=policy,
            params=params,
            lengths=tuple(len(example.tokens) for example in first),
            num_generations=config.rollout.num_generations,
            max_new_tokens=config.rollout.max_new_tokens,
        )

    @property
    def rows(self) -> int:
        """Completions of a batch step."""
        return len(self.lengths) * self.num_generations

    @property
    def shares_prefix(self) -> bool:
        """Whether `generate` keeps a prompt once for its completions, by the same rule."""
        return self.policy.shares_prefix and sharing_pays()


def row_bytes(work: Workload, model: nn.Module) -> int:
    """Bytes of one completion at its full length, including its share of the prompt.

    They are read from the caches and logits of a call that is built but never computed; `model` has the
    parameters of `work`.
    """
    caches = plain_caches(model)
    logits = model(mx.zeros((1, _SEEN), mx.int32), cache=caches)
    prompt, new = max(work.lengths), work.max_new_tokens
    if work.shares_prefix:
        held = _bytes_at(caches, new) + _bytes_at(caches, prompt) / work.num_generations
    else:
        held = _bytes_at(caches, prompt + new)
    return int(_COPIES * held) + logits.shape[-1] * (logits.dtype.size + 4 * _SAMPLING)


def groups_that_fit(work: Workload, model: nn.Module, free: int) -> int:
    """How many groups fit into `free` bytes: at least one, at most all."""
    group = row_bytes(work, model) * work.num_generations
    return min(max(int(USABLE * free) // group, 1), len(work.lengths))


def cast_bytes(work: Workload) -> int:
    """Bytes of the weights' copy in the compute dtype, which exists while completions are drawn."""
    dtype = work.policy.compute_dtype
    if dtype is None:
        return 0
    leaves = (*arrays_of(work.params), *named_leaves(work.policy.frozen).values())
    other = (leaf for leaf in leaves if leaf.dtype != dtype and mx.issubdtype(leaf.dtype, mx.floating))
    return sum(leaf.size for leaf in other) * dtype.size


def _bytes_at(caches: list[Any], tokens: int) -> float:
    """Bytes a row of caches that have seen `_SEEN` tokens of one, once they hold `tokens`."""
    return sum(_one_at(cache, tokens) for cache in caches)


def _one_at(cache: Any, tokens: int) -> float:
    if hasattr(cache, "caches"):
        return _bytes_at(cache.caches, tokens)
    if getattr(cache, "keys", None) is None:
        return nbytes(cache.state)  # a recurrent state does not grow
    held = min(-(-tokens // _ROOM) * _ROOM, getattr(cache, "max_size", tokens + _ROOM))
    return nbytes(cache.keys_and_values()) / _SEEN * held
