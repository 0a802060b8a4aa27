"""A process that runs a step of a run on request, and reports the step's cost.

    python -m benchmarks.harness.stepping SIDE.json

A line of JSON on stdout reports that everything is loaded and compiled. Then, each line on stdin
starts one step, followed by a line of JSON on stdout with its cost.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx

from benchmarks.harness.runs import ROOT
from runners.config.loading import Config, load_config
from runners.errors import UserError

_SECONDS_TO_END = 10  # what MLX has compiled for a GPU is kept at a process's end
NO_CHANGE = "optim.learning_rate=1e-12"  # both sides sample from the same weights at every step


@attrs.frozen(kw_only=True)
class Side:
    """The task of the process."""

    config: str  # a file, or a preset's name
    overrides: list[str]  # SECTION.KEY=VALUE
    disable: list[str]  # mechanisms, as `grpo_fn.backends.disable` takes them


class SteppingProcess:
    """One side in a separate process."""

    def __init__(self, name: str, side: Side, work: Path, environment: Mapping[str, str]) -> None:
        """Starts the process, and waits until it is ready.

        Args:
            name: its name in messages.
            side: its task.
            work: folder for its settings and its stderr.
            environment: the complete environment.

        Raises:
            UserError: the process ended early; the same applies to `step`.
        """
        self.name = name
        self._log = tempfile.TemporaryFile("w+", dir=work)  # noqa: SIM115
        with tempfile.NamedTemporaryFile("w", suffix=".json", dir=work, delete=False) as file:
            json.dump(attrs.asdict(side), file)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, file.name],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        try:
            self._read()
        except BaseException:
            self.end()
            raise

    def step(self) -> dict[str, Any]:
        """Runs one step, and returns its report."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise UserError(f"{self.name} ended early:\n{self._log.read()[-3000:]}")
        return json.loads(line)

    def end(self) -> None:
        """Tells the process that there are no further steps, and ends it if it does not exit."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.close()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


def graded(completions: Sequence[Any], prompts: Sequence[Any], **_: Any) -> list[float]:
    """0 or 1, depending on a completion's letters; all completions are right for questions that
    start with an easy word.

    These are a quarter of the 16 questions of `same_length`, and none in other
    data.
    """
    from benchmarks.harness.shapes import WORDS

    scores = []
    for prompt, completion in zip(prompts, completions, strict=True):
        found = [word for word in WORDS if word in str(prompt)]
        easy = bool(found) and min(found, key=str(prompt).index) in WORDS[:2]
        scores.append(1.0 if easy else float(sum(map(ord, str(completion))) % 2))
    return scores


def built(config: Config, *, ranks: Any = None, note: Callable[[str], None] = print) -> Any:
    """The run of a checked config, ready for its steps."""
    from runners.machine.startup import prepare
    from runners.profiling import Stepping
    from runners.ranks.ranks import Ranks
    from runners.telemetry.diary import Diary
    from runners.telemetry.report import Report
    from runners.training.setup import SetUp

    platform = prepare(config=config)
    return Stepping(SetUp(config, platform, note, ranks=ranks or Ranks()).build(), Diary(Report()))


def main(path: str) -> None:
    """Builds the run and takes steps until stdin ends."""
    side = Side(**json.loads(Path(path).read_text(encoding="utf-8")))
    # What MLX or a library prints must not come between the lines.
    out = os.dup(1)
    os.dup2(2, 1)
    from grpo_fn.backends import disabled
    from runners.machine.startup import prepare

    prepare()
    config = load_config(side.config, [*side.overrides, NO_CHANGE]).check()
    with disabled(*side.disable):
        stepping = built(config)

        def step() -> dict[str, Any]:
            mx.reset_peak_memory()
            started = time.perf_counter()
            worked = time.process_time()
            done = stepping.step()
            return {
                "seconds": time.perf_counter() - started,
                "cpu": time.process_time() - worked,
                "peak": mx.get_peak_memory(),
                "tokens": done["tokens"],
            }

        step()  # traces and compiles
        os.write(out, b'{"ready": true}\n')
        while sys.stdin.readline():
            os.write(out, (json.dumps(step()) + "\n").encode())


if __name__ == "__main__":
    main(sys.argv[1])
