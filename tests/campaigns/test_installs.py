"""The wheel of what is committed, in a new environment and used from another folder. It needs pip's index."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXTRA = "[cpu]" if sys.platform == "linux" else ""


def run(*command, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [*map(str, command)]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.timeout(3600)
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="wants a clone: there is no .git")
def test_a_wheel_runs_anywhere(tmp_path):
    """`grpo --help`, and two updates of the quickstart, which ships model and data."""
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", f"git+file://{ROOT}", cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    run(sys.executable, "-m", "venv", "env", cwd=tmp_path)
    constraints = ROOT / "constraints.txt"
    run(tmp_path / "env/bin/pip", "install", "-q", "-c", constraints, f"{wheel}{EXTRA}", cwd=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert "Commands:" in run(tmp_path / "env/bin/grpo", "--help", cwd=elsewhere)
    run(tmp_path / "env/bin/grpo-run", "quickstart", "--set", "optim.max_steps=2", cwd=elsewhere)
    assert (elsewhere / "outputs").is_dir()
