"""Commands that show whether and how well training works: many complete runs, each in a separate
process.

`command` creates the commands, `pool` runs their processes in parallel, `readings` reads logs, and
`page` fills docs/evidence.md. Results are in benchmarks/results/evidence.
"""

NAMES = ("against_trl", "real_model", "real_samplers", "staleness")
"""The commands, `python -m benchmarks.evidence.NAME`."""
CLOSED = ("samplers", "presets", "masters", "difficulty", "cold_start")
"""Comparisons that were made once: their commands were removed, and docs/evidence.md shows their
last results.
"""
