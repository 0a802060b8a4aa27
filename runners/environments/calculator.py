"""A calculator: the tool of nanochat's models."""

import ast
import math
import operator
import warnings
from collections.abc import Callable
from typing import Any

LONGEST_EXPRESSION = 200  # characters of an expression
_DIGITS = 60  # limit on the digits of an intermediate integer
_OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(expression: str) -> str:
    """
    Compute an expression. Empty if it has no value.

    Args:
        expression: Numbers, + - * / and brackets, or 'text'.count('part').
    """
    # As in nanochat. Nothing is executed: only these node types in the expression's syntax tree are
    # evaluated.
    if len(expression) > LONGEST_EXPRESSION:
        return ""
    try:
        match _parsed(expression):
            case ast.Call(
                ast.Attribute(ast.Constant(str(text)), "count"), [ast.Constant(str(part))], []
            ):
                return str(text.count(part))
        return str(_value(_parsed(expression.replace(",", ""))))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return ""


def _parsed(expression: str) -> ast.expr:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for texts such as "12or 3", which a model may write
        return ast.parse(expression.strip(), mode="eval").body


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(int() | float() as value) if not isinstance(value, bool):
            pass
        case ast.UnaryOp(ast.UAdd() | ast.USub() as sign, operand):
            value = _value(operand) * (-1 if isinstance(sign, ast.USub) else 1)
        case ast.BinOp(left, sign, right) if type(sign) in _OPERATIONS:
            value = _OPERATIONS[type(sign)](_value(left), _value(right))
        case _:
            raise ValueError("not arithmetic")
    if (isinstance(value, int) and abs(value) >= 10**_DIGITS) or not math.isfinite(value):
        raise ValueError("too large")
    return value
