"""Ollama's side of a Modelfile: its values by the rules of Ollama's parser, its template in Go's language."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Show = Callable[[Mapping[str, Any]], str]


def read_modelfile(text: str) -> list[tuple[str, str]]:
    """(command, value) of each line; of PARAMETER its name.

    A value ends at the first line end behind closed quotes, if it has any; white space around it is cut off,
    nothing is unescaped, and what Go calls not printable is dropped, except tabs and line ends.
    """
    found = []
    while text := text.lstrip():
        command, text = text.split(" ", 1)
        if command == "PARAMETER":
            command, text = text.split(" ", 1)
        ends = [at for at, character in enumerate(text) if character in "\r\n"]
        raw, end = next((raw, at) for at in ends if _closed(raw := text[:at].strip()))
        kept = "".join(each for each in raw if each.isprintable() or each in "\t\r\n")
        quotes = re.match('"""|"|', kept)
        width = len(quotes[0]) if quotes else 0
        found.append((command, kept[width : len(kept) - width]))
        text = text[end + 1 :]
    return found


def _closed(value: str) -> bool:
    quotes = '"""' if value.startswith('"""') else '"' if value.startswith('"') else ""
    return not quotes or (value.endswith(quotes) and len(value) >= 2 * len(quotes))


def ask(modelfile: str, messages: Sequence[Mapping[str, str]]) -> str:
    """What Ollama gives the model for a conversation."""
    stated = dict(read_modelfile(modelfile))
    if "SYSTEM" in stated and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": stated["SYSTEM"]}, *messages]
    return execute(stated["TEMPLATE"], messages)


def execute(template: str, messages: Sequence[Mapping[str, str]]) -> str:
    """A template with these values, in as much of Go's text/template as ours use."""
    shown = [{"Role": each["role"], "Content": each["content"]} for each in messages]
    system = "\n\n".join(each["content"] for each in messages if each["role"] == "system")
    values = {"Messages": shown, "System": system}
    # Texts and what stands in braces take turns; braces inside a string close nothing.
    parts = iter(re.split(r'\{\{((?:"(?:\\.|[^"\\])*"|[^"])*?)\}\}', template, flags=re.S))
    block, end = _block(parts)
    assert not end, "an end without a beginning"
    return block({"": values, "$": values})


def _block(parts: Iterator[str]) -> tuple[Show, str]:
    """What a block shows, up to its `else` or `end`, and that action; "" is the end of the template."""
    shows: list[Show] = []
    for text in parts:
        assert "{{" not in text, "braces that are not closed"
        shows.append(lambda values, text=text: text)
        action = next(parts, "").strip()
        if not action or action == "end" or action.startswith("else"):
            return lambda values: "".join(show(values) for show in shows), action
        if action.startswith("range"):
            shows.append(_loop(_block(parts)[0]))
        elif action.startswith("if"):
            branches = []
            while action != "end":
                condition = action.removeprefix("else").strip().removeprefix("if").strip()
                block, action = _block(parts)
                branches.append((condition, block))
            shows.append(_choice(branches))
        else:
            shows.append(lambda values, action=action: str(_value(action, values)))
    raise AssertionError("a block without an end")


def _loop(block: Show) -> Show:
    def show(values: Mapping[str, Any]) -> str:
        turns = enumerate(values[""]["Messages"])
        return "".join(block({**values, "": turn, "$i": i}) for i, turn in turns)

    return show


def _choice(branches: list[tuple[str, Show]]) -> Show:
    def show(values: Mapping[str, Any]) -> str:
        met = (block for condition, block in branches if not condition or _value(condition, values))
        return next(met, lambda values: "")(values)

    return show


def _value(expression: str, values: Mapping[str, Any]) -> Any:
    words = re.findall(r'"(?:\\.|[^"\\])*"|\([^()]*\)|\S+', expression)
    if len(words) > 1:
        name, *arguments = words
        found = [_value(word, values) for word in arguments]
        return {"eq": found[0] == found[-1], "and": all(found), "not": not found[0]}[name]
    (word,) = words
    if word.startswith('"'):
        return word[1:-1].encode("ascii").decode("unicode_escape")
    if word.startswith("("):
        return _value(word[1:-1], values)
    if word.isdigit():
        return int(word)
    place, _, name = word.partition(".")
    return values[place][name] if name else values[place]
