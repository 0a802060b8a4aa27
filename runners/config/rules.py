"""Defines the config's keys (type, default, range, meaning) and checks their values.

Types are strict. An integer is accepted where a number is expected, but nothing else is converted:
"3" and 1.0 are not integers, and true is not a number.
"""

import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin

import attrs

from runners.errors import did_you_mean, show, spell

INT_MAX = 2**31 - 1  # step counters and token ids are int32 in MLX
LONG = "0 <= x <= 1e9"  # seconds or GB; system calls accept no more
SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

# Arguments of transformers' apply_chat_template itself, which do not reach the template.
_NOT_THE_TEMPLATE_S = {
    *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
}
_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "a table",
}


class Mismatch(ValueError):
    """A value that its key does not accept.

    `expected` describes the accepted values, with the nearest spelling.
    """

    def __init__(self, value: object, expected: str, name: str = "", hint: str = ""):
        self.expected = expected
        self.hint = hint
        super().__init__(f"{name}: {self.reason(value)}" if name else self.reason(value))

    def reason(self, value: object) -> str:
        """Returns the message without the key's name. The message shows the value as it was
        written.
        """
        return f"expected {self.expected}, found {show(value)}{self.hint}"


def key(
    default: Any, meaning: str, within: str = "", choices: tuple[str, ...] = (), **more: Any
) -> Any:
    """Returns a section's field, with its meaning in Markdown for docs/config.md and --explain.

    `within` is a range such as "0 <= x < 1", ">= 1", "-1 or >= 1", or a name of `_RULES`. `choices`
    are the valid texts, if the field's type does not list them.
    """
    return attrs.field(
        default=default,
        validator=_validate,
        metadata={"meaning": meaning, "range": within, "choices": choices},
        **more,
    )


def choices_of(field: attrs.Attribute) -> tuple[str, ...]:
    """Returns the valid names for a field, or () if any name is accepted."""
    kinds = (field.type, *get_args(field.type))
    listed = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())
    return field.metadata.get("choices") or listed


def _validate(_: Any, field: attrs.Attribute, value: Any) -> None:
    if value is None and type(None) in get_args(field.type):
        return
    options = choices_of(field)
    within = field.metadata["range"]
    if options and value not in options:
        raise Mismatch(
            value, f"one of {', '.join(options)}", field.name, did_you_mean(str(value), options)
        )
    if type(value) is int and field.type is int and "<= x" not in within and value > INT_MAX:
        raise Mismatch(value, "an integer of at most 31 bits", field.name)
    if within and not is_within(value, within):
        joint = ", " if within.startswith("each: ") else ": "
        if within[0] in "<>":
            joint = " "
        raise Mismatch(value, f"{words(field.type)}{joint}{within}", field.name)


def is_within(value: Any, within: str) -> bool:
    """Returns whether a value is in a key's range."""
    if within in _RULES:
        return _RULES[within](value)
    if within.startswith("each: "):
        items = value.values() if isinstance(value, Mapping) else value
        return all(is_within(item, within.removeprefix("each: ")) for item in items)
    return any(_compare(value, *part.split()) for part in within.split(" or "))


def _compare(value: float, *terms: str) -> bool:
    if len(terms) == 1:
        return value == _number(terms[0])
    if len(terms) == 2:  # >= 1
        return SIGNS[terms[0]](value, _number(terms[1]))
    low, above, _, below, high = terms  # 0 <= x < 1
    return SIGNS[above](_number(low), value) and SIGNS[below](value, _number(high))


def _number(text: str) -> float:
    return int(text) if text.lstrip("-").isdigit() else float(text)  # 2⁶³ − 1 is no float


def _is_line(text: str) -> bool:
    return text.strip() != "" and text.isprintable()


