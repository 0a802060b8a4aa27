"""How much time and memory does the learner's gradient need, compared with a naive one?

- *naive*: logits of all positions at once, gather − logsumexp, `value_and_grad` of the whole batch, compiled
- *ours*: `make_grad_step` on the batch as split by a run, with the entropy and all diagnostics

Rates count only useful operations: 6 per weight and token, attention, the head at completion
tokens, and a shared prompt once. Peaks exclude the weights, except in one figure.

**What limits it.** Time: elementwise passes over logits and activations on a CPU, products on a
GPU. Memory: the layers' activations; the naive implementation's logits and softmax need 3.2 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import click
import mlx.core as mx
import mlx.nn as nn

import grpo_fn as g
from benchmarks.harness.command import CASE, benchmark, chosen_of, of_backend, say
from benchmarks.harness.machine import backend, rates
from benchmarks.harness.measure import Timing, interleaved, largest_error, peak_bytes, timed
from benchmarks.harness.record import Figure, ratio_figure, time_figure
from benchmarks.harness.rooflines import Work
from benchmarks.harness.shapes import make_module, make_prompts, vocabulary_of
from grpo_fn.learner import can_share
from grpo_fn.policy.layers.learning_form import checkpoint_layers
from grpo_fn.trees import arrays_of, map_arrays, nbytes
from runners.memory.forecast import usual_tokens
from runners.memory.sizes import model_shape


@attrs.frozen
class Case:
    """Rows × (prompt + completion) tokens in one model, and the targets."""

    model: str
    prompt: int
    new: int
    prompts: int
    generations: int
    changes: dict[str, Any] = attrs.field(factory=dict)  # of its config
    repeats: int = 3
    time_at_most: float | None = None  # of the naive way's
    peak_at_most: float | None = None
    share_at_least: float | None = None  # of the matmul rate

    @property
    def rows(self) -> int:
        """B."""
        return self.prompts * self.generations


CPU_CASES = {
    "32 × (128 + 256)": Case(
        "qwen2-6x256", 128, 256, 4, 8, {"vocab_size": 32768}, time_at_most=1.1, peak_at_most=1 / 3
    )
}
GPU_CASES = {
    # One token of prompt: log-probs are wanted at all positions, the dearest there is.
    "32 × 256, d20": Case("nanochat-d20", 1, 255, 4, 8, repeats=5, share_at_least=0.6),
    "32 × (128 + 256), d20": Case("nanochat-d20", 128, 256, 4, 8),
}
QUICK_CASES = {"quick": Case("tiny", 8, 8, 2, 2, repeats=1)}


def make_batch(case: Case, vocabulary: int) -> g.Batch:
    """Random completions of full length, as after a rollout."""
    keys = mx.random.split(mx.random.key(1), 3)
    shape = (case.rows, case.new)
    rollout = g.Rollout(
        prompts=tuple(map(tuple, make_prompts(case.prompts, case.prompt, vocabulary))),
        num_generations=case.generations,
        tokens_bt=mx.random.randint(8, vocabulary, shape, mx.int32, key=keys[0]),
        lengths_b=mx.full((case.rows,), case.new, mx.int32),
        logp_bt=-5 * mx.random.uniform(shape=shape, key=keys[1]),
        finished_b=mx.zeros((case.rows,), mx.bool_),
    )
    batch = g.make_batch(rollout, mx.random.normal((case.prompts, case.generations), key=keys[2]))
    g.materialize(batch)
    return batch


def ours(policy: g.Policy, state: g.TrainState, batch: g.Batch, **split: Any) -> Callable[[], Any]:
    """A call that computes the batch's gradient in micro-batches; for `split`, see `split_batch`."""
    width, length = batch.targets_bt.shape[1], batch.tokens_bl.shape[1]
    prompt = length - width
    shape = model_shape(vars(vars(policy.module)["args"]))
    itemsize = (policy.compute_dtype or mx.float32).size
    split = {
        "max_tokens": usual_tokens(shape, itemsize, prompt, width, backend()),
        **split,
    }  # as a run cuts it
    grad_step = g.make_grad_step(policy, g.preset("grpo"), max_completion_length=width)
    pieces = g.split_batch(batch, **split)
    g.materialize(pieces)

    def run() -> Any:
        after, stats = grad_step(state, pieces)
        return after.accum_grads, after.accum_weight, stats

    return run


