"""How long do a program in the sandbox, and the reward of a step of programs, take?

A step scores equally many right and wrong programs for rows with tests, in groups of eight that
share their tests. `--data` names a file of rows whose `answer` is a list of `assert f(…) == value`,
such as MBPP's; a right program is a table of these values. In a second step, one program contains
an infinite loop.

**What limits it.** Each program requires a fork of a Python process, a mount and a namespace; one
program per core runs at a time. The floor is the processor time divided by the cores; other work on
the machine adds to it.
"""

from __future__ import annotations

import ast
import json
import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.harness.command import benchmark, say
from benchmarks.harness.measure import Timing
from benchmarks.harness.record import Figure, time_figure
from runners.answers.forms import answer_form
from runners.sandbox import sandbox
from runners.sandbox.code_tests import judge_program

GROUP = 8
STEP_SECONDS = 0.5  # at most, where all programs end
ADD = "def add(a, b): return a + b"
TESTS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert add(2.5, 1) == 3.5"]
RIGHT = "def {name}(*given):\n    return next(value for key, value in [{pairs}] if key == given)"
WRONG = "def {name}(*given):\n    return object"
LOOP = "while True:\n    pass"


def solutions(tests: Sequence[str]) -> tuple[str, str] | None:
    """A right and a wrong program for these tests; None if the tests have a different form."""
    pairs = []
    name = ""
    for test in tests:
        match ast.parse(test).body:
            case [ast.Assert(ast.Compare(ast.Call(ast.Name(name), given, []), [ast.Eq()], [value]))]:
                pairs.append(
                    f"(({''.join(ast.unparse(each) + ', ' for each in given)}), {ast.unparse(value)})"
                )
            case _:
                return None
    return RIGHT.format(name=name, pairs=", ".join(pairs)), WRONG.format(name=name)


def processor_seconds(programs: int) -> float:
    """Wall and processor time of a process that runs these programs, from start to end."""
    sandbox.end_programs()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(programs):
        judge_program(ADD, TESTS)
    for server in list(sandbox._servers):
        server.connection.close()  # it ends by itself, with the times of all that it has waited for
        server.process.wait()
    sandbox.end_programs()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def seconds_of(program: str) -> float:
    """The time from requesting a program's verdict to receiving it."""
    began = time.perf_counter()
    verdict = judge_program(program, TESTS)
    if not all(verdict.passed):
        raise RuntimeError(f"a right program failed: {verdict}")
    return time.perf_counter() - began


def step_seconds(rows: Sequence[tuple[str, tuple[str, str]]], size: int, loops: int, turn: int) -> float:
    """The reward of a step with `size` programs: every second one is right, and the last ones loop."""
    form = answer_form("code")
    assert form is not None
    texts = []
    golds = []
    for number in range(size):
        tests, programs = rows[number // GROUP % len(rows)]
        texts.append(f"{programs[number % 2]}\n# {turn} {number}")  # no two are the same
        golds.append(tests)
    for number in range(size - loops, size):
        texts[number] = f"{LOOP}\n# {turn} {number}"
    began = time.perf_counter()
    scores = form.scores(texts, golds)
    seconds = time.perf_counter() - began
    expected = [float(number % 2 == 0 and number < size - loops) for number in range(size)]
    if scores != expected:
        raise RuntimeError(f"{sum(map(bool, scores))} programs had a reward, expected {sum(expected):g}")
    return seconds


@benchmark("sandbox")
@click.option("--data", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Rows with tests.")
@click.option("--size", default=256, show_default=True, help="Number of programs per step.")
@click.option("--repeats", default=5, show_default=True, help="Steps.")
def main(quick: bool, data: Path | None, size: int, repeats: int) -> list[Figure]:
    """Measure programs of a model in the sandbox: the time of one program and of a step's reward."""
    if quick:
        size, repeats = 16, 1
    count = 10 if quick else 200
    tests = [TESTS]
    if data:
        tests = [json.loads(line)["answer"] for line in data.read_text().splitlines()]
    found = [(json.dumps(each), solutions(each)) for each in tests]
    rows = [(text, programs) for text, programs in found if programs]
    say(f"sandbox: tests of {len(rows)} of {len(tests)} rows have the form assert f(…) == value")
    sandbox.end_programs()
    first = Timing((seconds_of(ADD),))
    warm = Timing(tuple(seconds_of(ADD) for _ in range(count)))
    processor = (processor_seconds(count + 1) - processor_seconds(1)) / count
    step_seconds(rows, size, 0, -1)  # starts a process a core
    ending = Timing(tuple(step_seconds(rows, size, 0, turn) for turn in range(repeats)))
    looping = Timing((step_seconds(rows, size, 1, repeats),))
    floor = processor * size / (os.cpu_count() or 1)
    target = None if quick else STEP_SECONDS
    return [
        time_figure("one program: first, with the process that runs programs", first, "ms"),
        time_figure("one program: warm", warm, "ms"),
        Figure("one program: processor time", processor * 1e3, "ms", samples=count),
        time_figure(f"a step of {size} that end", ending, predicted=floor, at_most=target),
        time_figure(f"a step of {size}, one of which loops", looping),
    ]


if __name__ == "__main__":
    main()
