"""A checkpoint's state in the place of a run's first one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

import grpo_fn as g
from grpo_fn.trees import Tree, structure_of
from runners.checkpoints.resume import Origin, data_digest
from runners.checkpoints.snapshot import TRAINER_STATE
from runners.checkpoints.state_files import STATE_FILE, load_trees
from runners.errors import UserError
from runners.training.loop_state import LoopState
from runners.training.setup import Run


def restore(run: Run, origin: Origin, *, changed: bool = False) -> tuple[g.TrainState, LoopState]:
    """The checkpoint's state in the place of the run's first one, and where the loop stands.

    `changed` allows what --allow-config-change does: other training data, and roles of another precision.

    Raises UserError where the checkpoint belongs to another model or to other data.
    """
    state, trees = load_trees(origin.folder)
    file = origin.folder / TRAINER_STATE
    try:
        at = LoopState.of(origin.table("loop"), trees)
        anchor = trees["anchor"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{file}: not what a run saved: {error}") from error
    if origin.facts.get("data") != data_digest(run.data.train) and not changed:
        raise UserError(
            f"{origin.folder} was trained on other data than {run.config.data.source} has now; "
            "--allow-config-change goes on with it"
        )
    first = run.learner.outline or run.learner.state
    assert first is not None
    _check_same_model(origin, first, state)
    role = run.learner.role
    role.restore(origin.facts)
    role.anchor = anchor
    if changed:
        if run.learner.sharding is not None and (state.ref_params is None) != (first.ref_params is None):
            raise UserError(
                f"{origin.folder}: loss.beta begins or ends a reference, which optim.shard = true cannot go "
                "on with"
            )
        state = _with_roles(run, state, first, anchor)
    for tree in (state.old_params, state.ref_params, anchor):
        _check_weights(origin, tree, (first.params, first.old_params, first.ref_params))
    run.stream.position = at.position
    return state, at


def _check_same_model(origin: Origin, first: g.TrainState, state: g.TrainState) -> None:
    for name in ("params", "opt_state", "accum_grads", "accum_weight", "step", "update_step", "key"):
        if _shape(getattr(first, name)) != _shape(getattr(state, name)):
            raise UserError(
                f"{origin.folder / STATE_FILE}: {name} is of another model, or of another model.tune"
            )


def _check_weights(origin: Origin, tree: Tree, known: Sequence[Tree]) -> None:
    if tree is not None and _shape(tree) not in [_shape(other) for other in known]:
        raise UserError(f"{origin.folder / STATE_FILE}: a role's weights are of another model or precision")


def _shape(tree: Tree) -> tuple[Any, Any]:
    arrays: list[Any] = []
    structure = structure_of(tree, arrays)
    return structure, [(array.shape, array.dtype) for array in arrays]


def _with_roles(run: Run, state: g.TrainState, first: g.TrainState, anchor: Tree) -> g.TrainState:
    """The state's roles in the precision that the config asks for now."""
    role = run.learner.role
    if state.old_params is not None and anchor is not None:
        state = attrs.evolve(state, old_params=anchor if role.transform is None else role.transform(anchor))
    kept = state.ref_params is not None and _shape(state.ref_params) == _shape(first.ref_params)
    return state if kept else attrs.evolve(state, ref_params=first.ref_params)
