"""Compares answers by value (numbers with units, fractions, percentages, LaTeX), otherwise as
texts.

All comparisons take linear time, because a policy writes these texts and could produce inputs on
which a backtracking pattern takes exponential time.
"""

import re
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from typing import NamedTuple

# Floats as plain decimals have up to 330; the bound keeps exact arithmetic cheap.
_MAX_NUMBER_CHARACTERS = 400
_WITH_EXPONENT = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][+-]?[0-9]{1,3}")
SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-", "\ufe63": "-", "\uff0d": "-"})
CURRENCY = "[$€£¥₹]"
_GROUPED = r"[1-9][0-9]{0,2}(?P<sep>[, \u00a0\u2009\u202f])[0-9]{3}(?:(?P=sep)[0-9]{3})*"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s?(?P<before>{CURRENCY}?)\s?(?P<inner_sign>[+-]?)"
    r"(?:(?:(?P<mixed>[0-9]+)\s(?=[1-9]))?(?P<top>[0-9]+)\s?/\s?(?P<bottom>[0-9]+)"
    rf"|(?P<whole>{_GROUPED}|[0-9]+|(?=\.[0-9]))(?P<decimals>\.[0-9]+)?"
    r"(?P<exponent>[eE][+-]?[0-9]{1,3})?)(?P<behind>.*)"
)
_EQUATION = re.compile(r"\A(?:[A-Za-z]\s?)?=\s?")  # x = 5
_SCALES = {
    **{"dozen": 12, "hundred": 10**2, "thousand": 10**3},
    **{"million": 10**6, "billion": 10**9, "trillion": 10**12},
}
# Each unit with its spellings; the first one may be plural or British.
_SPELLINGS = """
dollar $ usd buck bucks; euro € eur; pound £ gbp lb lbs; yen ¥; rupee ₹ rs; cent ¢; percent % pct;
degree ° deg; celsius °c; fahrenheit °f; radian rad;
kilometer km; meter m; decimeter dm; centimeter cm; millimeter mm; micrometer µm; nanometer nm;
inch in; foot ft feet; yard yd; mile mi;
ton t tonne tonnes; kilogram kg kgs kilo kilos; gram g; milligram mg; ounce oz;
liter l L; milliliter ml; gallon gal; quart qt; pint pt; cup; tablespoon tbsp; teaspoon tsp;
century centuries; decade; year yr yrs; month; week wk; day; hour h hr hrs; minute min mins;
second s sec secs; millisecond ms; mile/hour mph; kilometer/hour kmh kph;
joule J; kilojoule kj; calorie cal; kilocalorie kcal; watt W; kilowatt kw; volt V; newton N;
hertz hz; person people; child children; man men; woman women; student; kid; friend; animal; fish;
tree; flower; piece; item; unit; point; page; book; box; bag; bottle; can; slice; card; ticket;
coin; pencil; marble; cookie; egg; apple; orange; car
"""
_UNITS: dict[str, str] = {}
for _spellings in map(str.split, _SPELLINGS.split(";")):
    _UNITS |= dict.fromkeys(_spellings, _spellings[0])
