"""Answers in running text: the last number, and the letter of a choice.

Both are strict about what a reader could take in two ways: a number that is part of an expression, a list or a
range is no answer, and a choice is one letter or none.
"""

from __future__ import annotations

import re

from runners.answers.values import CHANGES, CURRENCY, SIGNS, parse_quantity, without_latex

_LINES, _BEFORE, _BEHIND = (
    8,
    300,
    90,
)  # lines with digits, and characters around a line's last digit, that are read
_OPERATOR = "[-+*/×÷·^±√]"
# Digits with all that joins them: a run is one number, or it is no answer.
_RUN = re.compile(
    rf"(?:{_OPERATOR} ?|{CURRENCY} ?|(?<![.\w])\.(?=[0-9]))*[0-9]"
    rf"(?:(?: ?{_OPERATOR}{{1,3}} ?|[ .,:;\u00a0\u2009\u202f]|[eE][+-]?)?(?:{CURRENCY}|\.(?=[0-9]))?[0-9])*"
)
_LEAD = re.compile(rf"(?:{_OPERATOR} ?)*")
_MATHS = re.compile(r"\$([^$\n]*[=\\^][^$\n]*)\$(?![0-9])")  # not two prices
_DASHED = re.compile(r"[^\W\d_]{2}$|[,.:;]$")  # a dash behind these is punctuation
_JOINED = re.compile(
    r"[0-9]%?,? (?:and|over|to|divided by)$|\b(?:minus|or|negative|not|plus|times)$|n't$|(?:\b[A-Za-z]|[0-9)])\($|\{$"
)
_DENIED = re.compile(
    r"\W{0,3}\s(?:(?:is|was|would be)\s(?:not|wrong|incorrect|false|impossible)\b|(?:isn't|wasn't|can't|cannot)\b"
    r"|(?:not|wrong|incorrect|false|impossible)$)"
)
_CHANGED = re.compile(
    rf"[ -](?:{'|'.join(sorted(CHANGES))})\b| and (?:a|one) (?:half|third|quarter)\b"
    r"| ?[\\^√π+×÷·/]| [-*] ?[\w(]|-\w|\(\w\b"
)
_END = re.compile(r"[,;:!?()\n\"`|\]}<=]|\.(?!\w)|$")
_LAST_DIGIT = re.compile(r"[0-9](?=[^0-9\n]*$)", re.MULTILINE)  # of each line
_NAMED = re.compile(r"\w$")
_ORDINAL = re.compile(r"(?:st|nd|rd|th)\b")
_TEXT = 4000  # characters at the end of a text in which a choice is looked for
_EDGE = r"[\s()\[\]<>{}*_\"'`$.:!]*"
_ALONE = re.compile(rf"{_EDGE}([A-Za-z]){_EDGE}")
_CAPITAL = r"(?!A\s+[a-z]|I\b(?!\)))([A-Z])(?![\w'])"  # no article, no pronoun
_STATED = re.compile(
    r"\b(?i:(?:answer|option|choice)(?:\s+(?:is|must be|should be|would be)\b|\s*[:=])|answer\b)"
    r"(?i:\s+(?:option|choice|letter)\b)?[\s:=*_(\[\"'`$]{0,12}(?:([A-Z])(?![\w'])|([a-z])(?=[)\].,:*\"'`]|\s*$))"
    r"|\\boxed[\s{(*]{1,4}(?:\\text\w*[\s{(*]{1,4})?([A-Za-z])(?=[\s)\].:,/}&])",
    re.MULTILINE,
)
_MARKED = re.compile(rf"^[-\s(\[*]{{0,4}}{_CAPITAL}(?=[)\].:*])", re.MULTILINE)
_SINGLE = re.compile(rf"(?<![\w']){_CAPITAL}")
_ANOTHER = re.compile(
    rf"[)\]*.}}$]{{0,3}}(?:\s*(?:[,/&+|-]|\b(?:and|or|nor)\b)\s*|\s)[(\[*]{{0,3}}{_CAPITAL}"
)
_OR = re.compile(r"[A-Z]\W{0,6}\b(?:and|or)\s+(?:the\s+)?$")
_CLAUSE = re.compile(r"[.,:;!?\n]|\b(?:but|so)\b")
_REFUSED = re.compile(r"\b(?:not|no|nor|never|neither|except|than)\b|n't\b", re.IGNORECASE)


