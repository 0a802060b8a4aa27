"""Trains Qwen2.5-Coder-0.5B-Instruct on GSM8K here and in TRL, and scores all test problems before
and after.

One command is one run on one GPU. Its figures are written while it runs, and `python -m
benchmarks.evidence.joined` joins several results. Both sides use the same prompts (as the same
tokens), rewards and settings. *Strict* counts the number after `####`, *lenient* the last number of
a completion; both are greedy, on all 1,319 test problems.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import attrs
import click

from benchmarks.evidence.readings import at_grid, over_minutes, share_figure
from benchmarks.evidence.readings import sampler as sampler_figures
from benchmarks.evidence.watched import RATE, RATES, TUNE, Call, every, single_runs, updates, watch
from benchmarks.harness.record import Figure
from benchmarks.harness.runs import Lines
from benchmarks.sides import side_settings, their_command
from runners.config.loading import load_config

CONFIG = Path(__file__).with_suffix(".toml")
PROMPTS = {
    "gsm8k": "Solve the problem step by step. End with a line of #### and the final number.",
    "boxed": r"Please reason step by step, and put your final answer within \boxed{}.",
}
LENIENT_REWARD = "last_number_reward"
TASK = Path(__file__).with_name("tasks.py")
REWARDS = ("correctness_reward_func", f"{TASK}:{LENIENT_REWARD}")
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
        words = {
            "TRL" if self.side == "TRL" else {"full": "full", "lora": "LoRA"}[self.tune]: True,
            self.sampler: self.sampler != "none",
            f"{self.limit} tokens": self.limit != 300,
            f"{self.supervised} supervised": self.supervised > 0,
            self.form: self.form != "gsm8k",
            f"rate {self.rate:g}": True,
        }
        return ", ".join(word for word, differs in words.items() if differs)

    @property
    def settings(self) -> list[str]:
        """Overrides of the config."""
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
            *(["loss.correction=token_truncate"] if self.sampler != "none" else []),
        ]


def scores(lines: Lines) -> list[Figure]:
    """Strict and lenient scores before and after, with curves over minutes, and the share of
    cut-off completions.
    """
    evaluations = [line for line in lines if "em" in line]
    figures = []
    for name, key in (
        ("strict", "em"),
        ("lenient", f"eval/rewards/{LENIENT_REWARD}"),
        ("cut off", "eval/truncated"),
    ):
        found = [line for line in evaluations if key in line]  # TRL's side does not log the last one
        if not found:
            continue
        first, last = found[0], found[-1]
        if not first["update"]:
            figures.append(share_figure(f"{name} before", first[key], first["em_subset"]))
        if last["update"]:
            curve = at_grid([(line["time/elapsed"] / 60, 100 * line[key]) for line in found], 0.1)
            figures.append(share_figure(f"{name} after", last[key], last["em_subset"], curve))
    return figures


def figures_of(lines: Lines) -> list[Figure]:
    """All figures that a log contains so far."""
    quantized = any(line.get("rollout/quantization", "none") != "none" for line in lines)
    left = any(line.get("rollout/fallback") for line in lines)  # its figures would be of two samplers
    of_sampler = sampler_figures(lines) if quantized and not left else []
    return [*scores(lines), *over_minutes(lines), *of_sampler]


@single_runs("gsm8k", packages=("trl", "transformers", "torch"))
@click.option("--side", type=click.Choice(["grpo_fn", "TRL"]), default="grpo_fn", show_default=True)
@TUNE
@click.option("--sampler", default="none", show_default=True, help="The sampler's format, such as affine-4.")
@RATE
@click.option("--limit", default=300, show_default=True, help="Maximum number of tokens in a completion.")
@click.option("--form", type=click.Choice(list(PROMPTS)), default="gsm8k", show_default=True)
@click.option("--supervised", default=0, show_default=True, help="Number of supervised updates before GRPO.")
@updates(160)
@every(40)
def main(
    call: Call,
    side: str,
    tune: str,
    sampler: str,
    rate: float | None,
    limit: int,
    form: str,
    supervised: int,
    updates: int,
    every: int,
) -> Iterator[list[Figure]]:
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
    folder = call.folder(f"gsm8k-{case.name}")
    own = [*case.settings, f"eval.every={every}", call.stopping(), *(QUICK if call.quick else ())]
    settings = call.settings(folder, updates, own)
    if side == "TRL":
        told = side_settings(load_config(str(CONFIG), settings))
        told |= {"together": THEIR_ROWS, "seconds": 60 * call.minutes - 90}
        command = their_command("train", told, folder, call.seed)
    else:
        command = call.command(CONFIG, settings)
    title = f"{case.name}: seed {call.seed}"
    return watch(title, command, folder, figures_of, minutes=call.minutes + 0.5)


if __name__ == "__main__":
    main()
