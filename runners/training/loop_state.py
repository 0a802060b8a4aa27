"""A run's state between two steps, besides its TrainState: saved and restored with every checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from grpo_fn.images import ImageRows
from grpo_fn.learner import Shape
from runners.config import rules
from runners.telemetry.run_statistics import Tally


@attrs.define(eq=False, kw_only=True)
class LoopState:
    """The loop's variables. A new variable needs only a line here to be saved.

    Fields of plain types travel as JSON; those named in `TREES` hold arrays.
    """

    batch_step: int = 0  # rollouts made
    update: int = 0  # optimizer updates taken
    reused: int = 0  # how many updates the current rollouts have served
    position: int = 0  # training examples handed out
    sampled_tokens: int = 0
    synced_at: int = 0  # batch steps
    ref_synced_at: int = 0
    version: int = 0  # the update that made the sampler's weights
    stale: bool = False  # whether the learner has changed since the sync
    evaluated_at: int = -1  # updates; -1: never
    scores: tuple[float, ...] = ()  # exact match, of each evaluation
    reward: float | None = None  # of the last update
    elapsed: float = 0.0  # seconds, of all processes
    tallies: list[Tally] = attrs.field(factory=list)  # of the batch steps since the last update
    waiting: list[list[list[g.Batch]]] = attrs.field(factory=list)  # batch step × minibatch × micro-batch
    stats: list[g.LossStats] = attrs.field(factory=list)  # of gradients that an older version has saved
    shapes: set[Shape] = attrs.field(factory=set)  # of micro-batches for which the steps are compiled

    def plain(self) -> dict[str, Any]:
        """The fields that JSON holds."""
        return {name: getattr(self, name) for name in _plain_fields()}

    def trees(self) -> dict[str, Any]:
        """The other fields, as dicts, lists, arrays and integers."""
        return {
            "tallies": [_tally_tree(tally) for tally in self.tallies],
            "waiting": [
                [[_piece_tree(piece) for piece in pieces] for pieces in parts] for parts in self.waiting
            ],
            "stats": [stats._asdict() for stats in self.stats],
            "shapes": [list(shape) for shape in sorted(self.shapes)],
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any], trees: Mapping[str, Any]) -> LoopState:
        """The inverse of `plain` (through JSON) and `trees`; ValueError or TypeError for anything else."""
        kinds = _plain_fields()
        plain = {"version": plain.get("update"), **plain}  # a checkpoint from before it was saved
        if missing := sorted(kinds.keys() - plain.keys()):
            raise ValueError(f"{missing[0]} is missing")
        return cls(
            **{name: _structured(name, plain[name], kind) for name, kind in kinds.items()},
            tallies=[_tally_of(tree) for tree in trees["tallies"]],
            waiting=[
                [[_piece_of(piece) for piece in pieces] for pieces in parts] for parts in trees["waiting"]
            ],
            # Before `num_ratios` was saved, the clip shares were always of tokens.
            stats=[g.LossStats(**{"num_ratios": stats["num_tokens"], **stats}) for stats in trees["stats"]],
            shapes={Shape(*map(int, shape[: len(Shape._fields)])) for shape in trees["shapes"]},
        )


TREES = ("tallies", "waiting", "stats", "shapes")
_FLOATS = ("rewards_pg", "values_kb")


def _plain_fields() -> dict[str, Any]:
    fields = attrs.fields(attrs.resolve_types(LoopState))
    return {field.name: field.type for field in fields if field.name not in TREES}


def _structured(name: str, value: Any, kind: Any) -> Any:
    try:
        return rules.structure(value, kind)
    except rules.Mismatch as error:
        raise ValueError(f"{name}: {error.reason(value)}") from error


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
