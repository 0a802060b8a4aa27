"""Prompts: chat templates, the plain fallback, and the examples of rows."""

import json
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from runners.config.sections import DataConfig
from runners.data.datasets import load_rows
from runners.data.messages import conversation, prompt_fault
from runners.data.prompts import build_examples, columns_of, reward_columns
from runners.data.rendering import render
from runners.data.row_files import Row, Rows
from runners.errors import UserError

SPECIAL = {"<s>": 256, "</s>": 257, "<|user|>": 258, "<|end|>": 259, "<|bot|>": 260}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|bot|>{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
)
DROPS_SYSTEM = TEMPLATE.replace("in messages", "in messages if m['role'] != 'system'")
MESSAGES = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"})


def tokenizer(template: str | None, adds: str = "") -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte; `adds` is its template for special tokens, such as "<s> $A"."""
    alphabet = {character: k for k, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab={**alphabet, **SPECIAL}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIAL))
    if adds:
        inner.post_processor = processors.TemplateProcessing(
            single=adds, special_tokens=list(SPECIAL.items())[:2]
        )
    outer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    outer.chat_template = template
    return outer


@pytest.mark.parametrize("wrap", [lambda plain: plain, TokenizerWrapper])
@pytest.mark.parametrize("adds", ["", "<s> $A", "<s> $A </s>"])
def test_chat_template(wrap: Any, adds: str) -> None:
    """A prompt is the template's text and the nudge, with exactly one BOS (the template's)."""
    text, tokens = render(wrap(tokenizer(TEMPLATE, adds)), MESSAGES, "<reasoning>")
    assert text == "<s><|user|>system: Be brief.<|end|><|user|>user: 1+1?<|end|><|bot|><reasoning>"
    assert tokens[:2] == (256, 258) and tokens.count(256) == 1 and 257 not in tokens
    assert tokenizer(TEMPLATE).decode(tokens) == text


# As in Llama 3.2, SmolLM3, gpt-oss, and with a format that the template makes.
DATES = (
    "{% if not date is defined %}{% if strftime_now is defined %}{% set date = strftime_now('%d %b %Y') %}"
    "{% endif %}{% endif %}{{ date }}",
    "{%- set today = strftime_now('%d %B %Y') -%}\n  {{ today }}\n",
    "{% macro head() %}{{ strftime_now('%Y-%m-%d %H:%M:%S') }}{% endmacro %}{{ head() }}",
    "{% set form = '%A' + ', %-d' %}{{ strftime_now(form) }} {{ strftime_now('%c') }}",
)


@pytest.mark.parametrize("dated", DATES)
@pytest.mark.parametrize("named", [False, True])
def test_a_template_writes_the_date_of_the_runs_start(
    dated: str, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text equals what transformers wrote at that time, also with several named templates."""
    start = datetime(2026, 3, 7, 4, 5, 6)
    both: Any = {"default": dated + TEMPLATE, "tool_use": "tools" + dated + TEMPLATE}
    plain = tokenizer(both if named else dated + TEMPLATE)
    tools = [{"type": "function", "function": {"name": "add"}}]
    later = [render(plain, MESSAGES), render(plain, MESSAGES, tools=tools)]
    with monkeypatch.context() as patch:
        patch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: start))
        then = [render(plain, MESSAGES), render(plain, MESSAGES, tools=tools)]
    plain.start = start
    assert [render(plain, MESSAGES), render(plain, MESSAGES, tools=tools)] == then != later
    assert render(plain, MESSAGES, template_kwargs={"chat_template": dated + TEMPLATE}) == then[0]


@pytest.mark.parametrize("template", [NO_SYSTEM, DROPS_SYSTEM])
def test_templates_without_a_system_role(template: str) -> None:
    """If the template refuses or drops the system role, its text starts the user's message."""
    text, _ = render(tokenizer(template), MESSAGES)
    assert text == "<s><|user|>user: Be brief.\n\n1+1?<|end|><|bot|>"
    assert render(tokenizer(template), MESSAGES[1:])[0] == "<s><|user|>user: 1+1?<|end|><|bot|>"
    for others in ((), ({"role": "assistant", "content": "Hi"}, MESSAGES[1]), (MESSAGES[1], MESSAGES[0])):
        with pytest.raises(UserError, match=r"no system role|omits the system message"):
            render(tokenizer(template), (MESSAGES[0], *others))


@pytest.mark.parametrize("wrap", [lambda plain: plain, TokenizerWrapper])
@pytest.mark.parametrize(
    ("adds", "first"), [("", 260), ("<s> $A", 256), ("<s> $A </s>", 256), ("$A </s>", 260)]
)
def test_plain_fallback(wrap: Any, adds: str, first: int) -> None:
    """Without a template, turns have names, BOS depends on the tokenizer, and EOS is never added."""
    plain = tokenizer(None, adds)
    text, tokens = render(wrap(plain), MESSAGES, "<reasoning>")
    assert text == "System: Be brief.\n\nUser: 1+1?\n\nAssistant: <reasoning>"
    assert (tokens[0] == 256) == (first == 256) and 257 not in tokens
    assert plain.decode(tokens[first == 256 :]) == text


