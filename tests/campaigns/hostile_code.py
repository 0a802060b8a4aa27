"""Runs with tools and rewards that fork, block, exit and flood, one kind at a time and all together.

python -m tests.campaigns.hostile_code
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.runs.hostile_code import ACTS, hostile_run


def ended_in_time(folder: Path, acts: Sequence[str], schedule: str, ranks: int) -> bool:
    """Whether a run with an update for each of the acts waits for none longer than its limits."""
    updates = max(len(acts), 3)
    spent = hostile_run(folder, acts, schedule, ranks, updates)
    print(f"{schedule}, {ranks} ranks, {updates} updates: {spent:.0f} s ({', '.join(acts)})", flush=True)
    # A batch step: two turns of calls and a reward, each with a second, two more to be ended, and a restart.
    return spent < 60 + updates * 30


def main() -> None:
    """Each kind alone and all together, in both schedules, on one rank and two."""
    with tempfile.TemporaryDirectory() as folder:
        cases = itertools.product([ACTS, *((act,) for act in ACTS)], ("together", "arrival"), (1, 2))
        for number, case in enumerate(cases):
            assert ended_in_time(Path(folder, str(number)), *case), case


if __name__ == "__main__":
    main()
