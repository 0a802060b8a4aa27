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
from benchmarks.harness.generators import Prompts, as_a_run
from benchmarks.harness.machine import backend
from benchmarks.harness.measure import Timing, interleaved, run_once
from benchmarks.harness.record import Figure, ratio_figure
from benchmarks.harness.shapes import make_module, make_prompts, vocabulary_of
from benchmarks.rollout import rate_figure
from grpo_fn.backends import disabled
from grpo_fn.prng import completion_keys
from grpo_fn.rollout import Entry, RowQueue, decode_queue
from grpo_fn.trees import on_host

REQUESTS = (1, 8, 32, 128)
LEAST = 0.9  # of the rate at once
WINDOW = 0.05  # of the time at once, in which requests arrive


class Arrivals:
    """Requests by their times, starting with the first."""

    def __init__(self, count: int, gap: float, add: Callable[[int], None]) -> None:
        """`add` receives a request's number at its time."""
        self._count, self._gap, self._add = count, gap, add
        self._began = time.perf_counter()
        self.arrived = 0

    def poll(self, *, wait: bool = False) -> bool:
        """Adds the requests that are due; returns whether more will follow. With `wait`, waits
        until one is due.
        """
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


@attrs.define
class Processor:
    """A call, and the processor seconds of each execution."""

    call: Callable[[], object]
    seconds: list[float] = attrs.field(factory=list)

    def __call__(self) -> object:
        """The call's result."""
        started = time.process_time()
        result = self.call()
        self.seconds.append(time.process_time() - started)
        return result


def compare(policy: g.Policy, plain: nn.Module, name: str, requests: int, case: Case) -> list[Figure]:
    """The rates for one number of requests; the target is the ratio of one by one to at once."""
    spread = case.prompt // 2
    prompts = make_prompts(requests, case.prompt, vocabulary_of(plain), spread=spread if requests > 1 else 0)
    at_once = Processor(ours(policy, prompts, case.new, 0.0))
    at_once()  # what it compiles is not in the gap
    gap = run_once(at_once) * WINDOW / requests

    def plainly() -> object:
        with disabled("decode_blocks"):
            return at_once.call()

    calls = {
        "at once": at_once,
        "one by one": Processor(ours(policy, prompts, case.new, gap)),
        "BatchGenerator, one by one": Processor(theirs(plain, prompts, case.new, gap)),
        "at once, without decode_blocks": Processor(plainly),
    }
    times = interleaved(calls, repeats=case.repeats)
    seconds = {name: Timing(tuple(call.seconds[-case.repeats :])) for name, call in calls.items()}
    title = f"{name}: {requests} request{'s' if requests > 1 else ''}"
    arriving = f"{title}: one by one over at once"
    return [
        *(rate_figure(f"{title}: {each}", requests * case.new, timing) for each, timing in times.items()),
        Figure(name=f"{title}: between two requests", value=1e3 * gap, unit="ms"),
        ratio_figure(arriving, times["at once"] / times["one by one"], at_least=LEAST),
        ratio_figure(f"{arriving}, processor time", seconds["at once"] / seconds["one by one"]),
        ratio_figure(
            f"{title}: ours over BatchGenerator", times["BatchGenerator, one by one"] / times["one by one"]
        ),
        ratio_figure(
            f"{title}: gain of decode_blocks", times["at once, without decode_blocks"] / times["at once"]
        ),
    ]


@attrs.frozen(kw_only=True)
class Case:
    """Sizes."""

    prompt: int = 64
    new: int = 128
    repeats: int = 3


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
    case = Case(new=new or (64 if backend() == "cpu" else 128), repeats=repeats)
    if quick:
        case = attrs.evolve(case, prompt=8, new=4, repeats=1)
    for model in models:
        policy = g.Policy.for_inference(load_module(model))
        plain = load_module(model)  # whose layers call mlx-lm's own functions
        for requests in counts[: 2 if quick else None]:
            say(f"serving: {requests} ({model})")
            figures = compare(policy, plain, Path(model).name, requests, case)
            # --quick shows that it works, not how fast.
            yield [attrs.evolve(each, at_least=None) for each in figures] if quick else figures


if __name__ == "__main__":
    main()
