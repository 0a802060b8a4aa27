"""Creates, forks and joins mlx-lm's caches of all kinds for decoding, and selects their rows."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.layers import CANNOT_CALL
from grpo_fn.trees import map_arrays, on_host

Caches = list[Any]

_PROBE_ROWS = 13  # not a number of heads, so that a mask on the wrong axis cannot fit by chance


def plain_caches(model: nn.Module) -> Caches:
    """Creates empty caches with the model's own function; all rows of a batch must have the same
    length."""
    # pulls in transformers: only once decoding starts
    from mlx_lm.models.cache import make_prompt_cache

    return make_prompt_cache(model)


def ragged_caches(model: nn.Module, rows: int) -> Caches:
    """Creates empty caches for rows of different lengths; requires that `takes_ragged` is true."""
    # A separate cache for each row: merging reads them one by one.
    return merged([plain_caches(model) for _ in range(rows)])


def merged(rows: Sequence[Caches]) -> Caches:
    """Combines plain caches with one row each into caches for all these rows."""
    return [type(per_row[0]).merge(list(per_row)) for per_row in zip(*rows, strict=True)]


def takes_ragged(model: nn.Module) -> bool:
    """Returns whether rows of different lengths can share a batch; both the caches and the model
    must support such rows.

    The function builds a call without evaluating it, because some attention layers do not accept a
    mask for each row. Only a model for which `shares_keys` is true is evaluated, because it may
    derive a position from the number of keys (afm7).
    """
    if not hasattr(model, "make_cache") and not hasattr(model, "layers"):
        return False
    # Recurrent states would include the padding: not every such model masks it.
    if not _keep_keys(plain_caches(model)):
        return False
    caches = ragged_caches(model, _PROBE_ROWS)
    prepare_padding(caches, [2] * (_PROBE_ROWS - 1) + [1], 2)
    try:
        model(mx.zeros((_PROBE_ROWS, 2), mx.int32), cache=caches)
    except CANNOT_CALL:
        return False
    return not shares_keys(model) or _ragged_is_right(model)


def _keep_keys(caches: Caches) -> bool:
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    return all(type(cache) in (KVCache, RotatingKVCache) for cache in caches)


def shares_keys(model: nn.Module) -> bool:
    """Returns whether some layers attend to keys and values from other layers' caches. Such a model
    has fewer caches than layers.
    """
    return len(plain_caches(model)) < len(getattr(model, "layers", None) or [])


def needs_caches(model: nn.Module) -> bool:
    """Returns whether logits with and without caches differ, so that training would not match
    sampling.

    Only models for which `shares_keys` is true are checked, on a few tokens. For example, without
    shared caches, layers of gemma3n use their own keys.
    """
    if not hasattr(model, "make_cache") or not shares_keys(model):
        return False
    caches = plain_caches(model)
    if not _keep_keys(caches):
        return False
    tokens_1l = mx.array([_PROBE])
    return not _same_numbers(model(tokens_1l, None), model(tokens_1l, cache=caches))


_PROBE = list(range(1, 13))  # token ids


def _ragged_is_right(model: nn.Module) -> bool:
    """Returns whether a long and a short row have the same logits when decoded together as when
    decoded separately.
    """
    rows = [_PROBE, _PROBE[:3]]
    caches = ragged_caches(model, 2)
    longest = len(rows[0]) - 1
    body_bl = mx.array([[*row[:-1], *[0] * (longest + 1 - len(row))] for row in rows])
    prepare_padding(caches, [len(row) - 1 for row in rows], longest)
    model(body_bl, cache=caches)
    finish_padding(caches)
    together = model(mx.array([row[-1:] for row in rows]), cache=caches)[:, -1]
    alone = mx.concatenate(
        [model(mx.array([row]), cache=plain_caches(model))[:, -1] for row in rows]
    )
    return _same_numbers(together, alone)


def _same_numbers(one: mx.array, other: mx.array) -> bool:
    """Returns whether two arrays of logits are equal up to rounding."""
    tolerance = 1e-2 if one.dtype == mx.float32 else 0.1
    one, other = one.astype(mx.float32), other.astype(mx.float32)
    finite = mx.isfinite(one) & mx.isfinite(other)
    difference = mx.where(finite, mx.abs(one - other), 0.0).max()
    return bool((difference <= tolerance * mx.where(finite, mx.abs(other), 0.0).max()).item())


def prepare_padding(caches: Caches, lengths: list[int], padded: int) -> None:
    """Tells ragged caches that each row of the next call ends with `padded − length` tokens of
    padding."""
    for cache in caches:
        cache.prepare(lengths=lengths, right_padding=[padded - length for length in lengths])


def finish_padding(caches: Caches) -> None:
    """Removes the padding of the previous call from ragged caches."""
    for cache in caches:
        cache.finalize()


def keep_rows(caches: Caches, rows: list[int]) -> None:
    """Keeps the given rows, in that order; a repeated row is forked."""
    index = mx.array(rows, mx.int32)
    for cache in caches:
        _drop_spare_room(cache)
        cache.state = map_arrays(lambda array: array[index] if array.ndim else array, cache.state)


def hold_all_tokens(caches: Caches) -> bool:
    """Returns whether caches contain the keys and values of every token, so that they can be
    truncated and joined.
    """
    from mlx_lm.models.cache import BatchKVCache, KVCache

    return all(type(cache) in (KVCache, BatchKVCache) for cache in caches)


def join_rows(caches: Caches, others: Caches) -> None:
    """Appends the rows of other caches, padded on the left; `hold_all_tokens` must be true for all
    caches."""
    for number, other in enumerate(others):
        caches[number] = _padded(caches[number])
        caches[number].extend(_padded(other))


def drop_padding(caches: Caches) -> None:
    """Removes the columns that are padding in every row, after `join_rows`."""
    spare = min(on_host(caches[0].left_padding))
    for cache in caches if spare else ():
        keys, values, offset_b, padding_b, used = cache.state
        cache.state = (
            keys[:, :, spare:],
            values[:, :, spare:],
            offset_b,
            padding_b - spare,
            used - spare,
        )


def _padded(cache: Any) -> Any:
    """Converts a plain cache to one that can contain padding."""
    from mlx_lm.models.cache import BatchKVCache

    if hasattr(cache, "left_padding"):
        return cache
    keys, values = cache.keys_and_values()
    padded: Any = BatchKVCache([0] * keys.shape[0])
    offset_b = padded.offset + cache.offset
    padded.state = keys, values, offset_b, padded.left_padding, cache.offset
    return padded


def _drop_spare_room(cache: Any) -> None:
    """Truncates a KV buffer to its used part, so that selecting rows copies nothing else."""
    from mlx_lm.models.cache import BatchKVCache, CacheList, KVCache

    if isinstance(cache, CacheList):
        for inner in cache.caches:
            _drop_spare_room(inner)
    elif isinstance(cache, KVCache | BatchKVCache) and cache.keys is not None:
        cache.keys, cache.values = cache.keys_and_values()
