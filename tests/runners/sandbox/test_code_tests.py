"""Programs in a model's text against their tests."""

import json
import signal
import threading
import time

import pytest

from runners.errors import UserError
from runners.sandbox import code_tests
from runners.sandbox.code_tests import (
    extract_code,
    judge_program,
    looks_forged,
    passed_tests,
    read_tests,
    score_programs,
)
from runners.sandbox.sandbox import Limits, check_sandbox
from tests.runners.sandbox.forgeries import FORGED

try:
    check_sandbox()
except UserError as error:
    pytest.skip(str(error), allow_module_level=True)

ADD = "def add(a, b):\n    return a + b"
TESTS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert add(1, 1) == 3"]
ENDS = ("exit()", "exit(0)", "quit()", "raise SystemExit")
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
        *((ADD, [True, True, False]), (f"Here it is.\n```python\n{ADD}\n```", [True, True, False])),
        (ADD + "\nprint(0, 1)\nimport sys; print(sys.argv, file=sys.stderr)", [True, True, False]),
        *(("def add(a, b): return 3", [True, False, True]), ("def add(a, b):", [False] * 3)),
        ("import os; os._exit(0)", [False] * 3),
        ("import os\nfor n in range(3, 9):\n    os.write(n, b'0\\n1\\n2\\n')", [False] * 3),
        *((f"{ADD}\n{end}", [True, True, False]) for end in ENDS),
        (ADD + "\nexit(1)", [False] * 3),
        (ADD + "\nimport warnings; warnings.warn('old')", [True, True, False]),
        *((ADD + "\n# \ud800", [False] * 3), (ADD + "\n# \0", [False] * 3)),
    ],
)
def test_a_program_passes_the_tests_that_it_should(program, passed):
    assert passed_tests(program, TESTS) == passed


VALUES = "import collections, decimal, enum, fractions, typing\n" + "\n".join(
    f"{name} = lambda: {value}"
    for name, value in {
        "plain": "{'a': (1, 2.5, None, True), 2: [b'x', {3}, frozenset([4])]}",
        "counts": "collections.Counter('aab')",
        "pair": "collections.namedtuple('Pair', 'x y')(1, 2)",
        "grown": "collections.defaultdict(list, {1: [2]})",
        "half": "fractions.Fraction(1, 2)",
        "tenth": "decimal.Decimal('0.1')",
        "number": "enum.IntEnum('Number', 'ONE').ONE",
        "keys": "{1: 2}.keys()",
        "large": "2 ** 200",
        "wide": "float('inf')",
        "point": "type('Point', (), {'__eq__': lambda self, other: type(self) is type(other)})",
        "numbers": "iter([1, 2])",
        "text": "'\\ud800'",
    }.items()
)


@pytest.mark.parametrize(
    "test",
    [
        *("plain() == {'a': (1, 2.5, None, True), 2: [b'x', {3}, frozenset([4])]}", "plain() != {'a': 1}"),
        *("plain()['a'] == (1, 2.5, None, True)", "plain()['a'] != [1, 2.5, None, True]"),
        *("(1, 2.5, None, True) == plain()['a']", "plain()['a'][2] is None", "plain()['a'][3] is True"),
        *("plain()['a'][1] is not None", "counts() == {'a': 2, 'b': 1}"),
        *("counts().most_common(1)[0][0] == 'a'", "pair() == (1, 2) and pair().y == 2"),
        *("grown() == {1: [2]}", "half() == 0.5", "half() == fractions.Fraction(1, 2)"),
        *("tenth() == decimal.Decimal('0.1')", "number() == 1", "keys() == {1}", "large() == 2 ** 200"),
        *("wide() == float('inf')", "abs(half() - 0.4) < 0.2", "0.1 < half()", "half() in (0.5, 1)"),
        *("1 in counts().values()", "point()() == point()() or True", "list(numbers()) == [1, 2]"),
        *("text() == '\\ud800'", "isinstance(plain(), dict)", "not plain().get('b')", "0 < half() < 1"),
        *("plain(), 'with a message'", "all(n < 3 for n in numbers())"),
    ],
)
def test_right_values_pass_and_the_opposite_does_not(test):
    """Checks outside the program's process agree with Python's comparison."""
    assert passed_tests(VALUES, [f"assert {test}"]) == [True]
    negated = test.partition(", 'with")[0]
    if test != "point()() == point()() or True":
        assert passed_tests(VALUES, [f"assert not ({negated})"]) == [False]


@pytest.mark.parametrize(
    ("test", "passed"),
    [
        ("for n in range(3):\n    assert add(n, 1) == n + 1", True),
        ("for n in range(3):\n    assert add(n, 1) == 2 * n", False),
        ("def check(f):\n    assert f(1, 2) == 3\n    assert f(2, 2) == 4\ncheck(add)", True),
        ("def check(f):\n    assert f(1, 2) == 3\n    assert f(2, 2) == 5\ncheck(add)", False),
        ("try:\n    add(1, 'a')\n    assert False\nexcept TypeError:\n    pass", True),
        ("try:\n    add(1, 1)\n    assert False\nexcept TypeError:\n    pass", False),
        ("if add(1, 1) == 3:\n    assert add(1, 1) == 3", True),
        ("import math\nassert math.isclose(add(.1, .2), .3)", True),
        ("assert all(add(n, 1) == 0 for n in range(3))", False),
        *(("x = [3]\nx.append(add(1, 1))\nassert x == [3, 2]", True), ("assert add(", False)),
        ("assert add(1, 1) == 2\nraise ValueError", False),
    ],
)
def test_statements_around_checks_keep_their_meaning(test, passed):
    patches = "import builtins\nbuiltins.all = lambda _: True\n"  # taken back before the tests
    assert passed_tests(patches + ADD, [test]) == [passed]


