"""Defines commands that examine a config before its run: `grpo check` shows prompts and rewards,
`grpo difficulty` measures pass rates, `grpo plan` predicts memory, and `grpo bench` measures time.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING

import click

from runners.commands.base import command, flag, option
from runners.commands.options import SET, echo_all, open_config
from runners.errors import UserError, show
from runners.machine.terminal import aligned, echo, echo_text

if TYPE_CHECKING:
    from runners.data.prompts import Example
    from runners.evaluation.completions import Completion
    from runners.evaluation.reward_check import RewardCheck


@command(
    "check",
    click.argument("config"),
    SET,
    option(
        "--problems",
        "Number of problems whose answers are scored.",
        click.IntRange(1),
        8,
        show_default=True,
    ),
    option(
        "--sample",
        "Load the model and show a completion for this many problems.",
        click.IntRange(0),
        0,
    ),
    notes="""\
\b
Examples:
  grpo check train.toml
  grpo check train.toml --sample 4

\b
The rewards score the reference answers of the first problems, and bad answers: a wrong answer, the
reference answer without its format, the format without an answer, a completion that is cut off
before the answer, and an empty one. With answer.form = "none", they score the plain reference
answer; without reference answers, they score neutral texts. The first episode of an environment is
started. The model's weights are loaded only with --sample.
""",
)
def check_command(config: str, overrides: Sequence[str], problems: int, sample: int) -> None:
    """Show prompts and rewards before training."""
    loaded, machine = open_config(config, overrides)
    from runners.evaluation.reward_check import check_rewards

    _show(check_rewards(loaded, problems=problems), sample)
    if sample:
        from runners.evaluation.training_prompts import sample_completions

        completions, warnings = sample_completions(loaded, machine, sample)
        _show_sampled(completions, warnings)


def _show(checked: "RewardCheck", sample: int) -> None:
    part = f" of {checked.held_out:,}" if checked.evaluation < checked.held_out else ""
    echo(
        f"data           {checked.train:,} problems to train on, "
        f"{checked.evaluation:,}{part} held out"
    )
    lengths = checked.lengths
    median = round(statistics.median(lengths))
    echo(f"prompt tokens  {lengths[0]} to {lengths[-1]}, median {median}")
    echo("first prompt")
    echo_text(indent(checked.prompt.rstrip("\n"), "  | ", lambda line: True))
    for name, tokens in checked.images:
        echo(f"  image {name}: {tokens} tokens")
    if checked.rewards and checked.knows_right:
        echo("mean rewards")
        rows = [("", *checked.kinds)]
        for name, values_an in zip(checked.rewards, checked.values_kan, strict=True):
            rows.append((name, *map(_mean, values_an)))
        for line in aligned(rows, right=range(1, len(rows[0]))):
            echo(f"  {line}")
    elif checked.rewards:
        more = "" if sample else "; --sample 4 shows real completions"
        echo(f"no correct completion is known{more}")
    for warning in checked.warnings:
        echo(f"warning: {warning}")


def _show_sampled(
    completions: "Sequence[tuple[Example, Completion]]", warnings: Sequence[str]
) -> None:
    """Prints sampled completions: the text, the extracted answer, and each reward."""
    for number, (example, one) in enumerate(completions, 1):
        echo(
            f"completion {number} of {len(completions)}, {one.tokens} tokens, ended by {one.finish}"
        )
        echo_text(indent(one.text.rstrip("\n"), "  + ", lambda line: True))
        if one.right is not None:
            verdict = "right" if one.right else f"wrong; the reference answer is {example.answer}"
            answer = "nothing" if one.answer is None else show(one.answer)
            echo(f"  read as the answer  {answer}  ({verdict})")
        for name, value in one.rewards.items():
            echo(f"  {name}  {'none' if value is None else f'{value:.3g}'}")
    for warning in warnings:
        echo(f"warning: {warning}")


def _mean(values) -> str:
    known = [value for value in values.tolist() if value == value]  # NaN means no reward
    return f"{sum(known) / len(known):.3g}" if known else "none"


@command(
    "difficulty",
    click.argument("config"),
    SET,
    option("--samples", "Completions per prompt.", click.IntRange(1), 8, show_default=True),
    option("--out=FILE", "File for the results [OUTPUT_DIR/NAME.difficulty.jsonl].", default=""),
    flag("--overwrite", "Start over; the old file is kept as FILE.previous.jsonl."),
    notes="""\
