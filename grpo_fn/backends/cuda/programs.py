"""Compiles programs that MLX would compile at their first use on CUDA; a small computation triggers
each of them.

MLX (0.32) generates the source of every gather, scatter and fused chain of elementwise operations,
and NVRTC compiles it. Each program takes two to six seconds on one core, and the first update
requires about thirty. Compiled programs are stored in a folder under the names used here, where
other processes find them, so parallel processes can compile them while the model is loaded.

A name that this version of MLX does not use wastes a process; `names` matches the versions that
pyproject.toml allows.
"""

from collections.abc import Callable

import mlx.core as mx

_DTYPES = {
    name: getattr(mx, name)
    for name in ("bfloat16", "float16", "float32", "int32", "uint32", "int64")
}
_DTYPES["bool"] = mx.bool_

# Reads from a table by index: rows of embeddings and log-probs, keys of random streams, positions.
_GATHERS = (
    "{0}_uint32_1", "{0}_int32_1", "{0}_int32_2", "uint32_uint32_1", "uint32_int32_1",
    "float32_uint32_1", "int32_uint32_1", "bool_int32_1", "int32_int32_1", "float32_int32_1",
)  # fmt: skip
# Results that are written to their rows, and gradients of reads.
_SCATTERS = (
    "float32_int64_Assign_2", "int32_int64_Assign_2", "int32_int32_Assign_1", "float32_int32_Sum_1",
    "float32_uint32_Sum_1", "{0}_int32_Sum_1",
)  # fmt: skip
_AXES = {
    "gather_axis_int32_int32": (mx.int32, mx.int32),
    "gather_axis_float32_uint32": (mx.float32, mx.uint32),
    "gather_axis_float32_int32": (mx.float32, mx.int32),
}
_CODES = {"bfloat16": "V2", "float16": "f2", "float32": "f4"}
_FLOATS = ((4, 8), mx.float32)
_INTEGERS = ((4, 8), mx.int32)
_WORDS = ((4, 1), mx.uint32)
_FLOAT = ((4, 1), mx.float32)  # for each row
_INTEGER = ((4, 1), mx.int32)


def _counts(weights: mx.array, total: mx.array) -> mx.array:
    return mx.where(
        weights > 0, (weights * mx.where(total > 0, 2.0**30 / total, 0.0)).astype(mx.int32) + 1, 0
    )


def _not_above(upto: mx.array, most: mx.array, word: mx.array) -> mx.array:
    wanted = ((most.astype(mx.uint64) * word) >> 32).astype(mx.int32)
    return upto <= mx.where(most > 0, wanted, -1)


# Chains of elementwise operations: a compiled computation, and its arguments as (shape, dtype). {0}
# is the compute dtype's code, and None stands for that dtype. The last number in a name stands for
# the constants.
_CHAINS: dict[
    str, tuple[Callable[..., mx.array], tuple[tuple[tuple[int, ...], mx.Dtype | None], ...]]
] = {
    # The gate of an MLP and the positions, in a decoding step.
    "C{0}ISigmoidAD{0}IMultiplyACE{0}OMultiplyDB_VV_{0}{0}_6142509188972423790": (
        lambda gate, x: gate * mx.sigmoid(gate) * x,
        (((4, 4), None), ((4, 4), None)),
    ),
    "Ci4IBroadcastBDi4OAddAC_VS_i4i4_6142509188972423790": (
        lambda a, b: a + b,
        (((4,), mx.int32), ((), mx.int32)),
    ),
    # Sampling a token: softmax, counts, the index in them, and the token's log-prob, as in
    # rollout/sampling.py.
    "Cf4IBroadcastBDf4OSubtractAC_VV_f4f4_6142509188972423790": (
        lambda z, top: z - top,
        (_FLOATS, _FLOAT),
    ),
    "Cf4IBroadcastBDf4ISubtractACEf4OExpD_VV_f4f4_6142509188972423790": (
        lambda z, top: mx.exp(z - top),
        (_FLOATS, _FLOAT),
    ),
    "Cf4ILogBDf4OSubtractAC_VV_f4f4_6142509188972423790": (
        lambda z, total: z - mx.log(total),
        (_FLOAT, _FLOAT),
    ),
    "Bf4ILogACf4ONegativeB_V_f4_6142509188972423790": (lambda p: -mx.log(p), (_FLOATS,)),
    "Gf4IBroadcastBHb1IGreaterAGIf4IBroadcastBJb1IGreaterCIKf4IBroadcastDLf4IDivideKCMf4ISelectJLIN"
    "f4IBroadcastMOf4IMultiplyANPi4IAsTypeOQi4IBroadcastERi4IAddPQSi4IBroadcastFTi4OSelectHRS_VCVC"
    "CC_f4f4_13610897302297541540": (_counts, (_FLOATS, _FLOAT)),
    "Gi4IBroadcastCHb1IGreaterBGIu8IAsTypeBJu8IAsTypeDKu8IMultiplyIJLu8IBroadcastEMu8IRightShiftKLN"
    "i4IAsTypeMOi4IBroadcastFPi4ISelectHNOQi4IBroadcastPRb1OLessEqualAQ_VVCVCC_i4i4u"
    "4_12043668613759322838": (
        _not_above,
        (_INTEGERS, _INTEGER, _WORDS),
    ),
    "Di4IBroadcastBEi4IMultiplyADFi4OAddEC_VCV_i4i4_1445746576257050122": (
        lambda place, inside: place * 32 + inside,
        (_INTEGER, _INTEGER),
    ),
}


def names(dtype: str) -> tuple[str, ...]:
    """Returns the names, as in MLX's cache, of the programs that a rollout and a gradient need in
    this compute dtype.
    """
    gathers = [f"gather_{each.format(dtype)}" for each in _GATHERS]
    scatters = [f"scatter_{each.format(dtype)}" for each in _SCATTERS]
    chains = [chain.format(_CODES[dtype]) for chain in _CHAINS]
    return tuple(dict.fromkeys([*chains, *gathers, *scatters, *_AXES]))  # the slowest first


def compile_program(name: str) -> None:
    """Makes MLX compile one of `names` on the default device. Raises ValueError for any other
    name."""
    for dtype, code in _CODES.items():
        for chain, (function, arguments) in _CHAINS.items():
            if chain.format(code) == name:
                ones = [mx.ones(shape, its or _DTYPES[dtype]) for shape, its in arguments]
                mx.eval(ones)
                mx.eval(mx.compile(function)(*ones))
                return
    if name in _AXES:
        table, index = (mx.zeros((4, 4), dtype) for dtype in _AXES[name])
        mx.eval(mx.take_along_axis(table, index[:, :1], axis=1))
        return
    kind, *parts = name.split("_")
    if kind not in ("gather", "scatter") or len(parts) not in (3, 4):
        raise ValueError(f"found {name!r}, expected one of names(dtype)")
    table = mx.zeros((4, 4), _DTYPES[parts[0]])
    index = mx.zeros((2,), _DTYPES[parts[1]])
    at = index if parts[-1] == "1" else (index, index)
    if kind == "gather":
        mx.eval(table[at])
    elif parts[2] == "Sum":
        mx.eval(table.at[at].add(mx.ones_like(table[:2])))
    else:
        table[at] = mx.ones_like(table[:2] if parts[-1] == "1" else table[0, :2])
        mx.eval(table)
