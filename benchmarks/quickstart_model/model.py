"""The embedded model itself: its shape, its files, and how it answers questions."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from transformers import PreTrainedTokenizerFast

import grpo_fn as g
from benchmarks.quickstart_model.tokenizer import VOCAB_SIZE, prompt_text, save_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
"""Few heads and a narrow MLP: at this size element-wise work, not matrix products, takes the time."""

LONGEST = 40  # tokens of a completion; three steps with two-digit numbers need 36


def build_model(seed: int, config: dict[str, Any] = CONFIG) -> llama.Model:
    """A model with fresh weights, the same for the same seed."""
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    return model


def save_embedded_model(
    model: llama.Model,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    config: dict[str, Any] = CONFIG,
    longest: int = LONGEST,
) -> None:
    """Write the folder that `mlx_lm.load` opens: config, weights, tokenizer and the sampling defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (folder / "config.json").write_text(json.dumps(config | ends, indent=2) + "\n")
    (folder / "generation_config.json").write_text(
        json.dumps(ends | {"max_new_tokens": longest}, indent=2) + "\n"
    )
    flat: Any = tree_flatten(model.parameters())
    weights = dict(sorted(flat))  # the bytes depend on the order
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    save_tokenizer(tokenizer, folder)


def answers(
    model: llama.Model, tokenizer: Any, questions: Sequence[str], *, samples: int, temperature: float
) -> list[list[str]]:
    """`samples` completions per question (without the nudge), greedy at temperature 0."""
    prompts = [tokenizer.encode(prompt_text(tokenizer, text), add_special_tokens=False) for text in questions]
    policy = g.Policy.from_module(model, patched=False)
    ends = [tokenizer.eos_token_id]
    sampling = g.Sampling(
        num_generations=samples, max_new_tokens=LONGEST, temperature=temperature, eos_ids=ends
    )
    rollout = g.generate(policy, policy.params, prompts, sampling, key=mx.random.key(0))
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in rollout.completions()]
    return [texts[start : start + samples] for start in range(0, len(texts), samples)]


def answer_of(text: str) -> str:
    """The text between the answer tags; a missing closing tag is forgiven."""
    return text.partition("<answer>")[2].partition("</answer>")[0].strip()


def exact_match(
    model: llama.Model,
    tokenizer: Any,
    rows: Sequence[dict[str, str]],
    *,
    samples: int = 1,
    temperature: float = 0.0,
) -> tuple[float, float]:
    """The share of completions that are right, and of rows that at least one completion answers rightly."""
    texts_by_row = answers(
        model, tokenizer, [row["question"] for row in rows], samples=samples, temperature=temperature
    )
    right = [
        [answer_of(text) == row["answer"].rpartition("#### ")[2] for text in texts]
        for row, texts in zip(rows, texts_by_row, strict=True)
    ]
    return sum(map(sum, right)) / sum(map(len, right)), sum(map(any, right)) / len(rows)
