"""Splits a batch into micro-batches that fit the learner's memory, in few shapes and with little
padding.

Rows are sorted by length. Dynamic programming finds the cheapest split of that order into runs. The
cost of a run is its number of positions, including padding, plus a constant. A shape without a
compiled step costs more, so a larger known shape may be used instead.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import attrs
import mlx.core as mx

from grpo_fn.backends import number
from grpo_fn.compile import round_up
from grpo_fn.learner.batch import Batch
from grpo_fn.learner.batch_rows import take_part
from grpo_fn.trees import flat, on_host

PIECE_TOKENS = 256  # a micro-batch's fixed cost in tokens: launches, adding gradients
HEAD_SHARE = 0.25  # cost of a completion token's log-prob, in tokens that go through the blocks


class Shape(NamedTuple):
    """The sizes that a compiled step depends on."""

    prompts: int  # rows of `tokens_bl` if groups share their prompt; 0: each row has its own
    length: int  # columns of `tokens_bl`
    rows: int  # completions
    width: int  # columns of `targets_bt`

    @property
    def tokens(self) -> int:
        """Number of positions that pass through the model's blocks."""
        shared = self.prompts * self.length + self.rows * self.width
        return shared if self.prompts else self.rows * self.length

    def covers(self, other: "Shape") -> bool:
        """Returns whether a batch of the other shape can be padded to this shape."""
        longer = self.length >= other.length and self.width >= other.width
        more = self.rows >= other.rows and self.prompts >= other.prompts
        return longer and more and (self.prompts == 0) == (other.prompts == 0)


@attrs.frozen
class Row:
    """Sizes that describe a completion."""

    number: int  # index of the row in the batch
    group: int
    prompt: int  # tokens
    completion: int  # tokens up to the last unmasked one
    counted: int  # unmasked tokens


@attrs.frozen
class PackedRun:
    """A planned micro-batch: its rows, and the shape to which they are padded."""

    rows: tuple[Row, ...]
    shape: Shape


