"""How much faster are the steps of a run on 2 and on 4 devices of one host?

`python -m benchmarks.ranks` starts its own ranks under mlx.launch: NCCL on CUDA, ring on a CPU.
Each case has the same work for any number of ranks, except *same rows a rank*; efficiency is the
rate divided by N times the rate of one rank. *Waiting* is the share of a step in which a rank waits
for slower ones, *reducing* the share in sums. Two ranks on a CPU share its cores, so there is no
target for their efficiency. With `--apart`, complete runs compare one device with two, one of which
only samples.

**What limits it.** A decoding step has a part that does not shrink with its rows, and AdamW's update is the
same on each rank.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from benchmarks.harness.command import benchmark, chosen_of, say
from benchmarks.harness.machine import backend
from benchmarks.harness.record import Figure
from benchmarks.harness.runs import Job, finish, placed, run_command, step_lines
from benchmarks.harness.shapes import Sizes, same_length, write_run
from runners.errors import UserError
from runners.machine import startup
from runners.ranks.rank_place import let_launcher_sleep, read_rank_place, share_cores

EFFICIENCY = {2: 0.9, 4: 0.85}  # at least


@attrs.frozen
class Case:
    """The work of each step on all ranks together."""

    model: str
    tune: str  # "full" | "lora"
    prompts: int
    generations: int
    prompt: int  # tokens
    new: int
    micro_batch: int  # tokens that a rank's learner takes at a time
    repeats: int
    weak: bool = False  # so many prompts on each rank: the batch grows with the number of ranks

    @property
    def name(self) -> str:
        """Its name in figures and for --case."""
        return f"{self.model}, {self.tune}{', same rows a rank' if self.weak else ''}"

    def on(self, ranks: int) -> Case:
        """The case with the total work of this number of ranks."""
        return attrs.evolve(self, prompts=self.prompts * ranks) if self.weak else self


def cases(quick: bool) -> list[Case]:
    """The cases of this backend."""
    if quick or backend() == "cpu":
        kinds = ("full",) if quick else ("full", "lora")
        return [Case("tiny", tune, 4, 4, 16, 16, 1024, 2 if quick else 10) for tune in kinds]
    strong = [
        Case(model, tune, 64, 8, 128, 256, 12_288, 3)
        for model in ("qwen2.5-0.5b", "nanochat-d20")
        for tune in ("lora", "full")
    ]
    return strong + [attrs.evolve(case, weak=True) for case in strong[:2]]


def write_case(folder: Path, case: Case) -> tuple[Path, list[str]]:
    """The config of a case, whose files are written to the folder, and overrides of it."""
    config = folder / "train.toml"
    if not config.exists():
        sizes = Sizes(case.prompts, case.generations, case.new)
        write_run(folder, case.model, same_length(case.prompts, case.prompt // 3), sizes)
    settings = [f"model.tune={case.tune}", f"system.micro_batch_tokens={case.micro_batch}"]
    return config, [*settings, "system.check_model=false"]


def measure(case: Case, folder: Path) -> list[dict[str, Any]]:
    """Runs this rank's part of the steps of a run; returns each rank's measurements in seconds and
    bytes.
    """
    import mlx.core as mx

    from benchmarks.harness.stepping import built
    from runners.config.loading import load_config
    from runners.ranks.ranks import Ranks

    ranks = Ranks(read_rank_place(), timeout=600)
    steps: list[dict[str, float]] = []
    with ranks.ending_together():
        config, settings = write_case(folder, case)
        stepping = built(load_config(str(config), settings).check(), ranks=ranks, note=say)
        for number in range(case.repeats + 1):
            if number == 1:
                mx.reset_peak_memory()
            ranks.all_gather_object("a step")
            ranks.seconds()
            stepping.plan.times.take()
            found = stepping.step()
            step, rollout = found["step_time"], found["time/rollout"]
            parts = {"step": step, "rollout": rollout, "the rest": step - rollout}
            steps.append({**parts, **ranks.seconds()})
        timed = steps[1:]  # the first compiles
        medians = {name: statistics.median(each[name] for each in timed) for name in steps[0]}
        own = {"seconds": medians, "peak": mx.get_peak_memory()}
        return ranks.all_gather_object("the result", own)


def start(ranks: int, case: Case) -> list[dict[str, Any]]:
    """The measurements of each of this number of processes. Raises UserError if they fail."""
    with tempfile.TemporaryDirectory() as folder:
        write_case(Path(folder), case)
        out = Path(folder) / "result.json"
        own = [sys.executable, "-m", "benchmarks.ranks", "--worker", str(out)]
        run_on(ranks, [*own, "--case", json.dumps(attrs.asdict(case))], Path(folder))
        if not out.exists():
            said = (Path(folder) / "printed.txt").read_text(errors="replace")
            raise UserError(f"{ranks} ranks: no result: {said[-600:]}")
        return json.loads(out.read_text())


def run_on(ranks: int, own: Sequence[str], folder: Path) -> None:
    """Runs a command on several ranks of this host. Raises UserError if it fails."""
    transport = "nccl" if backend() == "cuda" else "ring"
    # fmt: off
    launched = [
        launcher_script(), "-n", str(ranks), "--backend", transport,
        "--starting-port", str(_free_port()), "--nccl-port", str(_free_port()), "--", *own,
    ]
    # fmt: on
    command = launched if ranks > 1 else own
    finish(Job(name=f"{ranks} ranks", command=command, printed=folder / "printed.txt"))


def launcher_script() -> str:
    """MLX's launcher, next to this Python or on the PATH. Raises UserError if it is missing."""
    beside = Path(sys.executable).parent / "mlx.launch"
    found = str(beside) if beside.is_file() else shutil.which("mlx.launch")
    if found is None:
        raise UserError(f"mlx.launch is neither in {beside.parent} nor on the PATH; it comes with mlx")
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return min(probe.getsockname()[1], 60_000)


