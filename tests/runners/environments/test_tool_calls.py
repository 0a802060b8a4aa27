"""Reading tool calls out of a turn's text."""

import json

import pytest
from mlx_lm.tool_parsers import json_tools, mistral, pythonic

from runners.environments.tool_calls import MAX_CALLS, CallReader


def reader(parser=None):
    """The plain reader, or one with a parser of mlx-lm."""
    if parser is None:
        return CallReader([])
    return CallReader([], parser.parse_tool_call, parser.tool_call_start, parser.tool_call_end)


ADD = ("add", {"a": 1, "b": 2})
AS_TEXT = json.dumps(json.dumps(ADD[1]))


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (None, 'Well. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'),
        (None, '{"name": "add", "parameters": {"a": 1, "b": 2}}'),
        (None, f'<tool_call>{{"function": {{"name": "add", "arguments": {AS_TEXT}}}}}</tool_call>'),
        (None, '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}'),
        (json_tools, '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'),
        (pythonic, "<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|>"),
        (mistral, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]'),
        (mistral, '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}'),
    ],
)
def test_a_call_in_each_form(parser, text):
    """The call has its name and arguments; the text around it is the content."""
    content, calls = reader(parser).read(text)
    assert [(call.name, call.arguments, call.fault) for call in calls] == [(*ADD, "")]
    assert content == ("Well." if text.startswith("Well") else "")


def test_several_calls_come_in_order():
    """They belong to one turn, with text between them."""
    text = "".join(f'{n}<tool_call>{{"name": "f{n}"}}</tool_call>' for n in range(3)) + "end"
    content, calls = reader().read(text)
    assert [call.name for call in calls] == ["f0", "f1", "f2"] and content == "012end"


@pytest.mark.parametrize(
    "body",
    [
        *("", "{", "nonsense", "[1]", "null", '{"arguments": {}}', '{"name": 3}', '{"name": ""}'),
        *('{"name": "f", "arguments": 3}', '{"name": "f", "arguments": "x"}', "[" * 5000),
        json.dumps({"name": "f", "arguments": "[" * 100_000}),
    ],
)
@pytest.mark.parametrize("parser", [None, json_tools], ids=["plain", "json_tools"])
def test_a_call_that_cannot_be_read_says_so(parser, body):
    """It is one call with an error for the model."""
    _, (call,) = reader(parser).read(f"<tool_call>{body}</tool_call>")
    assert call.fault


@pytest.mark.parametrize("text", ["", "The answer is 3.", '{"a": 1}', "{broken", "[1, 2]"])
def test_a_text_without_a_call_has_none(text):
    """Some of the texts look like JSON."""
    assert reader().read(text) == (text, [])


def test_no_more_calls_than_a_bound():
    """A policy could write calls up to its length limit."""
    text = '<tool_call>{"name": "f"}</tool_call>' * (MAX_CALLS + 5)
    assert len(reader().read(text)[1]) == MAX_CALLS


def test_the_bound_counts_calls():
    """Blocks after the last call that counts stay in the text, and empty blocks do not count."""
    one = '<tool_call>{"name": "f"}</tool_call>'
    many = "[" + ", ".join(['{"name": "f"}'] * MAX_CALLS) + "]"
    text, calls = reader().read(f"<tool_call>{many}</tool_call> rest {one}")
    assert (text, len(calls)) == (f"rest {one}", MAX_CALLS)
    text, calls = reader().read("<tool_call>[]</tool_call>" * MAX_CALLS + one)
    assert (text, len(calls)) == ("", 1)


@pytest.mark.parametrize("value", ["{1, 2}", "b'x'", "1j"])
def test_what_json_cannot_hold_is_no_argument(value):
    """A parser reads these Python literals, but a log cannot store them."""
    _, (call,) = reader(pythonic).read(f"<|tool_call_start|>[add(a={value})]<|tool_call_end|>")
    assert (call.name, call.arguments, call.fault) == ("add", {}, "the arguments are not a JSON object")
