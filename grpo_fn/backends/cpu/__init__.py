"""The CPU backend: functions that are faster than MLX's own, and a BLAS, which is loaded when this
package is imported on Linux.

This package does not import MLX, because the BLAS must be loaded first; `find` imports the
submodules.
"""

from grpo_fn.backends.cpu.blas import Blas, load_blas, processor_flags

__all__ = ["MECHANISMS", "NUMBERS", "Blas", "load_blas", "processor_flags"]

load_blas()

# As `backends.mechanisms` describes them.
MECHANISMS = {
    **{
        name: ("elementwise", name, "on_cpu")
        for name in ("exp", "row_sum", "softmax", "swiglu", "swiglu_gradient", "rms_norm")
    },
    **{name: ("elementwise", name, "") for name in ("weighted_values", "gather_mm", "add_at")},
    "attention": ("attention", "attention", "takes_sequences"),
    "decode_blocks": ("few_rows", "decode_blocks", "has_small_products"),
}
NUMBERS = {
    "unpack_rows": 4,
    "shares_prompts": 1,
    "block_rows": 8,  # for 16 rows, the copy costs as much as it saves
    "metal_kernels": 0,
    "logits": 2**22,
    "logit_rows": 96,
    "least_logits": 2**18,
    "trace": 2_500_000_000,
}
