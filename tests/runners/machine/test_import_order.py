"""Every command loads a fast BLAS before it imports `mlx.core`."""

import subprocess
import sys
from pathlib import Path

import pytest

from runners.cli import COMMANDS
from runners.machine import startup

ROOT = Path(__file__).resolve().parents[3]
IN_TIME, TOO_LATE = 42, 43
# Runs a command until it imports MLX, and then ends the process.
PROBE = f"""
import ctypes, os, sys, traceback

class Probe:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx.core":
            if hasattr(ctypes.CDLL(None), "cblas_sgemm"):
                os._exit({IN_TIME})
            traceback.print_stack()
            sys.stderr.flush()
            os._exit({TOO_LATE})

sys.meta_path.insert(0, Probe())
from runners.cli import main
main(sys.argv[1:])
"""
CALLS = [
    *(f"{name} quickstart" for name in ("run", "plan", "sft", "difficulty", "bench", "check")),
    *("run quickstart --dry-run", "run quickstart --resume", "doctor"),
    *("chat embedded", "eval embedded", "serve embedded"),
    *(f"generate embedded --prompts prompts.{kind}" for kind in ("txt", "jsonl", "parquet")),
    *("generate embedded hello", "generate embedded hello --image picture.png"),
    *("convert model --out out", "export model --out out", "init embedded prompts.jsonl"),
    "eval embedded --config quickstart --data prompts.jsonl",
]


@pytest.mark.skipif(startup.load_blas().library is None, reason="no OpenBLAS or MKL, or none is needed")
@pytest.mark.parametrize("call", CALLS)
def test_a_command_loads_the_blas_before_mlx(tmp_path, call):
    """Each command is called in every way that changes which modules it imports first."""
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "prompts.txt").write_text("hello\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello", "question": "1+1?", "answer": "2"}\n')
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["hello"]}), tmp_path / "prompts.parquet")
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *call.split()],
        env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "GRPO_FN_CACHE": str(tmp_path)},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == IN_TIME, done.stdout + done.stderr


def test_every_command_is_tested():
    """CALLS contains every command, except those that only read runs' files and never import MLX."""
    assert {*(call.split()[0] for call in CALLS), "report", "runs", "watch"} == set(COMMANDS)
