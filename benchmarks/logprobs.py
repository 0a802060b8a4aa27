"""`token_logprobs` against the naive way: forward and backward, time and peak memory, in one run.

The naive way, `z = hidden @ Wᵀ; log p_t = z_t − logsumexp(z)`, has all logits at once. Ours takes a chunk of
rows at a time, with the gradient in closed form: 8NVD operations for 6NVD (N rows, V words, width D), so that
where products dominate it takes up to a third longer.

**What limits it.** Time: passes over the logits on one core, then products. Memory: the gradient of the head,
and a dozen arrays of a chunk that MLX has in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import click
import mlx.core as mx
import numpy as np

import grpo_fn as g
from benchmarks.harness.command import benchmark, say
from benchmarks.harness.machine import rates
from benchmarks.harness.measure import interleaved, largest_error, peak_bytes
from benchmarks.harness.record import Figure, ratio_figure, time_figure
from grpo_fn.learner import chunk_rows

PEAK_TARGET, TIME_TARGET = 0.5, 1.15  # of the naive way
ERROR_TARGET = 1e-5  # of float32 against float64; more only where twice the naive way's own error is more
LogProbs = Callable[[mx.array, mx.array, mx.array], tuple[mx.array, mx.array | None]]


@attrs.frozen(eq=False)
class Inputs:
    """N rows of hidden states, a head [V,D], targets, and weights that stand for the loss's gradient."""

    hidden_btd: mx.array  # [1,N,D]
    weight_vd: mx.array
    targets_bt: mx.array
    logp_ct_bt: mx.array
    entropy_ct_bt: mx.array


def make_inputs(rows: int, vocabulary: int, width: int) -> Inputs:
    """Random inputs whose logits have a standard deviation of about 3, as a trained model's have."""
    keys = mx.random.split(mx.random.key(0), 5)
    inputs = Inputs(
        hidden_btd=mx.random.normal((1, rows, width), key=keys[0]),
        weight_vd=mx.random.normal((vocabulary, width), key=keys[1]) * (3 / width**0.5),
        targets_bt=mx.random.randint(0, vocabulary, (1, rows), key=keys[2]),
        logp_ct_bt=mx.random.normal((1, rows), key=keys[3]) / rows,
        entropy_ct_bt=mx.random.normal((1, rows), key=keys[4]) / rows,
    )
    g.materialize(inputs)
    return inputs


def naive(hidden_btd: mx.array, weight_vd: mx.array, targets_bt: mx.array, *, entropy: str) -> Any:
    """Log-probs as one writes them, and the entropy: "none", "constant" to the gradient, "differentiable"."""
    z_btv = hidden_btd @ weight_vd.T
    lse_bt = mx.logsumexp(z_btv, axis=-1)
    logp_bt = mx.take_along_axis(z_btv, targets_bt[..., None], axis=-1)[..., 0] - lse_bt
    if entropy == "none":
        return logp_bt, None
    entropy_bt = lse_bt - (mx.softmax(z_btv, axis=-1) * z_btv).sum(axis=-1)
    return logp_bt, entropy_bt if entropy == "differentiable" else mx.stop_gradient(entropy_bt)


def ours(
    hidden_btd: mx.array, weight_vd: mx.array, targets_bt: mx.array, *, entropy: str, chunk: int | None = None
) -> Any:
    """The library's, likewise."""
    if entropy == "none":
        return g.token_logprobs(hidden_btd, weight_vd, targets_bt, chunk=chunk), None
    return g.token_logprobs_and_entropy(
        hidden_btd, weight_vd, targets_bt, chunk=chunk, entropy_gradient=entropy == "differentiable"
    )


