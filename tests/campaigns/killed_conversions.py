"""SIGKILL of `grpo convert` and `grpo export`, alone and in pairs side by side.

After each kill the target has to be the old folder, the new one or (between two renames) missing with the old
one beside it, which the next start puts back. What was not killed has to end with code 0 and the same bytes
as when it is alone, and the user's files around the targets have to be untouched.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import attrs

from runners.files.durable import OLD, check_target
from tests.campaigns.killing import PATIENCE, ROOT, SAVING, Surroundings, Tally, entries, wait
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import train

KINDS = ("convert", "export", "pairs")
PRECIOUS = {"precious.txt": b"a folder that --force replaces"}


@attrs.frozen
class Command:
    """A command without its target, and what it makes."""

    name: str  # of the target
    words: tuple[str, ...]
    made: dict[str, bytes]


class Conversions:
    """Commands of one kind, which are killed again and again."""

    def __init__(self, kind: str, folder: Path, chance: random.Random) -> None:
        """Runs each command once, undisturbed."""
        self.kind, self.folder, self.chance = kind, folder, chance
        folder.mkdir(parents=True)
        source = str(make_model_folder(folder / "source", layers=6))
        run = str(train(folder, "lora", "lora", layers=6))
        words = {
            "converted": ("convert", source, "--out", "{target}", "--dtype", "float32"),
            "packed": ("convert", source, "--out", "{target}", "--bits", "4", "--group-size", "32"),
            "exported": ("export", run, "--out", "{target}"),
            "fused": (
                "export",
                f"{run}/checkpoint-2",
                "--out",
                "{target}",
                "--bits",
                "8",
                "--group-size",
                "32",
            ),
        }
        wanted = {"convert": ("converted", "packed"), "export": ("exported", "fused")}.get(kind, tuple(words))
        straight = Surroundings((folder / "straight", "target"))
        started, saving, self.commands = time.monotonic(), 0.0, []
        for name in wanted:
            process = self._start(words[name], folder / "straight" / name, f"straight-{name}")
            while process.poll() is None:  # two samples a millisecond of whether it is saving
                saving += 0.0005 * bool(straight.staged())
                time.sleep(0.0005)
            if process.returncode:
                raise RuntimeError(
                    f"{name} ended with {process.returncode}: see {folder}/straight-{name}.out"
                )
            self.commands.append(Command(name, words[name], _content(folder / "straight" / name)))
        self.seconds = (time.monotonic() - started) / len(wanted)
        self.save_seconds = saving / len(wanted)

    def run(self, name: str, kills: int, tally: Tally) -> None:
        """So many kills in one folder, and then every command to its end."""
        place = self.folder / name
        around = Surroundings((place, "packed"))
        tried = 0
        while kills and tried < 3 * kills + 3:
            tried += 1
            struck, problems = self._round(place, around, tally)
            kills -= struck
            tally.problems += [f"{self.kind}, {name}, kill {tally.kills}: {p}" for p in problems]
        problems = []
        for command in self.commands:
            process = self._start(command.words, place / command.name, f"{name}-{command.name}")
            if process.wait():
                problems.append(f"lost: {command.name} ended with code {process.returncode}")
            elif _content(place / command.name) != command.made:
                problems.append(f"{command.name} differs")
        tally.runs += len(self.commands)
        problems += [*around.problems(), *around.left(tally)]
        tally.problems += [f"{self.kind}, {name}: {p}" for p in problems]

    def _round(self, place: Path, around: Surroundings, tally: Tally) -> tuple[int, list[str]]:
        """One or two processes, of which one is killed, or both; how many were, and what is wrong."""
        number = 2 if self.kind == "pairs" else 1
        commands = self.chance.sample(self.commands, number)
        if number == 2 and self.chance.random() < 0.25:
            commands[1] = commands[0]  # both for one target
        old = {command.name: self._prepare(place / command.name) for command in commands}
        processes = [
            self._start(command.words, place / command.name, f"{place.name}-{i}-{command.name}")
            for i, command in enumerate(commands)
        ]
        tally.pairs += number - 1
        victims = list(range(number)) if self.chance.random() < 0.1 else [self.chance.randrange(number)]
        struck = self._strike([processes[i] for i in victims], around)
        codes = [process.wait() for process in processes]
        tally.kills += struck
        tally.while_saving += bool(struck and around.staged())
        problems = []
        for i, (command, code) in enumerate(zip(commands, codes, strict=True)):
            if code and not (i in victims and code == -9):
                problems.append(f"lost: {command.name} ended with code {code}, beside another one")
        for command in {command.name: command for command in commands}.values():
            ended = any(not codes[i] for i in range(number) if commands[i] is command)
            problems += self._look(place / command.name, command, old[command.name], ended, around)
        return struck, [*problems, *around.problems(), *around.left(tally)]

    def _look(
        self, target: Path, command: Command, old: bool, ended: bool, around: Surroundings
    ) -> list[str]:
        """What is wrong with a target, as it lies there and after the next start."""
        aside = [_content(path / OLD) for path in around.staged() if (path / OLD).is_dir()]
        if old and not target.exists() and PRECIOUS not in aside:
            return [f"lost: {command.name}, and nothing has the old folder"]
        check_target(target, True)
        found = _content(target)
        if not found:
            return [f"lost: {command.name} did not come back"] if old or ended else []
        whole = found == command.made or (old and not ended and found == PRECIOUS)
        return [] if whole else [f"{command.name} differs"]

    def _prepare(self, target: Path) -> bool:
        """Puts a folder of the user's in the target's place, mostly; whether it did."""
        shutil.rmtree(target, ignore_errors=True)
        check_target(target, True)  # may bring back what is to go as well
        shutil.rmtree(target, ignore_errors=True)
        if self.chance.random() < 0.3:
            return False
        target.mkdir()
        for name, content in PRECIOUS.items():
            (target / name).write_bytes(content)
        return True

    def _start(self, words: tuple[str, ...], target: Path, log: str) -> subprocess.Popen:
        command = [
            sys.executable,
            "-m",
            "runners.cli",
            *(word.format(target=target) for word in words),
            "--force",
        ]
        with open(self.folder / f"{log}.out", "w") as stream:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )

    def _strike(self, processes: list[subprocess.Popen], around: Surroundings) -> int:
        """Waits for a random moment and kills; how many there were left to kill."""
        end = time.monotonic() + PATIENCE
        if self.chance.random() < SAVING:
            wait(lambda: bool(around.staged()), processes[0], end)
            time.sleep(self.chance.uniform(0, 1.3) * self.save_seconds)
        else:
            wait(lambda: False, processes[0], end, within=self.chance.uniform(0, self.seconds))
        struck = 0
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
                struck += process.returncode == -9
        return struck


def _content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in entries(folder) if file.is_file()}
