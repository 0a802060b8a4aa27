"""What does a Mac do: the quickstart, sampling and steps of two models, and memory as predicted and used?

One command for everybody who has a Mac, of at most 20 minutes. The result has no names or paths.

- *quickstart*: a whole run, from command to end
- *Qwen3-0.6B, 4 bits, 4 × 256*: one prompt × 4 completions × 256 tokens, LoRA on a packed base. On an M4 Max,
  mlx-lm-lora was reported to sample 558 tokens/s and take .412 steps/s in 5.3 GB: the targets on this chip.
- *Qwen2.5-0.5B, bf16* and *affine-4*: 2 prompts × 8 × 128, LoRA; *affine-4* samples with packed weights

Each model comes from the Hub, or has random weights of its shape if the Hub cannot be reached, with a note.
Medians leave out the first update, which compiles.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.harness.command import benchmark, say
from benchmarks.harness.machine import machine
from benchmarks.harness.record import Figure, sample_figure
from benchmarks.harness.shapes import model_config
from benchmarks.memory import WITHIN, Case, outcome
from benchmarks.memory import figures_of as memory_figures
from benchmarks.quickstart import QUICK, figures_of, run_seed
from runners.errors import UserError
from runners.models.folders import resolve_model

STEPS = 6  # updates of each model
TARGET_CHIP = "Apple M4 Max"
QUICKSTART = "quickstart"
QWEN3 = "Qwen3-0.6B, 4 bits, 4 × 256"
LORA = ['model.tune="lora"']
LARGE = [*LORA, "optim.batch_size=2", "rollout.num_generations=8", "rollout.max_new_tokens=128"]
PACKED = ["rollout.quantization=affine-4", "rollout.storage=packed", "loss.correction=token_truncate"]
TINY = {
    "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


@attrs.frozen(kw_only=True)
class Model:
    """A run on a model of the Hub, or on random weights of its shape."""

    hub: str
    shape: Mapping[str, Any]
    settings: Sequence[str]
    at_least: Mapping[str, float] = attrs.field(factory=dict)  # on TARGET_CHIP
    most_mb: float | None = None  # likewise

    def case(self, source: str | None, quick: bool) -> Case:
        """The run; `source` None: random weights."""
        if quick:
            shape = {**self.shape, **TINY} | ({"head_dim": 32} if "head_dim" in self.shape else {})
            small = [*self.settings, "optim.batch_size=1", "rollout.num_generations=4"]
            return Case(model=shape, words=4, settings=[*small, "rollout.max_new_tokens=8"])
        return Case(model=source or self.shape, words=60, settings=self.settings)


HALF_SHAPE = model_config(
    "qwen2", 24, 896, 151936, intermediate_size=4864, num_attention_heads=14, torch_dtype="bfloat16"
)
QWEN3_SHAPE = model_config(
    "qwen3", 28, 1024, 151936, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8,
    head_dim=128, torch_dtype="bfloat16", quantization={"group_size": 64, "bits": 4},
)  # fmt: skip
MODELS = {
    QWEN3: Model(
        hub="mlx-community/Qwen3-0.6B-4bit",
        shape=QWEN3_SHAPE,
        settings=[*LORA, "optim.batch_size=1", "rollout.num_generations=4", "rollout.max_new_tokens=256"],
        at_least={"sampling": 558.0, "steps": 0.412},
        most_mb=5300.0,
    ),
    "Qwen2.5-0.5B, bf16": Model(hub="Qwen/Qwen2.5-0.5B-Instruct", shape=HALF_SHAPE, settings=LARGE),
    "Qwen2.5-0.5B, affine-4": Model(
        hub="Qwen/Qwen2.5-0.5B-Instruct", shape=HALF_SHAPE, settings=[*LARGE, *PACKED]
    ),
}


def model_figures(name: str, model: Model, *, quick: bool, randomly: bool) -> list[Figure]:
    """Sampling, steps, and memory as measured and as predicted."""
    source = None if quick or randomly else _on_the_hub(model.hub)
    found = outcome(model.case(source, quick), steps=3 if quick else STEPS)
    note = "" if source else "random weights"
    least = model.at_least
    sampled = [each["tokens_per_second"] for each in found.updates[1:]]
    stepped = [1 / each["step_time"] for each in found.updates[1:]]
    peak, *predicted = memory_figures(name, found, None if quick else WITHIN)
    judged = [
        sample_figure(f"{name}: sampling", sampled, "tokens/s", at_least=least.get("sampling"), note=note),
        sample_figure(f"{name}: steps", stepped, "steps/s", at_least=least.get("steps"), note=note),
        attrs.evolve(peak, at_most=model.most_mb),
    ]
    if quick or str(machine()["cpu"]) != TARGET_CHIP:
        judged = [figure.unjudged() for figure in judged]
    return [*judged, *predicted]


def _on_the_hub(name: str) -> str | None:
    try:
        return str(resolve_model(name))
    except UserError as error:
        say(f"{error}; taking random weights of its shape")
        return None


def quickstart_figures(quick: bool) -> list[Figure]:
    """A whole run in a separate process."""
    with tempfile.TemporaryDirectory(prefix="quickstart-") as work:
        folder = Path(work) / QUICKSTART
        usage = run_seed(QUICKSTART, 0, folder, QUICK if quick else ())
        return figures_of(QUICKSTART, folder, usage, judged=not quick)


@benchmark("mac")
@click.option("--random", "randomly", is_flag=True, help="Random weights only: nothing is downloaded.")
@click.option("--minutes", default=20.0, show_default=True, help="No part begins later than this.")
def main(quick: bool, randomly: bool, minutes: float) -> Iterator[Sequence[Figure]]:
    """Everything that a Mac's owner can measure in one command; --out names the folder of the result."""
    end = time.monotonic() + 60 * minutes
    text = TextColumn("{task.completed} of {task.total} {task.description}")
    console = Console(stderr=True)
    with Progress(BarColumn(), text, TimeElapsedColumn(), console=console) as progress:
        shown = progress.add_task("", total=1 + len(MODELS))
        for name in (QUICKSTART, *MODELS):
            progress.update(shown, description=name)
            if time.monotonic() > end:
                say(f"{name}: left out after {minutes:g} minutes")
            else:
                yield _part(name, quick, randomly)
            progress.advance(shown)


def _part(name: str, quick: bool, randomly: bool) -> list[Figure]:
    try:
        if name == QUICKSTART:
            return quickstart_figures(quick)
        return model_figures(name, MODELS[name], quick=quick, randomly=randomly)
    except UserError as error:  # such as a machine with too little memory: the others are measured
        say(f"{name}: left out: {error}")
        return []


if __name__ == "__main__":
    main()
