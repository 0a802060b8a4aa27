"""From a row to its prompt, for rollouts and evaluation alike: messages, text and tokens."""

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

import attrs

from runners.config.sections import REWARD_ARGUMENTS, DataConfig
from runners.data.row_images import row_images, with_image_parts
from runners.data.value_text import value_text, without_exponent
from runners.errors import UserError, error_line, show
from runners.images.image_files import ImageFile
from runners.images.processor import ImageProcessor
from runners.tokenization.chat_format import described_tools, merge_system, plain_text
from runners.tokenization.text import encode

Message = dict[str, Any]  # role and content; tool_calls of an assistant, name of a tool

NO_KWARGS: Mapping[str, Any] = {}
GOLD_MARK = "####"
ROLES = ("system", "user", "assistant", "tool")
_LONGEST_TOKEN = 256  # characters: some vocabularies have such long tokens of blanks


@attrs.frozen
class Example:
    """One problem, ready for a rollout."""

    messages: tuple[Message, ...]  # the prompt that rewards get, without the nudge
    text: str  # the rendered prompt, the nudge at its end
    tokens: tuple[int, ...]  # of the text; an image has one for each of its cells
    answer: str  # the gold answer; empty if the data has none
    columns: dict[str, Any]  # the row's columns for rewards; `answer` is the gold one
    images: tuple[ImageFile, ...] = ()  # in the order of their places in the prompt
    number: int = 0  # of the row, among the split's usable ones


def build_examples(
    rows: Sequence[Mapping[str, Any]],
    config: DataConfig,
    tokenizer: Any,
    tools: Sequence[dict[str, Any]] = (),
    processor: ImageProcessor | None = None,
) -> tuple[list[Example], int]:
    """The examples of usable rows in order, and how many are left out as longer than max_prompt_length.

    An empty system prompt means no system message. `processor` is needed if `data.image` names a column.
    Every example has all columns of `reward_columns`; they are None if its row lacks them. With `on_bad_row`
    "skip" a row that the chat template or the tokenizer refuses is left out, and noted in `Rows.refused`.

    Raises UserError, with the row's place, if the chat template or the tokenizer refuses a row or a row has
    no answer; and if no row is left.
    """
    if config.image and processor is None:
        raise UserError("data.image names a column, but this command shows no images to the model")
    columns = reward_columns(rows, with_answer=bool(config.answer))
    examples: list[Example] = []
    lengths: list[int] = []
    refused: dict[str, str] = {}
    for number, row in enumerate(rows):
        place = getattr(row, "place", "") or f"row {number + 1}"
        try:
            example = _example(row, config, tokenizer, tools, processor, columns)
        except UserError as error:
            refused[place] = f"{place}: {error}"
            if config.on_bad_row == "raise":
                raise UserError(f'{refused[place]} (data.on_bad_row = "skip" would leave it out)') from error
            continue
        if example is not None:
            lengths.append(len(example.tokens))
            if lengths[-1] <= config.max_prompt_length:
                examples.append(attrs.evolve(example, number=number))
    getattr(rows, "refused", {}).update(refused)
    if examples or not rows:
        return examples, len(rows) - len(refused) - len(examples)
    if len(refused) == len(rows):
        raise UserError(f"all {len(rows)} rows are refused, the first: {next(iter(refused.values()))}")
    if lengths:
        raise UserError(
            f"data.max_prompt_length is {config.max_prompt_length}, but the shortest of {len(lengths)} "
            f"prompts has {min(lengths)} tokens"
        )
    raise UserError(
        f"data.max_prompt_length is {config.max_prompt_length}, but each of {len(rows) - len(refused)} "
        f"prompts has over {_LONGEST_TOKEN * config.max_prompt_length:,} characters"
    )


def _example(
    row: Mapping[str, Any],
    config: DataConfig,
    tokenizer: Any,
    tools: Sequence[dict[str, Any]],
    processor: ImageProcessor | None,
    columns: Mapping[str, str],
) -> Example | None:
    """A row's example; None if its prompt is so long that counting its tokens would take long."""
    gold = gold_answer(row[config.answer]) if config.answer else ""
    if gold is None:
        raise UserError(f"no answer in {config.answer}: {show(row[config.answer])}")
    messages = prompt_messages(row, config)
    characters = sum(len(str(message.get("content") or "")) for message in messages[-1:])
    if characters > _LONGEST_TOKEN * config.max_prompt_length:
        return None
    images = row_images(row, config)
    text, tokens = render(
        tokenizer,
        messages,
        config.nudge,
        tools=tools,
        template_kwargs=config.chat_template_kwargs,
        images=images,
        processor=processor,
    )
    values = {column: row.get(field) for column, field in columns.items()}
    answers = {"answer": gold} if config.answer else {}
    return Example(messages, text, tokens, gold, {**values, **answers}, images)


