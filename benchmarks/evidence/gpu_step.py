"""Measures a step on a GPU: time and peak memory with several sizes of micro-batches, and the first
calibrated sync.

The steps are those of `gsm8k` on a model of half a billion parameters, with a learning rate of 0,
so that all of them do the same work except for the sampled tokens. The sizes alternate. A sync is
timed by part, twice; nothing is compiled the second time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import click
import mlx.core as mx

import grpo_fn as g
from benchmarks.evidence.gsm8k import CONFIG, QUICK, Case
from benchmarks.evidence.watched import Call, single_runs
from benchmarks.harness.command import numbers, say
from benchmarks.harness.record import Figure, sample_figure
from benchmarks.harness.stepping import built
from grpo_fn.policy import carries_of
from runners.config.loading import Config, load_config
from runners.machine.memory_readings import total_memory
from runners.machine.startup import prepare
from runners.memory.forecast import forecast
from runners.memory.plan import data_shape
from runners.memory.sizes import model_sizes
from runners.models.role_quantization import measured_moments
from runners.training.steps import batch_of, experience, propose

TOKENS = (4096, 8192, 16384, 32768, 65536)
PREDICTED_WITHIN = 20.0  # per cent


def micro_batches(config: Config, sizes: Sequence[int], rounds: int) -> Iterator[list[Figure]]:
    """Step, learner and peak for each size and the automatic one, and the forecast."""
    platform = prepare()
    stepping = built(config, note=say)
    usual = forecast(
        config,
        platform,
        total_memory(),
        prompt=data_shape(config)[0],
        sizes=model_sizes(config, platform),
        held_out=len(stepping.run.data.evaluation),
    )
    automatic = usual.config.system.micro_batch_tokens
    budgets = list(dict.fromkeys([*sizes, automatic]))
    rows: dict[int, list[dict[str, float]]] = {budget: [] for budget in budgets}
    for _ in range(rounds + 1):  # the first one compiles
        for budget in budgets:
            stepping.state = attrs.evolve(stepping.state, micro_batch_tokens=budget)
            mx.clear_cache()
            mx.reset_peak_memory()
            row = stepping.step()
            rows[budget].append({**row, "peak": mx.get_peak_memory()})
    for budget in budgets:
        name = f"micro-batches of {budget}{' (automatic)' if budget == automatic else ''}"
        timed = rows[budget][1:]
        predicted = usual.having("system", micro_batch_tokens=budget)
        peak = max(row["peak"] for row in timed)
        phases = predicted.rollout(), predicted.gradient(), predicted.update()
        above = 100 * (max(map(sum, phases)) / peak - 1)
        each = [1e6 * row["time/learner"] / row["learned"] for row in timed]
        yield [
            sample_figure(f"{name}: step", [row["step_time"] for row in timed], "s"),
            sample_figure(f"{name}: learner", [row["time/learner"] for row in timed], "s"),
            sample_figure(f"{name}: learner, a thousand tokens", each, "ms"),
            Figure(f"{name}: peak", peak / 1e9, "GB"),
            Figure(
                f"{name}: forecast above the peak",
                above,
                "%",
                at_most=PREDICTED_WITHIN,
                at_least=-PREDICTED_WITHIN,
            ),
        ]


def first_sync(config: Config) -> Iterator[list[Figure]]:
    """Seconds of each part of a calibrated sync, the first time and again."""
    stepping = built(config, note=say)
    plan, state = stepping.plan, stepping.state
    learner = stepping.run.learner
    role = learner.quantized
    assert role is not None
    batch = batch_of(plan, experience(plan, plan.engine, propose(plan, state)))
    plan.engine.load(None)
    params = state.train.params
    name = config.rollout.quantization
    for turn in ("first", "again"):
        took: dict[str, float] = {}

        def timed(part: str, call: Callable[[], Any], took: dict[str, float] = took) -> Any:
            started = time.perf_counter()
            value = call()
            mx.synchronize()
            took[part] = time.perf_counter() - started
            return value

        moments = timed("moments", lambda: measured_moments(learner.policy, role, params, batch))
        timed("carries", lambda moments=moments: carries_of(moments))
        remade = role.remade(name, moments)
        timed("rounding", lambda remade=remade: g.materialize(remade.transform(params)))
        parts = {**took, "all": sum(took.values())}
        yield [Figure(f"sync, {turn}: {part}", seconds, "s") for part, seconds in parts.items()]


@single_runs("gpu_step")
@click.option(
    "--tokens", default=",".join(map(str, TOKENS)), show_default=True, callback=numbers, help="With commas."
)
@click.option("--rounds", default=2, show_default=True, help="Number of timed steps per size.")
@click.option("--sync/--no-sync", default=True, show_default=True, help="Also measure a calibrated sync.")
def main(call: Call, tokens: Sequence[int], rounds: int, sync: bool) -> Iterator[list[Figure]]:
    """Measure a step with several sizes of micro-batches, and the first calibrated sync."""
    case = Case(side="grpo_fn", tune="full", rate=0.0)
    own = [*case.settings, *(QUICK if call.quick else ()), "eval.at_start=false"]
    settings = [*call.settings(call.folder("gpu_step"), 10_000, own), "optim.max_steps=10000"]

    def config(*added: str) -> Config:
        return load_config(str(CONFIG), [*settings, *added]).check()

    few = ("rollout.quantization=affine-4", "loss.correction=token_truncate")
    parts = [first_sync(config(*few))] if sync else []
    parts.append(micro_batches(config(), tokens, rounds))
    with_what = f"with {', '.join(call.more)}: " if call.more else ""
    for part in parts:
        for figures in part:
            for figure in figures:
                say(f"{figure.name}: {figure.value:.4g} {figure.unit}")
            yield [attrs.evolve(figure, name=with_what + figure.name) for figure in figures]


if __name__ == "__main__":
    main()
