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


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (None, 'Well. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'),
        (None, '{"name": "add", "parameters": {"a": 1, "b": 2}}'),
        (
            None,
            '<tool_call>{"function": {"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}}</tool_call>',
        ),
        (None, '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}'),
        (json_tools, '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'),
        (pythonic, "<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|>"),
        (mistral, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]'),
        (mistral, '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}'),
    ],
)
def test_a_call_in_each_form(parser, text):
    """The name and the arguments, and what stands around the call as content."""
    written = reader(parser).read(text)
    assert [(call.name, call.arguments, call.fault) for call in written.calls] == [(*ADD, "")]
    assert written.content == ("Well." if text.startswith("Well") else "")


def test_several_calls_come_in_order():
    """Of one turn, with text between them."""
    text = "".join(f'{n}<tool_call>{{"name": "f{n}"}}</tool_call>' for n in range(3)) + "end"
    written = reader().read(text)
    assert [call.name for call in written.calls] == ["f0", "f1", "f2"]
    assert written.content == "012end"
    assert [call["function"]["name"] for call in written.message()["tool_calls"]] == ["f0", "f1", "f2"]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "nonsense",
        "[1]",
        "null",
        '{"arguments": {}}',
        '{"name": 3}',
        '{"name": ""}',
        '{"name": "f", "arguments": 3}',
        '{"name": "f", "arguments": "x"}',
        "[" * 5000,
        json.dumps({"name": "f", "arguments": "[" * 100_000}),
    ],
)
@pytest.mark.parametrize("parser", [None, json_tools], ids=["plain", "json_tools"])
def test_a_call_that_cannot_be_read_says_so(parser, body):
    """It is one call with a fault, which the model is told."""
    written = reader(parser).read(f"<tool_call>{body}</tool_call>")
    assert len(written.calls) == 1 and written.calls[0].fault


@pytest.mark.parametrize("text", ["", "The answer is 3.", '{"a": 1}', "{broken", "[1, 2]"])
def test_a_text_without_a_call_has_none(text):
    """Also one that looks like JSON."""
    written = reader().read(text)
    assert written.calls == () and written.content == text


def test_no_more_calls_than_a_bound():
    """A policy can write one after the other to its length limit."""
    text = '<tool_call>{"name": "f"}</tool_call>' * (MAX_CALLS + 5)
    assert len(reader().read(text).calls) == MAX_CALLS


@pytest.mark.parametrize("value", ["{1, 2}", "b'x'", "1j"])
def test_what_json_cannot_hold_is_no_argument(value):
    """Literals of Python that a parser reads, and that no log could take."""
    (call,) = reader(pythonic).read(f"<|tool_call_start|>[add(a={value})]<|tool_call_end|>").calls
    assert (call.name, call.arguments, call.fault) == ("add", {}, "the arguments are no JSON object")
