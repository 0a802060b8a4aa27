"""`RunState`: all that a run has to remember between two steps, and what a checkpoint holds.

It is saved and restored as a whole, and all ranks start from the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from grpo_fn.images import ImageRows
from grpo_fn.learner import Shape, share
from grpo_fn.policy import Moments
from grpo_fn.trees import named_leaves, on_host, structure_of
from runners.checkpoints.checkpoint import DTYPES, STATE_FILE, from_table, load_trees, pack, unpack
from runners.checkpoints.resume import Origin
from runners.checkpoints.run_folder import TRAINER_STATE
from runners.checkpoints.run_inputs import data_digest
from runners.config import rules
from runners.data.curriculum import Estimates
from runners.errors import UserError
from runners.machine.versions import installed_version
from runners.ranks.ranks import Ranks
from runners.rewards.experience import Experience
from runners.telemetry.run_statistics import Tally
from runners.telemetry.run_watch import Seen

if TYPE_CHECKING:
    from runners.training.setup import Run

Pieces = list[g.Batch]  # micro-batches


_COUNT = "0 <= x <= 1e18"


@attrs.frozen(kw_only=True)
class Counters:
    """The part of a run's state that trainer_state.json holds as `loop`."""

    batch_step: int = rules.key(0, "rollouts made", _COUNT)
    update: int = rules.key(0, "optimizer updates taken", _COUNT)
    reused: int = rules.key(0, "how many updates the current rollouts have served", _COUNT)
    position: int = rules.key(0, "training examples handed out", _COUNT)
    sampled_tokens: int = rules.key(0, "by all ranks", _COUNT)
    synced_at: int = rules.key(0, "batch steps", _COUNT)
    ref_synced_at: int = rules.key(0, "batch steps", _COUNT)
    version: int = rules.key(0, "the update that made the sampler's weights", _COUNT)
    stale: bool = False  # whether the learner has changed since the sync
    evaluated_at: int = rules.key(-1, "updates; -1: never", "-1 or >= 0")
    scores: tuple[float, ...] = ()  # exact match, of each evaluation
    eval_rewards: tuple[float, ...] = ()  # the mean of the run's own rewards, of each evaluation
    reward: float | None = None  # of the last update
    elapsed: float = rules.key(0.0, "seconds, of all processes", ">= 0")
    micro_batch_tokens: int = rules.key(1, "the budget: the config's, or less once memory ran out", ">= 1")
    fallback: str | None = None  # why the sampler gave up its quantized weights
    sampler_format: str = ""  # of its quantized weights, if finer than the config's
    bad_updates: int = rules.key(0, "skipped", _COUNT)
    bad_updates_in_a_row: int = rules.key(0, "skipped, up to the last one", _COUNT)
    seen: Seen = attrs.field(factory=Seen)  # by the watch


@attrs.frozen(eq=False, kw_only=True)
class RunState(Counters):
    """The state of a run between two steps: a value, replaced as a whole when a step is done."""

    train: g.TrainState
    tallies: tuple[Tally, ...] = ()  # of the batch steps since the last update
    waiting: tuple[list[Pieces], ...] = ()  # of these steps: minibatch × micro-batch
    moments: Moments | None = None  # of the sampler's layers, for calibrated rounding
    formats: Mapping[str, str] | None = None  # of its weights, by `rollout.bits_budget`
    shapes: frozenset[Shape] = frozenset()  # of micro-batches for which the steps are compiled
    curriculum: Estimates | None = None  # of the training prompts; None: data.curriculum is "none"
    experiences: tuple[Experience, ...] = ()  # of these steps, as far as this process made them; not saved

    @property
    def em(self) -> float | None:
        """Exact match at the last evaluation, 0 to 1; None: not measured."""
        return self.scores[-1] if self.scores else None

    def plain(self) -> dict[str, Any]:
        """The counters, as JSON holds them."""
        values = {field.name: getattr(self, field.name) for field in attrs.fields(Counters)}
        return values | {"seen": attrs.asdict(self.seen)}

    def trees(self) -> dict[str, Any]:
        """What belongs to the TrainState, as dicts, lists, arrays and plain values."""
        names = ("tallies", "waiting", "curriculum")
        return {
            **{name: _tree(getattr(self, name)) for name in names},
            "shapes": [list(shape) for shape in sorted(self.shapes)],
            "moments": dict(self.moments or {}),
            "formats": dict(self.formats or {}),
        }


