"""Few-bit samplers of deep models: does a run that samples from rounded weights come as far?

Models of 20 and of 32 blocks that were taught the packaged problems learn by GRPO. Their sampler has the
learner's weights, or these in 8 or 4 bits; the loss takes the sampler for the learner, or corrects for it.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.evidence.command import ALL_SEEDS, Plan, Trial, evidence, run_trial, values
from benchmarks.evidence.pool import Job, side_by_side
from benchmarks.evidence.readings import AFTER, learning, sampler
from benchmarks.harness.command import say
from benchmarks.harness.machine import backend
from benchmarks.harness.record import Figure
from runners.errors import UserError

LAYERS = (20, 32)
FORMATS = ("full precision", "affine-8", "affine-4", "mxfp4", "nvfp4")
CORRECTIONS = ("none", "token_truncate")
NEAR = 2.0  # points of exact match that a corrected sampler of 4 bits may stay below full precision
LESSONS = (150, 150)  # steps of teaching: clean, and with the habits
QUICK_LAYERS, QUICK_LESSONS = 4, (2, 2)
SETTINGS = (
    "optim.max_steps=200",
    "optim.learning_rate=1e-4",
    "eval.every=40",
    "rollout.mismatch_limit=0",  # a run keeps its format whatever comes of it
    "rollout.calibration=none",
    "checkpoint.every=0",
)
QUICK = ("optim.max_steps=2", "optim.batch_size=2", "eval.samples=8", "eval.every=1")


def case_of(layers: int, form: str, correction: str) -> str:
    """The name of a case."""
    return f"{layers} layers, {form}, {correction}"


# Without rounding there is nothing to correct but the rounding of bfloat16; it is measured all the same.
CASES = [case_of(*each) for each in itertools.product(LAYERS, FORMATS, CORRECTIONS)]
QUICK_CASES = [case_of(QUICK_LAYERS, "affine-4", "token_truncate")]


def summary(figures: Sequence[Figure]) -> list[Figure]:
    """How far each corrected sampler of 4 bits stays below full precision: the means' difference."""

    result = []
    for layers, form in itertools.product(LAYERS, FORMATS[1:]):
        full = values(figures, case_of(layers, FORMATS[0], "none"), AFTER)
        corrected = values(figures, case_of(layers, form, "token_truncate"), AFTER)
        if full and corrected:
            result.append(
                Figure(
                    name=f"{ALL_SEEDS}: {layers} layers, {form}, token_truncate: below full precision",
                    value=max(statistics.fmean(full) - statistics.fmean(corrected), 0.0),
                    unit="points",
                    at_most=NEAR,
                )
            )
    return result


def model_folder(models: Path, layers: int, *, quick: bool) -> Path:
    """Where a taught model is kept: named after its blocks and its lessons."""
    return models / "-".join(map(str, (layers, *(QUICK_LESSONS if quick else LESSONS))))


def taught(plan: Plan, models: Path, depths: Sequence[int]) -> None:
    """Make the models that are not in the folder yet, side by side.

    Raises:
        UserError: one could not be made.
    """
    jobs = []
    for layers in depths:
        folder = model_folder(models, layers, quick=plan.quick)
        if not (folder / "tokenizer_config.json").is_file():  # the last file to be written
            words = [str(folder), str(layers), *folder.name.split("-")[1:]]
            command = [sys.executable, "-u", "-m", "benchmarks.evidence.deep_models", *words]
            jobs.append(Job(name=f"{layers} layers", command=command, printed=plan.work / f"{layers}.txt"))
    if jobs:
        say(f"samplers: teaching models of {' and '.join(job.name for job in jobs)}")
    for job, outcome in side_by_side(jobs, min(plan.jobs, max(len(jobs), 1)), until=plan.until):
        if isinstance(outcome, UserError):
            raise outcome
        say(f"{job.printed.read_text(encoding='utf-8').splitlines()[-1]}, {outcome.seconds:.0f} s")


@evidence("samplers", cases=CASES, quick_cases=QUICK_CASES, seeds="0,1,2", summary=summary)
@click.option(
    "--models",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the taught models: those that are there are used [a temporary one].",
)
@click.option("--teach", is_flag=True, help="Teach the models into --models, and run nothing.")
def main(plan: Plan, models: Path | None, teach: bool) -> Sequence[Trial]:
    """Few-bit samplers of deep models, with and without correction: exact match, mismatch, over seeds."""
    if teach and models is None:
        raise UserError("--teach wants --models FOLDER, where the models stay")
    models = (models or plan.work / "models").resolve()
    depths = list(dict.fromkeys(int(case.partition(" ")[0]) for case in plan.cases))
    started = time.monotonic()
    taught(plan, models, depths)
    say(f"samplers: models are there after {time.monotonic() - started:.0f} s")
    if teach:
        return []
    return [_trial(plan, models, case, seed) for seed in plan.seeds for case in plan.cases]


def _trial(plan: Plan, models: Path, case: str, seed: int) -> Trial:
    depth, form, correction = case.split(", ")
    settings = [
        *SETTINGS,
        *(QUICK if plan.quick else ()),
        f"model.path={model_folder(models, int(depth.partition(' ')[0]), quick=plan.quick)}",
        f"model.dtype={'float32' if backend() == 'cpu' else 'bfloat16'}",
        f"rollout.quantization={'none' if form == FORMATS[0] else form}",
        f"loss.correction={correction}",
    ]
    return run_trial(
        plan, case, seed, "quickstart", settings, lambda lines: [*learning(lines), *sampler(lines)]
    )


if __name__ == "__main__":
    main()
