"""How much faster is `generate` than mlx-lm's BatchGenerator, with copied prompts and with a shared prefill?

Both sides sample the same number of tokens at temperature 1 and keep each token's log-prob, as GRPO
requires. No row ends early. *Copied prompts* is the usual method with G copies of a prompt; with
*shared prefill*, all rows start with the cache of one prompt.

- *compaction*: three quarters of the rows end at a quarter of the length; they are either dropped
  or still decoded
- *ragged*: prompts of different lengths, compared with prompts of equal length and the same total
- *the batch over one prompt*: a run's batch with its checks for ends, compared with one prompt with
  the same number of rows

The floor is for decoding only: each step reads the matrices once, a prompt's keys and values once
for all its rows, and each row's own keys and values.

**What limits it.** On a CPU, products with few rows, for which a BLAS packs the weights as long as
it multiplies them, and elementwise passes on one core. On a GPU with 128 rows, launching
operations, so a block of the model is one kernel; above 8·10⁹ multiplications per block, MLX's own
operations are faster and are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import click
import mlx.nn as nn

import grpo_fn as g
from benchmarks.harness.command import benchmark, chosen_of, say
from benchmarks.harness.generators import Case, ours, theirs
from benchmarks.harness.machine import backend, rates
from benchmarks.harness.measure import Timing, interleaved, peak_bytes
from benchmarks.harness.record import Figure, ratio_figure
from benchmarks.harness.rooflines import Work, decode_seconds
from benchmarks.harness.shapes import make_module, make_prompts, vocabulary_of
from grpo_fn.backends import disabled

CPU_CASES = {
    "G 32": Case(kind="peers", model="qwen2-6x256", prompt=512, new=64, generations=32, at_least=(1.1, 3.5)),
    "compaction": Case(
        kind="compaction", model="qwen2-6x256", prompt=512, new=64, generations=128, at_least=(1.7,)
    ),
    "ragged": Case(kind="ragged", model="qwen2-6x256", prompt=128, new=64, generations=8, prompts=16),
}
GPU_CASES = {
    "G 128": Case(
        kind="peers", model="nanochat-d20", prompt=128, new=128, generations=128, at_least=(2.0, None)
    ),
    "G 512": Case(kind="rate", model="nanochat-d20", prompt=128, new=128, generations=512, at_least=(55e3,)),
    "ragged": Case(
        kind="ragged", model="nanochat-d20", prompt=128, new=128, generations=8, prompts=16, at_least=(0.8,)
    ),
    "compaction": Case(kind="compaction", model="nanochat-d20", prompt=128, new=256, generations=256),
    **{
        f"{prompts} × {generations}, {name}": Case(
            kind="batches",
            model=model,
            prompt=48,
            new=256,
            prompts=prompts,
            generations=generations,
            repeats=3,
            at_least=(0.9,),
        )
        for model, name, sizes in (
            ("nanochat-d20", "d20", ((16, 8), (8, 16), (64, 8))),
            ("qwen2.5-0.5b", "0.5B", ((16, 8), (8, 16), (64, 8), (128, 8))),
        )
        for prompts, generations in sizes
    },
    "qwen2.5-0.5b": Case(kind="peers", model="qwen2.5-0.5b", prompt=128, new=128, generations=128),
}
QUICK_CASES = {
    "quick": Case(kind="peers", model="tiny", prompt=32, new=8, generations=4, repeats=1),
    "quick compaction": Case(kind="compaction", model="tiny", prompt=16, new=16, generations=8, repeats=1),
    "quick batches": Case(
        kind="batches", model="tiny", prompt=16, new=8, generations=2, prompts=3, repeats=1
    ),
    "quick ragged": Case(kind="ragged", model="tiny", prompt=16, new=8, generations=2, prompts=3, repeats=1),
}


def rate_figure(name: str, tokens: int, timing: Timing, **more: Any) -> Figure:
    """Tokens per second of the call that samples them, including prefill."""
    return Figure(
        name=name,
        value=tokens / timing.median,
        unit="tokens/s",
        low=tokens / timing.high,
        high=tokens / timing.low,
        samples=len(timing.samples),
        **more,
    )


def floor_seconds(policy: g.Policy, case: Case, quick: bool) -> float:
    """Decoding only, without the prefill: see `decode_seconds`."""
    shared = policy.shares_prefix and backend() != "metal"  # as `generate` has it by itself
    return decode_seconds(
        Work.of(policy.module),
        rates(quick),
        rows=case.rows,
        steps=case.new,
        prompt=case.prompt,
        prefixes=case.prompts if shared else case.rows,
        on_cpu=backend() == "cpu",
    )


def ours_figures(
    title: str, policy: g.Policy, case: Case, timing: Timing, quick: bool, **target: Any
) -> list[Figure]:
    """Our rate with the floor, and the share of the floor's rate that is reached."""
    tokens, floor = case.tokens, floor_seconds(policy, case, quick)
    return [
        rate_figure(f"{title}: ours", tokens, timing, predicted=tokens / floor, **target),
        Figure(
            name=f"{title}: share of the roofline",
            value=100 * floor / timing.median,
            unit="%",
            note="decoding's, of the time with prefill",
        ),
    ]