_POWERS = {
    **dict.fromkeys(("square", "sq", "squared", "²"), "²"),
    **dict.fromkeys(("cubic", "cu", "cubed", "³"), "³"),
}
_POWER = re.compile(r"(?:(square|sq|cubic|cu)\.? )?(.+?)\s?(²|³|squared|cubed)?")
_PER = re.compile(r"\s?/\s?|\s?\b(?:per|an?)\s")
# Words after a number or a unit that change nothing.
_ALSO = re.compile(r"\s?\b(?:altogether|each|in (?:all|total)|left|old|remaining|total)$")
CHANGES = {
    *("half", "halves", "third", "thirds", "quarter", "quarters", "fourth", "fourths", "fifth"),
    *("fifths", "sixth", "sixths", "seventh", "sevenths", "eighth", "eighths", "ninth", "ninths"),
    *("tenth", "tenths", "hundredth", "hundredths", "thousandth", "thousandths", "millionth"),
    *("millionths", "squared", "cubed", "factorial", "plus", "minus", "over", "divided"),
    *("multiplied", "or", "pi", "sqrt"),
}
"""Words after a number that change its value or make it one of several."""
# Words that are not units: a reference answer with one after its number is a text.
_NO_UNITS = CHANGES | {
    *("and", "are", "as", "at", "but", "exp", "if", "is", "less", "ln", "log", "mod", "more"),
    *("not", "of", "sin", "cos", "tan", "than", "times", "to", "was", "wrong"),
}
_LATEX = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\$\$|\\displaystyle", " "),
        (r"\$([^$]*[=\\^][^$]*|[-+0-9.,/ ]+)\$(?![0-9])", r" \1 "),  # mathematics, not two prices
        (r"\\[cdt]frac", r"\\frac"),
        (
            r"\\frac\s*(?:\{\s*(-?[0-9]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))(?![0-9])",
            r" \1\2/\3\4 ",
        ),
        (r"\\(?:text\w*|math(?:rm|bf|it|sf)|mbox)\s*\{([^{}]*)\}", r" \1 "),
        (r"\\(?:boxed|fbox)\s*\{([^{}]*)\}", r" \1 "),
        (r"\^\s*\{?\\circ\}?", "°"),
        (
            r"\s?(?:\\times|\\cdot|×)\s?10\s?\^\s?(?:\{([+-]?[0-9]{1,3})\}|([0-9]))",
            r"e\1\2",
        ),
        (r"\\(?:times|cdot|div|pm)(?![A-Za-z])", "×"),
        (r"\{,\}", ","),
        (r"\\(?:left|right|[()\[\]!])", ""),
        (r"\\[,;: ]|~", " "),
        (r"\\([$%&#_])", r"\1"),
        (r"\s?\^\s?\{?2\}?(?![0-9])", "²"),
        (r"\s?\^\s?\{?3\}?(?![0-9])", "³"),
        (r"\s+", " "),
    )
]


class Quantity(NamedTuple):
    """A number with its unit."""

    value: Fraction
    unit: str = ""  # in canonical spelling; empty if there is none


def answers_agree(
    found: str, gold: str, *, ignore_case: bool = False, ignore_spaces: bool = False
) -> bool:
    """Returns whether an answer is equivalent to the reference answer. Numbers are compared by
    value, other texts character by character.

    If only one of the two has a unit, the unit is ignored; two units must be equal. ``50%`` equals
    both 50 and 0.5, and ``50 cents`` equals ``$0.50``. An answer's unit must be a known unit or the
    reference answer's.
    """
    wanted = parse_quantity(gold, None)
    given = wanted and parse_quantity(found, wanted.unit)
    if wanted and given:
        return _same(given, wanted)

    def folded(text: str) -> str:
        text = without_latex(text)
        text = "".join(text.split()) if ignore_spaces else text
        return text.casefold() if ignore_case else text

    return folded(found) == folded(gold)


def parse_quantity(text: str, unit: str | None = "") -> Quantity | None:
    """Parses a text that is a single number. Returns its exact value and unit, or None for any
    other text.

    Accepted: a sign (``-``, ``+``, the Unicode minus), a currency sign on either side, thousands in
    groups of three (comma or space), decimals after a point, an exponent (``5e3``, ``5 × 10^3``),
    a fraction, a mixed number (``1 1/2``), ``12 million``, a unit (``18 dollars an hour``, ``5
    m²``), LaTeX (``2\\frac{1}{3}``, ``18\\text{ cm}``, ``\\boxed{18}``), ``x =`` before it, a full
    stop after it.

    Rejected: several numbers, wrong groups (``1,23``, ``1.000,5``), a mixed number with a fraction
    of 1 or more, a zero denominator, digits other than 0 to 9, ``nan`` and ``inf``, words that are
    not units (``5 tenths``, ``2 pi``), more than 400 characters.

    Args:
        unit: a unit that is accepted in addition to the known ones. If `unit` is None, up to four
            plain words are accepted too, as in a reference answer.
    """
    if len(text) > _MAX_NUMBER_CHARACTERS:
        return None
    text = _EQUATION.sub("", without_latex(text).translate(SIGNS), count=1)
    match = _NUMBER.fullmatch(text.removesuffix("."))
    if match is None or (match["sign"] and match["inner_sign"]):
        return None
    read = _scale_and_unit(match["before"], match["behind"], unit)
    if read is None:
        return None
    if match["top"] is not None:
        top = int(match["top"])
        bottom = int(match["bottom"])
        if not bottom or (match["mixed"] and top >= bottom):
            return None
        size = Fraction(top, bottom) + int(match["mixed"] or 0)
    else:
        whole = re.sub(r"[^0-9]", "", match["whole"]) or "0"
        size = Fraction(whole + (match["decimals"] or "") + (match["exponent"] or ""))
    scale, name = read
    return Quantity(scale * (-size if "-" in (match["sign"], match["inner_sign"]) else size), name)


