"""The time of decoding steps, at any length, without waiting for completions to get there.

The caches are filled with zeros: what a step costs depends on their shapes alone. Nothing is prefilled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from grpo_fn import caches as cache_rows
from grpo_fn.decode_step import CacheSteps, Steps, shared_steps
from grpo_fn.sampling import completion_keys, drawing
from grpo_fn.trees import arrays_of, on_host
from runners.workload import Workload

LAUNCHES: dict[str, Callable[..., Any]] = {"eval": mx.eval, "async": mx.async_eval}
WARM_STEPS = 2  # of a run, not timed: the first one finds buffers that are about to grow


class Probe:
    """Times runs of decoding steps on a bound model."""

    def __init__(self, work: Workload, model: nn.Module, clock: Callable[[], float] = time.perf_counter):
        self._work, self._model, self._clock = work, model, clock
        self._draw = drawing(work.sampler)

    @property
    def measurable(self) -> bool:
        """Whether every cache of the model is of a kind that can be filled."""
        from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

        kinds = (KVCache, RotatingKVCache, ArraysCache)
        return all(type(cache) in kinds for cache in cache_rows.plain_caches(self._model))

    def seconds_per_step(
        self, launch: str, check_every: int, *, groups: int, drawn: int, steps: int
    ) -> float:
        """Seconds of each of `steps` steps, for the groups of the first `groups` prompts.

        Each row has drawn `drawn` tokens before. Every `check_every` steps, and at the end, the tokens are
        brought to the host, as where `generate` looks for rows that have ended.
        """
        taken = self.steps(groups, drawn)
        rows = groups * self._work.num_generations
        keys_b2 = completion_keys(mx.random.key(0), mx.arange(rows), mx.zeros((rows,), mx.int32))
        logits_bv = taken(mx.zeros((rows,), mx.int32))
        logits_bv = self._run(logits_bv, taken, keys_b2, LAUNCHES[launch], WARM_STEPS, WARM_STEPS)
        started = self._clock()
        self._run(logits_bv, taken, keys_b2, LAUNCHES[launch], check_every, steps)
        return (self._clock() - started) / steps

    def steps(self, groups: int, drawn: int) -> Steps:
        """Steps as `generate` has them once each row has drawn `drawn` tokens, its caches full of zeros."""
        work = self._work
        lengths = work.lengths[:groups]
        caches = cache_rows.plain_caches(self._model)
        # One token: recurrent states come into being, the others show their shapes.
        self._model(mx.zeros((groups, 1), mx.int32), cache=caches)
        for cache in caches:
            _extend(cache, max(lengths) - 1)
        mx.eval(list(arrays_of(cache_rows.arrays(caches))))
        if work.shares_prefix:
            return shared_steps(
                work.policy,
                self._model,
                caches,
                lengths,
                work.num_generations,
                room=work.max_new_tokens,
                drawn=drawn,
            )
        cache_rows.keep_rows(caches, [p for p in range(groups) for _ in range(work.num_generations)])
        for cache in caches:
            _extend(cache, drawn)
        mx.eval(list(arrays_of(cache_rows.arrays(caches))))
        return CacheSteps(self._model, caches)

    def _run(
        self,
        logits_bv: mx.array,
        taken: Steps,
        keys_b2: mx.array,
        launch: Callable[..., Any],
        check_every: int,
        steps: int,
    ) -> mx.array:
        block = []
        for n in range(steps):
            drawn = self._draw(logits_bv, keys_b2, mx.full((keys_b2.shape[0],), n, mx.uint32))
            launch(drawn)
            block.append(drawn["tokens"])
            if (n + 1) % check_every == 0 or n + 1 == steps:
                on_host(mx.stack(block, axis=1))
                block = []
            logits_bv = taken(drawn["tokens"])
        mx.eval(logits_bv)
        return logits_bv


def _extend(cache: Any, tokens: int) -> None:
    """Append zeros for `tokens` tokens; a cache that does not grow stays as it is."""
    if tokens < 1 or not hasattr(cache, "keys_and_values"):
        return
    keys, values = cache.state[:2]
    held = min(tokens, getattr(cache, "max_size", tokens))
    cache.update_and_fetch(
        *(mx.zeros((a.shape[0], a.shape[1], held, a.shape[3]), a.dtype) for a in (keys, values))
    )
    cache.offset += tokens - held  # what a window no longer holds is only counted
