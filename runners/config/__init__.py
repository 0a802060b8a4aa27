"""Reads, checks and freezes the config of a run. Nothing here imports MLX before `Config.check`."""
