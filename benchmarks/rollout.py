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
import mlx.core as mx
import mlx.nn as nn

import grpo_fn as g
from benchmarks.harness.command import CASE, benchmark, chosen_of, of_backend, say
from benchmarks.harness.machine import backend, rates
from benchmarks.harness.measure import interleaved, peak_bytes
from benchmarks.harness.record import Figure, rate_figure, ratio_figure
from benchmarks.harness.rooflines import Work
from benchmarks.harness.shapes import make_module, make_prompts, vocabulary_of
from grpo_fn.backends import disabled
from grpo_fn.rollout import FindStop
from runners.engines.settings import usual_launch
from runners.machine import startup

Prompts = list[list[int]]


@attrs.frozen
class Case:
    """A measurement on one model, and its targets."""

    kind: str  # of KINDS
    model: str
    prompt: int  # tokens
    new: int  # tokens a completion
    generations: int  # of each prompt
    prompts: int = 1
    at_least: tuple[float | None, ...] = (None, None)  # the kind's targets
    repeats: int = 5

    @property
    def rows(self) -> int:
        """Decoded together."""
        return self.prompts * self.generations

    @property
    def tokens(self) -> int:
        """The number of tokens of all completions at full length."""
        return self.rows * self.new


# kind, model, tokens of a prompt, tokens of a completion, completions of a prompt, prompts
CPU_CASES = {
    "G 32": Case("peers", "qwen2-6x256", 512, 64, 32, at_least=(1.1, 3.5)),
    "compaction": Case("compaction", "qwen2-6x256", 512, 64, 128, at_least=(1.7,)),
    "ragged": Case("ragged", "qwen2-6x256", 128, 64, 8, 16),
}
_BATCHES = {
    ("nanochat-d20", "d20"): ((16, 8), (8, 16), (64, 8)),
    ("qwen2.5-0.5b", "0.5B"): ((16, 8), (8, 16), (64, 8), (128, 8)),
}
GPU_CASES = {
    "G 128": Case("peers", "nanochat-d20", 128, 128, 128, at_least=(2.0, None)),
    "G 512": Case("rate", "nanochat-d20", 128, 128, 512, at_least=(55e3,)),
    "ragged": Case("ragged", "nanochat-d20", 128, 128, 8, 16, at_least=(0.8,)),
    "compaction": Case("compaction", "nanochat-d20", 128, 256, 256),
    **{
        f"{prompts} × {each}, {name}": Case("batches", model, 48, 256, each, prompts, (0.9,), repeats=3)
        for (model, name), sizes in _BATCHES.items()
        for prompts, each in sizes
    },
    "qwen2.5-0.5b": Case("peers", "qwen2.5-0.5b", 128, 128, 128),
}
QUICK_CASES = {
    "quick": Case("peers", "tiny", 32, 8, 4, repeats=1),
    "quick compaction": Case("compaction", "tiny", 16, 16, 8, repeats=1),
    "quick batches": Case("batches", "tiny", 16, 8, 2, 3, repeats=1),
    "quick ragged": Case("ragged", "tiny", 16, 8, 2, 3, repeats=1),
}


def as_a_run() -> g.Decoding:
    """`Decoding` as in a run on this machine."""
    return g.Decoding(pipelined=usual_launch(startup.prepare()) == "async")


def ours(
    policy: g.Policy,
    prompts: Prompts,
    case: Case,
    *,
    find_stop: FindStop | None = None,
    eos_ids: Sequence[int] = (),
) -> Callable[[], g.Rollout]:
    """A call that samples the case's completions of these prompts."""
    sampling = g.Sampling(num_generations=case.generations, max_new_tokens=case.new, eos_ids=eos_ids)
    key = mx.random.key(0)
    decoding = as_a_run()
    return lambda: g.generate(
        policy, policy.params, prompts, sampling, key=key, find_stop=find_stop, decoding=decoding
    )


