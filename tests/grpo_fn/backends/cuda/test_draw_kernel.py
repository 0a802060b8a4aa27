"""The CUDA kernel that draws tokens: against the composed draw and float64, and as the sampler uses it."""

import mlx.core as mx
import numpy as np
import pytest

from grpo_fn.backends import disabled, substituted
from grpo_fn.backends.cuda.decoding.draw_kernel import draw_rows, takes_logits
from grpo_fn.prng import random_bits
from grpo_fn.rollout.categorical import RANDOM_NUMBERS, WIDTH, draw
from tests.support.generating import sample
from tests.support.kernels.row_kernels import float64

needs_cuda = pytest.mark.skipif(not takes_logits(mx.zeros((1, 1))), reason="needs CUDA")


def make_logits(rows, vocabulary, dtype):
    """Logits [B,V] and random words [B,3]."""
    # Of NumPy: on CUDA MLX 0.32 gave zeros for mx.random.normal of [64, 50257], and numbers for other shapes.
    numbers = np.random.default_rng(vocabulary).normal(0, 4, (rows, vocabulary)).astype(np.float32)
    logits = mx.array(numbers).astype(dtype)
    keys = mx.random.split(mx.random.key(vocabulary), rows)
    return logits, random_bits(keys, 0, 1, RANDOM_NUMBERS)[0]


def composed(logits, words, temperature):
    """What the kernel stands in for: the token of each row."""
    z = logits.astype(mx.float32) / temperature
    return draw(mx.exp(z - z.max(axis=-1, keepdims=True)), words)[0]


def logprobs(logits, temperature):
    """Log-probs of all tokens, float64."""
    z = float64(logits) / temperature
    logp = z - z.max(axis=-1, keepdims=True)
    return logp - np.log(np.exp(logp).sum(axis=-1, keepdims=True))


@needs_cuda
@pytest.mark.parametrize("vocabulary", [1, 5, 33, 1000, 1025, 4096, 50257, 65536, 151936])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_and_logprobs(vocabulary, dtype, temperature):
    """The composed draw's token, but where rounding decides; vocabularies of part of a tile and of many."""
    logits, words = make_logits(64, vocabulary, dtype)
    tokens, logp = draw_rows(logits, words, temperature, WIDTH)
    rows, drawn = np.arange(64), np.array(tokens)
    assert (drawn >= 0).all() and (drawn < vocabulary).all()
    assert (drawn == np.array(composed(logits, words, temperature))).mean() > 0.95
    assert np.abs(float64(logp) - logprobs(logits, temperature)[rows, drawn]).max() < 1e-4


@needs_cuda
def test_both_ends_and_impossible_tokens():
    """Words of all zeros and all ones; tokens of weight zero are never drawn."""
    logits = mx.full((4, 5000), -mx.inf)
    logits[:, 7], logits[:, 4000] = 0.0, 1.0
    words = mx.array([[word] * RANDOM_NUMBERS for word in (0, 2**29, 2**31, 2**32 - 1)], mx.uint32)
    tokens, logp = draw_rows(logits, words, 1.0, WIDTH)
    assert tokens.tolist() == [7, 7, 4000, 4000]
    assert np.allclose(np.array(logp), np.array([0, 0, 1, 1]) - np.log(1 + np.e), atol=1e-5)


@needs_cuda
def test_a_row_draws_the_same_in_any_batch():
    """Alone, among others, in another place."""
    logits, words = make_logits(33, 65536, mx.bfloat16)
    tokens, logp = draw_rows(logits, words, 1.0, WIDTH)
    for rows in ([4], [32, 4, 0]):
        index = mx.array(rows)
        some, some_logp = draw_rows(logits[index], words[index], 1.0, WIDTH)
        assert mx.array_equal(some, tokens[index]) and mx.array_equal(some_logp, logp[index])


@needs_cuda
def test_the_sampler_draws_as_without_it():
    """Same keys, same tokens, but where rounding decides."""
    logits, _ = make_logits(256, 4096, mx.float32)
    keys = mx.random.split(mx.random.key(1), 256)
    tokens, logp = sample(logits, keys)
    with disabled("draw"):
        composed, composed_logp = sample(logits, keys)
    same = np.array(tokens) == np.array(composed)
    assert same.mean() > 0.98
    assert np.abs(np.array(logp) - np.array(composed_logp))[same].max() < 1e-4


def test_the_sampler_asks_for_plain_draws_alone():
    """On any machine: what it hands over; truncated distributions and greedy choice do not go there."""
    asked = []

    def stand_in(logits, words, temperature, width):
        asked.append((logits.dtype, words.shape, words.dtype, temperature))
        return mx.zeros((3,), mx.int32), mx.zeros((3,))

    logits, keys = mx.zeros((3, 8), mx.float16), mx.random.split(mx.random.key(0), 3)
    with substituted(draw=stand_in):
        sample(logits, keys, temperature=0.5)
        assert asked == [(mx.float16, (3, RANDOM_NUMBERS), mx.uint32, 0.5)]
        for options in ({"temperature": 0}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}):
            sample(logits, keys, **options)
    assert len(asked) == 1
