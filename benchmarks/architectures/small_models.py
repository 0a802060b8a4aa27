"""A small random model of each of mlx-lm's architectures: sizes by the names of their settings.

mlx-lm's modules name their settings alike: `SIZES` has a small value for each name, `SETTINGS` what one
module needs beside or instead of that. A module that is not named there is built from `SIZES` alone, so that
a new one of mlx-lm's is tried as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import pkgutil
from typing import Any

VOCABULARY = 96

# Parts of models that mlx-lm keeps beside them: no module of these has a `Model`.
PARTS = (
    "activations",
    "base",
    "bitlinear_layers",
    "cache",
    "gated_delta",
    "mla",
    "pipeline",
    "rope_utils",
    "ssm",
    "switch_layers",
)

_FULL, _SLIDING = "full_attention", "sliding_attention"
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_vocab": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    # widths
    "hidden_size": 64,
    "hidden_dim": 64,
    "d_model": 64,
    "model_dim": 64,
    "n_embd": 64,
    "intermediate_size": 96,
    "ffn_hidden_size": 96,
    "ff_intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "dense_intermediate_size": 96,
    "n_inner": 96,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "share_expert_dim": 32,
    "moe_hidden_size": 32,
    "hidden_size_per_layer_input": 32,
    # depth
    "num_hidden_layers": 4,
    "num_layers": 4,
    "n_layers": 4,
    "n_layer": 4,
    "num_transformer_layers": 4,
    # heads
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_heads": 4,
    "n_head": 4,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "n_kv_heads": 2,
    "n_kv_head": 2,
    "num_attention_groups": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "head_dim": 16,
    "swa_head_dim": 16,
    "swa_v_head_dim": 16,
    "global_head_dim": 16,
    "hidden_size_per_head": 16,
    "kv_channels": 16,
    "rotary_dim": 8,
    # latent attention
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 2,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_head_dim": 32,
    "index_n_heads": 2,
    "index_topk": 8,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_shared_expert": 1,
    "moe_num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "zero_expert_num": 1,
    "zero_expert_type": "identity",
    # recurrent states
    "state_size": 16,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "time_step_rank": 4,
    "time_step_limit": (0.001, 100.0),
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_ssm": 128,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    "use_bias": False,
    "use_conv_bias": True,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
    "short_conv_kernel_size": 4,
    "conv_L_cache": 3,
    "conv_window": 2,
    "conv_bias": True,
    "full_attention_interval": 2,
    "layer_group_size": 2,
    "group_norm_size": 2,
    # windows: shorter than the rows that are tried
    "sliding_window": 6,
    "sliding_window_size": 6,
    "window_size": 6,
    "attention_window_size": 6,
    "sliding_window_pattern": 2,
    "layer_types": [_SLIDING, _FULL] * 2,
    "sliding_window_layers": [0, 2],
    # norms, positions, the rest
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "norm_epsilon": 1e-5,
    "post_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "swa_rope_theta": 10000.0,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.5,
    "partial_rotary_factor": 0.5,
    "rope_parameters": _PLAIN_ROPE,
    "rope_scaling": None,
    "max_position_embeddings": 512,
    "model_max_length": 512,
    "n_positions": 512,
    "n_ctx": 512,
    "block_size": 512,
    "query_pre_attn_scalar": 16,
    "attention_bias": False,
    "qkv_bias": False,
    "mlp_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "qk_norm": True,
    "post_norm": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "logits_scaling": 2.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "dim_model_base": 32,
    "scale_depth": 1.4,
    "scale_emb": 2.0,
    "attention_method": "MLA",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "scoring_func": "sigmoid",
    "score_function": "sigmoid",
    "topk_method": "noaux_tc",
}

# Of models with parts beside their text model: mlx-lm's module and class with the settings of that.
TEXT: dict[str, tuple[str, str]] = {
    "gemma3": ("gemma3_text", "ModelArgs"),
    "gemma3n": ("gemma3n", "TextConfig"),
    "gemma4": ("gemma4_text", "ModelArgs"),
    "kimi_k25": ("kimi_k25", "TextConfig"),
    "kimi_k3": ("kimi_k3", "TextArgs"),
    "kimi_vl": ("kimi_vl", "TextArgs"),
    "lfm2-vl": ("lfm2", "ModelArgs"),
    "llama4": ("llama4", "TextArgs"),
    "minimax_m3_vl": ("minimax_m3_vl", "TextArgs"),
    "mistral3": ("llama", "ModelArgs"),
    "muse_spark": ("muse_spark", "TextArgs"),
    "pixtral": ("llama", "ModelArgs"),
    "prism_hadamard_qwen35": ("qwen3_5", "TextModelArgs"),
    "qwen2_vl": ("qwen2", "ModelArgs"),
    "qwen3_5": ("qwen3_5", "TextModelArgs"),
    "qwen3_5_moe": ("qwen3_5", "TextModelArgs"),
    "qwen3_vl": ("qwen3", "ModelArgs"),
    "qwen3_vl_moe": ("qwen3_moe", "ModelArgs"),
}

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 128,
    "llama_4_scaling_beta": 0.1,
}
_KDA = {"kda_layers": [1, 3], "num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4}
_BY_LAYER = {_SLIDING: _PLAIN_ROPE, _FULL: _PLAIN_ROPE}
_EVERY_OTHER = ["conv", _FULL] * 2  # layers of LFM2
_LFM2 = {
    "layer_types": _EVERY_OTHER,
    "block_dim": 64,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "block_ff_dim": 96,
}

# What one module has beside or instead of `SIZES`; of a name in `TEXT`, its text model. ...: leave it out.
SETTINGS: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "cohere": {"num_key_value_heads": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"rope_scaling": _YARN | {"type": "yarn"}},
    "deepseek_v41": {"compress_ratios": [], "num_hidden_layers": 2},
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"is_moe_layer": [False, True] * 2},
    "gemma2": {"final_logit_softcapping": 5.0},
    "gemma3": {"model_type": "gemma3_text", "num_key_value_heads": 1},
    "gemma3n": {
        "model_type": "gemma3n_text",
        "num_hidden_layers": 6,
        "intermediate_size": [96] * 6,
        "layer_types": [_SLIDING, _FULL] * 3,
        "num_kv_shared_layers": 2,
        "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": 30.0,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
    },
    "gemma4": {"model_type": "gemma4_text", "num_kv_shared_layers": 2, "rope_parameters": _BY_LAYER},
    "gemma4_text": {"num_kv_shared_layers": 2, "rope_parameters": _BY_LAYER},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k3": {
        "linear_attn_config": _KDA,
        "activation_situ_beta": 1.0,
        "attn_res_block_size": 2,
        "hidden_act": "situ",
    },
    "kimi_linear": {"linear_attn_config": _KDA},
    "lfm2": _LFM2,
    "lfm2-vl": _LFM2,
    "lfm2_moe": {"layer_types": _EVERY_OTHER, "use_expert_bias": True},
    "llama4": {
        "attention_chunk_size": 8,
        "interleave_moe_layer_step": 2,
        "num_experts_per_tok": 1,
        "model_type": "llama4_text",
    },
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "llama": {"layer_types": ...},
    "mellum": {"rope_parameters": _BY_LAYER},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0] * 2,
        "moe_layer_freq": [0, 1] * 2,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    },
    "minicpm3": {"rope_scaling": {"original_max_position_embeddings": 128}},
    "minimax_m3_vl": {"moe_layer_freq": [0, 1] * 2, "layer_types": ..., "num_local_experts": 4},
    "ministral3": {"rope_parameters": _YARN},
    "mistral3": {"model_type": "llama"},
    "mistral4": {"rope_parameters": _YARN},
    "muse_spark": {
        "layer_rope_theta": [10000.0, 0.0] * 2,
        "final_logit_softcapping": 20.0,
        "output_multiplier": 0.5,
        "num_shared_experts": 0,
    },
    "nemotron-nas": {
        "block_configs": [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}}] * 2
        + [{"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}}] * 2
    },
    "nemotron_h": {"layer_types": ..., "hybrid_override_pattern": ["M", "*", "E", "-"]},
    "olmo_hybrid": {"layer_types": ["linear_attention", _FULL] * 2},
    "openelm": {
        "num_query_heads": [4] * 4,
        "num_kv_heads": [2] * 4,
        "ffn_dim_divisor": 32,
        "ffn_multipliers": [1.0, 1.5, 2.0, 2.0],
    },
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "gegelu_limit": 20.0,
        "num_key_value_heads": 2,
    },
    "plamo": {"num_attention_heads": 8, "n_shared_head": 4},
    "prism_hadamard_qwen35": {
        "num_experts": 0,
        "hidden_size": 128,
        "rope_parameters": _PLAIN_ROPE | {"type": "default"},
    },
    "qwen3_5": {"num_experts": 0, "rope_parameters": _PLAIN_ROPE | {"type": "default"}},
    "qwen3_5_moe": {"rope_parameters": _PLAIN_ROPE | {"type": "default"}},
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "block_types": ["recurrent", "attention"],
    },
    "rwkv7": {
        "head_dim": 32,
        "a_low_rank_dim": 16,
        "v_low_rank_dim": 16,
        "gate_low_rank_dim": 16,
        "decay_low_rank_dim": 16,
    },
    "spark2_5": {"rope_parameters": _BY_LAYER, "hidden_act": "gelu"},
}

# Beside the text model's settings.
AROUND: dict[str, dict[str, Any]] = {
    "gemma3": {"vocab_size": VOCABULARY},
    "gemma4": {"vocab_size": VOCABULARY},
    "prism_hadamard_qwen35": {
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": "model.layers.0.mlp.gate_proj", "embedding": False, "dtype": "float16", "block": 0}
        ],
    },
}


def modules() -> list[str]:
    """Every module of mlx-lm's models folder, its parts of models left out."""
    import mlx_lm.models

    found = (module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__))
    return sorted(name for name in found if name not in PARTS)