def theirs(module: nn.Module, prompts: Prompts, case: Case, *, shared: bool) -> Callable[[], list[mx.array]]:
    """The same with BatchGenerator in its best configuration: every row in one batch, log-probs
    picked by the sampler.

    With `shared`, each prompt is prefilled once except for its last token, and all its rows start
    from there; otherwise, each row's prompt is computed.
    """
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.models.cache import make_prompt_cache

    def run() -> list[mx.array]:
        picked: list[mx.array] = []

        def sampler(logp_bv: mx.array) -> mx.array:
            token_b = mx.random.categorical(logp_bv)
            picked.append(mx.take_along_axis(logp_bv, token_b[:, None], axis=-1)[:, 0])
            return token_b

        generator = BatchGenerator(
            module,
            max_tokens=case.new,
            sampler=sampler,
            completion_batch_size=case.rows,
            prefill_batch_size=case.rows,
        )
        rows = [list(prompt) for prompt in prompts for _ in range(case.generations)]
        if shared:
            caches: list[Any] = []
            for prompt in prompts:
                cache = make_prompt_cache(module)
                module(mx.array([prompt[:-1]]), cache=cache)
                mx.eval([layer.state for layer in cache])
                caches += [cache] * case.generations
            behind = [row[:-1] for row in rows]
            generator.insert([row[-1:] for row in rows], caches=caches, all_tokens=behind)
        else:
            generator.insert(rows)
        drawn = 0
        try:
            while responses := generator.next_generated():
                drawn += len(responses)
                mx.eval(picked[-2:-1])  # lets go of the last step's full rows
        finally:
            generator.close()
        if drawn != case.tokens:
            raise RuntimeError(f"BatchGenerator sampled {drawn} tokens, expected {case.tokens}")
        return picked

    return run


def floor_seconds(policy: g.Policy, case: Case, quick: bool) -> float:
    """The lower bound of the time for decoding only, without the prefill."""
    shared = policy.shares_prefix and backend() != "metal"  # as `generate` has it by itself
    return Work.of(policy.module).decode_seconds(
        rates(quick),
        rows=case.rows,
        steps=case.new,
        prompt=case.prompt,
        prefixes=case.prompts if shared else case.rows,
        on_cpu=backend() == "cpu",
    )


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
    """Comparison with BatchGenerator; the targets are for the shared prefill and for copied prompts.
    With the kind "rate" only ours, with a target for its rate.
    """
    policy = g.Policy.from_module(module)
    prompts = make_prompts(case.prompts, case.prompt, vocabulary_of(module))
    calls: dict[str, Callable[[], Any]] = {"ours": ours(policy, prompts, case)}
    least = case.at_least[0] if case.kind == "rate" else None
    if case.kind == "peers":
        plain = make_module(case.model)  # whose layers call mlx-lm's own functions
        calls["shared prefill"] = theirs(plain, prompts, case, shared=True)
        calls["copied prompts"] = theirs(plain, prompts, case, shared=False)
    times = interleaved(calls, repeats=case.repeats)
    own, *others = times.items()
    floor = floor_seconds(policy, case, quick)
    share = 100 * floor / own[1].median
    note = "decoding's, of the time with prefill"
    predicted = case.tokens / floor
    figures = [
        rate_figure(f"{title}: ours", case.tokens, own[1], predicted=predicted, at_least=least),
        Figure(f"{title}: share of the roofline", share, "%", note=note),
    ]
    for (name, timing), target in zip(others, case.at_least, strict=False):
        figures += [
            rate_figure(f"{title}: BatchGenerator, {name}", case.tokens, timing),
            ratio_figure(f"{title}: ours over {name}", timing / own[1], at_least=target),
        ]
    for name, call in calls.items():
        peak = f"{title}: peak, {name}" if others else f"{title}: peak"
        figures.append(Figure(peak, peak_bytes(call, warm=False) / 1e6, "MB"))
    return figures


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


KINDS = {"peers": peers, "rate": peers, "compaction": compaction, "ragged": ragged, "batches": batches}


@benchmark("rollout", parts=("chosen",))
@CASE
@click.option("--repeats", default=0, help="Number of rounds of each comparison [the case's own].")
def main(quick: bool, chosen: Sequence[str], repeats: int) -> Iterator[list[Figure]]:
    """Compare rollouts with mlx-lm's BatchGenerator; also measure rows that end early and prompts
    of different lengths.
    """
    cases = of_backend(quick, QUICK_CASES, CPU_CASES, GPU_CASES)
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
