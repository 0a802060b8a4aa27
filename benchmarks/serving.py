"""Requests that arrive one by one, against the same rows submitted at once; and mlx-lm's BatchGenerator.

Each request is a prompt of its own with one completion of a fixed length, sampled at temperature 1. One by
one, a request arrives some milliseconds after the one before, as from clients that start together; it joins
the rows that decode. BatchGenerator, which `mlx_lm.server` uses, gets them in the same way.

**What limits it.** The first rows decode alone until the others are there, each prefill is a call of its own,
and each join copies the caches of the rows that decode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import click
import mlx.core as mx
import mlx.nn as nn

import grpo_fn as g
from benchmarks.harness.command import benchmark, say
from benchmarks.harness.generators import Prompts, as_a_run
from benchmarks.harness.measure import interleaved
from benchmarks.harness.record import Figure, ratio_figure
from benchmarks.harness.shapes import make_module, make_prompts, vocabulary_of
from benchmarks.rollout import rate_figure
from grpo_fn.prng import completion_keys
from grpo_fn.rollout import Entry, RowQueue, decode_queue
from grpo_fn.trees import on_host

REQUESTS = (1, 8, 32, 128)
LEAST = 0.9  # of the rate at once


class Arrivals:
    """Requests by their times, from the first one on."""

    def __init__(self, count: int, gap: float, add: Callable[[int], None]) -> None:
        """`add` gets a request's number once its time has come."""
        self._count, self._gap, self._add = count, gap, add
        self._began = time.perf_counter()
        self.arrived = 0

    def poll(self, *, wait: bool = False) -> bool:
        """Add those whose time has come; returns whether more will come. `wait`: until one has come."""
        while self.arrived < self._count:
            due = self._began + self.arrived * self._gap - time.perf_counter()
            if due > 0 and not wait:
                break
            time.sleep(max(due, 0.0))
            self._add(self.arrived)
            self.arrived += 1
            wait = False
        return self.arrived < self._count


def ours(policy: g.Policy, prompts: Prompts, new: int, gap: float) -> Callable[[], dict[int, list[int]]]:
    """A call that decodes the requests as they arrive; gap 0: all at once."""
    rows = mx.arange(len(prompts))
    keys = on_host(completion_keys(mx.random.key(0), rows, mx.zeros_like(rows)))
    sampling = g.Sampling(max_new_tokens=new)
    decoding = as_a_run()

    def run() -> dict[int, list[int]]:
        queue = RowQueue(policy)

        def add(number: int) -> None:
            first, second = keys[number]
            key = (first, second)
            queue.add(Entry(rows=(number,), prompt=prompts[number], keys=(key,), sampling=sampling))

        arrivals = Arrivals(len(prompts), gap, add)
        done: dict[int, list[int]] = {}
        while arrivals.poll(wait=True) or queue.busy:
            for _ in decode_queue(policy, policy.params, queue, decoding):
                arrivals.poll()
            done |= {row: ended.tokens for row, ended in queue.take().items()}
        if sorted(done) != list(range(len(prompts))) or {len(tokens) for tokens in done.values()} != {new}:
            raise RuntimeError(f"{len(done)} of {len(prompts)} requests were decoded")
        return done

    return run


def theirs(module: nn.Module, prompts: Prompts, new: int, gap: float) -> Callable[[], list[mx.array]]:
    """The same with BatchGenerator."""
    from mlx_lm.generate import BatchGenerator

    def run() -> list[mx.array]:
        generator = BatchGenerator(
            module,
            max_tokens=new,
            sampler=mx.random.categorical,
            completion_batch_size=len(prompts),
            prefill_batch_size=len(prompts),
        )

        def add(number: int) -> None:
            generator.insert([[*prompts[number]]])

        arrivals = Arrivals(len(prompts), gap, add)
        drawn = 0
        try:
            while drawn < len(prompts) * new:
                arrivals.poll(wait=drawn == arrivals.arrived * new)
                drawn += len(generator.next_generated())
        finally:
            generator.close()
        return []

    return run


def load_module(model: str) -> nn.Module:
    """A model folder, or a name of `make_module`."""
    if not Path(model).is_dir():
        return make_module(model)
    from mlx_lm.utils import load_model

    module, _ = load_model(Path(model))
    if mx.default_device().type == mx.DeviceType.cpu:
        module.set_dtype(mx.float32)
    return module


def compare(policy: g.Policy, plain: nn.Module, requests: int, case: Case) -> list[Figure]:
    """The rates of one number of requests; target: one by one over at once."""
    spread = case.prompt // 2
    prompts = make_prompts(requests, case.prompt, vocabulary_of(plain), spread=spread if requests > 1 else 0)
    calls = {
        "at once": ours(policy, prompts, case.new, 0.0),
        "one by one": ours(policy, prompts, case.new, case.gap),
        "BatchGenerator, one by one": theirs(plain, prompts, case.new, case.gap),
    }
    times = interleaved(calls, repeats=case.repeats)
    title = f"{requests} request{'s' if requests > 1 else ''}"
    return [
        *(rate_figure(f"{title}: {name}", requests * case.new, timing) for name, timing in times.items()),
        ratio_figure(
            f"{title}: one by one over at once", times["at once"] / times["one by one"], at_least=LEAST
        ),
        ratio_figure(
            f"{title}: ours over BatchGenerator", times["BatchGenerator, one by one"] / times["one by one"]
        ),
    ]


@attrs.frozen(kw_only=True)
class Case:
    """Sizes."""

    prompt: int = 64
    new: int = 64
    gap: float = 1e-3
    repeats: int = 3


@benchmark("serving")
@click.option("--model", default="embedded", show_default=True, help="A model folder, or a shape's name.")
@click.option("--gap", default=1.0, show_default=True, help="Milliseconds between two requests.")
@click.option("--new", default=64, show_default=True, help="Tokens of a completion.")
@click.option("--repeats", default=3, help="Rounds of each comparison.")
def main(quick: bool, model: str, gap: float, new: int, repeats: int) -> Iterator[Sequence[Figure]]:
    """Requests that arrive one by one, and the same rows submitted at once."""
    case = Case(new=new, gap=gap / 1e3, repeats=repeats)
    if quick:
        case = attrs.evolve(case, prompt=8, new=4, repeats=1)
    policy = g.Policy.for_inference(load_module(model))
    plain = load_module(model)  # whose layers call mlx-lm's own functions
    for requests in REQUESTS[: 2 if quick else None]:
        say(f"serving: {requests} ({model})")
        figures = compare(policy, plain, requests, case)
        # --quick shows that it works, not how fast.
        yield [attrs.evolve(each, at_least=None) for each in figures] if quick else figures


if __name__ == "__main__":
    main()
