"""Trains Qwen2.5-Coder-0.5B-Instruct on programs with tests: MBPP and HumanEval before and after
training.

The model trains on 170 problems of MBPP; its reward is the share of a problem's tests that a program passes.
Greedy programs for MBPP's 257 test problems and HumanEval's 164 are scored before and after; a
program is right if it passes all tests. One command is one run on one GPU; `python -m
benchmarks.evidence.joined` joins results.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from benchmarks.evidence.watched import (
    Lines,
    WatchedRun,
    share_figure,
    step_figures,
    time_limit,
    watch,
)
from benchmarks.harness.machine import backend
from benchmarks.harness.record import Figure
from benchmarks.quickstart import command_line
from runners.commands.base import HELP, ends_with_a_line

NAME = "programs"
CONFIG = Path(__file__).with_suffix(".toml")
SETS = {"MBPP": "test.jsonl", "HumanEval": "humaneval.jsonl"}  # of the data's folder
RATES = {"full": 2e-6, "lora": 1e-4}
QUICK = (
    "optim.batch_size=2",
    "rollout.num_generations=2",
    "rollout.max_new_tokens=8",
    "eval.samples=0",
)


def joined_data(source: Path, target: Path, quick: bool) -> dict[str, int]:
    """Writes train.jsonl, and a test.jsonl with the problems of all sets; returns the number of
    problems of each set.
    """
    target.mkdir(parents=True, exist_ok=True)
    train = (source / "train.jsonl").read_text(encoding="utf-8")
    (target / "train.jsonl").write_text(train, encoding="utf-8")
    counts: dict[str, int] = {}
    held_out: list[str] = []
    for name, file in SETS.items():
        rows = (source / file).read_text(encoding="utf-8").splitlines()
        rows = rows[:2] if quick else rows
        counts[name] = len(rows)
        held_out += rows
    (target / "test.jsonl").write_text("".join(f"{row}\n" for row in held_out), encoding="utf-8")
    return counts


def scores(folder: Path, counts: dict[str, int]) -> list[Figure]:
    """The share of right programs of each set before and after training, with its curve over
    updates.
    """
    path = folder / "evaluations.jsonl"
    if not path.is_file():
        return []
    right: dict[str, dict[int, int]] = {name: {} for name in counts}  # set -> update -> programs
    for line in path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines():
        row = json.loads(line)
        name = "MBPP" if row["problem"] < counts["MBPP"] else "HumanEval"
        right[name].setdefault(row["update"], 0)
        right[name][row["update"]] += row["correct"]
    figures = []
    for name, by_update in right.items():
        shares = [(update, number / counts[name]) for update, number in by_update.items()]
        if shares:
            figures.append(share_figure(f"{name} before", shares[0][1], counts[name]))
        if len(shares) > 1:
            curve = [(update, 100 * share) for update, share in shares]
            figures.append(share_figure(f"{name} after", shares[-1][1], counts[name], curve=curve))
    return figures


def figures_of(folder: Path, counts: dict[str, int], lines: Lines) -> list[Figure]:
    """All figures of a run so far."""
    return [*scores(folder, counts), *step_figures(lines)]


@click.command(context_settings=HELP)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder for the result."
)
@click.option("--work", type=click.Path(path_type=Path), help="Folder for the run and its model [OUT/runs].")
@click.option("--model", required=True, help="The model's folder.")
@click.option(
    "--data",
    required=True,
    type=click.Path(path_type=Path, exists=True),
    help="Folder with train.jsonl, test.jsonl and humaneval.jsonl.",
)
@click.option("--seed", default=0, show_default=True)
@click.option("--tune", type=click.Choice(["full", "lora"]), default="full", show_default=True)
@click.option("--rate", type=float, help=f"Learning rate {RATES}.")
@click.option(
    "--updates",
    default=60,
    show_default=True,
    help="Number of updates over which the learning rate falls to 0.",
)
@click.option("--every", default=20, show_default=True, help="Number of updates between evaluations.")
@click.option("--minutes", default=8.5, show_default=True, help="Training stops in time for the last scores.")
@click.option("--set", "more", multiple=True, help="SECTION.KEY=VALUE, an override of the config.")
@click.option(
    "--resume", is_flag=True, help="Resume from the run's last checkpoint (--set checkpoint.every=…)."
)
@click.option("--quick", is_flag=True, help="Two updates with a few tokens, to show that the command works.")
@ends_with_a_line
def main(
    out: Path,
    work: Path | None,
    model: str,
    data: Path,
    seed: int,
    tune: str,
    rate: float | None,
    updates: int,
    every: int,
    minutes: float,
    more: Sequence[str],
    resume: bool,
    quick: bool,
) -> None:
    """Train on MBPP, and score all test problems of MBPP and HumanEval before and after."""
    rate = rate or RATES[tune]
    case = f"{'full' if tune == 'full' else 'LoRA'}, rate {rate:g}"
    place = (work or out / "runs").resolve()
    folder = place / f"{NAME}-{tune}-{rate:g}-{seed}"
    counts = joined_data(data, place / f"{folder.name}-data", quick)
    settings = [
        f"model.path={model}",
        f"model.dtype={'float32' if backend() == 'cpu' else 'bfloat16'}",
        f"model.tune={tune}",
        f"data.source={place / f'{folder.name}-data'}",
        f"optim.learning_rate={rate}",
        f"optim.max_steps={2 if quick else updates}",
        f"eval.every={every}",
        f"run.seed={seed}",
        f"run.name={folder.name}",
        f"run.output_dir={place}",
        "log.report=false",
        time_limit(minutes),
        *(QUICK if quick else ()),
        *more,
    ]
    words = [word for setting in settings for word in ("--set", setting)]
    run = WatchedRun(
        benchmark=NAME,
        title=f"{case}: seed {seed}",
        command=[*command_line(), str(CONFIG), *words, "--resume" if resume else "--overwrite"],
        folder=folder,
        read=partial(figures_of, folder, counts),
    )
    watch(run, out, minutes=minutes + 0.5, quick=quick)


if __name__ == "__main__":
    main()
