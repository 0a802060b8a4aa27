"""How long does a complete GRPO step take here, in mlx-lm-lora, and in TRL's GRPOTrainer?

Each side consists of complete runs of its own training loop, whose logs contain the steps, with the
same prompts and reward, the same number of tokens, temperature 1, AdamW and no KL term: on a CPU 4
prompts × 8 completions × 64 tokens, on a GPU 16 × 8 × 256 with Qwen2.5-0.5B's shape. On a CPU, the
sides alternate, three times each. TRL has float32 weights, bfloat16 products on a GPU, and
transformers' own generation, or its continuous batching; vLLM is not compared. mlx-lm-lora's
`batch_size` is the number of prompts, and OpenBLAS is loaded for it, which it would not do itself.
A ratio always compares sides of the same run; our own time is from the latest run.

**What limits it.** Half of our step is the learner, whose products are the same as theirs; the rest of the
ratio comes from the rollout. mlx-lm-lora's rollout decodes four rows at a time. The ratios depend
on other load on the machine's caches and memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from benchmarks.harness.command import benchmark, of_backend, say
from benchmarks.harness.machine import backend
from benchmarks.harness.measure import Timing
from benchmarks.harness.record import Figure, ratio_figure, time_figure
from benchmarks.harness.runs import Job, finish, log_lines, placed, run_command
from benchmarks.harness.shapes import Sizes, same_length, write_run
from benchmarks.sides import side_settings, their_command
from runners.config.loading import load_config
from runners.errors import UserError
from runners.machine.versions import installed_version

VERSIONS = {"mlx-lm-lora": "5.10.2", "trl": "1.16.0"}  # what the figures are for


@attrs.frozen
class Peer:
    """Another trainer, with its settings, and the targets."""

    title: str
    side: str  # "ours", "trl" or "mlx-lm-lora"
    more: dict[str, Any] = attrs.field(factory=dict)  # of its GRPOConfig
    overrides: tuple[str, ...] = ()  # of our config, where the side is ours
    times: float | None = None  # as fast
    peak: float | None = None  # ours over its
    tunes: tuple[str, ...] = ("lora", "full", "quickstart")  # that it is compared on


_CONTINUOUS = {"use_transformers_continuous_batching": True}


def _bounded(gigabytes: int, tune: str) -> Peer:
    """Ours with limited memory: smaller micro-batches, and fewer operations in flight."""
    overrides = (f"system.memory_limit_gb={gigabytes}",)
    return Peer(f"ours in {gigabytes} GB", "ours", overrides=overrides, tunes=(tune,))


_SAVING = Peer("TRL, checkpointing", "trl", {"gradient_checkpointing": True}, times=2.5)
PEERS = {
    "cpu": (Peer("mlx-lm-lora", "mlx-lm-lora", times=3.0, peak=1.0), Peer("TRL", "trl", times=1.8, peak=1.0)),
    "cuda": (
        Peer("TRL", "trl", times=2.5),
        _SAVING,
        _bounded(11, "full"),
        _bounded(4, "lora"),
        Peer("TRL, continuous batching", "trl", _CONTINUOUS),
        Peer("mlx-lm-lora", "mlx-lm-lora", times=5.0),
    ),
    "quickstart": (Peer("TRL", "trl", times=3.0, peak=1.0),),
}
QUICKSTART = "quickstart"  # on a CPU: the packaged config as it is
PARTS = {"step": "step_time", "rollout": "time/rollout", "the rest": "rest"}  # title -> key of a step
WARM = 2  # first steps of a run, which do not count


@attrs.define
class Side:
    """A trainer with its settings, and the steps of its runs."""

    peer: Peer
    settings: Mapping[str, Any]
    steps: list[dict[str, Any]] = attrs.field(factory=list)
    resident: float = 0.0  # bytes

    @property
    def name(self) -> str:
        """In the names of figures."""
        return self.peer.title

    def run(self, number: int) -> None:
        """One complete run; all steps except the first ones count.

        Raises:
            UserError: the run failed.
        """
        settings = self.settings
        work = Path(settings["work"])
        folder = work / f"{self.peer.side}-{len(list(work.glob('*.txt')))}"
        if self.peer.side == "ours":
            own = [*settings["overrides"], *self.peer.overrides, *placed(folder, number)]
            command = run_command(settings["config"], own)
        else:
            told = {**settings, "trl": {**settings["trl"], **self.peer.more}}
            side = "train" if self.peer.side == "trl" else self.peer.side
            command = their_command(side, told, folder, number)
        job = Job(name=self.name, command=command, printed=folder.with_suffix(".txt"))
        self.resident = max(self.resident, finish(job).resident)
        steps = [line for line in log_lines(folder) if "step_time" in line]
        for step, before in zip(steps[1:], steps, strict=False):
            step["rest"] = step["step_time"] - step["time/rollout"]
            if self.peer.side == "ours":
                step["tokens"] = step["num_tokens"] - before["num_tokens"]
        self.steps += steps[WARM : WARM + settings["repeats"]]
        say(f"{self.name}: {self.timing('step').median:.2f} s")

    def timing(self, part: str) -> Timing:
        """The timing of one of PARTS."""
        return Timing(tuple(step[PARTS[part]] for step in self.steps))

    @property
    def peak(self) -> float:
        """The peak bytes of its arrays; 0 on a CPU, where PyTorch does not report them."""
        return 1e9 * max(step.get("memory/peak_gb", 0.0) for step in self.steps)


def compare(
    settings: Mapping[str, Any], peers: Sequence[Peer], *, rounds: int, judged: bool
) -> Iterator[list[Figure]]:
    """Runs all sides one after another; with several rounds, their order alternates. Yields each
    side's figures when its last run has ended.
    """
    sides = [Side(peer, settings) for peer in (Peer("ours", "ours"), *peers)]
    for number in range(rounds):
        last = number == rounds - 1
        for place, side in enumerate(sides):
            (side if last or number % 2 == 0 else sides[-1 - place]).run(number)
            if last:
                yield _found(settings, sides[: place + 1], judged)


def _found(settings: Mapping[str, Any], sides: Sequence[Side], judged: bool) -> list[Figure]:
    """The last side's figures, and comparisons with other sides."""
    last = sides[-1]
    by_title = {side.name: side for side in sides}
    pairs = [(sides[0], last, last.peer)] if last is not sides[0] else []
    if last.peer.side == "ours" and _SAVING.title in by_title:
        pairs.append((last, by_title[_SAVING.title], attrs.evolve(_SAVING, peak=1.2)))
    figures = _figures(settings, last)
    for mine, other, peer in pairs:
        figures += _ratios(settings["case"], mine, other, peer)
    return figures if judged else [figure.unjudged() for figure in figures]


