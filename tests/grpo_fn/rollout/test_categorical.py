"""Sampling a token: none is lost, and each has its exact probability."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.rollout import sampling
from grpo_fn.rollout.sampling import RANDOM_NUMBERS, WIDTH, draw_tokens

FULL = 2**32 - 1  # the largest word
QWEN = 151_936  # its vocabulary


def words_of(rows, seed=0):
    """Random words [rows,W]."""
    return np.random.default_rng(seed).integers(0, 2**32, (rows, RANDOM_NUMBERS), dtype=np.uint32)


def weights_of(vocabulary, spread, seed=0):
    """e^z of normal logits z, float64, the largest 1."""
    z = spread * np.random.default_rng(seed).normal(size=vocabulary)
    return np.exp((z - z.max()).astype(np.float32).astype(np.float64))


def levels_of(weights):
    """The draw's levels from the top in float64: sums of blocks, of their groups, and the weights."""
    sizes = [WIDTH] if len(weights) <= WIDTH**2 else [WIDTH, WIDTH**2]
    padded = np.pad(weights, (0, -len(weights) % WIDTH**2))
    return [padded.reshape(-1, size).sum(axis=1) for size in reversed(sizes)] + [padded]


def words_for(weights, token):
    """Words in the middle of a token's share of each level."""
    levels, words = levels_of(weights), np.zeros(RANDOM_NUMBERS, np.uint32)
    for depth, level in enumerate(levels):
        place = token // WIDTH ** (len(levels) - 1 - depth)
        first = 0 if depth == 0 else place // WIDTH * WIDTH
        members = level[first:] if depth == 0 else level[first : first + WIDTH]
        middle = (members[: place - first].sum() + members[place - first] / 2) / members.sum()
        words[len(levels) - 1 - depth] = int(middle * 2**32)
    return words


def drawn(weights, words):
    """Tokens for rows of words, from one row of weights."""
    row = mx.broadcast_to(mx.array(weights.astype(np.float32)), (len(words), len(weights)))
    return np.array(draw_tokens(row, mx.array(words))[0])


def chances(weights):
    """The exact probability of each place of a level: the number of words that lead to it, by bisection."""
    count = len(weights)
    row = mx.broadcast_to(mx.array(weights.astype(np.float32)), (count, count))
    total = row.sum(axis=-1, keepdims=True)
    # Bounds of the first word at or past place i.
    low, high = np.zeros(count, np.int64), np.full(count, 2**32, np.int64)
    while (low < high).any():
        middle = (low + high) // 2
        found = np.array(sampling._inverted(row, total, mx.array(middle.astype(np.uint32))[:, None]))[:, 0]
        reached = (found >= np.arange(count)) | (middle == 2**32)
        low, high = np.where(reached, low, middle + 1), np.where(reached, middle, high)
    return np.diff(np.append(low, 2**32)) / 2**32


@pytest.mark.parametrize("vocabulary", [1, 5, 32, 33, 700, 1024, 1025, 5000])
def test_the_middle_of_a_token_s_share_draws_it(vocabulary):
    """Every token of vocabularies with one, two and three levels, full or not."""
    weights = weights_of(vocabulary, 2.0)
    tokens = np.unique(np.linspace(0, vocabulary - 1, 700).astype(int))
    words = np.stack([words_for(weights, token) for token in tokens])
    assert drawn(weights, words).tolist() == tokens.tolist()


def test_no_token_of_a_large_flat_vocabulary_is_lost():
    """Tokens that a float32 running sum would never sample, a third of 151,936, are sampled."""
    weights = weights_of(QWEN, 3.0)
    upto = np.cumsum(weights.astype(np.float32))
    lost = np.flatnonzero(np.diff(upto, prepend=np.float32(0)) <= 0)
    assert len(lost) > QWEN / 5, "or this vocabulary shows nothing"
    tokens = np.random.default_rng(1).permutation(lost)[:48]
    words = np.stack([words_for(weights, token) for token in tokens])
    assert drawn(weights, words).tolist() == tokens.tolist()


@pytest.mark.parametrize("spread", [0.1, 3.0, 8.0])
@pytest.mark.parametrize("count", [WIDTH, 149])
def test_each_place_has_its_exact_probability(count, spread):
    """Of all 2^32 words, each place has its share to a relative 1e-6 plus 2^−29."""
    weights = weights_of(count, spread, seed=count)
    want = weights / weights.sum()
    assert (np.abs(chances(weights) - want) <= 1e-6 * want + 2.0**-29).all()


def test_whatever_has_weight_can_be_drawn_and_nothing_else():
    """Weights far below 2^−30 of the others have a word; zeros have none."""
    weights = np.array([0, 1e-20, 1.0, 0, 1e-30, 0, 0.3, 1e-12, 0])
    assert ((chances(weights) > 0) == (weights > 0)).all()
    assert chances(weights)[weights < 1e-9].sum() < 3 * 2.0**-29


@pytest.mark.parametrize("vocabulary", [6, 40, 1500])
def test_the_first_and_the_last_word_pass_over_tokens_without_weight(vocabulary):
    """Rows without weight, or with NaN, still give a token of the vocabulary."""
    weights = np.zeros(vocabulary)
    first, last = vocabulary // 3, vocabulary - vocabulary // 3
    weights[first], weights[last] = 0.25, 1.0
    words = np.array([[0] * RANDOM_NUMBERS, [FULL] * RANDOM_NUMBERS], np.uint32)
    assert drawn(weights, words).tolist() == [first, last]
    some = np.where(np.arange(vocabulary) < vocabulary - 2, 1.0, np.nan)
    for bad in (np.zeros(vocabulary), np.full(vocabulary, np.nan), some):
        assert all(0 <= token < vocabulary for token in drawn(bad, words).tolist())


@given(
    seed=st.integers(0, 2**31),
    vocabulary=st.sampled_from([3, 64, 1100]),
    spread=st.sampled_from([0.5, 4.0, 20.0]),
)
def test_a_row_and_its_words_decide_alone(seed, vocabulary, spread):
    """A row gives the same token and sum alone and among others."""
    weights = np.stack([weights_of(vocabulary, spread, seed + row) for row in range(4)]).astype(np.float32)
    words = mx.array(words_of(4, seed))
    tokens, totals = draw_tokens(mx.array(weights), words)
    assert tokens.dtype == mx.int32
    assert totals.tolist() == pytest.approx(weights.sum(axis=1).tolist(), rel=1e-5)
    for row in range(4):
        token, total = draw_tokens(mx.array(weights[row : row + 1]), words[row : row + 1])
        assert (token.item(), total.item()) == (tokens[row].item(), totals[row].item())
    scaled, _ = draw_tokens(mx.array(weights * 1024), words)
    assert scaled.tolist() == tokens.tolist(), "weights need not add up to 1"
