"""Freed memory stays in the process where MLX computes on a Linux CPU."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from runners.machine.malloc import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else None
import mlx.core as mx
x = mx.ones((2**24,))
def touch():
    mx.eval(x + 1)
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    touch()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(mode, **environment):
    out = subprocess.run(
        [sys.executable, "-c", FAULTS, mode],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "", "PYTHONPATH": ".", **environment},
    ).stdout.split()
    return out[0], int(out[1])


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_arrays_take_memory_that_is_there_already():
    """Twenty results of 64 MB cost a few page faults, and many times as many without the setting."""
    kept, few = run("keep")
    _, many = run("leave")
    # Where the kernel gives huge pages unasked, "many" is hundreds instead of hundreds of thousands.
    assert kept == "True" and few < 1000 and 10 * few < many


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_a_user_s_own_tuning_is_left_alone():
    """Where the environment tunes malloc nothing is set."""
    assert run("keep", MALLOC_MMAP_THRESHOLD_="131072")[0] == "False"
