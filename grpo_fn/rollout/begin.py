"""Starts rows: groups the entries that can share one prefill, and creates the decoding steps for
their rows."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.backends import find
from grpo_fn.policy.caches import kv_caches as cache_rows
from grpo_fn.policy.caches.prefix_cache import fork, sharing_pays
from grpo_fn.policy.policy import Policy
from grpo_fn.rollout.decode_step import (
    CacheSteps,
    Prefill,
    PrefixSteps,
    RowBatch,
    Steps,
    prefill,
    prefill_once,
)
from grpo_fn.rollout.row_queue import Entry, Start
from grpo_fn.rollout.sampling import distribution_of, draw_bits, seen_tokens
from grpo_fn.trees import flat, group_numbers


def begin(
    policy: Policy,
    model: nn.Module,
    starts: Sequence[Start],
    wanted: bool | None,
    *,
    few_sizes: bool = False,
) -> Prefill[list[RowBatch]]:
    """Returns batches that are ready to sample their first token.

    `wanted` is `Decoding.share_prefix`, and `few_sizes` is `Decoding.few_sizes`, for rows that do
    not join others.
    """
    kinds: dict[Any, list[Start]] = {}
    for start in starts:
        shared = shares_prompt(policy, start.entry, wanted)
        kinds.setdefault(_kind(policy, start, shared), []).append(start)
    batches = []
    for (shared, *_), part in kinds.items():
        if few_sizes and shared and _program(policy, part) is not None:
            part += _spare(part)
        logits_pv, steps = yield from prefilled(policy, model, part, shared)
        batches.append(_batch(part, logits_pv, steps))
    return batches


def _program(policy: Policy, starts: Sequence[Start]) -> Any:
    """Returns the backend's compiled steps for rows that share their prompts, or None if there are
    none.
    """
    some = any(start.entry.images is not None for start in starts)
    return None if some or not policy.supports_compiled_decode else find("kernel_steps")


def _spare(starts: Sequence[Start]) -> list[Start]:
    """Returns padding rows, and prompts for them, which round both numbers up to a size."""
    prompts = len(starts)
    rows = sum(len(start.rows) for start in starts)
    if (_size(prompts), _size(rows)) == (prompts, rows):
        return []
    more = _size(prompts) - prompts or _size(prompts + 1) - prompts
    counts = [1] * (more - 1)
    counts.append(_size(rows + more) - rows - len(counts))
    sampling = starts[0].entry.sampling
    entries = [
        Entry(rows=(-1,) * count, prompt=[0], keys=((0, 0),) * count, sampling=sampling)
        for count in counts
    ]
    return [Start(entry, list(entry.rows), None, 0) for entry in entries]


def _size(count: int) -> int:
    """Rounds up to the next of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, …"""
    step = 1 << max(count.bit_length() - 2, 0)
    return -(-count // step) * step


def shares_prompt(policy: Policy, entry: Entry, wanted: bool | None) -> bool:
    """Returns whether the entry's rows are decoded with one copy of the prompt."""
    if entry.keep or not policy.shares_prefix:
        return False
    if entry.images is not None:
        return True
    return sharing_pays() if wanted is None else wanted


def _kind(policy: Policy, start: Start, shared: bool) -> tuple[Any, ...]:
    """Returns a value that is equal for all entries that can start in one prefill."""
    entry = start.entry
    kept = start.caches is not None
    length = None
    if not shared and not policy.takes_ragged:
        length = entry.rows if kept else len(entry.prompt)
    # Learned positions: no row is fed tokens beyond its own limit.
    limit = None if policy.positions is None else entry.sampling.max_new_tokens
    return shared, kept, entry.keep, distribution_of(entry.sampling), length, limit


def prefilled(
    policy: Policy, model: nn.Module, starts: Sequence[Start], shared: bool
) -> Prefill[tuple[mx.array, Steps]]:
    """Runs the prefill; returns the logits [P,V] after the prompts, and the steps for decoding from
    there.
    """
    prompts = [start.entry.prompt for start in starts]
    lengths = [len(prompt) for prompt in prompts]
    groups = [len(start.rows) for start in starts]
    joins = policy.positions is None  # a row that has ended may be fed any number of tokens
    if not shared:
        kept = [start.caches for start in starts if start.caches is not None]
        rest = [prompt[start.held :] for prompt, start in zip(prompts, starts, strict=True)]
        before = None
        if kept:
            before = cache_rows.merged(kept) if policy.takes_ragged else kept[0]
        logits_pv, caches = yield from prefill(model, rest, before)
        if before is None or max(groups) > 1:
            cache_rows.keep_rows(caches, group_numbers(groups))
        joins = joins and policy.takes_ragged and cache_rows.hold_all_tokens(caches)
        return logits_pv, CacheSteps(model, caches, joins=joins)
    images = [start.entry.images for start in starts]
    some = any(each is not None for each in images)
    logits_pv, caches = yield from prefill_once(policy, model, prompts, images if some else None)
    program = _program(policy, starts)
    if program is not None:
        step = policy.program("kernel_steps", program.forward)
        room = max(start.entry.sampling.max_new_tokens for start in starts)
        return logits_pv, program.steps(step, model.parameters(), caches, lengths, groups, room)
    shifts = [0 if each is None else each.shift for each in images]
    return logits_pv, PrefixSteps(model, fork(caches, lengths, groups, shifts), joins=joins)


def _batch(starts: Sequence[Start], logits_pv: mx.array, steps: Steps) -> RowBatch:
    """Creates the batch of starting rows, with their random bits."""
    numbers = flat(start.rows for start in starts)
    # Not taken from the queue, because a row may have been cancelled during the prefill.
    keys = dict(flat(start.entry.keyed_rows for start in starts))
    prompt_b = mx.array(group_numbers(len(start.rows) for start in starts))
    entry = starts[0].entry
    # Generated at once on the device, because each step would wait for a number from the host.
    bits_nbw = draw_bits(
        mx.array([keys[row] for row in numbers], mx.uint32),
        mx.array([start.entry.drawn for start in starts], mx.int32)[prompt_b],
        max(start.entry.sampling.max_new_tokens for start in starts),
    )
    seen_bv = None
    if entry.sampling.repetition_penalty != 1:
        prompts = [start.entry.prompt for start in starts]
        seen_bv = seen_tokens(prompts, logits_pv.shape[-1])[prompt_b]
    watched = (
        isinstance(steps, CacheSteps)
        and entry.keep
        and not cache_rows.hold_all_tokens(steps.caches)
    )
    return RowBatch(steps, logits_pv[prompt_b], bits_nbw, numbers, entry.sampling, seen_bv, watched)
