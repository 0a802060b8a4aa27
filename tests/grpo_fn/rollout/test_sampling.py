"""Sampling: the right frequencies from explicit keys, the right sets, the right log-probabilities."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_repetition_penalty

from grpo_fn.prng import completion_keys, fold_in_rows
from grpo_fn.rollout.sampling import entropy, penalize, seen_tokens, truncate
from tests.support.generating import sample
from tests.support.reference import kept_tokens

LOGITS = np.array([1.2, -0.3, 0.8, 2.0, -1.5, 0.0, 0.4, -4.0])
DRAWS = 20_000
CHI2_999 = {1: 10.83, 3: 16.27, 7: 24.32, 63: 103.44}  # 99.9 % points, by degrees of freedom


def keys(count, *, seed=0, step=0):
    """The keys of completions 0 … count−1 of prompt 0, at one step."""
    numbers = mx.arange(count)
    rows = completion_keys(mx.random.key(seed), mx.zeros_like(numbers), numbers)
    return fold_in_rows(rows, mx.full((count,), step, mx.uint32))


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


def chi2(counts, p):
    """Pearson's statistic of observed counts against probabilities."""
    expected = p * counts.sum()
    return ((counts - expected) ** 2 / expected).sum()


@pytest.mark.parametrize(
    "options", [{"top_k": 4}, {"top_k": 5, "top_p": 0.92}, {"top_k": 6, "top_p": 0.98, "min_p": 0.2}], ids=str
)
def test_frequencies_of_a_truncated_distribution(options):
    """What is cut off never comes, and the rest in its renormalised proportions."""
    logits = mx.broadcast_to(mx.array(LOGITS, mx.float32), (DRAWS, 8))
    tokens, _ = sample(logits, keys(DRAWS, seed=1), **options)
    counts = np.bincount(np.array(tokens), minlength=8)
    kept, _ = kept_tokens(LOGITS, options.get("top_p", 1.0), options["top_k"], options.get("min_p", 0.0))
    assert kept.sum() == 4 and counts.sum() == counts[kept].sum() == DRAWS
    assert chi2(counts[kept], softmax(LOGITS[kept])) < CHI2_999[3]


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 12),
    scale=st.sampled_from([0.3, 1.0, 4.0]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    top_k=st.sampled_from([0, 1, 3, 12, 50]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_the_kept_set_is_the_naive_one(seed, size, scale, top_p, top_k, min_p):
    """top-p, top-k and min-p, alone and together, against sorting and adding up in float64."""
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
def test_the_kept_set_is_that_of_transformers(seed, temperature, top_p, top_k, min_p):
    """Its processors, in the order in which its `generate` puts them: the same set, the same log-probs."""
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as theirs

    z = np.random.default_rng(seed).normal(size=(3, 30)).astype(np.float32) * 2
    for row in z.astype(np.float64) / temperature:
        assume(kept_tokens(row, top_p, top_k, min_p)[1] > 1e-5)
    processors = [theirs.TemperatureLogitsWarper(temperature)]
    processors += [theirs.TopKLogitsWarper(top_k)] if top_k else []
    processors += [theirs.TopPLogitsWarper(top_p)] if top_p < 1 else []
    processors += [theirs.MinPLogitsWarper(min_p)] if min_p else []
    scores = torch.tensor(z)
    for processor in processors:
        scores = processor(torch.zeros((3, 1), dtype=torch.long), scores)
    want = scores.log_softmax(dim=-1).numpy()
    kept = truncate(mx.array(z) / temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    assert (np.array(kept) == -np.inf).tolist() == (want == -np.inf).tolist()
    options = dict(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    tokens, logp = sample(mx.array(z), keys(3, seed=seed % 1000), **options)
    assert logp.tolist() == pytest.approx(want[np.arange(3), np.array(tokens)].tolist(), abs=1e-5)


@given(
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.4, 1.0, 3.0]),
    top_p=st.sampled_from([1.0, 0.8, 0.3]),
    top_k=st.sampled_from([0, 2, 5]),
    min_p=st.sampled_from([0.0, 0.1]),
)
def test_the_logprob_is_that_of_the_distribution_drawn_from(seed, temperature, top_p, top_k, min_p):
    """Tempered, truncated, normalised again; the token lies in the kept set."""
    z = np.random.default_rng(seed).normal(size=(4, 9)).astype(np.float32) * 2
    options = dict(top_p=top_p, top_k=top_k, min_p=min_p)
    tokens, logp = sample(mx.array(z), keys(4, seed=seed), temperature=temperature, **options)
    assert tokens.dtype == mx.int32 and logp.dtype == mx.float32
    for row, token, value in zip(
        z.astype(np.float64) / temperature, tokens.tolist(), logp.tolist(), strict=True
    ):
        kept, margin = kept_tokens(row, top_p, top_k, min_p)
        assume(margin > 1e-5)
        assert kept[token]
        assert value == pytest.approx(np.log(softmax(np.where(kept, row, -np.inf))[token]), abs=1e-5)


def test_temperature_zero_takes_the_most_likely_token():
    """Greedy: the argmax, whatever the key, with the model's own log-prob, truncation or not."""
    z = np.random.default_rng(0).normal(size=(5, 9))
    for options in ({}, {"top_p": 0.2}, {"top_k": 1}):
        tokens, logp = sample(mx.array(z, mx.float32), keys(5, seed=3), temperature=0, **options)
        assert tokens.tolist() == z.argmax(axis=1).tolist()
        want = [np.log(softmax(row).max()) for row in z]
        assert logp.tolist() == pytest.approx(want, abs=1e-5)


def test_bfloat16_logits_are_sampled_in_float32():
    """Log-probs of a large vocabulary lose nothing to the model's dtype."""
    z = mx.zeros((1, 1000), mx.bfloat16)
    _, logp = sample(z, keys(1))
    assert logp.dtype == mx.float32 and logp.item() == pytest.approx(-np.log(1000), abs=1e-5)


@given(
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    scale=st.sampled_from([0.1, 3.0, 10.0]),
)
def test_entropy_is_that_of_the_whole_distribution(seed, temperature, scale):
    """−Σ p log p in float64, to 1e-5 even where a token is nearly certain."""
    z = (scale * np.random.default_rng(seed).normal(size=(3, 9))).astype(np.float32)
    for row, got in zip(
        z.astype(np.float64) / temperature, entropy(mx.array(z), temperature).tolist(), strict=True
    ):
        p = softmax(row)
        want = -(p * np.log(np.maximum(p, 1e-300))).sum()
        assert got == pytest.approx(want, abs=2e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sums_over_a_large_vocabulary_lose_nothing(temperature):
    """Entropy and greedy log-prob of 151,936 tokens are float64's: a running float32 sum is 4e-4 off here."""
    z = np.random.default_rng(0).normal(scale=[[0.05], [1], [3]], size=(3, 151_936)).astype(np.float32)
    p = np.stack([softmax(row) for row in z.astype(np.float64) / temperature])
    found = np.array(entropy(mx.array(z), temperature))
    assert np.abs(found + (p * np.log(p)).sum(axis=-1)).max() < 2e-5
    _, logp = sample(mx.array(z), keys(3), temperature=0)
    assert np.abs(np.array(logp) - [np.log(softmax(row).max()) for row in z.astype(np.float64)]).max() < 2e-5


def test_a_token_that_cannot_be_drawn_adds_nothing_to_the_entropy():
    z = mx.array([[0.3, -mx.inf, 1.2], [-mx.inf, 2.0, -mx.inf]])
    assert entropy(z).tolist() == pytest.approx([*entropy(mx.array([[0.3, 1.2]])).tolist(), 0.0], abs=1e-6)


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


def test_logits_of_another_rank_are_refused():
    """One row of logits is [1,V], not [V]."""
    with pytest.raises(ValueError, match=r"logits_bv has shape \(4,\), expected 2 axes"):
        sample(mx.zeros((4,)), keys(1))


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3])
def test_the_repetition_penalty_is_mlx_lm_s(penalty):
    """Random logits and histories, with repeats: what mlx-lm's processor makes of them."""
    mx.random.seed(3)
    logits = mx.random.normal((2, 50)) * 4
    histories = [[3, 3, 9, 41], [0, 49, 7, 7]]
    ours = penalize(logits, seen_tokens(histories, 50), penalty)
    theirs = make_repetition_penalty(penalty, 10**6)
    for row, history in enumerate(histories):
        expected = theirs(mx.array(history), mx.array(logits[row : row + 1]))
        assert mx.allclose(ours[row : row + 1], expected, rtol=1e-6)
