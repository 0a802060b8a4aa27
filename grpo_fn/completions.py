"""Rollout, which contains sampled completions and their log-probs, before they are scored."""

from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx

from grpo_fn.checks import check_rank
from grpo_fn.images import PromptImages
from grpo_fn.trees import flat, on_host


@attrs.frozen(eq=False)
class Ended:
    """A finished row, which is one completion of a prompt, or the current state of a row that is
    still decoding.
    """

    tokens: list[int]
    logp: list[float]  # log-prob of each token, nats
    entropy: list[float] | None  # entropy at each token, nats, if requested
    # True if an end token or stop string ended it, False at the length limit
    finished: bool = False
    prompt_computed: int = 0  # prompt tokens that were computed, not taken from kept caches


@attrs.frozen(eq=False)
class Rollout:
    """G sampled completions for each of P prompts; row p·G + g is completion g of prompt p.

    A completion may be a conversation: turns that the model sampled, separated by tokens from an
    environment. A conversation is a single row of tokens, so each turn's context is an exact prefix
    of the next turn's.
    """

    prompts: tuple[tuple[int, ...], ...]  # token ids of each prompt
    num_generations: int  # G
    tokens_bt: mx.array  # completions, int32, zeros after the end
    lengths_b: mx.array  # number of tokens per completion, including the end token, int32
    logp_bt: mx.array  # log μ of each sampled token, float32, zeros after the end
    finished_b: mx.array  # True if an end token or stop string ended it, False at the length limit
    entropy_bt: mx.array | None = None  # the sampler's entropy at each position, nats, if requested
    vocabulary: int | None = None  # exclusive bound on token ids (set by `generate`); None: unknown
    # True on tokens that the model sampled; None means that it sampled all
    sampled_bt: mx.array | None = None
    images: tuple[PromptImages | None, ...] | None = None  # images of each prompt; None: no images
    # int32: version of the weights that sampled each row; None means unknown
    version_b: mx.array | None = None

    def completions(self) -> list[list[int]]:
        """Returns each row's token ids on the host, including the end token."""
        return self._cut(self.tokens_bt)

    def sampled(self) -> list[list[bool]]:
        """Returns whether the model sampled each of these tokens, on the host."""
        return self._cut(_sampled(self))

    def _cut(self, values_bt: mx.array) -> list[list[Any]]:
        rows = zip(on_host(values_bt), on_host(self.lengths_b), strict=True)
        return [row[:length] for row, length in rows]

    def turn_numbers(self) -> mx.array:
        """Returns the turn number of each token, int32 [B,T], counted from 0. Given tokens have the
        number of the preceding turn, or -1 if there is no preceding turn.
        """
        sampled_bt = _sampled(self).astype(mx.int32)
        before_bt = mx.pad(sampled_bt[:, :-1], [(0, 0), (1, 0)])
        return mx.cumsum(mx.maximum(sampled_bt - before_bt, 0), axis=1) - 1

    def turn_states(self) -> mx.array:
        """Returns the number of the state in which each turn starts, int32 [P,G,S]. Within a group,
        turns that follow the same given tokens have the same number (for first turns, only the
        prompt counts). The number is -1 where a completion has no such turn.
        """
        turns: list[list[int]] = []
        for row, (tokens, sampled) in enumerate(
            zip(self.completions(), self.sampled(), strict=True)
        ):
            if row % self.num_generations == 0:
                known: dict[tuple[int, ...], int] = {}
            given: list[int] = []
            turns.append([])
            for n, (token, own) in enumerate(zip(tokens, sampled, strict=True)):
                if own and (n == 0 or not sampled[n - 1]):
                    turns[-1].append(known.setdefault(tuple(given), len(known)))
                    given = []
                elif not own:
                    given.append(token)
        most = max(1, *map(len, turns))
        states = mx.array([[*row, *[-1] * (most - len(row))] for row in turns], mx.int32)
        return states.reshape(len(self.prompts), self.num_generations, most)


def spread_over_turns(values_pgs: mx.array, rollout: Rollout) -> mx.array:
    """Expands one number per turn to one per token: [P,G,S] -> [P,G,T], with 0 on tokens before the
    first turn.

    Raises:
        ValueError: the shape does not have a column for each turn.
    """
    turn_bt = rollout.turn_numbers()
    check_rank("values_pgs", values_pgs, 3)
    if (most := max(map(max, on_host(turn_bt))) + 1) > values_pgs.shape[2]:
        raise ValueError(f"values_pgs has shape {tuple(values_pgs.shape)}: expected {most} turns")
    values_bs = values_pgs.reshape(turn_bt.shape[0], -1)
    spread_bt = mx.take_along_axis(values_bs, mx.maximum(turn_bt, 0), axis=1)
    return mx.where(turn_bt >= 0, spread_bt, 0).reshape(*values_pgs.shape[:2], -1)


