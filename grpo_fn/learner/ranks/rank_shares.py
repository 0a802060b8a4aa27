"""Distributes a batch's gradient over the ranks. Any cut gives the same sums."""

from collections.abc import Mapping, Sequence

import attrs
import mlx.core as mx

from grpo_fn.learner.batch import Batch, take_part, take_rows
from grpo_fn.learner.micro_batches import halve_batch, shape_of
from grpo_fn.trees import on_host


def deal(batch: Batch, number: int) -> list[Batch]:
    """A batch in `number` parts with about as many tokens each; the rows of a prompt stay together.

    Largest groups first, each to the part with the fewest tokens so far. The parts' counts add up to the
    batch's: the first one also counts the rows left out of the batch. Parts without a row are omitted, except
    the first. Waits for the device.

    Raises:
        ValueError: number < 1.
    """
    if number < 1:
        raise ValueError(f"number = {number}: expected at least 1")
    if number == 1:
        return [batch]
    rows = batch.mask_bt.shape[0]
    groups = list(range(rows)) if batch.group_b is None else on_host(batch.group_b)
    prompts, counted = on_host(batch.prompt_lengths_b), on_host(batch.mask_bt.sum(axis=1))
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    cost = {group: sum(prompts[row] + counted[row] for row in own) for group, own in members.items()}
    parts = []
    for groups_of_part in _dealt(cost, number):
        own = [row for group in groups_of_part for row in members[group]]
        if parts and not own:
            continue
        part = take_rows(batch, sorted(own))
        tokens = float(sum(counted[row] for row in own))
        parts.append(attrs.evolve(part, num_sequences=mx.array(float(len(own))), num_tokens=mx.array(tokens)))
    left_out = {
        "num_sequences": batch.num_sequences - rows,
        "num_tokens": batch.num_tokens - float(sum(counted)),
    }
    first = {name: getattr(parts[0], name) + rest for name, rest in left_out.items()}
    return [attrs.evolve(parts[0], **first), *parts[1:]]


def pieces_of_rank(pieces: Sequence[Batch], rank: int, size: int) -> list[Batch]:
    """The micro-batches of a batch that a rank computes, with about the same number of tokens on each rank.

    If there are fewer micro-batches than ranks, the largest are cut in halves. At least one is returned; a
    rank without work gets one without rows.
    """
    if size == 1:
        return list(pieces)
    cutting = list(pieces)
    while len(cutting) < size:
        widest = max(range(len(cutting)), key=lambda place: shape_of(cutting[place]).tokens)
        halves = halve_batch(cutting[widest])
        if len(halves) == 1:
            break
        cutting[widest : widest + 1] = halves
    cost = {place: max(shape_of(piece).tokens, 1) for place, piece in enumerate(cutting)}
    mine = [cutting[place] for place in sorted(_dealt(cost, size)[rank])]
    if not mine:  # a micro-batch without rows that counts nothing
        none = take_part(cutting[0], [], [])
        mine = [attrs.evolve(none, num_sequences=mx.array(0.0), num_tokens=mx.array(0.0))]
    return mine


def _dealt(cost: Mapping[int, int], number: int) -> list[list[int]]:
    """The keys in `number` parts of about the same cost: the largest first, each to the cheapest part."""
    parts: list[list[int]] = [[] for _ in range(number)]
    loads = [0] * number
    for key in sorted(cost, key=lambda key: -cost[key]):  # stable: in order where costs are equal
        part = loads.index(min(loads))
        parts[part].append(key)
        loads[part] += cost[key]
    return parts
