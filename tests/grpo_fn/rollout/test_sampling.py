"""Sampling: frequencies from explicit keys, kept sets, and log-probabilities."""

from importlib.util import find_spec

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_repetition_penalty

from grpo_fn.prng import completion_keys, fold_in_rows
from grpo_fn.rollout.sampling import entropy, penalize, seen_tokens, truncate
from grpo_fn.trees import on_host
from tests.support.generating import sample
from tests.support.reference import kept_tokens

LOGITS = np.array([1.2, -0.3, 0.8, 2.0, -1.5, 0.0, 0.4, -4.0])
DRAWS = 20_000
TORCH = find_spec("torch") is not None
CHI2_999 = 16.27  # the 99.9 % point, of 3 degrees of freedom


def keys(count, *, seed=0, step=0):
    """The keys of completions 0 … count−1 of prompt 0, at one step."""
    numbers = mx.arange(count)
    rows = completion_keys(mx.random.key(seed), mx.zeros_like(numbers), numbers)
    return fold_in_rows(rows, mx.full((count,), step, mx.uint32))


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


@pytest.mark.parametrize(
    "options", [{"top_k": 4}, {"top_k": 5, "top_p": 0.92}, {"top_k": 6, "top_p": 0.98, "min_p": 0.2}], ids=str
)
def test_frequencies_of_a_truncated_distribution(options):
    """Excluded tokens never occur; the others in their renormalized proportions."""
    logits = mx.broadcast_to(mx.array(LOGITS, mx.float32), (DRAWS, 8))
    tokens, _ = sample(logits, keys(DRAWS, seed=1), **options)
    counts = np.bincount(np.array(tokens), minlength=8)
    kept, _ = kept_tokens(LOGITS, options.get("top_p", 1.0), options["top_k"], options.get("min_p", 0.0))
    assert kept.sum() == 4 and counts.sum() == counts[kept].sum() == DRAWS
    expected = softmax(LOGITS[kept]) * DRAWS
    assert ((counts[kept] - expected) ** 2 / expected).sum() < CHI2_999


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 12),
    scale=st.sampled_from([0.3, 1.0, 4.0]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    top_k=st.sampled_from([0, 1, 3, 12, 50]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_the_kept_set_is_the_naive_one(seed, size, scale, top_p, top_k, min_p):
    """top-p, top-k and min-p, alone and together, compared with sorting in float64."""
    z = (scale * np.random.default_rng(seed).normal(size=size)).astype(np.float32)
    want, margin = kept_tokens(z.astype(np.float64), top_p, top_k, min_p)
    assume(margin > 1e-5 or min_p == 1.0)
    got = truncate(mx.array(z)[None], top_p=top_p, top_k=top_k, min_p=min_p)[0]
    kept = np.array(got) != -np.inf
    assert kept.tolist() == want.tolist() and kept.any()
    assert np.array(got)[kept].tolist() == z[kept].tolist()


@given(
    seed=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.2]),
    top_k=st.sampled_from([0, 1, 4, 20]),
    min_p=st.sampled_from([0.0, 0.05, 0.4]),
)
def test_the_logprob_is_that_of_the_distribution_drawn_from(seed, temperature, top_p, top_k, min_p):
    """Also that of transformers' processors, where PyTorch is installed; greedy takes the argmax."""
    z = np.random.default_rng(seed).normal(size=(3, 30)).astype(np.float32) * 2
    options = dict(top_p=top_p, top_k=top_k, min_p=min_p)
    found = [kept_tokens(row, **options) for row in z.astype(np.float64) / temperature]
    kept, margins = zip(*found, strict=True)
    assume(min(margins) > 1e-5)
    left = np.where(kept, z / temperature, -np.inf)
    want = left - np.logaddexp.reduce(left, axis=-1, keepdims=True)
    if TORCH:
        np.testing.assert_allclose(by_transformers(z, temperature, **options), want, atol=1e-5)
    tokens, logp = sample(mx.array(z), keys(3, seed=seed % 1000), temperature=temperature, **options)
    assert tokens.dtype == mx.int32 and logp.dtype == mx.float32
    assert logp.tolist() == pytest.approx(want[np.arange(3), np.array(tokens)].tolist(), abs=1e-5)
    most, _ = sample(mx.array(z), keys(3, seed=seed % 1000), temperature=0, **options)
    assert most.tolist() == z.argmax(axis=1).tolist(), "greedy: whatever the key and the truncation"