def gradient(function: LogProbs, inputs: Inputs, *, compile: bool = False) -> Callable[[], Any]:
    """A call that gives values and the gradients in hidden states and head."""

    def loss(hidden_btd: mx.array, weight_vd: mx.array) -> tuple[mx.array, Any]:
        logp_bt, entropy_bt = function(hidden_btd, weight_vd, inputs.targets_bt)
        total = (inputs.logp_ct_bt * logp_bt).sum()
        if entropy_bt is not None:
            total = total + (inputs.entropy_ct_bt * entropy_bt).sum()
        return total, (logp_bt, entropy_bt)

    step = g.compiled(mx.value_and_grad(loss, argnums=(0, 1)), enabled=compile)
    return lambda: step(inputs.hidden_btd, inputs.weight_vd)


def floors(inputs: Inputs, quick: bool, *, matmuls: int) -> float:
    """Seconds that the products ([N,D]×[D,V], `matmuls` of them) and two exps a logit cannot go below."""
    rows, width = inputs.hidden_btd.shape[1:]
    logits = rows * inputs.weight_vd.shape[0]
    speed = rates(quick)
    return matmuls * 2 * logits * width / speed.matmul + 2 * logits / speed.exp


def compare(
    inputs: Inputs, title: str, *, entropy: str, compile: bool, repeats: int, judged: bool, quick: bool
) -> list[Figure]:
    """Time and peak of one setting."""
    say(f"logprobs: {title}")
    calls = {
        "naive": gradient(partial(naive, entropy=entropy), inputs, compile=compile),
        "ours": gradient(partial(ours, entropy=entropy), inputs, compile=compile),
    }
    peaks = {name: peak_bytes(call) for name, call in calls.items()}
    times = interleaved(calls, repeats=repeats, warmup=0)  # the peaks have warmed both up
    rows, width = inputs.hidden_btd.shape[1:]
    vocabulary = inputs.weight_vd.shape[0]
    results = 4 * (rows * width + vocabulary * width)  # the two gradients
    least = {
        "naive": results + 2 * 4 * rows * vocabulary,
        "ours": results + 4 * min(chunk_rows(vocabulary), rows) * vocabulary,
    }
    # Forward, and in the backward dH and dW; ours makes the logits once more.
    products = {"naive": 3, "ours": 4}
    figures = []
    for name in calls:
        floor = floors(inputs, quick, matmuls=products[name])
        figures += [
            time_figure(f"{title}: time, {name}", times[name], predicted=floor),
            Figure(
                name=f"{title}: peak, {name}", value=peaks[name] / 1e6, unit="MB", predicted=least[name] / 1e6
            ),
        ]
    peak_ratio = peaks["ours"] / peaks["naive"]
    return [
        *figures,
        ratio_figure(
            f"{title}: time, ours / naive",
            times["ours"] / times["naive"],
            at_most=TIME_TARGET if judged else None,
        ),
        Figure(
            name=f"{title}: peak, ours / naive",
            value=peak_ratio,
            unit="x",
            at_most=PEAK_TARGET if judged else None,
        ),
    ]


def exact(inputs: Inputs, *, entropy: str) -> Any:
    """The results of `gradient` in NumPy float64."""
    h_nd, w_vd = (np.array(a, np.float64) for a in (inputs.hidden_btd[0], inputs.weight_vd))
    target_n, ct_n, entropy_ct_n = (
        np.array(a[0]) for a in (inputs.targets_bt, inputs.logp_ct_bt, inputs.entropy_ct_bt)
    )
    z_nv = h_nd @ w_vd.T
    top_n1 = z_nv.max(axis=1, keepdims=True)
    log_p_nv = z_nv - top_n1 - np.log(np.exp(z_nv - top_n1).sum(axis=1, keepdims=True))
    p_nv, row_n = np.exp(log_p_nv), np.arange(len(target_n))
    entropy_n = -(p_nv * log_p_nv).sum(axis=1)
    dz_nv = -p_nv * ct_n[:, None]
    dz_nv[row_n, target_n] += ct_n
    if entropy == "differentiable":
        dz_nv -= p_nv * (log_p_nv + entropy_n[:, None]) * entropy_ct_n[:, None]
    values = [log_p_nv[row_n, target_n][None]] + ([entropy_n[None]] if entropy != "none" else [])
    return [values, (dz_nv @ w_vd)[None], dz_nv.T @ h_nd]


