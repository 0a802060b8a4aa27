"""Checks whether a model's program passes its tests. Each test runs in the sandbox."""

import ast
import functools
import json
import os
import re
import secrets
import textwrap
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import attrs

from runners.errors import show
from runners.sandbox.checks import read_reports, read_test
from runners.sandbox.sandbox import DEFAULT, Limits, check_sandbox, end_programs, run_program

_MOST = 20_000  # number of characters that are parsed as Python if a text has no code block
_REPORTS = 4  # output limit for test reports, as a multiple of the program's output limit
_PYTHON = ("python", "py", "python3")
_BLOCK = re.compile(r"^[ \t]*```([^\n]*)\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)

# Names that programs use to inspect their own process or to redefine equality.
_FORGES = re.compile(
    r"\b(__eq__|__ne__|builtins|__builtins__|_getframe|currentframe|f_back|f_locals|f_globals"
    r"|tb_frame|settrace|setprofile|ctypes|get_objects|get_referrers|__check__)\b"
)


def extract_code(text: str) -> str | None:
    """Extracts the program from a model's text: the last complete Python block between ``` lines,
    or the whole text.

    A block without a language is used if no block is marked as Python. Returns None if there is no
    such block and the whole text is not Python.
    """
    blocks = [(language.strip("` \t\r").lower(), code) for language, code in _BLOCK.findall(text)]
    for languages in (_PYTHON, ("",)):
        programs = [code for language, code in blocks if language in languages]
        if programs:
            return textwrap.dedent(programs[-1])
    return text if _is_python(text) else None


def read_tests(value: Any) -> list[str] | list[dict[str, str]]:
    """Parses a problem's tests from its column: Python statements, or inputs with their expected
    outputs.

    Accepts a list of statements (``assert f(1) == 2``), one text of statements, a list of
    ``{"input": …, "output": …}``, or any of these as JSON or Python. Raises ValueError otherwise.
    """
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        for read in (json.loads, ast.literal_eval):
            # a statement may start with a bracket
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                value = read(value)
                break
    if isinstance(value, str | dict):
        value = [value]
    tests = list(value) if isinstance(value, list | tuple) else []
    if tests and all(isinstance(test, str) and test.strip() for test in tests):
        return tests
    if tests and all(
        isinstance(test, dict) and {"input", "output"} <= test.keys() for test in tests
    ):
        return [{name: str(test[name]) for name in ("input", "output")} for test in tests]
    raise ValueError(
        f'expected Python statements, or a list of {{"input": …, "output": …}}, found {show(value)}'
    )


@attrs.frozen
class Verdict:
    """A program's test results."""

    passed: list[bool]  # one entry for each test
    ended: bool = False  # whether a time limit ended the program

    @property
    def share(self) -> float:
        """The fraction of tests that the program passes."""
        return sum(self.passed) / len(self.passed)


def judge_program(
    text: str, tests: Any, limits: Limits = DEFAULT, *, whole: bool = False
) -> Verdict:
    """Runs the program in a model's text, and returns which tests it passes, in order. `limits`
    apply to all tests together.

    If the tests have inputs, the program runs once per input. Its output is compared after
    stripping white space at the ends of the lines and of the whole text. If `whole` is True, the
    program is not run again after the first input with a wrong output.

    Raises ValueError like `read_tests`, and UserError if there is no sandbox.
    """
    code = text
    if "```" in text:
        code = extract_code(text) or ""
    cases = read_tests(tests)
    inputs = [case for case in cases if isinstance(case, dict)]
    if inputs:
        return _printed(code, inputs, limits, whole=whole)
    wanted = [_read_test(case) for case in cases if isinstance(case, str)]
    mark = secrets.token_hex(8)
    outcome = run_program(
        code,
        tests=[test.source for test in wanted],
        mark=mark,
        limits=attrs.evolve(limits, output=_REPORTS * limits.output),
    )
    reports = read_reports(outcome.output, mark)
    passed = [test.passed(reports.get(number, [])) for number, test in enumerate(wanted)]
    return Verdict(passed, outcome.ended)


def passed_tests(text: str, tests: Any, limits: Limits = DEFAULT) -> list[bool]:
    """Returns which tests the program in a model's text passes, in order. A shorter form of
    `judge_program` for use in your own code.
    """
    return judge_program(text, tests, limits).passed


def looks_forged(text: str) -> list[str]:
    """Returns the names in a text that a program could use to pass tests without solving them."""
    return sorted(set(_FORGES.findall(text)))


def score_programs(
    texts: Sequence[str], tests: Sequence[str], limits: Limits = DEFAULT, *, whole: bool = False
) -> list[Verdict]:
    """Runs each text's program on its tests, with one program per CPU core at a time. If `whole` is
    True, a verdict shows only whether the program passes all tests.

    Raises UserError if there is no sandbox, and ValueError like `read_tests`.
    """
    check_sandbox(partial=limits.partial)
    judge = functools.partial(_known, limits=limits, whole=whole)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            return list(pool.map(judge, texts, tests))
        except BaseException:  # after an interrupt, kill the programs that are still running
            pool.shutdown(wait=False, cancel_futures=True)
            end_programs()
            raise


# Cached, because rewards and evaluation judge the same programs, and a group shares its tests.
_known = functools.lru_cache(maxsize=4096)(judge_program)
_read_test = functools.lru_cache(maxsize=4096)(read_test)


def _is_python(text: str) -> bool:
    try:
        ast.parse(text[:_MOST])
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return bool(text.strip())


def _printed(code: str, cases: Sequence[dict[str, str]], limits: Limits, *, whole: bool) -> Verdict:
    """Compares the program's outputs with the expected outputs. If a time limit ends the program,
    the remaining tests fail.
    """
    end = time.monotonic() + limits.seconds
    passed = [False] * len(cases)
    for number, case in enumerate(cases):
        outcome = run_program(code, stdin=case["input"], limits=limits)
        if outcome.ended:
            return Verdict(passed, ended=True)
        wanted = case["output"].encode("utf-8", "replace")
        passed[number] = outcome.code == 0 and _lines(outcome.output) == _lines(wanted)
        left = limits.processor_seconds - outcome.processor_seconds
        limits = attrs.evolve(limits, seconds=end - time.monotonic(), processor_seconds=left)
        if min(limits.seconds, left) <= 0:
            return Verdict(passed, ended=number + 1 < len(cases))
        if whole and not passed[number]:
            break
    return Verdict(passed)


def _lines(output: bytes) -> list[bytes]:
    return [line.rstrip() for line in output.strip().splitlines()]
