"""Every benchmark from end to end in its smallest form: each command runs and writes what it measured."""

import json
import subprocess
import sys

import pytest

from benchmarks import evidence
from benchmarks.harness import report
from benchmarks.harness.record import load_records
from benchmarks.harness.runs import ROOT
from tests.support.benchmark_runs import check_quick_run


@pytest.mark.parametrize("name", report.NAMES)
def test_each_benchmark_runs_and_writes_its_result(name, tmp_path):
    """--quick --check."""
    if name == "peers":
        pytest.importorskip("mlx_lm_lora", reason="of the extra `peers`")
    check_quick_run(name, tmp_path)


@pytest.mark.parametrize("name", evidence.NAMES)
def test_each_command_of_evidence_runs_and_writes_its_result(name, tmp_path):
    """As the benchmarks do, and a picture beside it."""
    check_quick_run(f"evidence.{name}", tmp_path)
    assert (tmp_path / f"evidence_{name}.svg").is_file()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gsm8k", ["--supervised", "1"]),
        ("gsm8k", ["--form", "boxed", "--tune", "lora", "--sampler", "affine-4"]),
        ("programs", []),
        ("rates", ["--case", "full, rate 2e-06"]),
        ("gpu_step", ["--tokens", "512", "--rounds", "1"]),
    ],
)
def test_each_command_of_one_run_writes_its_result(name, words, tmp_path):
    """On a few problems, with the embedded model."""
    programs = name == "programs"
    row = {"question": "What is 1 + 1?", "answer": ["assert f() == 2"] if programs else "1 + 1 = 2\n#### 2"}
    for file in ("train", "test", "humaneval"):
        (tmp_path / f"{file}.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    command = [sys.executable, "-m", f"benchmarks.evidence.{name}", "--quick", "--model", "embedded"]
    command += ["--data", str(tmp_path), "--out", str(tmp_path / "out"), *words]
    subprocess.run(command, check=True, cwd=ROOT)
    assert load_records(tmp_path / "out" / f"{name}.json")["cpu"].figures