def naive(policy: g.Policy, state: g.TrainState, batch: g.Batch) -> Callable[[], Any]:
    """A straightforward implementation of the same gradient in the same precision, without
    statistics.
    """

    def loss(params: Any, tokens_bl: mx.array, batch: g.Batch) -> mx.array:
        z_blv = policy.logits(params, tokens_bl[:, :-1]).astype(mx.float32)
        chosen_bl = mx.take_along_axis(z_blv, tokens_bl[:, 1:, None], axis=-1)[..., 0]
        logp_bl = chosen_bl - mx.logsumexp(z_blv, axis=-1)
        logp_bt = logp_bl[:, -batch.targets_bt.shape[1] :]  # all prompts are of one length
        ratio_bt = mx.exp(logp_bt - mx.stop_gradient(logp_bt))
        loss_bt = -ratio_bt * batch.advantages_b[:, None]
        return (loss_bt * batch.mask_bt).sum(axis=1).mean() / batch.mask_bt.sum(axis=1).mean()

    step = g.compiled(mx.value_and_grad(loss))
    return lambda: step(state.params, batch.tokens_bl, batch)


@attrs.frozen(kw_only=True)
class Useful:
    """The minimal work of a gradient: products and exponentials."""

    flops: float
    exps: float

    @classmethod
    def of(cls, module: nn.Module, case: Case, *, shared: bool, logits: int = 3) -> Useful:
        """6 FLOP per weight and token for forward and backward, attention accordingly, and the head
        at completion tokens.

        Args:
            shared: whether each group's prompt is computed once.
            logits: number of exponentials per logit. Ours: log-prob and entropy forward, the
                softmax again backward.
        """
        vocabulary = vocabulary_of(module)
        head = vocabulary * vars(module)["args"].hidden_size
        work = Work.of(module)
        trunk = attrs.evolve(work, weights=work.weights - head, exps=work.exps - vocabulary)
        prompts = case.prompts if shared else case.rows
        # (tokens, tokens behind each): prompts, and completions after them
        parts = ((prompts * case.prompt, case.prompt / 2), (case.rows * case.new, case.prompt + case.new / 2))
        products = 2 * case.rows * case.new * head + sum(trunk.flops(*part) for part in parts)
        exps = sum(trunk.exponentials(*part) for part in parts)
        return cls(flops=3 * products, exps=exps + logits * case.rows * case.new * vocabulary)

    def figures(
        self, title: str, name: str, timing: Timing, peak: int, quick: bool, least: float | None = None
    ) -> list[Figure]:
        """Time, rate and peak of one implementation; `least` is the target of the rate. The floor of
        the time counts exponentials on a CPU only: a GPU computes them in parallel to products.
        """
        speed = rates(quick)
        exps = self.exps / speed.exp if backend() == "cpu" else 0.0
        floor = self.flops / speed.matmul_here + exps
        reached = self.flops / timing.median / speed.matmul_here
        share = f"{title}: FLOP/s over a matmul's, {name}"
        return [
            time_figure(f"{title}: time, {name}", timing, predicted=floor),
            Figure(share, reached, "x", at_least=least),
            Figure(f"{title}: peak, {name}", peak / 1e6, "MB"),
        ]


