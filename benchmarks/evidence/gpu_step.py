"""Measures a step on a GPU: time and peak memory with several sizes of micro-batches, and the first
calibrated sync.

The steps are those of `gsm8k` on a model of half a billion parameters, with a learning rate of 0,
so that all of them do the same work except for the sampled tokens. The sizes alternate. A sync is
timed by part, twice; nothing is compiled the second time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import mlx.core as mx

import grpo_fn as g
from benchmarks.evidence.gsm8k import CONFIG, QUICK, Case, own_settings
from benchmarks.harness.command import say
from benchmarks.harness.machine import backend, machine
from benchmarks.harness.record import Figure, make_record, save_record
from grpo_fn.policy import carries_of
from runners.commands.base import HELP, ends_with_a_line
from runners.config.loading import Config, load_config
from runners.machine.memory_readings import total_memory
from runners.machine.startup import prepare
from runners.memory.forecast import forecast
from runners.memory.plan import data_shape
from runners.memory.sizes import model_sizes
from runners.models.role_quantization import measured_moments
from runners.profiling import Stepping
from runners.telemetry.diary import Diary
from runners.telemetry.report import Report
from runners.training.setup import SetUp
from runners.training.steps import batch_of, experience, propose

NAME = "gpu_step"
TOKENS = (4096, 8192, 16384, 32768, 65536)
PREDICTED_WITHIN = 20.0  # per cent


def built(config: Config) -> Stepping:
    """The run of a config, ready for its steps."""
    return Stepping(SetUp(config, prepare(config=config), say).build(), Diary(Report()))


def micro_batches(config: Config, sizes: Sequence[int], rounds: int) -> Iterator[list[Figure]]:
    """Step, learner and peak for each size, and the forecast; 0 is the automatic size."""
    platform = prepare()
    stepping = built(config)
    prompt = data_shape(config)[0]
    shape = model_sizes(config, platform)
    held_out = len(stepping.run.data.evaluation)
    usual = forecast(config, platform, total_memory(), prompt=prompt, sizes=shape, held_out=held_out)
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
        error = 100 * (max(map(sum, phases)) / peak - 1)
        yield [
            _figure(f"{name}: step", [row["step_time"] for row in timed], "s"),
            _figure(f"{name}: learner", [row["time/learner"] for row in timed], "s"),
            _figure(
                f"{name}: learner, a thousand tokens",
                [1e6 * row["time/learner"] / row["learned"] for row in timed],
                "ms",
            ),
            Figure(name=f"{name}: peak", value=peak / 1e9, unit="GB"),
            Figure(
                name=f"{name}: forecast above the peak",
                value=error,
                unit="%",
                at_most=PREDICTED_WITHIN,
                at_least=-PREDICTED_WITHIN,
            ),
        ]


def _figure(name: str, values: Sequence[float], unit: str) -> Figure:
    middle = statistics.median(values)
    low, high = min(values), max(values)
    return Figure(name=name, value=middle, unit=unit, low=low, high=high, samples=len(values))


def first_sync(config: Config) -> Iterator[list[Figure]]:
    """Seconds of each part of a calibrated sync, the first time and again."""
    stepping = built(config)
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
        yield [
            Figure(name=f"sync, {turn}: {part}", value=seconds, unit="s")
            for part, seconds in [*took.items(), ("all", sum(took.values()))]
        ]


@click.command(context_settings=HELP)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder for the result."
)
@click.option("--model", required=True, help="The model's folder.")
@click.option("--data", required=True, help="Folder with train.jsonl and test.jsonl.")
@click.option("--tokens", default=",".join(map(str, TOKENS)), show_default=True, help="With commas.")
@click.option("--rounds", default=2, show_default=True, help="Number of timed steps per size.")
@click.option("--set", "more", multiple=True, help="SECTION.KEY=VALUE, an override of gsm8k's config.")
@click.option("--sync/--no-sync", default=True, show_default=True, help="Also measure a calibrated sync.")
@click.option("--quick", is_flag=True, help="Steps with a few tokens, to show that the command works.")
@ends_with_a_line
def main(
    out: Path,
    model: str,
    data: str,
    tokens: str,
    rounds: int,
    more: Sequence[str],
    sync: bool,
    quick: bool,
) -> None:
    """Measure a step with several sizes of micro-batches, and the first calibrated sync."""
    case = Case(side="grpo_fn", tune="full", rate=0.0)
    settings = [*case.settings, *(QUICK if quick else ()), "eval.at_start=false", *more]
    steps = own_settings(out / "none", model, data, 0, 10_000, settings)
    few = "rollout.quantization=affine-4"

    def config(*added: str) -> Config:
        return load_config(str(CONFIG), [*steps, *added]).check()

    surroundings = machine()
    parts = [first_sync(config(few, "loss.correction=token_truncate"))] if sync else []
    parts.append(micro_batches(config(), [int(each) for each in tokens.split(",")], rounds))
    with_what = f"with {', '.join(more)}: " if more else ""
    for measured in (figures for part in parts for figures in part):
        figures = [attrs.evolve(figure, name=with_what + figure.name) for figure in measured]
        record = make_record(NAME, figures, quick=quick, machine=surroundings, rates={})
        save_record(out, backend(), record, parts=())
        for figure in figures:
            say(f"{figure.name}: {figure.value:.4g} {figure.unit}")


if __name__ == "__main__":
    main()
