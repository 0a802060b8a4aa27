"""`grpo check`: shows what a run would train on, before it is started."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from runners.commands.base import HELP, ends_with_a_line
from runners.commands.options import SET, option, options, read_config
from runners.errors import show
from runners.machine.terminal import aligned, echo

if TYPE_CHECKING:
    from runners.evaluation.reward_check import RewardCheck
    from runners.evaluation.sampled_check import Sampled

_NOTES = """\
\b
Examples:
  grpo check train.toml
  grpo check train.toml --sample 4
  grpo check train.toml --form '\\boxed{{answer}}'

\b
The rewards score the first problems' gold answers, and bad ones: a wrong answer, the gold one without its
form, the form without an answer, one cut off before the answer, and nothing. With answer.form = "none" they
score the bare gold answer, and without gold answers neutral texts. An
environment's first episode is begun. No weights are loaded, except the model's with --sample.
"""


@click.command("check", context_settings=HELP, epilog=_NOTES)
@click.argument("config")
@options(
    SET,
    option("--form=TEXT", "A right completion, with {answer} in it [that of answer.form].", default=""),
    option("--problems", "Problems whose answers are scored.", click.IntRange(1), 8, show_default=True),
    option("--sample", "Load the model, and show a completion of so many problems.", click.IntRange(0), 0),
)
@ends_with_a_line
def check_command(config: str, overrides: Sequence[str], form: str, problems: int, sample: int) -> None:
    """Look at prompts and rewards before training."""
    loaded = read_config(config, overrides)
    from runners.machine import startup

    machine = startup.prepare(loaded.system.memory_limit_gb)
    from runners.evaluation.reward_check import check_rewards

    loaded = loaded.check()
    _show(check_rewards(loaded, form=form.replace("\\n", "\n"), problems=problems), sample)
    if sample:
        from runners.evaluation.sampled_check import sample_completions

        _show_sampled(sample_completions(loaded, machine, sample))


def _show(checked: RewardCheck, sample: int) -> None:
    low, high = checked.lengths[0], checked.lengths[-1]
    echo(f"tokenizer      {checked.tokenizer}")
    part = f" of {checked.held_out:,}" if checked.evaluation < checked.held_out else ""
    measured = f"{checked.evaluation:,}{part} held out"
    echo(f"data           {checked.train:,} problems to train on, {measured}")
    echo(f"prompt tokens  {low} to {high}, median {round(statistics.median(checked.lengths))}")
    echo("first prompt")
    for line in checked.prompt.rstrip("\n").split("\n"):
        echo(f"  | {line}")
    for name, tokens in checked.images:
        echo(f"  image {name}: {tokens} tokens")
    if checked.rewards and checked.knows_right:
        _show_rewards(checked)
    elif checked.rewards:
        echo(f"no right completion is known{'' if sample else '; --sample 4 shows real ones'}")
    for warning in checked.warnings:
        echo(f"warning: {warning}")


def _show_sampled(sampled: Sampled) -> None:
    """Shows real completions: the text, what was read from it as the answer, and each reward."""
    for number, (example, one) in enumerate(sampled.completions, 1):
        echo(f"completion {number} of {len(sampled.completions)}, {one.tokens} tokens, ended by {one.finish}")
        for line in one.text.rstrip("\n").split("\n"):
            echo(f"  + {line}")
        if one.right is not None:
            verdict = "right" if one.right else f"wrong, the gold answer is {example.answer}"
            answer = "nothing" if one.answer is None else show(one.answer)
            echo(f"  read as the answer  {answer}  ({verdict})")
        for name, value in one.rewards.items():
            echo(f"  {name}  {'none' if value is None else f'{value:.3g}'}")
    for warning in sampled.warnings:
        echo(f"warning: {warning}")


def _show_rewards(checked: RewardCheck) -> None:
    echo("mean rewards")
    rows = [
        (name, *map(_mean, values_an))
        for name, values_an in zip(checked.rewards, checked.values_kan, strict=True)
    ]
    for line in aligned([("", *checked.kinds), *rows], right=range(1, len(checked.kinds) + 1)):
        echo(f"  {line}")


def _mean(values) -> str:
    known = [value for value in values.tolist() if value == value]  # NaN: no reward
    return f"{sum(known) / len(known):.3g}" if known else "none"
