"""Small random models of real architectures in memory: a vocabulary below 128, two blocks, no files."""

import gc
import importlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

import grpo_fn as g
from benchmarks.architectures.small_models import small_config
from grpo_fn.backends.mechanisms import has_cuda
from grpo_fn.trees import from_names, named_leaves

VOCAB = 61
_COMMON = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=256,
)  # fmt: skip
_STATE_SPACE = dict(state_size=8, conv_kernel=4, time_step_rank=4, use_bias=False, use_conv_bias=True)
_WINDOWED = dict(sliding_window=3, layer_types=["sliding_attention", "full_attention"], no_rope_layers=[1, 0])
_LATENT = dict(kv_lora_rank=16, q_lora_rank=8, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16)
# name -> (mlx-lm's module, what it has beside or instead of the common settings)
ARCHITECTURES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False, "head_dim": 16}),
    "phi3": ("phi3", {"tie_word_embeddings": False}),
    "phi": ("phi", {"num_key_value_heads": 2, "layer_norm_eps": 1e-5}),  # its head has a bias
    "gemma2": ("gemma2", {"head_dim": 16, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 6, "sliding_window_pattern": 2}),
    # its sliding layer keeps a plain cache, so that only the mask knows of the window
    "smollm3": ("smollm3", _WINDOWED | {"tie_word_embeddings": True}),
    "cohere": ("cohere", {"num_key_value_heads": 2, "logit_scale": 0.25}),
    # its layers cache what keys and values are made of, and pass positions' scores as a mask
    "deepseek": ("deepseek_v3", _LATENT | {"num_key_value_heads": 2, "n_routed_experts": None}),
    "nanochat": ("nanochat", {"num_key_value_heads": 2}),
    "mamba": ("mamba", _STATE_SPACE | {"tie_word_embeddings": True}),
    "gpt_neox": ("gpt_neox", {"layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.5}),
}
# Models that mlx-lm computes in other ways with caches than without, or than with one a row.
UNUSUAL = ("gemma3n", "afm7")


def tiny_module(name: str = "llama", *, seed: int = 0, dtype: mx.Dtype = mx.float32, **changes) -> Any:
    """A trainable random model of that architecture; every leaf is away from its special values."""
    if name in UNUSUAL:
        kind, config = name, small_config(name, **changes)
    else:
        kind, settings = ARCHITECTURES[name]
        config = {"model_type": kind} | _COMMON | settings | changes
    architecture = importlib.import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(seed)  # for the leaves that keep their initial values
    module = architecture.Model(architecture.ModelArgs.from_dict(config))
    rng, leaves = np.random.default_rng(seed), named_leaves(module.parameters())
    for path, leaf in leaves.items():
        noise = rng.normal(size=leaf.shape)
        wide = leaf.ndim == 2 and "A_log" not in path
        values = mx.array(1.2 * noise / np.sqrt(leaf.shape[1])) if wide else leaf + mx.array(0.1 * noise)
        leaves[path] = values.astype(dtype)
    module.update(from_names(leaves))
    mx.eval(module.parameters())
    return module


def tiny_policy(name: str = "llama", *, compute_dtype: mx.Dtype | None = None, **options) -> Any:
    """The policy of a tiny module."""
    return g.Policy.from_module(tiny_module(name, **options), compute_dtype=compute_dtype)


def lora_policy(
    name="llama", *, keys=("self_attn.q_proj", "mlp.up_proj"), packed=False, **options: Any
) -> Any:
    """A policy that trains only LoRA adapters other than zero. `packed`: the base has 4 bits."""
    module = tiny_module(name, **options)
    if packed:
        nn.quantize(module, group_size=32, bits=4)
    return g.Policy.from_module(with_adapters(module, keys))


def with_adapters(module: nn.Module, keys: Sequence[str] | None = None, *, dora: bool = False) -> nn.Module:
    """The module, frozen except adapters on these layers (None: all), which are not zero."""
    from mlx_lm.tuner.utils import linear_to_lora_layers

    module.freeze()
    settings = {"rank": 3, "scale": 2.0, "dropout": 0.0} | ({"keys": list(keys)} if keys else {})
    linear_to_lora_layers(module, 2, settings, use_dora=dora)
    rng = np.random.default_rng(7)
    leaves = named_leaves(module.trainable_parameters()).items()
    drawn = {p: mx.array(0.2 * rng.normal(size=a.shape), a.dtype) for p, a in leaves if "lora_" in p}
    module.update(from_names(drawn))
    return module


def token_rows(rows: int, length: int, *, seed: int = 0) -> Any:
    """Random token ids, int32 [rows, length]."""
    return mx.array(np.random.default_rng(seed).integers(0, VOCAB, (rows, length)), mx.int32)


def logprob_gradient(policy, tokens, targets) -> Any:
    """(Σ log π(target), its gradient) of rows of tokens; computed."""

    def total(params):
        return g.token_logprobs(policy.hidden(params, tokens), policy.head(params), targets).sum()

    value, gradient = mx.value_and_grad(total)(policy.params)
    g.materialize(value, gradient)
    return value, gradient


def tiny_rollout(prompts=(4, 2), generations=3, width=7, *, seed=0, entropy=False) -> Any:
    """A rollout of random tokens: prompts of the given lengths, completions of 1 to `width` tokens."""
    rng = np.random.default_rng(seed)
    rows = len(prompts) * generations
    lengths = rng.integers(1, width + 1, rows)
    lengths[-1] = width
    within = np.arange(width)[None] < lengths[:, None]
    return g.Rollout(
        prompts=tuple(tuple(rng.integers(0, VOCAB, n).tolist()) for n in prompts),
        num_generations=generations,
        tokens_bt=mx.array(rng.integers(0, VOCAB, (rows, width)) * within, mx.int32),
        lengths_b=mx.array(lengths, mx.int32),
        logp_bt=mx.array(-rng.uniform(1.0, 6.0, (rows, width)) * within, mx.float32),
        finished_b=mx.array(rng.random(rows)) < 0.7,
        entropy_bt=mx.array(rng.uniform(0.1, 4.0, (rows, width)) * within, mx.float32) if entropy else None,
    )


def tiny_advantages(rollout: g.Rollout, *, seed: int = 0, zeros: bool = False) -> mx.array:
    """Random advantages [P,G]; with `zeros`, the first group and some completions have none."""
    rng = np.random.default_rng(seed + 100)
    shape = len(rollout.prompts), rollout.num_generations
    values = rng.normal(size=shape)
    if zeros:
        values[0] = 0.0
        values[-1, 0] = 0.0
    return mx.array(values, mx.float32)


def same_tree(one, other) -> bool:
    """Whether two trees have the same names and bit-identical arrays."""
    a, b = named_leaves(one), named_leaves(other)
    return [*a] == [*b] and all(
        x.shape == b[name].shape and x.dtype == b[name].dtype and bool((x == b[name]).all())
        for name, x in a.items()
    )


def repeats(one, other) -> bool:
    """Whether two trees are equal, on CUDA to rounding: its atomic sums have no fixed order."""
    return worst_difference(one, other) < 1e-5 if has_cuda() else same_tree(one, other)


def memory_in_use() -> int:
    """Bytes that arrays occupy, without what earlier tests left."""
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


def worst_difference(one, other) -> float:
    """The largest relative difference of two trees' leaves: ‖a − b‖ / ‖b‖."""
    a, b = (
        {n: np.array(x.astype(mx.float32), np.float64) for n, x in named_leaves(t).items()}
        for t in (one, other)
    )
    assert a.keys() == b.keys() and all(a[name].shape == b[name].shape for name in b)
    norm = np.linalg.norm
    return max((float(norm(a[name] - b[name]) / max(norm(b[name]), 1e-9)) for name in b), default=0.0)