def _figures(settings: Mapping[str, Any], side: Side) -> list[Figure]:
    case, title, told = settings["case"], side.name, settings["trl"]
    wanted = settings["batch_size"] * told["num_generations"] * told["max_completion_length"]
    tokens = [step["tokens"] for step in side.steps]
    memory = {"resident memory": side.resident, "peak of its arrays": side.peak}
    return [
        *(time_figure(f"{case}: {part}, {title}", side.timing(part)) for part in PARTS),
        Figure(
            f"{case}: tokens a step, {title}",
            sum(tokens) / len(tokens),
            note=f"{min(tokens)} to {max(tokens)}",
            # A sampled end of text costs less, once in hundreds of thousands; the shipped model ends answers.
            at_least=None if case == QUICKSTART else 0.99 * wanted,
        ),
        *(
            Figure(f"{case}: {what}, {title}", nbytes / 1e6, "MB")
            for what, nbytes in memory.items()
            if nbytes
        ),
    ]


def _ratios(case: str, mine: Side, other: Side, peer: Peer) -> list[Figure]:
    """Times of the other side over ours, and our memory over the other side's."""
    figures = []
    for part in PARTS:
        least = peer.times if part == "step" else None
        ratio = other.timing(part) / mine.timing(part)
        name = f"{case}: {part}, {other.name} / {mine.name}"
        figures.append(ratio_figure(name, ratio, at_least=least))
    what = "peak" if other.peak else "resident memory"
    memory = mine.peak / other.peak if other.peak else mine.resident / other.resident
    name = f"{case}: {what}, {mine.name} / {other.name}"
    return [*figures, Figure(name, memory, "x", at_most=peer.peak)]