def compared(
    title: str, case: Case, calls: Mapping[str, Callable[[], Any]], tokens: int, over: str, **more: Any
) -> list[Figure]:
    """The rates of two calls, and the ratio of the first to the second, named `over`, to which the
    target applies.
    """
    times = interleaved(calls, repeats=case.repeats)
    first, second = calls
    return [
        *(rate_figure(f"{title}: {name}", tokens, timing) for name, timing in times.items()),
        ratio_figure(f"{title}: {over}", times[second] / times[first], at_least=case.at_least[0], **more),
    ]


def peers(title: str, case: Case, module: nn.Module, quick: bool) -> list[Figure]:
    """Comparison with BatchGenerator; the targets are for the shared prefill and for copied
    prompts.
    """
    policy = g.Policy.from_module(module)
    plain = make_module(case.model)  # whose layers call mlx-lm's own functions
    prompts = make_prompts(case.prompts, case.prompt, vocabulary_of(module))
    calls = {
        "ours": ours(policy, prompts, case),
        "shared prefill": theirs(plain, prompts, case, shared=True),
        "copied prompts": theirs(plain, prompts, case, shared=False),
    }
    tokens = case.tokens
    times = interleaved(calls, repeats=case.repeats)
    figures = ours_figures(title, policy, case, times["ours"], quick)
    for name, least in zip(("shared prefill", "copied prompts"), case.at_least, strict=True):
        figures += [
            rate_figure(f"{title}: BatchGenerator, {name}", tokens, times[name]),
            ratio_figure(f"{title}: ours over {name}", times[name] / times["ours"], at_least=least),
        ]
    peaks = {name: peak_bytes(call, warm=False) / 1e6 for name, call in calls.items()}
    return [*figures, *(Figure(name=f"{title}: peak, {n}", value=p, unit="MB") for n, p in peaks.items())]


def rate(title: str, case: Case, module: nn.Module, quick: bool) -> list[Figure]:
    """Only ours; the target is for tokens per second."""
    policy = g.Policy.from_module(module)
    call = ours(policy, make_prompts(case.prompts, case.prompt, vocabulary_of(module)), case)
    timing = interleaved({"ours": call}, repeats=case.repeats)["ours"]
    figures = ours_figures(title, policy, case, timing, quick, at_least=case.at_least[0])
    peak = Figure(name=f"{title}: peak", value=peak_bytes(call, warm=False) / 1e6, unit="MB")
    return [*figures, peak]


