"""Distributes a batch over ranks for the grad step, and sums over ranks before the update step.

Every rank adds the gradients of its own completions to its state. Before the update, these sums and
their denominators are added over all ranks, so the update divides by the whole batch's denominator.
Nothing is averaged per rank, so any distribution of a batch over ranks results in the same update.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, cast

import attrs
import mlx.core as mx

from grpo_fn.backends import number
from grpo_fn.learner.batch import Batch
from grpo_fn.learner.batch_rows import counted_alone, take_part, take_rows
from grpo_fn.learner.packing import halve_batch, shape_of
from grpo_fn.learner.state import TrainState
from grpo_fn.trees import Tree, arrays_of, flat, map_arrays, on_host


def deal(batch: Batch, number: int) -> list[Batch]:
    """Splits a batch into `number` parts with similar numbers of tokens; the rows of a prompt stay
    together.

    The largest groups are assigned first, each to the part with the fewest tokens so far. The
    parts' counts add up to the batch's, and the first part also counts the rows that were dropped.
    Parts without a row are omitted, except the first. The function waits for the device.

    Raises:
        ValueError: number < 1.
    """
    if number < 1:
        raise ValueError(f"number = {number}: expected at least 1")
    if number == 1:
        return [batch]
    rows = batch.mask_bt.shape[0]
    groups = list(range(rows)) if batch.group_b is None else on_host(batch.group_b)
    prompts = on_host(batch.prompt_lengths_b)
    counted = on_host(batch.mask_bt.sum(axis=1))
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    cost = {
        group: sum(prompts[row] + counted[row] for row in own) for group, own in members.items()
    }
    parts = []
    for groups_of_part in _dealt(cost, number):
        own = flat(members[group] for group in groups_of_part)
        if parts and not own:
            continue
        parts.append(counted_alone(take_rows(batch, sorted(own))))
    first = {
        "num_sequences": parts[0].num_sequences + (batch.num_sequences - rows),
        "num_tokens": parts[0].num_tokens + (batch.num_tokens - float(sum(counted))),
    }
    return [attrs.evolve(parts[0], **first), *parts[1:]]


def pieces_of_rank(pieces: Sequence[Batch], rank: int, size: int) -> list[Batch]:
    """Returns the micro-batches that a rank computes; each rank has about the same number of
    tokens.

    If there are fewer micro-batches than ranks, the largest ones are halved. Each rank receives at
    least one micro-batch, possibly without rows.
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
    return mine or [counted_alone(take_part(cutting[0], [], []))]  # without rows, all counts are 0


def _dealt(cost: Mapping[int, int], number: int) -> list[list[int]]:
    """Distributes the keys over `number` parts of about the same cost: the most expensive key
    first, each to the cheapest part.
    """
    parts: list[list[int]] = [[] for _ in range(number)]
    loads = [0] * number
    for key in sorted(cost, key=lambda key: -cost[key]):  # stable: in order where costs are equal
        part = loads.index(min(loads))
        parts[part].append(key)
        loads[part] += cost[key]
    return parts


BUCKET_BYTES = 128 * 2**20  # bytes of arrays that are sent together


class Collectives(Protocol):
    """Operations that training requires from a group of ranks; `collectives` creates them from
    MLX's group.

    Every rank must call the same methods in the same order, with arrays of the same shapes.
    """

    def rank(self) -> int:
        """Returns this process's number, from 0."""
        ...

    def size(self) -> int:
        """Returns N, the number of ranks."""
        ...

    def all_sum(self, x: mx.array) -> mx.array:
        """Returns the sum of the arrays over all ranks, evaluated; every rank receives the sum."""
        ...

    def all_gather(self, x: mx.array) -> mx.array:
        """Concatenates the arrays [n] from all ranks to [N·n], in rank order, and evaluates the
        result.
        """
        ...


@attrs.frozen(eq=False)
class MlxCollectives:
    """`Collectives` that use `mx.distributed` on one stream. Arrays are evaluated before they are
    sent, and results after they are received.

    If arrays were not evaluated, a command buffer of a Metal GPU would wait for the slowest rank,
    and macOS ends a buffer that waits for several seconds.
    """

    group: mx.distributed.Group
    stream: mx.Stream | mx.Device | None = None  # None: the default one

    def rank(self) -> int:
        return self.group.rank()

    def size(self) -> int:
        return self.group.size()

    def all_sum(self, x: mx.array) -> mx.array:
        return self._computed(mx.distributed.all_sum, x)

    def all_gather(self, x: mx.array) -> mx.array:
        return self._computed(mx.distributed.all_gather, x)

    def _computed(self, operation: Callable[..., mx.array], x: mx.array) -> mx.array:
        mx.eval(x)
        result = operation(x, group=self.group, stream=self.stream)
        mx.eval(result)
        return result


