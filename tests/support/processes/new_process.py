"""Python in a new process, and the digest of the weights that it saves."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

ROOT = Path(__file__).resolve().parents[3]


def python(*words: Any, cwd: Any = ROOT, code: Any = 0, **environment: Any) -> Any:
    """`python WORDS`, finished, with its output as text; it must end with this code (None: any)."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": paths, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done


def in_new_process(code, *arguments, **options):
    """Runs code in a new Python process; the output of a successful end."""
    return python("-c", code, *arguments, **options).stdout


def digest_of(file):
    """The digest of a weights file, as OWN_LOOP computes it for a state's parameters."""
    digest = hashlib.sha256()
    weights: Any = mx.load(str(file))
    for name, leaf in sorted(weights.items()):
        digest.update(name.encode() + np.array(leaf).tobytes())
    return digest.hexdigest()
