"""`grpo bench`: runs some steps of a config and measures their time by part."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from runners.config.loading import Config
from runners.errors import UserError
from runners.machine import startup
from runners.machine.memory_readings import read_memory, usable_memory
from runners.memory.forecast import forecast
from runners.memory.sizes import ModelSizes, model_sizes
from runners.profiling.rates import MachineRates, measure_rates
from runners.telemetry.diary import Diary
from runners.telemetry.report import Silent
from runners.training.run_state import RunState
from runners.training.setup import Run, build_run
from runners.training.steps import TrainSteps

BENCH_PARTS = ("rollout", "reward", "learner", "update", "sync", "rest")


@attrs.frozen(kw_only=True)
class StepBench:
    """Medians of the measured steps, in seconds unless stated otherwise."""

    steps: int
    first: float  # the first step, which includes compilation
    seconds: dict[str, float]  # of each of BENCH_PARTS
    step: float
    tokens: float  # that a step samples
    learned: float  # tokens that a step's gradient is of, prompts included
    peak: int  # bytes of MLX's arrays
    expected_peak: int | None  # the forecast of `grpo plan`; None: the model's sizes are not known
    floors: dict[
        str, float
    ]  # the least time that the machine's rates allow, for the parts for which it is known
    rates: MachineRates
    advice: str  # what would make the slowest part shorter

    @property
    def limit(self) -> str:
        """The part that takes most."""
        return max(self.seconds, key=lambda part: self.seconds[part])

    def facts(self) -> dict[str, Any]:
        """As JSON has them."""
        return {
            "steps": self.steps,
            "first_step_seconds": self.first,
            "step_seconds": self.step,
            "part_seconds": self.seconds,
            "floor_seconds": self.floors,
            "tokens_per_step": self.tokens,
            "tokens_per_second": self.tokens / max(self.seconds["rollout"], 1e-9),
            "tokens_per_second_of_steps": self.tokens / max(self.step, 1e-9),
            "learned_tokens_per_step": self.learned,
            "peak_bytes": self.peak,
            "expected_peak_bytes": self.expected_peak,
            "limited_by": self.limit,
            "matmul_flops": self.rates.matmul,
            "read_bytes_per_second": self.rates.read,
        }


def bench_steps(
    config: Config, *, steps: int = 3, say: Callable[[str], None] = lambda text: None
) -> StepBench:
    """Builds the run of a checked config, runs one step and then `steps` more. Nothing is written.

    A step is the rollouts of an update and all updates that use them.

    Raises UserError as a run does.
    """
    machine = startup.prepare(config.system.memory_limit_gb)
    together = config.optim.gradient_accumulation_steps
    config = attrs.evolve(config, optim=attrs.evolve(config.optim, max_steps=(steps + 1) * together))
    run = build_run(config, machine, say)
    train = run.learner.state
    assert train is not None
    run.learner.engine.load(train.old_params, 0)
    state = RunState(train=train, micro_batch_tokens=run.config.system.micro_batch_tokens)
    run = attrs.evolve(run, learner=attrs.evolve(run.learner, state=None))
    say("measuring the machine")
    dtype = run.loaded.compute_dtype
    rates = measure_rates(dtype or mx.float32)
    sizes = _sizes(config, machine)
    taken = TrainSteps(run, Diary(Silent()))
    del train
    mx.reset_peak_memory()
    rows: list[dict[str, float]] = []
    floors: list[dict[str, float]] = []
    for number in range(steps + 1):
        say(f"step {number + 1} of {steps + 1}")
        tokens, learned, floor = 0.0, 0.0, {"rollout": 0.0, "learner": 0.0}
        while not taken.update_due(state):
            experience = taken.roll_out(state)
            state = taken.accept(state, experience, *taken.cut(state, experience))
            tokens += experience.sampled_tokens
            learned += _learned(experience.rollout)
            floor["rollout"] += _rollout_floor(experience.rollout, sizes, rates, config)
        for _ in range(taken.uses):
            sums = taken.gradients(taken.free_sampler(state))
            state = attrs.evolve(state, train=None)
            state, *_ = taken.update(sums)
            state = taken.sync(state)
        times = taken.times.take()
        floor["learner"] = _learner_floor(learned, sizes, rates, config)
        rows.append({**times, "tokens": tokens, "learned": learned})
        floors.append(floor)
    later = rows[1:]

    def median(key: str, found: list[dict[str, float]] = later) -> float:
        return statistics.median(row[key] for row in found)

    seconds = {part: median(f"time/{part}") for part in BENCH_PARTS}
    return StepBench(
        steps=len(later),
        first=rows[0]["step_time"],
        seconds=seconds,
        advice=advice(max(seconds, key=seconds.__getitem__), run.config),
        step=median("step_time"),
        tokens=median("tokens"),
        learned=median("learned"),
        peak=read_memory().peak,
        expected_peak=_expected(run, sizes, machine),
        floors={} if sizes is None else {part: median(part, floors[1:]) for part in ("rollout", "learner")},
        rates=rates,
    )


def advice(part: str, config: Config) -> str:
    """What would make a part of a step shorter, without what the config does already."""
    adapters = 'adapters only (model.tune = "lora")' if config.model.tune == "full" else ""
    unpacked = "a sampler without quantization" if config.rollout.quantization != "none" else ""
    whole = "no system.grad_checkpoint" if config.system.grad_checkpoint else ""
    found = {
        "rollout": (
            "more completions at a time (optim.batch_size, rollout.num_generations)",
            "shorter ones (rollout.max_new_tokens)",
        ),
        "reward": ("a faster reward", "fewer questions to a judge"),
        "learner": ("a larger system.micro_batch_tokens where memory allows", whole, adapters),
        "update": (adapters, "more batch steps per update (optim.gradient_accumulation_steps)"),
        "sync": (f"loss.sync_every above {config.loss.sync_every}", unpacked),
        "rest": ("fewer other programs on this machine: this time is outside the training itself",),
    }
    return ", ".join(filter(None, found[part]))


def _sizes(config: Config, machine: startup.Platform) -> ModelSizes | None:
    try:
        return model_sizes(config, machine)
    except UserError:  # the model's config lacks what a forecast needs
        return None


def _expected(run: Run, sizes: ModelSizes | None, machine: startup.Platform) -> int | None:
    if sizes is None:
        return None
    longest = max(len(example.tokens) for example in run.data.train)
    total = usable_memory(run.config.system.memory_limit_gb)
    found = forecast(run.config, machine, total, prompt=longest, sizes=sizes)
    return max(nbytes for name, nbytes in found.totals.items() if name != "evaluation")


def _learned(rollout: g.Rollout) -> float:
    return _number(rollout.lengths_b.sum()) + rollout.num_generations * sum(map(len, rollout.prompts))


def _number(array: mx.array) -> float:
    return float(np.array(array))


def _multiplied(sizes: ModelSizes) -> tuple[float, float]:
    """Parameters that a token is multiplied with, and their bytes; those of adapters are left out."""
    shape = sizes.shape
    wide = (3 if shape.gated else 2) * shape.intermediate
    block = shape.hidden * (2 * shape.queries + 2 * shape.keys + wide)
    count = shape.layers * block + shape.hidden * shape.vocabulary
    return count, count * sizes.compute


def _rollout_floor(
    rollout: g.Rollout, sizes: ModelSizes | None, rates: MachineRates, config: Config
) -> float:
    """All weights are read once a decoding step, and each token is multiplied with them."""
    if sizes is None:
        return 0.0
    count, nbytes = _multiplied(sizes)
    rows = rollout.tokens_bt.shape[0]
    together = max(min(config.rollout.max_batch or rows, rows), 1)
    longest = _number(rollout.lengths_b.max())
    read = math.ceil(rows / together) * longest * nbytes / rates.read
    return max(read, 2 * count * _number(rollout.lengths_b.sum()) / rates.matmul)


def _learner_floor(tokens: float, sizes: ModelSizes | None, rates: MachineRates, config: Config) -> float:
    """Forward and backward are three times a forward's products, two where the weights are frozen."""
    if sizes is None:
        return 0.0
    count, _ = _multiplied(sizes)
    passes = 3 if config.model.tune == "full" else 2
    passes += 1 if config.loss_spec().beta > 0 else 0
    return 2 * count * passes * tokens / rates.matmul
