"""The embedded model's tokenizer: a small byte-level BPE in which every digit and every tag is one token."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 640
PAD, SYSTEM, USER, ASSISTANT, END = "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")

# One token opens a turn; only the assistant's turn is closed, by the end-of-sequence token.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int = VOCAB_SIZE, marks: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Learn the merges from `texts`. The same texts give the same tokenizer. `marks` are special tokens too.

    The tags are ordinary added tokens, so that decoding without special tokens keeps them; the template's
    tokens are special. Any text can be encoded, for the alphabet is all 256 bytes.
    """
    bpe = Tokenizer(models.BPE())
    # a comma or a full stop takes the following blank with it; a digit stands alone
    words = pre_tokenizers.Split(Regex(r"\d|[,.?] | ?\$| ?[A-Za-z]+|\s+|[^\sA-Za-z\d]"), behavior="isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_])
    bpe.decoder = decoders.ByteLevel()
    special = [
        AddedToken(text, special=True, normalized=False)
        for text in (PAD, SYSTEM, USER, ASSISTANT, END, *marks)
    ]
    tags = [AddedToken(text, special=False, normalized=False) for text in TAGS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(tags),
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens(tags)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, with the chat template inside the latter."""
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the name that every version of transformers knows
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": tokenizer.model_max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def prompt_text(tokenizer: Any, question: str, nudge: str = "<reasoning>") -> str:
    """The prompt as training and evaluation see it: the chat template with the nudge after it.

    `tokenizer` is transformers' or mlx-lm's wrapper of it.
    """
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + nudge
