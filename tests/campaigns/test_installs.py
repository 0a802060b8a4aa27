"""The wheel in a new environment of each Python that is supported and found, used from another folder.

It needs pip's index. `GRPO_PYTHONS` names the interpreters; else python3.11, 3.12 and 3.13 on the PATH.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOUND = os.environ.get("GRPO_PYTHONS", "").split() or [
    path
    for minor in (11, 12, 13)
    if (path := shutil.which(f"python3.{minor}"))
    and subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0  # no empty shim
]


def run(*command, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def build(source, folder):
    """The wheel that pip builds of a folder or a URL."""
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, source, cwd=folder)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="wants a clone: there is no .git")
def test_pip_installs_from_git(tmp_path):
    """What is committed makes a wheel with the package, its presets and the embedded model."""
    names = zipfile.ZipFile(build(f"git+file://{ROOT}", tmp_path)).namelist()
    wanted = {"grpo_entry.py", "grpo_fn/__init__.py", "configs/quickstart.toml", "runners/cli.py"}
    assert wanted <= {*names} and any(name.endswith(".safetensors") for name in names)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("python", FOUND)
def test_a_wheel_runs_anywhere(tmp_path, wheel, python):
    """`grpo --help`, and two updates of the quickstart, which ships model and data."""
    run(python, "-m", "venv", "env", cwd=tmp_path)
    bin_ = tmp_path / "env" / "bin"
    extra = "[cpu]" if sys.platform == "linux" else ""
    constraints = ROOT / "constraints.txt"
    run(bin_ / "pip", "install", "-q", "-c", constraints, f"{wheel}{extra}", cwd=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert "Commands:" in run(bin_ / "grpo", "--help", cwd=elsewhere)
    run(bin_ / "grpo-run", "quickstart", "--set", "optim.max_steps=2", cwd=elsewhere)
    assert (elsewhere / "outputs").is_dir()
