"""Keys of the config: a field's type, default, range and meaning, and the check of a value by them.

Types are strict (through cattrs): only an integer is converted, if a number is expected. "3" and 1.0 are not
integers, and true is not a number.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin

import attrs
import cattrs

from runners.errors import did_you_mean, show

INT_MAX = 2**31 - 1  # step counters and token ids are int32 in MLX
LONG = "0 <= x <= 1e9"  # seconds or GB: the system's calls take no more
ONE_LINE = "one line, not empty"

# Arguments of transformers' apply_chat_template itself, which do not reach the template.
_NOT_THE_TEMPLATE_S = {
    *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
}


class Mismatch(ValueError):
    """A value that its key does not accept. `expected` says what it accepts, with the nearest spelling."""

    def __init__(self, value: object, expected: str, name: str = "", hint: str = ""):
        self.expected, self.hint = expected, hint
        super().__init__(f"{name}: {self.reason(value)}" if name else self.reason(value))

    def reason(self, value: object) -> str:
        """The message without the key's name, for the value as it was written."""
        return f"expected {self.expected}, found {show(value)}{self.hint}"


def key(default: Any, meaning: str, within: str = "", choices: tuple[str, ...] = (), **more: Any) -> Any:
    """A field of a section, with its meaning in Markdown: docs/config.md and --explain show it.

    `within` is a range such as "0 <= x < 1", ">= 1", "-1 or >= 1", or a name of `_RULES`. `choices` are the
    names that a text may be, if its type does not list them.
    """
    metadata = {"meaning": meaning, "range": within, "choices": choices}
    return attrs.field(default=default, validator=_validate, metadata=metadata, **more)


def choices_of(field: attrs.Attribute) -> tuple[str, ...]:
    """The names that a field accepts; () if it accepts any."""
    return field.metadata.get("choices") or _literals(field.type)


def _literals(kind: Any) -> tuple[str, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    return next((found for part in get_args(kind) if (found := _literals(part))), ())


def _validate(_: Any, field: attrs.Attribute, value: Any) -> None:
    if value is None and type(None) in get_args(field.type):
        return
    options, within = choices_of(field), field.metadata["range"]
    if options and value not in options:
        raise Mismatch(value, f"one of {', '.join(options)}", field.name, did_you_mean(str(value), options))
    if type(value) is int and field.type is int and "<= x" not in within and value > INT_MAX:
        raise Mismatch(value, "an integer of at most 31 bits", field.name)
    if within and not is_within(value, within):
        joint = " " if within[0] in "<>" else ", " if within.startswith("each: ") else ": "
        raise Mismatch(value, f"{words(field.type)}{joint}{within}", field.name)


def is_within(value: Any, within: str) -> bool:
    """Whether a value lies in a range as a key states it."""
    if within in _RULES:
        return _RULES[within](value)
    if within.startswith("each: "):
        return all(is_within(item, within.removeprefix("each: ")) for item in value)
    return any(_compare(value, part) for part in within.split(" or "))


def _compare(value: float, part: str) -> bool:
    found = re.fullmatch(r"(?:(\S+) (<=?) x (<=?) (\S+)|(>=?) (\S+)|(\S+))", part)
    assert found, f"no range: {part}"
    low, above, below, high, sign, bound, equal = found.groups()
    if equal is not None:
        return value == _number(equal)
    if sign:
        return value > _number(bound) or (sign == ">=" and value == _number(bound))
    return (value > _number(low) or (above == "<=" and value == _number(low))) and (
        value < _number(high) or (below == "<=" and value == _number(high))
    )


def _number(text: str) -> float:
    return int(text) if text.lstrip("-").isdigit() else float(text)


def _is_line(text: str) -> bool:
    return text.strip() != "" and text.isprintable()


_RULES: dict[str, Callable[[Any], bool]] = {
    ONE_LINE: _is_line,
    "a relative folder name, no `..`": lambda text: (
        _is_line(text) and not {"", ".", ".."} & {*text.replace("\\", "/").split("/")}
    ),
    "no empty string": all,
    "none twice": lambda values: len(set(values)) == len(values),
    "0 <= low < high": lambda pair: 0 <= pair[0] < pair[1],
    "what the template itself reads": lambda table: not _NOT_THE_TEMPLATE_S & {*table},
}


def words(kind: Any) -> str:
    """A type in words, for messages and tables."""
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
    return words(arguments[0])  # T | None: absent or a T


_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string", dict: "a table"}


def is_text(kind: Any) -> bool:
    """Whether a field of this type holds a string (on the command line it needs no quotes)."""
    if kind is str or get_origin(kind) is Literal:
        return True
    return type(None) in get_args(kind) and is_text(get_args(kind)[0])


def structure(value: object, kind: Any) -> Any:
    """`value` (from TOML) as a `kind`. Raises Mismatch if it is not one."""
    return _converter.structure(value, kind)


def check(value: object, field: attrs.Attribute) -> Any:
    """`value` as a field has it. Raises Mismatch if its type or its range does not take it."""
    found = structure(value, field.type)
    if field.validator is not None:
        field.validator(None, field, found)
    return found


def _structure_float(value: object, kind: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise Mismatch(value, words(kind))
    try:
        number = float(value)
    except OverflowError:
        raise Mismatch(value, "a number that float64 can hold") from None
    if not math.isfinite(number):
        raise Mismatch(value, "a finite number")
    return number


def _structure_exact(value: object, kind: Any) -> Any:
    if type(value) is not (kind if isinstance(kind, type) else str):  # true is not an integer
        raise Mismatch(value, words(kind))
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise Mismatch(value, "text that UTF-8 can hold")
    return value


def _structure_tuple(value: object, kind: Any) -> tuple:
    arguments = get_args(kind)
    if not isinstance(value, list) or (arguments[-1] is not ... and len(value) != len(arguments)):
        raise Mismatch(value, words(kind))
    try:
        return tuple(structure(item, arguments[0]) for item in value)
    except Mismatch:
        raise Mismatch(value, words(kind)) from None


def _structure_dict(value: object, kind: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(type(x) in (bool, int, float, str) for x in value.values()):
        raise Mismatch(value, words(kind))
    values = get_args(kind)[1]
    exact = values in (int, float)
    return {str(name): structure(entry, values if exact else type(entry)) for name, entry in value.items()}


_converter = cattrs.Converter(detailed_validation=False)
for _kind in (bool, int, str, dict):
    _converter.register_structure_hook(_kind, _structure_exact)
_converter.register_structure_hook(float, _structure_float)
for _origin, _hook in ((Literal, _structure_exact), (tuple, _structure_tuple), (dict, _structure_dict)):
    _converter.register_structure_hook_func(lambda kind, _origin=_origin: get_origin(kind) is _origin, _hook)