def load_module(name: str) -> Any:
    """mlx-lm's module of that name.

    Raises:
        ImportError: it does not import; what it printed is in the message.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            return importlib.import_module(f"mlx_lm.models.{name}")
    except SystemExit as error:  # one of them ends the process where a package is missing
        raise ImportError(printed.getvalue().strip() or "it ends the process") from error


def small_config(name: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a small model of that module."""
    inner = TEXT.get(name, (name, "ModelArgs"))
    sizes = _sized(getattr(load_module(inner[0]), inner[1]))
    config = {"model_type": inner[0]} | sizes | SETTINGS.get(name, {}) | changes
    config = {key: value for key, value in config.items() if value is not ...}
    if name not in TEXT:
        return config
    return {"model_type": name, "text_config": config} | AROUND.get(name, {})


def small_model(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """A model of `small_config`, float32, with weights wide enough for uneven distributions."""
    import mlx.core as mx
    import numpy as np
    from mlx.utils import tree_unflatten

    from grpo_fn.trees import named_leaves

    module = load_module(name)
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(small_config(name, **changes)))
    rng = np.random.default_rng(seed)
    leaves = []
    for path, leaf in named_leaves(model.parameters()).items():
        if not mx.issubdtype(leaf.dtype, mx.floating):
            continue
        noise = rng.normal(size=leaf.shape)
        wide = leaf.ndim >= 2 and "A_log" not in path and "conv" not in path
        values = noise / np.sqrt(leaf.shape[-1]) if wide else np.array(leaf.astype(mx.float32)) + 0.1 * noise
        leaves.append((path, mx.array(values, mx.float32)))
    model.update(tree_unflatten(leaves))
    mx.eval(model.parameters())
    return model


def _sized(kind: type) -> dict[str, Any]:
    return {field.name: SIZES[field.name] for field in dataclasses.fields(kind) if field.name in SIZES}
