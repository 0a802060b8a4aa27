"""Commands that show whether and how well training works: many whole runs, each in a process of its own.

`command` makes the commands, `pool` runs their processes side by side, `readings` reads logs, `page` fills
docs/evidence.md. Results are in benchmarks/results/evidence.
"""

NAMES = (
    "against_trl",
    "samplers",
    "presets",
    "masters",
    "real_model",
    "real_samplers",
    "difficulty",
    "cold_start",
)
"""The commands, `python -m benchmarks.evidence.NAME`, in the order of docs/evidence.md."""