def errors(inputs: Inputs) -> list[Figure]:
    """The largest error of values and gradients against float64, relative to each array's largest entry."""
    figures = []
    for entropy, title in (("none", "log-probs"), ("differentiable", "log-probs and entropy")):
        wanted = exact(inputs, entropy=entropy)
        found = {}
        for name, function in (("naive", naive), ("ours", ours)):
            (_, values), gradients = gradient(partial(function, entropy=entropy), inputs)()
            values = [value for value in values if value is not None]
            found[name] = largest_error([values, *gradients], wanted)
        figures.append(
            Figure(
                name=f"{title}, {inputs.hidden_btd.shape[1]} rows: largest error against float64",
                value=found["ours"],
                note=f"the naive way's: {found['naive']:.1e}",
                at_most=max(ERROR_TARGET, 2 * found["naive"]),
            )
        )
    return figures


def sweep_chunks(inputs: Inputs, title: str, *, repeats: int) -> list[Figure]:
    """Time and peak over the size of a chunk."""
    vocabulary = inputs.weight_vd.shape[0]
    sizes = [size for size in (2**k for k in range(18, 28)) if size >= vocabulary]
    calls = {
        size: gradient(partial(ours, entropy="constant", chunk=size // vocabulary), inputs, compile=True)
        for size in sizes
        if size // vocabulary <= inputs.hidden_btd.shape[1]
    }
    say(f"logprobs: {title}, {len(calls)} chunk sizes")
    peaks = {size: peak_bytes(call) for size, call in calls.items()}
    times = interleaved({str(size): call for size, call in calls.items()}, repeats=repeats, warmup=0)
    figures = []
    for size in calls:
        name = f"{title}, chunks of {size // vocabulary} rows ({4 * size / 2**20:.0f} MiB)"
        name += ", the default" if size // vocabulary == chunk_rows(vocabulary) else ""
        figures += [
            time_figure(f"{name}: time", times[str(size)]),
            Figure(name=f"{name}: peak", value=peaks[size] / 1e6, unit="MB"),
        ]
    return figures


@benchmark("logprobs")
@click.option("--sweep", is_flag=True, help="Also time and peak over the chunk size.")
@click.option("--repeats", default=7, show_default=True, help="Rounds of each comparison.")
def main(quick: bool, sweep: bool, repeats: int) -> Sequence[Figure]:
    """token_logprobs, forward and backward, against gather − logsumexp of all logits."""
    rows, vocabulary, width = (64, 512, 16) if quick else (2048, 32768, 256)
    repeats = min(repeats, 2) if quick else repeats
    inputs = make_inputs(rows, vocabulary, width)
    shape = f"{rows} rows"
    settings = [
        # What the target is for: eager, as the naive way is written.
        (inputs, shape, "none", False, repeats, True),
        (inputs, f"{shape}, compiled", "none", True, repeats, True),
        # The learner's call: the entropy is logged, and a constant to the gradient.
        (inputs, f"{shape}, with entropy", "constant", False, repeats, False),
        (inputs, f"{shape}, with entropy and its gradient", "differentiable", False, repeats, False),
    ]
    figures = []
    for given, title, entropy, compile, rounds, judged in settings:
        figures += compare(
            given,
            title,
            entropy=entropy,
            compile=compile,
            repeats=rounds,
            judged=judged and not quick,
            quick=quick,
        )
    say("logprobs: errors against float64")
    figures += errors(make_inputs(max(rows // 8, 8), vocabulary, width))
    if sweep:
        figures += sweep_chunks(inputs, f"{shape}, with entropy", repeats=repeats)
    del inputs, settings, given
    figures += compare(
        make_inputs(4 * rows, vocabulary, width),
        f"{4 * rows} rows",
        entropy="none",
        compile=False,
        repeats=max(repeats // 2, 1),
        judged=not quick,
        quick=quick,
    )
    return figures


if __name__ == "__main__":
    main()
