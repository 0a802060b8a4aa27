"""Sharded optimizer state (ZeRO stage 1, arXiv 1910.02054): each rank keeps and updates 1/N of it.

Every rank computes with all weights in the compute dtype, but keeps only its part of the float32 masters and
of the moments. In an update each rank gets its part of the summed gradients, updates its part, and gathers
the new weights. The functions here turn a whole state into a sharded one and back.

    whole:    params: masters                     opt_state: moments of all leaves
    sharded:  params: masters in compute dtype    opt_state: {"masters": parts, "moments": of the parts}

A part is a flat vector: leaves are joined to buckets, a bucket is padded and cut into N equal parts.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import attrs
import mlx.core as mx
from mlx.utils import tree_map

from grpo_fn.learner.compiled_step import compiled_step
from grpo_fn.learner.optimizer import Optimizer, OptimizerNumbers
from grpo_fn.learner.ranks.reduce import BUCKET_BYTES, Collectives, buckets, cut
from grpo_fn.learner.state import TrainState, zeros_like
from grpo_fn.learner.update_step import UpdateStats, check_max_norm, norm_and_factor
from grpo_fn.trees import Tree, arrays_of, map_arrays, materialize

_MOMENTS = ("m", "v")


class _Bucket(NamedTuple):
    low: int  # bounds of its leaves
    high: int
    part: int  # numbers that each rank has


@attrs.frozen(eq=False)
class Sharding:
    """The distribution of a parameter tree over the ranks; the same on all of them."""

    ranks: Collectives
    compute_dtype: mx.Dtype | None = None  # of the weights that every rank has; None: float32
    bucket_bytes: int = BUCKET_BYTES

    def shard(self, state: TrainState) -> TrainState:
        """This rank's state, from the whole state that all ranks have.

        Raises:
            ValueError: a leaf is not float32, or the optimizer's state is not that of `adamw`.
        """
        _check(state)
        masters = self._parts(state.params)
        moments = {name: self._parts(_moment(state, name)) for name in _MOMENTS}
        parts = {key: {name: moments[name][key] for name in _MOMENTS} for key in masters}
        opt_state = {"masters": masters, "moments": {"step": state.opt_state["step"], **parts}}
        return _with_roles(state, self._cast(state.params), self._cast, opt_state)

    def whole(self, state: TrainState) -> TrainState:
        """The inverse of `shard`: masters and moments gathered on every rank. All ranks call it together.

        Roles with other weights than the policy are returned as float32 copies of their compute weights.
        """
        held = state.opt_state["moments"]
        params = self._gathered(state.opt_state["masters"], state.params, mx.float32)
        m, v = (
            self._gathered({key: held[key][name] for key in state.opt_state["masters"]}, state.params, None)
            for name in _MOMENTS
        )

        opt_state = {"step": held["step"], **tree_map(lambda a, b: {"m": a, "v": b}, m, v)}
        whole = functools.partial(map_arrays, lambda leaf: leaf.astype(mx.float32))
        return _with_roles(state, params, whole, opt_state)

    def scatter(self, grads: Tree) -> dict[str, mx.array]:
        """This rank's part of the sum of all ranks' gradients."""
        leaves = list(arrays_of(grads))
        return {
            str(number): self.ranks.sum_scatter(self._padded(leaves, bucket))
            for number, bucket in enumerate(self._buckets(grads))
        }

    def gather(self, masters: dict[str, mx.array], like: Tree) -> Tree:
        """The weights of all ranks' masters, in the dtypes of `like`."""
        return self._gathered(masters, like, None)

    def _gathered(self, parts: dict[str, mx.array], like: Tree, dtype: mx.Dtype | None) -> Tree:
        leaves = list(arrays_of(like))
        found: list[mx.array] = []
        for number, bucket in enumerate(self._buckets(like)):
            part, mine = parts[str(number)], leaves[bucket.low : bucket.high]
            kinds = {leaf.dtype for leaf in mine} if dtype is None and part.dtype == mx.float32 else set()
            sent = part.astype(kinds.pop()) if len(kinds) == 1 else part
            flat = self.ranks.all_gather(sent)
            found += cut(flat, [leaf.shape for leaf in mine])
            mx.eval(found[bucket.low :])
        remaining = iter(found)
        return map_arrays(lambda _: next(remaining), like)

    def _parts(self, tree: Tree) -> dict[str, mx.array]:
        """This rank's part of each bucket."""
        leaves, rank = list(arrays_of(tree)), self.ranks.rank()
        parts = {}
        for number, bucket in enumerate(self._buckets(tree)):
            whole = self._padded(leaves, bucket)
            parts[str(number)] = mx.contiguous(whole[rank * bucket.part : (rank + 1) * bucket.part])
            mx.eval(parts[str(number)])
        return parts

    def _padded(self, leaves: list[mx.array], bucket: _Bucket) -> mx.array:
        flat = mx.concatenate([leaf.reshape(-1) for leaf in leaves[bucket.low : bucket.high]])
        return mx.pad(flat, [(0, bucket.part * self.ranks.size() - flat.size)])

    def _buckets(self, tree: Tree) -> Iterator[_Bucket]:
        sizes = [leaf.size for leaf in arrays_of(tree)]  # not bytes: the same for every dtype
        for low, high in buckets(sizes, max(self.bucket_bytes // 4, 1)):
            yield _Bucket(low, high, -(-sum(sizes[low:high]) // self.ranks.size()))

    def _cast(self, tree: Tree) -> Tree:
        dtype = self.compute_dtype
        return tree if dtype is None else map_arrays(lambda leaf: leaf.astype(dtype), tree)


def make_sharded_update_step(
    optimizer: Optimizer, sharding: Sharding, *, max_grad_norm: float | None = None, compile: bool = True
) -> Callable[[TrainState], tuple[TrainState, UpdateStats]]:
    """`make_update_step` for states that `Sharding.shard` made: it sums over the ranks itself.

    Do not call `all_reduce` before it. All ranks call it together. It gives the same numbers as an unsharded
    update, to the rounding of sums. If anything is not finite, all ranks keep everything.

    Args:
        optimizer: see `adamw`.
        sharding: as `shard` was called on.
        max_grad_norm: bound on the global L2 norm; None: no clipping.
        compile: False runs the same Python eagerly.
    """
    check_max_norm(max_grad_norm)
    ranks = sharding.ranks

    def sum_of_squares(grads: dict[str, mx.array]) -> mx.array:
        return mx.stack([_sum(mx.square(part)) for part in arrays_of(grads)]).sum()

    def apply(
        grads: Tree, opt_state: Tree, numbers: OptimizerNumbers, factor: mx.array, finite: mx.array
    ) -> tuple[Tree, mx.array]:
        sound = [finite]

        def keep(new: mx.array, old: mx.array) -> mx.array:
            stored = new.astype(old.dtype)
            sound.append(mx.isfinite(stored).all())
            return stored

        masters, moments = optimizer.apply(
            grads, opt_state["moments"], opt_state["masters"], numbers, keep, factor
        )
        return {"masters": masters, "moments": moments}, mx.stack(sound).all()

    squares_step = compiled_step(sum_of_squares, enabled=compile)
    step = compiled_step(apply, enabled=compile)

    def update_step(state: TrainState) -> tuple[TrainState, UpdateStats]:
        materialize(state.accum_grads, state.accum_weight)
        grads = sharding.scatter(state.accum_grads)
        sums = ranks.all_sum(mx.stack([squares_step(grads), state.accum_weight]))
        zeros = zeros_like(state.params)
        norm, factor = norm_and_factor(sums[0], sums[1], max_grad_norm)
        numbers = optimizer.numbers(state.opt_state["moments"], state.update_step)
        finite = mx.isfinite(norm) & mx.isfinite(numbers.rate)
        opt_state, sound = step(grads, state.opt_state, numbers, factor, finite)
        failed = ranks.all_sum(1.0 - sound.astype(mx.float32).reshape(1))[0] > 0
        if failed.item():  # the other ranks have new values: no rank uses them
            opt_state, params = state.opt_state, state.params
        else:
            params = sharding.gather(opt_state["masters"], state.params)
        state = attrs.evolve(
            state,
            params=params,
            opt_state=opt_state,
            accum_grads=zeros,
            accum_weight=mx.array(0.0),
            update_step=state.update_step + 1,
        )
        return state, UpdateStats(norm, numbers.rate, failed)

    return update_step


def _sum(x: mx.array) -> mx.array:
    """The sum of a vector, by columns first, because on a CPU one long sum loses digits."""
    return mx.pad(x, [(0, -x.size % 1024)]).reshape(-1, 1024).sum(axis=0).sum()


def _with_roles(
    state: TrainState, params: Tree, other: Callable[[Tree], Tree], opt_state: Tree
) -> TrainState:
    """The state with these parameters in each role that has the policy's; through `other` in the others."""

    def role(tree: Tree) -> Tree:
        return params if tree is state.params else None if tree is None else other(tree)

    roles = {name: role(getattr(state, name)) for name in ("params", "old_params", "ref_params")}
    return attrs.evolve(state, opt_state=opt_state, **roles)


def _moment(state: TrainState, name: str) -> Tree:
    return tree_map(lambda _, held: held[name], state.params, state.opt_state)


def _check(state: TrainState) -> None:
    dtypes = {str(leaf.dtype) for leaf in (*arrays_of(state.params), *arrays_of(state.opt_state))}
    if dtypes - {str(mx.float32), str(mx.int32)}:
        raise ValueError(
            f"found {', '.join(sorted(dtypes))}: expected masters and moments in float32; bfloat16 is not "
            "sharded"
        )