@pytest.mark.parametrize("program", FORGED.values(), ids=FORGED)
@pytest.mark.parametrize(
    "test", ["add(1, 2) == 30", "30 == add(1, 2)", "add(1, 2) in (30, 31)", "abs(add(1, 2) - 30) < 0.5"]
)
def test_no_program_passes_a_value_that_it_does_not_know(program, test):
    """The expected value stays outside the program's process."""
    assert passed_tests(program, [f"assert {test}"]) == [False]


NAMED = ("an object that equals everything", "built-in names", "reports with the mark")


@pytest.mark.parametrize("program", [FORGED[name] for name in NAMED])
def test_names_that_forge_tests_are_reported(program):
    """Programs can only forge tests that are evaluated inside their process."""
    assert looks_forged(program) and not looks_forged(ADD)


def test_a_test_is_parsed_once_for_all_programs():
    """A group's completions share their tests, and parsing a large test takes milliseconds."""
    before = code_tests._read_test.cache_info().misses
    for number in range(3):
        judge_program(f"def f(n): return n - {number}", ["assert f(1129) == 1129"])
    assert code_tests._read_test.cache_info().misses == before + 1


def test_all_tests_of_a_program_have_one_deadline():
    """The deadline includes waiting and computing, for inputs and for statements."""
    endless = (("import time; time.sleep(60)", Limits(seconds=1.5)), ("while True: pass", Limits()))
    for program, limits in endless:
        for tests in ([{"input": "1", "output": "1"}] * 8, TESTS):
            start = time.monotonic()
            assert passed_tests(program, tests, limits) == [False] * len(tests)
            assert time.monotonic() - start < 12  # 2 s of computing on a busy machine
    waits = "import time; time.sleep(.7)\nprint(1)"
    passed = passed_tests(waits, [{"input": "", "output": "1"}] * 8, Limits(seconds=2.0))
    assert passed[0] and passed[2:] == [False] * 6
    slow = "while __import__('time').process_time() < .4: pass\nprint(1)"
    passed = passed_tests(slow, [{"input": "", "output": "1"}] * 8, Limits(seconds=20, processor_seconds=1.0))
    assert passed == [True] * 3 + [False] * 5


@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("print(int(input()) * 2)", [True, False]),
        ("line = input()\nprint(int(line) * 2 if line.isdigit() else 0, '  \\n')", [True, True]),
        ("print(4); raise SystemExit(1)", [False, False]),
        *((f"print(4); {end}", [True, False]) for end in ENDS),
        ("print(4); import warnings; warnings.warn('old')", [True, False]),
        ("print(4); import sys; print('note', file=sys.stderr)", [True, False]),
        ("import threading; threading.Timer(.1, print, [4]).start()", [True, False]),
        ("import atexit; atexit.register(print, 4)", [True, False]),
        *(("print('\ud800')", [False, False]), ("", [False, False])),
    ],
)
def test_a_program_prints_the_wanted_output(program, passed):
    assert passed_tests(program, DOUBLE) == passed


def test_tests_before_one_that_hangs_count():
    tests = ["assert add(1, 2) == 3", "while True: pass", "assert add(0, 0) == 0"]
    assert passed_tests(ADD, tests, Limits(seconds=2.0)) == [True, False, False]


@pytest.mark.parametrize(
    ("program", "tests", "ended"),
    [
        *(("def add(a, b): return 3", TESTS, False), (ADD, [*TESTS, "while True: pass"], True)),
        *(("import time; time.sleep(60)", TESTS, True), ("import os; os.abort()", TESTS, False)),
        *(("print(int(input()) * 2)", DOUBLE, False), ("input()\nwhile True: pass", DOUBLE, True)),
        ("import time; time.sleep(1.2)", [{"input": "", "output": ""}] * 2, False),
        ("import time; time.sleep(1.2)", [{"input": "", "output": ""}] * 3, True),
    ],
)
def test_a_program_that_a_limit_of_time_ends_is_known(program, tests, ended):
    assert judge_program(program, tests, Limits(seconds=3.0, processor_seconds=1.0)).ended is ended


@pytest.mark.parametrize(("whole", "runs"), [(True, 2), (False, 4)])
def test_inputs_stop_at_the_first_failure_only_with_whole(monkeypatch, whole, runs):
    seen = list[str]()
    run = code_tests.run_program
    noted = lambda *program, **more: seen.append(more["stdin"]) or run(*program, **more)  # noqa: E731
    monkeypatch.setattr(code_tests, "run_program", noted)
    cases = [{"input": each, "output": "4"} for each in ("2", "3", "2", "2")]
    (verdict,) = score_programs(["print(int(input()) * 2)"], [json.dumps(cases)], whole=whole)
    assert len(seen) == runs
    assert verdict.share == (0.25 if whole else 0.75)


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


@pytest.mark.parametrize("tests", [TESTS, DOUBLE * 4])
def test_an_interrupt_ends_the_programs_that_run(tests):
    """An interrupt does not wait for the programs' limits."""
    start = time.monotonic()
    threading.Timer(1.0, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        score_programs(["import time; time.sleep(60)"] * 8, [json.dumps(tests)] * 8, Limits(seconds=20.0))
    assert time.monotonic() - start < 3