def restore_state(
    plain: Mapping[str, Any], trees: Mapping[str, Any], train: g.TrainState, where: str
) -> RunState:
    """The inverse of `plain` (through JSON) and `trees`. UserError, which begins with `where`, for others."""
    counters, known = from_table(plain, Counters, where), trees.get("curriculum")
    try:
        return RunState(
            **_fields(counters),
            train=train,
            tallies=tuple(_tally_of(tree) for tree in trees["tallies"]),
            waiting=tuple(
                [[_piece_of(piece) for piece in pieces] for pieces in parts] for parts in trees["waiting"]
            ),
            shapes=frozenset(Shape(*map(int, shape)) for shape in trees["shapes"]),
            curriculum=known and Estimates(**{name: np.array(array) for name, array in known.items()}),
            moments=trees["moments"] or None,
            formats=trees["formats"] or None,
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{where}: not what a run saved: {error}") from error


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in attrs.fields(type(value))}


def _tree(value: Any) -> Any:
    """Values of attrs as dicts, NumPy's arrays as MLX's."""
    if attrs.has(type(value)):
        value = _fields(value)
    if isinstance(value, dict):
        return {name: _tree(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_tree, value))
    if isinstance(value, np.ndarray):  # MLX has float64 only on the CPU: they are pairs of integers
        return mx.array(np.ascontiguousarray(value).view(np.uint32) if value.dtype == np.float64 else value)
    return value


def _piece_of(tree: Mapping[str, Any]) -> g.Batch:
    images = tree.get("images")
    return g.Batch(**{**tree, "images": None if images is None else ImageRows(**images)})


def _tally_of(tree: Mapping[str, Any]) -> Tally:
    arrays = {name: np.array(array) for name, array in tree.items() if isinstance(array, mx.array)}
    floats = {name: arrays[name].view(np.float64) for name in ("rewards_pg", "values_kb")}
    counts = {name: np.array(array) for name, array in tree["counts"].items()}
    return Tally(**{**tree, **arrays, **floats, "counts": counts})


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
    first, file = run.learner.state, origin.folder / STATE_FILE
    assert first is not None
    for name in ("params", "opt_state", "accum_grads", "accum_weight", "step", "update_step", "key"):
        if _shape(getattr(first, name)) != _shape(getattr(train, name)):
            raise UserError(f"{file}: {name} is of another model, or of another model.tune")
    if changed and (train.ref_params is None or _shape(train.ref_params) != _shape(first.ref_params)):
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
    return structure_of(tree, arrays), [(array.shape, array.dtype) for array in arrays]


def check_alike(ranks: Ranks, run: Run, inputs: Mapping[str, Any]) -> None:
    """Raises UserError, on all ranks, if one has other data, weights, rewards or versions than rank 0.

    `inputs` are the digests that a resumed run compares as well.
    """
    if ranks.is_alone:
        return
    state, config = run.learner.state, run.config.to_dict()
    assert state is not None
    own = {
        **{f"the config's [{name}]": config[name] for name in ("rollout", "loss", "optim", "sft", "eval")},
        "the training data": data_digest(run.data.train),
        "the pass rates of data.difficulty": run.curriculum and run.curriculum.first_n.tolist(),
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


def _weights(params: Any) -> list[int]:
    """A sum over the bits of each leaf: cheap, and almost always different for other weights."""
    leaves = [mx.contiguous(leaf).reshape(-1).view(mx.uint16) for leaf in named_leaves(params).values()]
    return [int(number) for number in on_host(mx.stack([leaf.astype(mx.uint32).sum() for leaf in leaves]))]


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
        if not (found := messages[0].value):
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
    return state
