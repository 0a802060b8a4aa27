"""Implements `grpo export --gguf`: writes a model for llama.cpp and programs based on llama.cpp,
using the `gguf` package.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from grpo_fn.trees import named_leaves
from runners.conversion.gguf.families import FAMILIES, Family, metadata_of, swap_pairs
from runners.conversion.gguf.header import gguf_package
from runners.conversion.gguf.tokenizers import tokenizer_metadata
from runners.errors import UserError, listed, show
from runners.files.durable import new_file

TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2, "q4_1": 3}
"""The types of weights, with llama.cpp's number for a file of each type."""


@attrs.frozen
class _Leaf:
    """The source of a tensor: a leaf of the module, or the rotation's factors."""

    name: str
    kind: str
    array: Any
    heads: int = 0  # number of heads whose rotated pairs are reordered
    offset: float = 0.0

    def data(self) -> np.ndarray:
        """Returns the values in float32."""
        found = np.array(mx.array(self.array).astype(mx.float32)) + np.float32(self.offset)
        return swap_pairs(found, self.heads, apart=False) if self.heads else found


def check_gguf(kind: str) -> Any:
    """Returns the `gguf` package. Raises UserError if the package is not installed, or for an
    unknown type.
    """
    if kind not in TYPES:
        raise UserError(f"--type {kind}: expected {listed([*TYPES])}")
    return gguf_package()


def write_gguf(
    file: Path,
    module: nn.Module,
    config: Mapping[str, Any],
    tokenizer: Any,
    kind: str,
    *,
    name: str,
    force: bool = False,
) -> None:
    """Writes a model as one file, atomically. The model has neither adapters nor packed layers.

    Matrices have the type `kind`, and all other tensors are float32. If `kind` has four bits, the
    token embedding and the output head have eight. Matrices whose row length is not a multiple of
    32 are float16. Raises UserError for a model that llama.cpp does not support or computes
    differently, and if writing fails.
    """
    gguf = check_gguf(kind)
    family = FAMILIES.get(str(config["model_type"]))
    if family is None:
        raise UserError(
            f"model_type: expected {listed([*FAMILIES])} for GGUF, found "
            f"{show(config['model_type'])}"
        )
    # Defaults are filled in by mlx-lm's module.
    inner: Any = getattr(module, "language_model", module)
    config = {**config, **(config.get("text_config") or {}), **vars(inner.args)}
    if family.arch == "llama" and "sliding_attention" in (config.get("layer_types") or ()):
        raise UserError("layer_types: llama.cpp does not support sliding windows for llama")
    sizes, factors = metadata_of(family, config)
    leaves = _leaves(module, family, config, kind, tied="lm_head" not in inner)
    leaves += [_Leaf(name, "F32", array) for name, array in factors.items()]
    rows = next(leaf.array.shape[0] for leaf in leaves if leaf.name == "token_embd.weight")
    metadata = {
        "general.name": name,
        "general.file_type": TYPES[kind],
        "general.quantization_version": 2,
        **sizes,
        f"{family.arch}.vocab_size": rows,
        **tokenizer_metadata(tokenizer, rows, sorted(tokenizer.eos_token_ids)),
    }
    with new_file(file, replace=force) as temporary:
        writer = gguf.GGUFWriter(str(temporary), family.arch)
        types = gguf.GGUFValueType
        for key, value in metadata.items():
            of = types.UINT32 if type(value) is int else types.get_type(value)
            writer.add_key_value(key, value, of)
        for leaf in leaves:
            shape = tuple(leaf.array.shape)
            raw = gguf.GGMLQuantizationType[leaf.kind]
            size = prod(gguf.quant_shape_to_byte_shape(shape, raw))
            writer.add_tensor_info(leaf.name, shape, np.dtype(np.float32), size, raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for leaf in leaves:
            data = leaf.data()
            if leaf.kind == "F16" and np.abs(data).max(initial=0) > np.finfo(np.float16).max:
                raise UserError(
                    f"{leaf.name}: values exceed float16's range; use --type bf16 or f32"
                )
            raw = gguf.GGMLQuantizationType[leaf.kind]
            writer.write_tensor_data(gguf.quants.quantize(data, raw))
        writer.close()


def _leaves(
    module: nn.Module, family: Family, config: Mapping[str, Any], kind: str, *, tied: bool
) -> list[_Leaf]:
    found = []
    names = family.names(config["num_hidden_layers"])
    for name, array in named_leaves(module.parameters()).items():
        stem, _, leaf = name.removeprefix("language_model.").rpartition(".")
        if stem not in names:
            raise UserError(f"{name}: llama.cpp's {family.arch} has no such tensor")
        theirs = f"{names[stem]}.{leaf}"
        if tied and theirs == "output.weight":
            continue
        part = theirs.split(".")[-2]
        of = kind.upper()
        if array.ndim < 2:
            of = "F32"
        elif of.startswith("Q") and array.shape[-1] % 32:
            of = "F16"
        elif of.startswith("Q4") and part in ("token_embd", "output"):
            of = "Q8_0"
        found.append(
            _Leaf(
                theirs,
                of,
                array,
                family.rotated_heads(theirs, config),
                family.norm_offset if "norm" in part else 0.0,
            )
        )
    return found
