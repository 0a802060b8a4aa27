"""`RunState`: all that a run has to remember between two steps, and what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from grpo_fn.images import ImageRows
from grpo_fn.learner import Shape
from grpo_fn.policy import Moments
from runners.checkpoints.trainer_state import from_table
from runners.config import rules
from runners.data.curriculum import Estimates
from runners.errors import UserError
from runners.rewards.experience import Experience
from runners.telemetry.run_statistics import Tally
from runners.telemetry.run_watch import Seen

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
    eval_problems: int = rules.key(0, "of each evaluation; 0: all", _COUNT)
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
        names = [field.name for field in attrs.fields(Counters)]
        return {name: _plain(getattr(self, name)) for name in names}

    def trees(self) -> dict[str, Any]:
        """What belongs to the TrainState, as dicts, lists, arrays and integers."""
        return {
            "tallies": [_tally_tree(tally) for tally in self.tallies],
            "waiting": [
                [[_piece_tree(piece) for piece in pieces] for pieces in parts] for parts in self.waiting
            ],
            "shapes": [list(shape) for shape in sorted(self.shapes)],
            "curriculum": self.curriculum and {n: mx.array(a) for n, a in _fields(self.curriculum).items()},
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


_FLOATS = ("rewards_pg", "values_kb")


def _plain(value: Any) -> Any:
    return attrs.asdict(value) if attrs.has(type(value)) else value


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in attrs.fields(type(value))}


def _piece_tree(piece: g.Batch) -> dict[str, Any]:
    fields = _fields(piece)
    return fields if piece.images is None else {**fields, "images": _fields(piece.images)}


def _piece_of(tree: Mapping[str, Any]) -> g.Batch:
    images = tree.get("images")
    return g.Batch(**{**tree, "images": None if images is None else ImageRows(**images)})


def _tally_tree(tally: Tally) -> dict[str, Any]:
    # MLX has float64 only on the CPU, so the numbers are saved as pairs of integers.
    bits = {name: mx.array(np.ascontiguousarray(getattr(tally, name)).view(np.uint32)) for name in _FLOATS}
    return {
        **_fields(tally),
        **bits,
        "lengths_b": mx.array(tally.lengths_b),
        "finished_b": mx.array(tally.finished_b),
    }


def _tally_of(tree: Mapping[str, Any]) -> Tally:
    floats = {name: np.array(tree[name]).view(np.float64) for name in _FLOATS}
    counts = {name: np.array(tree[name]) for name in ("lengths_b", "finished_b")}
    return Tally(**{**tree, **floats, **counts})
