"""Faster forms for one kind of device; they change no result beyond rounding.

`find(name, *arguments)` gives this machine's fast function for a named operation, or None: the caller then
computes the composed form. Code outside this folder imports neither `backends.cpu` nor `backends.cuda`, and
does not ask for the device; this folder imports only the root helpers. Importing it does not load MLX: on
Linux the BLAS of `backends.cpu` has to come first.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_fn.backends.cpu.blas import Blas, load_blas, processor_flags
    from grpo_fn.backends.cuda.programs import names as cuda_programs
    from grpo_fn.backends.mechanisms import (
        OPERATIONS,
        SWITCHES,
        check_mechanism,
        disable,
        disabled,
        disabled_names,
        enabled,
        find,
        number,
        substituted,
    )

__all__ = [
    "OPERATIONS",
    "SWITCHES",
    "Blas",
    "check_mechanism",
    "cuda_programs",
    "disable",
    "disabled",
    "disabled_names",
    "enabled",
    "find",
    "load_blas",
    "number",
    "processor_flags",
    "substituted",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "cuda_programs":
        from grpo_fn.backends.cuda.programs import names

        return names
    if name in ("Blas", "load_blas", "processor_flags"):
        import grpo_fn.backends.cpu as owner
    else:
        import grpo_fn.backends.mechanisms as owner
    return getattr(owner, name)
