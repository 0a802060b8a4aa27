"""The time of decoding steps, at any length, without waiting for completions to get there.

The caches are filled with zeros: what a step costs depends on their shapes alone. Nothing is prefilled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.policy import kv_caches
from grpo_fn.rollout import (
    WORDS,
    CacheSteps,
    Lane,
    LaneSteps,
    Steps,
    Stream,
    drawing,
    grid_lanes,
    lane_stream,
    shared_steps,
)
from grpo_fn.trees import arrays_of, on_host
from runners.machine.launch_modes import launch_keywords
from runners.tuning.workload import Workload

LAUNCHES: dict[str, Callable[..., Any]] = {"eval": mx.eval, "split": mx.eval, "async": mx.async_eval}
WARM_STEPS = 2  # of a run, not timed: the first one finds buffers that are about to grow


class Probe:
    """Times runs of decoding steps."""

    def __init__(self, work: Workload, clock: Callable[[], float] = time.perf_counter):
        self._work, self._clock = work, clock
        self._draw = drawing(work.sampler)

    @property
    def measurable(self) -> bool:
        """Whether every cache of the model is of a kind that can be filled."""
        from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

        kinds = (KVCache, RotatingKVCache, ArraysCache)
        with self._work.policy.bound(self._work.params) as model:
            return all(type(cache) in kinds for cache in kv_caches.plain_caches(model))

    def seconds_per_step(
        self, launch: str, check_every: int, *, groups: int, drawn: int, steps: int
    ) -> float:
        """Seconds of each of `steps` steps, for the groups of the first `groups` prompts.

        Each row has drawn `drawn` tokens before. Every `check_every` steps, and at the end, the tokens are
        brought to the host, as where `generate` looks for rows that have ended.
        """
        lanes = launch_keywords(launch)["lanes"] if self._work.takes_lanes else 1
        with self._work.policy.sampling(self._work.params, lanes=lanes > 1) as model:
            begun = [self._begun(*each) for each in self.steps(model, groups, drawn, lanes)]
            self._run(begun, LAUNCHES[launch], WARM_STEPS, WARM_STEPS)
            started = self._clock()
            self._run(begun, LAUNCHES[launch], check_every, steps)
            return (self._clock() - started) / steps

    def steps(self, model: nn.Module, groups: int, drawn: int, lanes: int = 1) -> list[LaneSteps]:
        """What `generate` has once each row has drawn `drawn` tokens, its caches full of zeros."""
        work = self._work
        lengths = work.lengths[:groups]
        caches = kv_caches.plain_caches(model)
        # One token: recurrent states come into being, the others show their shapes.
        model(mx.zeros((groups, 1), mx.int32), cache=caches)
        for cache in caches:
            _extend(cache, max(lengths) - 1)
        mx.eval(list(arrays_of(kv_caches.arrays(caches))))
        places = list(range(groups * work.num_generations))
        shared = work.policy, model, caches, lengths, work.num_generations
        if lanes > 1:
            return grid_lanes(*shared, lanes, room=work.max_new_tokens, drawn=drawn)
        if work.shares_prefix:
            steps = shared_steps(*shared, room=work.max_new_tokens, drawn=drawn)
            return [(steps, places, lane_stream(0))]
        kv_caches.keep_rows(caches, [place // work.num_generations for place in places])
        for cache in caches:
            _extend(cache, drawn)
        mx.eval(list(arrays_of(kv_caches.arrays(caches))))
        return [(CacheSteps(model, caches), places, lane_stream(0))]

    def _begun(self, steps: Steps, places: list[int], stream: Stream) -> Lane:
        rows = len(places)
        words_nbw = mx.full((1, rows, WORDS), 2**31, mx.uint32)
        mx.eval(words_nbw)
        with mx.stream(stream):
            return Lane(steps, steps(mx.zeros((rows,), mx.int32)), words_nbw, places, stream)

    def _run(self, lanes: list[Lane], launch: Callable[..., Any], check_every: int, steps: int) -> None:
        for n in range(steps):
            for lane in lanes:
                with mx.stream(lane.stream):
                    lane.drawn.append(self._draw(lane.logits_bv, lane.words_nbw[0]))
            launch([lane.drawn[-1] for lane in lanes])
            token_b = [lane.drawn[-1]["tokens"] for lane in lanes]
            look = (n + 1) % check_every == 0 or n + 1 == steps
            for lane, tokens in zip(lanes, token_b, strict=True):
                if look:
                    on_host(mx.stack([drawn["tokens"] for drawn in lane.drawn], axis=1))
                    lane.drawn = []
                with mx.stream(lane.stream):
                    lane.logits_bv = lane.steps(tokens)
        mx.eval([lane.logits_bv for lane in lanes])


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
