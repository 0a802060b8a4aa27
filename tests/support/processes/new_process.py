"""Code in a Python of its own, and the digest of the weights that it leaves behind."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np

from tests.support.processes import warm_process

ROOT = Path(__file__).resolve().parents[3]


def in_new_process(code, *arguments, cwd=ROOT, run=subprocess.run, **environment):
    """Runs code in a Python of its own; its stdout, after it ended well."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def in_warm_process(code, *arguments, cwd=ROOT, **environment):
    """The same as a fork of a Python that has imported the package: for code that imports in any order."""
    return in_new_process(code, *arguments, cwd=cwd, run=warm_process.run, **environment)


def digest_of(file):
    """The digest of a weights file, as OWN_LOOP takes it of a state's parameters."""
    digest = hashlib.sha256()
    for name, leaf in sorted(mx.load(str(file)).items()):
        digest.update(name.encode() + np.array(leaf).tobytes())
    return digest.hexdigest()
