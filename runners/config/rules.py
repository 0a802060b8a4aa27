"""The rules for config values: strict types (through cattrs) and ranges (attrs validators).

Only an integer is converted, if a number is wanted. "3" and 1.0 are not integers, and true is not a number.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin

import attrs
import cattrs

from runners.errors import did_you_mean, show

HUGE = 1e9  # seconds or GB: the system's calls take no more
INT_MAX = 2**31 - 1  # step counters and token ids are int32 in MLX

Validator = Callable[[Any, Any, Any], None]


class Mismatch(ValueError):
    """A value that its key does not accept. `want` says what it accepts, with the nearest spelling."""

    def __init__(self, value: object, want: str, name: str = ""):
        self.want = want
        super().__init__(f"{name}: {self.reason(value)}" if name else self.reason(value))

    def reason(self, value: object) -> str:
        """The message without the key's name, for the value as it was written."""
        return f"found {show(value)}, want {self.want}"


def at_least(low: int, high: int = INT_MAX) -> Validator:
    """An integer no smaller than `low` (and one that an int32 counter holds)."""
    most = f" and at most {high}" if high != INT_MAX else ""
    return _rule(lambda value: low <= value <= high, f"an integer of at least {low}{most}")


def above(low: float, high: float = math.inf) -> Validator:
    """A number larger than `low`, and at most `high`."""
    most = f" and at most {high:g}" if high < math.inf else ""
    return _rule(lambda value: low < value <= high, f"a number above {low:g}{most}")


def not_negative(high: float = math.inf) -> Validator:
    """A number no smaller than 0, and at most `high`."""
    most = f" and at most {high:g}" if high < math.inf else ""
    return _rule(lambda value: 0 <= value <= high, f"a number of at least 0{most}")


def fraction(*, zero: bool = True, one: bool = True) -> Validator:
    """A number between 0 and 1, each end included where its flag says so."""
    low, high = ("of at least 0" if zero else "above 0"), ("at most 1" if one else "below 1")
    return _rule(
        lambda value: (0 < value < 1) or (zero and value == 0) or (one and value == 1),
        f"a number {low} and {high}",
    )


def minus_one_or_positive() -> Validator:
    """-1 for all, or how many."""
    return _rule(lambda value: value == -1 or 1 <= value <= INT_MAX, "-1 (all) or an integer of at least 1")


def one_of(*values: int) -> Validator:
    """One of a few integers."""
    *rest, last = map(str, values)
    return _rule(lambda value: value in values, f"{', '.join(rest)} or {last}")


def check_choices(_: type, fields: list[attrs.Attribute]) -> list[attrs.Attribute]:
    """A field transformer for attrs: a field of a Literal type (or None) accepts nothing else."""
    return [
        field.evolve(validator=_choice(options)) if (options := _options(field.type)) else field
        for field in fields
    ]


