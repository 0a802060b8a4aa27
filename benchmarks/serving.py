"""How fast are requests that arrive one by one, compared with the same rows submitted at once?

Each request has a different prompt of 32 to 64 tokens and one completion of a fixed length, sampled
at temperature 1. One by one, the requests arrive at equal intervals within a twentieth of the time
that the rows take at once, so that the work dominates; each joins the decoding rows.
BatchGenerator, which `mlx_lm.server` uses, receives them at the same times. Everything runs once
before it is measured, as in a warm server. *Processor time* is the same ratio in processor seconds;
on a CPU that others also use, it is the more reliable figure.

**What limits it.** The last request ends a twentieth later than at once. Each prefill interrupts
the decoding rows, and each join copies their caches, so a few requests wait for up to eight steps.
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
from benchmarks.harness.machine import backend
from benchmarks.harness.measure import Timing, interleaved, run_once
from benchmarks.harness.record import Figure, rate_figure, ratio_figure
from benchmarks.harness.shapes import make_module, make_prompts, vocabulary_of
from benchmarks.rollout import Prompts, as_a_run
from grpo_fn.backends import disabled
from grpo_fn.prng import completion_keys
from grpo_fn.rollout import Entry, RowQueue, decode_queue
from grpo_fn.trees import on_host

REQUESTS = (1, 8, 32, 128)
LEAST = 0.9  # of the rate at once
WINDOW = 0.05  # of the time at once, in which requests arrive


@attrs.define
class Arrivals:
    """Requests by their times, starting with the first."""

    count: int
    gap: float
    add: Callable[[int], None]  # receives a request's number at its time
    began: float = attrs.field(factory=time.perf_counter)
    arrived: int = 0

    def poll(self, *, wait: bool = False) -> bool:
        """Adds the requests that are due; returns whether more will follow. With `wait`, waits
        until one is due.
        """
        while self.arrived < self.count:
            due = self.began + self.arrived * self.gap - time.perf_counter()
            if due > 0 and not wait:
                break
            time.sleep(max(due, 0.0))
            self.add(self.arrived)
            self.arrived += 1
            wait = False
        return self.arrived < self.count


def ours(policy: g.Policy, prompts: Prompts, new: int, gap: float) -> Callable[[], dict[int, list[int]]]:
    """A call that decodes the requests as they arrive, like a server; with a gap of 0, all at once,
    like a run.
    """
    rows = mx.arange(len(prompts))
    keys = on_host(completion_keys(mx.random.key(0), rows, mx.zeros_like(rows)))
    sampling = g.Sampling(max_new_tokens=new)
    decoding = attrs.evolve(as_a_run(), few_sizes=gap > 0)

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


def compare(
    policy: g.Policy, plain: nn.Module, title: str, prompts: Prompts, new: int, repeats: int
) -> list[Figure]:
    """The rates for these requests; the target is the ratio of one by one to at once."""
    at_once = ours(policy, prompts, new, 0.0)
    at_once()  # what it compiles is not in the gap
    gap = run_once(at_once) * WINDOW / len(prompts)
    taken: dict[str, list[float]] = {}

    def plainly() -> object:
        with disabled("decode_blocks"):
            return at_once()

    def timed(name: str, call: Callable[[], object]) -> Callable[[], object]:
        """The call, whose processor seconds are kept."""

        def run() -> object:
            started = time.process_time()
            result = call()
            taken.setdefault(name, []).append(time.process_time() - started)
            return result

        return run

    calls = {
        "at once": timed("at once", at_once),
        "one by one": timed("one by one", ours(policy, prompts, new, gap)),
        "BatchGenerator, one by one": theirs(plain, prompts, new, gap),
        "at once, without decode_blocks": plainly,
    }
    times = interleaved(calls, repeats=repeats)
    once, single, other, without = times.values()
    seconds = {name: Timing(tuple(each[-repeats:])) for name, each in taken.items()}
    tokens = len(prompts) * new
    arriving = f"{title}: one by one over at once"
    return [
        *(rate_figure(f"{title}: {name}", tokens, timing) for name, timing in times.items()),
        Figure(f"{title}: between two requests", 1e3 * gap, "ms"),
        ratio_figure(arriving, once / single, at_least=LEAST),
        ratio_figure(f"{arriving}, processor time", seconds["at once"] / seconds["one by one"]),
        ratio_figure(f"{title}: ours over BatchGenerator", other / single),
        ratio_figure(f"{title}: gain of decode_blocks", without / once),
    ]


@benchmark("serving", parts=("models", "counts"))
@click.option(
    "--model",
    "models",
    multiple=True,
    default=["embedded"],
    show_default=True,
    help="Model folders, or shapes' names.",
)
@click.option(
    "--requests", "counts", type=int, multiple=True, default=REQUESTS, show_default=True, help="How many."
)
@click.option("--new", default=0, help="Number of tokens per completion [128; on a CPU 64].")
@click.option("--repeats", default=3, help="Number of rounds of each comparison.")
def main(
    quick: bool, models: Sequence[str], counts: Sequence[int], new: int, repeats: int
) -> Iterator[Sequence[Figure]]:
    """Compare requests that arrive one by one with the same rows submitted at once."""
    length = 8 if quick else 64
    new = 4 if quick else new or (64 if backend() == "cpu" else 128)
    for model in models:
        policy = g.Policy.for_inference(load_module(model))
        plain = load_module(model)  # whose layers call mlx-lm's own functions
        for requests in counts[: 2 if quick else None]:
            say(f"serving: {requests} ({model})")
            spread = length // 2 if requests > 1 else 0
            prompts = make_prompts(requests, length, vocabulary_of(plain), spread=spread)
            title = f"{Path(model).name}: {requests} request{'s' if requests > 1 else ''}"
            figures = compare(policy, plain, title, prompts, new, 1 if quick else repeats)
            # --quick shows that it works, not how fast.
            yield [each.unjudged() for each in figures] if quick else figures


if __name__ == "__main__":
    main()
