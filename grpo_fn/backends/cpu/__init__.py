"""CPUs: the BLAS of a Linux machine, which importing this loads, and functions faster than MLX's own.

Does not import MLX, because the BLAS has to come first; `find` imports the submodules.
"""

from grpo_fn.backends.cpu.blas import Blas, load_blas, processor_flags

__all__ = ["MECHANISMS", "NUMBERS", "Blas", "load_blas", "processor_flags"]

load_blas()

# As `backends.mechanisms` describes them.
MECHANISMS = {
    "exp": ("elementwise", "exp", "on_cpu"),
    "sigmoid": ("elementwise", "sigmoid", "on_cpu"),
    "row_sum": ("elementwise", "row_sum", "on_cpu"),
    "softmax": ("elementwise", "softmax", "on_cpu"),
    "swiglu": ("elementwise", "swiglu", "on_cpu"),
    "swiglu_gradient": ("elementwise", "swiglu_gradient", "on_cpu"),
    "rms_norm": ("elementwise", "rms_norm", "on_cpu"),
    "attention": ("attention", "attention", "takes_sequences"),
    "rope": ("rotations", "rope", "takes_heads"),
    "weighted_values": ("elementwise", "weighted_values", ""),
    "gather_mm": ("elementwise", "gather_mm", ""),
    "add_at": ("elementwise", "add_at", ""),
}
NUMBERS = {
    "unpack_rows": 4,
    "shares_prompts": 1,
    "metal_kernels": 0,
    "logits": 2**22,
    "logit_rows": 96,
    "least_logits": 2**18,
    "trace": 2_500_000_000,
}
