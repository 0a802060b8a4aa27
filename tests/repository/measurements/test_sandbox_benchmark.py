"""`python -m benchmarks.sandbox`: its programs do what their names say."""

import json

import pytest
from click.testing import CliRunner

from benchmarks.harness.record import load_records
from benchmarks.sandbox import main, solutions
from runners.errors import UserError
from runners.sandbox.code_tests import judge_program
from runners.sandbox.sandbox import check_sandbox

try:
    check_sandbox()
except UserError as error:
    pytest.skip(str(error), allow_module_level=True)

TESTS = ["assert f(1, [2]) == (3,)", "assert f('a', x) == {'b': 2}"]


def test_a_right_program_is_a_table_of_its_tests_values():
    found = solutions([test.replace("x", "None") for test in TESTS])
    assert found is not None
    assert [judge_program(each, TESTS[:1]).share for each in found] == [1.0, 0.0]
    assert solutions(["assert f(1)"]) is None and solutions(["f(1) == 1"]) is None


def test_the_record_has_the_figures(tmp_path):
    rows = [{"question": "", "answer": ["assert f(1) == 2"]}, {"question": "", "answer": ["assert g()"]}]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = CliRunner().invoke(main, ["--quick", "--data", str(data), "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "tests of 1 of 2 rows" in done.stderr
    (record,) = load_records(tmp_path / "sandbox.json").values()
    assert len(record.figures) == 5 and all(figure.value > 0 for figure in record.figures)