def side_of(work: Path, case: str, config: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The settings of all sides of a case."""
    return {
        "case": case,
        "work": str(work),
        "config": config,
        "overrides": list(overrides),
        **side_settings(load_config(config, overrides)),
    }


@benchmark("peers", parts=("tunes", "names"))
@click.option(
    "--tune", "tunes", multiple=True, type=click.Choice(["lora", "full", QUICKSTART]), help="Only this one."
)
@click.option("--peer", "names", multiple=True, help="Only this one, such as TRL.")
@click.option("--model", default="", help="The model's shape [6 × 256 on a CPU, Qwen2.5-0.5B's on a GPU].")
@click.option("--beta", default=0.0, show_default=True, help="Weight of the KL term on all sides.")
@click.option("--set", "overrides", multiple=True, help="SECTION.KEY=VALUE, for our config.")
@click.option("--repeats", default=0, help="Number of timed steps per run [3; quickstart: 5].")
def main(
    quick: bool,
    tunes: Sequence[str],
    names: Sequence[str],
    model: str,
    beta: float,
    overrides: Sequence[str],
    repeats: int,
) -> Iterator[list[Figure]]:
    """Compare a complete GRPO step with mlx-lm-lora and TRL, LoRA and full: rollout, learner and
    peak memory.

    On a CPU, the quickstart's step (with its model, problems and rewards) is also compared with
    TRL's.
    """
    on_cpu = backend() == "cpu"
    if QUICKSTART in tunes and not on_cpu:
        raise UserError("--tune quickstart: this case is for a CPU")
    sizes = of_backend(quick, Sizes(2, 2, 4), Sizes(4, 8, 64), Sizes(16, 8, 256))
    shape = of_backend(quick, "tiny", model or "qwen2-6x256", model or "qwen2.5-0.5b")
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        folder = Path(name)
        config = write_run(folder, shape, same_length(sizes.prompts), sizes)
        rounds = 3 if on_cpu and not quick else 1
        wanted = tunes or (["lora"] if quick else ["lora", "full", *([QUICKSTART] if on_cpu else [])])
        for case, peers in _compared(wanted, names).items():
            steps = repeats or (1 if quick else 5 if case == QUICKSTART else 3)
            own = [f"optim.max_steps={WARM + steps}", *overrides]
            if case == QUICKSTART:  # as it is; TRL takes the whole batch at once
                own += ["run.overwrite=true", "eval.at_start=false", "eval.samples=1"]
                settings = side_of(folder, case, QUICKSTART, own)
            else:
                own += [f"model.tune={case}", f"loss.beta={beta}"]
                settings = {**side_of(folder, case, str(config), own), "together": 8}
            settings["repeats"] = steps
            say(f"peers: {case}, {rounds} × {steps} steps of each side")
            yield from compare(settings, peers, rounds=rounds, judged=not quick and beta == 0)


def _compared(tunes: Sequence[str], names: Sequence[str]) -> dict[str, list[Peer]]:
    """For each case, the installed peers with these names, in the versions for which the figures
    are; a case without peers is omitted.

    Raises:
        UserError: no case has such a peer, or none is installed.
    """
    there = {"ours"}
    for package, version in VERSIONS.items():
        found = installed_version(package) or "none"
        if found == version:
            there.add(package)
        else:
            say(f"{package} {version} is not here (found {found}): pip install -e '.[peers]'")
    peers = {tune: PEERS[QUICKSTART if tune == QUICKSTART else backend()] for tune in tunes}
    peers = {tune: [peer for peer in found if tune in peer.tunes] for tune, found in peers.items()}
    titles = list(dict.fromkeys(peer.title for found in peers.values() for peer in found))
    for name in names:
        if name not in titles:
            raise UserError(f"peer {name!r}: expected one of {', '.join(titles)}")
    kept = {
        tune: [peer for peer in found if peer.side in there and peer.title in (names or titles)]
        for tune, found in peers.items()
    }
    if not any(kept.values()):
        raise UserError("there is nothing to compare with: pip install -e '.[peers]'")
    return {tune: found for tune, found in kept.items() if found}


if __name__ == "__main__":
    main()
