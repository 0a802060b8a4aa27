"""Creates models of given shapes with random weights, as mlx-lm modules and as folders for mlx-lm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from benchmarks.harness.machine import backend
from grpo_fn.trees import from_names, named_leaves
from runners.config.names import EMBEDDED
from runners.config.sections import ModelConfig
from runners.errors import UserError, did_you_mean
from runners.machine.startup import prepare
from runners.models.loaded_model import load_model

LOGIT_STD = (
    3.0  # of a trained model's logits, roughly; what quantization does to a distribution depends on it
)
_QWEN = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32768}
SHAPES: dict[str, dict[str, Any]] = {
    # The defaults: 20 layers of 1280, 10 heads.
    "nanochat-d20": {"model_type": "nanochat", "vocab_size": 65536},
    "nanochat-d32": {
        "model_type": "nanochat",
        "hidden_size": 2048,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 8192,
    },
    "qwen2.5-0.5b": {
        **_QWEN,
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen2-6x256": {
        **_QWEN,
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 1024,
        "vocab_size": 4096,
        "tie_word_embeddings": True,
    },
    "qwen2-8x768": {  # 57 M parameters, none of whose arrays is most of it
        **_QWEN,
        "hidden_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "intermediate_size": 2048,
        "vocab_size": 4096,
        "tie_word_embeddings": True,
    },
    "tiny": {  # for --quick
        **_QWEN,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 128,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
}
MODELS = click.option(
    "--model",
    "models",
    multiple=True,
    type=click.Choice([*SHAPES, EMBEDDED]),
    help="Only this one; the others' figures stay.",
)
"""A benchmark's option `models`."""
END, END_ID = "<|endoftext|>", 0
_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def dtype_here() -> mx.Dtype:
    """The compute dtype of models on this backend: bfloat16 on a GPU, float32 on a CPU."""
    return mx.float32 if backend() == "cpu" else mx.bfloat16


def make_module(name: str, *, dtype: mx.Dtype | None = None, **changes: Any) -> nn.Module:
    """A model of SHAPES with fixed random weights, or the embedded one with its own.

    The standard deviation of matrices is 1/√fan-in; the head's is chosen so that logits have
    LOGIT_STD.

    Args:
        name: a key of SHAPES, or "embedded".
        dtype: the weights' dtype; None means `dtype_here()`.
        changes: keys of its config.json with different values, such as `vocab_size=32768`.

    Raises:
        UserError: there is no such shape.
    """
    dtype = dtype or dtype_here()
    if name == EMBEDDED:
        module = load_model(ModelConfig(path=EMBEDDED), prepare()).module
        module.set_dtype(dtype)
        mx.eval(module.parameters())
        return module
    if name not in SHAPES:
        known = [*SHAPES, EMBEDDED]
        raise UserError(f"model {name!r}: expected one of {', '.join(known)}{did_you_mean(name, known)}")
    module = _empty({**SHAPES[name], **changes})
    leaves = named_leaves(module.parameters())
    head = "lm_head.weight" if "lm_head.weight" in leaves else "model.embed_tokens.weight"
    drawn = {}
    for (path, leaf), key in zip(leaves.items(), mx.random.split(mx.random.key(0), len(leaves)), strict=True):
        if leaf.ndim == 2:
            std = (LOGIT_STD if path == head else 1) / leaf.shape[1] ** 0.5
            drawn[path] = (mx.random.normal(leaf.shape, key=key) * std).astype(dtype)
        else:  # norms stay at 1; biases, where there are any, become 0
            drawn[path] = mx.ones_like(leaf, dtype=dtype) * (0 if path.endswith("bias") else 1)
        mx.eval(drawn[path])  # one at a time: the float32 draws are not kept
    module.update(from_names(drawn))
    return module


def make_prompts(count: int, length: int, vocabulary: int, *, spread: int = 0) -> list[list[int]]:
    """Random prompts of `length` tokens; with `spread`, of lengths spread evenly around it with the
    same sum.
    """
    rng = np.random.default_rng(0)
    offsets = np.linspace(-spread, spread, count).round().astype(int) if count > 1 else [0]
    return [rng.integers(8, vocabulary, length + offset).tolist() for offset in offsets]


def vocabulary_of(module: nn.Module) -> int:
    """The model's number of token ids."""
    return vars(module)["args"].vocab_size


def write_folder(path: Path, name: str) -> Path:
    """A folder with such a model, in float32 or bfloat16 as `dtype_here`, and a tokenizer of its vocabulary.

    The end-of-text token's embedding is zero: with a logit of 0 among random ones, it is sampled
    about once in 300,000 tokens with a vocabulary of 4,096.
    """
    config = {
        **SHAPES[name],
        "eos_token_id": END_ID,
        "torch_dtype": str(dtype_here()).removeprefix("mlx.core."),
    }
    module = make_module(name)
    path.mkdir(parents=True, exist_ok=True)
    weights = named_leaves(module.parameters())
    embedding = next(path for path in weights if path.endswith(("embed_tokens.weight", "lm_head.weight")))
    weights[embedding][END_ID] = 0
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(path, int(config["vocab_size"]))
    return path


def _empty(config: dict[str, Any]) -> nn.Module:
    from mlx_lm.utils import _get_classes

    model_class, args_class = _get_classes(config)
    return model_class(args_class.from_dict(config))


def write_tokenizer(path: Path, size: int) -> None:
    """A byte-level BPE of at most `size` ids, trained on made-up words; id 0 ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = np.random.default_rng(0)
    syllables = [a + b + c for a in "bdfgklmnprstvz" for b in "aeiou" for c in ("", "n", "r", "s")]
    words = ["".join(rng.choice(syllables, rng.integers(1, 4))) for _ in range(2 * size)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=size,  # pyright: ignore
        special_tokens=[END, "<|start|>"],  # pyright: ignore
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # pyright: ignore
        show_progress=False,  # pyright: ignore
    )
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": END,
        "chat_template": _TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
