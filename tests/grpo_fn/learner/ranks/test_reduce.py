"""Sums over ranks in one process give the update of the whole batch."""

from typing import Any
from unittest.mock import patch

import attrs
import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import grpo_fn as g
from grpo_fn.learner import all_reduce, deal, pieces_of_rank, share
from grpo_fn.learner.ranks import reduce
from grpo_fn.trees import arrays_of, map_arrays, materialize, on_host
from tests.support.closeness import assert_same_figures, assert_same_gradients
from tests.support.naive_learner import SPECS, grad_step_of, make_batch, make_state, near_policy
from tests.support.ranks.rank_threads import on_ranks
from tests.support.tiny_policies import same_tree, tiny_policy

OPTIMIZER = g.adamw(1e-3, eps=1e-3, weight_decay=0.1)


def states_of(policy, spec, batch, ranks, *, max_tokens=60):
    """Each rank's state and statistics after a grad step on its share."""
    grad_step, found = grad_step_of(policy, spec, compile=False), []
    pieces = [p for part in deal(batch, ranks) for p in g.split_batch(part, max_tokens=max_tokens)]
    for rank in range(ranks):
        state, stats = grad_step(make_state(policy), pieces_of_rank(pieces, rank, ranks))
        materialize(state, stats)
        found.append((state, stats))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("spec", [SPECS["grpo"], SPECS["token_mean"]], ids=["grpo", "token_mean"])
def test_any_number_of_ranks_gives_the_update_of_one(spec, ranks, monkeypatch):
    """Five prompts on 1 to 4 ranks: gradient, denominator and statistics are those of the whole batch."""
    policy = tiny_policy("llama-untied")
    whole = near_policy(make_batch(prompts=(4, 2, 7, 3, 5), zeros=True), policy)
    want, want_stats = grad_step_of(policy, spec, compile=False)(make_state(policy), whole)
    materialize(want, want_stats)
    parts = states_of(policy, spec, whole, ranks)

    monkeypatch.setattr(reduce, "BUCKET_BYTES", 4096)
    reduced = on_ranks(ranks, lambda group: all_reduce(parts[group.rank()][0], group))
    for state in reduced:
        assert state.accum_weight.item() == want.accum_weight.item()
        assert_same_gradients(state.accum_grads, want.accum_grads)
        assert same_tree(state.accum_grads, reduced[0].accum_grads)
    merged = g.merge_stats([stats for _, stats in parts])
    assert_same_figures(merged, want_stats)


def test_few_large_buckets_go_over_the_wire(monkeypatch):
    """Leaves are joined up to the bucket size; the denominator needs one more sum."""
    policy = tiny_policy("llama-untied")
    state = make_state(policy)
    materialize(state)
    assert all_reduce(state, mx.distributed.init()) is state, "a group of one leaves it as it is"
    leaves = list(arrays_of(state.accum_grads))

    def calls(bucket_bytes):
        def act(group):
            all_reduce(state, group)
            return group.calls

        monkeypatch.setattr(reduce, "BUCKET_BYTES", bucket_bytes)
        return on_ranks(2, act)[0]

    assert [size for _, size in calls(2**30)] == [sum(leaf.size for leaf in leaves), 1]
    assert len(calls(1)) == len(leaves) + 1


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 100))
def test_buckets_cut_all_leaves_in_order(sizes, limit):
    """Each leaf is in one bucket, and a bucket of several leaves keeps to the limit."""
    with patch.object(reduce, "BUCKET_BYTES", limit):
        bounds = list(reduce.buckets(sizes))
    assert [place for low, high in bounds for place in range(low, high)] == list(range(len(sizes)))
    assert all(high - low == 1 or sum(sizes[low:high]) <= limit for low, high in bounds)


def test_a_loss_that_is_not_finite_on_one_rank_skips_the_update_on_all():
    """NaN in one rank's denominator reaches every rank's."""
    policy = tiny_policy("llama-untied")
    whole = near_policy(make_batch(prompts=(4, 2, 7), zeros=True), policy)
    parts = [state for state, _ in states_of(policy, SPECS["grpo"], whole, 3)]
    parts[1] = attrs.evolve(parts[1], accum_weight=mx.array(mx.nan))
    for state in on_ranks(3, lambda group: all_reduce(parts[group.rank()], group)):
        after, stats = g.make_update_step(OPTIMIZER, compile=False)(state)
        assert stats.skipped.item()
        assert same_tree(after.params, state.params)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_row_is_on_one_rank(ranks):
    """Groups stay together, counts add up, and a rank without rows counts nothing."""
    batch = make_batch(prompts=(4, 2, 7))
    parts: Any = deal(batch, ranks)
    assert sum(part.mask_bt.shape[0] for part in parts) == batch.mask_bt.shape[0]
    assert sum(part.num_tokens.item() for part in parts) == batch.num_tokens.item()
    owned = [group for part in parts for group in set(on_host(part.group_b))]
    assert sorted(owned) == sorted(set(on_host(batch.group_b)))
    pieces = [p for part in parts for p in g.split_batch(part, max_tokens=1000)]
    mine = [pieces_of_rank(pieces, rank, ranks) for rank in range(ranks)]
    rows = [sum(int(piece.mask_bt.any(axis=1).sum()) for piece in own) for own in mine]
    assert sum(rows) == batch.mask_bt.shape[0]
    assert sum(p.num_sequences.item() for own in mine for p in own) == batch.num_sequences.item()
    assert max(rows) - min(rows) <= batch.mask_bt.shape[0] // 3  # a group
    with pytest.raises(ValueError, match="number = 0: expected at least 1"):
        deal(batch, 0)


def test_shared_arrays_are_rank_zeros_bit_for_bit():
    """Also NaN, -0.0, bfloat16, integers and odd numbers of bytes."""
    half, byte = mx.array([1.5, -2.0, 3.0]).astype(mx.bfloat16), mx.array(7, mx.uint8)
    tree = {"a": mx.array([mx.nan, -0.0, 1e-40]), "b": [half, byte], "c": mx.array([2**31 + 5], mx.uint32)}
    other = map_arrays(mx.zeros_like, tree)
    materialize(tree, other)

    def bits_of(tree):
        leaves: Any = arrays_of(tree)
        return [(leaf.dtype, bytes(memoryview(leaf))) for leaf in leaves]

    for found in on_ranks(3, lambda group: share(tree if group.rank() == 0 else other, group)):
        assert bits_of(found) == bits_of(tree)


def test_no_more_than_a_bucket_of_shared_arrays_is_in_memory_twice(monkeypatch):
    """Besides the arrays that each of the two ranks sends and receives."""
    monkeypatch.setattr(reduce, "BUCKET_BYTES", 2**20)
    tree = [mx.full((2**18,), number) for number in range(16)]
    materialize(tree)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    found = on_ranks(2, lambda group: share(tree, group))
    materialize(found)
    assert mx.get_peak_memory() - before < 3 * sum(leaf.nbytes for leaf in tree)
