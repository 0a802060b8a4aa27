"""One side of `benchmarks.mechanisms`, in a process of its own: a step of a run, when told to.

    python -m benchmarks.harness.step_side SIDE.json

The first line on stdout says that all is loaded and compiled. Each line on stdin then lets one step happen;
after it, a line of JSON on stdout says what it took.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx

NO_CHANGE = "optim.learning_rate=1e-12"  # both sides sample from the same weights at every step


@attrs.frozen(kw_only=True)
class Side:
    """What the process does."""

    config: str  # a file, or a preset's name
    overrides: list[str]  # SECTION.KEY=VALUE
    disable: list[str]  # mechanisms, as `grpo_fn.backends.disable` takes them


def graded(completions: Sequence[Any], prompts: Sequence[Any], **_: Any) -> list[float]:
    """0 or 1 by a completion's letters; all are right that answer questions which begin with an easy word.

    Those are a quarter of 16 questions of `benchmarks.peers.write_data`, and none of other data.
    """
    from benchmarks.peers import WORDS

    scores = []
    for prompt, completion in zip(prompts, completions, strict=True):
        found = [word for word in WORDS if word in str(prompt)]
        easy = bool(found) and min(found, key=str(prompt).index) in WORDS[:2]
        scores.append(1.0 if easy else float(sum(map(ord, str(completion))) % 2))
    return scores


def main(path: str) -> None:
    """Builds the run and takes steps until stdin ends."""
    side = Side(**json.loads(Path(path).read_text(encoding="utf-8")))
    # What MLX or a library prints must not come between the lines.
    out = os.dup(1)
    os.dup2(2, 1)
    from runners.machine.startup import prepare

    platform = prepare()
    from grpo_fn.backends import disabled
    from runners.config.loading import load_config
    from runners.profiling import Stepping
    from runners.telemetry.diary import Diary
    from runners.telemetry.report import Report
    from runners.training.setup import SetUp

    config = load_config(side.config, [*side.overrides, NO_CHANGE]).check()
    with disabled(*side.disable):
        stepping = Stepping(SetUp(config, platform).build(), Diary(Report()))

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
