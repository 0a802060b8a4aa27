"""Defines `RunState`: everything that a run must remember between two steps, which is also the
content of a checkpoint.

The state is saved and restored field by field, and all ranks start from the same state. The
metadata of a field that is not saved contains the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx

import grpo_fn as g
from grpo_fn.learner import Shape
from grpo_fn.trees import named_leaves, on_host, structure_of
from runners.checkpoints.checkpoint import DTYPES, STATE_FILE, load_trees, pack, unpack
from runners.checkpoints.resume import Origin
from runners.checkpoints.run_folder import TRAINER_STATE
from runners.checkpoints.run_inputs import data_digest
from runners.checkpoints.values import decoded, encoded, has_arrays
from runners.config import rules
from runners.data.curriculum import Estimates
from runners.errors import UserError
from runners.machine.versions import installed_version
from runners.ranks.ranks import Ranks
from runners.rewards.experience import Experience
from runners.telemetry.run_statistics import Tally
from runners.telemetry.run_watch import Seen
from runners.training.sampler import Sampler, restored

if TYPE_CHECKING:
    from runners.training.setup import Run

Pieces = list[g.Batch]  # micro-batches

_COUNT = "0 <= x <= 1e18"


def _unsaved(default: Any, why: str) -> Any:
    return attrs.field(default=default, metadata={"unsaved": why})


@attrs.frozen(eq=False, kw_only=True)
class Flight:
    """A batch step whose rollout is in progress. Its fields are copied from the state and determine
    the rollout's inputs. After a resume, the rollout is restarted from these fields.
    """

    batch_step: int = rules.key(0, "number of earlier rollouts", _COUNT)
    update: int = rules.key(0, "the update whose weights sample it", _COUNT)
    position: int = rules.key(0, "number of training examples used before", _COUNT)
    slow_rewards: Mapping[str, int] = attrs.field(factory=dict)
    sampler: Sampler = attrs.field(factory=Sampler)
    curriculum: Estimates | None = None
    old_params: Any = None

    @classmethod
    def of(cls, state: RunState, batch_step: int, position: int) -> Flight:
        """Creates a batch step that starts in this state."""
        return cls(
            batch_step=batch_step,
            update=state.update,
            position=position,
            slow_rewards=state.slow_rewards,
            sampler=state.sampler,
            curriculum=state.curriculum,
            old_params=state.train.old_params,
        )

    def state(self, state: RunState) -> RunState:
        """Returns the state at the start of this batch step. Only the fields that `propose` reads
        are restored.
        """
        return attrs.evolve(
            state,
            batch_step=self.batch_step,
            update=self.update,
            position=self.position,
            slow_rewards=self.slow_rewards,
            sampler=self.sampler,
            curriculum=self.curriculum,
            train=attrs.evolve(state.train, old_params=self.old_params),
        )


@attrs.frozen(eq=False, kw_only=True)
class RunState:
    """The state of a run between two steps. The state is immutable, and each step creates a new
    one.
    """

    train: g.TrainState = _unsaved(
        attrs.NOTHING, "a checkpoint stores it in separate files, as a model"
    )
    batch_step: int = rules.key(0, "number of rollouts so far", _COUNT)
    update: int = rules.key(0, "number of optimizer updates so far", _COUNT)
    reused: int = rules.key(0, "number of updates that used the current rollouts", _COUNT)
    position: int = rules.key(0, "number of training examples used so far", _COUNT)
    sampled_tokens: int = rules.key(0, "number of tokens sampled by all ranks", _COUNT)
    synced_at: int = rules.key(0, "batch step of the last sync", _COUNT)
    ref_synced_at: int = rules.key(0, "batch step of the reference's last sync", _COUNT)
    evaluated_at: int = rules.key(-1, "update of the last evaluation; -1: never", "-1 or >= 0")
    scores: tuple[float, ...] = ()  # exact match at each evaluation
    eval_rewards: tuple[float, ...] = ()  # mean of the run's own rewards at each evaluation
    reward: float | None = None  # at the last update
    elapsed: float = rules.key(0.0, "seconds, over all processes of the run", ">= 0")
    micro_batch_tokens: int = rules.key(
        1, "the config's budget, or less after memory has run out", ">= 1"
    )
    bad_updates: int = rules.key(0, "number of skipped updates", _COUNT)
    bad_updates_in_a_row: int = rules.key(
        0, "number of consecutive skipped updates up to now", _COUNT
    )
    seen: Seen = attrs.field(factory=Seen)  # what the watch has recorded
    slow_rewards: Mapping[str, int] = attrs.field(factory=dict)  # see `Experience`
    sampler: Sampler = attrs.field(factory=Sampler)
    flights: tuple[Flight, ...] = ()  # the next batch steps, if rollout.max_staleness > 0
    tallies: tuple[Tally, ...] = ()  # for the batch steps since the last update
    waiting: tuple[tuple[Pieces, ...], ...] = ()  # for each of these steps: minibatch × micro-batch
    shapes: frozenset[Shape] = frozenset()  # micro-batch shapes for which the steps are compiled
    curriculum: Estimates | None = None  # for the training prompts; None: data.curriculum is "none"
    experiences: tuple[Experience, ...] = _unsaved(
        (), "the experiences of these steps that this process created"
    )
    loss_stats: tuple[g.LossStats, ...] = _unsaved(
        (), "exists only between the gradients and their update"
    )

    @property
    def em(self) -> float | None:
        """Exact match at the last evaluation, from 0 to 1, or None if it was not measured."""
        return self.scores[-1] if self.scores else None

    def saved(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns all saved fields: JSON values, and trees for the values that contain arrays."""
        plain: dict[str, Any] = {}
        trees: dict[str, Any] = {}
        for field in attrs.fields(type(self)):
            if "unsaved" not in field.metadata:
                value = encoded(getattr(self, field.name))
                (trees if has_arrays(value) else plain)[field.name] = value
        return plain, trees


