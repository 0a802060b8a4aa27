"""Defines the answer formats for `answer.form`: how an answer is extracted from a completion, and
how the prompt requests it.

Rewards, exact match, `grpo eval`, `grpo check`, the report and model cards all extract answers
through this table. Built-in formats take linear time. The user's patterns and functions run in a
process with limits.
"""

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import attrs

from runners.answers.prose import last_number, letter
from runners.answers.thoughts import TAGS, split_thoughts
from runners.answers.values import answers_agree
from runners.errors import UserError, did_you_mean, listed, show
from runners.machine.bounded_process import BoundedFunction
from runners.sandbox.code_tests import Verdict, extract_code, looks_forged, score_programs
from runners.sandbox.sandbox import WAITING, Limits

REASONING = "<reasoning>"
REASONING_END = "</reasoning>"
ANSWER = "<answer>"
ANSWER_END = "</answer>"
PLACE = "{answer}"
"""The placeholder for the answer in `AnswerForm.right`."""

_MOST = 20_000  # characters at a completion's end that the user's patterns and functions receive
_OBJECTS = 64  # number of last opening braces at which JSON is tried
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")


@attrs.frozen
class AnswerForm:
    """An answer format, created by `answer_form` from one of `FORMS` and the config's options."""

    # receives the text and the argument after the form's colon
    reader: Callable[[str, str], str | None]
    right: str  # a correct completion that contains PLACE; empty if unknown
    what: str  # description for notices
    instruction: str = ""  # the system prompt that requests it; empty if there is none
    nudge: str = ""  # the first words of a completion of this form
    # Runs the tests of programs; None if answers are not programs.
    judge: Callable[..., list[Verdict]] | None = None

    spec: str = ""  # the form's name in the config
    argument: str = ""  # {argument} in the texts above
    ignore_case: bool = False
    ignore_spaces: bool = False
    # the nudge, which starts each completion and is not part of an exact answer
    given: str = ""
    thoughts: tuple[str, ...] = TAGS  # tags of thoughts, in which no answer is read

    def read(self, text: str) -> str | None:
        """Extracts the answer from a completion, which includes the nudge. Returns None if there is
        no answer.
        """
        said = split_thoughts(text, self.thoughts)[1]
        if said is None:
            return None
        said = said.removeprefix(self.given) if self.spec == "exact" else said
        return self.reader(said, self.argument) or None

    def agree(self, found: str | None, gold: str | None) -> bool:
        """Returns whether two answers are equivalent. None is not equivalent to anything."""
        if found is None or gold is None:
            return False
        if self.judge:
            return self.scores([found], [gold], whole=True) == [1.0]
        gold = self.gold(gold)
        ignore_case = self.ignore_case or self.spec == "letter"
        if self.spec == "letter":
            found, gold = (each.strip().strip("().:") for each in (found, gold))
        elif self.ignore_case and self.spec == "exact":
            found, gold = (each.strip().removesuffix(".") for each in (found, gold))
        return answers_agree(found, gold, ignore_case=ignore_case, ignore_spaces=self.ignore_spaces)

    def gold(self, text: str) -> str:
        """Extracts the reference answer from a text in the data: a solution may end with
        ``\\boxed{}``, and a JSON object may contain the field.
        """
        has_form = self.spec == "boxed" or self.spec.startswith("json:")
        return (self.read(text) if has_form else None) or text

    def scores(
        self,
        found: Sequence[str | None],
        golds: Sequence[str],
        *,
        whole: bool = False,
        report: Callable[[Verdict], None] = lambda verdict: None,
    ) -> list[float]:
        """Returns 1 for each answer that is equivalent to its reference answer, else 0. For
        programs, returns the share of passed tests.

        Args:
            whole: whether only a full score matters, in which case a program may stop at its first
                failed test.
            report: called with each program's outcome.
        """
        if self.judge is None:
            return [float(self.agree(each, gold)) for each, gold in zip(found, golds, strict=True)]
        verdicts = self.judge([each or "" for each in found], golds, whole=whole)
        for verdict in verdicts:
            report(verdict)
        pairs = zip(found, verdicts, strict=True)
        return [verdict.share * (each is not None) for each, verdict in pairs]

    def doubts(self, texts: Sequence[str]) -> list[str]:
        """Returns a message if programs may have passed tests without solving them."""
        forging = list(filter(None, map(looks_forged, texts))) if self.judge else []
        names = listed(sorted(set().union(*forging)))
        notice = (
            f"{len(forging)} of {len(texts)} completions contain {names}, with which a program "
            "can pass tests without solving them: check the completions that count as right"
        )
        return [notice] if forging else []

    def is_right(self, text: str, gold: str) -> bool:
        """Returns whether a completion's answer is equivalent to the reference answer."""
        return self.agree(self.read(text), gold)


