"""Test files in separate processes: some pass, fail, end early or take too long."""

from click.testing import CliRunner

from tests.file_by_file import main

FILES = {
    "test_fine.py": "def test_it():\n    pass\n",
    "test_none.py": "",
    "test_wrong.py": "def test_sum():\n    assert 1 + 1 == 3\n",
    "test_gone.py": "import os\n\ndef test_end():\n    os._exit(3)\n",
}


def test_a_fault_ends_only_its_file(tmp_path):
    """The others pass; the output of those that fail is shown, with the test that ended its process."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    run = CliRunner().invoke(main, [str(tmp_path), "--jobs", "2"])
    assert run.exit_code == 1 and "2 of 4 files passed" in run.output
    for name in FILES:
        verdict = "passed" if name in ("test_fine.py", "test_none.py") else "FAILED"
        assert f"{verdict} {tmp_path / name}" in run.output
    assert "assert (1 + 1) == 3" in run.output and "test_gone.py::test_end" in run.output
    late = CliRunner().invoke(main, [str(tmp_path / "test_fine.py"), "--seconds", "0.01"])
    assert late.exit_code == 1 and "it ended early" in late.output
    fine = CliRunner().invoke(main, [str(tmp_path / "test_fine.py")])
    assert fine.exit_code == 0 and "1 of 1 files passed" in fine.output
