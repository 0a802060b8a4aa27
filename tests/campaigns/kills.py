"""SIGKILL at random instants, mostly while something is saved: nothing may be lost, nothing may differ.

`python -m tests.campaigns.kills --kills 1000` starts `grpo-run --resume` under `mlx.launch`, kills a random
rank, and looks after each kill at what lies there: all ranks have ended, every checkpoint is whole and equal
to the one of a run that nobody killed, and the logs are the beginning of that run's. In the end the run has
that one's weights, logs and completions.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import click

import grpo_fn  # noqa: F401 (before MLX)
from runners.checkpoints.manifest import check_manifest
from runners.checkpoints.run_folder import checkpoint_folders
from runners.errors import UserError
from runners.files.durable import NEW, PREFIX
from tests.support.agents import HEAD
from tests.support.ranks.launching import Launched, begin, is_running
from tests.support.resuming import LETTERS, embedded_config, outcome, saved, without_noise
from tests.support.tiny_models import make_model_folder

SAVING = 0.7  # share of the kills that wait for a save
PATIENCE = 600.0  # seconds for a run to come to its moment
SECONDS = 30.0  # from a kill to the end of the last rank, at most
COMMON = ["optim.max_steps=10", "checkpoint.every=1", "eval.every=3", "rollout.max_new_tokens=10"]
ON_RANKS = [
    "optim.max_steps=6",
    "optim.gradient_accumulation_steps=2",
    "eval.every=0",
    "rollout.max_batch=64",
]
FEW_BITS = ["rollout.quantization=affine-4", "rollout.storage=packed", "loss.sync_every=2"]
SHORT = ["optim.max_steps=6"]
BUDGET = ["rollout.quantization=affine-4", "rollout.storage=packed", "rollout.mismatch_limit=0"]
SUPERVISED = ["sft.updates=3", "sft.learning_rate=1e-3", "rollout.max_new_tokens=44"]
TOOLS = [
    "model.path=embedded-tools",
    "data={source='embedded-tools', eval_split='test', system_prompt='', nudge='', max_samples=18}",
    "env={tools=['runners.environments.calculator:calculate'], max_turns=2}",
    "rollout.max_new_tokens=28",
]
ARRIVAL = "env.schedule=arrival"
SMALL = ["model.tune=lora", "model.lora={rank=4}"]
CORRECTED = ["loss.correction=token_truncate"]
DRAWN_AGAIN = ["data.curriculum=adaptive", "data.pass_reward=0.5", "rollout.first_stage=2"]
EXPERTS = ["model.path=mixtral", "loss.router_replay=true"]  # beside the config
AGENTS = ["rollout.max_new_tokens=10", "optim.max_steps=8", "eval.every=0", "eval.at_start=false"]
CALLS = """first = chat([question], max_tokens=6)["content"]
chat([{"role": "user", "content": first + "?"}], max_tokens=6)
"""
KINDS = {  # ranks, settings
    "full": (1, ["optim.gradient_accumulation_steps=2", "loss.beta=0.05", "loss.ref_sync_every=4"]),
    "lora": (1, ["model.tune=lora", "model.lora={rank=4}", "optim.num_iterations=2", "optim.minibatches=2"]),
    "quantized": (1, [*FEW_BITS, "loss.correction=token_truncate"]),
    "ahead 1": (1, [*CORRECTED, "rollout.max_staleness=1"]),
    "ahead 2": (1, [*CORRECTED, "rollout.max_staleness=2", *SMALL]),
    "samplers 1": (2, [*CORRECTED, "rollout.max_staleness=1", "ranks.samplers=1"]),
    "samplers 2": (2, [*CORRECTED, "rollout.max_staleness=2", "ranks.samplers=1", *SMALL]),
    "experts": (1, [*EXPERTS, *DRAWN_AGAIN]),
    "agents": (1, ['env.program=["python", "agent.py"]', "env.timeout=300.0", *AGENTS]),
    "sft": (1, [*SHORT, *SUPERVISED, "model.tune=lora", "model.lora={rank=4}", "loss.sync_every=3"]),
    "budget": (1, [*SHORT, *BUDGET, "rollout.bits_budget=5", "loss.correction=token_truncate"]),
    "teacher": (1, [*SHORT, "teacher.path=self", "teacher.hint= It is {answer}.", "loss.sync_every=2"]),
    "curriculum": (1, [*SHORT, "data.curriculum=adaptive", "data.pass_reward=0.5", "data.explore=0.3"]),
    "dynamic": (1, [*SHORT, "loss.dynamic_sampling=true", "rollout.temperature=0.3"]),
    "first stage": (1, [*SHORT, "rollout.first_stage=2", "optim.gradient_accumulation_steps=2"]),
    "tools": (1, [*SHORT, *TOOLS]),
    "tools as they arrive": (1, [*SHORT, *TOOLS, ARRIVAL]),
    "2 ranks": (2, ON_RANKS),
    "3 ranks": (3, ON_RANKS),
}
STALENESS = ("full", "ahead 1", "ahead 2", "samplers 1", "samplers 2")  # of 0, 1 and 2
PRUNED = ["checkpoint.keep_last=2", "checkpoint.keep_best=1"]  # so that checkpoints are removed, too


@attrs.define
class Tally:
    """What was seen."""

    kills: int = 0
    while_saving: int = 0
    runs: int = 0  # brought to their end
    problems: list[str] = attrs.field(factory=list)


class Harness:
    """Runs of one kind: the straight one, and those that are killed."""

    def __init__(self, kind: str, folder: Path, chance: random.Random) -> None:
        """Makes the straight run in `folder`."""
        self.kind, self.folder, self.chance = kind, folder, chance
        self.ranks, self.settings = KINDS[kind]
        folder.mkdir(parents=True)
        (folder / "letters.py").write_text(LETTERS)
        (folder / "agent.py").write_text(HEAD + CALLS)
        (folder / "train.toml").write_text(embedded_config(folder))
        make_model_folder(folder / "mixtral", "mixtral")
        straight = self.folder / "straight/tiny"
        started, saving = time.monotonic(), 0.0
        run = self.start("straight", [])
        while run.process.poll() is None:  # two samples a millisecond of whether it is saving
            saving += 0.0005 * is_saving(straight)
            time.sleep(0.0005)
        self.seconds = time.monotonic() - started
        if not (straight / "final").is_dir():
            raise RuntimeError(f"the straight run did not end: {run.end()[-2000:]}")
        run.end()
        self.saved = {
            step: self.fixed(comparable(path)) for step, path in checkpoint_folders(straight).items()
        }
        self.save_seconds = saving / len(self.saved)
        self.outcome = self.found(straight)

    def found(self, run: Path) -> dict:
        """What a run's folder holds."""
        found = outcome(run)
        return {**found, "log": self.fixed(found["log"])}

    def fixed(self, found: Any) -> Any:
        """A log or state that two undisturbed runs share: arrival changes the sampler's log-probs."""
        return without(found, "sampling/") if ARRIVAL in self.settings else found

    def run(self, name: str, kills: int, tally: Tally) -> None:
        """One run that is killed up to `kills` times, and then left to end."""
        target = self.folder / name / "tiny"
        for _ in range(kills):
            run = self.start(name, PRUNED)
            rank = self.chance.randrange(self.ranks)
            if not self.wait_for_moment(run, target) or not (pid := run.pid(rank)) or not is_running(pid):
                run.end()
                break
            tally.while_saving += is_saving(target)
            problems = [*self.strike(run, pid), *self.look(target)]
            tally.kills += 1
            tally.problems += [f"{self.kind}, {name}, kill {tally.kills}: {each}" for each in problems]
        said = self.start(name, PRUNED).end(PATIENCE)
        if not (target / "final").is_dir():
            tally.problems.append(f"{self.kind}, {name}: lost: {said[-1000:]}")
            return
        tally.runs += 1
        found = self.found(target)
        problems = [f"{key} differs" for key in found if found[key] != self.outcome[key]]
        problems += self.look(target)
        problems += [f"left behind: {path}" for path in target.glob(f"{PREFIX}*") if any(path.iterdir())]
        tally.problems += [f"{self.kind}, {name}: {each}" for each in problems]

    def start(self, name: str, more: list[str]) -> Launched:
        """The run of this name, from where it is."""
        settings = [f"run.output_dir={self.folder / name}", *COMMON, *self.settings, *more]
        words = [word for setting in settings for word in ("--set", setting)]
        options = [str(self.folder / "train.toml"), "--resume", *words]
        cache = str(self.folder / "cache")
        return begin(self.ranks, self.folder / f"{name}-ranks", options, GRPO_FN_CACHE=cache)

    def wait_for_moment(self, run: Launched, target: Path) -> bool:
        """Waits for a random moment; False where the run ended before it came."""

        def comes(holds: Callable[[], bool]) -> bool:
            return run.wait_until(holds, PATIENCE)

        if self.chance.random() < SAVING:
            for _ in range(self.chance.randrange(4)):  # saves that succeed
                if not comes(lambda: is_saving(target)) or not comes(lambda: not is_saving(target)):
                    return False
            if not comes(lambda: is_saving(target)):
                return False
            time.sleep(self.chance.uniform(0, 1.3) * self.save_seconds)
            return True
        if not comes(lambda: all(run.pid(rank) for rank in range(self.ranks))):
            return False
        latest = time.monotonic() + self.chance.uniform(0, self.seconds)
        comes(lambda: time.monotonic() > latest)
        return run.process.poll() is None

    def strike(self, run: Launched, pid: int) -> list[str]:
        """Kills one rank; a problem unless the others and the launcher end soon."""
        os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        try:
            run.process.wait(SECONDS + 60)
        except subprocess.TimeoutExpired:
            run.kill()
        seconds = time.monotonic() - started
        left = [rank for rank in range(self.ranks) if (own := run.pid(rank)) and is_running(own)]
        run.kill()
        if not left and seconds <= SECONDS:
            return []
        return [f"after {seconds:.1f} s {left or 'none'} of the ranks still ran: {run.said()[-600:]}"]

    def look(self, run: Path) -> list[str]:
        """What is wrong in the folder of a run that may be dead."""
        problems = []
        for step, path in checkpoint_folders(run).items():
            try:
                check_manifest(path)
            except UserError as error:
                problems.append(str(error))
                continue
            found, straight = self.fixed(comparable(path)), self.saved[step]
            # With samplers apart, a rank whose sampler is gone may save between a batch step and its update.
            between = len({each["trainer_state"]["loop"]["update"] for each in (found, straight)}) > 1
            if found != straight and not (between and "ranks.samplers=1" in self.settings):
                problems.append(f"{path.name} differs in {', '.join(differing(found, straight))}"[:500])
        lines = [json.loads(line) for line in whole_lines(run / "training_log.jsonl")]
        known = [line for line in lines if "fault" not in line]  # which names a rank that failed
        log = self.fixed(without_noise(known))
        if log != self.outcome["log"][: len(log)]:
            problems.append("the log is not the beginning of the straight run's")
        if not self.outcome["completions"].startswith(b"".join(whole_lines(run / "completions.jsonl"))):
            problems.append("the completions are not the beginning of the straight run's")
        return problems


