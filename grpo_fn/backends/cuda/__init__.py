"""The backend for NVIDIA GPUs: custom kernels, and steps that are launched ahead of the device.

This package does not import MLX; `find` imports the submodules.
"""

__all__ = ["MECHANISMS", "NUMBERS"]

# As `backends.mechanisms` describes them.
MECHANISMS = {
    "row_logprobs": ("logit_kernels", "row_logprobs", "takes_dtype"),
    "row_gradients": ("logit_kernels", "row_gradients", "takes_dtype"),
    "round_columns": ("rounding_kernel", "round_columns", "tensor_cores"),
    "group_ranges": ("rounding_kernel", "group_ranges", ""),
    "decode_blocks": ("decoding.decode_blocks", "decode_blocks", ""),
    "kernel_steps": ("decoding.kernel_steps", "PROGRAM", ""),
}
NUMBERS = {
    "unpack_rows": 8,  # measured at 1, 16 and 128 rows
    "merged_16_bits": 2**32,
    "shares_prompts": 1,
    "metal_kernels": 0,
    "gpu_collectives": 1,
    "fuses_learner": 0,  # each fused kernel takes seconds to compile
    "logits": 2**27,
    # H100, SmolLM2-135M with LoRA, 190,000 tokens/s: 0.18 s for another micro-batch and 0.35 s for
    # a new shape, half of which counts, because the next steps use the shape again.
    "trace": 4_500_000_000_000,
    "launch": 4_500_000_000_000,
    # In a LoRA run on Qwen2.5-0.5B, each token of a micro-batch takes 1.16 MB (H200, between 4,096
    # and 8,192 tokens).
    "checkpoints_mlps": 1,
    "gate_arrays": 2,
    "keeps_scores": 0,  # cuDNN's attention
    "product_arrays": 4,  # arrays of one chunk and the next; see `logit_kernels`
}
