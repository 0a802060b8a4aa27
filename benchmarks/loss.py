"""The loss alone: its share of a grad step, what the presets cost against each other, and their traces.

Everything after the log-probs (ratio, surrogate, correction, aggregation, diagnostics) and its gradient,
compiled, on 64 × 512 tokens, against a grad step of the embedded model on the same tokens.

**What limits it.** The number of kernels: some twenty reductions for the diagnostics, on one core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click
import mlx.core as mx

import grpo_fn as g
from benchmarks.harness.command import benchmark, say
from benchmarks.harness.machine import rates
from benchmarks.harness.measure import interleaved
from benchmarks.harness.record import Figure, ratio_figure, time_figure
from grpo_fn.algorithm import LossArrays, loss_sum
from grpo_fn.compile import Compiled
from runners.config.names import EMBEDDED
from runners.config.sections import ModelConfig
from runners.machine.startup import prepare
from runners.models.loaded_model import load_model

SHARE_TARGET = 3.0  # per cent of the grad step
SPREAD_TARGET = 1.2  # the dearest preset over the cheapest
PROMPT = 32  # tokens in front of each completion
GRAD_TOKENS = 16384  # of a micro-batch of the grad step


def make_batch(rows: int, length: int, vocabulary: int) -> g.Batch:
    """Random completions of full length, with log-probs as several updates of a rollout leave them."""
    keys = mx.random.split(mx.random.key(0), 5)
    tokens_bl = mx.random.randint(0, vocabulary, (rows, PROMPT + length), mx.int32, key=keys[0])
    old_bt = -2 * mx.random.uniform(shape=(rows, length), key=keys[1])
    batch = g.Batch(
        tokens_bl=tokens_bl,
        prompt_lengths_b=mx.full((rows,), PROMPT, mx.int32),
        targets_bt=tokens_bl[:, PROMPT:],
        mask_bt=mx.ones((rows, length), mx.bool_),
        advantages_b=mx.random.normal((rows,), key=keys[2]),
        rollout_logp_bt=old_bt + 0.01 * mx.random.normal(old_bt.shape, key=keys[3]),
        num_sequences=mx.array(float(rows)),
        num_tokens=mx.array(float(rows * length)),
        old_logp_bt=old_bt,
    )
    g.materialize(batch)
    return batch


def loss_call(batch: g.Batch, spec: g.LossSpec) -> tuple[Callable[[], Any], Compiled]:
    """Sum, statistics and gradient in the log-probs, compiled: all that follows them in the learner."""
    assert batch.old_logp_bt is not None
    logp_bt = batch.old_logp_bt + 0.1 * mx.random.normal(batch.old_logp_bt.shape, key=mx.random.key(1))
    entropy_bt = mx.abs(batch.old_logp_bt)  # the learner logs it: it costs a mean
    mx.eval(logp_bt, entropy_bt)

    def loss(logp_bt: mx.array, entropy_bt: mx.array, batch: g.Batch) -> tuple[mx.array, g.LossStats]:
        arrays = LossArrays(
            logp_bt,
            batch.advantages_b,
            batch.mask_bt,
            old_logp_bt=batch.old_logp_bt,
            rollout_logp_bt=batch.rollout_logp_bt,
            entropy_bt=entropy_bt,
            num_sequences=batch.num_sequences,
            num_tokens=batch.num_tokens,
        )
        return loss_sum(arrays, spec, logp_bt.shape[1])

    step = g.compiled(mx.value_and_grad(loss))
    return lambda: step(logp_bt, entropy_bt, batch), step


def learner() -> tuple[g.Policy, g.TrainState]:
    """The embedded model as a policy, and its state."""
    loaded = load_model(ModelConfig(path=EMBEDDED), prepare())
    policy = g.Policy.from_module(loaded.module, compute_dtype=loaded.compute_dtype)
    state = g.init_state(policy.params, g.adamw(1e-6), key=mx.random.key(0))
    g.materialize(state)
    return policy, state


def traces(policy: g.Policy, state: g.TrainState, vocabulary: int, names: Sequence[str]) -> int:
    """The most traces that a preset's grad step needed while all presets were used in turn, twice."""
    batch = make_batch(2, 8, vocabulary)
    steps = {name: g.make_grad_step(policy, g.preset(name), max_completion_length=8) for name in names}
    for name in [*names, *names]:
        g.materialize(steps[name](state, batch))
    return max(step.traces for step in steps.values())


def floor_seconds(batch: g.Batch, quick: bool) -> float:
    """Seconds that the loss cannot go below: two exps a token, four arrays read and one written."""
    tokens = batch.mask_bt.size
    speed = rates(quick)
    return 2 * tokens / speed.exp + 5 * 4 * tokens / speed.copy


@benchmark("loss")
@click.option("--repeats", default=15, show_default=True, help="Rounds of the presets, in turn.")
def main(quick: bool, repeats: int) -> Sequence[Figure]:
    """The loss after the log-probs, value and gradient: every preset, and its share of a grad step."""
    rows, length = (4, 16) if quick else (64, 512)
    names = ["grpo", "gspo"] if quick else list(g.PRESETS)
    repeats = min(repeats, 2) if quick else repeats
    policy, state = learner()
    vocabulary = policy.logits(state.params, mx.zeros((1, 1), mx.int32)).shape[-1]
    batch = make_batch(rows, length, vocabulary)

    say(f"loss: {len(names)} presets on {rows} × {length} tokens (compiling them first)")
    calls, steps = {}, {}
    for name in names:
        calls[name], steps[name] = loss_call(batch, g.preset(name))
    times = interleaved(calls, repeats=repeats, warmup=2, least_seconds=0.02 if quick else 0.2)
    cheapest = min(names, key=lambda name: times[name].median)
    dearest = max(names, key=lambda name: times[name].median)
    # The extremes of several noisy figures are partly noise: they are measured again.
    extremes = interleaved(
        {name: calls[name] for name in (dearest, cheapest)},
        repeats=2 * repeats,
        least_seconds=0.02 if quick else 0.2,
    )

    say("loss: against a grad step of the embedded model")
    pieces = g.split_batch(batch, max_tokens=GRAD_TOKENS)
    grad_step = g.make_grad_step(policy, g.preset("grpo"), max_completion_length=length)
    together = interleaved(
        {"loss": calls[dearest], "grad": lambda: grad_step(state, pieces)},
        repeats=max(repeats // 3, 1),
        least_seconds=0.02 if quick else 0.2,
    )

    say("loss: traces of the grad step while presets take turns")
    floor = 1e3 * floor_seconds(batch, quick)
    judged = not quick
    return [
        *(time_figure(f"loss, {name}", times[name], "ms", predicted=floor) for name in names),
        ratio_figure(
            "dearest preset / cheapest",
            extremes[dearest] / extremes[cheapest],
            note=f"{dearest} / {cheapest}, measured anew",
            at_most=SPREAD_TARGET if judged else None,
        ),
        time_figure(f"grad step, {rows} × {length} tokens", together["grad"]),
        ratio_figure(
            "dearest loss / grad step",
            together["loss"] / together["grad"],
            "%",
            note=dearest,
            at_most=SHARE_TARGET if judged else None,
        ),
        Figure(
            name="traces of the loss, each preset",
            value=max(step.traces for step in steps.values()),
            at_most=1,
        ),
        Figure(
            name="traces of a preset's grad step, presets in turn",
            value=traces(policy, state, vocabulary, names),
            at_most=1,
        ),
    ]


if __name__ == "__main__":
    main()
