"""Small disks for tests."""

import contextlib
import shutil
import subprocess

import pytest


@contextlib.contextmanager
def small_disk(folder, size):
    """A file system of so many bytes, mounted on a new folder, which takes root; else the test is skipped."""
    folder.mkdir(parents=True)
    mount = shutil.which("mount")
    command = [mount or "", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if not mount or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
