"""Run folders of tests, held open as a run holds its own."""

import os

from runners.checkpoints.run_folder import RunFolder
from runners.files.held_file import HeldFile


def held(folder):
    """A folder as a run's, without its lock; the descriptor stays open until the process ends."""
    return RunFolder(folder, HeldFile(folder, os.O_RDONLY))
