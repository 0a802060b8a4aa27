"""Implements `grpo bench`: runs some steps of a config and measures the time for each part."""

import math
import statistics
import time
from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from runners.config.loading import Config
from runners.config.sections import SftConfig
from runners.data.stream import RunLength
from runners.errors import gigabytes
from runners.machine import startup
from runners.machine.terminal import aligned
from runners.memory.metal_limits import metal_limits
from runners.metrics import METRICS
from runners.models.role_quantization import formats_line
from runners.telemetry.diary import Diary
from runners.telemetry.report import Report, duration_text
from runners.training.plan import plan_of
from runners.training.run_state import first_state
from runners.training.setup import Run, SetUp
from runners.training.steps import (
    experience,
    gradients,
    judge_sampler,
    learn,
    propose,
    release_sampler,
    reload_sampler,
    sync,
    update,
)

PARTS = ("rollout", "reward", "learner", "update", "sync", "rest")  # of a step


class Stepping:
    """A run that trains without writing any file."""

    def __init__(self, run: Run, shown: Diary) -> None:
        self.state = first_state(run)
        self.run = attrs.evolve(run, learner=attrs.evolve(run.learner, state=None))
        self.plan = plan_of(self.run, shown)
        self.plan.engine.load(self.plan.weights(self.state))

    def step(self) -> dict[str, float]:
        """Runs an update's rollouts, and all updates that use these rollouts. Returns seconds per
        part, and counts.
        """
        plan = self.plan
        tokens = learned = columns = 0.0
        while not plan.update_due(self.state):
            found = experience(plan, plan.engine, propose(plan, self.state))
            before = self.state
            self.state = learn(plan, before, found)
            reload_sampler(plan, before, self.state)
            tokens += found.sampled_tokens
            rollout = found.rollout
            learned += np.array(rollout.lengths_b).sum().item()
            learned += rollout.num_generations * sum(map(len, rollout.prompts))  # their prompts
            columns += rollout.tokens_bt.shape[1]
        for _ in range(plan.uses):
            self.state = release_sampler(plan, self.state)
            summed = [gradients(plan, self.state)]
            self.state = attrs.evolve(self.state, train=None)
            state, loss_stats, _ = update(plan, summed.pop())
            self.state = sync(plan, judge_sampler(plan, state, loss_stats))
        return {**plan.times.take(), "tokens": tokens, "learned": learned, "columns": columns}


def bench_steps(config: Config, *, steps: int = 3, report: Report | None = None) -> dict[str, Any]:
    """Builds the run of a checked config, runs one step and then `steps` more. Nothing is written.

    A step consists of an update's rollouts and all updates that use these rollouts. `report` shows
    the progress. Returns medians and values derived from the medians, in JSON's types: seconds,
    bytes and counts.

    Raises the errors of a run.
    """
    config = attrs.evolve(config, sft=SftConfig())  # only GRPO steps
    machine = startup.prepare(config.system.memory_limit_gb, config)
    start = time.monotonic()
    # the parts are measured one after another
    whole = config.having("ranks", samplers=0).having("rollout", max_staleness=0)
    together = whole.optim.gradient_accumulation_steps
    config = whole.having("optim", max_steps=(steps + 1) * together)
    shown = Diary(report or Report())
    built = SetUp(config, machine, shown.note, advance=shown.advanced, note=shown.note).build()
    stepping = Stepping(built, shown)
    run = stepping.run
    loading = time.monotonic() - start
    mx.reset_peak_memory()
    rows: list[dict[str, float]] = []
    with metal_limits(machine.backend, run.phases, shown.note):
        for number in range(steps + 1):
            text = f"step {number + 1} of {steps + 1}"
            shown.note(text)
            shown.status(text)
            rows.append(stepping.step())
    first = rows[0]["step_time"]
    step = statistics.median(row["step_time"] for row in rows[1:])
    median = {key: statistics.median(row[key] for row in rows[1:]) for key in rows[0]}
    seconds = {part: median[f"time/{part}"] for part in PARTS}
    slowest = max(seconds, key=seconds.__getitem__)
    length = RunLength.of(whole, len(run.data.train))
    every = whole.eval.every
    run_steps = math.ceil(length.batch_steps / together)
    evaluations = whole.eval.at_start + (math.ceil(length.updates / every) if every else 1)
    problems = len(run.data.evaluation)
    # An evaluation's completion takes as long as a rollout's, in proportion to the length limits.
    limit = whole.rollout.max_new_tokens
    longer = (whole.eval.max_new_tokens or limit) / limit
    rows_a_step = whole.optim.batch_size * together * whole.rollout.num_generations
    evaluating = evaluations * problems * longer * seconds["rollout"] / rows_a_step
    training = first + (run_steps - 1) * step
    formats = stepping.state.sampler.formats
    params = stepping.state.train.old_params
    return {
        "steps": steps,
        "formats": formats_line(config, formats, run.learner.policy, params) if formats else "",
        "first_step_seconds": first,
        "step_seconds": step,
        "part_seconds": seconds,
        "tokens_per_step": median["tokens"],
        "tokens_per_second": median["tokens"] / max(seconds["rollout"], 1e-9),
        "tokens_per_second_of_steps": median["tokens"] / max(step, 1e-9),
        "peak_bytes": mx.get_peak_memory(),
        "limited_by": slowest,
        "advice": METRICS[f"time/{slowest}"].otherwise,
        "run_steps": run_steps,
        "run_evaluations": evaluations,
        "run_problems": problems,
        "loading_seconds": loading,
        "training_seconds": training,
        "evaluating_seconds": evaluating,
        "run_seconds": loading + training + evaluating,  # without checkpoints
    }


def bench_table(found: Mapping[str, Any]) -> str:
    """Returns the parts with their shares, and advice, as text."""
    step = max(found["step_seconds"], 1e-9)
    parts = found["part_seconds"].items()
    rows = [
        ("part", "seconds", "share"),
        *((part, f"{each:.3f}", f"{100 * each / step:.0f} %") for part, each in parts),
        ("a step", f"{step:.3f}", "100 %"),
    ]
    names = ("run_seconds", "loading_seconds", "training_seconds", "evaluating_seconds")
    whole, loading, training, evaluating = (duration_text(found[name]) for name in names)
    lines = {
        "measured": f"the median of {found['steps']} steps; the first step took "
        f"{found['first_step_seconds']:.1f} s",
        "sampled": f"{found['tokens_per_step']:,.0f} tokens per step: "
        f"{found['tokens_per_second']:,.0f} per second in the rollout, "
        f"{found['tokens_per_second_of_steps']:,.0f} for the whole step",
        "peak": f"{gigabytes(found['peak_bytes'])} of MLX's arrays",
        "a run": f"about {whole}: loading {loading}, {found['run_steps']:,} steps {training}, "
        f"{found['run_evaluations']} evaluations of up to {found['run_problems']:,} problems "
        f"{evaluating}",
        "most time": f"{found['limited_by']}: {found['advice']}",
    }
    if found["formats"]:
        lines["formats"] = found["formats"]
    named = [f"{name:<12}{value}" for name, value in lines.items()]
    return "\n".join([*aligned(rows, right=range(1, 3)), "", *named])
