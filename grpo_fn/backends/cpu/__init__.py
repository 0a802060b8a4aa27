"""Linux on a CPU: its BLAS, which importing this loads. Imports no MLX, as the BLAS has to be there first."""

from grpo_fn.backends.cpu.blas import Blas, load_blas

__all__ = ["Blas", "load_blas"]

load_blas()
