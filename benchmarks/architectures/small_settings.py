"""Sizes of small models, by the names of their settings.

mlx-lm's modules use the same names for their settings: `SIZES` contains a small value for each
name, and `SETTINGS` the additional or different values of single modules. A module without an entry
is built from `SIZES` only, so new modules of mlx-lm are tested as well.
"""

from __future__ import annotations

import ast
from typing import Any

VOCABULARY = 96

_FULL, _SLIDING = "full_attention", "sliding_attention"
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_NUMBERS = """
# vocabulary
96 vocab_size num_vocab vocab_size_per_layer_input
# widths
64 hidden_size hidden_dim d_model model_dim n_embd
96 intermediate_size ffn_hidden_size ff_intermediate_size intermediate_size_mlp
96 dense_intermediate_size n_inner
32 moe_intermediate_size expert_ffn_hidden_size shared_intermediate_size
32 shared_expert_intermediate_size moe_shared_expert_intermediate_size share_expert_dim
32 moe_hidden_size hidden_size_per_layer_input
# depth
4 num_hidden_layers num_layers n_layers n_layer num_transformer_layers
# heads
4 num_attention_heads num_heads n_heads n_head num_query_heads swa_num_attention_heads
2 num_key_value_heads num_kv_heads n_kv_heads n_kv_head num_attention_groups
2 swa_num_key_value_heads
16 head_dim swa_head_dim swa_v_head_dim global_head_dim hidden_size_per_head kv_channels
8 rotary_dim
# latent attention
32 kv_lora_rank q_lora_rank o_lora_rank index_head_dim
2 o_groups index_n_heads
16 qk_rope_head_dim qk_nope_head_dim v_head_dim
8 index_topk
# experts
4 num_experts num_local_experts n_routed_experts moe_num_experts
2 num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k_experts
1 n_shared_experts num_shared_experts num_shared_expert moe_num_shared_experts n_group
1 topk_group num_expert_group first_k_dense_replace num_dense_layers moe_layer_freq
1 decoder_sparse_step zero_expert_num
True norm_topk_prob
1.0 routed_scaling_factor
# recurrent states
16 state_size ssm_state_size mamba_d_state mamba_d_head mamba_head_dim
4 conv_kernel time_step_rank mamba_d_conv linear_num_value_heads linear_conv_kernel_dim
4 short_conv_kernel_size
2 mamba_expand linear_num_key_heads conv_window full_attention_interval layer_group_size
2 group_norm_size
8 mamba_n_heads mamba_num_heads
128 mamba_d_ssm
1 mamba_n_groups n_groups
False mamba_proj_bias use_bias
True mamba_conv_bias use_conv_bias linear_allow_neg_eigval conv_bias
32 linear_key_head_dim linear_value_head_dim
3 conv_L_cache
# windows: shorter than the rows that are tried
6 sliding_window sliding_window_size window_size attention_window_size
2 sliding_window_pattern
# norms, positions, the rest
1e-05 rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps norm_epsilon
1e-05 post_norm_eps
10000.0 rope_theta swa_rope_theta
10000 rotary_emb_base
0.5 rotary_pct partial_rotary_factor residual_multiplier
512 max_position_embeddings model_max_length n_positions n_ctx block_size
16 query_pre_attn_scalar
False attention_bias qkv_bias mlp_bias use_qkv_bias post_norm tie_word_embeddings
True use_qk_norm qk_norm mla_scale_q_lora mla_scale_kv_lora
2.0 logits_scaling embedding_multiplier scale_emb
0.25 attention_multiplier
32 dim_model_base
1.4 scale_depth
"""
"""A value and the names of settings in each line."""
_LINES = [line.split() for line in _NUMBERS.splitlines() if line and not line.startswith("#")]
SIZES: dict[str, Any] = {
    **{name: ast.literal_eval(value) for value, *names in _LINES for name in names},
    "mlp_only_layers": [],
    "zero_expert_type": "identity",
    "time_step_limit": (0.001, 100.0),
    "layer_types": [_SLIDING, _FULL] * 2,
    "sliding_window_layers": [0, 2],
    "rope_parameters": _PLAIN_ROPE,
    "rope_scaling": None,
    "hidden_act": "silu",
    "attention_method": "MLA",
    "scoring_func": "sigmoid",
    "score_function": "sigmoid",
    "topk_method": "noaux_tc",
}

