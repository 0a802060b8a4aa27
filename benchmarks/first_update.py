"""How long does a new user wait for a run's first update, and for the steps after it?

Each run is a separate process on a model folder with random weights and 16 prompts × 8 completions
× 256 tokens: first with all caches empty (*cold*), then again (*warm*). *After loading* counts from
the run's header line, *after the command* from the command. The steps are from the warm runs,
without the first step; their parts are the log's `time/*`. *real* is the pretrained model in the
folder GRPO_REAL_MODEL, 32 × 16 completions, three times warm. *no PyTorch* means that transformers
does not find it.

**What limits it.** Compilation. On CUDA, NVRTC takes 2 to 5 s for each of about twenty programs;
parallel processes compile them while the model loads. On a CPU, g++ compiles 60 programs one after
another, with a header that is compiled once.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from benchmarks.harness.command import benchmark, chosen_of, say
from benchmarks.harness.machine import backend
from benchmarks.harness.measure import Timing
from benchmarks.harness.record import Figure, time_figure
from benchmarks.harness.shapes import write_folder
from benchmarks.quickstart import command_line
from runners.errors import UserError
from runners.profiling import PARTS

COLD_TARGET, WARM_TARGET = 20.0, 6.0  # seconds after the model is loaded
REWARD = """
def letters(completions, **_):
    return [float(len(set(completion[0]["content"]))) for completion in completions]
