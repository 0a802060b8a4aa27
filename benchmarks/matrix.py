"""`grpo-run` on models of seven kinds, fine-tuned in three ways, with and without KL and quantized rollouts.

Each cell is a run of three updates in a process of its own, on a small model with random weights. It shows
that the combination runs; six run at a time on a GPU, so seconds only show that nothing takes minutes.
*Log-probs apart* is the largest mean difference of a step between the sampler's log-probs and the learner's.
It may be twice the rounding of a plain forward in bfloat16, which is measured on each model; samplers in 8
bits have no target.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import attrs
import click
import mlx.core as mx
import mlx.nn as nn

from benchmarks.architectures.small_models import small_config, small_model
from benchmarks.first_update import REWARD, TRAIN
from benchmarks.harness.command import benchmark, say
from benchmarks.harness.machine import backend
from benchmarks.harness.record import Figure
from benchmarks.harness.shapes import END_ID, dtype_here, write_tokenizer
from benchmarks.quickstart import command_line
from grpo_fn.trees import named_leaves
from runners.errors import UserError

SIZES = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
MODELS = ("qwen2", "qwen3", "llama", "gemma3_text", "nanochat", "qwen3_moe", "qwen3_next")
ADAPTERS = ("model.tune=lora", "model.lora={rank=8}")
TUNES: dict[str, tuple[str, ...]] = {"full": (), "LoRA": ADAPTERS, "4-bit base, LoRA": ADAPTERS}
VARIANTS: dict[str, tuple[str, ...]] = {
    "no KL": (),
    "KL": ("loss.beta=0.05",),
    "8-bit rollouts": ("rollout.quantization=affine-8", "loss.correction=token_truncate"),
}
UPDATES = 3
STEP_TARGET = 30.0  # seconds of any step
# How far the sampler's log-probs may be from the learner's: so many times what rounding does to a plain
# forward, as both sides round, and at least so many nats. No target for samplers whose weights have 8 bits.
TIMES_ROUNDING, LEAST_NATS = 2.0, 1e-4
SECONDS = 180  # of a run, after which it is ended


@attrs.frozen
class Cell:
    """One run of the matrix."""

    model: str
    tune: str
    variant: str

    @property
    def name(self) -> str:
        """As in the result."""
        return f"{self.model}: {self.tune}, {self.variant}"


def write_model(folder: Path, name: str, *, bits: int = 0) -> None:
    """A folder that mlx-lm opens: small random weights, in `bits` where they are given, and a tokenizer."""
    model = small_model(name, **SIZES)
    config = {**small_config(name, **SIZES), "eos_token_id": END_ID, "torch_dtype": _dtype_name()}
    model.set_dtype(dtype_here())
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
        config["quantization"] = {"group_size": 32, "bits": bits}
    folder.mkdir(parents=True)
    mx.save_safetensors(
        str(folder / "model.safetensors"), named_leaves(model.parameters()), metadata={"format": "mlx"}
    )
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(folder, SIZES["vocab_size"])


def rounding(name: str) -> float:
    """Nats, on average, by which a plain forward in this machine's dtype is off float32's of its weights."""
    model = small_model(name, **SIZES)
    tokens = mx.random.randint(3, SIZES["vocab_size"], (2, 48), key=mx.random.key(0))
    model.set_dtype(dtype_here())
    rounded = _logprobs(model(tokens))
    model.set_dtype(mx.float32)
    exact = _logprobs(model(tokens))
    return (mx.exp(exact) * mx.abs(rounded - exact)).sum(axis=-1).mean().item()  # pyright: ignore


def _logprobs(logits: mx.array) -> mx.array:
    z = logits.astype(mx.float32)
    return z - mx.logsumexp(z, axis=-1, keepdims=True)


def run_cell(folder: Path, cell: Cell, rounded: float) -> list[Figure]:
    """The figures of one run, of a model whose rounding is `rounded` nats.

    Raises UserError, with the last lines that it printed, where it does not end well.
    """
    model = folder / (cell.model + ("-4bit" if cell.tune.startswith("4-bit") else ""))
    name = "-".join(f"{cell.model} {cell.tune} {cell.variant}".replace(",", "").split())
    settings = (
        *TUNES[cell.tune],
        *VARIANTS[cell.variant],
        f"model.path={model}",
        f"run.name={name}",
        f"run.output_dir={folder / 'out'}",
        "log.report=false",
    )
    options = [word for setting in settings for word in ("--set", setting)]
    paths = [str(Path(__file__).resolve().parents[1]), *filter(None, sys.path)]
    try:
        done = subprocess.run(
            [*command_line(), str(folder / "train.toml"), *options],
            env={**os.environ, "GRPO_FN_CACHE": str(folder / "cache"), "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        code, said = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        code, said = -1, f"no end within {SECONDS} s"
    if code:
        raise UserError(f"{cell.name}: {' | '.join(said.strip().splitlines()[-4:])}")
    lines = (folder / "out" / name / "training_log.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [step for step in map(json.loads, lines) if "loss" in step]
    broken = [key for step in steps for key in ("loss", "grad_norm") if not math.isfinite(step[key])]
    if len(steps) != UPDATES or broken:
        raise UserError(f"{cell.name}: {len(steps)} updates; not finite: {', '.join(broken) or 'none'}")
    apart = max(step["sampling/sampling_logp_difference/mean"] for step in steps)
    slowest = max(step["step_time"] for step in steps)
    quantized = cell.variant.endswith("rollouts")
    target = None if quantized else max(TIMES_ROUNDING * rounded, LEAST_NATS)
    say(f"{cell.name}: {slowest:.1f} s, log-probs {apart:.1e} apart")
    return [
        Figure(name=f"{cell.name}: slowest step", value=slowest, unit="s", at_most=STEP_TARGET),
        Figure(name=f"{cell.name}: log-probs apart", value=apart, unit="nats", at_most=target),
    ]


def _figures_of(model: str, runs: Sequence[Future[list[Figure]]]) -> list[Figure]:
    """All that a model's runs have found, once they have ended, and how many failed: each fault is a line."""
    figures, faults = [], 0
    for run in runs:
        try:
            figures += run.result()
        except UserError as error:
            say(str(error))
            faults += 1
    return [Figure(name=f"{model}: runs that failed", value=faults, at_most=0), *figures]