# fmt: off
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
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}},
    "deepseek_v2": {"rope_scaling": _YARN | {"type": "yarn"}},
    "deepseek_v41": {"compress_ratios": [], "num_hidden_layers": 2},
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"is_moe_layer": [False, True] * 2},
    "gemma2": {"final_logit_softcapping": 5.0},
    "gemma3": {"model_type": "gemma3_text", "num_key_value_heads": 1},
    "gemma3n": {"model_type": "gemma3n_text", "num_hidden_layers": 6, "intermediate_size": [96] * 6,
        "layer_types": [_SLIDING, _FULL] * 3, "num_kv_shared_layers": 2,
        "rope_local_base_freq": 10000.0, "final_logit_softcapping": 30.0,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0], "altup_num_inputs": 2,
        "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_active_idx": 0,
        "laurel_rank": 8},
    "gemma4": {"model_type": "gemma4_text", "num_kv_shared_layers": 2,
        "rope_parameters": _BY_LAYER},
    "gemma4_text": {"num_kv_shared_layers": 2, "rope_parameters": _BY_LAYER},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan": {"use_mixed_mlp_moe": True, "use_cla": True, "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1,
        "expert_layer_period": 2},
    "kimi_k3": {"linear_attn_config": _KDA, "activation_situ_beta": 1.0, "attn_res_block_size": 2,
        "hidden_act": "situ"},
    "kimi_linear": {"linear_attn_config": _KDA},
    "lfm2": _LFM2,
    "lfm2-vl": _LFM2,
    "lfm2_moe": {"layer_types": _EVERY_OTHER, "use_expert_bias": True},
    "llama4": {"attention_chunk_size": 8, "interleave_moe_layer_step": 2, "num_experts_per_tok": 1,
        "model_type": "llama4_text"},
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "llama": {"layer_types": ...},
    "mellum": {"rope_parameters": _BY_LAYER},
    "mimo_v2_flash": {"hybrid_layer_pattern": [1, 0] * 2, "moe_layer_freq": [0, 1] * 2,
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False},
    "minicpm3": {"rope_scaling": {"original_max_position_embeddings": 128}},
    "minimax_m3_vl": {"moe_layer_freq": [0, 1] * 2, "layer_types": ..., "num_local_experts": 4},
    "ministral3": {"rope_parameters": _YARN},
    "mistral3": {"model_type": "llama"},
    "mistral4": {"rope_parameters": _YARN},
    "muse_spark": {"layer_rope_theta": [10000.0, 0.0] * 2, "final_logit_softcapping": 20.0,
        "output_multiplier": 0.5, "num_shared_experts": 0},
    "nemotron-nas": {
        "block_configs": [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}}] * 2
        + [{"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}}] * 2},
    "nemotron_h": {"layer_types": ..., "hybrid_override_pattern": ["M", "*", "E", "-"]},
    "olmo_hybrid": {"layer_types": ["linear_attention", _FULL] * 2},
    "openelm": {"num_query_heads": [4] * 4, "num_kv_heads": [2] * 4, "ffn_dim_divisor": 32,
        "ffn_multipliers": [1.0, 1.5, 2.0, 2.0]},
    "phi3small": {"dense_attention_every_n_layers": 2, "gegelu_limit": 20.0,
        "num_key_value_heads": 2, "vocab_size": 100352},  # it writes at these ids
    "plamo": {"num_attention_heads": 8, "n_shared_head": 4},
    "prism_hadamard_qwen35": {"num_experts": 0, "hidden_size": 128,
        "rope_parameters": _PLAIN_ROPE | {"type": "default"}},
    "qwen3_5": {"num_experts": 0, "rope_parameters": _PLAIN_ROPE | {"type": "default"}},
    "qwen3_5_moe": {"rope_parameters": _PLAIN_ROPE | {"type": "default"}},
    "recurrent_gemma": {"conv1d_width": 4, "logits_soft_cap": 30.0,
        "block_types": ["recurrent", "attention"]},
    "rwkv7": {"head_dim": 32, "a_low_rank_dim": 16, "v_low_rank_dim": 16, "gate_low_rank_dim": 16,
        "decay_low_rank_dim": 16},
    "spark2_5": {"rope_parameters": _BY_LAYER, "hidden_act": "gelu"},
}
# fmt: on

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
