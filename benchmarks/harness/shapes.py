"""Creates models of given shapes with random weights, as mlx-lm modules and as folders, and runs on
them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

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

LOGIT_STD = 3.0  # about that of a trained model's logits: quantization changes others differently


def model_config(arch: str, layers: int, hidden: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    """The config.json of a model; `torch_dtype` and `quantization` count for its random weights too."""
    return {
        "model_type": arch,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        **more,
    }


def _qwen2(
    layers: int, hidden: int, vocabulary: int, inner: int, heads: int, kv_heads: int
) -> dict[str, Any]:
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    long = {"rope_theta": 1e6, "max_position_embeddings": 32768, "intermediate_size": inner}
    return model_config("qwen2", layers, hidden, vocabulary, **long, **heads_of)


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
    "qwen2.5-0.5b": _qwen2(24, 896, 151936, 4864, 14, 2),
    "qwen2-6x256": _qwen2(6, 256, 4096, 1024, 4, 2),
    "qwen2-8x768": _qwen2(8, 768, 4096, 2048, 12, 12),  # no array is most of its 57 M parameters
    "tiny": _qwen2(2, 64, 512, 128, 2, 1),  # for --quick
}
END, END_ID = "<|endoftext|>", 0
WORDS = ("bando", "kirsu", "melon", "tavor", "zipun", "loger", "fedas", "nikol", "virat", "gumes")
_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_RUN = """
[run]
output_dir = "{folder}/out"
overwrite = true
[model]
path = "{model}"
lora = {{rank = 8, scale = 10.0}}
[data]
source = "{folder}"
{plain}
[rollout]
num_generations = {generations}
max_new_tokens = {new}
[reward]
functions = ["benchmarks.sides:letters"]
[optim]
learning_rate = 1e-5
schedule = "constant"
warmup_ratio = 0.0
batch_size = {prompts}
max_steps = 1000000
[eval]
at_start = false
every = 0
samples = 1
[log]
report = false
[checkpoint]
every = 0
"""


class Sizes(NamedTuple):
    """The sizes of a step."""

    prompts: int
    generations: int
    new: int  # tokens of a completion at most


def dtype_here() -> mx.Dtype:
    """The compute dtype of models on this backend: bfloat16 on a GPU, float32 on a CPU."""
    return mx.float32 if backend() == "cpu" else mx.bfloat16


def empty_module(config: dict[str, Any]) -> nn.Module:
    """mlx-lm's module of this config.json, with its own initial weights."""
    from mlx_lm.utils import _get_classes

    model_class, args_class = _get_classes(config)
    return model_class(args_class.from_dict(config))


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
    module = empty_module({**SHAPES[name], **changes})
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


def same_length(count: int, words: int = 16) -> list[str]:
    """Questions with about three tokens per word, all of the same length."""
    return [" ".join(WORDS[(row + 3 * word) % 10] for word in range(words)) for row in range(count)]


def write_run(
    folder: Path, model: Path | str, questions: Sequence[str], sizes: Sizes, *, plain: bool = True
) -> Path:
    """Writes the files of a run: data, a config, and a model of random weights if `model` is a key of
    SHAPES. With `plain`, prompts consist of the question alone. Returns the config.
    """
    if model in SHAPES:
        model = write_folder(folder / "model", str(model))
    for split, rows in (("train", questions), ("test", questions[:1])):
        lines = [json.dumps({"question": question, "answer": "1"}) + "\n" for question in rows]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    alone = 'system_prompt = ""\nnudge = ""\nmax_prompt_length = 4096' if plain else ""
    path = Path(model).resolve() if Path(model).is_dir() else model
    text = _RUN.format(folder=folder, model=path, plain=alone, **sizes._asdict())
    config = folder / "train.toml"
    config.write_text(text)
    return config


def write_folder(path: Path, name: str) -> Path:
    """A folder with such a model, in float32 or bfloat16 as `dtype_here`, and a tokenizer of its vocabulary.

    The end-of-text token's embedding is zero: with a logit of 0 among random ones, it is sampled
    about once in 300,000 tokens with a vocabulary of 4,096.
    """
    dtype = str(dtype_here()).removeprefix("mlx.core.")
    config = {**SHAPES[name], "eos_token_id": END_ID, "torch_dtype": dtype}
    path.mkdir(parents=True, exist_ok=True)
    weights = named_leaves(make_module(name).parameters())
    embedding = next(path for path in weights if path.endswith(("embed_tokens.weight", "lm_head.weight")))
    weights[embedding][END_ID] = 0
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(path, int(config["vocab_size"]))
    return path


def write_tokenizer(path: Path, size: int) -> None:
    """A byte-level BPE of at most `size` ids, trained on made-up words; id 0 ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = np.random.default_rng(0)
    syllables = [a + b + c for a in "bdfgklmnprstvz" for b in "aeiou" for c in ("", "n", "r", "s")]
    words = ["".join(rng.choice(syllables, rng.integers(1, 4))) for _ in range(2 * size)]
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made: Any = trainers.BpeTrainer
    trainer = made(
        vocab_size=size,
        special_tokens=[END, "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    ends = {"bos_token": None, "eos_token": END, "pad_token": END}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **ends, "chat_template": _TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