def compaction(title: str, case: Case, module: nn.Module, quick: bool) -> list[Figure]:
    """Three quarters of the rows end at a quarter of the length; the target is the ratio to never
    dropping a row.

    The rows that end are identified by their first tokens, because the same key samples the same
    tokens again.
    """
    policy = g.Policy.from_module(module)
    prompts = make_prompts(case.prompts, case.prompt, vocabulary_of(module))
    early = case.new // 4
    first = ours(policy, prompts, attrs.evolve(case, new=early))().completions()
    ending = {tuple(tokens) for row, tokens in enumerate(first) if row % 4}

    def find_stop(tokens: Sequence[int], start: int) -> int | None:
        return early if len(tokens) >= early and tuple(tokens[:early]) in ending else None

    call = ours(policy, prompts, case, find_stop=find_stop)

    def without() -> g.Rollout:
        with disabled("row_compaction"):
            return call()

    tokens = sum(map(len, call().completions()))
    # Among short beginnings two may be alike: then a row ends early that was not meant to.
    wanted = sum(early if tuple(tokens) in ending else case.new for tokens in first)
    if tokens != wanted:
        raise RuntimeError(f"{title}: {tokens} tokens were sampled, expected {wanted}")
    calls = {"finished rows dropped": call, "finished rows decoded on": without}
    ideal = {"predicted": case.tokens / wanted, "note": "the floor column: if time went with rows"}
    return compared(title, case, calls, tokens, "dropped over decoded on", **ideal)


def ragged(title: str, case: Case, module: nn.Module, quick: bool) -> list[Figure]:
    """Prompts of different lengths, compared with equal ones of the same total; the target is the
    ratio of their rates.
    """
    policy = g.Policy.from_module(module)
    vocabulary = vocabulary_of(module)
    equal = make_prompts(case.prompts, case.prompt, vocabulary)
    uneven = make_prompts(case.prompts, case.prompt, vocabulary, spread=case.prompt // 4)
    lengths = [len(prompt) for prompt in uneven]
    calls = {"ragged": ours(policy, uneven, case), "equal": ours(policy, equal, case)}
    note = f"prompts of {min(lengths)} to {max(lengths)} tokens"
    return compared(title, case, calls, case.tokens, "ragged over equal", note=note)


def batches(title: str, case: Case, module: nn.Module, quick: bool) -> list[Figure]:
    """A run's batch, compared with one prompt with the same number of rows: prompts of unequal
    length, checks for stop strings and end tokens, dropped rows; nothing ends. The target is the
    ratio of their rates.
    """
    policy = g.Policy.from_module(module)
    vocabulary = vocabulary_of(module)
    real = make_prompts(case.prompts, case.prompt, vocabulary, spread=case.prompt // 2)
    alone = attrs.evolve(case, prompts=1, generations=case.rows)

    def no_stop(tokens: Sequence[int], start: int) -> int | None:
        return None

    calls = {
        "the batch": ours(policy, real, case, find_stop=no_stop, eos_ids=(vocabulary,)),
        "one prompt": ours(policy, make_prompts(1, case.prompt, vocabulary), alone),
    }
    return compared(title, case, calls, case.tokens, "the batch over one prompt")


KINDS = {"peers": peers, "rate": rate, "compaction": compaction, "ragged": ragged, "batches": batches}


@benchmark("rollout", parts=("chosen",))
@click.option("--case", "chosen", multiple=True, help="Only this one; the others' figures stay.")
@click.option("--repeats", default=0, help="Number of rounds of each comparison [the case's own].")
def main(quick: bool, chosen: Sequence[str], repeats: int) -> Iterator[list[Figure]]:
    """Compare rollouts with mlx-lm's BatchGenerator; also measure rows that end early and prompts
    of different lengths.
    """
    cases = QUICK_CASES if quick else CPU_CASES if backend() == "cpu" else GPU_CASES
    modules: dict[str, nn.Module] = {}
    for name in chosen_of(chosen, cases):
        case = attrs.evolve(cases[name], repeats=repeats or cases[name].repeats)
        if case.model not in modules:
            modules.clear()
            modules[case.model] = make_module(case.model)
        say(f"rollout: {name} ({case.model})")
        yield KINDS[case.kind](name, case, modules[case.model], quick)


if __name__ == "__main__":
    main()
