"""The tests can be collected with what `make test` installs: optional packages may be missing."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# As if PyTorch were not installed: importing it raises ModuleNotFoundError.
WITHOUT_TORCH = """
import sys

import pytest

sys.modules["torch"] = None
sys.exit(pytest.main(["--collect-only", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def test_without_pytorch_the_tests_that_need_it_are_skipped():
    """Collecting them is no error, also where one of them shares its helpers with another."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    paths = [str(file) for file in files if 'importorskip("torch"' in file.read_text()]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *paths], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert paths and done.returncode == 0, done.stdout + done.stderr