_RULES: dict[str, Callable[[Any], bool]] = {
    "one line, not empty": _is_line,
    "a relative folder name, no `..`": lambda text: (
        _is_line(text) and not {"", ".", ".."} & {*text.replace("\\", "/").split("/")}
    ),
    "no empty string": all,
    "an opening and a closing tag, or nothing": lambda tags: (
        not tags or (len({*tags}) == len(tags) == 2 and all(tags))
    ),
    "none twice": lambda values: len(set(values)) == len(values),
    "0 <= low < high": lambda pair: 0 <= pair[0] < pair[1],
    "arguments that the template itself reads": lambda table: not _NOT_THE_TEMPLATE_S & {*table},
}


def words(kind: Any) -> str:
    """Returns a type in words, for messages and tables."""
    arguments = get_args(kind)
    if kind in _WORDS or attrs.has(kind):
        return _WORDS.get(kind, "a table")
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(arguments)
    if get_origin(kind) is dict:
        return "a table of strings, numbers, true or false"
    if get_origin(kind) is tuple:
        many = _WORDS[arguments[0]].split(" ", 1)[1] + "s"
        return f"a list of {many}" if arguments[-1] is ... else f"a list of {len(arguments)} {many}"
    return words(arguments[0])  # T | None: absent or a T


def cells(field: attrs.Attribute) -> tuple[str, str, str, str]:
    """Returns a key's type, default, range and meaning, in Markdown, for docs/config.md."""
    choices = choices_of(field)
    within = field.metadata["range"]
    kind = "choice" if choices else words(field.type).removeprefix("an ").removeprefix("a ")
    limits = ", ".join(f"`{choice}`" for choice in choices) or within
    if within and (within[0] in "<>-0123456789" or within[-1].isdigit()):
        limits = f"`{within}`"
    limits = limits or ("–" if kind == "true or false" else "any")
    default = field.default
    shown = "below" if isinstance(default, str) and "\n" in default else f"`{spell(default)}`"
    if default is attrs.NOTHING or default is None:
        shown = "required" if default is attrs.NOTHING else "preset's"
    return kind, shown, limits, field.metadata["meaning"]


def is_text(kind: Any) -> bool:
    """Returns whether a field of this type is a string, which needs no quotes on the command
    line.
    """
    return any(one is str or get_origin(one) is Literal for one in (kind, *get_args(kind))) and (
        get_origin(kind) not in (tuple, dict)
    )


def check(value: object, field: attrs.Attribute) -> Any:
    """Returns `value` in the field's type. Raises Mismatch if its type is wrong or it is out of
    range.
    """
    found = structure(value, field.type)
    if field.validator is not None:
        field.validator(None, field, found)
    return found


def structure(value: Any, kind: Any) -> Any:
    """Returns `value` (from TOML or JSON) as a `kind`. Raises Mismatch if its type is wrong."""
    origin = get_origin(kind)
    arguments = get_args(kind)
    if type(None) in arguments:
        return None if value is None else structure(value, arguments[0])
    if attrs.has(kind):
        fields = attrs.fields_dict(kind)
        return kind(**{name: structure(item, fields[name].type) for name, item in value.items()})
    if (
        origin is tuple
        and isinstance(value, list)
        and (arguments[-1] is ... or len(value) == len(arguments))
    ):
        try:
            return tuple(structure(item, arguments[0]) for item in value)
        except Mismatch:
            raise Mismatch(value, words(kind)) from None
    if origin is dict and isinstance(value, Mapping):
        if not all(type(item) in (bool, int, float, str) for item in value.values()):
            raise Mismatch(value, words(kind))
        exact = arguments[1] in (int, float)
        return {
            structure(str(k), str): structure(item, arguments[1] if exact else type(item))
            for k, item in value.items()
        }
    if kind is float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise Mismatch(value, "a number")
        if not -sys.float_info.max <= value <= sys.float_info.max:  # false for NaN too
            raise Mismatch(value, "a finite number")
        return float(value)
    if type(value) is not (str if origin is Literal else kind):  # true is not an integer
        raise Mismatch(value, words(kind))
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise Mismatch(value, "text that UTF-8 can represent")
    return value