def extract_answer(text: str) -> str | None:
    """Returns the stripped text in the last complete ``<answer>…</answer>``, or None if there is
    none.

    A pair is an opening tag and the first closing tag after it, with no other opening tag between
    them. Therefore an unclosed ``<answer>`` is ignored, and in nested pairs the innermost one is
    used. An empty pair is not an answer.
    """
    last_end = text.rfind(ANSWER_END)
    start = text.rfind(ANSWER, 0, last_end) if last_end >= 0 else -1
    if start < 0:
        return None
    start += len(ANSWER)
    return text[start : text.find(ANSWER_END, start)].strip() or None


def _boxed(text: str, _: str) -> str | None:
    """Returns the content of the last complete ``\\boxed{…}``, with balanced braces; the outer one
    if they are nested.
    """
    content = None
    starts: list[int] = []  # starts of open boxes; -1 for other open braces
    for match in _BOX.finditer(text):
        mark = match[0]
        if len(mark) > 2:
            starts.append(match.end())
        elif mark == "{":
            starts.append(-1)
        elif mark == "}" and starts:
            start = starts.pop()
            if start >= 0:
                content = text[start : match.start()].strip()
    return content


def _marked(text: str, _: str) -> str | None:
    """Returns the rest of the line after the last ``####``."""
    _, mark, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0].strip() if mark else None


def _objects(text: str) -> list[dict[str, Any]]:
    """Returns the outermost JSON objects in a text, in order."""
    text = text[-_MOST:]
    decoder = json.JSONDecoder()
    found = []
    end = 0
    for match in [*re.finditer(r"\{", text)][-_OBJECTS:]:
        if match.start() >= end:
            with suppress(ValueError, RecursionError):
                value, end = decoder.raw_decode(text, match.start())
                found.append(value)
    return found


def _field(text: str, name: str) -> str | None:
    """Returns a field of the last JSON object as text. Booleans, lists and objects are written as
    JSON.
    """
    objects = _objects(text)
    value = objects[-1].get(name) if objects else None
    if value is None:
        return None
    if isinstance(value, str):
        return value.strip()
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _own(function: str, seconds: float) -> Callable[[str, str], str | None]:
    """Returns a reader that calls the user's function in the child process. An error in the
    function raises UserError.
    """
    call = BoundedFunction(function, seconds=seconds, memory=512_000_000)

    def read(text: str, argument: str) -> str | None:
        found = call(argument, text[-_MOST:])
        # Beyond the limits, or if the process ended, the text has no answer.
        if found is None:
            return None
        if "error" in found:
            raise UserError(f"answer.form {show(argument)} failed: {found['error']}")
        return found["answer"]

    return read


def last_match(pattern: str, text: str) -> dict[str, str | None]:
    """Returns the first group in a pattern's last match, or the whole match. This function runs in
    the child process.
    """
    found = None
    for match in re.finditer(pattern, text):
        found = match[1] if match.re.groups else match[0]
    return {"answer": found and found.strip()}


FORMS: dict[str, AnswerForm] = {
    "xml": AnswerForm(
        lambda text, _: extract_answer(text),
        f"{REASONING}\nworking\n{REASONING_END}\n{ANSWER}\n{PLACE}\n{ANSWER_END}",
        "<answer>…</answer>",
        "Work the problem out first, then give the result. Use exactly this form:\n"
        f"{REASONING}\nyour working, step by step\n{REASONING_END}\n"
        f"{ANSWER}\nthe final number, alone\n{ANSWER_END}",
        REASONING,
    ),
    "last_number": AnswerForm(
        lambda text, _: last_number(text),
        f"The answer is {PLACE}.",
        "a number",
        "Work the problem out step by step. End with the final number.",
    ),
    "boxed": AnswerForm(
        _boxed,
        f"Therefore \\boxed{{{PLACE}}}",
        "\\boxed{…}",
        "Work the problem out step by step, and put the final answer within \\boxed{}.",
    ),
    "gsm8k": AnswerForm(
        _marked,
        f"working\n#### {PLACE}",
        "#### and an answer",
        "Work the problem out step by step. End with a line of #### and the final number.",
    ),
    "letter": AnswerForm(
        lambda text, _: letter(text),
        f"The answer is {PLACE}",
        "a single letter",
        'Choose one of the options. End with "Answer: " and the letter of your choice.',
    ),
    "json": AnswerForm(
        _field,
        f'{{"{{argument}}": "{PLACE}"}}',
        'a JSON object with "{argument}"',
        'Reply with a JSON object that has the answer in the field "{argument}".',
    ),
    "exact": AnswerForm(
        lambda text, _: text.strip(),
        PLACE,
        "a text",
        "Reply with the answer alone, without any other word.",
    ),
    "code": AnswerForm(
        lambda text, _: extract_code(text),
        "",
        "a block of Python",
        "Write a Python program that solves the task. Give the whole program in one block that "
        "begins with ```python and ends with ```.",
        judge=score_programs,
    ),
    "regex": AnswerForm(_own(f"{__name__}:last_match", 0.5), "", "a match of the pattern"),
    "own": AnswerForm(
        _own("runners.config.user_functions:own_answer", 2.0),
        "",
        "an answer that your function finds",
    ),
}
"""The registered forms. In `answer.form`, the argument of `json`, `regex` or `own` follows a
colon."""

