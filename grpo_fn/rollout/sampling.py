"""`Sampling`, and functions that sample with explicit random keys. Each row and step has its own
key, so that a row's tokens do not depend on other rows.
"""

import functools
from collections.abc import Callable, Sequence

import attrs
import mlx.core as mx

from grpo_fn.backends.composed import exp, softmax, softmax_sums
from grpo_fn.checks import check_rank
from grpo_fn.compile import Compiled, compiled
from grpo_fn.prng import random_bits
from grpo_fn.trees import flat, group_numbers

WIDTH = 32  # tokens per group, and groups per block
RANDOM_NUMBERS = 3  # 32-bit random numbers per draw: for the token, its group and its block
_WHOLE = 2.0**30

# Takes a completion's tokens so far, and the number of them that earlier calls have checked without
# finding an end. Returns the number of tokens to keep if the completion has ended, else None.
FindStop = Callable[[Sequence[int], int], int | None]


@attrs.frozen(kw_only=True)
class Sampling:
    """Settings for sampling completions: the distribution, the number of completions per prompt,
    and how a completion ends.

    Attributes:
        num_generations: completions per prompt, G.
        first_generation: the number of the first completion, if the group is sampled in stages.
        max_new_tokens: length limit of a completion in tokens; in conversations with replies, of
            all turns together.
        temperature: divides the logits; 0 uses the most likely token.
        top_p, top_k, min_p: which tokens to keep, see `truncate`; 1, 0 and 0 keep all.
        repetition_penalty: the penalty for tokens in the prompt and the completion so far, see
            `penalize`; 1 means no penalty.
        eos_ids: tokens that end a completion; the completion and its length include the end token.
        stop: strings that end a completion; a `FindStop` finds them in tokens.
        with_entropy: whether to record the entropy of the full distribution at each position.

    Raises ValueError if a number is out of range.
    """

    num_generations: int = 1
    first_generation: int = 0
    max_new_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_ids: frozenset[int] = attrs.field(factory=frozenset, converter=frozenset)
    stop: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    with_entropy: bool = False

    def __attrs_post_init__(self) -> None:
        for name, fits, wanted in (
            ("num_generations", self.num_generations >= 1, "at least 1"),
            ("first_generation", self.first_generation >= 0, "at least 0"),
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "a number >= 0"),
            ("top_p", 0 < self.top_p <= 1, "0 < top_p <= 1"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("min_p", 0 <= self.min_p <= 1, "0 <= min_p <= 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "a number above 0"),
        ):
            if not fits:
                raise ValueError(f"{name}: expected {wanted}, found {getattr(self, name)}")

    def end_of(
        self, tokens: Sequence[int], start: int, find_stop: FindStop | None = None
    ) -> int | None:
        """Returns the number of tokens to keep if a completion has ended at or after `start`,
        otherwise None.

        `find_stop` finds ends other than end tokens, such as `stop`; None means that there are no
        others.

        Raises ValueError if `find_stop` keeps more tokens than there are.
        """
        ends = [n + 1 for n in range(start, len(tokens)) if tokens[n] in self.eos_ids][:1]
        if find_stop is not None:
            seen = tokens[: ends[0]] if ends else tokens
            found = find_stop(seen, start)
            if found is not None:
                if not 0 <= found <= len(seen):
                    raise ValueError(
                        f"find_stop: expected None, or how many of {len(seen)} tokens to keep, "
                        f"found {found}"
                    )
                ends.append(found)
        return min(ends, default=None)


def draw_bits(keys_b2: mx.array, first: int | mx.array, count: int) -> mx.array:
    """Returns random bits [N,B,W] for samples `first` (int or [B]), `first` + 1, … in rows with
    these keys.
    """
    return random_bits(keys_b2, first, count, RANDOM_NUMBERS)


def draw(logits_bv: mx.array, bits_bw: mx.array, sampling: Sampling) -> dict[str, mx.array]:
    """Samples a token for each row by inverting the cumulative distribution (see `draw_tokens`).

    Args:
        logits_bv: [B,V], any floating dtype.
        bits_bw: random bits, from `draw_bits`.
        sampling: defines the distribution; its repetition penalty is not applied.

    Returns:
        "tokens" int32 [B], "logp" float32 [B] and, if requested, "entropy" float32 [B]. The
        log-probability refers to the distribution from which the token is sampled (tempered,
        truncated and normalised again); at temperature 0, it is the model's own.
    """
    check_rank("logits_bv", logits_bv, 2)
    token_b, logp_b = _drawn(logits_bv, bits_bw, sampling)
    drawn = {"tokens": token_b, "logp": logp_b}
    if sampling.with_entropy:
        drawn["entropy"] = entropy(logits_bv, sampling.temperature or 1.0)
    return drawn


def distribution_of(sampling: Sampling) -> Sampling:
    """Keeps only the settings for the distribution, which are equal for samplings that differ in
    limits, ends or G.
    """
    return attrs.evolve(
        sampling, num_generations=1, first_generation=0, max_new_tokens=1, eos_ids=(), stop=()
    )


def compiled_draw(sampling: Sampling) -> Compiled:
    """Compiles `draw` for this sampling: one object per distribution, traced once per shape."""
    return _compiled_draw(attrs.evolve(distribution_of(sampling), repetition_penalty=1.0))


@functools.lru_cache(64)  # a server's clients choose any distribution
def _compiled_draw(sampling: Sampling) -> Compiled:
    return compiled(lambda logits_bv, bits_bw: draw(logits_bv, bits_bw, sampling))


def _drawn(logits_bv: mx.array, bits_bw: mx.array, sampling: Sampling) -> tuple[mx.array, mx.array]:
    z_bv = logits_bv.astype(mx.float32)
    temperature = sampling.temperature
    if temperature == 0:
        token_b = mx.argmax(z_bv, axis=-1)
        return token_b.astype(mx.int32), -softmax_sums(z_bv).log_total
    if temperature != 1:
        z_bv = z_bv / temperature
    z_bv = truncate(z_bv, sampling.top_p, sampling.top_k, sampling.min_p)
    z_bv = z_bv - z_bv.max(axis=-1, keepdims=True)
    token_b, total_b = draw_tokens(exp(z_bv), bits_bw)
    return token_b, mx.take_along_axis(z_bv, token_b[:, None], axis=-1)[:, 0] - mx.log(total_b)


def truncate(z_bv: mx.array, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> mx.array:
    """Sets the logits of all tokens outside the kept set to −inf. All ties at a threshold are kept.

    In this order, as in transformers and TRL: top-k keeps the k largest; top-p keeps the smallest
    set with at least this probability after top-k, normalised again; min-p keeps those with at
    least this share of the largest probability.
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
            before_bv = mx.cumsum(p_bv, axis=-1) - p_bv  # probability before each token
            included_bv = mx.where(before_bv < top_p, sorted_bv, mx.inf)
            least_b1 = mx.maximum(least_b1, included_bv.min(axis=-1, keepdims=True))
    return mx.where(z_bv >= least_b1, z_bv, -mx.inf)


def seen_tokens(prompts: Sequence[Sequence[int]], vocabulary: int) -> mx.array:
    """Returns whether each prompt contains each token: bool [P,V]."""
    seen_pv = mx.zeros((len(prompts), vocabulary), mx.bool_)
    rows = mx.array(group_numbers(map(len, prompts)), mx.int32)
    seen_pv[rows, mx.array(flat(prompts), mx.int32)] = True
    return seen_pv


def mark_seen(seen_bv: mx.array, token_b: mx.array) -> mx.array:
    """Marks one more token of each row in `seen_bv`."""
    return mx.put_along_axis(seen_bv, token_b[:, None], mx.array(True), axis=-1)


def penalize(logits_bv: mx.array, seen_bv: mx.array, penalty: float) -> mx.array:
    """Applies the repetition penalty to logits: for seen tokens, z/penalty if z > 0, else
    z·penalty.

    The penalty is CTRL's (arXiv 1909.05858, section 4.1), in the sign-dependent form of
    transformers and mlx-lm.
    """
    scaled_bv = mx.where(logits_bv > 0, logits_bv / penalty, logits_bv * penalty)
    return mx.where(seen_bv, scaled_bv, logits_bv)


def entropy(logits_bv: mx.array, temperature: float = 1.0) -> mx.array:
    """Computes the entropy of each row's full distribution at a temperature > 0, in nats, float32
    [B].
    """
    z_bv = logits_bv.astype(mx.float32)
    return softmax_sums(z_bv if temperature == 1 else z_bv / temperature).entropy


def draw_tokens(weights_bv: mx.array, bits_bw: mx.array) -> tuple[mx.array, mx.array]:
    """Samples a token for each row by inverting the cumulative distribution level by level; returns
    the tokens and the sum of each row's weights.

    A float32 running sum over a large vocabulary loses every weight below 2^−24 of the preceding
    sum, for example a third of 150,000 nearly equal tokens. Also, a random number in float32 has at
    most 24 bits. Therefore, the vocabulary is split into groups of `WIDTH` tokens, and a large one
    into blocks of `WIDTH` groups. First a block is sampled, then one of its groups, then one of its
    tokens, each with its own 32 random bits.

    The sums are exact, because they use integers: each weight is its share of 2^30, rounded up, so
    no token with a positive weight becomes impossible. Weights below 2^−30 at their level are
    sampled too often, in at most 2e-7 of all samples.

    If a row has no positive weight, its token is 0. Returns (int32 [B], float32 [B]).

    Args:
        weights_bv: float32, not negative; they need not add up to 1.
        bits_bw: random bits, uint32 [B,`RANDOM_NUMBERS`]. Equal bits and weights result in equal
            tokens.
    """
    levels = [_grouped(weights_bv)]
    while len(levels) < RANDOM_NUMBERS - 1 and levels[-1].shape[1] > WIDTH:
        levels.append(_grouped(levels[-1].sum(axis=-1)))
    sums_bn = levels[-1].sum(axis=-1)
    total_b1 = sums_bn.sum(axis=-1, keepdims=True)
    place_b1 = _inverted(sums_bn, total_b1, bits_bw[:, len(levels), None])
    for level in reversed(range(len(levels))):
        members_bn = mx.take_along_axis(levels[level], place_b1[:, :, None], axis=1)[:, 0]
        inside_b1 = _inverted(
            members_bn, members_bn.sum(axis=-1, keepdims=True), bits_bw[:, level, None]
        )
        place_b1 = place_b1 * WIDTH + inside_b1
    return place_b1[:, 0].astype(mx.int32), total_b1[:, 0]


def _grouped(weights_bn: mx.array) -> mx.array:
    """Reshapes [B,N] to [B,N/WIDTH,WIDTH]; the last group is padded with zeros."""
    missing = -weights_bn.shape[1] % WIDTH
    if missing:
        weights_bn = mx.pad(weights_bn, [(0, 0), (0, missing)])
    return weights_bn.reshape(weights_bn.shape[0], -1, WIDTH)


def _inverted(weights_bn: mx.array, total_b1: mx.array, word_b1: mx.array) -> mx.array:
    """Returns the first index whose cumulative count exceeds word / 2^32 of the total; the weight
    at this index is never zero.
    """
    scale_b1 = mx.where(total_b1 > 0, _WHOLE / total_b1, 0.0)  # 0 for NaN
    counts_bn = mx.where(weights_bn > 0, (weights_bn * scale_b1).astype(mx.int32) + 1, 0)
    upto_bn = mx.cumsum(counts_bn, axis=-1)
    all_b1 = upto_bn[:, -1:]
    wanted_b1 = ((all_b1.astype(mx.uint64) * word_b1) >> 32).astype(mx.int32)
    # Without any count, no place is above 0, and the result would be one past the end.
    wanted_b1 = mx.where(all_b1 > 0, wanted_b1, -1)
    return (upto_bn <= wanted_b1).sum(axis=-1, keepdims=True)