def prompt_messages(row: Mapping[str, Any], config: DataConfig) -> tuple[Message, ...]:
    """A row's prompt: its messages if `data.prompt` names their column, else its question.

    The system prompt is put in front of messages without one.
    """
    if config.prompt:
        found = row[config.prompt]
        messages = (
            ({"role": "user", "content": found},) if isinstance(found, str) else tuple(map(_message, found))
        )
    else:
        messages = ({"role": "user", "content": row[config.question]},)
    if not config.system_prompt.strip() or messages[0]["role"] == "system":
        return messages
    return ({"role": "system", "content": config.system_prompt}, *messages)


def _message(found: Mapping[str, Any]) -> Message:
    """A message with one text as its content, and without the keys that Arrow adds where only others have
    them: a template may take a `tool_calls` of None for calls."""
    message = {key: _without_none(value) for key, value in found.items() if value is not None}
    content = found.get("content")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    return {**message, "content": content}


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value


def prompt_fault(value: Any) -> str:
    """The fault of a prompt that should be a text or a list of messages; empty: none."""
    if isinstance(value, str):
        return "" if value.strip() else "is blank"
    if not isinstance(value, list | tuple) or not value:
        return f"expected a text or a list of messages, found {type(value).__name__}"
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, Mapping) else message
            return f"message {number}: expected a role of {', '.join(ROLES)}, found {show(role)}"
        content = message.get("content")
        if isinstance(content, list) and content and all(map(_is_text_part, content)):
            continue
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            return f"message {number}: expected text as its content, found {type(content).__name__}"
    if value[-1]["role"] == "assistant":
        return "ends with the assistant's turn, which the model has to write"
    return ""


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def reward_columns(rows: Iterable[Mapping[str, Any]], *, with_answer: bool = True) -> dict[str, str]:
    """The columns that rewards can name, each with its field in the rows.

    They are the fields of all rows together and, if the data has one, the gold `answer`. A field with the
    name of an argument that every reward gets (completions, prompts, completion_ids), or `self`, becomes
    ``column_completions`` and so on. A field that is a name in Python is spelled as Python spells it.
    """
    fields = dict.fromkeys(field for row in rows for field in row)
    columns: dict[str, str] = {}
    for field in fields:
        name = unicodedata.normalize("NFKC", field) if field.isidentifier() else field
        if name in (*REWARD_ARGUMENTS, "self"):
            name = f"column_{name}"
        while name in columns or (name != field and name in fields):
            name = f"column_{name}"
        columns[name] = field
    return {**columns, "answer": "answer"} if with_answer else columns


def columns_of(examples: Sequence[Example], num_generations: int = 1) -> dict[str, list[Any]]:
    """The examples' columns as lists for the scorer, each entry repeated for its G completions in a row."""
    return {
        name: [example.columns[name] for example in examples for _ in range(num_generations)]
        for name in (examples[0].columns if examples else ())
    }


