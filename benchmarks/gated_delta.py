"""The gated delta rule in chunks against mlx-lm's loop over tokens: forward and backward, time and peak.

One layer's rule, with heads as in Qwen3-Next, a quarter of their number: 4 heads of keys, 8 of values, 128
wide, one row, float32; gradients of all inputs. And a whole gradient step of a small qwen3_next.

**What limits it.** The loop: it keeps some states of 64 KB for each token and head. Ours: each chunk's
triangular inverse and small products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import click
import mlx.core as mx
import numpy as np

import grpo_fn as g
from benchmarks.architectures.small_models import small_model
from benchmarks.architectures.small_settings import VOCABULARY
from benchmarks.harness.command import benchmark, say
from benchmarks.harness.measure import interleaved, largest_error, peak_bytes, timed
from benchmarks.harness.record import Figure, ratio_figure, time_figure
from grpo_fn.backends import disabled
from grpo_fn.policy.layers.gated_delta import CHUNK, chunked_gated_delta

TIME_TARGET, PEAK_TARGET = 1 / 3, 1 / 4  # of the loop, at JUDGED tokens
JUDGED = 1024
ERROR_TARGET = 1e-4
Rule = Callable[..., tuple[mx.array, mx.array]]


def make_inputs(length: int, key_heads: int, heads: int, width: int) -> list[mx.array]:
    """q, k, v, g, beta and a state, as a trained layer has them: keys of length 1, decays near 1."""
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(1, length, key_heads, width)) for _ in range(2))
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True)) for x in (q, k))
    v = rng.normal(size=(1, length, heads, width))
    decay = np.exp(-np.exp(rng.normal(-3, 1, size=(1, length, heads))))
    beta = rng.uniform(0, 1, size=(1, length, heads))
    state = rng.normal(size=(1, heads, width, width)) / width**0.5
    arrays = [mx.array(x, mx.float32) for x in (q / width**0.5, k, v, decay, beta, state)]
    mx.eval(arrays)
    return arrays


def loop(q: mx.array, k: mx.array, v: mx.array, decay: mx.array, beta: mx.array, state: mx.array) -> Any:
    """mlx-lm's."""
    from mlx_lm.models.gated_delta import gated_delta_ops

    return gated_delta_ops(q, k, v, decay, beta, state)


def chunks(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    decay: mx.array,
    beta: mx.array,
    state: mx.array,
    *,
    chunk: int | None = None,
) -> Any:
    """Ours."""
    return chunked_gated_delta(q, k, v, mx.log(decay), beta, state, chunk=chunk)


def gradient(rule: Rule, inputs: Sequence[mx.array], *, compile: bool = False) -> Callable[[], Any]:
    """A call that gives the rule's outputs and the gradients of all its inputs."""
    weights_y = mx.random.normal(inputs[2].shape, key=mx.random.key(1))
    weights_s = mx.random.normal(inputs[5].shape, key=mx.random.key(2))

    def loss(*arrays: mx.array) -> tuple[mx.array, Any]:
        y, last = rule(*arrays)
        return (weights_y * y).sum() + (weights_s * last).sum(), (y, last)

    step = g.compiled(mx.value_and_grad(loss, argnums=tuple(range(6))), enabled=compile)
    return lambda: step(*inputs)


def compare(title: str, inputs: Sequence[mx.array], *, repeats: int, judged: bool) -> list[Figure]:
    """Ours and the loop in turn; gradients of both against each other."""
    say(f"gated_delta: {title}")
    calls = {"loop": gradient(loop, inputs), "chunks": gradient(chunks, inputs)}
    ((_, found), grads), ((_, wanted), wanted_grads) = calls["chunks"](), calls["loop"]()
    error = largest_error([*found, *grads], [*wanted, *wanted_grads])
    del found, grads, wanted, wanted_grads
    peaks = {name: peak_bytes(call, warm=False) for name, call in calls.items()}
    times = interleaved(calls, repeats=repeats, warmup=0)
    return [
        *(time_figure(f"{title}: time, {name}", times[name]) for name in calls),
        *(Figure(name=f"{title}: peak, {name}", value=peaks[name] / 1e6, unit="MB") for name in calls),
        ratio_figure(
            f"{title}: time, chunks / loop",
            times["chunks"] / times["loop"],
            at_most=TIME_TARGET if judged else None,
        ),
        Figure(
            name=f"{title}: peak, chunks / loop",
            value=peaks["chunks"] / peaks["loop"],
            unit="x",
            at_most=PEAK_TARGET if judged else None,
        ),
        Figure(name=f"{title}: largest difference", value=error, at_most=ERROR_TARGET),
    ]


