"""Counts the alarms of healthy runs, and of runs that must become worse.

`python -m tests.campaigns.alarms --out FOLDER` trains the runs of all cases there and counts their alarms. No
healthy run may be called worse; each provoked one must be. Finished runs are only counted again, so you can
interrupt the command and continue it. The cases `sums` and `json` need a pretrained model in GRPO_REAL_MODEL.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import click

from benchmarks.evidence.real_model import CONFIG, TASKS
from benchmarks.harness.runs import REAL_MODEL
from runners.config.loading import load_config
from runners.files.json_files import read_lines
from runners.files.run_files import METRICS
from runners.telemetry.run_watch import Seen, Watch

QUIET = ("checkpoint.every=0", "log.completions=false", "log.report=false")
SHORT = ("optim.max_steps=60", "eval.every=20")
REWARD = """
def brevity(completions, **_):
    return [-len(completion[0]["content"]) / 100 for completion in completions]
"""


@attrs.frozen
class Case:
    """Runs that differ in their seeds."""

    seeds: int
    healthy: bool
    config: str
    settings: tuple[str, ...] = ()
    real: bool = False  # trains the model in GRPO_REAL_MODEL


REAL_SUMS = ("data.source={out}/sums.jsonl", "eval.every=15", *TASKS["sums"], "optim.max_steps=60")
REAL_JSON = ("data.source=embedded", "eval.every=8", *TASKS["JSON form"])
CASES = {
    "quickstart": Case(10, True, "quickstart"),
    "tools": Case(5, True, "quickstart_tools"),
    "gspo": Case(4, True, "quickstart", (*SHORT, "loss.preset=gspo")),
    "dr_grpo": Case(4, True, "quickstart", (*SHORT, "loss.preset=dr_grpo")),
    "minibatches": Case(4, True, "quickstart", (*SHORT, "optim.minibatches=2")),
    "few prompts": Case(3, True, "quickstart", (*SHORT, "optim.batch_size=4")),
    "sums": Case(5, True, str(CONFIG), REAL_SUMS, real=True),
    "json": Case(5, True, str(CONFIG), REAL_JSON, real=True),
    "quickstart, rate x 30": Case(3, False, "quickstart", ("optim.learning_rate=9e-3",)),
    "quickstart, rate x 10": Case(2, False, "quickstart", ("optim.learning_rate=3e-3",)),
    "tools, rate x 30": Case(3, False, "quickstart_tools", ("optim.learning_rate=1.5e-2",)),
    "quickstart, short texts": Case(
        2,
        False,
        "quickstart",
        (*SHORT, 'reward.functions=["{out}/brevity.py:brevity"]', "answer.form=xml"),
    ),
    "sums, rate x 100": Case(2, False, str(CONFIG), (*REAL_SUMS, "optim.learning_rate=1e-3"), real=True),
}


def alarms(folder: Path, settings: Sequence[str], config: str) -> Iterator[tuple[int, str]]:
    """The updates and messages of today's alarms on a run's log."""
    watch = Watch(load_config(config, list(settings)).check(), [])
    seen = Seen()
    for line in read_lines(folder / METRICS):
        known = {*seen.progress.worse}
        seen, _ = watch.see(line, seen, line["update"] if "em_subset" in line else None)
        for name in seen.progress.worse.keys() - known:
            yield line["update"], seen.progress.worse[name]


def write_inputs(out: Path) -> None:
    """The reward for short texts, and sums of two numbers."""
    (out / "brevity.py").write_text(REWARD)
    chance = random.Random(0)
    pairs = [(chance.randrange(1, 100), chance.randrange(1, 100)) for _ in range(4000)]
    rows = [{"question": f"{a} + {b} = ?", "answer": f"#### {a + b}"} for a, b in dict.fromkeys(pairs)]
    (out / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the runs.")
@click.option("--case", "cases", multiple=True, type=click.Choice([*CASES]), help="Only this one.")
@click.option("--seeds", type=int, default=0, help="Seeds of each case [0: as many as it has].")
@click.option("--minutes", type=float, default=0.0, help="Begin no run after these [0: begin all].")
def main(out: Path, cases: Sequence[str], seeds: int, minutes: float) -> None:
    """Train the missing runs, and print a line for each run and kind."""
    out.mkdir(parents=True, exist_ok=True)
    write_inputs(out)
    model = os.environ.get(REAL_MODEL)
    until = time.monotonic() + (60 * minutes or float("inf"))
    told = {True: [0, 0], False: [0, 0]}  # healthy: runs, those with an alarm
    for name in cases or CASES:
        case = CASES[name]
        if case.real and not model:
            click.echo(f"{name}: needs a model in {REAL_MODEL}")
            continue
        for seed in range(seeds or case.seeds):
            place = "-".join(name.replace(",", "").split()) + f"-{seed}"
            settings = [each.replace("{out}", str(out.resolve())) for each in case.settings]
            settings += [*QUIET, *([f"model.path={model}"] if case.real else [])]
            settings += [f"run.seed={seed}", f"run.output_dir={out}", f"run.name={place}"]
            finished = (out / place / "final").is_dir()
            if not finished and time.monotonic() < until:
                flags = [flag for each in settings for flag in ("--set", each)]
                command = "from grpo_entry import run_command; run_command()"
                python = [sys.executable, "-c", command, case.config, *flags, "--overwrite"]
                subprocess.run(python, check=True, stdout=subprocess.DEVNULL)
            elif not finished:
                continue
            found = list(alarms(out / place, settings, case.config))
            told[case.healthy][0] += 1
            told[case.healthy][1] += bool(found)
            click.echo(f"{place}: " + ("; ".join(f"{at}: {line}" for at, line in found) or "nothing"))
    for healthy, (runs, alarmed) in told.items():
        click.echo(f"{'healthy' if healthy else 'provoked'} runs: {runs}, called worse: {alarmed}")
    false, missed = told[True][1], told[False][0] - told[False][1]
    if false or missed:
        raise SystemExit(f"{false} false alarms, {missed} missed")


if __name__ == "__main__":
    main()