def devices() -> int:
    """The number of GPUs of this host; on a CPU, the maximum number of ranks that are tested."""
    if backend() != "cuda":
        return 2
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return max(listed.count("GPU "), 1)


def figures_of(case: Case, counts: Sequence[int], quick: bool) -> Iterator[list[Figure]]:
    """One case on each number of ranks."""
    base = 0.0
    for count in counts:
        say(f"ranks: {case.name}, {count}")
        shared = case.on(count)
        tokens = shared.prompts * shared.generations * shared.new
        found = start(count, shared)
        slowest = {name: max(each["seconds"][name] for each in found) for name in found[0]["seconds"]}
        step = slowest["step"]
        peak = max(each["peak"] for each in found) / 1e6
        base = base or step * count / tokens  # rank-seconds a token
        figures = [
            Figure("step", step, "s", samples=case.repeats),
            *(Figure(part, slowest[part], "s") for part in ("rollout", "the rest")),
            Figure("rate", tokens / step, "tokens/s"),
            Figure("peak of a rank", peak, "MB"),
        ]
        if count > 1:
            goal = EFFICIENCY.get(count) if backend() == "cuda" and not quick else None
            reached = base * tokens / (step * count)
            figures.append(Figure("efficiency", reached, "x", at_least=goal))
            for part in ("waiting", "reducing"):
                figures.append(Figure(part, 100 * slowest[part] / step, "%"))
        name = f"{case.name}: {count} rank{'s' if count > 1 else ''}"
        yield [attrs.evolve(figure, name=f"{name}: {figure.name}") for figure in figures]


APART = {  # the processes of each run, and its settings; the first one is the base
    "one device": (1, ()),
    "one device, rollouts ahead": (1, ("rollout.max_staleness=1",)),
    "samplers apart": (2, ("rollout.max_staleness=1", "ranks.samplers=1")),
}
FASTER = 1.4  # times the steps a second of one device that two have to take, with one that samples


def apart_figures(case: Case, quick: bool) -> Iterator[list[Figure]]:
    """Whole runs of a case on one device, and on two of which one only samples."""
    base = 0.0
    for title, (count, more) in APART.items():
        say(f"ranks: {case.name}, {title}")
        with tempfile.TemporaryDirectory() as work:
            config, settings = write_case(Path(work), case)
            run = Path(work) / "apart"
            settings += [f"optim.max_steps={case.repeats + 5}", "loss.correction=token_truncate"]
            run_on(count, run_command(config, [*settings, *more, *placed(run)]), Path(work))
            steps = [line["step_time"] for line in step_lines(run)]
        step = statistics.median(steps[4:])  # the first compile, and fill the queue
        base = base or step
        name = f"{case.name}: {title}"
        goal = FASTER if count > 1 and backend() == "cuda" and not quick else None
        yield [
            Figure(f"{name}: step", step, "s", samples=len(steps) - 4),
            Figure(f"{name}: steps a second", base / step, "x", at_least=goal),
        ]


@benchmark("ranks", parts=("chosen",))
@click.option("--case", "chosen", multiple=True, help="Only this one, such as 'qwen2.5-0.5b, full'.")
@click.option(
    "--ranks", "counts", multiple=True, type=int, help="Numbers of ranks [those of 1, 2 and 4 that fit]."
)
@click.option("--apart", is_flag=True, help="Compare one device with two, one of which only samples.")
def main(quick: bool, chosen: Sequence[str], counts: Sequence[int], apart: bool) -> Iterator[list[Figure]]:
    """Measure complete steps on several ranks of this host, which the command starts."""
    most = devices()
    counts = counts or ([1, 2] if quick else [count for count in (1, 2, 4, 8) if count <= most])
    known = {case.name: case for case in cases(quick)}
    for name in chosen_of(chosen, known):
        yield from apart_figures(known[name], quick) if apart else figures_of(known[name], counts, quick)


@click.command()
@click.option("--worker", type=click.Path(path_type=Path), required=True)
@click.option("--case", "text", required=True)
def worker(worker: Path, text: str) -> None:
    """Runs one rank, which measures; rank 0 writes the result."""
    let_launcher_sleep()
    place = read_rank_place()
    if place:
        share_cores(place, os.environ)
    startup.prepare()
    found = measure(Case(**json.loads(text)), worker.parent)
    if place is None or place.rank == 0:
        worker.write_text(json.dumps(found))


if __name__ == "__main__":
    (worker if "--worker" in sys.argv else main)()