def differing(one: Any, other: Any, place: str = "") -> list[str]:
    """Where two trees of dicts and lists differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [each for key in one for each in differing(one[key], other[key], f"{place}/{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        parts = zip(one, other, strict=True)
        return [each for i, pair in enumerate(parts) for each in differing(*pair, f"{place}/{i}")]
    return [] if one == other else [place]


def is_saving(run: Path) -> bool:
    """Whether a half-made folder lies in the run's."""
    try:
        names = os.listdir(run)  # os.path and strings: this is asked thousands of times a second
    except FileNotFoundError:
        return False
    return any(name.startswith(PREFIX) and os.path.isdir(f"{run}/{name}/{NEW}") for name in names)


def whole_lines(file: Path) -> list[bytes]:
    """The lines that were written to their end."""
    content = file.read_bytes() if file.exists() else b""
    return content[: content.rfind(b"\n") + 1].splitlines(keepends=True)


def comparable(checkpoint: Path) -> dict:
    """The content of a checkpoint, except how many are kept, in which the runs differ."""
    found = saved(checkpoint)
    state = found["trainer_state"]
    return {**found, "trainer_state": {**state, "config": {**state["config"], "checkpoint": None}}}


def without(tree: Any, start: str) -> Any:
    """A tree of dicts and lists without the names that begin with `start`."""
    if isinstance(tree, dict):
        return {name: without(part, start) for name, part in tree.items() if not str(name).startswith(start)}
    return [without(part, start) for part in tree] if isinstance(tree, list) else tree