\b
Examples:
  grpo difficulty train.toml
  grpo difficulty train.toml --samples 16 --set data.max_samples=500
  grpo difficulty train.toml --set model.path=outputs/sft/final --out after-sft.jsonl

\b
Sampling and rewards are the same as in the run. Results are written after every batch, so that the
same command resumes where it was stopped. Set data.difficulty = FILE to use the result.
""",
)
def difficulty_command(
    config: str, overrides: Sequence[str], samples: int, out: str, overwrite: bool
) -> None:
    """Measure the pass rate of each prompt."""
    loaded, machine = open_config(config, overrides)
    from runners.data.curriculum import BANDS
    from runners.evaluation.training_prompts import measure_difficulty
    from runners.telemetry.report import duration_text

    usual = f"{loaded.run.output_dir}/{loaded.run.name}.difficulty.jsonl"
    path = Path(out or usual).expanduser()

    def progress(done: int, total: int, seconds: float) -> None:
        rest = f", {duration_text(seconds)} left" if done < total else ""
        echo(f"{done:,} of {total:,} prompts{rest}", err=True)

    measured, notices = measure_difficulty(
        loaded, machine, samples, path, overwrite=overwrite, progress=progress
    )
    echo_all(notices)
    rates = [line["passes"] / line["samples"] for line in measured if line["samples"]]
    if not rates:
        raise UserError(f"{path}: no completion has a reward")
    kinds = {"never passed": sum(rate == 0 for rate in rates)}
    low = 0.0
    for name, high in BANDS.items():
        kinds[f"{name}, {low:.0%} to {min(high, 1):.0%}"] = sum(
            low <= r < high and 0 < r < 1 for r in rates
        )
        low = high
    kinds["always passed"] = sum(rate == 1 for rate in rates)
    echo(f"{len(rates):,} prompts; {sum(rates) / len(rates):.1%} of the completions passed")
    rows = [("", name, f"{count:,}", f"{count / len(rates):.0%}") for name, count in kinds.items()]
    for line in aligned(rows, right=(2, 3)):
        echo(line)
    echo(f"data.difficulty = {path}")


@command(
    "plan",
    click.argument("config"),
    SET,
    flag("--json as as_json", "Print the figures as JSON, in bytes."),
    option(
        "--ranks",
        "Number of mlx.launch processes; memory is shown per process.",
        click.IntRange(1),
        1,
    ),
    notes="""\
\b
Exit codes: 0 the run fits; 2 it does not fit, or the config, the data or the model must be changed.
""",
)
def plan_command(config: str, overrides: Sequence[str], as_json: bool, ranks: int) -> None:
    """Predict how much memory a run needs.

    For each phase of a step, shows the memory for weights, optimizer, activations and caches. Compares
    the peak with this machine's memory, and shows the largest batch that fits. Reads only config.json and
    the headers of the weights, and the data's longest prompt if data and tokenizer are on this machine.
    """
    loaded, machine = open_config(config, overrides)
    from runners.memory.plan import make_plan

    text, problem = make_plan(loaded, machine, as_json=as_json, ranks=ranks)
    echo_text(text)
    if problem:
        raise UserError(problem)


@command(
    "bench",
    click.argument("config"),
    SET,
    option("--steps", "Number of steps to measure.", click.IntRange(1), 3, show_default=True),
    flag("--json as as_json", "Print the figures as JSON."),
    notes="""\
\b
Examples:
  grpo bench train.toml
  grpo bench train.toml --set optim.batch_size=32 --steps 5
  grpo bench quickstart --json

\b
The first step includes compilation and is shown separately. A step consists of the rollouts for an
update and all updates that use them. Evaluations, checkpoints and logs are not measured.
""",
)
def bench_command(config: str, overrides: Sequence[str], steps: int, as_json: bool) -> None:
    """Measure the time of each part of a step."""
    checked, machine = open_config(config, overrides)
    echo_all(machine.notices)
    from runners.profiling import bench_steps, bench_table
    from runners.telemetry.report import PlainReport

    found = bench_steps(checked, steps=steps, report=PlainReport(sys.stderr))
    echo_text(json.dumps(found, indent=1) if as_json else bench_table(found))
