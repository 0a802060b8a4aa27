"""A tiktoken encoding with the part of transformers' tokenizer interface that mlx-lm and this project use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken

from runners.tokenization.tokenizer_pickle import read_encoding

if TYPE_CHECKING:
    import tiktoken

_BOS = "<|bos|>"
_ENDS = ("<|assistant_end|>", "<|im_end|>", "<|eot_id|>", "<|endoftext|>", _BOS)  # the first one there is EOS
_PADS = ("<|pad|>", "<|padding|>")
_TURNS = ("<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>")
# nanochat has no system role: such a message is the beginning of the first user message.
NANOCHAT_TEMPLATE = """\
{{- bos_token }}{% set first = namespace(text="") -%}
{%- for message in messages %}
    {%- if message.content is not string %}
        {{- raise_exception("expected a text as a message's content") }}
    {%- elif message.role == "system" and loop.first %}
        {%- set first.text = message.content ~ "\n\n" %}
    {%- elif message.role == "user" %}
        {{- "<|user_start|>" ~ first.text ~ message.content ~ "<|user_end|>" }}
        {%- set first.text = "" %}
    {%- elif message.role == "assistant" %}
        {{- "<|assistant_start|>" ~ message.content ~ "<|assistant_end|>" }}
    {%- else %}
        {{- raise_exception("expected turns of user and assistant, found one of " ~ message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|assistant_start|>" }}{% endif %}
"""


class TiktokenTokenizer:
    """Tokenizes with a tiktoken encoding; names and behaviour are those of a transformers tokenizer.

    Ids that the encoding does not have (a model's embedding may be padded) decode to nothing. Ordinary tokens
    are spelled with a character for each byte. Without nanochat's turn marks there is no chat template.
    """

    def __init__(self, encoding: tiktoken.Encoding, name_or_path: str = ""):
        """`name_or_path` is for messages only."""
        self.encoding = encoding
        self.name_or_path = name_or_path
        self.vocab_size = encoding.n_vocab
        number_of = encoding.encode_single_token
        special = {name: number_of(name) for name in encoding.special_tokens_set}
        pieces = {number_of(piece): piece for piece in encoding.token_byte_values()}
        self._bytes = pieces | {number: name.encode() for name, number in special.items()}
        self._vocabulary = {piece.decode("latin-1"): number for number, piece in pieces.items()} | special
        self._tokens = {number: token for token, number in self._vocabulary.items()}
        self.chat_template = NANOCHAT_TEMPLATE if special.keys() >= {*_TURNS} else None
        self.bos_token = _BOS if _BOS in special else None
        self.eos_token = next((name for name in _ENDS if name in special), None)
        self.pad_token = next((name for name in _PADS if name in special), self.eos_token)
        self.bos_token_id, self.eos_token_id, self.pad_token_id = (
            special.get(name or "") for name in (self.bos_token, self.eos_token, self.pad_token)
        )
        # The tokens that end a completion: <|bos|> would begin the next text.
        self.end_ids = tuple(sorted({i for i in (self.eos_token_id, self.bos_token_id) if i is not None}))
        self.added_tokens_decoder = {
            i: AddedToken(name, special=True, normalized=False) for name, i in special.items()
        }

    def __len__(self) -> int:
        """The number of ids, including gaps: the largest id + 1."""
        return self.vocab_size

    def get_vocab(self) -> dict[str, int]:
        """Token -> id."""
        return dict(self._vocabulary)

    def convert_ids_to_tokens(self, ids: int | Iterable[int]) -> Any:
        """The token of an id, or a list for several ids; None if there is none."""
        return self._tokens.get(ids) if isinstance(ids, int) else [self._tokens.get(int(i)) for i in ids]

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
        """The text of some ids; incomplete characters become U+FFFD. There are no spaces to clean up."""
        ids = [token_ids] if isinstance(token_ids, int) else [int(i) for i in token_ids]
        dropped = self.added_tokens_decoder if skip_special_tokens else ()
        return b"".join(self._bytes.get(i, b"") for i in ids if i not in dropped).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        chat_template: str | None = None,
        return_dict: bool = False,
        **arguments: Any,
    ) -> Any:
        """A conversation as text, or with `tokenize` as ids; `arguments`: transformers' and the template's.

        Raises ValueError without a template, and jinja2's errors from the template.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        template = chat_template or self.chat_template
        if template is None or return_dict:
            raise ValueError("expected a chat template, and return_dict = False")
        tokens = {"bos_token": self.bos_token or "", "eos_token": self.eos_token or ""}
        (text,), _ = render_jinja_template(
            [[*map(dict, conversation)]], chat_template=template, **tokens, **arguments
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text


def load_tiktoken(file: Path, eos_token_ids: Iterable[int] = ()) -> TokenizerWrapper:
    """mlx-lm's wrapper of the encoding in a tokenizer.pkl; `eos_token_ids` end a completion as well.

    Raises UserError if the file is refused; see `tokenizer_pickle.read_encoding`.
    """
    tokenizer = TiktokenTokenizer(read_encoding(file), name_or_path=str(file.parent))
    wrapper = TokenizerWrapper(tokenizer, eos_token_ids={*tokenizer.end_ids, *eos_token_ids})
    wrapper.has_chat_template = tokenizer.chat_template is not None
    return wrapper
