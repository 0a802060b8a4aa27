"""`grpo bench`: runs some steps of a config and measures their time by part."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from runners.config.loading import Config
from runners.config.sections import SftConfig
from runners.data.stream import RunLength
from runners.errors import UserError, gigabytes
from runners.machine import startup
from runners.machine.memory_readings import read_memory, usable_memory
from runners.machine.terminal import aligned
from runners.memory.forecast import forecast
from runners.memory.sizes import model_sizes
from runners.models.role_quantization import formats_line
from runners.telemetry.diary import Diary
from runners.telemetry.progress import duration_text
from runners.telemetry.report import Report
from runners.training.run_state import RunState
from runners.training.setup import Run, build_run
from runners.training.steps import TrainSteps

BENCH_PARTS = ("rollout", "reward", "learner", "update", "sync", "rest")


@attrs.frozen
class RunTime:
    """How long a run takes, by the steps that were measured."""

    loading: float  # seconds until the first step
    steps: int  # as many as this bench's steps count: one for each `optim.gradient_accumulation_steps`
    training: float  # seconds of all of them
    evaluations: int
    problems: int  # of each
    evaluating: float  # seconds of all evaluations: a token takes as long as in a rollout

    @property
    def seconds(self) -> float:
        """From the command to the end, without checkpoints."""
        return self.loading + self.training + self.evaluating

    def __str__(self) -> str:
        """In words."""
        whole, *parts = map(duration_text, (self.seconds, self.loading, self.training, self.evaluating))
        evaluations = f"{self.evaluations} evaluations of up to {self.problems:,} problems"
        return f"about {whole}: loading {parts[0]}, {self.steps:,} steps {parts[1]}, {evaluations} {parts[2]}"

    @classmethod
    def of(
        cls, run: Run, config: Config, loading: float, first: float, median: Mapping[str, float]
    ) -> RunTime:
        """From the seconds of loading, a first and a later step; `config` is that of the run itself."""
        length, every = RunLength.of(config, len(run.data.train)), config.eval.every
        steps = math.ceil(length.batch_steps / config.optim.gradient_accumulation_steps)
        evaluations = config.eval.at_start + (math.ceil(length.updates / every) if every else 1)
        prompts = config.optim.batch_size * config.optim.gradient_accumulation_steps
        rows = prompts * config.rollout.num_generations
        longer = (config.eval.max_new_tokens or config.rollout.max_new_tokens) / config.rollout.max_new_tokens
        prompt, completion = (median["learned"] - median["tokens"]) / rows, median["tokens"] / rows
        fed = median["tokens"] + prompt * prompts
        problems, token = len(run.data.evaluation), median["time/rollout"] / max(fed, 1)
        evaluating = evaluations * problems * (prompt + completion * longer) * token
        training = first + (steps - 1) * median["step_time"]
        return cls(loading, steps, training, evaluations, problems, evaluating)


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
    formats: str  # of the sampler's weights, by rollout.bits_budget; "": all have the same
    advice: str  # what would make the slowest part shorter
    run: RunTime  # of the whole run

    @property
    def limit(self) -> str:
        """The part that takes most."""
        return max(self.seconds, key=self.seconds.__getitem__)

    def facts(self) -> dict[str, Any]:
        """As JSON has them."""
        return {
            "steps": self.steps,
            "first_step_seconds": self.first,
            "step_seconds": self.step,
            "part_seconds": self.seconds,
            "tokens_per_step": self.tokens,
            "tokens_per_second": self.tokens / max(self.seconds["rollout"], 1e-9),
            "tokens_per_second_of_steps": self.tokens / max(self.step, 1e-9),
            "learned_tokens_per_step": self.learned,
            "peak_bytes": self.peak,
            "expected_peak_bytes": self.expected_peak,
            "formats": self.formats,
            "limited_by": self.limit,
            "run_seconds": self.run.seconds,
        }

    def table(self) -> str:
        """The parts with their shares, and advice."""
        whole = max(self.step, 1e-9)
        rows = [
            ("part", "seconds", "share"),
            *((part, f"{each:.3f}", f"{100 * each / whole:.0f} %") for part, each in self.seconds.items()),
            ("a step", f"{self.step:.3f}", "100 %"),
        ]
        rollout = self.tokens / max(self.seconds["rollout"], 1e-9)
        expected = f", {gigabytes(self.expected_peak)} forecast" if self.expected_peak else ""
        lines = {
            "measured": f"the median of {self.steps} steps; the first one took {self.first:.1f} s",
            "sampled": f"{self.tokens:,.0f} tokens a step: {rollout:,.0f} a second of the rollout, "
            f"{self.tokens / whole:,.0f} of the whole step",
            "learned": f"{self.learned:,.0f} tokens a step, prompts included",
            "peak": f"{gigabytes(self.peak)} of MLX's arrays{expected}",
            **({"formats": self.formats} if self.formats else {}),
            "a run": str(self.run),
            "most time": f"{self.limit}; shorter with {self.advice}",
        }
        facts = [f"{name:<12}{value}" for name, value in lines.items()]
        return "\n".join([*aligned(rows, right=range(1, 3)), "", *facts])


class Stepping:
    """A built run that takes its steps without anything being written."""

    def __init__(self, run: Run) -> None:
        train = run.learner.state
        assert train is not None
        run.learner.engine.load(train.old_params, 0)
        self.state = RunState(train=train, micro_batch_tokens=run.config.system.micro_batch_tokens)
        self.run = attrs.evolve(run, learner=attrs.evolve(run.learner, state=None))
        self.steps = TrainSteps(self.run, Diary(Report()))

    def step(self) -> dict[str, float]:
        """The rollouts of an update and all updates that use them: seconds by part, and counts."""
        taken, tokens, learned, columns = self.steps, 0.0, 0.0, 0.0
        while not taken.update_due(self.state):
            experience = taken.roll_out(self.state)
            self.state = taken.accept(self.state, experience, *taken.cut(self.state, experience))
            tokens += experience.sampled_tokens
            learned += _learned(experience.rollout)
            columns += experience.rollout.tokens_bt.shape[1]
        pieces = sum(len(part) for parts in self.state.waiting for part in parts)
        for _ in range(taken.uses):
            sums = taken.gradients(taken.free_sampler(self.state))
            self.state = attrs.evolve(self.state, train=None)
            state, *_ = taken.update(sums)
            self.state = taken.sync(state)
        counts = {"tokens": tokens, "learned": learned, "columns": columns, "micro-batches": pieces}
        return {**taken.times.take(), **counts}


def bench_steps(
    config: Config, *, steps: int = 3, say: Callable[[str], None] = lambda text: None
) -> StepBench:
    """Builds the run of a checked config, runs one step and then `steps` more. Nothing is written.

    A step is the rollouts of an update and all updates that use them.

    Raises UserError as a run does.
    """
    config = attrs.evolve(config, sft=SftConfig())  # steps of GRPO
    machine, start, whole = startup.prepare(config.system.memory_limit_gb, config), time.monotonic(), config
    together = config.optim.gradient_accumulation_steps
    config = attrs.evolve(config, optim=attrs.evolve(config.optim, max_steps=(steps + 1) * together))
    run = build_run(config, machine, say)
    stepping = Stepping(run)
    run = stepping.run
    loading = time.monotonic() - start
    mx.reset_peak_memory()
    rows: list[dict[str, float]] = []
    for number in range(steps + 1):
        say(f"step {number + 1} of {steps + 1}")
        rows.append(stepping.step())
    median = {key: statistics.median(row[key] for row in rows[1:]) for key in rows[0]}
    seconds = {part: median[f"time/{part}"] for part in BENCH_PARTS}
    formats, sampled = stepping.state.formats, (run.learner.policy, stepping.state.train.old_params)
    return StepBench(
        steps=steps,
        first=rows[0]["step_time"],
        seconds=seconds,
        run=RunTime.of(run, whole, loading, rows[0]["step_time"], median),
        advice=advice(max(seconds, key=seconds.__getitem__), run.config),
        step=median["step_time"],
        tokens=median["tokens"],
        learned=median["learned"],
        formats=formats_line(config, formats, *sampled) if formats else "",
        peak=read_memory().peak,
        expected_peak=_expected(run, machine),
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


def _expected(run: Run, machine: startup.Platform) -> int | None:
    """Bytes; None if the model's config lacks what a forecast needs."""
    try:
        sizes = model_sizes(run.config, machine)
    except UserError:
        return None
    longest = max(len(example.tokens) for example in run.data.train)
    total = usable_memory(run.config.system.memory_limit_gb)
    return forecast(run.config, machine, total, prompt=longest, sizes=sizes).nbytes


def _learned(rollout: g.Rollout) -> int:
    return int(np.array(rollout.lengths_b).sum()) + rollout.num_generations * sum(map(len, rollout.prompts))
