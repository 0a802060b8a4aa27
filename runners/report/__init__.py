"""Reports on a run: reads its files and writes an HTML page, or serves the page while the run
continues.

Nothing here imports MLX or changes a run. Only files that `runners.telemetry` writes are read.
"""
