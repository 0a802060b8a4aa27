"""Sampling with explicit keys, one per row and step: a row's draw does not depend on other rows."""

import functools
from collections.abc import Sequence

import attrs
import mlx.core as mx

from grpo_fn.backends import find
from grpo_fn.backends.composed import exp, logsumexp, softmax
from grpo_fn.checks import check_rank
from grpo_fn.compile import Compiled, compiled
from grpo_fn.prng import random_bits
from grpo_fn.rollout.categorical import RANDOM_NUMBERS, WIDTH, draw


def sample(
    logits_bv: mx.array,
    keys_b2: mx.array,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
) -> tuple[mx.array, mx.array]:
    """Draw one token per row by inverting the cumulative distribution (see `categorical`).

    Args:
        logits_bv: [B,V], any floating dtype.
        keys_b2: a PRNG key for each row, uint32 [B,2].
        temperature: divides the logits; 0 takes the most likely token.
        top_p: which tokens to keep, see `truncate`; 1.0 keeps all.
        top_k: the same; 0 keeps all.
        min_p: the same; 0.0 keeps all.

    Returns:
        (token_b int32, logp_b float32): the log-probability is that of the distribution drawn from (tempered,
        truncated and normalised again); at temperature 0 it is the model's own.

    Raises:
        ValueError: a shape or a number is out of range.
    """
    sampler = Sampler(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    drawn = sampler(logits_bv, keys_b2)
    return drawn["tokens"], drawn["logp"]


def draw_bits(keys_b2: mx.array, first: int, count: int) -> mx.array:
    """The random bits [N,B,W] for the draws `first`, `first` + 1, … of rows with these keys."""
    return random_bits(keys_b2, first, count, RANDOM_NUMBERS)


def _sample(
    logits_bv: mx.array, bits_bw: mx.array, temperature: float, top_p: float, top_k: int, min_p: float
) -> tuple[mx.array, mx.array]:
    check_rank("logits_bv", logits_bv, 2)
    if temperature < 0 or not 0 < top_p <= 1 or top_k < 0 or not 0 <= min_p <= 1:
        raise ValueError(
            f"temperature = {temperature}, top_p = {top_p}, top_k = {top_k}, min_p = {min_p}: wanted "
            "temperature >= 0, 0 < top_p <= 1, top_k >= 0 and 0 <= min_p <= 1"
        )
    z_bv = logits_bv.astype(mx.float32)
    if temperature == 0:
        token_b = mx.argmax(z_bv, axis=-1)
        logp_b = _taken(z_bv, token_b) - logsumexp(z_bv)
        return token_b.astype(mx.int32), logp_b
    plain = top_p == 1 and top_k == 0 and min_p == 0
    fast = find("draw", logits_bv) if plain else None
    if fast is not None:
        return fast(logits_bv, bits_bw, temperature, WIDTH)
    if temperature != 1:
        z_bv = z_bv / temperature
    z_bv = truncate(z_bv, top_p=top_p, top_k=top_k, min_p=min_p)
    z_bv = z_bv - z_bv.max(axis=-1, keepdims=True)
    token_b, total_b = draw(exp(z_bv), bits_bw)
    return token_b, _taken(z_bv, token_b) - mx.log(total_b)


def _taken(z_bv: mx.array, token_b: mx.array) -> mx.array:
    return mx.take_along_axis(z_bv, token_b[:, None], axis=-1)[:, 0]


def truncate(z_bv: mx.array, *, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> mx.array:
    """The logits with every token outside the included set at −inf. Ties at a threshold are all included.

    In this order, as in transformers and TRL: top-k keeps the k largest; top-p keeps the smallest set with at
    least this probability after top-k, normalised again; min-p keeps those with at least this share of the
    largest probability.
    """
    if top_p == 1 and min_p == 0 and (top_k == 0 or top_k >= z_bv.shape[-1]):
        return z_bv
    least_b1 = mx.full((z_bv.shape[0], 1), -mx.inf)
    if min_p > 0:
        least_b1 = z_bv.max(axis=-1, keepdims=True) + mx.log(mx.array(min_p))
    if top_p < 1 or 0 < top_k < z_bv.shape[-1]:
        sorted_bv = mx.sort(z_bv, axis=-1)[:, ::-1]
        if 0 < top_k < z_bv.shape[-1]:
            kth_b1 = sorted_bv[:, top_k - 1 : top_k]
            least_b1 = mx.maximum(least_b1, kth_b1)
            sorted_bv = mx.where(sorted_bv >= kth_b1, sorted_bv, -mx.inf)
        if top_p < 1:
            p_bv = softmax(sorted_bv)  # after top-k
            before_bv = mx.cumsum(p_bv, axis=-1) - p_bv  # probability ahead of each token
            included_bv = mx.where(before_bv < top_p, sorted_bv, mx.inf)
            least_b1 = mx.maximum(least_b1, included_bv.min(axis=-1, keepdims=True))
    return mx.where(z_bv >= least_b1, z_bv, -mx.inf)


def seen_tokens(prompts: Sequence[Sequence[int]], vocabulary: int) -> mx.array:
    """Whether each prompt has each token: bool [P,V]."""
    seen_pv = mx.zeros((len(prompts), vocabulary), mx.bool_)
    rows = mx.array([p for p, prompt in enumerate(prompts) for _ in prompt], mx.int32)
    seen_pv[rows, mx.array([token for prompt in prompts for token in prompt], mx.int32)] = True
    return seen_pv


def mark_seen(seen_bv: mx.array, token_b: mx.array) -> mx.array:
    """`seen_bv` with one more token per row."""
    return mx.put_along_axis(seen_bv, token_b[:, None], mx.array(True), axis=-1)


def penalize(logits_bv: mx.array, seen_bv: mx.array, penalty: float) -> mx.array:
    """Logits with the repetition penalty: for seen tokens, z/penalty where z > 0, else z·penalty.

    CTRL's (arXiv 1909.05858, section 4.1), in the form that depends on the sign, as in transformers and
    mlx-lm.
    """
    scaled_bv = mx.where(logits_bv > 0, logits_bv / penalty, logits_bv * penalty)
    return mx.where(seen_bv, scaled_bv, logits_bv)


def entropy(logits_bv: mx.array, temperature: float = 1.0) -> mx.array:
    """Entropy of each row's whole distribution at a temperature > 0, nats, float32 [B]."""
    z_bv = logits_bv.astype(mx.float32) / temperature
    # A logit of −∞ adds nothing: 0 times the lowest number, because 0 · −∞ would be NaN.
    logp_bv = mx.maximum(z_bv - logsumexp(z_bv)[:, None], mx.finfo(mx.float32).min)
    return -(exp(logp_bv) * logp_bv).sum(axis=-1)


@attrs.frozen(kw_only=True)
class Sampler:
    """How tokens are drawn; see `sample` for the first four, `penalize` for the fifth."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # on tokens of the prompt and the completion so far; 1: none
    with_entropy: bool = False  # also give the entropy of the whole distribution at each position

    def __call__(self, logits_bv: mx.array, keys_b2: mx.array) -> dict[str, mx.array]:
        """Token and log-prob of each row, and its entropy if asked for."""
        return self.at(logits_bv, draw_bits(keys_b2, 0, 1)[0])

    def at(self, logits_bv: mx.array, bits_bw: mx.array) -> dict[str, mx.array]:
        """The same with the random bits of each row, from `draw_bits`."""
        token_b, logp_b = _sample(logits_bv, bits_bw, self.temperature, self.top_p, self.top_k, self.min_p)
        drawn = {"tokens": token_b, "logp": logp_b}
        if self.with_entropy:
            drawn["entropy"] = entropy(logits_bv, self.temperature or 1.0)
        return drawn


@functools.cache
def drawing(sampler: Sampler) -> Compiled:
    """`Sampler.at`, compiled; the same object for each sampler, so that it is traced once per shape."""
    return compiled(sampler.at)
