"""Converts tiktoken's encodings to the files that transformers and mlx-lm read."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, AnyStr

from runners.files.json_files import read_json, write_json

if TYPE_CHECKING:
    import tiktoken

_BOS = "<|bos|>"
# the first one there is EOS
_ENDS = ("<|assistant_end|>", "<|im_end|>", "<|eot_id|>", "<|endoftext|>", _BOS)
_PADS = ("<|pad|>", "<|padding|>")
_TURNS = {"<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>"}
# nanochat has no system role, so a system message becomes the start of the first user message.
_NANOCHAT_TEMPLATE = """\
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


def write_tokenizer(encoding: tiktoken.Encoding | str, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json for an encoding, or
    for the name of an encoding in tiktoken.

    A text begins with `<|bos|>` and a completion ends with `<|assistant_end|>`, `<|endoftext|>` or
    a similar token, if the encoding contains them. Existing values in the folder's
    generation_config.json are kept. If the encoding contains nanochat's turn marks, a chat template
    is written too.
    """
    import tiktoken
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
    )

    if isinstance(encoding, str):
        encoding = tiktoken.get_encoding(encoding)
    special = encoding._special_tokens
    vocabulary, merges = _vocabulary(encoding._mergeable_ranks)
    # If a whole word is a token, both tiktoken and this tokenizer use it without merges.
    tokenizer: Any = Tokenizer(models.BPE(vocabulary | special, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(encoding._pat_str), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in special]
    )
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    if _BOS in special:
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{_BOS} $A", special_tokens=[(_BOS, special[_BOS])]
        )
        config["bos_token"] = _BOS
    end = next((name for name in _ENDS if name in special), None)
    if end:
        config["eos_token"] = end
        config["pad_token"] = next((name for name in _PADS if name in special), end)
    if special.keys() >= _TURNS:
        config["chat_template"] = _NANOCHAT_TEMPLATE
    tokenizer.save(str(folder / "tokenizer.json"))
    # <|bos|> begins the next text
    ends = sorted({special[name] for name in (end, _BOS) if name in special})
    write_json(folder / "tokenizer_config.json", config)
    generation = folder / "generation_config.json"
    stated = read_json(generation) if generation.is_file() else {}
    if stated.get("eos_token_id") in (None, []):  # 0 is a token
        stated |= {"eos_token_id": ends}
    write_json(generation, stated)


def _vocabulary(ranks: dict[bytes, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Returns the tokens by name, and all pairs that form a token. The pairs are ordered by rank,
    as tiktoken joins neighbours.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = pairs_forming(token, ranks.keys())
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(names[left], names[right]) for left, right in pairs]
    return {names[token]: rank for token, rank in ranks.items()}, merges


def pairs_forming(token: AnyStr, known: Set[AnyStr]) -> list[tuple[AnyStr, AnyStr]]:
    """Returns the pairs of known tokens that form this token, the shortest left part first."""
    cuts = [(token[:place], token[place:]) for place in range(1, len(token))]
    return [(left, right) for left, right in cuts if left in known and right in known]
