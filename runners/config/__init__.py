"""Reads, checks and freezes a run's config. Nothing here imports MLX before `Config.check`."""
