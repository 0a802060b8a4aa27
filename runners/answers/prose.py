"""Extracts the answer from free text: the last number, or a multiple-choice letter.

Ambiguous text (a number inside an expression, a list or a range, or two letters) has no answer.
Patterns only search a limited part of the text.
"""

import re

from runners.answers.values import CHANGES, CURRENCY, SIGNS, parse_quantity, without_latex

# Number of lines with digits to read, and of characters around each line's last digit.
_LINES = 8
_BEFORE = 300
_BEHIND = 90
_CHOICE = 4000  # characters at the end of a text that are searched for a choice
_OPERATOR = "[-+*/×÷·^±√]"
# Digits and everything that joins them: one number, or no answer.
_RUN = re.compile(
    rf"(?:{_OPERATOR} ?|{CURRENCY} ?|(?<![.\w])\.(?=[0-9]))*[0-9]"
    rf"(?:(?: ?{_OPERATOR}{{1,3}} ?|[ .,:;\u00a0\u2009\u202f]|[eE][+-]?)?"
    rf"(?:{CURRENCY}|\.(?=[0-9]))?[0-9])*"
)
_LAST_DIGIT = re.compile(r"[0-9](?=[^0-9\n]*$)", re.MULTILINE)  # of each line
_LEAD = re.compile(rf"(?:{_OPERATOR} ?)*")
_WORD_OR_STOP = re.compile(r"[^\W\d_]{2}$|[,.:;]$")  # a dash after it is punctuation
_ORDINAL = re.compile(r"(?:st|nd|rd|th)\b")
# Text before a number that is part of something else: `5 and`, `minus`, `isn't`,
# `f(`, `2(`.
_JOINED = re.compile(
    r"[0-9]%?,? (?:and|over|to|divided by)$|\b(?:minus|or|negative|not|plus|times)$|n't$"
    r"|(?:\b[A-Za-z]|[0-9)])\($|\{$"
)
# Text after a number that is part of something else: a word that changes it, an operator.
_CHANGED = re.compile(
    rf"[ -](?:{'|'.join(sorted(CHANGES))})\b| and (?:a|one) (?:half|third|quarter)\b"
    r"| ?[\\^√π+×÷·/]| [-*] ?[\w(]|-\w|\(\w\b"
)
_DENIED = re.compile(  # after a number or a letter
    r"\W{0,3}\s(?:(?:is|was|would be)\s(?:not|wrong|incorrect|false|impossible)\b"
    r"|(?:isn't|wasn't|can't|cannot)\b|(?:not|wrong|incorrect|false|impossible)$)"
)
_UNIT_END = re.compile(r"[,;:!?()\n\"`|\]}<=]|\.(?!\w)|$")

_EDGE = r"[\s()\[\]<>{}*_\"'`$.:!]*"
_ALONE = re.compile(rf"{_EDGE}([A-Za-z]){_EDGE}")
_CAPITAL = r"(?!A\s+[a-z]|I\b(?!\)))([A-Z])(?![\w'])"  # not an article or a pronoun
_STATED = re.compile(
    r"\b(?i:(?:answer|option|choice)(?:\s+(?:is|must be|should be|would be)\b|\s*[:=])|answer\b)"
    r"(?i:\s+(?:option|choice|letter)\b)?[\s:=*_(\[\"'`$]{0,12}"
    r"(?:([A-Z])(?![\w'])|([a-z])(?=[)\].,:*\"'`]|\s*$))"
    r"|\\boxed[\s{(*]{1,4}(?:\\text\w*[\s{(*]{1,4})?([A-Za-z])(?=[\s)\].:,/}&])",
    re.MULTILINE,
)
_MARKED = re.compile(rf"^[-\s(\[*]{{0,4}}{_CAPITAL}(?=[)\].:*])", re.MULTILINE)
_SINGLE = re.compile(rf"(?<![\w']){_CAPITAL}")
_ANOTHER = re.compile(  # after a letter
    r"[)\]*}$]{0,3}(?:(?:\s*(?:[,/&+|-]|\b(?:and|or|nor)\b)){1,3}\s*|\s)"
    rf"[(\[*]{{0,3}}{_CAPITAL}"
)
_ONE_BEFORE = re.compile(r"[A-Z]\W{0,6}\b(?:and|or)\s+(?:the\s+)?$")
_CLAUSE = re.compile(r"[.,:;!?\n]|\b(?:but|so)\b")
_NEGATION = re.compile(r"\b(?:not|no|nor|never|neither|except|than)\b|n't\b", re.IGNORECASE)


