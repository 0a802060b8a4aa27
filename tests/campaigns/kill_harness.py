"""SIGKILL at random instants, mostly while something is saved: nothing may be lost, nothing may differ.

`python -m tests.campaigns.kill_harness --kills 1000` starts `grpo-run --resume` on the embedded model,
kills them, and looks after each kill at what lies there: every checkpoint has to be whole and equal to the
one of a run that nobody killed, `latest` has to name one, and the logs have to be the beginning of that
run's. It kills `grpo convert` and `grpo export`, too, alone and in pairs (`killed_conversions.py`). Files
of the user's, of many shapes, lie around all targets and have to be untouched after each kill.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import click

import grpo_fn  # noqa: F401 (before MLX)
from runners.checkpoints.manifest import check_manifest
from runners.checkpoints.run_folder import checkpoint_folders
from runners.errors import UserError
from tests.campaigns import killed_conversions
from tests.campaigns.killed_conversions import Conversions
from tests.campaigns.killing import PATIENCE, ROOT, SAVING, Surroundings, Tally, wait
from tests.support.resuming import LETTERS, embedded_config, outcome, saved, without_noise
from tests.support.tiny_models import make_model_folder

COMMON = ["optim.max_steps=10", "checkpoint.every=1", "eval.every=3", "rollout.max_new_tokens=10"]
KINDS = {
    "full": ["optim.gradient_accumulation_steps=2", "loss.beta=0.05", "loss.ref_sync_every=4"],
    "lora": ["model.tune=lora", "model.lora={rank=4}", "optim.num_iterations=2", "optim.minibatches=2"],
    "quantized": [
        "rollout.quantization=affine-4",
        "rollout.storage=packed",
        "loss.sync_every=2",
        "loss.correction=token_truncate",
    ],
    "experts": [
        "model.path=mixtral",  # beside the config
        "loss.router_replay=true",
        "data.curriculum=adaptive",
        "data.pass_reward=0.5",
        "rollout.first_stage=2",
    ],
}
ALL = (*KINDS, *killed_conversions.KINDS)
PRUNED = ["checkpoint.keep_last=2", "checkpoint.keep_best=1"]  # so that checkpoints are removed, too


class Harness:
    """Runs of one kind: the straight one, and those that are killed."""

    def __init__(self, kind: str, folder: Path, chance: random.Random) -> None:
        """Makes the straight run in `folder`."""
        self.kind, self.folder, self.chance = kind, folder, chance
        folder.mkdir(parents=True)
        (folder / "letters.py").write_text(LETTERS)
        (folder / "train.toml").write_text(embedded_config(folder))
        make_model_folder(folder / "mixtral", "mixtral")
        around = self._surroundings("straight")
        started, saving = time.monotonic(), 0.0
        process = self._start(folder / "straight", [])
        while process.poll() is None:  # two samples a millisecond of whether it is saving
            saving += 0.0005 * bool(around.staged(whole=True))
            time.sleep(0.0005)
        if process.returncode:
            raise RuntimeError(
                f"the straight run ended with {process.returncode}: see {folder / 'straight.out'}"
            )
        self.seconds = time.monotonic() - started
        self._keep_straight(saving)

    def _keep_straight(self, saving: float) -> None:
        """Reads the straight run, which was saving for so many seconds."""
        straight = self.folder / "straight" / "tiny"
        self.saved = {step: saved(path) for step, path in checkpoint_folders(straight).items()}
        self.save_seconds = saving / len(self.saved)
        self.outcome = outcome(straight)

    def run(self, name: str, kills: int, tally: Tally) -> None:
        """One run that is killed up to `kills` times, and then left to end."""
        target = self.folder / name
        around = self._surroundings(name)
        for _ in range(kills):
            process = self._start(target, PRUNED)
            if not self._strike(process, target / "tiny", around):
                break
            tally.kills += 1
            tally.while_saving += bool(around.staged(whole=True))
            problems = [*self.look(target / "tiny"), *around.problems()]
            tally.problems += [f"{self.kind}, {name}, kill {tally.kills}: {p}" for p in problems]
        process = self._start(target, PRUNED)
        if process.wait():
            said = (self.folder / f"{name}.out").read_text()[-400:]
            tally.problems.append(f"{self.kind}, {name}: lost: code {process.returncode}: {said}")
            return
        tally.runs += 1
        found = outcome(target / "tiny")
        different = [key for key in found if found[key] != self.outcome[key]]
        tally.problems += [f"{self.kind}, {name}: {key} differs" for key in different]
        problems = [*self.look(target / "tiny"), *around.problems(), *around.left(tally)]
        tally.problems += [f"{self.kind}, {name}: {p}" for p in problems]

    def look(self, run: Path) -> list[str]:
        """What is wrong in the folder of a run that may be dead."""
        problems = []
        for step, path in checkpoint_folders(run).items():
            try:
                check_manifest(path)
            except UserError as error:
                problems.append(str(error))
                continue
            if _comparable(saved(path)) != _comparable(self.saved[step]):
                problems.append(f"{path.name} differs")
        log, wanted = _whole_lines(run / "training_log.jsonl"), self.outcome["log"]
        if without_noise([json.loads(line) for line in log]) != wanted[: len(log)]:
            problems.append("the log is not the beginning of the straight run's")
        texts = b"".join(_whole_lines(run / "completions.jsonl"))
        if not self.outcome["completions"].startswith(texts):
            problems.append("the completions are not the beginning of the straight run's")
        return problems

    def _start(self, output: Path, more: list[str]) -> subprocess.Popen:
        settings = [f"run.output_dir={output}", *COMMON, *KINDS[self.kind], *more]
        command = [sys.executable, "-m", "runners.cli", "run", str(self.folder / "train.toml"), "--resume"]
        with open(f"{output}.out", "w") as stream:
            return subprocess.Popen(
                [*command, *(word for setting in settings for word in ("--set", setting))],
                cwd=ROOT,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, "GRPO_FN_CACHE": str(self.folder / "cache")},
            )

    def _surroundings(self, name: str) -> Surroundings:
        return Surroundings((self.folder / name, "tiny"), (self.folder / name / "tiny", "checkpoint-2"))

    def _strike(self, process: subprocess.Popen, run: Path, around: Surroundings) -> bool:
        """Waits for a random moment and kills; False where the process ended before it came."""

        def saving() -> bool:
            return bool(around.staged(whole=True))

        end = time.monotonic() + PATIENCE
        if self.chance.random() < SAVING:
            for _ in range(self.chance.randrange(4)):  # saves that succeed
                if not wait(saving, process, end):
                    return False
                wait(lambda: not saving(), process, end)
            if not wait(saving, process, end):
                return False
            time.sleep(self.chance.uniform(0, 1.3) * self.save_seconds)
        else:
            if not wait(lambda: (run / ".lock").exists(), process, end):
                return False
            wait(lambda: False, process, end, within=self.chance.uniform(0, self.seconds))
        if process.poll() is not None:
            return False
        process.kill()
        process.wait()
        return True


def _whole_lines(file: Path) -> list[bytes]:
    content = file.read_bytes() if file.exists() else b""
    return content[: content.rfind(b"\n") + 1].splitlines(keepends=True)


def _comparable(checkpoint: dict) -> dict:
    # How many checkpoints stay is the one thing in which the runs differ on purpose.
    state = checkpoint["trainer_state"]
    return {**checkpoint, "trainer_state": {**state, "config": {**state["config"], "checkpoint": None}}}


def hunt(
    folder: Path,
    kills: int,
    *,
    kinds=ALL,
    seed: int = 0,
    most: int = 12,
    say=print,
) -> Tally:
    """Kills so many processes, spread over the kinds; each run or folder sees up to `most` of them."""
    chance, tally, rounds = random.Random(seed), Tally(), 0
    harnesses = [
        (Harness if kind in KINDS else Conversions)(kind, folder / kind, chance)
        for kind in dict.fromkeys(kinds)
    ]
    while tally.kills < kills:
        harness = harnesses[rounds % len(harnesses)]
        share = -(-(kills - tally.kills) // max(len(harnesses) - rounds, 1))
        harness.run(f"run-{rounds}", min(share, most, kills - tally.kills), tally)
        rounds += 1
        say(
            f"{tally.kills} kills ({tally.while_saving} while saving), {tally.runs} runs ended, "
            f"{len(tally.problems)} problems"
        )
    return tally


@click.command()
@click.option("--kills", default=200, show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the instants.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(ALL), help="[all]")
@click.option("--keep", type=click.Path(path_type=Path), help="A new folder for the runs, which then stay.")
@click.option("--jobs", default=1, show_default=True, help="Side by side; with six and more one kind each.")
def main(kills: int, seed: int, kinds: tuple[str, ...], keep: Path | None, jobs: int) -> None:
    """Kill runs, conversions and exports again and again, and compare.

    Exit code 1 where anything was lost, differs, or was touched.
    """
    started = time.monotonic()
    kinds = kinds or ALL
    with tempfile.TemporaryDirectory(prefix="kills-") as folder, ProcessPoolExecutor(jobs) as pool:
        hunts = [
            pool.submit(
                hunt,
                (keep or Path(folder)) / f"job-{job}",
                kills // jobs + (job < kills % jobs),
                kinds=kinds if jobs < len(kinds) else kinds[job % len(kinds) :][:1],
                seed=seed + job,
                say=click.echo,
            )
            for job in range(jobs)
        ]
        tally = Tally()
        for done in hunts:
            tally.add(done.result())
    for problem in tally.problems:
        click.echo(problem)
    lost = sum(": lost" in problem for problem in tally.problems)
    click.echo(
        f"{tally.kills} kills in {(time.monotonic() - started) / 60:.0f} minutes, {tally.while_saving} of "
        f"them while something was saved; {tally.pairs} pairs side by side; {tally.runs} runs and commands "
        f"brought to their end; {lost} lost, {len(tally.problems) - lost} differences; {tally.unmarked} "
        "empty folders of processes that were killed before they could mark them"
    )
    sys.exit(bool(tally.problems))


if __name__ == "__main__":
    main()
