"""Batch: the learner's input, created from a rollout.

A row is prompt + completion + padding. Therefore, in every architecture, positions are correct and
causal attention never sees the padding, without a mask.
"""

from collections.abc import Sequence

import attrs
import mlx.core as mx

from grpo_fn.checks import check_positions, check_shape, check_token_ids
from grpo_fn.completions import Rollout, given_rollout
from grpo_fn.images import ImageRows, image_rows
from grpo_fn.policy.policy import Policy
from grpo_fn.trees import on_host


@attrs.frozen(eq=False)
class Batch:
    """Rows for the learner, as a tree of arrays: B rows, L tokens per row, T completion tokens.

    In a batch with shared prompts (`prompt_index_b`) each prompt occurs once: `tokens_bl` is [P,L]
    and contains only prompts, `prompt_lengths_b` is [P], and row i continues prompt
    `prompt_index_b[i]`.
    """

    tokens_bl: mx.array  # prompt + completion + padding, int32
    prompt_lengths_b: mx.array  # int32, >= 1
    targets_bt: mx.array  # completion tokens, int32
    mask_bt: mx.array  # True on tokens that are in the loss
    advantages_b: mx.array  # float32 [B], or [B,T] for one per token
    rollout_logp_bt: mx.array  # log μ, float32
    num_sequences: mx.array  # rows for the denominator, including omitted rows, float32 0-d
    num_tokens: mx.array  # tokens for the denominator
    old_logp_bt: mx.array | None = None  # the learner's log π_old; None: π_old is π_θ
    ref_logp_bt: mx.array | None = None  # log π_ref; None: the step computes it where beta > 0
    keep_bt: mx.array | None = None  # tokens whose policy term is in the loss; None: all
    group_b: mx.array | None = None  # number of each row's prompt, int32; None: no shared prompts
    # row of tokens_bl that contains each row's prompt; None means its own row
    prompt_index_b: mx.array | None = None
    teacher_logp_bt: mx.array | None = None  # the teacher's log-probs; None: no teacher
    # the teacher's rows; None means that they are the student's
    hinted_tokens_bm: mx.array | None = None
    hinted_lengths_b: mx.array | None = None  # prompt lengths in hinted_tokens_bm
    # for N layers with experts: the k experts of each token, as integers; None means those that the
    # routers choose
    experts_blnk: mx.array | None = None
    # a number for each row, which the row keeps in a micro-batch, int32; padding has −1
    row_b: mx.array | None = None
    vocabulary: int | None = None  # exclusive bound on token ids; None: unknown
    images: ImageRows | None = None  # for the rows of tokens_bl; None: no images


