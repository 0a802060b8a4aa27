"""Real tiktoken encodings, trained here and pickled as nanochat does, beside a nanochat model."""

import json
import pickle
from pathlib import Path

import mlx.core as mx
import tiktoken
from mlx.utils import tree_flatten
from tiktoken._educational import bpe_train

from runners.tokenization.tiktoken_encoding import write_tokenizer

_PARTS = ("user", "assistant", "python", "output")
NANOCHAT_SPECIAL = ("<|bos|>", *(f"<|{part}_{edge}|>" for part in _PARTS for edge in ("start", "end")))
PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+"""
)
_CORPUS = (
    "Anna bakes 48 rolls in the morning and half as many in the evening. How many does she bake in all? "
    "<reasoning>\n7+5=12, 12-3=9\n</reasoning>\n<answer>\n9\n</answer> Größe, naïve, 漢字漢字 and 😀😀. "
)


def make_encoding(special=NANOCHAT_SPECIAL, *, size=320, name="rustbpe"):
    """An encoding of `size` byte-level BPE tokens, followed by the special ones."""
    ranks = bpe_train(_CORPUS, size, PATTERN, visualise=None)
    numbers = {token: len(ranks) + n for n, token in enumerate(special)}
    return tiktoken.Encoding(name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=numbers)


def write_pickle(folder, encoding=None, *, protocol=pickle.DEFAULT_PROTOCOL):
    """tokenizer.pkl in a folder, and the path to it."""
    path = Path(folder) / "tokenizer.pkl"
    path.write_bytes(pickle.dumps(encoding or make_encoding(), protocol))
    return path


def make_nanochat_folder(path, encoding=None, *, seed=0, layers=2, width=32, padding=7):
    """A nanochat model folder with random weights, a tokenizer, and some padding rows."""
    from mlx_lm.models.nanochat import Model, ModelArgs

    encoding = encoding or make_encoding()
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = dict(
        model_type="nanochat", hidden_size=width, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=encoding.n_vocab + padding, max_position_embeddings=256,
        intermediate_size=4 * width,
    )  # fmt: skip
    mx.random.seed(seed)
    module = Model(ModelArgs.from_dict(config))
    weights = dict(tree_flatten(module.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})  # pyright: ignore
    (path / "config.json").write_text(json.dumps(config))
    write_tokenizer(encoding, path)
    return path
