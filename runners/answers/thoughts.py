"""Separates a model's thoughts from its answer; no other code does this."""

from collections.abc import Sequence

TAGS = ("<think>", "</think>")
"""The usual tags of thoughts, the default of `data.thoughts`."""


def split_thoughts(text: str, tags: Sequence[str] = TAGS) -> tuple[str, str | None]:
    """Splits a completion into its thoughts, including tags, and its answer, the text after the
    last closing tag.

    The answer is None if a thought is still open at the end, because the completion was truncated
    inside the thought. A text may start inside a thought whose opening tag is in the prompt.
    Without tags, the whole text is the answer.
    """
    if not tags:
        return "", text
    opening, closing = tags
    before, end, answer = text.rpartition(closing)
    return (text, None) if opening in answer else (before + end, answer)
