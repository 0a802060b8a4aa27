"""Model folders with random weights, real architectures and a real byte-level BPE."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3_text", "gemma3", "phi3", "mixtral")
"""What `make_model_folder` makes, besides mistral and gemma2; `make_nanochat_folder` makes nanochat's."""

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = (
    "Anna bakes 48 rolls in the morning and half as many in the evening. How many does she bake in all?",
    "A box holds 12 pens. Tom has 7 boxes and gives 5 pens away. How many pens does he have in the end?",
    "7+5=12, 12-3=9 so the answer is 9.",
)


def make_tokenizer(*, size: int = 320, special_tags: bool = False) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly `size` ids; the tags are single tokens (special if asked)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(TAGS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=special_tags, normalized=False) for tag in TAGS])
    assert tokenizer.get_vocab_size() == size, "the corpus gives others"
    return tokenizer


def sentence_tokenizer(texts: list[str], prefix: bool, size: int) -> Tokenizer:
    """A BPE like SentencePiece's, with bytes for unknown characters; `prefix`: a space in front of texts."""
    backend = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    steps = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    names = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=names, show_progress=False)
    backend.train_from_iterator([text.replace(" ", "▁") for text in texts * 3], trainer)
    stated = json.loads(backend.to_str())
    stated["added_tokens"] = stated["added_tokens"][:3]  # bytes are no added tokens
    return Tokenizer.from_str(json.dumps(stated))


def make_config(arch: str, *, vocab_size: int, layers: int, tie: bool, **changes) -> dict:
    """config.json of a two-headed model of width 32, with these changes."""
    config: dict[str, Any] = dict(
        model_type=arch, vocab_size=vocab_size, hidden_size=32, intermediate_size=64,
        num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=512, tie_word_embeddings=tie,
        eos_token_id=2,
    )  # fmt: skip
    if arch == "qwen2":
        del config["head_dim"]
    if arch.startswith("gemma"):
        # Every second block of a gemma3 looks back 8 tokens only.
        config |= {"query_pre_attn_scalar": 16, "sliding_window": 8, "sliding_window_pattern": 2}
    if arch == "mixtral":
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    config |= changes
    if arch == "gemma3":  # the whole model's: the text model's stands inside
        text = {**config, "model_type": "gemma3_text"}
        return {"model_type": arch, "text_config": text, "vocab_size": vocab_size, "eos_token_id": 2}
    return config


def make_model_folder(
    path: Path,
    arch: str = "llama",
    *,
    seed: int = 0,
    dtype: str = "float32",
    layers: int = 2,
    tie: bool = True,
    vocab_size: int = 320,
    tokenizer_size: int = 320,
    special_tags: bool = False,
    chat_template: bool = True,
    quantize: dict | None = None,
    **changes,
) -> Path:
    """Writes a model folder that `mlx_lm.load` opens, and returns it.

    Args:
        path: the folder, made if need be.
        arch: one of ARCHITECTURES.
        seed: of the random weights.
        dtype: of the weights in the file.
        tie: the head shares the embedding's weights.
        vocab_size, tokenizer_size: rows of the embedding, ids of the tokenizer; different to provoke errors.
        special_tags: the four XML tags are special tokens, which decoders like to leave out.
        quantize: e.g. {"group_size": 32, "bits": 4}: weights are packed as mlx-lm packs them.
        changes: keys of config.json.
    """
    from mlx_lm.utils import _get_classes

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = make_config(arch, vocab_size=vocab_size, layers=layers, tie=tie, **changes)
    model_class, args_class = _get_classes(config)
    mx.random.seed(seed)
    module = model_class(args_class.from_dict(config))
    module.set_dtype(getattr(mx, dtype))
    if quantize:
        nn.quantize(module, **quantize)
        config["quantization"] = quantize
    weights = dict(tree_flatten(module.parameters()))
    if tie:  # some modules have the leaf and do without it
        weights = {name: leaf for name, leaf in weights.items() if not name.endswith("lm_head.weight")}
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})  # pyright: ignore
    (path / "config.json").write_text(json.dumps(config, indent=2))
    write_tokenizer(
        path, make_tokenizer(size=tokenizer_size, special_tags=special_tags), chat_template=chat_template
    )
    return path


def write_tokenizer(path: Path, tokenizer: Tokenizer, *, chat_template: bool = True) -> None:
    """tokenizer.json and tokenizer_config.json for a tokenizer of `make_tokenizer`."""
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    config |= {"model_max_length": 512} | ({"chat_template": CHAT_TEMPLATE} if chat_template else {})
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
