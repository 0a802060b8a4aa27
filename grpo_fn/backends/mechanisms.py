"""Finds this machine's fast function for a named operation. This module is the backends' only
interface.

A backend is a folder next to this file, named after its device. A backend's `__init__` contains two
tables: MECHANISMS maps the name of an operation to (submodule, attribute, predicate), and NUMBERS
contains the constants that differ from those below. The predicate is a function of the submodule
that checks whether the mechanism supports the arguments of `find`; "" means that it supports all
arguments. Submodules are imported at their first use.
"""

import difflib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.compile import Compiled, compiled

# Every operation that a backend may implement, with the arguments for `find`.
OPERATIONS = {
    "exp": "(x): e^x",
    "row_sum": "(x): Σ x along the last axis",
    "softmax": "(x): softmax along the last axis",
    "swiglu": "(gate, x): silu(gate) · x",
    "swiglu_gradient": "(gate, x, cotangent): the gradients of gate and x",
    "rms_norm": "(x, weight): RMSNorm along the last axis",
    "attention": "(queries, keys, mask): attention over whole sequences",
    "weighted_values": "(weights, values): the product of attention weights and values",
    "gather_mm": "(): products with chosen experts, in any floating dtype",
    "row_logprobs": "(dtype): log-probs and entropies from the products with a head's matrix",
    "row_gradients": "(dtype): their gradient in these products",
    "add_at": "(array): one number added in each row",
    "round_columns": "(): a block's columns are rounded one after another, errors carried on",
    "group_ranges": "(): the range of each group of weights with the least error",
    "decode_blocks": "(): a context manager (module, rows); a decoder in a form for decoding them",
    "kernel_steps": "(): DecodeProgram; over one copy of each prompt, rows in any order",
}
# Mechanisms in other folders for speed or memory, which check `enabled`.
SWITCHES = {
    "patched_layers": (
        "mlx-lm's layers call this library's functions; required by most other mechanisms"
    ),
    "shared_prefix": (
        "rollouts are decoded over one copy of each prompt, if this is faster on the machine"
    ),
    "row_compaction": "rows that have ended leave the batch",
    "merged_adapters": "LoRA's and DoRA's adapters are merged into the weights while a model "
    "samples",
    "unpacked_weights": "packed weights are unpacked to full size while a model samples",
    "unpacked_products": "a packed weight is unpacked for a product of several rows",
    "logit_chunks": "the learner computes logits one chunk at a time",
    "inactive_rows": "completions without a gradient are omitted from the learner's batch",
    "chunked_gated_delta": (
        "the gated delta rule over whole sequences is computed one chunk of tokens at a time"
    ),
    "checkpointed_mlps": "CUDA: gated MLPs recompute their inner activations in the learner's "
    "backward pass",
    "leafwise_update": "the optimizer updates one leaf at a time instead of all leaves at once",
    "programs_ahead": (
        "programs for CUDA, and the header of programs for a CPU, are compiled while a model is "
        "loaded"
    ),
}
# The constants for devices on which none was measured.
NUMBERS: dict[str, int] = {
    "unpack_rows": 0,  # rows from which a packed weight is unpacked before a product; 0: never
    "merged_16_bits": 0,  # most bytes of 16-bit weights into which adapters are merged
    "shares_prompts": 0,  # 1: decoding over one copy of each prompt was measured to be faster
    "block_rows": 0,  # most rows that are decoded over weights in blocks
    "block_bytes": 2**31,  # most bytes of these blocks, which are a second copy
    "metal_kernels": 1,  # 1: some of mlx-lm's layers use Metal kernels, which have no gradient
    "gpu_collectives": 0,  # 1: ranks sum on the GPU (NCCL)
    "fuses_learner": 1,  # 0: the learner's compiled steps keep their operations unfused
    # Number of float32 logits that the learner keeps at a time. A CPU needs few, which fit in its
    # cache; a GPU needs many, because each chunk adds to the head's whole gradient.
    "logits": 2**25,
    "logit_rows": 2**31,  # most rows per chunk
    "least_logits": 0,  # fewest logits, whatever the number of rows
    # Parameters × tokens whose gradient takes as long as tracing a gradient step.
    "trace": 500_000_000_000,
    "launch": 0,  # the same for launching a micro-batch; 0: a constant number of tokens
    # For memory forecasts:
    "checkpoints_mlps": 0,  # 1: the products of an MLP are cheaper than the memory to save them
    "gate_arrays": 0,  # arrays in a gated MLP's gradient, beyond those of the composed forms
    "keeps_scores": 1,  # 0: 16-bit attention does not store scores
    # arrays for a chunk's products with the head and their gradients; 0: the composed forms
    "product_arrays": 0,
}
_FOLDERS = ("cpu", "cuda")
_replaced: dict[str, Any] = {}  # by tests and benchmarks; None means disabled


