"""The config of a run: read, checked and frozen. Nothing here imports MLX before `Config.check`."""
