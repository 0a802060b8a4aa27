"""What does each mechanism gain: a step with all mechanisms, compared with all except this one?

Two processes run steps alternately, with the same prompts, keys and weights, which do not change.
Figures are the ratio of a step without the mechanism to one with it: 1.10 means 10 % more without
it, and below 1 the step is better without it. If a side samples 5 % more or fewer tokens, the
benchmark fails. The shapes, on a CPU:

- *16 × 8*: prompts × completions of a model with 6 blocks of 256, random weights; completions end at random
  places, and a quarter of the groups have rewards without variance; *LoRA*, and *packed*: on a base of four
  bits
- *quickstart*: the packaged config on the embedded model
- *2 × 2, large*: a model with 8 blocks of 768, whose memory consists of weights, gradients and
  moments

On a GPU, 16 × 8 completions of 256 tokens in bfloat16: Qwen2.5-0.5B's shape (*0.5B*), in
micro-batches of 1,024 tokens, with LoRA; and nanochat-d20's. *real* is the pretrained model in the
folder GRPO_REAL_MODEL, which ends its completions itself.

Not measured: saving (see `checkpoint`), quantized roles (see `real_quant`) and bfloat16 weights.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import click

from benchmarks.harness.command import benchmark, say
from benchmarks.harness.machine import backend
from benchmarks.harness.measure import Ratio, Timing
from benchmarks.harness.record import Figure, ratio_figure
from benchmarks.harness.runs import REAL_MODEL, Job, finish
from benchmarks.harness.shapes import Sizes, same_length, write_run
from benchmarks.harness.stepping import Side, SteppingProcess
from runners.errors import UserError, did_you_mean

FULL, LORA, PACKED, QUICKSTART = "16 × 8", "16 × 8, LoRA", "16 × 8, packed", "quickstart"
LARGE = "2 × 2, large"
CPU_SHAPES = (FULL, LORA, PACKED, QUICKSTART, LARGE)
TWO = (FULL, QUICKSTART)
HALF, HALF_SMALL, HALF_LORA, D20 = "0.5B", "0.5B, 1,024", "0.5B, LoRA", "d20"
REAL, REAL_LORA = "real", "real, LoRA"
GPU_SHAPES = (HALF, HALF_SMALL, HALF_LORA, D20, REAL, REAL_LORA)
ADAPTED = (LORA, PACKED, HALF_LORA, REAL_LORA)
MODELS = {
    **dict.fromkeys((FULL, LORA, PACKED), "qwen2-6x256"),
    LARGE: "qwen2-8x768",
    **dict.fromkeys((HALF, HALF_SMALL, HALF_LORA), "qwen2.5-0.5b"),
    D20: "nanochat-d20",
}
SMALL = ["optim.batch_size=2", "rollout.num_generations=2", "rollout.max_new_tokens=8"]
STARTED_TOGETHER = 2  # sides on a GPU: each may hold a third of its memory


@attrs.frozen
class Mechanism:
    """The settings that turn off a mechanism on the other side: names, config keys or environment
    variables.
    """

    title: str  # as in the table of docs/architecture.md
    disable: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    environment: Mapping[str, str] = attrs.field(factory=dict)
    shapes: tuple[str, ...] = TWO
    adds: bool = False  # the overrides turn it on: it is off by default, or on in long runs alone
    pairs: int | None = None  # of steps, at most: where a step without it takes very long


ELEMENTWISE = ("exp", "row_sum", "softmax", "swiglu", "swiglu_gradient", "rms_norm", "add_at")
MECHANISMS = (
    Mechanism("shared prompts", ("shared_prefix",), shapes=(*TWO, HALF, REAL)),
    Mechanism("row compaction", ("row_compaction",), shapes=(*TWO, REAL)),
    Mechanism("decode kernel", ("kernel_steps",), shapes=(HALF, REAL)),
    Mechanism("decoder blocks", ("decode_blocks",), shapes=(HALF, D20, REAL)),
    Mechanism("merged adapters", ("merged_adapters",), shapes=(LORA, HALF_LORA, REAL_LORA)),
    Mechanism("unpacked weights", ("unpacked_weights",), shapes=(PACKED,)),
    Mechanism("unpacked products", ("unpacked_products",), shapes=(PACKED,)),
    Mechanism("log-probs in chunks", ("logit_chunks",)),
    Mechanism("log-prob kernels", ("row_logprobs", "row_gradients"), shapes=(HALF, D20, REAL)),
    Mechanism("shared prompts of the learner", overrides=("system.share_prompts=never",)),
    Mechanism("micro-batches", overrides=("system.micro_batch_tokens=1000000",)),
    Mechanism("inactive rows", ("inactive_rows",), shapes=(*TWO, REAL)),
    Mechanism("gradient checkpointing", overrides=("system.grad_checkpoint=true",), adds=True),
    Mechanism("update leaf by leaf", ("leafwise_update",), shapes=(*TWO, LARGE, HALF, HALF_SMALL, REAL)),
    Mechanism("own exp, softmax, SwiGLU and RMSNorm", ELEMENTWISE),
    Mechanism("attention in few products", ("attention",)),
    Mechanism("patched layers", ("patched_layers",)),
    Mechanism("compiled steps", overrides=("system.compile=false",)),
    Mechanism("BLAS", environment={"GRPO_FN_BLAS": "none"}, shapes=(QUICKSTART,), pairs=1),
)
TITLES = tuple(mechanism.title for mechanism in MECHANISMS)


def shape_side(shape: str, work: Path, quick: bool) -> Side:
    """The side with all mechanisms; its input is written to the folder."""
    settings = ["system.check_model=false", f"run.output_dir={work}"]
    settings += SMALL if quick or shape == LARGE else []
    if shape == QUICKSTART:
        settings += ["data.max_samples=16", "eval.samples=8"] if quick else []
        return Side(config=QUICKSTART, overrides=settings, disable=[])
    settings = [
        *('rollout.stop=["za", "zi"]', 'reward.functions=["benchmarks.harness.stepping:graded"]'),
        *settings,
    ]
    model = "tiny" if quick else MODELS.get(shape, "")
    if shape in (REAL, REAL_LORA):
        model = os.environ[REAL_MODEL]
        settings += ["data.source=embedded", "data.max_samples=64"]
    config = write_run(work, model, same_length(16), Sizes(16, 8, 32))
    if shape == PACKED:
        settings.append(f"model.path={_packed(work / 'model')}")
    if shape in GPU_SHAPES and not quick:
        # Sides that start together would see different amounts of free memory, and choose by it.
        tokens = 1024 if shape == HALF_SMALL else 12288
        settings += ["rollout.max_new_tokens=256", "rollout.stop=[]", f"system.micro_batch_tokens={tokens}"]
    settings += ["model.tune=lora"] if shape in ADAPTED else []
    return Side(config=str(config), overrides=settings, disable=[])


def _packed(source: Path) -> Path:
    """A copy of a model folder with 4-bit weights."""
    target = source.with_name("packed")
    if not target.exists():
        command = [sys.executable, "-m", "runners.cli", "convert", str(source), "--out", str(target)]
        printed = source.with_name("packed.txt")
        finish(Job(name="grpo convert", command=[*command, "--bits", "4"], printed=printed))
    return target


def compare(with_all: SteppingProcess, other: SteppingProcess, pairs: int, *, adds: bool) -> dict[str, Ratio]:
    """The ratio of a step's cost without the mechanism to its cost with it: wall time, CPU time,
    peak memory.
    """
    taken = []
    for number in range(pairs):
        both = (with_all, other) if number % 2 else (other, with_all)
        found = {side.name: side.step() for side in both}
        taken.append((found[with_all.name], found[other.name]))
    fewer, more = sorted(sum(pair[which]["tokens"] for pair in taken) for which in (0, 1))
    if more > 1.05 * fewer:
        raise UserError(f"{other.name}: the sides sampled {fewer} and {more} tokens")
    ratios = {}
    for name, key in (("time", "seconds"), ("CPU time", "cpu"), ("peak", "peak")):
        on, off = (Timing(tuple(pair[which][key] for pair in taken)) for which in (0, 1))
        ratios[name] = on / off if adds else off / on
    return ratios


def measure(
    mechanisms: Sequence[Mechanism], shapes: Sequence[str], pairs: int, quick: bool
) -> Iterator[list[Figure]]:
    """The figures of each mechanism, one shape after another. On a GPU, two sides start together."""
    together = STARTED_TOGETHER if backend() == "cuda" else 1
    for shape in shapes:
        wanted = [each for each in mechanisms if shape in each.shapes]
        if not wanted:
            continue
        with tempfile.TemporaryDirectory(prefix="mechanisms-") as name, contextlib.ExitStack() as ending:
            work = Path(name)
            base = shape_side(shape, work, quick)
            with_all = _processes(shape, base, [Mechanism("everything")], work, ending)[0]
            for first in range(0, len(wanted), together):
                chosen = wanted[first : first + together]
                others = _processes(shape, base, chosen, work, ending)
                for each, other in zip(chosen, others, strict=True):
                    ratios = compare(with_all, other, min(pairs, each.pairs or pairs), adds=each.adds)
                    other.end()  # on a GPU it holds memory that the next side may need
                    words = [f"{part} {ratio.paired:.3f} ×" for part, ratio in ratios.items()]
                    say(f"{other.name}: {', '.join(words)}")
                    yield [ratio_figure(f"{other.name}: {part}", ratio) for part, ratio in ratios.items()]


def _processes(
    shape: str, base: Side, mechanisms: Sequence[Mechanism], work: Path, ending: contextlib.ExitStack
) -> list[SteppingProcess]:
    """A process without each of the mechanisms, started together; each has run its first step, and
    ends with the stack.
    """

    def start(mechanism: Mechanism) -> SteppingProcess:
        overrides = [*base.overrides, *mechanism.overrides]
        side = attrs.evolve(base, overrides=overrides, disable=[*mechanism.disable])
        environment = {**os.environ, "GRPO_FN_CACHE": str(work / "cache"), **mechanism.environment}
        process = SteppingProcess(f"{shape}: {mechanism.title}", side, work, environment)
        ending.callback(process.end)
        return process

    with ThreadPoolExecutor(max_workers=len(mechanisms)) as pool:
        return list(pool.map(start, mechanisms))


@benchmark("mechanisms", parts=("shapes", "names"))
@click.option(
    "--shape", "shapes", multiple=True, type=click.Choice((*CPU_SHAPES, *GPU_SHAPES)), help="Only this one."
)
@click.option("--only", "names", multiple=True, help="Only this mechanism, by its title in the table.")
@click.option("--repeats", default=0, help="Number of pairs of steps [3].")
def main(quick: bool, shapes: Sequence[str], names: Sequence[str], repeats: int) -> Iterator[list[Figure]]:
    """Measure each mechanism: a real run's step with all mechanisms, compared with all except this
    one.
    """
    default = GPU_SHAPES if backend() == "cuda" else CPU_SHAPES
    if not os.environ.get(REAL_MODEL) and {REAL, REAL_LORA} & {*(shapes or default)}:
        say(f"real: skipped, because {REAL_MODEL} is not a folder")
        shapes = [shape for shape in shapes or default if shape not in (REAL, REAL_LORA)]
    for name in names:
        if name not in TITLES:
            known = f"expected one of {', '.join(TITLES)}{did_you_mean(name, TITLES)}"
            raise UserError(f"mechanism {name!r}: {known}")
    chosen = [mechanism for mechanism in MECHANISMS if mechanism.title in (names or TITLES)]
    if quick and not names:
        chosen = [mechanism for mechanism in chosen if mechanism.title == "merged adapters"]
    return measure(chosen, shapes or default, repeats or (1 if quick else 3), quick)


if __name__ == "__main__":
    main()
