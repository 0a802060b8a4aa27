"""Each mechanism alone: a step of a real run with everything on, against everything but this one.

Both sides are processes of their own, which take their steps in turn. A step is a rollout, its rewards, the
gradient and the update, of the same prompts, key and weights each time; the first, which compiles, is not
timed.

16 × 8           16 prompts × 8 completions of a model with 6 blocks of 256, random weights; completions end
                 at random places, and a quarter of the groups have rewards without variance
16 × 8, LoRA     the same with adapters
16 × 8, packed   the same with adapters on a base of four bits
quickstart       the packaged config on the embedded model, 16 × 8 too
2 × 2, large     few short completions of a model with 8 blocks of 768: memory is weights, gradients, moments
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import click

from benchmarks.harness import step_side
from benchmarks.harness.command import benchmark, say
from benchmarks.harness.measure import Ratio, Timing
from benchmarks.harness.record import Figure, ratio_figure
from benchmarks.harness.shapes import write_folder
from benchmarks.harness.stepping import ROOT, SteppingProcess
from benchmarks.peers import write_data
from runners.errors import UserError, did_you_mean

FULL, LORA, PACKED, QUICKSTART = "16 × 8", "16 × 8, LoRA", "16 × 8, packed", "quickstart"
LARGE = "2 × 2, large"
SHAPES = (FULL, LORA, PACKED, QUICKSTART, LARGE)
TWO = (FULL, QUICKSTART)


@attrs.frozen
class Mechanism:
    """How the other side lacks a mechanism: names, config keys or environment variables."""

    title: str  # as in the table of docs/architecture.md
    disable: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    environment: Mapping[str, str] = attrs.field(factory=dict)
    shapes: tuple[str, ...] = TWO
    adds: bool = False  # the overrides turn it on: it is off by default, or on in long runs alone
    pairs: int | None = None  # of steps, at most: where a step without it takes very long


ELEMENTWISE = ("exp", "sigmoid", "logsumexp", "softmax", "swiglu", "swiglu_gradient", "rms_norm", "add_at")
MECHANISMS = (
    Mechanism("shared prompts", ("shared_prefix",)),
    Mechanism("row compaction", ("row_compaction",)),
    Mechanism("merged adapters", ("merged_adapters",), shapes=(LORA,)),
    Mechanism("unpacked weights", ("unpacked_weights",), shapes=(PACKED,)),
    Mechanism("unpacked products", ("unpacked_products",), shapes=(PACKED,)),
    Mechanism("log-probs in chunks", ("logit_chunks",)),
    Mechanism("head at completions", ("counted_positions",)),
    Mechanism("shared prompts of the learner", overrides=("system.share_prompts=never",)),
    Mechanism("micro-batches", overrides=("system.micro_batch_tokens=1000000",)),
    Mechanism("inactive rows", ("inactive_rows",)),
    Mechanism("recomputed gates", ("recomputed_gates",)),
    Mechanism("gradient checkpointing", overrides=("system.grad_checkpoint=true",), adds=True),
    Mechanism("layout of weight gradients", ("gradient_layout",)),
    Mechanism("update leaf by leaf", ("leafwise_update",), shapes=(*TWO, LARGE)),
    Mechanism("attention on a CPU", ("attention", "weighted_values")),
    Mechanism("own exp, softmax, SwiGLU and RMSNorm", ELEMENTWISE),
    Mechanism("patched layers", ("own_functions",)),
    Mechanism("compiled steps", overrides=("system.compile=false",)),
    Mechanism("freed memory stays", environment={"GLIBC_TUNABLES": "glibc.malloc.arena_max=8"}),
    Mechanism("BLAS", environment={"GRPO_FN_BLAS": "none"}, shapes=(QUICKSTART,), pairs=1),
)
TITLES = tuple(mechanism.title for mechanism in MECHANISMS)


def _process(name: str, side: step_side.Side, environment: Mapping[str, str], work: Path) -> SteppingProcess:
    """A process that has taken its first step."""
    environment = {**os.environ, "GRPO_FN_CACHE": str(work / "cache"), **environment}
    return SteppingProcess(name, ["benchmarks.harness.step_side"], attrs.asdict(side), work, environment)


def shape_side(shape: str, work: Path, quick: bool) -> step_side.Side:
    """The side that has everything on; what it reads is written into the folder."""
    small = ["optim.batch_size=2", "rollout.num_generations=2", "rollout.max_new_tokens=8"]
    common = ["system.check_model=false", f"run.output_dir={work}", *(small if quick else [])]
    if shape == QUICKSTART:
        more = ["data.max_samples=16", "eval.samples=8"] if quick else []
        return step_side.Side(config=QUICKSTART, overrides=[*common, *more], disable=[])
    if not (work / "train.toml").exists():
        write_folder(work / "model", "tiny" if quick else "qwen2-6x256")
        write_data(work, 16)
        (work / "train.toml").write_text(
            f"""
            [model]
            path = "{work / "model"}"
            lora = {{rank = 8, scale = 10.0}}
            [data]
            source = "{work}"
            system_prompt = ""
            nudge = ""
            [rollout]
            num_generations = 8
            max_new_tokens = 32
            stop = ["za", "zi"]
            [reward]
            functions = ["benchmarks.harness.step_side:graded"]
            [optim]
            batch_size = 16
            max_steps = 100
            """,
            encoding="utf-8",
        )
    if shape == LARGE:
        write_folder(work / "large", "tiny" if quick else "qwen2-8x768")
        return step_side.Side(
            config=str(work / "train.toml"),
            overrides=[*common, *small, f"model.path={work / 'large'}"],
            disable=[],
        )
    tune = [] if shape == FULL else ["model.tune=lora"]
    if shape == PACKED:
        _pack(work / "model", work / "packed")
        tune.append(f"model.path={work / 'packed'}")
    return step_side.Side(config=str(work / "train.toml"), overrides=[*common, *tune], disable=[])


def _pack(source: Path, target: Path) -> None:
    """A copy of a model folder with weights of four bits."""
    if not target.exists():
        command = ["runners.cli", "convert", str(source), str(target), "--bits", "4"]
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise UserError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")


def compare(with_all: SteppingProcess, other: SteppingProcess, pairs: int, *, adds: bool) -> dict[str, Ratio]:
    """How many times as much a step takes without the mechanism: wall time, CPU time, peak of memory."""
    taken = []
    for number in range(pairs):
        both = (with_all, other) if number % 2 else (other, with_all)
        found = {side.name: side.step() for side in both}
        taken.append((found[with_all.name], found[other.name]))
    tokens = [side["tokens"] for pair in taken for side in pair]
    if max(tokens) > 1.05 * min(tokens):
        raise UserError(f"{other.name}: the sides sampled {min(tokens)} and {max(tokens)} tokens")
    ratios = {}
    for name, key in (("time", "seconds"), ("CPU time", "cpu"), ("peak", "peak")):
        on, off = (Timing(tuple(pair[which][key] for pair in taken)) for which in (0, 1))
        ratios[name] = on / off if adds else off / on
    return ratios


def measure(mechanisms: Sequence[Mechanism], shapes: Sequence[str], pairs: int, quick: bool) -> list[Figure]:
    """All figures, a shape after the other."""
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="mechanisms-") as name:
        work = Path(name)
        for shape in shapes:
            wanted = [each for each in mechanisms if shape in each.shapes]
            if not wanted:
                continue
            base = shape_side(shape, work, quick)
            with_all = _process(f"{shape}, everything", base, {}, work)
            try:
                for each in wanted:
                    figures += _figures(each, shape, base, with_all, pairs, work)
            finally:
                with_all.end()
    return figures


def _figures(
    mechanism: Mechanism, shape: str, base: step_side.Side, with_all: SteppingProcess, pairs: int, work: Path
) -> list[Figure]:
    side = attrs.evolve(
        base, overrides=[*base.overrides, *mechanism.overrides], disable=list(mechanism.disable)
    )
    name = f"{shape}: {mechanism.title}"
    other = _process(name, side, mechanism.environment, work)
    try:
        ratios = compare(with_all, other, min(pairs, mechanism.pairs or pairs), adds=mechanism.adds)
    finally:
        other.end()
    say(f"{name}: " + ", ".join(f"{part} {ratio.paired:.3f} ×" for part, ratio in ratios.items()))
    return [ratio_figure(f"{name}: {part}", ratio) for part, ratio in ratios.items()]


@benchmark("mechanisms", parts="shapes")
@click.option("--shape", "shapes", multiple=True, type=click.Choice(SHAPES), help="Only this one.")
@click.option("--only", "names", multiple=True, help="Only this mechanism, by its title in the table.")
@click.option("--repeats", default=0, help="Pairs of steps [3].")
def main(quick: bool, shapes: Sequence[str], names: Sequence[str], repeats: int) -> Sequence[Figure]:
    """Each mechanism alone: a real run's step with everything on, against everything but this one."""
    for name in names:
        if name not in TITLES:
            known = f"wanted one of {', '.join(TITLES)}{did_you_mean(name, TITLES)}"
            raise UserError(f"mechanism {name!r}: {known}")
    chosen = [mechanism for mechanism in MECHANISMS if mechanism.title in (names or TITLES)]
    if quick and not names:
        chosen = [mechanism for mechanism in chosen if mechanism.title == "merged adapters"]
    return measure(chosen, shapes or SHAPES, repeats or (1 if quick else 3), quick)


if __name__ == "__main__":
    main()