def make_batch(
    rollout: Rollout,
    adv_pg: mx.array,
    *,
    mask_truncated: bool = False,
    top_entropy_quantile: float = 1.0,
) -> Batch:
    """Puts all rows of a rollout into one batch. Tokens from an environment are used as context,
    and are masked.

    Args:
        rollout: B = P·G completions.
        adv_pg: advantages [P,G], or one for each token, [P,G,T]; `spread_over_turns` expands the
            advantages of turns.
        mask_truncated: completions that reach the length limit are masked (but count in the number
            of sequences).
        top_entropy_quantile: ρ; only the ρ most uncertain tokens of the batch keep their policy
            term (arXiv 2506.01939). Values below 1 require the rollout's entropies; 1.0 keeps all
            tokens.

    Raises:
        ValueError: a shape is wrong, a token id is negative or not below `rollout.vocabulary`, ρ is
            outside (0, 1], or entropies are needed and missing.
    """
    width = rollout.tokens_bt.shape[1]
    tokens = (width,) if adv_pg.ndim == 3 else ()
    check_shape("adv_pg", adv_pg, (len(rollout.prompts), rollout.num_generations, *tokens))
    if width == 0:
        raise ValueError(
            f"tokens_bt has shape {rollout.tokens_bt.shape}: expected at least one column"
        )
    vocabulary = _token_bound(rollout)
    lengths = [len(prompt) for prompt in rollout.prompts]
    longest = max(lengths)
    padded = [list(prompt) + [0] * (longest - len(prompt)) for prompt in rollout.prompts]
    prompts_bl = mx.repeat(mx.array(padded, mx.int32), rollout.num_generations, axis=0)
    prompt_lengths_b = mx.repeat(mx.array(lengths, mx.int32), rollout.num_generations)

    # [B,L]: a row reads its prompt first, then its completion from where the prompt ends
    position_l = mx.arange(longest + width)[None]
    offset_bl = position_l - prompt_lengths_b[:, None]
    from_prompt_bl = mx.take_along_axis(prompts_bl, mx.minimum(position_l, longest - 1), axis=1)
    from_completion_bl = mx.take_along_axis(
        rollout.tokens_bt, mx.clip(offset_bl, 0, width - 1), axis=1
    )
    tokens_bl = mx.where(
        offset_bl < 0, from_prompt_bl, mx.where(offset_bl < width, from_completion_bl, 0)
    )

    mask_bt = mx.arange(width)[None] < rollout.lengths_b[:, None]
    if rollout.sampled_bt is not None:
        check_shape("sampled_bt", rollout.sampled_bt, tuple(mask_bt.shape))
        mask_bt = mask_bt & rollout.sampled_bt
    if mask_truncated:
        mask_bt = mask_bt & rollout.finished_b[:, None]
    return Batch(
        tokens_bl=tokens_bl,
        prompt_lengths_b=prompt_lengths_b,
        targets_bt=rollout.tokens_bt,
        mask_bt=mask_bt,
        advantages_b=adv_pg.reshape(-1, *tokens).astype(mx.float32),
        rollout_logp_bt=rollout.logp_bt,
        num_sequences=mx.array(float(mask_bt.shape[0])),
        num_tokens=mask_bt.sum().astype(mx.float32),
        keep_bt=_most_uncertain(rollout.entropy_bt, mask_bt, top_entropy_quantile),
        group_b=mx.repeat(mx.arange(len(lengths), dtype=mx.int32), rollout.num_generations),
        vocabulary=vocabulary,
        images=image_rows(rollout.images, lengths, longest + width, repeat=rollout.num_generations)
        if rollout.images is not None and any(each is not None for each in rollout.images)
        else None,
    )


def batch_of(
    rows: Sequence[tuple[Sequence[int], Sequence[int]]],
    advantages: Sequence[Sequence[float]],
    weights: Sequence[Sequence[float]] | None = None,
    *,
    logp: Sequence[Sequence[float]] | None = None,
) -> Batch:
    """Creates a batch from arbitrary rows, with an advantage and a weight for each completion
    token.

    A token's loss is multiplied by its weight, as a factor of its advantage; a token with weight 0
    is masked.

    Args:
        rows: (prompt, completion) pairs of token ids, none of them empty.
        advantages: the advantages of each completion's tokens; 1 for `SFT`.
        weights: the weights of the same tokens, at least 0; None means 1 each.
        logp: log-probs of the same tokens under the policy that sampled them, in nats: μ, and π_old
            of the ratio. If `logp` is None, π_old is π_θ.

    Raises:
        ValueError: a prompt, completion or number is missing; and the errors of `given_rollout` and
            `make_batch`.
    """
    rollout = given_rollout([prompt for prompt, _ in rows], [completion for _, completion in rows])
    lengths = [len(completion) for _, completion in rows]

    def padded(name: str, values: Sequence[Sequence[float]]) -> mx.array:
        found = [len(row) for row in values]
        if found != lengths:
            raise ValueError(
                f"{name}: expected a number for each completion token, {lengths}, found {found}"
            )
        return mx.array([[*row, *[0.0] * (max(lengths) - len(row))] for row in values])

    adv_bt = padded("advantages", advantages)
    weight_bt = padded("weights", weights or [[1.0] * length for length in lengths])
    batch = make_batch(rollout, (adv_bt * weight_bt)[:, None])
    mask_bt = batch.mask_bt & (weight_bt != 0)
    drawn_bt = None if logp is None else padded("logp", logp)
    return attrs.evolve(
        batch,
        mask_bt=mask_bt,
        num_tokens=mask_bt.sum().astype(mx.float32),
        rollout_logp_bt=batch.rollout_logp_bt if drawn_bt is None else drawn_bt,
        old_logp_bt=drawn_bt,
    )