def collectives(group: "mx.distributed.Group | Collectives") -> Collectives:
    """Creates a group's collectives, which run on the GPU (NCCL) if MLX is built for CUDA,
    otherwise on the CPU.

    For any other combination (such as ring on a machine with CUDA), pass an `MlxCollectives` with
    its own stream.
    """
    if not isinstance(group, mx.distributed.Group):
        return cast(Collectives, group)
    return MlxCollectives(group, None if number("gpu_collectives") else cast(mx.Device, mx.cpu))


def all_reduce(state: TrainState, group: "mx.distributed.Group | Collectives") -> TrainState:
    """Sums the state's gradients and their denominators over all ranks; returns the new state.

    Call `all_reduce` between the grad step and the update step, once per update. With one rank, it
    returns the state unchanged. Gradients are sent in buckets of about `BUCKET_BYTES` that combine
    small leaves; a larger leaf is sent separately. If a loss is not finite on one rank, the sum of
    the denominators is NaN on all ranks, and all ranks skip the update.

    Args:
        state: this rank's state after its grad steps.
        group: `mx.distributed.init()`, or other `Collectives`.

    Raises:
        RuntimeError: a rank has ended (raised by MLX).
    """
    ranks = collectives(group)
    if ranks.size() == 1:
        return state
    grads = _by_buckets(state.accum_grads, lambda part: _summed(part, ranks))
    weight = ranks.all_sum(state.accum_weight.reshape(1)).reshape(())
    return attrs.evolve(state, accum_grads=grads, accum_weight=weight)


def share(tree: Tree, group: "mx.distributed.Group | Collectives") -> Tree:
    """Copies rank 0's tree to all ranks, bit for bit. The other ranks pass a tree with the same
    shapes and dtypes."""
    ranks = collectives(group)
    if ranks.size() == 1:
        return tree

    def shared(part: Sequence[mx.array]) -> list[mx.array]:
        # Bytes as 32-bit integers: a sum with zeros changes none of them, whatever their meaning.
        words = [_words(leaf) for leaf in part]
        sums = _summed(
            words if ranks.rank() == 0 else [mx.zeros_like(each) for each in words], ranks
        )
        found = []
        for leaf, total in zip(part, sums, strict=True):
            own = mx.contiguous(total.view(mx.uint8)[: leaf.nbytes])
            found.append(own.view(leaf.dtype).reshape(leaf.shape))
        return found

    return _by_buckets(tree, shared)


def _by_buckets(tree: Tree, act: Callable[[Sequence[mx.array]], list[mx.array]]) -> Tree:
    """Applies `act` to the leaves of each bucket, and returns the tree; only one bucket at a time
    is in memory twice.
    """
    leaves = list(arrays_of(tree))
    made = []
    for low, high in buckets([leaf.nbytes for leaf in leaves]):
        made += act(leaves[low:high])
        mx.eval(made[low:])
    remaining = iter(made)
    return map_arrays(lambda _: next(remaining), tree)


def _words(leaf: mx.array) -> mx.array:
    whole = mx.contiguous(leaf).reshape(-1).view(mx.uint8)
    return mx.pad(whole, [(0, -whole.size % 4)]).view(mx.int32)


def _summed(part: Sequence[mx.array], ranks: Collectives) -> list[mx.array]:
    """Returns the sums over the ranks for a bucket's arrays, which have the same dtype."""
    total = ranks.all_sum(mx.concatenate([leaf.reshape(-1) for leaf in part]))
    bounds = list(itertools.accumulate(leaf.size for leaf in part[:-1]))
    return [
        flat.reshape(leaf.shape) for flat, leaf in zip(mx.split(total, bounds), part, strict=True)
    ]


def buckets(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the bounds [low, high) of each bucket: consecutive leaves of at most `BUCKET_BYTES` in
    total, or a single leaf.
    """
    low = held = 0
    for place, size in enumerate(sizes):
        if place > low and held + size > BUCKET_BYTES:
            yield low, place
            low = place
            held = 0
        held += size
    if low < len(sizes):
        yield low, len(sizes)