def _dtype_name() -> str:
    return str(dtype_here()).removeprefix("mlx.core.")


def _write_data(folder: Path) -> None:
    chance = random.Random(0)
    rows = [{"question": f"{chance.randint(1, 9**n)} + {n}?", "answer": "3"} for n in range(1, 40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "letters.py").write_text(REWARD)
    sizes = {"prompts": 4, "generations": 8, "new": 24, "updates": UPDATES}
    (folder / "train.toml").write_text(TRAIN.format(path="model", **sizes))


@benchmark("matrix", parts=("models",))
@click.option(
    "--model",
    "models",
    multiple=True,
    type=click.Choice(MODELS),
    help="Only this one; the others' figures stay.",
)
@click.option("--jobs", default=0, help="Runs side by side [0: 6 on a GPU, 1 on a CPU].")
def main(quick: bool, models: Sequence[str], jobs: int) -> Iterator[list[Figure]]:
    """Runs of three updates of models × ways to fine-tune × settings: that each runs, and is right."""
    tunes, variants = (list(TUNES)[:1], list(VARIANTS)[:1]) if quick else (list(TUNES), list(VARIANTS))
    chosen = models or (MODELS[:1] if quick else MODELS)
    cells = [Cell(model, tune, variant) for model in chosen for tune in tunes for variant in variants]
    folder = Path(tempfile.mkdtemp(prefix="matrix-"))
    try:
        _write_data(folder)
        apart = {}
        for model in chosen:
            apart[model] = rounding(model)
            write_model(folder / model, model)
            if not quick:
                write_model(folder / f"{model}-4bit", model, bits=4)
        with ThreadPoolExecutor(jobs or (1 if backend() == "cpu" else 6)) as pool:
            try:
                found = {cell: pool.submit(run_cell, folder, cell, apart[cell.model]) for cell in cells}
                for model in chosen:
                    runs = [run for cell, run in found.items() if cell.model == model]
                    name = f"{model}: rounding of a plain forward"
                    yield [*_figures_of(model, runs), Figure(name=name, value=apart[model], unit="nats")]
            finally:  # what ends the command early begins no further run
                pool.shutdown(wait=False, cancel_futures=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
