"""Trains Qwen2.5-Coder-0.5B-Instruct on GSM8K here and in TRL, and scores all test problems before
and after.

One command is one run on one GPU. Its figures are written while it runs, and `python -m
benchmarks.evidence.joined` joins several results. Both sides use the same prompts (as the same
tokens), rewards and settings. *Strict* counts the number after `####`, *lenient* the last number of
a completion; both are greedy, on all 1,319 test problems.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs
import click

from benchmarks.evidence.readings import sampler as sampler_figures
from benchmarks.evidence.watched import (
    Lines,
    WatchedRun,
    over_minutes,
    share_figure,
    step_figures,
    time_limit,
    watch,
)
from benchmarks.harness.machine import backend
from benchmarks.harness.record import Figure
from benchmarks.quickstart import command_line
from benchmarks.sides import side_settings
from runners.commands.base import HELP, ends_with_a_line
from runners.config.loading import load_config

NAME = "gsm8k"
CONFIG = Path(__file__).with_suffix(".toml")
PROMPTS = {
    "gsm8k": "Solve the problem step by step. End with a line of #### and the final number.",
    "boxed": r"Please reason step by step, and put your final answer within \boxed{}.",
}
LENIENT_REWARD = "last_number_reward"
TASK = Path(__file__).with_name("gsm8k_task.py")
REWARDS = ("correctness_reward_func", f"{TASK}:{LENIENT_REWARD}")
RATES = {"full": 2e-6, "lora": 1e-4}  # learning rates
STRICT, LENIENT = "strict", "lenient"
THEIR_ROWS = 16  # completions in a batch of TRL's learner: 256 need more than 80 GB
QUICK = (
    "optim.batch_size=2",
    "rollout.num_generations=2",
    "rollout.max_new_tokens=64",
    "eval.samples=4",
    "data.max_samples=64",
    "data.max_prompt_length=4096",
)


@attrs.frozen(kw_only=True)
class Case:
    """The training method of one run."""

    side: str  # "grpo_fn" or "TRL"
    tune: str
    sampler: str = "none"
    rate: float
    limit: int = 300
    supervised: int = 0  # updates on the data's solutions before GRPO
    form: str = "gsm8k"

    @property
    def name(self) -> str:
        """The first part of the names of its figures."""
        words = ["TRL" if self.side == "TRL" else {"full": "full", "lora": "LoRA"}[self.tune]]
        if self.sampler != "none":
            words.append(self.sampler)
        if self.limit != 300:
            words.append(f"{self.limit} tokens")
        if self.supervised:
            words.append(f"{self.supervised} supervised")
        if self.form != "gsm8k":
            words.append(self.form)
        return ", ".join([*words, f"rate {self.rate:g}"])

    @property
    def settings(self) -> list[str]:
        """Overrides of the config."""
        corrected = ["loss.correction=token_truncate"] if self.sampler != "none" else []
        return [
            f"reward.functions={json.dumps(REWARDS)}",
            f"data.transform={TASK}:with_solution",
            f"sft.updates={self.supervised}",
            f"sft.learning_rate={1e-5 if self.tune == 'full' else 2e-4}",
            f"answer.form={self.form}",
            f"data.system_prompt={PROMPTS[self.form]}",
            f"model.tune={self.tune}",
            f"optim.learning_rate={self.rate}",
            f"rollout.max_new_tokens={self.limit}",
            f"rollout.quantization={self.sampler}",
            *corrected,
        ]


def scores(lines: Lines) -> list[Figure]:
    """Strict and lenient scores before and after, with curves over minutes, and the share of
    cut-off completions.
    """
    evaluations = [line for line in lines if "em" in line]
    if not evaluations:
        return []
    shares = {
        STRICT: [line["em"] for line in evaluations],
        LENIENT: [line[f"eval/rewards/{LENIENT_REWARD}"] for line in evaluations],
        "cut off": [line.get("eval/truncated") for line in evaluations],
    }
    minutes = [line["time/elapsed"] / 60 for line in evaluations]
    problems = evaluations[0]["em_subset"]
    figures = []
    for name, values in shares.items():
        if None in values:  # not told by TRL's side
            continue
        if not evaluations[0]["update"]:
            figures.append(share_figure(f"{name} before", values[0], problems))
        if evaluations[-1]["update"]:
            percent = [100 * value for value in values]
            curve = over_minutes(list(zip(minutes, percent, strict=True)))
            figures.append(share_figure(f"{name} after", values[-1], problems, curve=curve))
    return figures


def figures_of(lines: Lines) -> list[Figure]:
    """All figures that a log contains so far."""
    quantized = any(line.get("rollout/quantization", "none") != "none" for line in lines)
    left = any(line.get("rollout/fallback") for line in lines)  # its figures would be of two samplers
    return [
        *scores(lines),
        *step_figures(lines),
        *(sampler_figures(lines) if quantized and not left else []),
    ]


def own_settings(
    folder: Path, model: str, data: str, seed: int, updates: int, settings: Sequence[str]
) -> list[str]:
    """All overrides of the config of a run in a folder, with `settings` last."""
    return [
        f"model.path={model}",
        f"model.dtype={'float32' if backend() == 'cpu' else 'bfloat16'}",
        f"data.source={data}",
        f"optim.max_steps={updates}",
        f"run.seed={seed}",
        f"run.name={folder.name}",
        f"run.output_dir={folder.parent}",
        "log.report=false",
        *settings,
    ]


def run_command(
    folder: Path,
    model: str,
    data: str,
    seed: int,
    updates: int,
    settings: Sequence[str],
    *,
    resume: bool = False,
) -> list[str]:
    """The command of a run of this project."""
    every = own_settings(folder, model, data, seed, updates, settings)
    words = [word for setting in every for word in ("--set", setting)]
    return [*command_line(), str(CONFIG), *words, "--resume" if resume else "--overwrite"]


@click.command(context_settings=HELP)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder for the result."
)
@click.option("--work", type=click.Path(path_type=Path), help="Folder for the run and its model [OUT/runs].")
@click.option("--model", required=True, help="The model's folder.")
@click.option("--data", required=True, help="Folder with train.jsonl and test.jsonl.")
@click.option("--seed", default=0, show_default=True)
@click.option("--side", type=click.Choice(["grpo_fn", "TRL"]), default="grpo_fn", show_default=True)
@click.option("--tune", type=click.Choice(["full", "lora"]), default="full", show_default=True)
@click.option("--sampler", default="none", show_default=True, help="The sampler's format, such as affine-4.")
@click.option("--rate", type=float, help=f"Learning rate {RATES}.")
@click.option("--limit", default=300, show_default=True, help="Maximum number of tokens in a completion.")
@click.option("--form", type=click.Choice(list(PROMPTS)), default="gsm8k", show_default=True)
@click.option(
    "--supervised",
    default=0,
    show_default=True,
    help="Number of updates on the data's solutions before GRPO.",
)
@click.option(
    "--updates",
    default=160,
    show_default=True,
    help="Number of updates over which the learning rate falls to 0.",
)
@click.option("--every", default=40, show_default=True, help="Number of updates between evaluations.")
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
    data: str,
    seed: int,
    side: str,
    tune: str,
    sampler: str,
    rate: float | None,
    limit: int,
    form: str,
    supervised: int,
    updates: int,
    every: int,
    minutes: float,
    more: Sequence[str],
    resume: bool,
    quick: bool,
) -> None:
    """Train on GSM8K, and score all test problems before and after."""
    case = Case(
        side=side,
        tune=tune,
        sampler=sampler,
        rate=rate or RATES[tune],
        limit=limit,
        supervised=supervised,
        form=form,
    )
    folder = (
        work or out / "runs"
    ).resolve() / f"{NAME}-{case.name.replace(', ', '-').replace(' ', '-')}-{seed}"
    settings = [
        *case.settings,
        f"eval.every={every}",
        time_limit(minutes),
        *(QUICK if quick else ()),
        *more,
    ]
    updates = 2 if quick else updates
    if side == "TRL":
        settings = own_settings(folder, model, data, seed, updates, settings)
        told = side_settings(load_config(str(CONFIG), settings))
        told |= {"together": THEIR_ROWS, "seconds": 60 * minutes - 90}
        folder.parent.mkdir(parents=True, exist_ok=True)
        given = folder.with_suffix(".json")
        given.write_text(json.dumps(told), encoding="utf-8")
        command = [sys.executable, "-m", "benchmarks.sides", "train", str(given), str(folder), str(seed)]
    else:
        command = run_command(folder, model, data, seed, updates, settings, resume=resume)
    run = WatchedRun(
        benchmark=NAME,
        title=f"{case.name}: seed {seed}",
        command=command,
        folder=folder,
        read=figures_of,
        packages=("trl", "transformers", "torch") if side == "TRL" else (),
    )
    watch(run, out, minutes=minutes + 0.5, quick=quick)


if __name__ == "__main__":
    main()
