"""The cost of a sync: time and bytes of `sync_old` through each mode's quantizer, in both storages.

*Memory of its own* is what the role does not share with the learner. Without quantization a sync is an
assignment.

**What limits it.** On a CPU the packing: elementwise arithmetic on one core, most for the formats whose
scales are searched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click
import mlx.core as mx

import grpo_fn as g
from benchmarks.harness.command import benchmark, say
from benchmarks.harness.machine import backend, rates
from benchmarks.harness.measure import interleaved, peak_bytes
from benchmarks.harness.record import Figure, time_figure
from benchmarks.harness.shapes import MODELS, make_module
from grpo_fn.policy.quantized_role import MODES, STORAGES, quantized_role
from grpo_fn.trees import Tree, map_arrays, nbytes
from runners.config.names import EMBEDDED


def held_bytes(call: Callable[[], Any]) -> int:
    """Bytes of a call's results that nothing held before it."""
    mx.synchronize()
    before = mx.get_active_memory()
    result = call()
    g.materialize(result)
    mx.synchronize()
    after = mx.get_active_memory()
    del result
    return max(after - before, 0)


def measure(model: str, modes: Sequence[str], repeats: int, quick: bool) -> list[Figure]:
    """All modes of one model, whose masters are float32 as a run's are."""
    module = make_module(model)
    on_cpu = backend() == "cpu"
    policy = g.Policy.from_module(module, compute_dtype=None if on_cpu else mx.bfloat16)
    masters = map_arrays(lambda a: a.astype(mx.float32), policy.params)
    state = g.init_state(masters, g.adamw(1e-6), key=mx.random.key(0))
    g.materialize(state.params)
    ways: dict[str, Callable[[Tree], Tree] | None] = {"none": None}
    for mode in modes:
        for storage in STORAGES:
            try:
                ways[f"{mode} {storage}"] = quantized_role(policy, mode, storage).transform
            except ValueError as error:  # a shape that the mode's groups do not divide
                say(f"sync: {model}, {mode} left out: {error}")
    figures = []
    for name, transform in ways.items():
        say(f"sync: {model}, {name}")

        def sync(transform: Callable[[Tree], Tree] | None = transform) -> Any:
            return g.sync_old(state, transform).old_params

        peak = peak_bytes(sync)
        held = held_bytes(sync)
        timing = interleaved({name: sync}, repeats=repeats, warmup=0, least_seconds=0.01)[name]
        # Reads the masters and writes the role's weights.
        floor = (nbytes(state.params) + held) / rates(quick).copy if transform else 0.0
        title = f"{model}: {name}"
        figures += [
            time_figure(f"{title}: time", timing, "ms", predicted=1e3 * floor),
            Figure(name=f"{title}: memory of its own", value=held / 1e6, unit="MB"),
            Figure(name=f"{title}: peak", value=peak / 1e6, unit="MB"),
        ]
    return figures


@benchmark("sync", parts=("models",))
@MODELS
@click.option("--repeats", default=7, show_default=True, help="Samples of each.")
def main(quick: bool, models: Sequence[str], repeats: int) -> Sequence[Figure]:
    """A sync through each mode's quantizer: time, and the bytes that the role then has of its own."""
    default = ["tiny"] if quick else [EMBEDDED, "qwen2-6x256"] if backend() == "cpu" else ["nanochat-d20"]
    modes = ["affine-8", "nvfp4"] if quick else list(MODES)
    repeats = min(repeats, 2) if quick else repeats
    return [figure for model in models or default for figure in measure(model, modes, repeats, quick)]


if __name__ == "__main__":
    main()
