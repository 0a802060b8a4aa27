"""Every benchmark from end to end in its smallest form: each command runs and writes what it measured."""

import pytest

from benchmarks import evidence
from benchmarks.harness import report
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
    if name == "against_trl":
        pytest.importorskip("trl", reason="of the extra `peers`")
    check_quick_run(f"evidence.{name}", tmp_path)
    assert (tmp_path / f"evidence_{name}.svg").is_file()
