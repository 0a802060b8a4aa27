"""A run's state from a checkpoint; the same start for all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx

import grpo_fn as g
from grpo_fn.learner import share
from grpo_fn.trees import named_leaves, on_host, structure_of
from runners.checkpoints.resume import Origin
from runners.checkpoints.run_folder import TRAINER_STATE
from runners.checkpoints.run_inputs import data_digest
from runners.checkpoints.state_files import DTYPES, STATE_FILE, load_trees, pack, unpack
from runners.errors import UserError
from runners.machine.versions import installed_version
from runners.ranks.ranks import Ranks
from runners.training.run_state import RunState, restore_state
from runners.training.setup import Run

_ROUNDING = ("quantization", "group_size", "quantize_head", "calibration", "bits_budget")  # of the sampler


def restore(run: Run, origin: Origin, *, changed: bool = False) -> RunState:
    """The state of a checkpoint.

    `changed` is --allow-config-change: it allows other training data, and roles of another precision.

    Raises UserError if the checkpoint belongs to another model or to other data.
    """
    if origin.facts.data != data_digest(run.data.train) and not changed:
        raise UserError(
            f"{origin.folder} was trained on other data than {run.config.data.source} has now; "
            "--allow-config-change continues anyway"
        )
    train, trees = load_trees(origin.folder)
    state = restore_state(origin.facts.loop, trees, train, f"{origin.folder / TRAINER_STATE}: loop")
    first, file = run.learner.outline or run.learner.state, origin.folder / STATE_FILE
    assert first is not None
    for name in ("params", "opt_state", "accum_grads", "accum_weight", "step", "update_step", "key"):
        if _shape(getattr(first, name)) != _shape(getattr(train, name)):
            raise UserError(f"{file}: {name} is of another model, or of another model.tune")
    if changed:
        if run.learner.sharding is not None and (train.ref_params is None) != (first.ref_params is None):
            raise UserError(
                f"{origin.folder}: loss.beta adds or removes the reference, which is not possible with "
                "optim.shard = true"
            )
        if train.ref_params is None or _shape(train.ref_params) != _shape(first.ref_params):
            train = attrs.evolve(train, ref_params=first.ref_params)  # in the precision of this config
    if train.old_params is None:  # saved within an update, when the sampler's weights were given up
        train = g.sync_old(train)
    known = [_shape(first.params), _shape(first.ref_params)]
    for tree in (train.old_params, train.ref_params):
        if tree is not None and _shape(tree) not in known:
            raise UserError(f"{file}: a role's weights are of another model or precision")
    budget = min(state.micro_batch_tokens, run.config.system.micro_batch_tokens)
    if origin.facts.config.get("stop") != run.config.to_dict()["stop"]:  # other conditions, nothing reached
        state = attrs.evolve(state, seen=attrs.evolve(state.seen, reached=None))
    known, first = state.curriculum, run.curriculum
    if known is None or first is None or len(known.step_n) != len(first.step_n):  # of other data
        state = attrs.evolve(state, curriculum=first)
    was, now = origin.facts.config.get("rollout", {}), run.config.to_dict()["rollout"]
    if any(was.get(key, now[key]) != now[key] for key in _ROUNDING):  # what was found is of another format
        state = attrs.evolve(state, moments=None, formats=None, sampler_format="", fallback=None)
    return attrs.evolve(state, train=train, micro_batch_tokens=budget)


def _shape(tree: Any) -> tuple[Any, Any]:
    arrays: list[Any] = []
    structure = structure_of(tree, arrays)
    return structure, [(array.shape, array.dtype) for array in arrays]


def check_alike(ranks: Ranks, run: Run, inputs: Mapping[str, Any]) -> None:
    """Raises UserError, on all ranks, if one has other data, weights, rewards or versions than rank 0.

    `inputs` are the digests that a resumed run compares as well.
    """
    if ranks.is_alone:
        return
    state = run.learner.state
    assert state is not None
    config = run.config.to_dict()
    sections = ("rollout", "loss", "optim", "sft", "eval")
    own = {
        **{f"the config's [{name}]": _digest(config[name]) for name in sections},
        "the training data": data_digest(run.data.train),
        "the pass rates of data.difficulty": run.curriculum and _digest(run.curriculum.first_n.tolist()),
        **inputs,
        "the model's weights": _weights(state.params),
        "the version of mlx": installed_version("mlx"),
        "the version of mlx-lm": installed_version("mlx-lm"),
    }
    first, *others = [message.value for message in ranks.all_gather_object("the start", own)]
    for rank, found in enumerate(others, 1):
        for name in first | found:
            if first.get(name) != found.get(name):
                raise UserError(f"{name}: {ranks.name(rank)} and {ranks.name(0)} differ; expected the same")


def _digest(value: Any) -> str:
    """A short digest of a plain value."""
    return hashlib.sha256(repr(value).encode("utf-8", "backslashreplace")).hexdigest()


def _weights(params: Any) -> list[int]:
    """A sum over the bits of each leaf: cheap, and almost always different for other weights."""
    bits = [
        mx.contiguous(leaf).reshape(-1).view(mx.uint16 if leaf.dtype.size == 2 else mx.uint32)
        for leaf in named_leaves(params).values()
    ]
    sums = mx.stack([(leaf.astype(mx.uint32) * (mx.arange(leaf.size) % 65521 + 1)).sum() for leaf in bits])
    return [int(number) for number in on_host(sums)]


def share_start(ranks: Ranks, run: Run, state: RunState, *, resumed: bool) -> RunState:
    """Gives all ranks the state from which rank 0 starts, the part of it that each keeps.

    `state`: rank 0's as `restore` gave it if the run is `resumed`, which only rank 0 knows; else the first.
    """
    if ranks.is_alone:
        return state
    arrays: dict[str, mx.array] = {}
    about: dict[str, Any] = {}
    if resumed:
        trees, known = {"train": attrs.asdict(state.train, recurse=False), "loop": state.trees()}, {}
        shapes = {name: pack(tree, name, arrays, known) for name, tree in trees.items()}
        leaves = {name: [list(a.shape), str(a.dtype).removeprefix("mlx.core.")] for name, a in arrays.items()}
        about = {"shapes": shapes, "plain": state.plain(), "leaves": leaves}
    with ranks.committing("the checkpoint", about) as messages:
        found = messages[0].value
        if not found:
            return state
        with ranks.moving_arrays():
            if not ranks.is_rank_zero:
                arrays = {
                    name: mx.zeros(shape, DTYPES[dtype]) for name, (shape, dtype) in found["leaves"].items()
                }
            arrays = share(arrays, ranks)
    if not ranks.is_rank_zero:
        trees = {name: unpack(shape, arrays) for name, shape in found["shapes"].items()}
        state = restore_state(found["plain"], trees["loop"], g.TrainState(**trees["train"]), "rank 0's state")
    sharding = run.learner.sharding
    return state if sharding is None else attrs.evolve(state, train=sharding.shard(state.train))
