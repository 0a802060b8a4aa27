"""The report of a run: reads its files and makes one HTML page, or serves it while the run
continues.

Nothing here imports MLX or changes a run: it only reads files that `runners.telemetry` writes.
"""
