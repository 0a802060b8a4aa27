"""Programs that MLX compiles at their first use on CUDA, each as a small computation that needs only it.

MLX (0.32) writes the source of every gather, scatter and fused chain of elementwise operations, and NVRTC
compiles it: two to five seconds on one core, one after another, and a first update needs some twenty.
Compiled programs are stored in a folder under the names used here, and other processes find them there. So
parallel processes can compile them ahead, while the model is loaded.

A name that this version of MLX does not use costs a process for nothing: `names` is for the versions that
pyproject.toml allows.
"""

import mlx.core as mx

_DTYPES = {name: getattr(mx, name) for name in ("bfloat16", "float16", "float32", "int32", "uint32", "int64")}
_DTYPES["bool"] = mx.bool_

# Reads of a table by an index: rows of embeddings and of log-probs, keys of random streams, positions.
_GATHERS = (
    "{0}_uint32_1", "{0}_int32_1", "{0}_int32_2", "uint32_uint32_1", "uint32_int32_1", "float32_uint32_1",
    "int32_uint32_1", "bool_int32_1", "int32_int32_1", "float32_int32_1",
)  # fmt: skip
# Results that are written into their rows, and gradients of reads.
_SCATTERS = (
    "float32_int64_Assign_2", "int32_int64_Assign_2", "int32_int32_Assign_1", "float32_int32_Sum_1",
    "float32_uint32_Sum_1", "{0}_int32_Sum_1",
)  # fmt: skip
_AXES = {
    "gather_axis_int32_int32": (mx.int32, mx.int32),
    "gather_axis_float32_uint32": (mx.float32, mx.uint32),
}
# The gate of an MLP, and the positions, in a decoding step.
_GATES = {
    f"C{code}ISigmoidAD{code}IMultiplyACE{code}OMultiplyDB_VV_{code}{code}_6142509188972423790": dtype
    for dtype, code in (("bfloat16", "V2"), ("float16", "f2"), ("float32", "f4"))
}
_POSITIONS = "Ci4IBroadcastBDi4OAddAC_VS_i4i4_6142509188972423790"


def names(dtype: str) -> tuple[str, ...]:
    """The programs of a rollout and a gradient in this compute dtype, by the names of MLX's files."""
    gathers = [f"gather_{each.format(dtype)}" for each in _GATHERS]
    scatters = [f"scatter_{each.format(dtype)}" for each in _SCATTERS]
    gates = [name for name, its_dtype in _GATES.items() if its_dtype == dtype]
    return tuple(dict.fromkeys([*gathers, *scatters, *_AXES, *gates, _POSITIONS]))


def compile_program(name: str) -> None:
    """Makes MLX compile one of `names` on the default device. ValueError for any other name."""
    if name in _GATES:
        ones = mx.ones((4, 4), _DTYPES[_GATES[name]])
        mx.eval(mx.compile(lambda gate, x: gate * mx.sigmoid(gate) * x)(ones, ones))
        return
    if name == _POSITIONS:
        mx.eval(mx.compile(lambda a, b: a + b)(mx.ones((4,), mx.int32), mx.array(1, mx.int32)))
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