def restore_state(
    plain: Mapping[str, Any],
    trees: Mapping[str, Any],
    train: g.TrainState,
    where: str,
    kind: type[RunState] = RunState,
) -> RunState:
    """Restores a state from the result of `saved`, after it has passed through JSON. Raises
    UserError, starting with `where`, for invalid values.
    """
    return decoded({**plain, **trees}, kind, where, train=train)


def first_state(run: Run) -> RunState:
    """Returns the state before a run's first step."""
    learner = run.learner
    assert learner.state is not None
    return RunState(
        train=learner.state,
        micro_batch_tokens=run.config.system.micro_batch_tokens,
        curriculum=run.curriculum,
        sampler=learner.sampler,
    )


# keys of [rollout] that determine how the sampler's weights are rounded
_ROUNDING = ("quantization", "group_size", "quantize_head", "calibration", "bits_budget")
# parts of the training state whose shapes depend on the model and on model.tune
_OF_MODEL = ("params", "opt_state", "accum_grads", "accum_weight", "step", "update_step", "key")


def restore(run: Run, origin: Origin, *, changed: bool = False) -> RunState:
    """Restores a run's state from a checkpoint.

    `changed` is --allow-config-change, which allows different training data and a different
    precision for the roles.

    Raises UserError if the checkpoint belongs to a different model or to different data.
    """
    if origin.facts.data != data_digest(run.data.train) and not changed:
        raise UserError(
            f"{origin.folder} was trained on data that differs from {run.config.data.source}; "
            f"--allow-config-change continues anyway"
        )
    train, trees = load_trees(origin.folder)
    state = restore_state(origin.facts.loop, trees, train, f"{origin.folder / TRAINER_STATE}: loop")
    first, file = run.learner.state, origin.folder / STATE_FILE
    assert first is not None
    for name in _OF_MODEL:
        if _shape(getattr(first, name)) != _shape(getattr(train, name)):
            raise UserError(f"{file}: {name} belongs to a different model or model.tune")
    if changed and _shape(train.ref_params) != _shape(first.ref_params):
        train = attrs.evolve(train, ref_params=first.ref_params)  # in this config's precision
    if train.old_params is None:  # saved within an update, after the sampler's weights were freed
        train = g.sync_old(train)
    shapes = [_shape(None), _shape(first.params), _shape(first.ref_params)]
    for tree in (train.old_params, train.ref_params, *(each.old_params for each in state.flights)):
        if _shape(tree) not in shapes:
            raise UserError(f"{file}: a role's weights belong to a different model or precision")
    was, now = origin.facts.config, run.config.to_dict()
    seen = state.seen
    if was.get("stop") != now["stop"]:  # no new condition has been reached
        seen = attrs.evolve(seen, reached=None)
    estimates, initial = state.curriculum, run.curriculum
    if estimates is None or initial is None or len(estimates.step_n) != len(initial.step_n):
        estimates = initial  # the training data differ
    rollout = was.get("rollout", {})
    learner = run.learner
    if any(rollout.get(key, now["rollout"][key]) != now["rollout"][key] for key in _ROUNDING):
        # What the run has learned about its sampler applies to a different format.
        sampler = attrs.evolve(learner.sampler, version=state.sampler.version)
    else:
        sampler = restored(state.sampler, run.config, learner.quantized)
    return attrs.evolve(
        state,
        train=train,
        micro_batch_tokens=min(state.micro_batch_tokens, run.config.system.micro_batch_tokens),
        seen=seen,
        curriculum=estimates,
        sampler=sampler,
        flights=tuple(
            attrs.evolve(each, sampler=restored(each.sampler, run.config, learner.quantized))
            for each in (() if changed else state.flights)
        ),
    )