def by_transformers(z, temperature, top_p, top_k, min_p):
    """The log-probs of its processors."""
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as theirs

    processors = [theirs.TemperatureLogitsWarper(temperature)]
    processors += [theirs.TopKLogitsWarper(top_k)] if top_k else []
    processors += [theirs.TopPLogitsWarper(top_p)] if top_p < 1 else []
    processors += [theirs.MinPLogitsWarper(min_p)] if min_p else []
    scores = torch.tensor(z)
    for processor in processors:
        scores = processor(torch.zeros((3, 1), dtype=torch.long), scores)
    return scores.log_softmax(dim=-1).numpy()


@given(
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    scale=st.sampled_from([0.1, 3.0, 10.0]),
)
def test_entropy_is_that_of_the_whole_distribution(seed, temperature, scale):
    """−Σ p log p in float64, to 1e-5 even where a token is nearly certain."""
    z = (scale * np.random.default_rng(seed).normal(size=(3, 9))).astype(np.float32)
    for row, got in zip(
        z.astype(np.float64) / temperature, on_host(entropy(mx.array(z), temperature)), strict=True
    ):
        p = softmax(row)
        want = -(p * np.log(np.maximum(p, 1e-300))).sum()
        assert got == pytest.approx(want, abs=2e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sums_over_a_large_vocabulary_lose_nothing(temperature):
    """Over 151,936 tokens, entropy and log-prob are float64's; a running sum is 4e-4 off."""
    z = np.random.default_rng(0).normal(scale=[[0.05], [1], [3]], size=(3, 151_936)).astype(np.float32)
    p = np.stack([softmax(row) for row in z.astype(np.float64) / temperature])
    found = np.array(entropy(mx.array(z), temperature))
    assert np.abs(found + (p * np.log(p)).sum(axis=-1)).max() < 2e-5
    _, logp = sample(mx.array(z), keys(3), temperature=0)
    assert np.abs(np.array(logp) - [np.log(softmax(row).max()) for row in z.astype(np.float64)]).max() < 2e-5


def test_a_token_that_cannot_be_drawn_adds_nothing_to_the_entropy():
    z = mx.array([[0.3, -mx.inf, 1.2], [-mx.inf, 2.0, -mx.inf]])
    assert entropy(z).tolist() == pytest.approx([float(entropy(mx.array([[0.3, 1.2]]))[0]), 0.0], abs=1e-6)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": -0.1}, "temperature: expected .*, found -0.1"),
        ({"top_p": 0.0}, "top_p: expected .*, found 0.0"),
        ({"top_p": 1.1}, "top_p: expected .*, found 1.1"),
        ({"top_k": -1}, "top_k: expected .*, found -1"),
        ({"min_p": 1.5}, "min_p: expected .*, found 1.5"),
        ({"min_p": -0.5}, "min_p: expected .*, found -0.5"),
    ],
)
def test_numbers_out_of_range_are_refused(options, message):
    """The message names the number, its range and what was found."""
    with pytest.raises(ValueError, match=message):
        sample(mx.zeros((1, 4)), keys(1), **options)
    with pytest.raises(ValueError, match=r"logits_bv has shape \(4,\), expected 2 axes"):
        sample(mx.zeros((4,)), keys(1))


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3])
def test_the_repetition_penalty_is_mlx_lm_s(penalty):
    """Random logits and histories give the result of mlx-lm's processor."""
    mx.random.seed(3)
    logits = mx.random.normal((2, 50)) * 4
    histories = [[3, 3, 9, 41], [0, 49, 7, 7]]
    ours = penalize(logits, seen_tokens(histories, 50), penalty)
    theirs = make_repetition_penalty(penalty, 10**6)
    for row, history in enumerate(histories):
        expected = theirs(mx.array(history), mx.array(logits[row : row + 1]))
        assert mx.allclose(ours[row : row + 1], expected, rtol=1e-6)
