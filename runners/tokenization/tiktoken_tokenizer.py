"""A tiktoken encoding with the tokenizer interface of mlx-lm and this project."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken
from transformers.convert_slow_tokenizer import bytes_to_unicode

from runners.tokenization.chat_format import ChatFormat
from runners.tokenization.tokenizer_pickle import read_encoding

if TYPE_CHECKING:
    import tiktoken

BOS, ASSISTANT_END = "<|bos|>", "<|assistant_end|>"
_ENDS = (ASSISTANT_END, "<|im_end|>", "<|eot_id|>", "<|endoftext|>", BOS)  # the first existing one is the EOS
_PADS = ("<|pad|>", "<|padding|>")


class TiktokenTokenizer:
    """Tokenizes with a tiktoken encoding; names and behaviour are those of a transformers tokenizer.

    Ids that the encoding does not have (a model's embedding may be padded) decode to nothing. Tokens are
    spelled as byte-level BPE tokenizers spell them: GPT-2's letters for bytes, special tokens as they are.
    """

    chat_template: str | None = None  # apply_chat_template is a function here
    clean_up_tokenization_spaces = False

    def __init__(self, encoding: tiktoken.Encoding, name_or_path: str = ""):
        """`name_or_path` is for messages only."""
        self.encoding = encoding
        self.name_or_path = name_or_path
        self.vocab_size = encoding.n_vocab
        special = {name: encoding.encode_single_token(name) for name in sorted(encoding.special_tokens_set)}
        self._special = dict(sorted(special.items(), key=lambda item: item[1]))
        self._bytes_of = _bytes_of(encoding, special)  # id -> bytes; empty if there is no token
        names = {number: name for name, number in special.items()}
        self._tokens = [
            names.get(i) or piece.decode("latin-1").translate(_LETTERS) or None
            for i, piece in enumerate(self._bytes_of)
        ]
        self._format = ChatFormat.of(special)
        # Whether conversations have nanochat's turns; else they are plain text with speakers' names.
        self.has_turn_marks = self._format.marked
        self.bos_token = BOS if BOS in special else None
        self.eos_token = next((name for name in _ENDS if name in special), None)
        self.pad_token = next((name for name in _PADS if name in special), self.eos_token)
        self.bos_token_id, self.eos_token_id, self.pad_token_id = (
            special.get(name or "") for name in (self.bos_token, self.eos_token, self.pad_token)
        )
        # The tokens that end a completion: <|bos|> would begin the next text.
        self.end_ids = tuple(sorted({i for i in (self.eos_token_id, self.bos_token_id) if i is not None}))
        self.all_special_tokens, self.all_special_ids = [*self._special], [*self._special.values()]
        self.added_tokens_decoder = {
            i: AddedToken(name, special=True, normalized=False) for name, i in special.items()
        }

    def __len__(self) -> int:
        """The number of ids, including gaps: the largest id + 1."""
        return self.vocab_size

    def get_vocab(self) -> dict[str, int]:
        """Token -> id."""
        return {token: i for i, token in enumerate(self._tokens) if token is not None}

    def convert_ids_to_tokens(self, ids: int | Iterable[int]) -> Any:
        """The token of an id, or a list for several ids; None if there is none."""
        if isinstance(ids, int):
            return self._tokens[ids] if 0 <= ids < len(self._tokens) else None
        return [self.convert_ids_to_tokens(int(i)) for i in ids]

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """The id of a token, or a list for several tokens; None if there is none."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        if tokens in self._special:
            return self._special[tokens]
        try:
            return self.encoding.encode_single_token(bytes(_BYTES[letter] for letter in tokens))
        except KeyError:  # a letter without a byte, or bytes without a token
            return None

    def encode(
        self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> list[int]:
        """The ids of a text.

        `add_special_tokens` puts `<|bos|>` in front, if the vocabulary has it. Names of special tokens in the
        text become those tokens; with `split_special_tokens` they are ordinary text.
        """
        allowed = set() if split_special_tokens else self.encoding.special_tokens_set
        ids = self.encoding.encode(text, allowed_special=allowed, disallowed_special=())
        start = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return [*start, *ids]

    def decode(
        self,
        token_ids: int | Iterable[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """The text of some ids; incomplete characters become U+FFFD.

        `clean_up_tokenization_spaces` exists only for callers that set it to False.
        """
        if clean_up_tokenization_spaces:
            raise ValueError("clean_up_tokenization_spaces = True: tiktoken's texts have nothing to clean up")
        ids = [token_ids] if isinstance(token_ids, int) else [int(i) for i in token_ids]
        dropped = set(self.all_special_ids) if skip_special_tokens else set()
        known = (i for i in ids if i not in dropped and 0 <= i < len(self._bytes_of))
        return b"".join(map(self._bytes_of.__getitem__, known)).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: object = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        enable_thinking: bool = False,
    ) -> Any:
        """A conversation as text, or as ids with `tokenize`; see `ChatFormat`.

        As ids, a message's own text is ordinary text: nothing in it can end its turn.
        Raises ValueError for tools, for other roles than system, user and assistant, for contents that are no
        text, and for options that this kind of tokenizer does not support.
        """
        if tools or return_dict or enable_thinking:
            raise ValueError("tools, return_dict and enable_thinking are not supported by this tokenizer")
        pieces = self._format.pieces(
            conversation,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        if not tokenize:
            return "".join(piece.text for piece in pieces)
        return [
            i
            for piece in pieces
            for i in self.encode(piece.text, add_special_tokens=False, split_special_tokens=not piece.special)
        ]


def load_tiktoken(file: Path, eos_token_ids: Iterable[int] = ()) -> TokenizerWrapper:
    """mlx-lm's wrapper of the encoding in a tokenizer.pkl; `eos_token_ids` end a completion as well.

    Raises UserError if the file is refused; see `tokenizer_pickle.read_encoding`.
    """
    tokenizer = TiktokenTokenizer(read_encoding(file), name_or_path=str(file.parent))
    return TokenizerWrapper(tokenizer, eos_token_ids={*tokenizer.end_ids, *eos_token_ids})


def _bytes_of(encoding: tiktoken.Encoding, special: Mapping[str, int]) -> list[bytes]:
    table = [b""] * encoding.n_vocab
    number_of = encoding.encode_single_token
    for piece in encoding.token_byte_values():
        table[number_of(piece)] = piece
    for name, number in special.items():
        table[number] = name.encode("utf-8")
    return table


_LETTERS: dict[int, str] = bytes_to_unicode()
_BYTES = {letter: byte for byte, letter in _LETTERS.items()}
