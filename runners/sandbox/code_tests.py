"""Whether a program that a model wrote passes its tests: each runs in the sandbox."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import secrets
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from runners.errors import show
from runners.sandbox.sandbox import DEFAULT, Limits, end_programs, mechanism, run_program

_MOST = 20_000  # characters of a text without a block that are read as Python
_LONGEST = 120_000  # bytes of a program that is a word of a command
_PYTHON = ("python", "py", "python3")
_BLOCK = re.compile(r"^[ \t]*```([^\n]*)\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)

# Inside: what the program prints is not read; one line a test that it passes, with a mark it was not given.
# The grader keeps its own names of what it calls: a program may put others in their place.
_GRADER = """
import json, os, sys
report, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
task = json.loads(sys.stdin.buffer.read())
for number in (0, 1, 2):
    os.dup2(nothing, number)
def grade(code, tests, mark, run=exec, read=compile, copy=dict, write=os.write, failure=BaseException):
    names = {"__name__": "__main__"}
    tests = [(read(test, "<test>", "exec"), f"{mark} {n}\\n".encode()) for n, test in enumerate(tests)]
    run(read(code, "<program>", "exec"), names)
    for test, passed in tests:
        try:
            run(test, copy(names))
        except failure:
            continue
        write(report, passed)
grade(**task)
"""


def extract_code(text: str) -> str | None:
    """The program in a model's text: its last whole block of Python between ``` lines, or all of it.

    A block without a language counts where none is called Python. None: there is no block, and the text as a
    whole is no Python.
    """
    blocks = [(language.strip("` \t\r").lower(), code) for language, code in _BLOCK.findall(text)]
    for languages in (_PYTHON, ("",)):
        if found := [code for language, code in blocks if language in languages]:
            return textwrap.dedent(found[-1])
    return text if _is_python(text) else None


def read_tests(value: Any) -> list[str] | list[dict[str, str]]:
    """A problem's tests as its column has them: Python statements, or inputs with the output that each wants.

    Accepted: a list of statements (``assert f(1) == 2``), one text of statements, a list of
    ``{"input": …, "output": …}``, or these as JSON or Python. Raises ValueError for anything else.
    """
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        for read in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):  # it may be a statement
                value = read(value)
                break
    if isinstance(value, str | dict):
        value = [value]
    tests = list(value) if isinstance(value, list | tuple) else []
    if tests and all(isinstance(test, str) and test.strip() for test in tests):
        return tests
    if tests and all(isinstance(test, dict) and {"input", "output"} <= test.keys() for test in tests):
        return [{name: str(test[name]) for name in ("input", "output")} for test in tests]
    wanted = 'Python statements, or a list of {"input": …, "output": …}'
    raise ValueError(f"expected {wanted}, found {show(value)}")


def passed_tests(text: str, tests: Any, limits: Limits = DEFAULT) -> list[bool]:
    """Which tests the program in a model's text passes, in order; `limits` are for all of them together.

    With inputs the program runs once for each, and what it prints is compared without white space at the ends
    of lines and of the text. Raises ValueError as `read_tests`, UserError where there is no sandbox.
    """
    code, cases = (extract_code(text) or "") if "```" in text else text, read_tests(tests)
    if not (statements := [case for case in cases if isinstance(case, str)]):
        return [_prints(code, case, limits) for case in cases if isinstance(case, dict)]
    mark = secrets.token_hex(16)
    task = json.dumps({"code": code, "tests": statements, "mark": mark}).encode()
    printed = run_program(_GRADER, stdin=task, limits=limits).output.decode("ascii", "replace").splitlines()
    return [f"{mark} {number}" in printed for number in range(len(statements))]


def score_programs(texts: Sequence[str], tests: Sequence[str], limits: Limits = DEFAULT) -> list[float]:
    """The share of its tests that each text's program passes, as many at a time as there are processors.

    Raises UserError where there is no sandbox, ValueError as `read_tests`.
    """
    mechanism()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            results = list(pool.map(lambda text, wanted: _known(text, wanted, limits), texts, tests))
        except BaseException:  # an interrupt: nobody waits for what still runs
            pool.shutdown(wait=False, cancel_futures=True)
            end_programs()
            raise
    return [sum(passed) / len(passed) for passed in results]


@functools.lru_cache(maxsize=4096)
def _known(text: str, tests: str, limits: Limits) -> list[bool]:
    """`passed_tests`, once for a program that rewards and evaluation both ask about."""
    return passed_tests(text, tests, limits)


def _is_python(text: str) -> bool:
    try:
        ast.parse(text[:_MOST])
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return bool(text.strip())


def _prints(code: str, case: dict[str, str], limits: Limits) -> bool:
    if "\0" in code or len(code.encode()) > _LONGEST:
        return False
    outcome = run_program(code, stdin=case["input"].encode(), limits=limits)
    return outcome.code == 0 and _lines(outcome.output.decode("utf-8", "replace")) == _lines(case["output"])


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