def as_teacher_reads(batch: Batch, vocabulary: int | None = None) -> Batch:
    """Returns the batch for the teacher, which has the teacher's own prompts if they contain hints.

    `vocabulary` is the number of rows in the teacher's embedding; None means unknown. The student's
    embedding may have more padding rows; their ids, which only an untrained model samples, are
    mapped to the teacher's last id.
    """
    tokens_bl = batch.tokens_bl if batch.hinted_tokens_bm is None else batch.hinted_tokens_bm
    rows = {"tokens_bl": tokens_bl, "targets_bt": batch.targets_bt}
    if batch.hinted_lengths_b is not None:
        batch = attrs.evolve(batch, prompt_lengths_b=batch.hinted_lengths_b, prompt_index_b=None)
    if vocabulary is not None:
        rows = {name: mx.minimum(ids, vocabulary - 1) for name, ids in rows.items()}
    return attrs.evolve(
        batch,
        **rows,
        hinted_tokens_bm=None,
        hinted_lengths_b=None,
        experts_blnk=None,
        vocabulary=None,
    )


def check_fits(batch: Batch, policy: Policy) -> None:
    """Raises ValueError if a batch contains token ids outside the policy's embedding, or rows that
    need more positions than the policy has learned. The function waits for the device only if
    positions are learned.
    """
    rows = policy.vocabulary
    if rows is not None and batch.vocabulary is not None and batch.vocabulary > rows:
        raise ValueError(
            f"the batch has token ids up to {batch.vocabulary - 1}: expected ids < {rows}, the "
            "rows of the model's token embedding"
        )
    if policy.positions is not None and batch.mask_bt.size:
        ends_b = mx.max(
            mx.where(batch.mask_bt, mx.arange(1, batch.mask_bt.shape[1] + 1), 0), axis=1
        )
        index_b, prompts_b = batch.prompt_index_b, batch.prompt_lengths_b
        rows_b = (prompts_b if index_b is None else prompts_b[index_b]) + ends_b
        check_positions("the batch's longest row", max(on_host(rows_b)) - 1, policy.positions)


def _token_bound(rollout: Rollout) -> int:
    """Returns an exclusive upper bound on the rollout's token ids. The function waits for the
    device unless `generate` has set the bound.
    """
    check_token_ids(rollout.prompts, rollout.vocabulary)
    if rollout.vocabulary is not None:  # the completions were sampled from it
        return rollout.vocabulary
    tokens_bt = rollout.tokens_bt
    low, high = on_host(mx.stack([tokens_bt.min(), tokens_bt.max()]))
    if low < 0:
        raise ValueError(f"tokens_bt has the token id {low}: expected 0 <= id")
    return 1 + max(high, *map(max, rollout.prompts))


def _most_uncertain(
    entropy_bt: mx.array | None, mask_bt: mx.array, quantile: float
) -> mx.array | None:
    """Returns True for tokens whose entropy is in the top `quantile` of the unmasked tokens."""
    if not 0 < quantile <= 1:
        raise ValueError(f"top_entropy_quantile = {quantile}: expected 0 < quantile <= 1")
    if quantile == 1:
        return None
    if entropy_bt is None:
        raise ValueError(
            "top_entropy_quantile < 1 requires the rollout's entropies: sample with them"
        )
    number = max(1, round(quantile * sum(map(sum, on_host(mask_bt)))))
    ranked = mx.sort(mx.where(mask_bt, entropy_bt, -mx.inf).reshape(-1))
    return mask_bt & (entropy_bt >= ranked[-number])
