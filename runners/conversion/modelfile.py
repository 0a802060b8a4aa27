"""Ollama's Modelfile for an exported model: it asks as training asked.

Format: https://github.com/ollama/ollama/blob/main/docs/modelfile.mdx; templates are Go's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from runners.data.rendering import NO_KWARGS, render
from runners.errors import UserError, one_line
from runners.tokenization.prompt_settings import PromptSettings

_WORDS = ("@@system@@", "@@first@@", "@@reply@@", "@@second@@")  # no template changes them


def modelfile(file: str, tokenizer: Any, prompt: PromptSettings | None) -> str:
    """The text, for the GGUF file of that name beside it. `prompt`: how the model was asked; None: unknown.

    Raises UserError for a chat template that hides what it is given.
    """
    nudge = prompt.nudge if prompt else ""
    raw = prompt is not None and prompt.prompt_form == "raw"
    kwargs = prompt.chat_template_kwargs if prompt else NO_KWARGS
    template = f"{{{{ .Prompt }}}}{_literal(nudge)}" if raw else _template(tokenizer, nudge, kwargs)
    lines = [f"FROM ./{file}", f"TEMPLATE {_quoted(template)}"]
    if prompt is None:
        return "\n".join([*lines, ""])
    if prompt.system_prompt.strip() and not raw:
        lines.append(f"SYSTEM {_quoted(prompt.system_prompt)}")
    values: dict[str, Any] = {
        "temperature": prompt.temperature, "top_p": prompt.top_p, "top_k": prompt.top_k,
        "min_p": prompt.min_p, "repeat_penalty": 1.0, "num_predict": prompt.max_new_tokens,
    }  # fmt: skip
    lines += [f"PARAMETER {name} {value}" for name, value in values.items()]
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in prompt.stop]
    return "\n".join([*lines, ""])


def _template(tokenizer: Any, nudge: str, kwargs: Mapping[str, Any]) -> str:
    """The chat template in Go's language: what stands between a conversation's words, by the next role."""
    system, first, reply, second = _WORDS
    talk = [("user", first), ("assistant", reply), ("user", second)]
    begin, answer, again, ready = _between(tokenizer, talk, kwargs)
    told, between, *_ = _between(tokenizer, [("system", system), *talk], kwargs)
    bos = getattr(tokenizer, "bos_token", None)
    if bos and tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]:  # llama.cpp adds it
        begin, told = begin.removeprefix(bos), told.removeprefix(bos)
    branches = (
        ('if eq .Role "system"', f"{_literal(told)}{{{{ .Content }}}}"),
        ('else if eq .Role "assistant"', f"{_literal(answer + nudge)}{{{{ .Content }}}}"),
        ("else if eq $i 0", f"{_literal(begin)}{{{{ .Content }}}}"),
        ("else if and (eq $i 1) $.System", f"{_literal(between)}{{{{ .Content }}}}"),
        ("else", f"{_literal(again)}{{{{ .Content }}}}"),
    )
    turns = "".join(f"{{{{ {condition} }}}}{text}" for condition, text in branches)
    return f"{{{{ range $i, $m := .Messages }}}}{turns}{{{{ end }}}}{{{{ end }}}}{_literal(ready + nudge)}"


def _between(tokenizer: Any, talk: Sequence[tuple[str, str]], kwargs: Mapping[str, Any]) -> list[str]:
    text, _ = render(
        tokenizer, [{"role": role, "content": word} for role, word in talk], template_kwargs=kwargs
    )
    found = []
    for _, word in talk:
        before, met, text = text.partition(word)
        if not met:
            raise UserError("the chat template does not show every turn: no Modelfile can be made of it")
        found.append(before)
    return [*found, text]


def _literal(text: str) -> str:
    return text.replace("{{", '{{ "{{" }}')


def _quoted(text: str) -> str:
    if '"""' in text:
        raise UserError(f'a Modelfile cannot hold """, found it in {one_line(text, {})}')
    return f'"""{text}"""'