def hunt(folder: Path, kills: int, *, kinds=tuple(KINDS), seed: int = 0, most: int = 12) -> Tally:
    """Kills this many processes, one kind after another; each run is killed up to `most` times."""
    chance, tally, rounds = random.Random(seed), Tally(), 0
    harnesses = [Harness(kind, folder / kind.replace(" ", "-"), chance) for kind in kinds]
    while tally.kills < kills:
        share = -(-(kills - tally.kills) // max(len(harnesses) - rounds, 1))
        harnesses[rounds % len(harnesses)].run(f"run-{rounds}", min(share, most, kills - tally.kills), tally)
        rounds += 1
        seen = f"{tally.kills} kills ({tally.while_saving} while saving), {tally.runs} runs ended"
        print(f"{seen}, {len(tally.problems)} problems", flush=True)
    return tally


@click.command()
@click.option("--kills", default=200, show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the instants.")
@click.option("--each", default=0, help="Kills of each kind, in place of --kills, and a line for each.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(list(KINDS)), help="[all]")
@click.option("--staleness", is_flag=True, help=f"The kinds {', '.join(STALENESS)}.")
def main(kills: int, seed: int, each: int, kinds: tuple[str, ...], staleness: bool) -> None:
    """Kill runs again and again, and compare. Exit code 1 where anything was lost or differs."""
    chosen = STALENESS if staleness else kinds or tuple(KINDS)
    problems: list[str] = []
    for part in [(kind,) for kind in chosen] if each else [chosen]:
        with tempfile.TemporaryDirectory(prefix="kills-") as folder:
            tally = hunt(Path(folder), each or kills, kinds=part, seed=seed)
        problems += tally.problems
        if each:
            equal = "equal" if not tally.problems else "DIFFERENT"
            seen = f"{tally.kills} kills ({tally.while_saving} while saving), {tally.runs} runs"
            print(f"| {part[0]} | {seen} | {equal} |", *tally.problems, sep="\n", flush=True)
    print(*problems, sep="\n")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
