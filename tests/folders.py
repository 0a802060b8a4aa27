"""Run folders of tests, held open as a run holds its own."""

import os

from runners.held_file import HeldFile
from runners.run_folder import RunFolder


def held(folder):
    """A folder as a run's, without its lock; the descriptor stays open until the process ends."""
    return RunFolder(folder, HeldFile(folder, os.O_RDONLY))