def last_number(text: str) -> str | None:
    """Returns the last number with its unit, or None if the number is part of something else
    (``10-5``, ``1.2.3``).

    Digits in names (``x2``, ``H2O``) and ordinals (``2nd``) are not numbers.
    """
    ends = [found.end() for found in _LAST_DIGIT.finditer(text)]
    for end in reversed(ends[-_LINES:]):
        start = max(text.rfind("\n", 0, end) + 1, end - _BEFORE)
        line = text[start : end + _BEHIND].partition("\n")[0].translate(SIGNS).replace("**", " ")
        line = without_latex(line)
        line = re.sub(r"(?<=[0-9]) ?x ?(?=[0-9])", "×", line)
        for run in reversed([*_RUN.finditer(line)]):
            before, number, behind = line[: run.start()], run[0], line[run.end() :]
            if re.search(r"\w$", before) and number[0] in "0123456789":
                before, _, number = number.partition(" ")  # a name, which a number may follow
            if number and not _ORDINAL.match(behind):
                return _number(before, number, behind)
    return None


def _number(before: str, run: str, behind: str) -> str | None:
    """Returns the number, with its unit, in a run of digits and signs between two texts. Returns
    None if the number is part of something else.
    """
    lead = run[: _LEAD.match(run).end()]  # pyright: ignore[reportOptionalMemberAccess]
    number = run[len(lead) :]
    spoken = before.rstrip()
    is_glued = lead in ("-", "+") and not re.search(r"[\w)\]}]$", before)
    if is_glued or (lead == "- " and spoken.endswith("=")):
        number = lead.strip() + number
    elif lead:  # the mark of a list, a dash, or an operator
        is_mark = lead in ("- ", "+ ") and not spoken
        if not is_mark and not (lead == "- " and _WORD_OR_STOP.search(spoken)):
            return None
    end = _UNIT_END.search(behind).start()  # pyright: ignore[reportOptionalMemberAccess]
    words = behind[:end].split(" ")
    found = quantity = None
    rest = ""
    for count in range(1, min(len(words), 5) + 1):
        text = (number + " ".join(words[:count])).strip()
        is_preposition = words[count - 1] == "in" and count < len(words)
        read = None if is_preposition else parse_quantity(text)
        if read is not None and read != quantity:
            found = text
            quantity = read
            rest = " ".join(["", *words[count:]])
    is_part = _JOINED.search(spoken) or _DENIED.match(rest)
    is_part = is_part or (quantity and not quantity.unit and _CHANGED.match(rest))
    return None if is_part else found


def letter(text: str) -> str | None:
    """Returns a multiple-choice letter, or None if there is none, or more than one.

    The letter is the whole text, or the last letter that the text states as its answer. Otherwise,
    the letter is the only one at the start of a line (``B) iron``), or the only isolated capital. A
    negated letter (``not C``, ``C is wrong``) does not count.
    """
    alone = _ALONE.fullmatch(text) if len(text) <= 100 else None
    if alone:
        return alone[1].upper()
    text = text[-_CHOICE:]
    stated = [*_STATED.finditer(text)]
    if stated:
        kept = [each for each in stated if not _is_denied(text, each)]
        if not kept or _ANOTHER.match(text, kept[-1].end()):
            return None
        is_second = _ONE_BEFORE.search(text[: kept[-1].start()][-30:])
        return None if is_second else next(filter(None, kept[-1].groups())).upper()
    for pattern in (_MARKED, _SINGLE):
        letters = {each[1] for each in pattern.finditer(text) if not _is_denied(text, each)}
        if letters:
            return letters.pop() if len(letters) == 1 else None
    return None


def _is_denied(text: str, found: re.Match[str]) -> bool:
    clause = _CLAUSE.split(text[max(found.start() - 80, 0) : found.start()])[-1]
    return bool(_NEGATION.search(clause) or _DENIED.match(text, found.end()))
