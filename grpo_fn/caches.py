"""What decoding needs of mlx-lm's caches, whatever their kind: make, fork, keep some rows."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.trees import map_arrays

Caches = list[Any]


def plain_caches(model: nn.Module) -> Caches:
    """Empty caches as the model itself makes them; all rows of a batch must then be of one length."""
    from mlx_lm.models.cache import make_prompt_cache  # pulls in transformers: only once decoding starts

    return make_prompt_cache(model)


def ragged_caches(model: nn.Module, rows: int) -> Caches | None:
    """Empty caches for rows of different lengths, or None where the model's caches have no such form."""
    layers = plain_caches(model)
    if not all(hasattr(layer, "merge") for layer in layers):
        return None
    # A cache of its own for each row: merging reads them one by one.
    rows_of_layers = zip(*(plain_caches(model) for _ in range(rows)), strict=True)
    return [type(layer).merge(list(per_row)) for layer, per_row in zip(layers, rows_of_layers, strict=True)]


def prepare_padding(caches: Caches, lengths: list[int], padded: int) -> None:
    """Tell ragged caches that each row of the next call ends with `padded − length` tokens of padding."""
    for cache in caches:
        cache.prepare(lengths=lengths, right_padding=[padded - length for length in lengths])


def finish_padding(caches: Caches) -> None:
    """Forget the padding of the call just made."""
    for cache in caches:
        cache.finalize()


def keep_rows(caches: Caches, rows: list[int]) -> None:
    """Keep the given rows, in that order; a row may be repeated, which forks it."""
    index = mx.array(rows, mx.int32)
    for cache in caches:
        _drop_spare_room(cache)
        cache.state = map_arrays(lambda array: array[index] if array.ndim else array, cache.state)


def arrays(caches: Caches) -> list[Any]:
    """The caches' states, to be evaluated."""
    return [cache.state for cache in caches]


def _drop_spare_room(cache: Any) -> None:
    """Cut a KV buffer to what is in use, so that keeping rows does not copy its spare room."""
    from mlx_lm.models.cache import BatchKVCache, CacheList, KVCache

    if isinstance(cache, CacheList):
        for inner in cache.caches:
            _drop_spare_room(inner)
    elif isinstance(cache, KVCache | BatchKVCache) and cache.keys is not None:
        cache.keys, cache.values = cache.keys_and_values()
