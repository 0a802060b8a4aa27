"""Reads captured episodes as openenv's training traces, whose validator is strict."""

import json
import sys

from openenv.core.harness.training import TrainingTrace  # pyright: ignore

for number, turns in enumerate(json.load(sys.stdin)):
    entries = [{**turn, "metadata": {"node_id": f"{number}-{n}"}} for n, turn in enumerate(turns)]
    trace = TrainingTrace.from_entries(entries)
    assert len(trace.turns) == len(turns) > 0
print("fine")
