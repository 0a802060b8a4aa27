"""The wheel in a new environment of each Python that is supported and on the PATH, used from another folder.

It needs pip's index; the test with uv needs that on the PATH.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
EXTRA = "[cpu]" if sys.platform == "linux" else ""


def run(*command, cwd, **more):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more
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


def use(folder, elsewhere):
    """`grpo --help`, and two updates of the quickstart, which ships model and data."""
    elsewhere.mkdir()
    assert "Commands:" in run(folder / "grpo", "--help", cwd=elsewhere)
    run(folder / "grpo-run", "quickstart", "--set", "optim.max_steps=2", cwd=elsewhere)
    assert (elsewhere / "outputs").is_dir()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("python", ["python3.11", "python3.12", "python3.13"])
def test_a_wheel_runs_anywhere(tmp_path, wheel, python):
    """By pip, in a new environment."""
    if subprocess.run(["sh", "-c", f"{python} --version"], capture_output=True, check=False).returncode:
        pytest.skip(f"{python} is not on the PATH")
    run(python, "-m", "venv", "env", cwd=tmp_path)
    run(tmp_path / "env/bin/pip", "install", "-q", "-c", CONSTRAINTS, f"{wheel}{EXTRA}", cwd=tmp_path)
    use(tmp_path / "env/bin", tmp_path / "elsewhere")


@pytest.mark.timeout(3600)
@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not on the PATH")
def test_uv_installs_it_as_a_tool(tmp_path, wheel):
    """Both commands, in uv's folder of tools."""
    places = {"UV_TOOL_DIR": str(tmp_path / "tools"), "UV_TOOL_BIN_DIR": str(tmp_path / "bin")}
    options = ("-q", "--python", sys.executable, "--constraints", CONSTRAINTS)
    run("uv", "tool", "install", *options, f"{wheel}{EXTRA}", cwd=tmp_path, **places)
    use(tmp_path / "bin", tmp_path / "elsewhere")
