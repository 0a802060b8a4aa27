"""Run folders of tests, held open as a run holds its own."""

import os

from runners.checkpoints.run_folder import RunFolder


def held(folder):
    """A folder as a run's, without its lock; the descriptor stays open until the process ends."""
    return RunFolder(folder, os.open(folder, os.O_RDONLY))