class DecodeProgram(NamedTuple):
    """Decoding steps that a policy compiles."""

    steps: Callable[..., Any]  # the class of the steps, like `rollout.decode_step.Steps`
    # function that the policy compiles for the steps; its first argument is `Policy.bound`
    forward: Callable[..., Any]
    # whether a model with these caches can be called in this way
    takes: Callable[[nn.Module, list[Any]], bool]


def backend() -> str:
    """Returns the computing device: "cpu", "cuda" or "metal"."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def has_cuda() -> bool:
    """Returns whether the computing device is a CUDA device."""
    return backend() == "cuda"


def find(name: str, *arguments: Any) -> Any:
    """Returns this machine's fast function for an operation and these arguments, or None if the
    caller must compute the composed form.

    Raises:
        ValueError: `OPERATIONS` has no such name.
    """
    if name in _replaced:
        return _replaced[name]
    mechanism = load(backend(), name)
    if mechanism is None:
        return None
    module, attribute, predicate = mechanism
    # Looked up at each call, because tests replace these attributes.
    if predicate and not getattr(module, predicate)(*arguments):
        return None
    return getattr(module, attribute)


def number(name: str) -> int:
    """Returns a constant that was measured on this kind of device; `NUMBERS` lists the names."""
    return {**NUMBERS, **getattr(_folder(backend()), "NUMBERS", {})}[name]


def compiled_step(function: Callable[..., Any], *, enabled: bool = True) -> Compiled:
    """Compiles a large step. On CUDA, operations are not fused, because compiling the eighty fused
    kernels of a gradient would take minutes, and the main gain of a compiled step is that it skips
    Python.
    """
    return compiled(function, enabled=enabled, fuse=bool(number("fuses_learner")))


def enabled(name: str) -> bool:
    """Returns whether this switch, one of `SWITCHES`, is on.

    Raises:
        ValueError: `SWITCHES` does not contain the name.
    """
    _check(name, SWITCHES)
    return name not in _replaced


def disabled_names() -> tuple[str, ...]:
    """Returns the names of the disabled mechanisms, in alphabetical order."""
    return tuple(sorted(name for name, function in _replaced.items() if function is None))


def check_mechanism(name: str) -> None:
    """Raises ValueError, with the nearest name, if neither `OPERATIONS` nor `SWITCHES` contains the
    name."""
    _check(name, OPERATIONS | SWITCHES)


def disable(*names: str) -> None:
    """Turns mechanisms off for the rest of the process; see `disabled`."""
    for name in names:
        check_mechanism(name)
    _replaced.update(dict.fromkeys(names))


def disabled(*names: str) -> AbstractContextManager[None]:
    """Turns mechanisms (names of `OPERATIONS` or `SWITCHES`) off inside the `with` block.

    Layers that were already patched and steps that were already compiled do not change, so create
    the policy inside the block.
    """
    return substituted(**dict.fromkeys(names))


@contextmanager
def substituted(**functions: Any) -> Iterator[None]:
    """Replaces the results of `find` by these functions, for all arguments; for tests."""
    for name in functions:
        check_mechanism(name)
    saved = dict(_replaced)
    _replaced.update(functions)
    try:
        yield
    finally:
        _replaced.clear()
        _replaced.update(saved)


def _check(name: str, names: Iterable[str]) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, 1, 0)
        raise ValueError(f"no mechanism {name!r}; the nearest name is {near[0]!r}")


@functools.cache
def _folder(device: str) -> Any:
    name = f"grpo_fn.backends.{device}"
    try:
        return importlib.import_module(name) if device in _FOLDERS else None
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None  # a backend whose folder was deleted


@functools.cache
def load(device: str, name: str) -> tuple[Any, str, str] | None:
    """Imports the submodule in which a device's backend computes an operation; returns it with the
    names of the function and the predicate ("" for none).
    """
    _check(name, OPERATIONS)
    folder = _folder(device)
    if folder is None or name not in folder.MECHANISMS:
        return None
    submodule, attribute, predicate = folder.MECHANISMS[name]
    return importlib.import_module(f"grpo_fn.backends.{device}.{submodule}"), attribute, predicate
