"""Groups whose prompts differ because `reset` returned different texts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx

import grpo_fn as g
from grpo_fn.trees import on_host
from runners.errors import UserError


def regrouped(rollout: g.Rollout, num_generations: int) -> g.Rollout:
    """A rollout of P·G prompts, one completion each, as P groups. A group's prompt is the shared start of its
    prompts.

    The rest of a prompt is put in front of its completion, as given tokens.
    """
    starts = range(0, len(rollout.prompts), num_generations)
    groups = [rollout.prompts[start : start + num_generations] for start in starts]
    shared = [_shared_length(group) for group in groups]
    heads = [prompt[n:] for group, n in zip(groups, shared, strict=True) for prompt in group]
    tokens = rollout.completions()
    lengths = [len(head) + len(row) for head, row in zip(heads, tokens, strict=True)]
    width = max(1, *lengths)

    def padded(rows: Sequence[Sequence[Any]], dtype: mx.Dtype, before: Sequence[Sequence[int]]) -> mx.array:
        """Rows [B,T] behind what stands before each, up to the common width."""
        whole = [[*head, *row[: len(part)]] for head, row, part in zip(before, rows, tokens, strict=True)]
        return mx.array([[*row, *[0] * (width - len(row))] for row in whole], dtype)

    zeros = [[0] * len(head) for head in heads]
    entropy = rollout.entropy_bt
    return attrs.evolve(
        rollout,
        prompts=tuple(group[0][:n] for group, n in zip(groups, shared, strict=True)),
        num_generations=num_generations,
        tokens_bt=padded(tokens, mx.int32, heads),
        lengths_b=mx.array(lengths, mx.int32),
        logp_bt=padded(on_host(rollout.logp_bt), mx.float32, zeros),
        entropy_bt=None if entropy is None else padded(on_host(entropy), mx.float32, zeros),
        sampled_bt=padded(rollout.sampled(), mx.bool_, zeros),
    )


def _shared_length(prompts: Sequence[Sequence[int]]) -> int:
    """The number of tokens that all prompts share at their start."""
    same = itertools.takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False))
    if count := sum(1 for _ in same):
        return count
    raise UserError("the prompts of a group have no first token in common: a template begins with one")
