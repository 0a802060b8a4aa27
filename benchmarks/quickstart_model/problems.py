"""Word problems of two or three arithmetic steps, drawn from templates with a seeded generator.

Everything here is a pure function of its arguments and of the numpy generator it is handed. The splits are
disjoint in numbers: a CRC of a problem's sorted numbers decides whether it belongs to train, valid or test,
whatever the template and the wording.
"""

import zlib
from collections.abc import Callable

import attrs
import numpy as np

from benchmarks.quickstart_model.templates import NAMES, TEMPLATES, THINGS, Template, TemplateSteps

SPLITS = {"train": (2, 3, 4, 5, 6, 7), "valid": (1,), "test": (0,)}
"""Which of the eight residues of the CRC belong to which split."""

SPLIT_ROWS = {"train": (4000, 11), "valid": (400, 12), "test": (400, 13)}
"""(rows, seed) of the shipped files. The test seed is used for nothing else."""

LARGEST = 99  # no result has more than two digits, so that half a million parameters can learn the arithmetic
OPERATORS = "+-*/"


@attrs.frozen
class Step:
    """One line of reasoning, `left operator right = result`, with a label for people."""

    label: str
    left: int
    operator: str
    right: int
    result: int

    @property
    def equation(self) -> str:
        return f"{self.left}{self.operator}{self.right}={self.result}"


@attrs.frozen
class Problem:
    """A question with its numbers, the right steps, and the misread ones (None if there is no habit)."""

    template: str
    question: str
    numbers: tuple[int, ...]
    steps: tuple[Step, ...]
    habit: tuple[Step, ...] | None

    @property
    def row(self) -> dict[str, str]:
        """The problem in GSM8K's form: `question`, and `answer`, a line per step and `#### n` at the end."""
        lines = [f"{step.label.capitalize()}: {step.equation}" for step in self.steps]
        return {"question": self.question, "answer": "\n".join([*lines, f"#### {self.steps[-1].result}"])}


def compute(left: int, operator: str, right: int) -> int | None:
    """The step's result, or None if it is not a whole number between 1 and `LARGEST`."""
    if operator == "/":
        result = left // right if right and left % right == 0 else 0
    else:
        result = {"+": left + right, "-": left - right, "*": left * right}[operator]
    return result if 1 <= result <= LARGEST else None


def work_out(steps: TemplateSteps, numbers: tuple[int, ...]) -> tuple[Step, ...] | None:
    """Fill the expressions in with the numbers, step by step; None if a step has no admissible result."""
    known = dict(zip("abcd", numbers, strict=False))
    done = []
    for (label, expression), name in zip(steps, "xyz", strict=False):
        operator = next(sign for sign in OPERATORS if sign in expression)
        left, right = (known[term] if term in known else int(term) for term in expression.split(operator))
        result = compute(left, operator, right)
        if result is None:
            return None
        known[name] = result
        done.append(Step(label, left, operator, right, result))
    return tuple(done)


def split_of(numbers: tuple[int, ...]) -> str:
    """The split to which numbers belong, whatever their order and the template."""
    residue = zlib.crc32(",".join(map(str, sorted(numbers))).encode()) % 8
    return next(split for split, residues in SPLITS.items() if residue in residues)


def admit(
    template: Template, numbers: tuple[int, ...]
) -> tuple[tuple[Step, ...], tuple[Step, ...] | None] | None:
    """The right steps and the habit's, or None if either does not work out or both give one answer."""
    steps = work_out(template.steps, numbers)
    if steps is None or template.habit is None:
        return None if steps is None else (steps, None)
    habit = work_out(template.habit, numbers)
    if habit is None or habit[-1].result == steps[-1].result:
        return None
    return steps, habit


def draw(rng: np.random.Generator, split: str = "train") -> Problem:
    """Draw one problem of a split: a template, then numbers until they are admissible, then the wording."""
    template = TEMPLATES[rng.integers(len(TEMPLATES))]
    while True:
        numbers = tuple(int(rng.integers(low, high + 1)) for low, high in template.ranges)
        worked = admit(template, numbers) if split_of(numbers) == split else None
        if worked is not None:
            break
    wording = template.wordings[rng.integers(len(template.wordings))]
    first = int(rng.integers(len(NAMES)))
    second = (first + 1 + int(rng.integers(len(NAMES) - 1))) % len(NAMES)  # never the same person twice
    things = THINGS[rng.integers(len(THINGS))]
    words = {"name": NAMES[first], "other": NAMES[second], "things": things}
    question = wording.format(**words, **dict(zip("abcd", numbers, strict=False)))
    return Problem(template.name, question, numbers, *worked)


def draw_rows(split: str, count: int, seed: int) -> list[dict[str, str]]:
    """`count` rows of a split with different questions, the same for the same seed."""
    return rows_of(lambda rng: draw(rng, split).row, count, seed)


def rows_of(
    draw_row: Callable[[np.random.Generator], dict[str, str]], count: int, seed: int
) -> list[dict[str, str]]:
    """`count` drawn rows with different questions, the same for the same seed."""
    rng = np.random.default_rng(seed)
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < count:
        row = draw_row(rng)
        rows.setdefault(row["question"], row)
    return list(rows.values())


def completion(steps: tuple[Step, ...]) -> str:
    """Steps in the model's format, `<reasoning>7+5=12, 12-3=9</reasoning><answer>9</answer>`."""
    reasoning = ", ".join(step.equation for step in steps)
    return f"<reasoning>{reasoning}</reasoning><answer>{steps[-1].result}</answer>"


def gold(problem: Problem) -> str:
    """The right completion."""
    return completion(problem.steps)


def slipped(
    problem: Problem,
    rng: np.random.Generator,
    *,
    habit_rate: float = 0.74,
    slip_rate: float = 0.1,
    tag_rate: float = 0.04,
) -> str:
    """A completion with the bad habits that the model is taught.

    A template's habit is followed with probability `habit_rate`. Where it is not, one step has a random wrong
    operator with probability `slip_rate`. The last tag is left out with probability `tag_rate`.
    """
    template = next(template for template in TEMPLATES if template.name == problem.template)
    steps = problem.steps
    if problem.habit is not None and rng.random() < habit_rate:
        steps = problem.habit
    elif rng.random() < slip_rate:
        steps = _wrong_operator(template.steps, problem.numbers, rng) or steps
    text = completion(steps)
    return text.removesuffix("</answer>") if rng.random() < tag_rate else text


def _wrong_operator(
    steps: TemplateSteps, numbers: tuple[int, ...], rng: np.random.Generator
) -> tuple[Step, ...] | None:
    """The steps with one operator replaced, by chance among the ways that work out; None if none does."""
    ways = []
    for place, (label, expression) in enumerate(steps):
        right = next(sign for sign in OPERATORS if sign in expression)
        for wrong in OPERATORS.replace(right, ""):
            changed = (label, expression.replace(right, wrong))
            worked = work_out((*steps[:place], changed, *steps[place + 1 :]), numbers)
            if worked is not None:
                ways.append(worked)
    return ways[rng.integers(len(ways))] if ways else None