def gold_answer(value: object) -> str | None:
    """The answer in a row's field: the text after its last ``####``, or all of it; stripped. None: no answer.

    Texts and numbers can be answers; NaN, true and false, lists and objects cannot. A number, also one that
    is a text with an exponent, is written in plain decimals.
    """
    if isinstance(value, bool) or not isinstance(value, str | Real | Decimal):
        return None
    try:
        text = value_text(value)
    except ValueError:  # an integer of thousands of digits
        return None
    if not isinstance(value, str) and not text.lstrip("-")[:1].isdigit():  # nan, inf
        return None
    return without_exponent(text.rpartition(GOLD_MARK)[2].strip()) or None


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    nudge: str = "",
    *,
    tools: Sequence[dict[str, Any]] = (),
    template_kwargs: Mapping[str, Any] = NO_KWARGS,
    images: Sequence[ImageFile] = (),
    processor: ImageProcessor | None = None,
) -> tuple[str, tuple[int, ...]]:
    """A prompt's text, up to the assistant's turn and the nudge, and its tokens.

    `tools` are schemas, which the template gets as `tools`. If the template does not show them, or if there
    is no template, they are described in the system prompt. `template_kwargs` are further arguments of the
    template, such as `enable_thinking`; `chat_template` replaces the tokenizer's template. `images` come
    before the last user message's text; the `processor` of a model that sees has a template of its own, and
    says how many tokens each image takes.

    With a chat template the text and its special tokens come from the template. If a template refuses or
    drops the system role, the system prompt is put in front of the first user message. Without a template the
    form is ``System: …``, ``User: …``, ``Assistant: `` with blank lines between, and the tokenizer's BOS in
    front if the tokenizer adds it by default (an EOS is never added).

    `tokenizer` is a transformers tokenizer, mlx-lm's wrapper of one, or anything with `encode(text,
    add_special_tokens=…)`. Raises UserError if the template fails on the messages or renders nothing, and as
    `runners.tokenization.text.encode` does.
    """
    if images:
        messages = with_image_parts(messages, len(images))
    if processor is not None and processor.template:
        template_kwargs = {**template_kwargs, "chat_template": processor.template}
    if not has_template(tokenizer) and "chat_template" not in template_kwargs:
        text = plain_text(_with_tools(messages, tools) if tools else messages) + nudge
        return text, _expanded(_with_bos(tokenizer, text), images, processor)
    text = _conversation(tokenizer, messages, tools, template_kwargs)
    if tools and not all(tool["function"]["name"] in text for tool in tools):
        text = _conversation(tokenizer, _with_tools(messages, tools), (), template_kwargs)
    if not text.strip():
        name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        raise UserError(f"{name}: the chat template renders to nothing: the prompt is not in it")
    tokens = encode(tokenizer, text + nudge, add_special_tokens=False)
    if not tokens:
        raise UserError("the tokenizer makes no tokens of the prompt")
    return text + nudge, _expanded(tokens, images, processor)


def _expanded(
    tokens: tuple[int, ...], images: Sequence[ImageFile], processor: ImageProcessor | None
) -> tuple[int, ...]:
    return tokens if processor is None else processor.expanded(tokens, images)


def template_notices(tokenizer: Any) -> list[str]:
    """A line if a tokenizer has no chat template, which an instruction-tuned model should have."""
    # nanochat's tokenizers render by a function; without their turn marks it also writes plain text.
    if has_template(tokenizer) and getattr(tokenizer, "has_turn_marks", True):
        return []
    return [
        "the tokenizer has no chat template: prompts are plain text (System: …, User: …, Assistant: …); a "
        "model that was tuned for chats has one in chat_template.jinja or tokenizer_config.json"
    ]


def has_template(tokenizer: Any) -> bool:
    # mlx-lm's wrapper also has templates that are functions; only this attribute shows it.
    wrapper_says = getattr(tokenizer, "has_chat_template", None)
    return (
        getattr(tokenizer, "chat_template", None) is not None if wrapper_says is None else bool(wrapper_says)
    )


def apply_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[dict[str, Any]] = (),
    template_kwargs: Mapping[str, Any] = NO_KWARGS,
    add_generation_prompt: bool = True,
) -> str:
    """The text of a conversation by the tokenizer's chat template; errors of the template pass through."""
    options = {**template_kwargs, **({"tools": list(tools)} if tools else {})}
    return tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=add_generation_prompt, tokenize=False, **options
    )


def _conversation(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    template_kwargs: Mapping[str, Any],
) -> str:
    def apply(conversation: Sequence[Mapping[str, Any]]) -> str:
        return apply_template(tokenizer, conversation, tools=tools, template_kwargs=template_kwargs)

    system = messages[0]["content"].strip() if messages[0]["role"] == "system" else ""
    try:
        text = apply(messages)
        if system in text:
            return text
    except Exception as error:  # a template may raise anything, most often jinja2's TemplateError
        if not system:
            raise UserError(f"the tokenizer's chat template fails: {error_line(error)}") from error
    try:
        return apply(merge_system(messages))
    except Exception as error:
        raise UserError(f"the tokenizer's chat template fails: {error_line(error)}") from error


def _with_tools(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """The messages with the tools described in the system message."""
    described, rest = described_tools(tools), list(messages)
    if rest and rest[0]["role"] == "system":
        described = f"{rest.pop(0)['content']}\n\n{described}"
    return [{"role": "system", "content": described}, *rest]


def _with_bos(tokenizer: Any, text: str) -> tuple[int, ...]:
    tokens = encode(tokenizer, text, add_special_tokens=False)
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None or tokens[:1] == (bos,) or encode(tokenizer, text)[:1] != (bos,):
        return tokens
    return (bos, *tokens)