def given_rollout(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> Rollout:
    """Creates a rollout from given completions, one per prompt, for `make_sft_step`.

    Args:
        prompts: token ids of each prompt, at least one.
        completions: token ids of each completion, at least one, including the end token.

    Raises:
        ValueError: a prompt or a completion is empty or missing.
    """
    lengths = [len(completion) for completion in completions]
    if not lengths or len(prompts) != len(lengths) or not all((*lengths, *map(len, prompts))):
        raise ValueError(
            f"expected as many completions as prompts, none of them empty, found {len(prompts)} "
            f"prompts and completions of {lengths} tokens"
        )
    rows = [
        Ended(tokens=[*tokens], logp=[0.0] * len(tokens), entropy=None, finished=True)
        for tokens in completions
    ]
    return rollout_of(prompts, 1, rows)


def rollout_of(
    prompts: Sequence[Sequence[int]],
    num_generations: int,
    rows: Sequence[Ended],
    *,
    vocabulary: int | None = None,
    images: Sequence[PromptImages | None] | None = None,
    sampled: Sequence[Sequence[bool]] | None = None,
    version_b: mx.array | None = None,
) -> Rollout:
    """Creates a rollout from these rows; its width is the longest row's length, at least 1.

    Args:
        prompts: token ids of each prompt.
        num_generations: number of rows per prompt.
        rows: one row per completion, grouped by prompt.
        vocabulary, images, version_b: as in `Rollout`.
        sampled: for each row, whether the model sampled each token; None if it sampled all tokens.
    """
    width = max((len(row.tokens) for row in rows), default=0) or 1

    def array(values: Sequence[Sequence[float]], dtype: mx.Dtype) -> mx.array:
        padded = [[*row, *[0] * (width - len(row))] for row in values]
        return mx.array(padded, dtype).reshape(len(rows), width)

    entropies = [row.entropy for row in rows if row.entropy is not None]
    return Rollout(
        prompts=tuple(map(tuple, prompts)),
        num_generations=num_generations,
        tokens_bt=array([row.tokens for row in rows], mx.int32),
        lengths_b=mx.array([len(row.tokens) for row in rows], mx.int32),
        logp_bt=array([row.logp for row in rows], mx.float32),
        finished_b=mx.array([row.finished for row in rows], mx.bool_),
        entropy_bt=array(entropies, mx.float32) if entropies else None,
        vocabulary=vocabulary,
        sampled_bt=None if sampled is None else array(sampled, mx.bool_),
        images=None if images is None else tuple(images),
        version_b=version_b,
    )


_ROWS = ("tokens_bt", "lengths_b", "logp_bt", "finished_b", "entropy_bt", "sampled_bt", "version_b")


def take_groups(rollout: Rollout, groups: Sequence[int]) -> Rollout:
    """Returns a rollout with only these prompts' groups, in the given order."""
    size = rollout.num_generations
    index = mx.array(flat(range(p * size, (p + 1) * size) for p in groups), mx.int32)
    rows = {name: getattr(rollout, name) for name in _ROWS}
    return attrs.evolve(
        rollout,
        prompts=tuple(rollout.prompts[p] for p in groups),
        images=None if rollout.images is None else tuple(rollout.images[p] for p in groups),
        **{name: None if array is None else array[index] for name, array in rows.items()},
    )


def join_rollouts(parts: Sequence[Rollout]) -> Rollout:
    """Concatenates rollouts that have the same G, padded to the longest.

    Raises:
        ValueError: the list is empty, or the rollouts differ in G or in whether they contain
            entropies.
    """
    kinds = {(part.num_generations, part.entropy_bt is None) for part in parts}
    if len(kinds) != 1:
        raise ValueError(
            f"expected rollouts with the same (num_generations, without entropies), found "
            f"{sorted(kinds)}"
        )
    if len(parts) == 1:
        return parts[0]
    if any(part.sampled_bt is not None for part in parts):
        parts = [attrs.evolve(part, sampled_bt=_sampled(part)) for part in parts]
    width = max(part.tokens_bt.shape[1] for part in parts)

    def joined(name: str) -> mx.array | None:
        arrays = [getattr(part, name) for part in parts]
        if any(array is None for array in arrays):
            return None
        missing = [width - array.shape[1] if array.ndim == 2 else 0 for array in arrays]
        return mx.concatenate(
            [
                mx.pad(a, [(0, 0), (0, more)]) if more else a
                for a, more in zip(arrays, missing, strict=True)
            ]
        )

    images = flat(part.images or (None,) * len(part.prompts) for part in parts)
    bounds = [part.vocabulary for part in parts if part.vocabulary is not None]
    return attrs.evolve(
        parts[0],
        prompts=tuple(flat(part.prompts for part in parts)),
        vocabulary=max(bounds) if len(bounds) == len(parts) else None,
        images=None if all(part.images is None for part in parts) else tuple(images),
        **{name: joined(name) for name in _ROWS},
    )


def _sampled(rollout: Rollout) -> mx.array:
    """Returns `sampled_bt`, or an array of True if the rollout has none because all tokens are
    sampled.
    """
    if rollout.sampled_bt is not None:
        return rollout.sampled_bt
    return mx.arange(rollout.tokens_bt.shape[1])[None] < rollout.lengths_b[:, None]