def parse_number(text: str) -> Fraction | None:
    """Returns the value of a reference answer if the answer is a number, with any unit; otherwise
    None.
    """
    found = parse_quantity(text, None)
    return None if found is None else found.value


def _scale_and_unit(before: str, behind: str, other: str | None) -> tuple[int, str] | None:
    """Returns the factor and the unit that are given by a currency sign before a number and the
    words after it. Returns None if the words are not a unit.
    """
    phrase = behind.strip()
    first, _, others = phrase.partition(" ")
    scale = _SCALES.get(first.lower(), 1)
    phrase = _ALSO.sub("", others if scale > 1 else phrase)
    unit = _unit(phrase)
    if before and unit != _UNITS[before]:
        unit = _unit(f"{before} {phrase}".strip())
    is_apart = scale > 1 or behind[:1].isspace()
    if unit is None and is_apart and not before:
        unit = _other_unit(phrase, other)
    return None if unit is None else (scale, unit)


def _unit(phrase: str) -> str | None:
    """Returns a unit's canonical spelling, such as ``mile/hour`` or ``meter²``. No words give an
    empty text, and an unknown unit gives None.
    """
    if not phrase:
        return ""
    parts = []
    for part in _PER.split(phrase):
        match = _POWER.fullmatch(part.strip().removeprefix("degrees "))
        name = _name(match[2].rstrip(".")) if match else None
        if match is None or name is None:
            return None
        parts.append(name + _POWERS.get(match[1] or match[3], ""))
    return "/".join(parts)


def _name(word: str) -> str | None:
    """Returns a unit's first spelling. Only that spelling may be plural, and a single letter keeps
    its case.
    """
    if len(word) > 1:
        word = word.lower().replace("metre", "meter").replace("litre", "liter")
    singular = next((each for each in _singular(word) if _UNITS.get(each) == each), None)
    return _UNITS.get(word, singular)


def _singular(word: str) -> tuple[str, ...]:
    """Returns a word, and the words whose plural it may be."""
    return (word, word.removesuffix("s"), word.removesuffix("es"))


def _other_unit(phrase: str, other: str | None) -> str | None:
    """Returns a unit that is not in the table: `other` or, if `other` is None, any plain words."""
    phrase = phrase.lower()
    if other is not None:
        is_other = other and {*_singular(phrase)} & {*_singular(other)}
        return other if is_other else None
    words = phrase.split()
    plain = all(len(word) > 1 and word.isalpha() and word not in _NO_UNITS for word in words)
    return phrase if plain and len(words) < 5 else None


def _same(a: Quantity, b: Quantity) -> bool:
    if a.unit == b.unit:
        return a.value == b.value
    if not a.unit or not b.unit:
        return a.value == b.value or _share(a) == _share(b)
    return "cent" in (a.unit, b.unit) and _cents(a) == _cents(b)


def _cents(quantity: Quantity) -> Fraction:
    """Returns an amount of money in cents, or 0 for any other quantity."""
    return quantity.value * {"cent": 1, "dollar": 100, "euro": 100}.get(quantity.unit, 0)


def _share(quantity: Quantity) -> Fraction:
    """Returns a percentage of at most 100 as a share, and any other quantity's value unchanged."""
    is_share = quantity.unit == "percent" and abs(quantity.value) <= 100
    return quantity.value / 100 if is_share else quantity.value


def without_latex(text: str) -> str:
    """Removes quotes, emphasis, and LaTeX markup around numbers and words."""
    text = text.strip("*` \n\t\r")
    if len(text) > _MAX_NUMBER_CHARACTERS:
        return text.strip()
    while len(text) > 1 and text[0] == text[-1] and text[0] in "$\"'":
        text = text[1:-1].strip("*` \n\t\r")
    if not {*"\\{^$"} & {*text}:
        return text.strip()
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    return text.strip()


def value_text(value: object) -> str:
    """Returns a row's value as text: 0.00005 for 5e-05 (which math-verify reads as 5·e − 5), 18 for
    the float 18.0.

    A text is returned unchanged.
    """
    if isinstance(value, str):
        return value
    text = without_exponent(str(value))
    if not isinstance(value, Real):
        return text
    return "0" if text == "-0.0" else text.removesuffix(".0")


def without_exponent(text: str) -> str:
    """Converts a number with an exponent to a plain decimal; any other text is unchanged."""
    return format(Decimal(text), "f") if _WITH_EXPONENT.fullmatch(text) else text