def alone(title: str, inputs: Sequence[mx.array], *, repeats: int) -> list[Figure]:
    """Ours alone, where the loop would take too much, over the size of a chunk."""
    say(f"gated_delta: {title}")
    figures = []
    for chunk in (16, 32, 64):
        call = gradient(functools.partial(chunks, chunk=chunk), inputs)
        name = f"{title}, chunks of {chunk}" + (", the default" if chunk == CHUNK else "")
        peak = peak_bytes(call)
        figures += [
            time_figure(f"{name}: time", timed(call, repeats=repeats, warmup=0)),
            Figure(name=f"{name}: peak", value=peak / 1e6, unit="MB"),
        ]
    return figures


def whole_step(rows: int, length: int, *, repeats: int) -> list[Figure]:
    """The learner's gradient step of a small qwen3_next, compiled, without the mechanism and with it."""
    title = f"gradient step of a small qwen3_next, {rows} × {length}"
    say(f"gated_delta: {title}")
    tokens_bl = mx.random.randint(0, VOCABULARY, (rows, length), mx.int32, key=mx.random.key(0))
    prompt = length // 4
    batch = g.Batch(
        tokens_bl=tokens_bl,
        prompt_lengths_b=mx.full((rows,), prompt, mx.int32),
        targets_bt=tokens_bl[:, prompt:],
        mask_bt=mx.ones((rows, length - prompt), mx.bool_),
        advantages_b=mx.random.normal((rows,), key=mx.random.key(1)),
        rollout_logp_bt=mx.full((rows, length - prompt), -4.0),
        num_sequences=mx.array(float(rows)),
        num_tokens=mx.array(float(rows * (length - prompt))),
    )
    calls: dict[str, Callable[[], Any]] = {}
    for name, off in (("loop", ["chunked_gated_delta"]), ("chunks", [])):
        policy = g.Policy.from_module(small_model("qwen3_next"))
        state = g.init_state(policy.params, g.adamw(1e-6), key=mx.random.key(0))
        step = g.make_grad_step(policy, g.preset("grpo"))
        with disabled(*off):  # what is traced here stays
            g.materialize(step(state, batch))
        calls[name] = functools.partial(step, state, batch)
    peaks = {name: peak_bytes(call, warm=False) for name, call in calls.items()}
    times = interleaved(calls, repeats=repeats, warmup=0)
    return [
        *(time_figure(f"{title}: time, {name}", times[name]) for name in calls),
        *(Figure(name=f"{title}: peak, {name}", value=peaks[name] / 1e6, unit="MB") for name in calls),
        ratio_figure(f"{title}: time, chunks / loop", times["chunks"] / times["loop"]),
        Figure(name=f"{title}: peak, chunks / loop", value=peaks["chunks"] / peaks["loop"], unit="x"),
    ]


@benchmark("gated_delta")
@click.option("--repeats", default=3, show_default=True, help="Rounds of each comparison.")
def main(quick: bool, repeats: int) -> Sequence[Figure]:
    """The gated delta rule of one layer, forward and backward: in chunks against a loop over tokens."""
    key_heads, heads, width = (1, 2, 16) if quick else (4, 8, 128)
    lengths, longest, step = ((32,), 64, (2, 24)) if quick else ((256, JUDGED), 4096, (4, 128))
    figures = []
    for length in lengths:
        inputs = make_inputs(length, key_heads, heads, width)
        figures += compare(f"{length} tokens", inputs, repeats=repeats, judged=length == JUDGED)
    figures += alone(f"{longest} tokens", make_inputs(longest, key_heads, heads, width), repeats=repeats)
    return [*figures, *whole_step(*step, repeats=repeats)]


if __name__ == "__main__":
    main()
