"""Writes Ollama's Modelfile for an exported model, with the prompt format of training.

Format: https://github.com/ollama/ollama/blob/main/docs/modelfile.mdx; templates are Go's.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from runners.data.rendering import NO_KWARGS, render
from runners.errors import UserError, one_line
from runners.tokenization.prompt_settings import PromptSettings

_WORDS = ("@@system@@", "@@first@@", "@@reply@@", "@@second@@")  # no template changes them


def modelfile(file: str, tokenizer: Any, prompt: PromptSettings | None) -> str:
    """Returns the text of a Modelfile for the GGUF file `file` next to it. `prompt` is the prompt
    format; None means unknown.

    A system message that SYSTEM cannot contain becomes part of the template. Raises UserError for a
    chat template that hides its messages, and for a stop string or a file name that a Modelfile
    cannot contain.
    """
    nudge = prompt.nudge if prompt else ""
    raw = prompt is not None and prompt.prompt_form == "raw"
    kwargs = prompt.chat_template_kwargs if prompt else NO_KWARGS
    system = prompt.system_prompt if prompt and prompt.system_prompt.strip() and not raw else ""
    inside = system if _fault(system) else ""
    template = (
        f"{{{{ .Prompt }}}}{_literal(nudge)}"
        if raw
        else _template(tokenizer, nudge, kwargs, inside)
    )
    lines = [
        f"FROM {_value('the file', f'./{file}')}",
        f"TEMPLATE {_value('the chat template', template)}",
    ]
    if prompt is None:
        return "\n".join([*lines, ""])
    if system and not inside:
        lines.append(f"SYSTEM {_value('the system message', system)}")
    lines += [
        f"PARAMETER temperature {prompt.temperature}",
        f"PARAMETER top_p {prompt.top_p}",
        f"PARAMETER top_k {prompt.top_k}",
        f"PARAMETER min_p {prompt.min_p}",
        "PARAMETER repeat_penalty 1.0",
        f"PARAMETER num_predict {prompt.max_new_tokens}",
        *(f"PARAMETER stop {_value('a stop string', stop)}" for stop in prompt.stop),
    ]
    return "\n".join([*lines, ""])


def _template(tokenizer: Any, nudge: str, kwargs: Mapping[str, Any], inside: str) -> str:
    """Returns the chat template in Go's template language: the text before each message, by role.

    A conversation without a system message gets the system message `inside`.
    """
    system, first, reply, second = _WORDS
    talk = [("user", first), ("assistant", reply), ("user", second)]
    begin, answer, again, ready = _between(tokenizer, talk, kwargs)
    told, between, *_ = _between(tokenizer, [("system", system), *talk], kwargs)
    bos = getattr(tokenizer, "bos_token", None)
    if bos and tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]:  # llama.cpp adds it
        begin = begin.removeprefix(bos)
        told = told.removeprefix(bos)
    branches = (
        ('if eq .Role "system"', told),
        ('else if eq .Role "assistant"', answer + nudge),
        ("else if eq $i 0", between if inside else begin),
        ("else if and (eq $i 1) $.System", between),
        ("else", again),
    )
    before = f"{{{{ if not .System }}}}{_literal(told + inside)}{{{{ end }}}}" if inside else ""
    turns = "".join(
        f"{{{{ {when} }}}}{_literal(text)}{{{{ .Content }}}}" for when, text in branches
    )
    end = "{{ end }}{{ end }}" + _literal(ready + nudge)
    return f"{before}{{{{ range $i, $m := .Messages }}}}{turns}{end}"


def _between(
    tokenizer: Any, talk: Sequence[tuple[str, str]], kwargs: Mapping[str, Any]
) -> list[str]:
    text, _ = render(
        tokenizer, [{"role": role, "content": word} for role, word in talk], template_kwargs=kwargs
    )
    found = []
    for _, word in talk:
        before, met, text = text.partition(word)
        if not met:
            raise UserError(
                "the chat template does not render every turn, so it cannot be converted to a "
                "Modelfile"
            )
        found.append(before)
    return [*found, text]


def _literal(text: str) -> str:
    """Returns a text as part of a template. Characters with a meaning in Go or in a Modelfile
    become Go strings.
    """
    return "".join(
        c if c not in '{"' and _is_kept(c) else f'{{{{ "\\U{ord(c):08x}" }}}}' for c in text
    )


def _is_kept(character: str) -> bool:
    """Returns whether Ollama keeps a character of a Modelfile. Ollama drops characters that Go
    considers not printable.
    """
    return character.isprintable() or character in "\t\r\n"


def _fault(text: str) -> str:
    """Returns the reason why a text cannot be a value in a Modelfile, where nothing can be escaped.
    Returns "" for a valid value.
    """
    lost = [character for character in text if not _is_kept(character)]
    if lost:
        return f"Ollama drops the character {lost[0]!a}"
    return 'a line that ends with """ ends the value' if re.search(r'"""\s*[\r\n]', text) else ""


def _value(what: str, text: str) -> str:
    """Returns a value in Ollama's syntax: a single word, or a text in quotes whose closing quote
    ends a line.
    """
    fault = _fault(text)
    if fault:
        raise UserError(
            f"{what} cannot be written to a Modelfile: {fault}; found {one_line(text, {})}"
        )
    return text if re.fullmatch(r'[^\s"]+', text) else f'"""{text}"""'
