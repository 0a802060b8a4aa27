"""Run folders of tests, locked as a run locks its own."""

import os

from runners.checkpoints.run_folder import RunFolder
from runners.files.run_files import LOCK


def held(folder):
    """A folder as a run's; its lock file stays open until the process ends."""
    return RunFolder(folder, os.open(folder / LOCK, os.O_RDWR | os.O_CREAT))
