"""The start of a run on several ranks: they have the same model and data, and go on from the same state."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx

import grpo_fn as g
from grpo_fn.learner import share
from grpo_fn.trees import map_arrays, named_leaves, on_host
from runners.checkpoints.resume import Origin, data_digest
from runners.checkpoints.state_files import pack, unpack
from runners.errors import UserError, show
from runners.machine.versions import installed_version
from runners.ranks.ranks import Ranks
from runners.training.loop_state import LoopState
from runners.training.setup import Run


def check_alike(ranks: Ranks, run: Run, inputs: Mapping[str, Any]) -> None:
    """Raises UserError, on all ranks, where one has other data, weights, rewards or versions than rank 0.

    `inputs` are the digests that a resumed run compares, too.
    """
    if ranks.alone:
        return
    state = run.learner.state
    assert state is not None
    config = run.config.to_dict()
    own = {
        **{f"the config's [{name}]": _digest(config[name]) for name in ("rollout", "loss", "optim", "eval")},
        "the training data": data_digest(run.data.train),
        "the evaluation data": data_digest(run.data.evaluation),
        **inputs,
        "the model's weights": _weights(state.params),
        "the version of mlx": installed_version("mlx"),
        "the version of mlx-lm": installed_version("mlx-lm"),
    }
    messages = ranks.meet("the start", own)
    first = messages[0].value
    for rank, message in enumerate(messages):
        for name in dict.fromkeys([*first, *message.value]):
            if first.get(name) != message.value.get(name):
                versions = (
                    f" ({show(message.value.get(name))}, and {show(first.get(name))})"
                    if "version" in name
                    else ""
                )
                raise UserError(
                    f"{name}: {ranks.name(rank)} has another one than {ranks.name(0)}{versions}; all ranks "
                    "need the same"
                )


def _digest(value: Any) -> str:
    """A short name of a plain value."""
    return hashlib.sha256(repr(value).encode("utf-8", "backslashreplace")).hexdigest()


def _weights(params: Any) -> list[int]:
    """A sum over the bits of each leaf: cheap, and different for other weights but by rare chance."""
    bits = [
        mx.contiguous(leaf).reshape(-1).view(mx.uint16 if leaf.dtype.size == 2 else mx.uint32)
        for leaf in named_leaves(params).values()
    ]
    sums = mx.stack([(leaf.astype(mx.uint32) * (mx.arange(leaf.size) % 65521 + 1)).sum() for leaf in bits])
    return [int(number) for number in on_host(sums)]


def share_start(
    ranks: Ranks, run: Run, origin: Origin | None, state: g.TrainState | None, at: LoopState
) -> tuple[g.TrainState, LoopState, Origin | None]:
    """What rank 0 goes on from, on all ranks: one of them has the run's folder.

    Args:
        ranks: who meets.
        run: this rank's.
        origin: rank 0's; the others have none. None: the run starts from the beginning.
        state, at: rank 0's, as `restore` gave them; otherwise the first ones.
    """
    assert state is not None
    if ranks.alone:
        return state, at, origin
    arrays: dict[str, mx.array] = {}
    said: dict[str, Any] = {}
    role = run.learner.role
    if origin is not None:
        known: dict[int, str] = {}
        trees = {"state": attrs.asdict(state, recurse=False), "loop": at.trees(), "anchor": role.anchor}
        said = {
            "shapes": {name: pack(tree, name, arrays, known) for name, tree in trees.items()},
            "plain": at.plain(),
            "facts": origin.facts,
            "folder": str(origin.folder),
            "step": origin.step,
            "leaves": [
                [name, list(a.shape), str(a.dtype).removeprefix("mlx.core.")] for name, a in arrays.items()
            ],
        }
    found = ranks.meet("the checkpoint", said)[0].value
    if not found:
        return state, at, None
    if not ranks.first:
        arrays = {name: mx.zeros(shape, getattr(mx, dtype)) for name, shape, dtype in found["leaves"]}
    with ranks.moving_arrays():
        arrays = share(arrays, ranks)
    if ranks.first:
        assert origin is not None
        return _sharded(run, state), at, origin
    trees = {name: unpack(shape, arrays) for name, shape in found["shapes"].items()}
    at = LoopState.of(found["plain"], trees["loop"])
    role.restore(found["facts"])
    role.anchor = trees["anchor"]
    run.stream.position = at.position
    origin = Origin(Path(found["folder"]), found["step"], found["facts"])
    return _sharded(run, g.TrainState(**trees["state"])), at, origin


def _sharded(run: Run, state: g.TrainState) -> g.TrainState:
    """The part of a whole state that this rank keeps, and the sampler's anchor with it."""
    sharding, role = run.learner.sharding, run.learner.role
    if sharding is None:
        return state
    part = sharding.shard(state)
    if role.anchor is state.params:
        role.anchor = part.params
    elif role.anchor is not None:
        dtype = sharding.compute_dtype or mx.float32
        role.anchor = map_arrays(lambda leaf: leaf.astype(dtype), role.anchor)
    return part