def _shape(tree: Any) -> tuple[Any, Any]:
    """Returns a tree's structure, and the shapes and dtypes of its arrays."""
    arrays: list[Any] = []
    return structure_of(tree, arrays), [(array.shape, array.dtype) for array in arrays]


def check_alike(ranks: Ranks, run: Run, inputs: Mapping[str, Any]) -> None:
    """Raises UserError on all ranks if a rank's config, data, weights, rewards or versions differ
    from rank 0's.

    `inputs` are the digests that a resumed run also compares.
    """
    if ranks.is_alone:
        return
    state, config = run.learner.state, run.config.to_dict()
    assert state is not None
    sections = ("rollout", "loss", "optim", "sft", "eval")
    own = {
        **{f"the config's [{name}]": config[name] for name in sections},
        "the training data": data_digest(run.data.train),
        "the pass rates of data.difficulty": run.curriculum and run.curriculum.first_n.tolist(),
        **inputs,
        "the model's weights": _weights(state.params),
        "the version of mlx": installed_version("mlx"),
        "the version of mlx-lm": installed_version("mlx-lm"),
    }
    first, *others = ranks.all_gather_object("the start", own)
    for rank, found in enumerate(others, 1):
        for name in first | found:
            if first.get(name) != found.get(name):
                raise UserError(
                    f"{name}: {ranks.name(rank)} and {ranks.name(0)} differ; expected the same"
                )


def _weights(params: Any) -> list[int]:
    """Returns, for each leaf, a sum over its bits, which is cheap to compute and almost always
    different for different weights.
    """
    sums = [
        mx.contiguous(leaf).reshape(-1).view(mx.uint16).astype(mx.uint32).sum()
        for leaf in named_leaves(params).values()
    ]
    return on_host(mx.stack(sums))


def share_start(ranks: Ranks, run: Run, state: RunState, *, resumed: bool) -> RunState:
    """Distributes rank 0's initial state to all ranks, and returns this rank's state.

    `state` on rank 0 is the result of `restore` if the run is `resumed`, which only rank 0 knows;
    otherwise `state` is the first state.
    """
    if ranks.is_alone:
        return state
    arrays: dict[str, mx.array] = {}
    about: dict[str, Any] = {}
    if resumed:
        plain, loop = state.saved()
        trees = {"train": attrs.asdict(state.train, recurse=False), "loop": loop}
        about = {
            "plain": plain,
            "structure": pack(trees, "state", arrays, {}),
            "leaves": {
                name: [list(array.shape), str(array.dtype).removeprefix("mlx.core.")]
                for name, array in arrays.items()
            },
        }
    with ranks.committing("the checkpoint", about) as values:
        about = values[0]
        if not about:
            return state
        if not ranks.is_rank_zero:
            arrays = {
                name: mx.zeros(shape, DTYPES[dtype])
                for name, (shape, dtype) in about["leaves"].items()
            }
        arrays = ranks.shared(arrays)
    if ranks.is_rank_zero:
        return state
    trees = unpack(about["structure"], arrays)
    train = g.TrainState(**trees["train"])
    state = restore_state(about["plain"], trees["loop"], train, "rank 0's state")
    sampler = restored(state.sampler, run.config, run.learner.quantized)
    return attrs.evolve(state, sampler=sampler)
