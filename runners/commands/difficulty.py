"""`grpo difficulty CONFIG`: how often the model passes each training prompt, for data.curriculum."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from runners.commands.base import HELP, ends_with_a_line
from runners.commands.options import SET, echo_all, flag, option, options, read_config
from runners.errors import UserError
from runners.machine.terminal import aligned, echo

_NOTES = """\
\b
Examples:
  grpo difficulty train.toml
  grpo difficulty train.toml --samples 16 --set data.max_samples=500
  grpo difficulty train.toml --set model.path=outputs/sft/final --out after-sft.jsonl

\b
Sampling and rewards are the run's. A prompt's line is written as soon as its batch is done; the same command
goes on where it was stopped. data.difficulty = FILE uses the result.
"""


@click.command("difficulty", context_settings=HELP, epilog=_NOTES)
@click.argument("config")
@options(
    SET,
    option("--samples", "Completions of each prompt.", click.IntRange(1), 8, show_default=True),
    option("--out=FILE", "The result [OUTPUT_DIR/NAME.difficulty.jsonl of the config].", default=""),
    flag("--overwrite", "Start over; the old file stays as FILE.previous.jsonl."),
)
@ends_with_a_line
def difficulty_command(
    config: str, overrides: Sequence[str], samples: int, out: str, overwrite: bool
) -> None:
    """Measure how often each prompt is passed."""
    loaded = read_config(config, overrides)
    from runners.machine import startup

    machine = startup.prepare(loaded.system.memory_limit_gb)
    from runners.data.curriculum import BANDS
    from runners.evaluation.difficulty import measure_difficulty
    from runners.telemetry.progress import duration_text

    loaded = loaded.check()
    run = loaded.run
    path = Path(out or f"{run.output_dir}/{run.name}.difficulty.jsonl").expanduser()

    def progress(done: int, total: int, seconds: float) -> None:
        rest = f", {duration_text(seconds)} left" if done < total else ""
        echo(f"{done:,} of {total:,} prompts{rest}", err=True)

    found = measure_difficulty(loaded, machine, samples, path, overwrite=overwrite, progress=progress)
    echo_all(found.notices)
    lines = [line for line in found.lines if line["samples"]]
    rates = [line["passes"] / line["samples"] for line in lines]
    if not rates:
        raise UserError(f"{path}: no completion has a reward")
    kinds = {"never passed": sum(rate == 0 for rate in rates)}
    low = 0.0
    for name, high in BANDS.items():
        kinds[f"{name}, {low:.0%} to {min(high, 1):.0%}"] = sum(low <= r < high and 0 < r < 1 for r in rates)
        low = high
    kinds["always passed"] = sum(rate == 1 for rate in rates)
    echo(f"{len(rates):,} prompts; {sum(rates) / len(rates):.1%} of the completions passed")
    rows = [(name, f"{count:,}", f"{count / len(rates):.0%}") for name, count in kinds.items()]
    for line in aligned(rows, right=(1, 2)):
        echo(f"  {line}")
    echo(f"data.difficulty = {path}")
