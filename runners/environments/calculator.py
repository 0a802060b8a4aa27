"""nanochat's calculator: a protocol of special tokens, without messages.

    … <|python_start|> 12*(3+4) <|python_end|>  →  <|output_start|> 84 <|output_end|> …

A turn ends at <|python_end|>. The result is forced into the text, and the model continues. If the expression
has no value, nothing is forced, as in nanochat.
"""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpo_fn as g
from runners.config.names import CALCULATOR
from runners.config.sections import EnvConfig
from runners.environments.episodes import Episode, finished_episodes
from runners.errors import UserError
from runners.rewards.finished_episodes import FinishedEpisodes
from runners.tokenization.text import encode

MARKS = ("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>")
LONGEST_EXPRESSION = 200  # characters of an expression
_DIGITS = 60  # of an intermediate integer
_OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(expression: str) -> str | None:
    """The value of an expression as Python writes it; None if it has none.

    Numbers (commas between digits are left out), + - * / and brackets, and 'text'.count('part'), as in
    nanochat. Nothing is executed: the expression is read as a tree, and only these nodes are evaluated.
    """
    if len(expression) > LONGEST_EXPRESSION:
        return None
    try:
        match _parsed(expression):
            case ast.Call(ast.Attribute(ast.Constant(str(text)), "count"), [ast.Constant(str(part))], []):
                return str(text.count(part))
        return str(_value(_parsed(expression.replace(",", ""))))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _parsed(expression: str) -> ast.expr:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about texts such as "12or 3", which a model may write
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


class CalculatorSession:
    """`grpo_fn.rollout.Replies` of the calculator."""

    def __init__(
        self,
        episodes: Sequence[Episode],
        tokenizer: Any,
        text: Callable[[Sequence[int]], str],
        limits: EnvConfig,
        nudge: str = "",
    ) -> None:
        """`text` gives the text of tokens for rewards; `nudge` precedes each row's first words."""
        self.episodes, self._tokenizer, self._text, self._nudge = list(episodes), tokenizer, text, nudge
        self._start, self.end, self._output, self._output_end = mark_ids(tokenizer)
        self._limits = limits
        self._replies: dict[int, list[int]] = {}

    def begin(self, row: int, tokens: Sequence[int]) -> bool:
        """As `Replies`: any other end than <|python_end|> ends the completion."""
        counts, limits = self.episodes[row].counts, self._limits
        counts["turns"] += 1
        spent = counts["turns"] >= limits.max_turns or 0 < limits.max_tool_calls <= counts["calls"]
        if tokens[-1] != self.end or spent:
            return False
        counts["calls"] += 1
        places = [n for n, token in enumerate(tokens[:-1]) if token == self._start]
        inside = tokens[places[-1] + 1 : -1] if places else ()
        found = calculate(self._tokenizer.decode(list(inside))) if inside else None
        counts["failures"] += found is None
        given: list[int] = []
        if found is not None:
            digits = encode(self._tokenizer, found, add_special_tokens=False)
            given = [self._output, *digits, self._output_end]
        self._replies[row] = given
        return True

    def collect(self, least: int) -> Mapping[int, Sequence[int] | None]:
        """As `Replies`: all results are available at once."""
        found, self._replies = self._replies, {}
        return found

    def finish(self, rollout: g.Rollout) -> FinishedEpisodes:
        """A completion is one assistant's message, as nanochat's rewards see it."""
        for episode, tokens in zip(self.episodes, rollout.completions(), strict=True):
            episode.messages.append({"role": "assistant", "content": self._nudge + self._text(tokens)})
        return finished_episodes(self.episodes, rollout)


def mark_ids(tokenizer: Any) -> tuple[int, int, int, int]:
    """Ids of the four marks. UserError if the vocabulary lacks one."""
    known = tokenizer.get_vocab()
    missing = [mark for mark in MARKS if mark not in known]
    if missing:
        raise UserError(
            f'env.factory = "{CALCULATOR}" needs the special tokens {", ".join(MARKS)}; the tokenizer lacks '
            f"{', '.join(missing)}"
        )
    start, end, output, output_end = (int(known[mark]) for mark in MARKS)
    return start, end, output, output_end
