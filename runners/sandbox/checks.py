"""Evaluates a test's checks outside the program's process, where the program cannot change them.

In the program's process, `assert f(1) == 2` becomes a report of the value of `f(1)`; the 2 stays
outside. A report is an untrusted claim, and is parsed as plain data.
"""

import ast
import json
import operator
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import attrs

_FALSE_CLAIMS = (TypeError, ValueError, LookupError, ArithmeticError, RecursionError)
_END = -1  # number that reports the end of a test
_CHECK = "__check__"  # name of `confined.check` in a test
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
    ast.Is: lambda one, other: type(one) is type(other) and one == other,
    ast.IsNot: lambda one, other: type(one) is not type(other) or one != other,
}
_KINDS: dict[str, Callable[..., Any]] = {
    "tuple": lambda *items: items,
    "set": lambda *items: set(items),
    "frozenset": lambda *items: frozenset(items),
    "dict": lambda *items: dict(items),
    "bytes": bytes.fromhex,
    "object": object,
}


@attrs.frozen
class Test:
    """A test in the form that the program's process executes, and the checks that its reports must
    pass.
    """

    source: str
    checks: list[Callable[..., Any]]  # by number: judge a check's reported values
    required: frozenset[int]  # numbers of the checks that a complete run always reports

    def passed(self, reports: list[list[Any]]) -> bool:
        """Returns whether the test has ended and all its checks are true. Each report contains the
        check's number and the values.
        """
        with suppress(*_FALSE_CLAIMS):
            seen = {number for number, *_ in reports}
            claims = [(number, values) for number, *values in reports if number != _END]
            true = all(self.checks[number](*values) is True for number, values in claims)
            return true and seen >= {_END, *self.required}
        return False


def read_test(text: str) -> Test:
    """Parses a test's statements. Text that is not Python becomes a test that always fails."""
    rewriting = _Rewriting()
    required = set()
    try:
        tree = rewriting.visit(ast.parse(text))
        source = ast.unparse(ast.fix_missing_locations(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Test("", [], frozenset([0]))
    for statement in tree.body:
        match statement:
            case ast.Expr(ast.Call(ast.Name("__check__"), [ast.Constant(number), *_])):
                required.add(number)
    return Test(source, rewriting.checks, frozenset(required))


def read_reports(output: bytes, mark: str) -> dict[int, list[list[Any]]]:
    """Parses the reports in a program's output, grouped by test. Each report is (check, values…).
    Reports that are not plain data are skipped.
    """
    reports: dict[int, list[list[Any]]] = {}
    for line in output.decode("ascii", "replace").splitlines():
        if line.startswith(mark):
            with suppress(*_FALSE_CLAIMS):
                test, *report = json.loads(line.removeprefix(mark), object_hook=_value)
                reports.setdefault(test, []).append(report)
    return reports


def _value(tagged: dict[str, Any]) -> Any:
    ((kind, content),) = tagged.items()
    return _KINDS[kind](*content)


class _Rewriting(ast.NodeTransformer):
    """Replaces each `assert` with a report."""

    def __init__(self) -> None:
        self.checks: list[Callable[..., Any]] = []

    def visit_Assert(self, node: ast.Assert) -> list[ast.Expr]:
        """Replaces an `assert` with a report; each part of an `and` becomes a separate check."""
        match node.test:
            case ast.BoolOp(ast.And(), parts):
                return [self._report(part) for part in parts]
        return [self._report(node.test)]

    def _report(self, test: ast.expr) -> ast.Expr:
        truth = ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), test))
        values, verdict = _compared(test) or ([truth], bool)
        self.checks.append(verdict)
        number = ast.Constant(len(self.checks) - 1)
        return ast.Expr(ast.Call(ast.Name(_CHECK, ast.Load()), [number, *values], []))


def _compared(test: ast.expr) -> tuple[list[ast.expr], Callable[..., Any]] | None:
    """Returns the values that a comparison reports, and a function that judges them. Returns None
    if the condition must be evaluated in the program's process.
    """
    match test:
        case ast.Compare(left, [kind], [right]):
            holds = _COMPARISONS[type(kind)]
        case _:
            return None
    wanted = _literal(right)
    if wanted:
        match left:
            case ast.Call(ast.Name("abs"), [ast.BinOp(value, ast.Sub(), number)], []):
                near = _literal(number)
                if near:
                    return [value], lambda found: holds(abs(found - near[0]), wanted[0])
        return [left], lambda found: holds(found, wanted[0])
    known = _literal(left)
    if known and not isinstance(kind, ast.In | ast.NotIn):
        return [right], lambda found: holds(known[0], found)
    if isinstance(kind, ast.Eq | ast.NotEq):
        # If only one value is reported, it is the result of the values' own comparison.
        return [left, right], lambda found, *other: holds(found, *(other or [True]))
    return None


def _literal(test: ast.expr) -> list[Any]:
    """Returns a list with a literal expression's value. The list is empty if the expression is not
    a literal.
    """
    try:
        return [ast.literal_eval(test)]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return []
