"""Packing rows into micro-batches: little padding on realistic lengths, and few shapes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.learner.packing import Packer, Row, Shape

LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 80)), min_size=1, max_size=12)


def rows_of(groups, generations=3):
    return [
        Row(group * generations + i, group, prompt, max(completion - 7 * i, 1), max(completion - 7 * i, 1))
        for group, (prompt, completion) in enumerate(groups)
        for i in range(generations)
    ]


SHAPES = st.builds(
    Shape,
    prompts=st.sampled_from([0, 0, 1, 2]),
    length=st.integers(1, 120),
    rows=st.integers(1, 8),
    width=st.integers(1, 90),
)


@given(
    groups=LENGTHS,
    max_tokens=st.integers(1, 900),
    bucketed=st.booleans(),
    share=st.booleans(),
    known=st.lists(SHAPES, max_size=6),
)
def test_every_row_is_in_one_run_that_holds_it(groups, max_tokens, bucketed, share, known):
    """A run's shape covers its rows and keeps to the budget unless it has one row; no row is lost."""
    rows = rows_of(groups)
    packer = Packer(max_tokens=max_tokens, bucketed=bucketed, known=known, new_shape_tokens=100_000)
    runs = packer.pack(rows, share)
    assert sorted(row.number for part in runs for row in part.rows) == list(range(len(rows)))
    for part in runs:
        assert_holds(part)
        assert part.shape.tokens <= max_tokens or len(part.rows) == 1


def assert_holds(part):
    """A run's shape has a place for each of its rows, tokens and prompts."""
    shape = part.shape
    assert len(part.rows) <= shape.rows
    assert max(row.completion for row in part.rows) <= shape.width
    whole = [row.prompt + (0 if shape.prompts else row.completion) for row in part.rows]
    assert max(whole) <= shape.length
    if shape.prompts:
        assert len({row.group for row in part.rows}) <= shape.prompts


def test_the_cheapest_cut_is_found():
    """No cut of the sorted rows is cheaper."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        groups = [(int(p), int(c)) for p, c in rng.integers(1, 400, (7, 2))]
        rows = rows_of(groups, generations=1)
        packer = Packer(max_tokens=1500, bucketed=True)
        cost, _ = packer._pack_rows(rows)
        assert cost == pytest.approx(exhaustive(rows, 1500))


def exhaustive(rows, max_tokens):
    """The least cost of all cuts into runs of 1, 2, 3, 4 or 6 rows, from the definition."""
    rows = sorted(rows, key=lambda row: row.prompt + row.completion)

    def ladder(number):
        if number <= 16 or number & (number - 1) == 0:
            return number
        rung = 2 ** (number.bit_length() - 1) // 8
        return (number + rung - 1) // rung * rung

    def least(stop):
        if stop == 0:
            return 0.0
        found = []
        for count in (1, 2, 3, 4, 6):
            if count > stop:
                continue
            part = rows[stop - count : stop]
            length = ladder(part[-1].prompt + part[-1].completion)
            tokens = count * length
            if count > 1 and tokens > max_tokens:
                continue
            width = min(2 ** (max(row.completion for row in part) - 1).bit_length(), length)
            found.append(least(stop - count) + tokens + 0.25 * count * width + 256)
        return min(found)

    return least(len(rows))


def test_a_known_shape_is_taken_where_it_costs_less_than_a_new_one():
    """Padding up to the price of a trace, and never beyond the budget."""
    rows = [Row(0, 0, 72, 32, 32)]
    near, far = Shape(0, 120, 1, 32), Shape(0, 900, 1, 32)

    def chosen(known, price, max_tokens=1000):
        packer = Packer(max_tokens=max_tokens, bucketed=True, known=known, new_shape_tokens=price)
        return packer.pack(rows, False)[0].shape

    exact = chosen((), 0)
    assert chosen([near], 0) == exact and exact.length == 104
    assert chosen([near, far], 100) == near
    assert chosen([far], 100) == exact and chosen([far], 900) == far
    assert chosen([far], 10_000, max_tokens=800) == exact


@pytest.mark.parametrize("share", [True, False], ids=["shared", "a prompt each"])
@pytest.mark.parametrize("name", Shape._fields)
def test_a_known_shape_that_is_too_small_in_one_way_is_not_taken(name, share):
    """A missing column, row or prompt would cut or drop completions."""
    rows = rows_of([(72, 32), (70, 32)], generations=2)

    def runs(*known):
        return Packer(
            max_tokens=10_000, bucketed=True, known=known, new_shape_tokens=0 if not known else 100_000
        ).pack(rows, share)

    (exact,) = [part.shape for part in runs()]
    assert bool(exact.prompts) == share
    larger = Shape(*(size + (size > 0) for size in exact))
    assert [part.shape for part in runs(larger)] == [larger], "one that is larger in every way is"
    if getattr(exact, name):
        small = larger._replace(**{name: getattr(exact, name) - 1})
        assert not small.covers(exact)
        for part in runs(small):
            assert_holds(part)


def test_what_decides_shapes_and_their_number():
    """Sharing saves tokens, launches cost tokens, and no row is padded past the next octave."""
    packer = Packer(max_tokens=10_000, bucketed=True)
    assert all(part.shape.prompts for part in packer.pack(rows_of([(500, 40), (520, 30)], 8), True))
    alone = [Row(i, i, 33, 63, 63) for i in range(6)]
    assert not any(part.shape.prompts for part in packer.pack(alone, True))
    rows = [Row(n, n, 20, width, width) for n, width in enumerate((20, 1000))]
    for price, pieces in ((0, 2), (10_000, 1)):
        dear = Packer(max_tokens=4096, bucketed=True, piece_tokens=price)
        assert len(dear.pack(rows, False)) == pieces
    (run,) = packer.pack([Row(i, i, 20, 520, 520) for i in range(8)], False)
    assert run.shape.width <= run.shape.length == 576