"""
TRAIN = """
[run]
output_dir = "out"
[model]
path = "{path}"
[data]
source = "rows.jsonl"
[reward]
functions = ["letters.py:letters"]
[optim]
batch_size = {prompts}
max_steps = {updates}
learning_rate = 1e-6
[rollout]
num_generations = {generations}
max_new_tokens = {new}
[eval]
at_start = false
every = 0
samples = 1
[checkpoint]
every = 0
"""


@attrs.frozen(kw_only=True)
class Case:
    """A run: a shape with random weights, the real model, or the quickstart if `model` is empty."""

    model: str = ""
    settings: tuple[str, ...] = ()
    prompts: int = 16
    generations: int = 8
    new: int = 256
    updates: int = 4
    cold_at_most: float | None = COLD_TARGET
    warm_at_most: float | None = WARM_TARGET
    command_at_most: tuple[float | None, float | None] = (None, None)  # cold and warm, after the command
    compiles: bool = True  # what MLX compiled for a CPU before is not used
    colds: int = 1  # cold runs, of which the median counts
    warms: int = 1
    torch: bool = True  # False: PyTorch cannot be found, where it is installed


LORA = ("model.tune=lora", "model.lora={rank=16}")
REAL, REAL_MODEL = "real", "GRPO_REAL_MODEL"  # a case's model, and the variable that names its folder
REAL_GPU = Case(model=REAL, prompts=32, generations=16, updates=3, command_at_most=(25.0, 8.0), warms=3)
REAL_CPU = Case(model=REAL, prompts=2, generations=4, new=64, updates=2, cold_at_most=None, warm_at_most=None)
GPU_CASES = {
    "real, LoRA": attrs.evolve(REAL_GPU, settings=LORA),
    "real, full": REAL_GPU,
    "real, LoRA, no PyTorch": attrs.evolve(REAL_GPU, settings=LORA, torch=False),
    "real, full, no PyTorch": attrs.evolve(REAL_GPU, torch=False),
    "qwen2.5-0.5b, full": Case(model="qwen2.5-0.5b"),
    "qwen2.5-0.5b, LoRA": Case(model="qwen2.5-0.5b", settings=LORA),
    "nanochat-d20, full": Case(model="nanochat-d20"),
}
CPU_CASES = {
    "real, LoRA": attrs.evolve(REAL_CPU, settings=LORA),
    "real, full": REAL_CPU,
    "quickstart": Case(cold_at_most=WARM_TARGET, colds=5),
    "6 × 256, 4 × 8 × 64": Case(model="qwen2-6x256", prompts=4, new=64, cold_at_most=None, warm_at_most=None),
}
QUICK_CASES = {
    "quick": Case(
        model="tiny",
        prompts=2,
        generations=2,
        new=8,
        updates=2,
        cold_at_most=None,
        warm_at_most=None,
        compiles=False,  # a minute and more
    )
}


@attrs.frozen
class Seen:
    """The measurements of one run: seconds since its command, except for `steps`."""

    loaded: float  # the model and the data are there
    first: float  # the first update is done
    steps: tuple[dict[str, Any], ...]  # the log's lines of updates


def run_once(folder: Path, case: Case, name: str) -> Seen:
    """Runs once in `folder`, with the caches of earlier runs. Raises UserError if it fails."""
    if case.model:
        config, settings = "train.toml", case.settings
    else:
        config, settings = "quickstart", (f"optim.max_steps={case.updates}", "eval.at_start=false")
    settings = (*settings, f"run.name={name}", f"run.output_dir={folder / 'out'}")
    caches = {"GRPO_FN_CACHE": folder / "cache"}
    if case.compiles:
        caches["TMPDIR"] = folder / "tmp"
    for path in caches.values():
        path.mkdir(exist_ok=True)
    environment = {**os.environ, **{key: str(path) for key, path in caches.items()}, "PYTHONUNBUFFERED": "1"}
    environment.pop("MLX_PTX_CACHE_DIR", None)
    places = [str(Path(__file__).resolve().parents[1]), *filter(None, sys.path)]
    if not case.torch:
        (folder / "sitecustomize.py").write_text('import sys\nsys.modules["torch"] = None\n')
        places.insert(0, str(folder))
    environment["PYTHONPATH"] = os.pathsep.join(places)
    options = [word for setting in settings for word in ("--set", setting)]
    started, loaded, first, printed = time.perf_counter(), 0.0, 0.0, []
    with subprocess.Popen(
        [*command_line(), config, *options],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            now = time.perf_counter() - started
            printed.append(f"{now:6.1f} {line}")
            loaded = loaded or now * line.startswith("run ")
            first = first or now * line.startswith("update 1/")
    text = "".join(printed)
    if process.returncode or not first:
        raise UserError(f"grpo-run ended with {process.returncode}:\n{text[-4000:]}")
    say(text)
    lines = (folder / "out" / name / "training_log.jsonl").read_text(encoding="utf-8").splitlines()
    steps = tuple(step for step in map(json.loads, lines) if "loss" in step)
    return Seen(loaded, first, steps)


def write_run(folder: Path, case: Case) -> None:
    """The files of a run on random weights: model, data, reward and config."""
    if not case.model:
        return
    path = Path(os.environ.get(REAL_MODEL, "")) if case.model == REAL else folder / "model"
    if case.model != REAL:
        write_folder(path, case.model)
    chance = random.Random(0)
    question = "Ida has {} cards. She sells {} and buys {}. How many are left?"
    rows = [
        {"question": question.format(*(chance.randint(2, 99) for _ in range(3))), "answer": "3"}
        for _ in range(400)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "letters.py").write_text(REWARD)
    sizes = attrs.asdict(case)
    (folder / "train.toml").write_text(TRAIN.format(path=path.resolve(), **sizes))


def measure(title: str, case: Case, folder: Path) -> list[Figure]:
    """A cold run, then a warm one, and the steps of the warm run."""
    write_run(folder, case)
    figures = []
    seen: list[Seen] = []
    for name, runs, target, command in (
        ("cold", case.colds, case.cold_at_most, case.command_at_most[0]),
        ("warm", case.warms, case.warm_at_most, case.command_at_most[1]),
    ):
        seen = []
        for number in range(runs):
            for cache in ("cache", "tmp") if name == "cold" else ():
                shutil.rmtree(folder / cache, ignore_errors=True)
            say(f"{title}: {name}")
            seen.append(run_once(folder, case, f"{name}-{number}"))
        loading = Timing(tuple(each.first - each.loaded for each in seen))
        whole = Timing(tuple(each.first for each in seen))
        figures += [
            time_figure(f"{title}: first update after loading, {name}", loading, at_most=target),
            time_figure(f"{title}: first update after the command, {name}", whole, at_most=command),
        ]
    later = [step for each in seen for step in each.steps[1:]]  # of the warm runs

    def median(key: str) -> float:
        return statistics.median(step[key] for step in later)

    figures.append(Figure(name=f"{title}: step", value=median("step_time"), unit="s", samples=len(later)))
    figures += [Figure(name=f"{title}: {part}", value=median(f"time/{part}"), unit="s") for part in PARTS]
    peak = 1e3 * max(step["memory/peak_gb"] for each in seen for step in each.steps)
    return [
        *figures,
        Figure(name=f"{title}: rollout's tokens", value=median("tokens_per_second"), unit="tokens/s"),
        Figure(name=f"{title}: peak", value=peak, unit="MB"),
    ]


@benchmark("first_update", parts=("chosen",))
@click.option("--case", "chosen", multiple=True, help="Only this one; the others' figures stay.")
def main(quick: bool, chosen: Sequence[str]) -> Iterator[list[Figure]]:
    """Measure a run's first update with empty caches and with full ones, and the steps after it."""
    cases = QUICK_CASES if quick else CPU_CASES if backend() == "cpu" else GPU_CASES
    for title in chosen_of(chosen, cases):
        if cases[title].model == REAL and not os.environ.get(REAL_MODEL):
            say(f"{title}: skipped, because {REAL_MODEL} is not a folder")
            continue
        with tempfile.TemporaryDirectory(prefix="first-update-", ignore_cleanup_errors=True) as name:
            yield measure(title, cases[title], Path(name))


if __name__ == "__main__":
    main()