SPELLINGS = (
    "xml",
    "last_number",
    "boxed",
    "gsm8k",
    "letter",
    "json:FIELD",
    "exact",
    "code",
    "regex:PATTERN",
)
NONE = "none"
"""No answer is read; only the rewards score completions."""


def answer_form(
    spec: str,
    *,
    ignore_case: bool = False,
    ignore_spaces: bool = False,
    given: str = "",
    thoughts: tuple[str, ...] = TAGS,
    program_seconds: int = 2,
    partial_sandbox: bool = False,
) -> AnswerForm | None:
    """Returns the answer format for a value of `answer.form`, or None for "none". Raises
    ValueError, with the accepted values, for an invalid value.

    Args:
        given: the nudge, which is prepended to each completion.
        thoughts: the opening and the closing tag around thoughts; empty means that there are none.
        program_seconds: CPU-time limit for a program, across all its tests, in seconds.
        partial_sandbox: whether programs also run where parts of the sandbox are unavailable.
    """
    if spec == NONE:
        return None
    name, colon, argument = spec.partition(":")
    if colon and (name not in FORMS or name == "own"):
        name = "own"
        argument = spec
    wants_argument = name in ("json", "regex", "own")
    if name in FORMS and bool(argument) == bool(colon) == wants_argument:
        if name == "regex":
            try:
                re.compile(argument)
            except re.error as error:
                raise ValueError(f"a valid regular expression after regex: ({error})") from error
        registered = FORMS[name]
        limits = Limits(
            seconds=WAITING * program_seconds,
            processor_seconds=program_seconds,
            partial=partial_sandbox,
        )
        return attrs.evolve(
            registered,
            spec=spec,
            argument=argument,
            right=registered.right.replace("{argument}", argument),
            what=registered.what.replace("{argument}", argument),
            instruction=registered.instruction.replace("{argument}", argument),
            judge=functools.partial(score_programs, limits=limits) if registered.judge else None,
            ignore_case=ignore_case,
            ignore_spaces=ignore_spaces,
            given=given,
            thoughts=thoughts,
        )
    raise ValueError(
        f"one of {', '.join(SPELLINGS)}, {NONE} or file.py:function, found {show(spec)}"
        f"{did_you_mean(spec, [*SPELLINGS, NONE])}"
    )


def fitting_form(
    texts: Sequence[str], golds: Sequence[str], thoughts: tuple[str, ...] = TAGS
) -> tuple[str, int, int] | None:
    """Returns the format that fits most completions, the number of completions that it fits, and
    the number of right answers.

    Returns None if no format fits half of the completions. Ties are resolved in favour of the
    format with the most right answers, then the narrowest format.
    """
    letters = all(len(gold.strip("().: ")) == 1 and gold.strip("().: ").isalpha() for gold in golds)
    objects = chain.from_iterable(_objects(text)[-1:] for text in texts)
    fields = Counter(chain.from_iterable(objects))
    names = ["xml", "boxed", "gsm8k", *(f"json:{name}" for name, _ in fields.most_common(3))]
    best: tuple[str, int, int] | None = None
    for name in [*names, "letter" if letters else "last_number"]:
        form = answer_form(name, thoughts=thoughts)
        assert form is not None
        have = sum(form.read(text) is not None for text in texts)
        right = sum(form.is_right(text, gold) for text, gold in zip(texts, golds, strict=True))
        if have * 2 >= len(texts) and (best is None or right > best[2]):
            best = name, have, right
    return best
