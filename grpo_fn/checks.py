"""Checks that run before any arithmetic, so that a broadcast cannot hide a mistake."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

import mlx.core as mx

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: far outside any trust region, far inside float32


def check_shape(name: str, array: mx.array, wanted: tuple[int, ...]) -> None:
    """Raises ValueError unless `array` has exactly the shape `wanted`."""
    if tuple(array.shape) != wanted:
        raise ValueError(f"{name} has shape {tuple(array.shape)}, expected {wanted}")


def check_rank(name: str, array: mx.array, rank: int) -> None:
    """Raises ValueError unless `array` has `rank` axes."""
    if array.ndim != rank:
        raise ValueError(f"{name} has shape {tuple(array.shape)}, expected {rank} axes")


def check_dtype(name: str, array: mx.array, wanted: mx.Dtype) -> None:
    """Raises ValueError unless `array` has the dtype `wanted`."""
    if array.dtype != wanted:
        raise ValueError(f"{name} is {array.dtype}, expected {wanted}")


def check_token_ids(prompts: Sequence[Sequence[int]], vocabulary: int | None) -> None:
    """Raises ValueError unless 0 <= id < `vocabulary` for all token ids in the prompts. A
    `vocabulary` of None means no upper limit.

    MLX silently reads past the end of an embedding table.
    """
    for number, prompt in enumerate(prompts):
        low, high = min(prompt, default=0), max(prompt, default=0)
        bad = low if low < 0 else high
        if bad < 0 or (vocabulary is not None and bad >= vocabulary):
            bound = (
                ""
                if vocabulary is None
                else f" < {vocabulary}, the rows of the model's token embedding"
            )
            raise ValueError(f"prompt {number} has the token id {bad}: expected 0 <= id{bound}")


class TooLong(ValueError):
    """Raised if a sequence needs more positions than the model has learned."""


def check_positions(what: str, needed: int, positions: int | None) -> None:
    """Raises TooLong if `what` needs more positions than the model has learned; None means no
    limit.

    A row's last token needs no position if nothing is predicted from it. Without this check, MLX
    would silently read past the end of a table.
    """
    if positions is not None and needed > positions:
        raise TooLong(f"{what}: expected at most {positions} learned positions, found {needed}")


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raises ValueError, with the nearest spelling, unless `value` is one of `choices`."""
    choices = tuple(choices)
    if value not in choices:
        near = get_close_matches(str(value), choices, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name} = {value!r} is not one of {', '.join(choices)}{hint}")


def clamp_log(log_ratio: mx.array) -> mx.array:
    """Clamps a log-ratio to ±20 before it is exponentiated; the gradient is zero outside this
    range.
    """
    return mx.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
