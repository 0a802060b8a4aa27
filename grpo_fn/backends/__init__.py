"""Faster implementations of some operations, one folder per kind of device; results differ only by
rounding.

`find(name, *arguments)` returns this machine's fast function for a named operation. If `find`
returns None, the caller computes the composed form. Code outside this folder imports neither
`backends.cpu` nor `backends.cuda`, and does not check the device; this folder imports only the root
helpers. Either folder can be deleted.
"""

from importlib.util import find_spec

if find_spec("grpo_fn.backends.cpu"):
    # First: on Linux its BLAS has to be loaded before MLX, which all others import.
    from grpo_fn.backends.cpu import Blas, load_blas, processor_flags
if find_spec("grpo_fn.backends.cuda"):
    from grpo_fn.backends.cuda.programs import compile_program as compile_cuda_program
    from grpo_fn.backends.cuda.programs import names as cuda_programs
from grpo_fn.backends.mechanisms import (
    OPERATIONS,
    SWITCHES,
    check_mechanism,
    compiled_step,
    disable,
    disabled,
    disabled_names,
    enabled,
    find,
    number,
    substituted,
)
