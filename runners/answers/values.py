"""Answers compared as people mean them: numbers with units, fractions, percentages, LaTeX; else texts.

All of it takes time linear in the text: a policy writes these texts, and it will find the input on which a
backtracking pattern takes exponential time.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from typing import NamedTuple

# Floats in plain decimals have up to 330; the bound keeps exact arithmetic on a policy's text cheap.
_MAX_NUMBER_CHARACTERS = 400
_WITH_EXPONENT = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][+-]?[0-9]{1,3}")
_SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-", "\ufe63": "-", "\uff0d": "-"})
_CURRENCY = "[$€£¥₹]"
_GROUPED = r"[1-9][0-9]{0,2}(?P<sep>[,\u00a0\u2009\u202f])[0-9]{3}(?:(?P=sep)[0-9]{3})*"
_WORD = r"[^\W\d_][\w./²³°-]{0,30}"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s?(?P<before>{_CURRENCY}?)\s?(?P<inner_sign>[+-]?)"
    rf"(?:(?:(?P<mixed>[0-9]+)\s)?(?P<top>[0-9]+)\s?/\s?(?P<bottom>[0-9]+)"
    rf"|(?P<whole>{_GROUPED}|[0-9]+|(?=\.[0-9]))(?P<decimals>\.[0-9]+)?(?P<exponent>[eE][+-]?[0-9]{{1,3}})?)"
    rf"(?P<gap>\s?)(?P<unit>%|{_CURRENCY}|°[CF]?|{_WORD}(?:\s{_WORD}){{0,3}})?"
)
_EQUATION = re.compile(r"[A-Za-z]\s?=\s?")  # x = 5
_SCALES = {
    **{"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12},
    "dozen": 12,
}
# Words behind a number that are no unit: then the text is not one number.
_NO_UNITS = {"and", "are", "as", "at", "but", "if", "is", "less", "more", "not", "of", "or", "than"} | {
    *("times", "to", "was", "pi", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", "mod", "i", "e")
}
# Units as they are spelt in short; a plural, and British spelling, are understood for each.
_SPELLINGS = """
dollar $ usd bucks; euro € eur; pound £ gbp lb lbs; yen ¥; rupee ₹ rs; cent ¢; percent % pct; degree °;
kilometer km; meter m; centimeter cm; millimeter mm; kilogram kg kgs; gram g; liter l; milliliter ml;
inch in; foot ft feet; mile mi; hour h hr hrs; minute min mins; second s sec secs
"""
_UNITS = {word: group.split()[0] for group in _SPELLINGS.split(";") for word in group.split()}
_LATEX = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2"),
        (r"\\[dt]?frac\s*(\d)(\d)", r"\1/\2"),
        (r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r" \1"),
        (r"\^\s*\{?\\circ\}?", "°"),
        (r"\{,\}", ","),
        (r"\\(?:left|right|[,!;: ()\[\]])", ""),
        (r"\\([$%&#_])", r"\1"),
        (" +", " "),
    )
]


class Quantity(NamedTuple):
    """A number with its unit."""

    value: Fraction
    unit: str = ""  # the first word or sign of it, in one spelling; empty: none


def answers_agree(
    found: str, gold: str, *, ignore_case: bool = False, ignore_spaces: bool = False, as_texts: bool = False
) -> bool:
    """Whether two answers mean the same: numbers by their exact value, other texts letter by letter.

    A unit that only one of them has does not count; ``50%`` is 50 and also 0.5; ``50 cents`` is ``$0.50``.
    With `as_texts` numbers are texts too.
    """
    if not as_texts:
        a, b = parse_quantity(found), parse_quantity(gold)
        if a is not None and b is not None:
            return _same(a, b)
        found, gold = _without_latex(found), _without_latex(gold)

    def folded(text: str) -> str:
        text = "".join(text.split()) if ignore_spaces else text.strip()
        return text.casefold() if ignore_case else text

    return folded(found) == folded(gold)


def parse_quantity(text: str) -> Quantity | None:
    """The exact value and the unit of a text that is one number and nothing else; None for any other text.

    Accepted: a sign (``-``, ``+``, the Unicode minus), a currency sign on either side, thousands in groups of
    three (comma, or a thin or no-break space), decimals, an exponent (as a column of floats spells itself), a
    fraction ``a/b`` or ``1 1/2``, a unit of up to four words (``18 dollars an hour``), ``12 million``, LaTeX
    around it (``\\frac{1}{2}``, ``18\\text{ cm}``), ``x =`` before it, one full stop at the end.

    Refused: several numbers, wrong groups (``1,23``), a zero denominator, digits other than 0–9, ``nan`` and
    ``inf``, a letter that multiplies (``2x``, ``2 pi``), anything over 400 characters.
    """
    if len(text) > _MAX_NUMBER_CHARACTERS:
        return None
    text = _without_latex(text).strip("*`\"' \n\t").translate(_SIGNS).replace("^2", "²").replace("^3", "³")
    text = _EQUATION.sub("", text, count=1) if _EQUATION.match(text) else text
    match = _NUMBER.fullmatch(text.removesuffix("."))
    if match is None or (match["sign"] and match["inner_sign"]):
        return None
    if (read := _unit(match)) is None:
        return None
    scale, unit = read
    if match["top"] is not None:
        if not (bottom := int(match["bottom"])):
            return None
        size = Fraction(int(match["top"]), bottom) + int(match["mixed"] or 0)
    else:
        whole = re.sub(r"[^0-9]", "", match["whole"]) or "0"
        size = Fraction(whole + (match["decimals"] or "") + (match["exponent"] or ""))
    return Quantity(scale * (-size if "-" in (match["sign"], match["inner_sign"]) else size), unit)


def parse_number(text: str) -> Fraction | None:
    """The value of `parse_quantity`, whatever the unit."""
    found = parse_quantity(text)
    return None if found is None else found.value


def _unit(match: re.Match[str]) -> tuple[int, str] | None:
    """The scale and the unit behind a number; None if what stands there is neither."""
    words = (match["unit"] or "").lower().split()
    scale = _SCALES.get(words[0].removesuffix("s"), 1) if words else 1
    words = words[scale > 1 :]
    if {"and", "or", "not"} & {*words}:
        return None
    first = words[0] if words else ""
    plain = first.rstrip(".").replace("metre", "meter").replace("litre", "liter")
    unit = _UNITS.get(plain) or _UNITS.get(plain.removesuffix("s") if len(plain) > 4 else "", "")
    if first and not unit:
        if len(first) < 2 or first in _NO_UNITS or not (match["gap"] or scale > 1):
            return None
        unit = first
    return scale, _UNITS.get(match["before"], unit)


def _same(a: Quantity, b: Quantity) -> bool:
    if not a.unit or not b.unit:
        shares = (a.value / 100, b.value) if a.unit else (a.value, b.value / 100)
        return a.value == b.value or ("percent" in (a.unit, b.unit) and shares[0] == shares[1])
    one, other = ({x.unit, x.unit.removesuffix("s"), x.unit.removesuffix("es")} for x in (a, b))
    if one & other:
        return a.value == b.value
    cents = {"cent": 1, "dollar": 100, "euro": 100}
    return "cent" in (a.unit, b.unit) and a.value * cents.get(a.unit, 0) == b.value * cents.get(b.unit, 0)


def _without_latex(text: str) -> str:
    """The text without LaTeX's marks around numbers and words."""
    text = text.strip()
    if len(text) > _MAX_NUMBER_CHARACTERS:
        return text
    while len(text) > 2 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    if "\\" not in text and "{" not in text:
        return text
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    return text.strip()


def value_text(value: object) -> str:
    """A row's value as text: 0.00005 for 5e-05 (math-verify reads that as 5·e − 5), 18 for the float 18.0.

    A text stays as it is.
    """
    if isinstance(value, str):
        return value
    text = without_exponent(str(value))
    if not isinstance(value, Real):
        return text
    return "0" if text == "-0.0" else text.removesuffix(".0")


def without_exponent(text: str) -> str:
    """A text that is a number with an exponent as a plain decimal; any other text as it is."""
    return format(Decimal(text), "f") if _WITH_EXPONENT.fullmatch(text) else text
