"""Programs in a model's text against their tests."""

import json
import signal
import threading
import time

import pytest

from runners.errors import UserError
from runners.sandbox.code_tests import extract_code, passed_tests, read_tests, score_programs
from runners.sandbox.sandbox import Limits, mechanism

try:
    mechanism()
except UserError as error:
    pytest.skip(str(error), allow_module_level=True)

ADD = "def add(a, b):\n    return a + b"
TESTS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert add(1, 1) == 3"]
DOUBLE = [{"input": "2\n", "output": "4"}, {"input": "x", "output": "0"}]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        *(("x = 1", "x = 1"), ("```python\nx = 1", None), ("I cannot do that.", None)),
        ("```py\nx = 1\n```\nor\n```py\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1\n```\n```text\nhello\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nOutput:\n```\n5\n```", "x = 1\n"),
        ("1. So:\n   ```python\n   x = 1\n   ```", "x = 1\n"),
    ],
    ids=["bare", "cut off", "prose", "the last", "another language", "output", "indented"],
)
def test_code_is_the_last_block_of_python(text, code):
    assert extract_code(text) == code


@pytest.mark.parametrize(
    ("program", "passed"),
    [
        (ADD, [True, True, False]),
        (f"Here it is.\n```python\n{ADD}\n```", [True, True, False]),
        (ADD + "\nprint(0, 1)\nimport sys; print(sys.argv, file=sys.stderr)", [True, True, False]),
        ("def add(a, b): return 3", [True, False, True]),
        ("def add(a, b):", [False] * 3),
        ("import os; os._exit(0)", [False] * 3),
        ("import os\nfor n in range(3, 9):\n    os.write(n, b'0\\n1\\n2\\n')", [False] * 3),
        ("class E:\n    def __eq__(self, other): return True\ndef add(a, b): return E()", [True] * 3),
        (ADD + "\nimport builtins\nbuiltins.exec = print", [True, True, False]),
    ],
)
def test_a_program_passes_the_tests_that_it_should(program, passed):
    """An object that equals everything passes: tests see only what the program shows them."""
    assert passed_tests(program, TESTS) == passed


@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("print(int(input()) * 2)", [True, False]),
        ("line = input()\nprint(int(line) * 2 if line.isdigit() else 0, '  \\n')", [True, True]),
        ("print(4); raise SystemExit(1)", [False, False]),
        ("", [False, False]),
    ],
)
def test_a_program_prints_the_wanted_output(program, passed):
    assert passed_tests(program, DOUBLE) == passed


def test_tests_before_one_that_hangs_count():
    tests = ["assert add(1, 2) == 3", "while True: pass", "assert add(0, 0) == 0"]
    assert passed_tests(ADD, tests, Limits(seconds=2.0)) == [True, False, False]


@pytest.mark.parametrize(
    ("form", "tests"),
    [
        *((form, TESTS) for form in (TESTS, json.dumps(TESTS), repr(TESTS), tuple(TESTS))),
        *((text, [text]) for text in ("assert f(1)\nassert f(2)", "[1] == f()")),
    ],
)
def test_tests_may_be_json_and_one_text_is_one_test(form, tests):
    assert read_tests(form) == tests


@pytest.mark.parametrize("value", [None, "", [], [1], ["a", {"input": "", "output": ""}], [{"input": "1"}]])
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match="expected Python statements"):
        read_tests(value)


def test_an_interrupt_ends_the_programs_that_run():
    """Nobody waits for their limit; the threads that held them are done."""
    start = time.monotonic()
    threading.Timer(2.0, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        score_programs(["import time; time.sleep(60)"] * 4, [json.dumps(TESTS)] * 4, Limits(seconds=20.0))
    assert time.monotonic() - start < 10
