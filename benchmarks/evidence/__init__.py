"""Commands that show whether and how well training works: many whole runs, each in a process of its own.

`command` makes the commands, `pool` runs their processes side by side, `readings` reads logs, `page` fills
docs/evidence.md. Results are in benchmarks/results/evidence.
"""

NAMES = ("against_trl", "real_model", "real_samplers", "staleness")
"""The commands, `python -m benchmarks.evidence.NAME`."""
CLOSED = ("samplers", "presets", "masters", "difficulty", "cold_start")
"""Answered once: their commands are gone, docs/evidence.md shows their last results."""