@attrs.frozen(kw_only=True)
class Packer:
    """Settings for packing; see `split_batch`."""

    max_tokens: int
    bucketed: bool
    known: frozenset[Shape] = attrs.field(default=frozenset(), converter=frozenset)
    new_shape_tokens: int = 0
    piece_tokens: int = PIECE_TOKENS  # a micro-batch's fixed cost in tokens
    # see `_choose`
    chosen: dict[Shape, tuple[float, Shape]] = attrs.field(init=False, factory=dict)

    def _size(self, size: int) -> int:
        return round_up(size) if self.bucketed else size

    def pack(self, rows: Sequence[Row], share_prompts: bool) -> list[PackedRun]:
        """Assigns all rows to runs; with `share_prompts`, groups stay together if that is cheaper."""
        cost, runs = self._pack_rows(rows)
        if share_prompts:
            shared_cost, shared_runs = self._pack_groups(rows)
            if shared_cost <= cost:
                return shared_runs
        return runs

    def _pack_rows(self, rows: Sequence[Row]) -> tuple[float, list[PackedRun]]:
        rows = sorted(rows, key=lambda row: row.prompt + row.completion)
        completions = [row.completion for row in rows]
        steps = _row_counts(len(rows)) if self.bucketed else list(range(1, len(rows) + 1))

        def shape(start: int, stop: int) -> Shape:
            width = max(completions[start:stop])
            length = self._size(rows[stop - 1].prompt + rows[stop - 1].completion)
            if self.bucketed:  # an octave apart: completions of such rows vary in length
                width = min(1 << (width - 1).bit_length(), length)
            return Shape(prompts=0, length=length, rows=stop - start, width=width)

        return self._cheapest([(row,) for row in rows], shape, steps)

    def _pack_groups(self, rows: Sequence[Row]) -> tuple[float, list[PackedRun]]:
        groups: dict[int, list[Row]] = {}
        for row in sorted(rows, key=lambda row: row.completion):
            groups.setdefault(row.group, []).append(row)
        units = flat(self._within_budget(group) for group in groups.values())
        units.sort(key=lambda unit: (unit[0].prompt, unit[-1].completion))

        def shape(start: int, stop: int) -> Shape:
            return self._shared_shape(units[start:stop])

        return self._cheapest(units, shape, _row_counts(len(units)))

    def _within_budget(self, group: Sequence[Row]) -> list[tuple[Row, ...]]:
        """Splits a group evenly if its rows have too many tokens for one run."""
        for count in range(1, len(group) + 1):
            bounds = [len(group) * i // count for i in range(count + 1)]
            units = [tuple(group[low:high]) for low, high in pairwise(bounds)]
            if max(self._shared_shape([unit]).tokens for unit in units) <= self.max_tokens:
                return units
        return [(row,) for row in group]

    def _shared_shape(self, units: Sequence[tuple[Row, ...]]) -> Shape:
        return Shape(
            prompts=self._size(len({unit[0].group for unit in units})),
            length=self._size(max(unit[0].prompt for unit in units)),
            rows=self._size(sum(map(len, units))),
            width=self._size(max(unit[-1].completion for unit in units)),  # the last is the longest
        )

    def _cheapest(
        self,
        units: Sequence[tuple[Row, ...]],
        shape: Callable[[int, int], Shape],
        steps: Sequence[int],
    ) -> tuple[float, list[PackedRun]]:
        """Returns the cost of the cheapest split into runs of neighbouring units, and the runs;
        `steps` are the allowed numbers of units per run.
        """
        # For the first n units: the cost, and the last run's start and shape.
        best: list[tuple[float, Any]] = [(0.0, None)]
        for stop in range(1, len(units) + 1):
            choices = []
            for step in steps:
                if step > stop:
                    break
                wanted = shape(stop - step, stop)
                if step > 1 and wanted.tokens > self.max_tokens:
                    break
                cost, chosen = self._choose(wanted)
                choices.append((best[stop - step][0] + cost, (stop - step, chosen)))
            best.append(min(choices, key=lambda choice: choice[0]))
        runs: list[PackedRun] = []
        stop = len(units)
        while stop:
            start, chosen = best[stop][1]
            runs.append(PackedRun(tuple(flat(units[start:stop])), chosen))
            stop = start
        return best[-1][0], runs[::-1]

    def _choose(self, wanted: Shape) -> tuple[float, Shape]:
        """Chooses the shape to which rows are padded; returns its cost and the shape."""
        if wanted not in self.chosen:
            extra = 0 if wanted in self.known else self.new_shape_tokens
            choices = [(self._cost(wanted) + extra, wanted)]
            covering = [shape for shape in self.known if shape.covers(wanted)] if extra else []
            choices += [
                (self._cost(each), each) for each in covering if each.tokens <= self.max_tokens
            ]
            self.chosen[wanted] = min(choices)
        return self.chosen[wanted]

    def _cost(self, shape: Shape) -> float:
        return shape.tokens + HEAD_SHARE * shape.rows * shape.width + self.piece_tokens


def piece_tokens(parameters: int) -> int:
    """Returns a micro-batch's fixed cost, in tokens, for a model with this many parameters."""
    return max(PIECE_TOKENS, number("launch") // parameters)


def _row_counts(most: int) -> list[int]:
    """Returns 1, 2, 3, 4, 6, 8, 12, … up to `most`; any number of rows is the sum of a few of
    these.
    """
    counts = {1 << k for k in range(most.bit_length())} | {3 << k for k in range(most.bit_length())}
    return sorted(count for count in counts if count <= most)


def split_batch(
    batch: Batch,
    *,
    max_tokens: int,
    bucketed: bool = True,
    share_prompts: bool = False,
    known: Collection[Shape] = (),
    new_shape_tokens: int = 0,
    piece_tokens: int = PIECE_TOKENS,
) -> list[Batch]:
    """Splits a batch into micro-batches of at most `max_tokens` tokens each, including padding.

    Rows of similar length are put into the same micro-batch. With `bucketed`, sizes are rounded up
    by at most an eighth, so that few shapes are compiled. Padding rows have an empty mask and do
    not count. A single row longer than `max_tokens` forms its own micro-batch.

    With `share_prompts`, a group's rows may stay together and use one copy of their prompt, if that
    takes fewer tokens. The model must support shared prompts: see `can_share`. Rows with given
    experts are not shared.

    Any split results in the same update, because the micro-batches' counts add up to the batch's.

    Args:
        known: shapes for which the step has already been compiled.
        new_shape_tokens: number of padding tokens that are accepted to avoid a new shape.
        piece_tokens: a micro-batch's fixed cost in tokens.

    Raises:
        ValueError: max_tokens < 1, or prompts cannot be shared because the batch has no groups.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens = {max_tokens}: expected at least 1")
    if share_prompts and batch.group_b is None:
        raise ValueError(
            "share_prompts requires group_b, the number of each row's prompt, which make_batch sets"
        )
    if batch.mask_bt.shape[0] == 0:
        return [batch]
    packer = Packer(
        max_tokens=max_tokens,
        bucketed=bucketed,
        known=known,
        new_shape_tokens=new_shape_tokens,
        piece_tokens=piece_tokens,
    )
    rows = _rows_of(batch)
    # The first micro-batch also counts the rows that were omitted from the batch.
    uncounted = batch.num_sequences - len(rows), batch.num_tokens - sum(row.counted for row in rows)
    batches = []
    for run in packer.pack(rows, share_prompts and batch.experts_blnk is None):
        sequences, tokens = uncounted if not batches else (mx.array(0.0), mx.array(0.0))
        piece = attrs.evolve(
            batch,
            num_sequences=len(run.rows) + sequences,
            num_tokens=sum(row.counted for row in run.rows) + tokens,
            group_b=None,
        )
        batches.append(_packed(piece, run))
    return batches


def halve_batch(piece: Batch) -> list[Batch]:
    """Splits a micro-batch into two with half of the rows each, to save memory; a single row is
    returned unchanged.

    Both halves keep all shared prompts, and their counts add up to those of `piece`.
    """
    rows = piece.mask_bt.shape[0]
    if rows < 2:
        return [piece]
    parts = []
    for part in (range((rows + 1) // 2), range((rows + 1) // 2, rows)):
        prompts = part if piece.prompt_index_b is None else None
        parts.append(take_part(piece, part, prompts))
    second = parts[1]
    counts = {
        "num_sequences": second.mask_bt.any(axis=1).sum().astype(mx.float32),
        "num_tokens": second.mask_bt.sum().astype(mx.float32),
    }
    rest = {name: getattr(piece, name) - count for name, count in counts.items()}
    return [attrs.evolve(parts[0], **rest), attrs.evolve(second, **counts)]


def shape_of(piece: Batch) -> Shape:
    """Returns the shape of a micro-batch that `split_batch` created."""
    rows, width = piece.targets_bt.shape
    prompts = 0 if piece.prompt_index_b is None else piece.tokens_bl.shape[0]
    return Shape(prompts, piece.tokens_bl.shape[1], rows, width)


def _rows_of(batch: Batch) -> list[Row]:
    number = batch.mask_bt.shape[0]
    span_bt = batch.mask_bt * mx.arange(1, batch.mask_bt.shape[1] + 1)  # masks may have gaps
    columns = (
        on_host(batch.group_b) if batch.group_b is not None else range(number),
        on_host(batch.prompt_lengths_b),
        on_host(mx.maximum(span_bt.max(axis=1), 1)),
        on_host(batch.mask_bt.sum(axis=1)),
    )
    return [
        Row(i, group, prompt, completion, counted)
        for i, (group, prompt, completion, counted) in enumerate(zip(*columns, strict=True))
    ]


def _packed(batch: Batch, run: PackedRun) -> Batch:
    """Returns the run's rows, padded to its shape; if prompts are shared, each distinct prompt
    occurs once.
    """
    numbers = [row.number for row in run.rows]
    shape = run.shape
    first = {row.group: row.number for row in reversed(run.rows)} if shape.prompts else {}
    sizes = {"b": shape.rows, "t": shape.width, "p": shape.prompts or shape.rows, "l": shape.length}
    part = take_part(batch, numbers, list(first.values()) or numbers, sizes)
    if first:
        places = {group: place for place, group in enumerate(first)}
        index_b = mx.array([places[row.group] for row in run.rows], mx.int32)
        part = attrs.evolve(part, prompt_index_b=mx.pad(index_b, (0, shape.rows - len(numbers))))
    return part