def measure(title: str, case: Case, quick: bool) -> list[Figure]:
    """All implementations for one case: naive and ours alternately, then ours with its options."""
    module = make_module(case.model, **case.changes)
    vocabulary = vocabulary_of(module)
    on_cpu = backend() == "cpu"
    policy = g.Policy.from_module(module, compute_dtype=None if on_cpu else mx.bfloat16)
    # The naive way runs mlx-lm's own functions.
    other = make_module(case.model, **case.changes)
    plain = g.Policy.from_module(other, compute_dtype=policy.compute_dtype, patched=False).without_weights()
    masters = map_arrays(lambda a: a.astype(mx.float32), policy.params)
    state = g.init_state(masters, g.adamw(1e-6), key=mx.random.key(0))
    g.materialize(state.params)
    batch = make_batch(case, vocabulary)
    can = case.prompt > 1 and can_share(module)
    shared = can and on_cpu  # as `system.share_prompts = "auto"` has it
    figures = [agreement(title, case, policy, plain, state, vocabulary)]
    calls = {"naive": naive(plain, state, batch), "ours": ours(policy, state, batch, share_prompts=shared)}
    say(f"learner: {title}, {' and '.join(calls)}")
    peaks = {name: peak_bytes(call) for name, call in calls.items()}
    times = interleaved(calls, repeats=case.repeats, warmup=0)  # the peaks have warmed them up
    usual = Useful.of(module, case, shared=False, logits=2)
    figures += usual.figures(title, "naive", times["naive"], peaks["naive"], quick)
    own = Useful.of(module, case, shared=shared)
    figures += own.figures(title, "ours", times["ours"], peaks["ours"], quick, case.share_at_least)
    held = (peaks["ours"] + nbytes(state.params)) / 1e6
    ratio = times["ours"] / times["naive"]
    saved = peaks["ours"] / peaks["naive"]
    figures += [
        Figure(f"{title}: peak with the float32 weights, ours", held, "MB"),
        ratio_figure(f"{title}: time, ours / naive", ratio, at_most=case.time_at_most),
        Figure(f"{title}: peak, ours / naive", saved, "x", at_most=case.peak_at_most),
    ]
    del calls

    quarter = ((case.prompts if shared else case.rows) * case.prompt + case.rows * case.new) // 4
    ways: dict[str, dict[str, Any]] = {"4 micro-batches": {"max_tokens": quarter, "share_prompts": shared}}
    if can:
        ways["prompts not shared" if shared else "shared prompts"] = {"share_prompts": not shared}
    ways["checkpointed layers"] = {}  # last, as it stays; a run does not share prompts with it
    for name, split in ways.items():
        say(f"learner: {title}, {name}")
        if name == "checkpointed layers":
            checkpoint_layers(module)
        call = ours(policy, state, batch, **split)
        peak = peak_bytes(call)
        timing = timed(call, repeats=max(case.repeats // 2, 1), warmup=0)
        useful = Useful.of(module, case, shared=split.get("share_prompts", False))
        figures += useful.figures(title, name, timing, peak, quick)
    return figures


def agreement(
    title: str, case: Case, policy: g.Policy, plain: g.Policy, state: g.TrainState, vocabulary: int
) -> Figure:
    """The difference between our gradient and the naive one on two rows."""
    batch = make_batch(attrs.evolve(case, prompts=1, generations=2), vocabulary)
    _, wanted = naive(plain, state, batch)()
    total, weight, _ = ours(policy, state, batch)()
    found = [array / weight for array in arrays_of(total)]
    return Figure(
        f"{title}: largest difference of the gradients",
        largest_error(found, [array.astype(mx.float32) for array in arrays_of(wanted)]),
        note="relative to the largest entry of each array",
        at_most=1e-3 if backend() == "cpu" else None,
    )


@benchmark("learner", parts=("chosen",))
@CASE
@click.option("--repeats", default=0, help="Rounds of each comparison [the case's own].")
def main(quick: bool, chosen: Sequence[str], repeats: int) -> Iterator[list[Figure]]:
    """Measure the learner's gradient: time, FLOP/s and peak memory of the naive implementation, of
    ours, and of its options.
    """
    cases = of_backend(quick, QUICK_CASES, CPU_CASES, GPU_CASES)
    for name in chosen_of(chosen, cases):
        case = attrs.evolve(cases[name], repeats=repeats or cases[name].repeats)
        yield measure(name, case, quick)


if __name__ == "__main__":
    main()
