"""`grpo convert FILE.gguf`: weights by mlx-lm's names, packed where the format is MLX's own."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from runners.conversion.gguf.families import FAMILIES, ROPE_FACTORS, config_of, swap_pairs
from runners.conversion.gguf.header import GGUF, Tensor, read_header
from runners.conversion.gguf.tokenizers import write_tokenizer
from runners.errors import UserError, show
from runners.files.json_files import write_json
from runners.machine.versions import install_hint

_PLAIN = {"F32": (np.float32, mx.float32), "F16": (np.float16, mx.float16), "BF16": (np.uint16, mx.bfloat16)}
_PACKED = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}  # bits of MLX's affine quantization in groups of 32
_GROUP = 32


def convert_gguf(file: Path, folder: Path, *, dequantize: bool) -> None:
    """Writes an mlx-lm folder from a GGUF file: weights, config.json and tokenizer.

    Packed weights of `_PACKED` stay packed, with the same numbers, unless `dequantize`. Others are unpacked
    by the `gguf` package. Raises UserError for a file that is broken or of an unknown kind.
    """
    header = read_header(file)
    arch = header.get("general.architecture", str)
    factors = {
        name: header.bytes_of(tensor).view(np.float32)
        for name in ROPE_FACTORS
        if (tensor := header.tensors.get(name)) and tensor.kind == "F32"
    }
    if "output.weight" in header.tensors and arch == "gemma2":
        raise UserError(f"{file}: expected a gemma2 without a head of its own")
    try:
        config = config_of(arch, header.get, "output.weight" in header.tensors, factors)
    except UserError as error:
        raise error if str(file) in str(error) else UserError(f"{file}: {error}") from error
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[1] != config["hidden_size"]:
        raise UserError(f"{file}: token_embd.weight: expected [vocabulary, {config['hidden_size']}]")
    blocks = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    if len(blocks) != config["num_hidden_layers"]:
        raise UserError(f"{file}: block_count: {config['num_hidden_layers']}, found {len(blocks)} blocks")
    config["vocab_size"] = embedding.shape[0]
    if arch == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    dtype = _dtype(header)
    config["torch_dtype"] = str(dtype).removeprefix("mlx.core.")
    weights: dict[str, mx.array] = {}
    packed: dict[str, int] = {}
    family = FAMILIES[config["model_type"]]
    names = {theirs: ours for ours, theirs in family.names(config["num_hidden_layers"]).items()}
    for name, tensor in header.tensors.items():
        if name in ROPE_FACTORS:
            continue
        part, _, leaf = name.rpartition(".")
        if (stem := names.get(part)) is None:
            raise UserError(f"{file}: {config['model_type']} has no tensor {show(name)}")
        count = family.rotated_heads(name, config)
        if count and tensor.shape[0] % (2 * count):
            raise UserError(
                f"{file}: {show(name)}: expected {count} heads of an even size, found {tensor.shape}"
            )
        if tensor.kind in _PACKED and len(tensor.shape) == 2 and not dequantize:
            packed[stem] = _PACKED[tensor.kind]
            leaves = dict(zip(("weight", "scales", "biases"), _unpack(header, tensor), strict=True))
        else:
            array = _array(header, tensor, dtype, family.norm_offset if "norm" in name else 0.0)
            leaves = {leaf: array}
        for leaf, array in leaves.items():
            weights[f"{stem}.{leaf}"] = swap_pairs(array, count, apart=True) if count else array
    if packed:
        usual = Counter(packed.values()).most_common(1)[0][0]
        form = {"group_size": _GROUP, "bits": usual, "mode": "affine"}
        config["quantization"] = form | {
            name: {**form, "bits": bits} for name, bits in packed.items() if bits != usual
        }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    write_json(folder / "config.json", config)
    write_tokenizer(header, folder)


def _dtype(header: GGUF) -> Any:
    """That of the unpacked matrices; where there are none, half precision, which is what blocks scale by."""
    kinds = Counter(t.kind for t in header.tensors.values() if len(t.shape) == 2 and t.kind in _PLAIN)
    packed = any(t.kind not in _PLAIN for t in header.tensors.values())
    return mx.float16 if packed or not kinds else _PLAIN[kinds.most_common(1)[0][0]][1]


def _array(header: GGUF, tensor: Tensor, dtype: Any, offset: float) -> mx.array:
    """A tensor as numbers of the dtype, `offset` less."""
    if tensor.kind in _PLAIN:
        kind, named = _PLAIN[tensor.kind]
        found = mx.array(header.bytes_of(tensor).view(kind).reshape(tensor.shape))
        found = found.view(named) if tensor.kind == "BF16" else found
    elif tensor.kind in _PACKED and len(tensor.shape) == 2:
        weight, scales, biases = _unpack(header, tensor)
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        found = mx.dequantize(weight, scales, biases, group_size=_GROUP, bits=_PACKED[tensor.kind])
    else:
        try:
            gguf: Any = importlib.import_module("gguf")
        except ImportError as error:
            raise UserError(f"{header.file}: {tensor.kind} needs gguf: {install_hint('gguf')}") from error
        rows = header.bytes_of(tensor).reshape(*tensor.shape[:-1], -1)
        found = mx.array(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[tensor.kind]))
    return (found.astype(mx.float32) - offset if offset else found).astype(dtype)


def _unpack(header: GGUF, tensor: Tensor) -> tuple[mx.array, mx.array, mx.array]:
    """Blocks of 32 as MLX packs them: w = scale · q + bias with q from 0, the first weight in the low bits.

    Q8_0 and Q4_0 have q around 0 and no bias; Q4_1 has both. A block's four-bit weights stand as 0…15 in the
    low halves of its bytes and 16…31 in the high ones.
    """
    rows = tensor.shape[0]
    blocks = header.bytes_of(tensor).reshape(rows, tensor.shape[1] // _GROUP, -1)
    wide = 4 if tensor.kind == "Q4_1" else 2
    halves = np.ascontiguousarray(blocks[..., :wide]).view(np.float16)
    scales, quants = halves[..., 0], blocks[..., wide:]
    if tensor.kind == "Q8_0":
        quants = quants ^ 0x80
    else:
        each = np.concatenate([quants & 15, quants >> 4], axis=-1)
        quants = each[..., ::2] | each[..., 1::2] << 4
    with np.errstate(over="ignore"):  # infinite ones are refused with the weight's name
        biases = halves[..., 1] if wide == 4 else scales * np.float16(-128 if tensor.kind == "Q8_0" else -8)
    packed = np.ascontiguousarray(quants).reshape(rows, -1).view(np.uint32)
    return mx.array(packed), mx.array(scales), mx.array(biases)