def last_number(text: str) -> str | None:
    """The last number with its unit; None if it is part of something else, as in ``10-5``, ``5 or 6``, ``1.2.3``.

    Digits of names (``x2``, ``H2O``) and ordinals (``2nd``) are no numbers.
    """
    ends = [found.end() for found in _LAST_DIGIT.finditer(text)]
    for end in reversed(ends[-_LINES:]):
        start = max(text.rfind("\n", 0, end) + 1, end - _BEFORE)
        line = text[start : end + _BEHIND].partition("\n")[0].translate(SIGNS).replace("**", " ")
        line = without_latex(_MATHS.sub(r" \1 ", line))
        line = re.sub(r"(?<=[0-9]) ?x ?(?=[0-9])", "×", line)
        for run in reversed([*_RUN.finditer(line)]):
            before, number, behind = line[: run.start()], run[0], line[run.end() :]
            if _NAMED.search(before) and number[0] in "0123456789":
                before, _, number = number.partition(" ")  # a name, and perhaps a number behind it
            if number and not _ORDINAL.match(behind):
                return _number(before, number, behind)
    return None


def _number(before: str, number: str, behind: str) -> str | None:
    """A number between two texts, with the unit that is behind it; None if it is part of something else."""
    sign = _LEAD.match(number)[0]  # pyright: ignore[reportOptionalSubscript] (it may be empty)
    number, spoken = number[len(sign) :], before.rstrip()
    is_sign = sign in ("-", "+") and not re.search(r"[\w)\]}]$", before)
    is_sign |= sign == "- " and spoken.endswith("=")
    is_mark = sign in ("- ", "* ", "+ ") and not spoken  # of a list
    is_mark |= sign == "- " and bool(_DASHED.search(spoken))
    if _JOINED.search(spoken) or (sign and not is_sign and not is_mark):
        return None
    number = sign.strip() * is_sign + number
    words = behind[: _END.search(behind).start()].split(" ")  # pyright: ignore[reportOptionalMemberAccess]
    found, quantity, rest = None, None, ""
    for count in range(1, min(len(words), 5) + 1):
        text = (number + " ".join(words[:count])).strip()
        read = None if words[count - 1] == "in" and count < len(words) else parse_quantity(text)
        if read is not None and read != quantity:
            found, quantity, rest = text, read, " ".join(["", *words[count:]])
    spoilt = _DENIED.match(rest) or (quantity and not quantity.unit and _CHANGED.match(rest))
    return None if spoilt else found


def letter(text: str) -> str | None:
    """The letter of a choice; None if there is none, or more than one.

    It is the whole text, or the last letter that the text calls its answer. In a text without such words it is
    the only letter that begins a line as an option (``B) iron``), or the only capital that stands alone. A letter
    that is denied (``not C``, ``C is wrong``) is none.
    """
    if alone := _ALONE.fullmatch(text[:100]) if len(text) <= 100 else None:
        return alone[1].upper()
    text = text[-_TEXT:]
    for pattern in (_STATED, _MARKED, _SINGLE):
        found = [*pattern.finditer(text)]
        kept = [each for each in found if not _is_denied(text, each)]
        letters = [next(filter(None, each.groups())).upper() for each in kept]
        if found and pattern is _STATED:
            several = (
                not kept or _ANOTHER.match(text, kept[-1].end()) or _OR.search(text[: kept[-1].start()][-30:])
            )
            return None if several else letters[-1]
        if letters:
            return letters[0] if len({*letters}) == 1 else None
    return None


def _is_denied(text: str, found: re.Match[str]) -> bool:
    clause = _CLAUSE.split(text[max(found.start() - 80, 0) : found.start()])[-1]
    return bool(_REFUSED.search(clause) or _DENIED.match(text, found.end()))
