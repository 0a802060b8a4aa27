"""Trains Qwen2.5-Coder-0.5B-Instruct on programs with tests: MBPP and HumanEval before and after
training.

The model trains on 170 problems of MBPP; its reward is the share of a problem's tests that a program passes.
Greedy programs for MBPP's 257 test problems and HumanEval's 164 are scored before and after; a
program is right if it passes all tests. One command is one run on one GPU; `python -m
benchmarks.evidence.joined` joins results.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.evidence.readings import over_minutes, share_figure
from benchmarks.evidence.watched import RATE, RATES, TUNE, Call, every, single_runs, updates, watch
from benchmarks.harness.record import Figure
from benchmarks.harness.runs import Lines
from runners.files.json_files import read_lines
from runners.files.run_files import EVALUATIONS

CONFIG = Path(__file__).with_suffix(".toml")
SETS = {"MBPP": "test.jsonl", "HumanEval": "humaneval.jsonl"}  # of the data's folder
QUICK = ("optim.batch_size=2", "rollout.num_generations=2", "rollout.max_new_tokens=8", "eval.samples=0")


def joined_data(source: Path, target: Path, quick: bool) -> dict[str, int]:
    """Writes train.jsonl, and a test.jsonl with the problems of all sets; returns the number of
    problems of each set.
    """
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / "train.jsonl", target / "train.jsonl")
    counts: dict[str, int] = {}
    held_out: list[str] = []
    for name, file in SETS.items():
        rows = (source / file).read_text(encoding="utf-8").splitlines()[: 2 if quick else None]
        counts[name] = len(rows)
        held_out += rows
    (target / "test.jsonl").write_text("".join(f"{row}\n" for row in held_out), encoding="utf-8")
    return counts


def scores(folder: Path, counts: dict[str, int]) -> list[Figure]:
    """The share of right programs of each set before and after training, with its curve over
    updates.
    """
    right: dict[str, Counter[int]] = {name: Counter() for name in counts}  # update -> programs
    for row in read_lines(folder / EVALUATIONS):
        name = "MBPP" if row["problem"] < counts["MBPP"] else "HumanEval"
        right[name][row["update"]] += row["correct"]
    figures = []
    for name, by_update in right.items():
        shares = [(update, number / counts[name]) for update, number in by_update.items()]
        if shares:
            figures.append(share_figure(f"{name} before", shares[0][1], counts[name]))
        if len(shares) > 1:
            curve = tuple((update, 100 * share) for update, share in shares)
            figures.append(share_figure(f"{name} after", shares[-1][1], counts[name], curve))
    return figures


@single_runs("programs")
@TUNE
@RATE
@updates(60)
@every(20)
def main(call: Call, tune: str, rate: float | None, updates: int, every: int) -> Iterator[list[Figure]]:
    """Train on MBPP, and score all test problems of MBPP and HumanEval before and after."""
    rate = rate or RATES[tune]
    folder = call.folder(f"programs-{tune}-{rate:g}")
    data = folder.with_name(f"{folder.name}-data")
    counts = joined_data(call.data, data, call.quick)
    own = [
        f"model.tune={tune}",
        f"data.source={data}",
        f"optim.learning_rate={rate}",
        f"eval.every={every}",
        call.stopping(),
        *(QUICK if call.quick else ()),
    ]

    def figures_of(lines: Lines) -> list[Figure]:
        return [*scores(folder, counts), *over_minutes(lines)]

    command = call.command(CONFIG, call.settings(folder, updates, own))
    title = f"{'full' if tune == 'full' else 'LoRA'}, rate {rate:g}: seed {call.seed}"
    return watch(title, command, folder, figures_of, minutes=call.minutes + 0.5)


if __name__ == "__main__":
    main()