def test_examples() -> None:
    """A row becomes messages, a prompt, a reference answer and its columns."""
    first_row = {"q": "1+1?", "solution": "So.\n#### 2", "level": 3, "prompts": "clash"}
    rows = Rows([Row(first_row, "row 1"), Row({"q": "2+2?", "solution": 4, "answer": "raw"}, "row 2")])
    config = DataConfig(question="q", answer="solution", system_prompt="Be brief.", nudge="<reasoning>")
    examples, too_long = build_examples(rows, config, tokenizer(TEMPLATE))
    assert too_long == 0
    assert [example.answer for example in examples] == ["2", "4"]
    first = examples[0]
    assert first.messages == (MESSAGES[0], {"role": "user", "content": "1+1?"})
    assert (first.text, first.tokens) == render(tokenizer(TEMPLATE), first.messages, "<reasoning>")
    values = {"q": "1+1?", "solution": "So.\n#### 2", "level": 3, "column_prompts": "clash", "answer": "2"}
    assert first.columns == {**values, "column_answer": None}
    assert examples[1].columns["column_answer"] == "raw"
    assert examples[1].columns["level"] is None
    assert set(reward_columns(rows, "solution")) == set(first.columns)
    columns = columns_of(examples, 2)
    assert columns["q"] == ["1+1?", "1+1?", "2+2?", "2+2?"] and columns["level"] == [3, 3, None, None]


def test_long_prompts_are_skipped_and_counted() -> None:
    """Prompts longer than the limit are skipped; if none is left, the shortest length is reported."""
    rows = Rows(Row({"question": "x" * n, "answer": "1"}, f"row {n}") for n in (5, 6, 7))
    fit = len(render(tokenizer(TEMPLATE), ({"role": "user", "content": "x" * 6},), "<r>")[1])
    config = DataConfig(system_prompt="", nudge="<r>", max_prompt_length=fit)
    examples, too_long = build_examples(rows, config, tokenizer(TEMPLATE))
    assert [len(example.tokens) for example in examples] == [fit - 1, fit]
    assert too_long == 1
    short = DataConfig(system_prompt="", nudge="<r>", max_prompt_length=fit - 2)
    with pytest.raises(UserError, match=f"is {fit - 2}, but the shortest of 3 prompts has {fit - 1}"):
        build_examples(rows, short, tokenizer(TEMPLATE))
    assert build_examples(Rows(), short, tokenizer(TEMPLATE)) == ([], 0)


ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|user|>{{ m['content'] }}{% endfor %}"
)


def test_a_row_refused_by_the_template_is_reported(tmp_path: Path) -> None:
    """The row is reported with its place, or skipped and counted; other rows keep their numbers."""
    rows: list[Any] = [{"prompt": f"{n}+1?", "answer": n + 1} for n in range(9)]
    rows[3]["prompt"] = [{"role": "user", "content": "3+1?"}, {"role": "user", "content": "Be brief."}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(source=str(path), prompt="prompt", system_prompt="")
    fault = f"{path}, line 4: the tokenizer's chat template fails: TemplateError: roles must alternate"
    with pytest.raises(UserError, match="roles must alternate") as caught:
        build_examples(load_rows(config)[0], config, tokenizer(ALTERNATING))
    assert str(caught.value) == f'{fault} (data.on_bad_row = "skip" skips such rows)'
    config = attrs.evolve(config, on_bad_row="skip")
    found, _ = load_rows(config)
    examples, too_long = build_examples(found, config, tokenizer(ALTERNATING))
    assert [example.number for example in examples] == [0, 1, 2, 4, 5, 6, 7] and too_long == 0
    assert found.notices("train", 0, 9) == [f"train data: 1 invalid rows skipped (the first: {fault})"]
    refuses = tokenizer("{{ raise_exception('never') }}")
    with pytest.raises(UserError, match=r"all 8 rows are invalid; for example, .*never"):
        build_examples(found, config, refuses)


def test_messages_from_arrow_are_cleaned() -> None:
    """Keys without a value are removed, and text parts become one text."""
    calls = [{"id": None, "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}]
    keys = {"tool_calls": None, "name": None}
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "+1?"}], **keys},
        {"role": "assistant", "content": None, "tool_calls": calls, "name": None},
        {"role": "tool", "content": "2", "name": "add", "tool_calls": None},
    ]
    called = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert prompt_fault(talk) == ""
    assert conversation(talk) == (
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "content": "2", "name": "add"},
    )
    talk[0]["content"] = [{"type": "image"}]
    assert prompt_fault(talk) == "message 0: expected text as its content, found list"
