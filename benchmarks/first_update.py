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

import os
import random
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks.harness.command import CASE, benchmark, chosen_of, of_backend, say
from benchmarks.harness.record import Figure, sample_figure
from benchmarks.harness.runs import REAL_MODEL, Job, finish, placed, run_command, step_lines
from benchmarks.harness.shapes import Sizes, write_run
from runners.errors import UserError
from runners.profiling import PARTS

QUESTION = "Ida has {} cards. She sells {} and buys {}. How many are left?"
COLD_TARGET, WARM_TARGET = 20.0, 6.0  # seconds after the model is loaded


@attrs.frozen(kw_only=True)
class Case:
    """A run: a shape with random weights, the real model, or the quickstart if `model` is empty."""

    model: str = ""
    settings: tuple[str, ...] = ()
    prompts: int = 16
    generations: int = 8
    new: int = 256
    updates: int = 4
    at_most: tuple[float | None, float | None] = (COLD_TARGET, WARM_TARGET)  # after loading: cold, warm
    command_at_most: tuple[float | None, float | None] = (None, None)  # after the command
    compiles: bool = True  # what MLX compiled for a CPU before is not used
    runs: tuple[int, int] = (1, 1)  # cold and warm, of which the medians count
    torch: bool = True  # False: PyTorch cannot be found, where it is installed


LORA = ("model.tune=lora", "model.lora={rank=16}")
NONE = (None, None)
REAL = "real"
REAL_GPU = Case(model=REAL, prompts=32, generations=16, updates=3, command_at_most=(25.0, 8.0), runs=(1, 3))
REAL_CPU = Case(model=REAL, prompts=2, generations=4, new=64, updates=2, at_most=NONE)
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
    "quickstart": Case(at_most=(WARM_TARGET, WARM_TARGET), runs=(5, 1)),
    "6 × 256, 4 × 8 × 64": Case(model="qwen2-6x256", prompts=4, new=64, at_most=NONE),
}
SMALL = Case(model="tiny", prompts=2, generations=2, new=8, updates=2, at_most=NONE, compiles=False)
QUICK_CASES = {"quick": SMALL}  # compiling would take a minute and more


@attrs.frozen
class Seen:
    """The measurements of one run: seconds since its command, except for `steps`."""

    loaded: float  # the model and the data are there
    first: float  # the first update is done
    steps: tuple[dict[str, Any], ...]  # the log's lines of updates


def run_once(folder: Path, case: Case, name: str, title: str) -> Seen:
    """Runs once in `folder`, with the caches of earlier runs. Raises UserError if it fails."""
    run = folder / "out" / name
    own = ["optim.learning_rate=1e-6", "optim.schedule=cosine"] if case.model else ["eval.at_start=false"]
    settings = [f"optim.max_steps={case.updates}", *own, *case.settings, *placed(run)]
    caches = {"GRPO_FN_CACHE": folder / "cache"}
    if case.compiles:
        caches["TMPDIR"] = folder / "tmp"
    for path in caches.values():
        path.mkdir(exist_ok=True)
    environment: dict[str, str | None] = {key: str(path) for key, path in caches.items()}
    environment["MLX_PTX_CACHE_DIR"] = None
    if not case.torch:
        (folder / "sitecustomize.py").write_text('import sys\nsys.modules["torch"] = None\n')
        environment["PYTHONPATH"] = str(folder)
    seen: dict[str, float] = {}

    def heard(seconds: float, line: str) -> None:
        say(f"{seconds:6.1f} {line}")
        for start in ("run ", "update 1/"):
            if line.startswith(start):
                seen.setdefault(start, seconds)

    config = str(folder / "train.toml") if case.model else "quickstart"
    command = run_command(config, settings)
    printed = folder / f"{name}.txt"
    finish(Job(name=title, command=command, printed=printed, environment=environment, heard=heard))
    if len(seen) < 2:
        raise UserError(f"{title}: expected a header and a first update, found {sorted(seen)}")
    return Seen(seen["run "], seen["update 1/"], tuple(step_lines(run)))


def measure(title: str, case: Case, folder: Path) -> list[Figure]:
    """A cold run, then a warm one, and the steps of the warm run."""
    if case.model:
        model = os.environ[REAL_MODEL] if case.model == REAL else case.model
        chance = random.Random(0)
        questions = [QUESTION.format(*(chance.randint(2, 99) for _ in range(3))) for _ in range(400)]
        sizes = Sizes(case.prompts, case.generations, case.new)
        write_run(folder, model, questions, sizes, plain=False)
    figures = []
    seen: list[Seen] = []
    for place, name in enumerate(("cold", "warm")):
        seen = []
        for number in range(case.runs[place]):
            for cache in ("cache", "tmp") if name == "cold" else ():
                shutil.rmtree(folder / cache, ignore_errors=True)
            say(f"{title}: {name}")
            seen.append(run_once(folder, case, f"{name}-{number}", title))
        figures += [
            sample_figure(
                f"{title}: first update after loading, {name}",
                (each.first - each.loaded for each in seen),
                "s",
                at_most=case.at_most[place],
            ),
            sample_figure(
                f"{title}: first update after the command, {name}",
                (each.first for each in seen),
                "s",
                at_most=case.command_at_most[place],
            ),
        ]
    later = [step for each in seen for step in each.steps[1:]]  # of the warm runs

    def median(name: str, key: str, unit: str) -> Figure:
        value = statistics.median(step[key] for step in later)
        return Figure(f"{title}: {name}", value, unit)

    peak = 1e3 * max(step["memory/peak_gb"] for each in seen for step in each.steps)
    return [
        *figures,
        attrs.evolve(median("step", "step_time", "s"), samples=len(later)),
        *(median(part, f"time/{part}", "s") for part in PARTS),
        median("rollout's tokens", "tokens_per_second", "tokens/s"),
        Figure(f"{title}: peak", peak, "MB"),
    ]


@benchmark("first_update", parts=("chosen",))
@CASE
def main(quick: bool, chosen: Sequence[str]) -> Iterator[list[Figure]]:
    """Measure a run's first update with empty caches and with full ones, and the steps after it."""
    cases = of_backend(quick, QUICK_CASES, CPU_CASES, GPU_CASES)
    for title in chosen_of(chosen, cases):
        if cases[title].model == REAL and not os.environ.get(REAL_MODEL):
            say(f"{title}: skipped, because {REAL_MODEL} is not a folder")
            continue
        with tempfile.TemporaryDirectory(prefix="first-update-", ignore_cleanup_errors=True) as name:
            yield measure(title, cases[title], Path(name))


if __name__ == "__main__":
    main()
