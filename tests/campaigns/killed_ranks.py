"""Runs of several ranks of which one is killed: all end soon, and nothing is lost.

`python -m tests.campaigns.killed_ranks --kills 40` starts 2, 3 or 4 ranks under `mlx.launch --backend ring`
and kills a random one at a random moment, mostly while rank 0 saves. It measures the seconds from the kill to
the end of the last process, looks at what lies in the run's folder, and goes on with `--resume`; a run has to
end with the weights, logs and completions of one that nobody killed.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import attrs
import click

import grpo_fn  # noqa: F401 (before MLX)
from tests.campaigns.kill_harness import COMMON, Harness
from tests.campaigns.killing import PATIENCE, SAVING, Surroundings, Tally
from tests.support.ranks.launching import Launched, begin, is_running
from tests.support.resuming import LETTERS, embedded_config, outcome

SECONDS = 30.0  # from a kill to the end of the last process, at most
NUMBERS = (2, 3, 4)
SETTINGS = [
    "optim.max_steps=6",
    "optim.gradient_accumulation_steps=2",
    "eval.every=0",
    "eval.at_start=false",
    "log.report=false",
    "system.compile=false",  # a process lives for a few steps only
    "rollout.check_every=8",
    "rollout.max_batch=64",
]


@attrs.frozen
class End:
    """How a run ended after one of its ranks was struck."""

    ranks: int
    struck: int
    seconds: float  # to the end of the launcher and all ranks
    saving: bool
    met: bool  # whether the ranks had met before
    said: str  # by the ranks, but for progress

    def __str__(self) -> str:
        return (
            f"{self.ranks} ranks, kill rank {self.struck}"
            f"{', while saving' * self.saving}{'' if self.met else ', before they had met'}: "
            f"{self.seconds:.1f} s"
        )


class RankHarness(Harness):
    """Runs of so many ranks: the straight one, and those of which a rank is killed."""

    def __init__(self, number: int, folder: Path, chance: random.Random) -> None:
        """Makes the straight run in `folder`."""
        self.kind, self.number, self.folder, self.chance = f"{number} ranks", number, folder, chance
        folder.mkdir(parents=True)
        (folder / "letters.py").write_text(LETTERS)
        (folder / "train.toml").write_text(embedded_config(folder))
        around = self._surroundings("straight")
        started, saving = time.monotonic(), 0.0
        run = self._begin("straight")
        while run.process.poll() is None:
            saving += 0.002 * bool(around.staged(whole=True))
            time.sleep(0.002)
        self.seconds = time.monotonic() - started
        run.end()
        if not (folder / "straight/tiny/final").is_dir():
            raise RuntimeError(f"the straight run did not end: {run.said()[-2000:]}")
        self._keep_straight(saving)

    def run(self, name: str, kills: int, tally: Tally) -> None:
        """One run of which ranks are killed up to `kills` times, and which is then left to end."""
        target, around = self.folder / name, self._surroundings(name)
        for _ in range(kills):
            run = self._begin(name)
            rank = self.chance.randrange(self.number)
            moment = self._moment(run, target / "tiny", around)
            pid = run.pid(rank)
            if not moment or pid is None or not is_running(pid):
                run.end()
                break
            end = self._strike_rank(run, rank, around)
            tally.kills += 1
            tally.while_saving += end.saving
            self._note(end, name, around, tally)
        self._to_the_end(name, around, tally)

    def look(self, run: Path) -> list[str]:
        """As for a run alone, but for the log's last line, which may name the rank that failed."""
        log = run / "training_log.jsonl"
        text = log.read_bytes() if log.exists() else b""
        whole = b"".join(line for line in text.splitlines(keepends=True) if b'"fault"' not in line)
        if whole == text:
            return super().look(run)
        log.write_bytes(whole)
        try:
            return super().look(run)
        finally:
            log.write_bytes(text)

    def _note(self, end: End, name: str, around: Surroundings, tally: Tally) -> None:
        """What is wrong after a strike."""
        click.echo(str(end))
        problems = [*self.look(self.folder / name / "tiny"), *around.problems()]
        if end.seconds > SECONDS:
            problems.append(f"the last process ended after {end.seconds:.1f} s")
        done = "finished in" in end.said  # before the strike: nobody was left to say anything
        if end.met and not done and f"rank {end.struck} (" not in end.said:
            problems.append(f"no line names the rank: {end.said[-600:]}")
        zeros = self.number - len(set(re.findall(r"Node with rank (\d+)", end.said)))
        if zeros and not done:
            problems.append(f"{zeros} ranks ended with exit code 0: {end.said[-600:]}")
        _tell([f"{end}: {problem}" for problem in problems], tally)

    def _to_the_end(self, name: str, around: Surroundings, tally: Tally) -> None:
        run = self._begin(name)
        said = run.end(PATIENCE)
        target = self.folder / name / "tiny"
        if not (target / "final").is_dir():
            _tell([f"{self.kind}, {name}: lost: {said[-1000:]}"], tally)
            return
        tally.runs += 1
        found = outcome(target)
        problems = [f"{key} differs" for key in found if found[key] != self.outcome[key]]
        problems += [*self.look(target), *around.problems(), *around.left(tally)]
        _tell([f"{self.kind}, {name}: {problem}" for problem in problems], tally)

    def _begin(self, name: str) -> Launched:
        output = self.folder / name
        settings = [f"run.output_dir={output}", *COMMON, *SETTINGS]
        words = [word for setting in settings for word in ("--set", setting)]
        return begin(
            self.number,
            self.folder / f"{name}-ranks",
            [str(self.folder / "train.toml"), "--resume", *words],
            GRPO_FN_CACHE=str(self.folder / "cache"),
        )

    def _moment(self, run: Launched, folder: Path, around: Surroundings) -> bool:
        """Waits for a random moment; False where the run ended before it came."""

        def saving() -> bool:
            return bool(around.staged(whole=True))

        if self.chance.random() < SAVING:
            for _ in range(self.chance.randrange(2)):  # saves that succeed
                if not run.wait_until(saving, PATIENCE) or not run.wait_until(lambda: not saving(), PATIENCE):
                    return False
            if not run.wait_until(saving, PATIENCE):
                return False
            time.sleep(self.chance.uniform(0, 1.3) * self.save_seconds)
            return True
        all_there = lambda: all(run.pid(rank) for rank in range(self.number))  # noqa: E731
        if not run.wait_until(all_there, PATIENCE):
            return False
        latest = time.monotonic() + self.chance.uniform(0, self.seconds)
        run.wait_until(lambda: time.monotonic() > latest, PATIENCE)
        return run.process.poll() is None

    def _strike_rank(self, run: Launched, rank: int, around: Surroundings) -> End:
        pid = run.pid(rank)
        assert pid is not None
        saving, met = bool(around.staged(whole=True)), "run          tiny" in run.said()
        started = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        try:
            run.process.wait(SECONDS + 60)
        except subprocess.TimeoutExpired:
            run.kill()
        seconds = time.monotonic() - started
        left = [r for r in range(self.number) if (pid := run.pid(r)) and is_running(pid)]
        if left:
            run.kill()
            seconds = float("inf")
        return End(self.number, rank, seconds, saving, met, _lines(run.said()))


