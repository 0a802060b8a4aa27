"""The rules of `Sharding`: what is cut, where padding goes, and what a rank holds."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import grpo_fn as g
from grpo_fn.learner import Sharding
from grpo_fn.trees import arrays_of, materialize, nbytes
from tests.support.ranks.rank_threads import on_ranks
from tests.support.tiny_policies import same_tree, tiny_policy

OPTIMIZER = g.adamw(1e-3)
BUCKET = 400  # bytes: 100 numbers


def state_of(tree):
    state = g.init_state(tree, OPTIMIZER, key=mx.random.key(0))
    materialize(state)
    return state


def numbers(*shapes):
    """A tree of so many leaves in which every number occurs once, from 1 on."""
    at, tree = 1, {}
    for place, shape in enumerate(shapes):
        size = int(np.prod(shape))
        tree[f"leaf{place:02d}"] = mx.arange(at, at + size, dtype=mx.float32).reshape(shape)
        at += size
    return tree


def masters_of(tree, ranks, **how):
    """Each rank's parts of the masters, a dict a rank."""
    state = state_of(tree)
    return on_ranks(ranks, lambda group: Sharding(group, **how).shard(state).opt_state["masters"])


@given(
    st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3), min_size=1, max_size=8),
    st.integers(1, 4),
    st.sampled_from([4, 40, BUCKET, 2**20]),
)
def test_every_number_is_on_one_rank_and_the_rest_is_zero(shapes, ranks, bucket_bytes):
    """Parts of a bucket, one rank's behind the other's, are its leaves in order, and zeros behind them."""
    tree = numbers(*map(tuple, shapes))
    parts = masters_of(tree, ranks, bucket_bytes=bucket_bytes)
    assert len({tuple((key, part.size) for key, part in own.items()) for own in parts}) == 1
    found, padding = [], 0
    for key in parts[0]:
        joined = np.concatenate([np.array(own[key]) for own in parts])
        real = joined[joined > 0]
        assert (joined[: len(real)] == real).all()  # what is padded stands at the end
        assert len(joined) - len(real) < ranks
        found.append(real)
        padding += len(joined) - len(real)
    flat = np.concatenate([np.array(leaf).reshape(-1) for leaf in arrays_of(tree)])
    assert (np.concatenate(found) == flat).all()
    assert sum(part.size for own in parts for part in own.values()) == flat.size + padding


def test_the_same_cut_for_every_dtype_of_the_computation():
    """Buckets are counted in numbers: masters in float32 and weights in bfloat16 are cut alike."""
    tree = numbers((60,), (5, 6), (250,), (1,))
    state = state_of(tree)

    def act(group):
        sharding = Sharding(group, mx.bfloat16, bucket_bytes=BUCKET)
        sharded = sharding.shard(state)
        again = sharding.gather(sharded.opt_state["masters"], sharded.params)
        return sharded, again

    for sharded, again in on_ranks(3, act):
        assert {leaf.dtype for leaf in arrays_of(sharded.params)} == {mx.bfloat16}
        assert same_tree(again, sharded.params)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("compute", [None, mx.bfloat16], ids=["float32", "bfloat16"])
def test_a_rank_holds_what_the_table_of_the_docs_says(ranks, compute):
    """Bytes a parameter: the compute dtype's, and twelve over N; padding is less than N numbers a bucket."""
    policy = tiny_policy("llama-untied")
    size = sum(leaf.size for leaf in arrays_of(policy.params))
    state = state_of(policy.params)

    def act(group):
        sharded = Sharding(group, compute).shard(state)
        return nbytes(sharded.params, sharded.opt_state["masters"], sharded.opt_state["moments"])

    each = (2 if compute else 4) + 12 / ranks
    for held in on_ranks(ranks, lambda group: mx.array(act(group))):
        assert held.item() == pytest.approx(each * size, abs=12 * ranks + 4)
