"""Renders a conversation as text and tokens, with the tokenizer's chat template or as plain
text.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from runners.config.sections import DataConfig
from runners.data.messages import Message
from runners.errors import UserError, error_line, show, user_errors
from runners.images.image_files import ImageFile
from runners.images.processor import ImageProcessor
from runners.tokenization.text import encode

NO_KWARGS: Mapping[str, Any] = {}
_EMPTY_PAIR = re.compile(r"<(\w+)>\s*</\1>\s*")
_CLOSED = re.compile(r"</\w+>\s*")
_DATE_CODES = "aAbBcCdDeFgGhHIjklmMpPrRsSTuUVwWxXyYzZ"
_SPEAKERS = {"system": "System", "user": "User", "assistant": "Assistant"}


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    nudge: str = "",
    *,
    tools: Sequence[dict[str, Any]] = (),
    template_kwargs: Mapping[str, Any] = NO_KWARGS,
    images: Sequence[ImageFile] = (),
    processor: ImageProcessor | None = None,
    raw: bool = False,
) -> tuple[str, tuple[int, ...]]:
    """Returns a prompt's text and tokens, up to the start of the assistant's turn and the nudge.

    With `raw`, the last message's text is the whole prompt, and the model continues it. `tools` are
    schemas. If the template does not show the tools, they are added to the system prompt.
    `template_kwargs` are additional arguments for the template, and the argument `chat_template`
    replaces the template. `images` are placed before the last user message's text. A `processor`
    has its own template and determines the number of tokens per image.

    If a template refuses or drops the system role, the system prompt becomes the start of the first
    user message. Without a template, the format is ``System: …``, ``User: …``, ``Assistant: ``
    separated by blank lines. BOS comes first if the tokenizer adds it; EOS is never added. Raises
    UserError if the template fails or renders nothing, and the errors of
    `runners.tokenization.text.encode`.
    """
    if raw:
        text = f"{messages[-1]['content']}{nudge}"
        return text, encode_raw(tokenizer, text)
    if images:
        messages = _with_image_parts(messages, len(images))
    if processor is not None and processor.template:
        template_kwargs = {**template_kwargs, "chat_template": processor.template}
    if not has_template(tokenizer) and "chat_template" not in template_kwargs:
        turns = _with_tools(messages, tools) if tools else messages
        said = [f"{_SPEAKERS[turn['role']]}: {turn['content']}" for turn in turns]
        text = "\n\n".join([*said, f"{_SPEAKERS['assistant']}: "]) + nudge
        tokens = encode_raw(tokenizer, text)
        return text, tokens if processor is None else processor.expanded(tokens, images)
    text = _conversation(tokenizer, messages, tools, template_kwargs)
    if tools and not all(tool["function"]["name"] in text for tool in tools):
        text = _conversation(tokenizer, _with_tools(messages, tools), (), template_kwargs)
    if not text.strip():
        name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        raise UserError(f"{name}: the chat template renders an empty text instead of the prompt")
    tokens = encode(tokenizer, text + nudge, add_special_tokens=False)
    if not tokens:
        raise UserError("the tokenizer returns no tokens for the prompt")
    return text + nudge, tokens if processor is None else processor.expanded(tokens, images)


def _with_image_parts(
    messages: Sequence[Mapping[str, Any]], images: int
) -> tuple[dict[str, Any], ...]:
    """Returns the messages in the format for chat templates, with this number of images before the
    last user message's text (or the last message's text if no user message exists).
    """
    users = (n for n, message in enumerate(messages) if message["role"] == "user")
    last = max(users, default=len(messages) - 1)
    parts = [{"type": "image"}] * images + [{"type": "text", "text": messages[last]["content"]}]
    return tuple(
        {**message, "content": parts} if n == last else dict(message)
        for n, message in enumerate(messages)
    )


def use_template(tokenizer: Any, file: str) -> str:
    """Replaces a tokenizer's chat template with the template in a file, and returns the template's
    text. Without a file, the template does not change.

    Raises UserError for a file that cannot be read.
    """
    if not file:
        return ""
    with user_errors(
        f"data.chat_template {file}: cannot be read as text", OSError, UnicodeDecodeError
    ):
        text = Path(file).read_text(encoding="utf-8")
    tokenizer.chat_template = text
    tokenizer.has_chat_template = True
    tokenizer._chat_template = None
    return text


def template_notices(tokenizer: Any, data: DataConfig, stop: Sequence[str] = ()) -> list[str]:
    """Returns messages about a missing chat template, and about a template whose end-of-turn text
    does not end completions.

    `stop` contains additional strings that end a completion.
    """
    if data.prompt_form == "raw":
        return []
    if not has_template(tokenizer):
        return [
            "the tokenizer has no chat template: prompts are plain text (System: …, User: …, "
            "Assistant: …); a chat model has one in chat_template.jinja or "
            "tokenizer_config.json; "
            "data.chat_template sets a different one, and "
            'data.prompt_form = "raw" uses prompts unchanged'
        ]
    end = end_of_turn(tokenizer, data.chat_template_kwargs)
    end_ids = {*getattr(tokenizer, "eos_token_ids", ())}
    if (
        not end
        or any(text in end for text in stop)
        or end_ids.intersection(encode(tokenizer, end, add_special_tokens=False))
    ):
        return []
    return [
        f"the chat template ends a turn with {show(end)}, but none of its tokens ends a "
        f"completion, so completions may run to the length limit; set rollout.stop = "
        f"[{show(end)}], or "
        "eos_token_id in "
        "generation_config.json"
    ]


def end_of_turn(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> str:
    """Returns the text that the template writes after an assistant's message, or an empty string if
    the text is unknown.
    """
    words = "the words"
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": words}]
    try:
        text = apply_template(
            tokenizer, turns, template_kwargs=template_kwargs, add_generation_prompt=False
        )
    except Exception:  # a template may raise anything; rendering the prompts reports it
        return ""
    return text.rpartition(words)[2].strip() if words in text else ""


def opening(tokenizer: Any, template_kwargs: Mapping[str, Any], *, raw: bool = False) -> str:
    """Returns the text that the template writes after a reply's header, such as ``<think>``. This
    text starts the reply.

    The header is the text that a new reply and an earlier assistant turn both start with. A pair of
    tags that the template closes itself is not part of the reply. The result is also empty if the
    header is unknown.
    """
    if raw or not has_template(tokenizer):
        return ""
    question = {"role": "user", "content": "a question"}
    turns = [question, {"role": "assistant", "content": "words"}, question]

    def text(messages: Sequence[Mapping[str, Any]], *, head: bool) -> str:
        return apply_template(
            tokenizer, messages, template_kwargs=template_kwargs, add_generation_prompt=head
        )

    try:
        before = text([question], head=False)
        start = text([question], head=True)
        earlier = _EMPTY_PAIR.sub("", text(turns, head=False))
    except Exception:  # a template may raise anything; rendering the prompts reports it
        return ""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(start, earlier, strict=False))
    header = "".join(letter for letter, _ in same)
    if header.rfind("<") > header.rfind(
        ">"
    ):  # both tags start with the same characters, such as <think> and </think>
        header = header[: header.rfind("<")]
    if len(header) <= len(before) or not header.startswith(before):
        return ""
    written = _CLOSED.split(start[len(header) :])[-1]
    return written if written.strip() else ""


def writes_date(template: Any) -> bool:
    """Returns whether a chat template contains the date on which it is rendered."""
    return "strftime_now" in str(template)


def _dated(template: str, start: datetime) -> str:
    """Returns the template with a fixed date. A macro sets the date, because transformers passes no
    function to a template.
    """
    codes = [f"%{flag}{letter}" for flag, letter in itertools.product(("", "-"), _DATE_CODES)]
    filters = "".join(f"|replace('{code}', {json.dumps(start.strftime(code))})" for code in codes)
    return f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}{template}"


def has_template(tokenizer: Any) -> bool:
    # Templates of mlx-lm's wrapper may be functions; only this attribute indicates them.
    return bool(getattr(tokenizer, "has_chat_template", getattr(tokenizer, "chat_template", None)))


def apply_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[dict[str, Any]] = (),
    template_kwargs: Mapping[str, Any] = NO_KWARGS,
    add_generation_prompt: bool = True,
) -> str:
    """Renders a conversation with the tokenizer's chat template; the template's errors are not
    caught.

    A template that contains a date uses the date of `tokenizer.start`, the start of the run, if it
    is set.
    """
    options = {**template_kwargs, **({"tools": list(tools)} if tools else {})}
    start = getattr(tokenizer, "start", None)
    if start is not None and writes_date(options.get("chat_template") or tokenizer.chat_template):
        template = tokenizer.get_chat_template(options.get("chat_template"), tools or None)
        options["chat_template"] = _dated(template, start)
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
        # A template may raise anything, usually jinja2's TemplateError.
        with user_errors("the tokenizer's chat template fails", Exception, why=error_line):
            return apply_template(
                tokenizer, conversation, tools=tools, template_kwargs=template_kwargs
            )

    system, *rest = messages
    if system["role"] != "system":
        return apply(messages)
    try:
        text = apply(messages)
        if system["content"].strip() in text:
            return text
        raise UserError("the tokenizer's chat template omits the system message")
    except UserError:
        if not rest or rest[0]["role"] != "user" or any(each["role"] == "system" for each in rest):
            raise
    return apply(
        [{**rest[0], "content": f"{system['content']}\n\n{rest[0]['content']}"}, *rest[1:]]
    )


def _with_tools(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """Returns the messages with a system message that describes the tools and the format of a
    call.
    """
    lines = [json.dumps(schema["function"], ensure_ascii=False) for schema in tools]
    form = '<tool_call>{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}</tool_call>'
    told = ["You can call these tools:", *lines, f"To call one, write {form} and end your turn."]
    described = "\n".join(told)
    rest = list(messages)
    if rest and rest[0]["role"] == "system":
        described = f"{rest.pop(0)['content']}\n\n{described}"
    return [{"role": "system", "content": described}, *rest]


def encode_raw(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Tokenizes a text that no template produced. BOS comes first if the tokenizer adds it; EOS is
    never added.
    """
    tokens = encode(tokenizer, text, add_special_tokens=False)
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None or tokens[:1] == (bos,) or encode(tokenizer, text)[:1] != (bos,):
        return tokens
    return (bos, *tokens)