def _tell(problems: list[str], tally: Tally) -> None:
    for problem in problems:
        click.echo(f"PROBLEM {problem}")
    tally.problems += problems


def _lines(said: str) -> str:
    """What was printed, without the lines of a run that goes well."""
    progress = re.compile(r"^(run|model|data|each update|writes to|update|saved|eval|completion|going on) ")
    return "\n".join(line for line in said.splitlines() if line.strip() and not progress.match(line))


@click.command()
@click.option("--kills", default=40, show_default=True)
@click.option("--ranks", "numbers", multiple=True, type=int, help="[2, 3 and 4]")
@click.option("--seed", default=0, show_default=True, help="Of the instants.")
@click.option("--keep", type=click.Path(path_type=Path), help="A new folder for the runs, which then stay.")
def main(kills: int, numbers: tuple[int, ...], seed: int, keep: Path | None) -> None:
    """Strike one rank of several again and again, and compare.

    Exit code 1 where anything was lost, differs, was touched, or took too long to end.
    """
    started, chance, tally = time.monotonic(), random.Random(seed), Tally()
    numbers = numbers or NUMBERS
    with tempfile.TemporaryDirectory(prefix="rank-kills-") as folder:
        for place, number in enumerate(numbers):
            harness = RankHarness(number, (keep or Path(folder)) / f"{number}-ranks", chance)
            click.echo(f"{number} ranks: a whole run takes {harness.seconds:.0f} s")
            wanted = kills // len(numbers) + (place < kills % len(numbers))
            rounds, before = 0, tally.kills
            while tally.kills - before < wanted:
                harness.run(f"run-{rounds}", min(wanted - tally.kills + before, 7), tally)
                rounds += 1
    lost = sum(": lost" in problem for problem in tally.problems)
    click.echo(
        f"{tally.kills} kills in {(time.monotonic() - started) / 60:.0f} minutes, {tally.while_saving} of "
        f"them while something was saved; {tally.runs} runs brought to their end; {lost} lost, "
        f"{len(tally.problems) - lost} differences"
    )
    sys.exit(bool(tally.problems))


if __name__ == "__main__":
    main()
