"""From a row to the prompt that rollouts and evaluation share: its messages, their text, and its tokens."""

import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import attrs

from runners.config.sections import REWARD_ARGUMENTS, DataConfig
from runners.errors import UserError, error_line, show
from runners.tokenization.chat_format import merge_system, plain_text
from runners.tokenization.text import encode

Message = dict[str, str]

GOLD_MARK = "####"
_LONGEST_TOKEN = 256  # characters: of blanks, in the vocabularies that have such


@attrs.frozen
class Example:
    """One problem, ready for a rollout."""

    messages: tuple[Message, ...]  # what rewards get as its prompt; without the nudge
    text: str  # the rendered prompt, the nudge at its end
    tokens: tuple[int, ...]  # of the text
    answer: str  # the gold answer
    columns: dict[str, Any]  # the row's columns for rewards; `answer` is the gold one


def build_examples(
    rows: Sequence[Mapping[str, Any]], config: DataConfig, tokenizer: Any
) -> tuple[list[Example], int]:
    """The examples of usable rows in their order, and how many are left out as over max_prompt_length tokens.

    An empty system prompt makes no system message. Every example has the columns of `reward_columns`, None
    where its row has none.

    Raises UserError where the chat template fails, a row has no answer, or every prompt is too long.
    """
    examples: list[Example] = []
    lengths: list[int] = []
    dropped = 0
    columns = reward_columns(rows)
    for row in rows:
        gold = gold_answer(row[config.answer])
        if gold is None:
            raise UserError(f"a row has no answer in {config.answer}: {show(row[config.answer])}")
        system = (
            ({"role": "system", "content": config.system_prompt},) if config.system_prompt.strip() else ()
        )
        messages = (*system, {"role": "user", "content": row[config.question]})
        if len(row[config.question]) > _LONGEST_TOKEN * config.max_prompt_length:
            dropped += 1  # to count its tokens would take long
            continue
        text, tokens = render(tokenizer, messages, config.nudge)
        lengths.append(len(tokens))
        if len(tokens) <= config.max_prompt_length:
            values = {column: row.get(field) for column, field in columns.items()}
            examples.append(Example(messages, text, tokens, gold, {**values, "answer": gold}))
    if dropped and not lengths:
        raise UserError(
            f"data.max_prompt_length is {config.max_prompt_length}, but each of {dropped} prompts has over "
            f"{_LONGEST_TOKEN * config.max_prompt_length:,} characters"
        )
    if lengths and not examples:
        raise UserError(
            f"data.max_prompt_length is {config.max_prompt_length}, but the shortest of {len(lengths)} "
            f"prompts has {min(lengths)} tokens"
        )
    return examples, dropped + len(lengths) - len(examples)


def reward_columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The columns that rewards can name, each with the field of the rows that it comes from.

    They are the fields of all rows together, and `answer`, which is always the gold one. A field with the
    name of something that every reward gets (completions, prompts, completion_ids) becomes
    ``column_completions`` and so on.
    """
    fields = dict.fromkeys(field for row in rows for field in row)
    columns = {(f"column_{field}" if field in REWARD_ARGUMENTS else field): field for field in fields}
    return {**columns, "answer": "answer"}


def columns_of(examples: Sequence[Example], num_generations: int = 1) -> dict[str, list[Any]]:
    """The examples' columns as lists for the scorer, each entry repeated for its G completions in a row."""
    return {
        name: [example.columns[name] for example in examples for _ in range(num_generations)]
        for name in (examples[0].columns if examples else ())
    }


def gold_answer(value: object) -> str | None:
    """The answer in a row's field: what follows its last ``####``, else the whole; stripped. None: no answer.

    Texts and numbers can be answers; NaN, true and false, lists and objects are none.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Decimal) and not value.is_finite():
        return None
    return str(value).rpartition(GOLD_MARK)[2].strip() or None


def render(tokenizer: Any, messages: Sequence[Message], nudge: str = "") -> tuple[str, tuple[int, ...]]:
    """A prompt's text, ready for the assistant's turn and ended by the nudge, and its tokens.

    With a chat template the text is the template's, and so are its special tokens. A template that refuses or
    drops the system role gets the system prompt at the head of the first user message instead. Without a
    template the form is ``System: …``, ``User: …``, ``Assistant: ``, blank lines between, and the tokenizer's
    BOS stands in front if the tokenizer puts it there by default (but no EOS, should it add one).

    `tokenizer` is a transformers tokenizer, mlx-lm's wrapper of one, or anything with `encode(text,
    add_special_tokens=…)`. Raises UserError where the template fails on the messages or makes nothing of
    them, and as `runners.tokenization.text.encode` does.
    """
    if not _has_template(tokenizer):
        text = plain_text(messages) + nudge
        return text, _with_bos(tokenizer, text)
    text = _apply_template(tokenizer, messages)
    if not text.strip():
        name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        raise UserError(f"{name}: the chat template renders to nothing: the prompt is not in it")
    tokens = encode(tokenizer, text + nudge, add_special_tokens=False)
    if not tokens:
        raise UserError("the tokenizer makes no tokens of the prompt")
    return text + nudge, tokens


def template_notices(tokenizer: Any) -> list[str]:
    """A line where a tokenizer has no chat template, as an instruction-tuned model's would have."""
    # nanochat's tokenizers render by a function, which without their marks for turns writes plain text too.
    if _has_template(tokenizer) and getattr(tokenizer, "has_turn_marks", True):
        return []
    return [
        "the tokenizer has no chat template: prompts are plain text (System: …, User: …, Assistant: …); a "
        "model that was tuned for chats has one in chat_template.jinja or tokenizer_config.json"
    ]


def _has_template(tokenizer: Any) -> bool:
    # mlx-lm's wrapper also knows templates that are functions, and says so here only.
    wrapper_says = getattr(tokenizer, "has_chat_template", None)
    return (
        getattr(tokenizer, "chat_template", None) is not None if wrapper_says is None else bool(wrapper_says)
    )


def _apply_template(tokenizer: Any, messages: Sequence[Message]) -> str:
    def apply(conversation: Sequence[Mapping[str, Any]]) -> str:
        return tokenizer.apply_chat_template(list(conversation), add_generation_prompt=True, tokenize=False)

    system = messages[0]["content"].strip() if messages[0]["role"] == "system" else ""
    try:
        text = apply(messages)
        if system in text:
            return text
    except Exception as error:  # a template raises what it likes, most often jinja2's TemplateError
        if not system:
            raise UserError(f"the tokenizer's chat template fails: {error_line(error)}") from error
    try:
        return apply(merge_system(messages))
    except Exception as error:
        raise UserError(f"the tokenizer's chat template fails: {error_line(error)}") from error


def _with_bos(tokenizer: Any, text: str) -> tuple[int, ...]:
    tokens = encode(tokenizer, text, add_special_tokens=False)
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None or tokens[:1] == (bos,) or encode(tokenizer, text)[:1] != (bos,):
        return tokens
    return (bos, *tokens)