def _options(kind: Any) -> tuple[str, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    return next((found for part in get_args(kind) if (found := _options(part))), ())


def _choice(options: tuple[str, ...]) -> Validator:
    def check(_: Any, attribute: Any, value: str | None) -> None:
        if value is not None and value not in options:
            want = f"one of {', '.join(options)}{did_you_mean(value, options)}"
            raise Mismatch(value, want, attribute.name)

    return check


def text() -> Validator:
    """A string that is neither empty nor holds control characters (a name or a path)."""
    return _rule(lambda value: value.strip() != "" and value.isprintable(), "a name on one line")


def run_name() -> Validator:
    """A name for a folder inside the output folder: a relative path without `..`."""

    def fits(value: str) -> bool:
        parts = value.replace("\\", "/").split("/")
        return value.strip() != "" and value.isprintable() and not {"", ".", ".."} & set(parts)

    return _rule(fits, "a folder's name, with no .. and no leading or trailing slash")


def each_text() -> Validator:
    """A list without empty strings."""
    return _rule(lambda values: all(value != "" for value in values), "a list of strings that are not empty")


# Arguments of transformers' apply_chat_template itself, which do not reach the template.
_NOT_THE_TEMPLATE_S = (
    *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
)


def template_arguments() -> Validator:
    """A table of arguments that the chat template itself reads."""

    def check(_: Any, attribute: Any, value: Mapping[str, Any]) -> None:
        for name in value:
            if name in _NOT_THE_TEMPLATE_S:
                raise Mismatch(name, "arguments that the chat template itself reads", attribute.name)

    return check


def each_once() -> Validator:
    """A list without duplicates."""
    return _rule(lambda values: len(set(values)) == len(values), "a list with no entry twice")


def each_share() -> Validator:
    """Two numbers in [0, 1), as Adam's betas are."""
    return _rule(lambda pair: all(0 <= x < 1 for x in pair), "two numbers of at least 0 and below 1")


def rising() -> Validator:
    """[low, high] with 0 <= low < high."""
    return _rule(lambda pair: 0 <= pair[0] < pair[1], "[low, high] with 0 <= low < high")


def _rule(holds: Callable[[Any], bool], want: str) -> Validator:
    def check(_: Any, attribute: Any, value: Any) -> None:
        if not holds(value):
            raise Mismatch(value, want, attribute.name)

    return check


def wanted(kind: Any) -> str:
    """A field's type in words, for messages."""
    if kind in _WORDS:
        return _WORDS[kind]
    if attrs.has(kind):
        return "a table"
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(arguments)
    if get_origin(kind) is dict:
        return "a table of strings, numbers, true or false"
    if get_origin(kind) is tuple:
        many = _WORDS[arguments[0]].split(" ", 1)[1] + "s"
        return f"a list of {many}" if arguments[-1] is ... else f"a list of {len(arguments)} {many}"
    return wanted(arguments[0])  # T | None: absent or a T


_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def is_text(kind: Any) -> bool:
    """Whether a field of this type holds a string (on the command line it needs no quotes)."""
    if kind is str or get_origin(kind) is Literal:
        return True
    return type(None) in get_args(kind) and is_text(get_args(kind)[0])


def structure(value: object, kind: Any) -> Any:
    """`value` (from TOML) as a `kind`. Raises Mismatch if it is not one."""
    return _converter.structure(value, kind)


def check(value: object, field: attrs.Attribute) -> Any:
    """`value` as a field has it. Raises Mismatch if its type or its validator does not take it."""
    found = structure(value, field.type)
    if field.validator is not None:
        field.validator(None, field, found)
    return found


def _structure_float(value: object, kind: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise Mismatch(value, wanted(kind))
    try:
        number = float(value)
    except OverflowError:
        raise Mismatch(value, "a number that float64 can hold") from None
    if not math.isfinite(number):
        raise Mismatch(value, "a finite number")
    return number


def _structure_exact(value: object, kind: Any) -> Any:
    if type(value) is not (kind if isinstance(kind, type) else str):  # true is not an integer
        raise Mismatch(value, wanted(kind))
    return value


def _structure_tuple(value: object, kind: Any) -> tuple:
    arguments = get_args(kind)
    if not isinstance(value, list) or (arguments[-1] is not ... and len(value) != len(arguments)):
        raise Mismatch(value, wanted(kind))
    try:
        return tuple(structure(item, arguments[0]) for item in value)
    except Mismatch:
        raise Mismatch(value, wanted(kind)) from None


def _structure_dict(value: object, kind: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(type(x) in (bool, int, float, str) for x in value.values()):
        raise Mismatch(value, wanted(kind))
    if any(isinstance(x, float) and not math.isfinite(x) for x in value.values()):
        raise Mismatch(value, "finite numbers")
    return {str(name): entry for name, entry in value.items()}


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter(detailed_validation=False)
    for kind in (bool, int, str):
        converter.register_structure_hook(kind, _structure_exact)
    converter.register_structure_hook(float, _structure_float)
    converter.register_structure_hook_func(lambda kind: get_origin(kind) is Literal, _structure_exact)
    converter.register_structure_hook_func(lambda kind: get_origin(kind) is tuple, _structure_tuple)
    converter.register_structure_hook_func(lambda kind: get_origin(kind) is dict, _structure_dict)
    return converter


_converter = _make_converter()
