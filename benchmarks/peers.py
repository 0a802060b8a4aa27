"""A whole GRPO step against the package mlx-lm-lora, on one model folder: rollout, learner, peak memory.

Each side runs its own training loop in a process of its own; the steps are taken in turn. Same prompts, same
number of tokens, temperature 1, AdamW, no KL term; its batch_size is the number of prompts.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from benchmarks.command import benchmark, say
from benchmarks.measure import Timing
from benchmarks.peer_sides import Settings
from benchmarks.record import Figure, ratio_figure, time_figure
from benchmarks.shapes import write_folder
from runners.errors import UserError

PACKAGE, VERSION = "mlx-lm-lora", "5.10.2"
TIMES_TARGET = 3.0  # as fast
ROOT = Path(__file__).resolve().parents[1]


class Side:
    """A process of `benchmarks.peer_sides`."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name, self.steps = name, []
        path = Path(settings.work) / f"{name}.json"
        path.write_text(json.dumps(attrs.asdict(settings)))
        self._log = open(path.with_suffix(".log"), "w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peer_sides", name, str(path)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.ready = self._read()

    def step(self) -> dict[str, Any]:
        """Let one step happen; what it reports is kept in `steps`."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self.steps.append(self._read())
        return self.steps[-1]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise UserError(f"{self.name} ended early:\n{self._log.read()[-3000:]}")
        return json.loads(line)

    def close(self) -> None:
        """End the process, which holds its last step's state until then."""
        if self._process.poll() is None:
            self._process.communicate()
        self._log.close()

    def timing(self, *, without_rollout: bool = False, rollout: bool = False) -> Timing:
        """Of whole steps, or of one part of them."""
        seconds = [
            step["rollout"] if rollout else step["seconds"] - (step["rollout"] if without_rollout else 0)
            for step in self.steps
        ]
        return Timing(tuple(seconds))

    def most(self, key: str) -> float:
        """The largest value over all steps."""
        return max(step[key] for step in self.steps)


def compare(settings: Settings, *, repeats: int, judged: bool) -> list[Figure]:
    """Both sides' steps in turn, after two of each to warm up."""
    tune = settings.tune
    say(f"peers: {tune}, {settings.batch_size} × {settings.generations} × {settings.max_new_tokens} tokens")
    sides: list[Side] = []
    try:
        sides.append(Side("ours", settings))
        sides.append(Side("theirs", attrs.evolve(settings, prompts=sides[0].ready["prompts"])))
        for round_ in range(repeats + 2):
            for side in sides if round_ % 2 else sides[::-1]:
                side.step()
            if round_ == 1:
                for side in sides:
                    side.steps.clear()
    finally:
        for side in sides:
            side.close()
    mine, other = sides
    wanted = settings.batch_size * settings.generations * settings.max_new_tokens
    figures = []
    for side, title in ((mine, "ours"), (other, PACKAGE)):
        tokens = [step["tokens"] for step in side.steps]
        figures += [
            time_figure(f"{tune}: step, {title}", side.timing()),
            time_figure(f"{tune}: rollout, {title}", side.timing(rollout=True)),
            time_figure(f"{tune}: the rest, {title}", side.timing(without_rollout=True)),
            Figure(
                name=f"{tune}: tokens a step, {title}",
                value=sum(tokens) / len(tokens),
                note=f"{min(tokens)} to {max(tokens)}",
                at_least=0.99 * wanted,  # a sampled end of text, once in hundreds of thousands, costs less
            ),
            *(
                Figure(name=f"{tune}: peak of {part}, {title}", value=side.most(key) / 1e6, unit="MB")
                for key, part in (
                    ("peak", "MLX's arrays"),
                    ("rollout_peak", "rollouts"),
                    ("rest_peak", "the rest"),
                )
            ),
            Figure(name=f"{tune}: resident memory, {title}", value=side.most("resident") / 1e6, unit="MB"),
        ]
    return [
        *figures,
        ratio_figure(
            f"{tune}: step, {PACKAGE} / ours",
            other.timing() / mine.timing(),
            at_least=TIMES_TARGET if judged else None,
        ),
        ratio_figure(
            f"{tune}: rollout, {PACKAGE} / ours", other.timing(rollout=True) / mine.timing(rollout=True)
        ),
        ratio_figure(
            f"{tune}: the rest, {PACKAGE} / ours",
            other.timing(without_rollout=True) / mine.timing(without_rollout=True),
        ),
        Figure(
            name=f"{tune}: peak, ours / {PACKAGE}",
            value=mine.most("peak") / other.most("peak"),
            unit="x",
            at_most=1.0 if judged else None,
        ),
    ]


def write_data(folder: Path, prompts: int) -> None:
    """Questions of some fifty tokens, all of one length, for our loader."""
    words = ["bando", "kirsu", "melon", "tavor", "zipun", "loger", "fedas", "nikol", "virat", "gumes"]
    for split, number in (("train", prompts), ("test", 1)):
        lines = [
            {"question": " ".join(words[(row + 3 * word) % 10] for word in range(16)), "answer": "1"}
            for row in range(number)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@benchmark("peers", parts="tunes")
@click.option("--tune", "tunes", multiple=True, type=click.Choice(["lora", "full"]), help="Only this one.")
@click.option("--model", default="qwen2-6x256", show_default=True, help="Shape of the model.")
@click.option("--beta", default=0.0, show_default=True, help="Weight of the KL term, on both sides.")
@click.option("--set", "overrides", multiple=True, help="SECTION.KEY=VALUE, for our config.")
@click.option("--repeats", default=7, show_default=True, help="Steps that are timed.")
def main(
    quick: bool, tunes: Sequence[str], model: str, beta: float, overrides: Sequence[str], repeats: int
) -> Sequence[Figure]:
    """A whole GRPO step against mlx-lm-lora, LoRA and full: rollout, learner and peak memory."""
    try:
        found = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != VERSION:
        raise UserError(f"{PACKAGE} {VERSION} is wanted, found {found}: pip install -e '.[peers]'")
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        folder = Path(name)
        write_folder(folder / "model", "tiny" if quick else model)
        write_data(folder, 2 if quick else 4)
        for tune in tunes or (["lora"] if quick else ["lora", "full"]):
            settings = Settings(
                folder=str(folder / "model"),
                work=name,
                tune=tune,
                batch_size=2 if quick else 4,
                generations=2 if quick else 8,
                max_new_tokens=4 if quick else 64,
                beta=beta,
                overrides=list(overrides),
            )
            figures += compare(settings, repeats=1 if quick else repeats, judged=not quick and beta == 0)
    return figures


if __name__ == "__main__":
    main()
