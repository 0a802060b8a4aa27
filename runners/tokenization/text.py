"""Converts text to tokens and tokens to text (at once or as a stream), and finds the token at which
a completion ends.

Completions are scored as text but never tokenized again, so these functions are sufficient for
training.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from runners.errors import UserError, first_line

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from grpo_fn.rollout import FindStop

MAX_TEXT = 1 << 21  # characters of a prompt: tokenizers take some 400 bytes for each


def encode(tokenizer: Any, text: str, **options: Any) -> tuple[int, ...]:
    """Tokenizes a text. `options` are passed to the tokenizer.

    Raises UserError if the text has more than MAX_TEXT characters, or if the tokenizer fails on it.
    """
    if len(text) > MAX_TEXT:
        raise UserError(
            f"expected a prompt of at most {MAX_TEXT:,} characters, found {len(text):,}"
        )
    with _foreign("a text"):
        return tuple(tokenizer.encode(text, **options))


@contextmanager
def _foreign(what: str) -> Iterator[None]:
    """Converts errors from third-party tokenizers to UserErrors."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except BaseException as error:  # Rust's panics are no Exceptions
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"the tokenizer fails on {what}: {first_line(error)}") from error


class TextDecoder:
    """Decodes completions to the text that rewards, evaluation, logs and commands receive.

    Tokens that end a completion, and padding, are omitted at its end. All other special tokens,
    such as `</think>`, are kept, because rewards may look for them.
    """

    def __init__(self, tokenizer: TokenizerWrapper):
        """Determines which tokens end a completion; `tokenizer` is `LoadedModel.tokenizer`."""
        self.tokenizer = tokenizer
        self.ends = {*tokenizer.eos_token_ids, getattr(tokenizer, "pad_token_id", None)}

    def decode(self, tokens: Sequence[int]) -> str:
        """Decodes a completion. Incomplete characters become U+FFFD."""
        count = len(tokens)
        while count and tokens[count - 1] in self.ends:
            count -= 1
        return self.part(tokens[:count])

    def part(self, tokens: Sequence[int]) -> str:
        """Decodes tokens inside a completion, including tokens that would end it."""
        if not tokens:
            return ""
        with _foreign("a completion"):
            # Tidying spaces before punctuation would change what the rewards read.
            return self.tokenizer.decode(
                list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )

    def find_stop(self, stop_strings: Sequence[str]) -> FindStop | None:
        """Returns a function that maps a completion's tokens to the number of tokens to keep, or to
        None if the completion continues.

        The function's second argument is the number of tokens that earlier calls have checked,
        which are not checked again; 0 means none.

        The last kept token is the one that completes the earliest stop string. If that token has
        text after the stop string, this text is kept too, because tokens cannot be split. If a stop
        string is a special token's name, that token ends completions, and `decode` omits it at the
        end. Without stop strings, `find_stop` returns None.

        Text is decoded only if a token contains a stop string's last character, and only as far
        back as the stop string can reach. A call without such a token costs about a microsecond.
        Raises ValueError for an empty stop string.
        """
        if any(not stop for stop in stop_strings):
            raise ValueError("a stop string is empty: it would end every completion immediately")
        texts = tuple(stop_strings)
        if not texts:
            return None
        special = getattr(self.tokenizer, "added_tokens_decoder", {}).items()
        self.ends |= {i for i, token in special if token.special and str(token) in texts}
        last_characters = {stop[-1] for stop in texts}
        if not all(character.isascii() for character in last_characters):
            last_characters.add("\ufffd")  # a token may contain only a part of such a character
        # A token has at least a byte; an extra one avoids a decoder's trimming.
        reach = max(len(stop.encode()) for stop in texts) + 1

        @functools.cache
        def may_end(token: int) -> bool:
            # Twice, because decoders trim the first token's space.
            return not last_characters.isdisjoint(self.part([token, token]))

        def find(tokens: Sequence[int], start: int) -> int | None:
            for position, token in enumerate(tokens[start:], start + 1):
                if may_end(token):
                    tail = self._tail(tokens[max(position - reach - 3, 0) : position], reach)
                    if any(stop in tail for stop in texts):
                        return position
            return None

        return find

    def _tail(self, tokens: Sequence[int], number: int) -> str:
        """Decodes the last `number` tokens, and up to three more if the text would otherwise start
        inside a character.

        Some decoders drop all bytes after such a start.
        """
        text = ""
        for more in range(4):
            text = self.part(tokens[-(number + more) :])
            if not text.startswith("\ufffd"):
                break
        return text


class TextStream:
    """A completion's text as its tokens arrive: the pieces together equal `decode` of all tokens.

    (Damaged characters are an exception, because some decoders then change earlier text.) A piece
    is held back while it ends inside a character. Only a few tokens are decoded again: those in the
    previous piece and all later ones. The previous piece is included because decoders treat a
    text's first token differently.
    """

    def __init__(self, decoder: TextDecoder):
        """Starts with an empty text."""
        self._decoder = decoder
        self._last: list[int] = []  # tokens of the last piece
        self._waiting: list[int] = []  # tokens after it

    def add(self, token: int) -> str:
        """Returns the text that this token completes, which is often empty."""
        self._waiting.append(token)
        if token in self._decoder.ends:  # such a token has no text if no other token follows
            return ""
        text = self._decoder.part([*self._last, *self._waiting])
        return "" if text.endswith("\ufffd") else self._advance(text)

    def finish(self) -> str:
        """Returns the remaining text if the last character was incomplete."""
        return self._advance(self._decoder.decode([*self._last, *self._waiting]))

    def _advance(self, text: str) -> str:
        piece = text[len(self._decoder.part(self._last)) :]
        self._last = self._waiting
        self._waiting = []
        return piece
