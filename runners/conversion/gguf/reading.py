"""Implements `grpo convert FILE.gguf`: reads weights under mlx-lm's names, and keeps weights packed
if MLX supports their format.
"""

from math import prod
from pathlib import Path

import mlx.core as mx
import numpy as np

from runners.conversion.gguf.families import FAMILIES, ROPE_FACTORS, config_of, swap_pairs
from runners.conversion.gguf.header import GGUF, Tensor, gguf_package, read_header
from runners.conversion.gguf.tokenizers import write_tokenizer
from runners.errors import UserError, first_line, show, user_errors
from runners.files.json_files import write_json

_DTYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
_PACKED = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}  # bits of MLX's affine quantization in groups of 32
_GROUP = 32


def convert_gguf(file: Path, folder: Path, *, dequantize: bool) -> None:
    """Writes an mlx-lm folder from a GGUF file: weights, config.json and tokenizer.

    If most weights are packed in one of the formats `_PACKED`, these weights stay packed with the
    same values, unless `dequantize` is set. The `gguf` package unpacks all other weights. Raises
    UserError for a damaged or unsupported file.
    """
    # an unsupported shape, or a type that gguf only names
    with user_errors(str(file), UserError, ValueError, NotImplementedError, why=first_line):
        _convert(read_header(file), folder, dequantize)


def _convert(header: GGUF, folder: Path, dequantize: bool) -> None:
    arch = header.get("general.architecture", str)
    factors = {
        name: _array(header, header.tensors[name])
        for name in ROPE_FACTORS
        if name in header.tensors
    }
    config = config_of(arch, header.get, "output.weight" in header.tensors, factors)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError("token_embd.weight: expected a matrix, found none")
    blocks = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    if len(blocks) != config["num_hidden_layers"]:
        raise UserError(f"block_count: {config['num_hidden_layers']}, found {len(blocks)} blocks")
    config["vocab_size"] = embedding.shape[0]
    if arch == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    matrices = [tensor for tensor in header.tensors.values() if len(tensor.shape) == 2]
    usual = max(
        dict.fromkeys(tensor.kind for tensor in matrices),
        key=lambda kind: sum(prod(tensor.shape) for tensor in matrices if tensor.kind == kind),
    )
    stays_packed = usual in _PACKED and not dequantize
    dtype = _DTYPES.get(usual, mx.float16)  # of unpacked weights: blocks scale in half precision
    config["torch_dtype"] = str(dtype).removeprefix("mlx.core.")
    weights: dict[str, mx.array] = {}
    packed: dict[str, int] = {}  # bits by name
    family = FAMILIES[config["model_type"]]
    names = {theirs: ours for ours, theirs in family.names(config["num_hidden_layers"]).items()}
    for name, tensor in header.tensors.items():
        if name in ROPE_FACTORS:
            continue
        part, _, leaf = name.rpartition(".")
        stem = names.get(part)
        if stem is None:
            raise UserError(f"{config['model_type']} has no tensor {show(name)}")
        if stays_packed and tensor.kind in _PACKED and len(tensor.shape) == 2:
            packed[stem] = _PACKED[tensor.kind]
            leaves = dict(zip(("weight", "scales", "biases"), _unpack(header, tensor), strict=True))
        else:
            array = mx.array(_array(header, tensor))
            leaves = {leaf: (array - family.norm_offset if "norm" in name else array).astype(dtype)}
        heads = family.rotated_heads(name, config)
        for leaf, array in leaves.items():
            weights[f"{stem}.{leaf}"] = swap_pairs(array, heads, apart=True) if heads else array
    if packed:
        form = {"group_size": _GROUP, "bits": _PACKED[usual], "mode": "affine"}
        config["quantization"] = form | {
            name: {**form, "bits": bits} for name, bits in packed.items() if bits != _PACKED[usual]
        }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    write_json(folder / "config.json", config)
    write_tokenizer(header, folder)


def _array(header: GGUF, tensor: Tensor) -> np.ndarray:
    """Returns a tensor as float32."""
    gguf = gguf_package()
    rows = header.bytes_of(tensor).reshape(*tensor.shape[:-1], -1)
    found = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[tensor.kind])
    # removes negative zeros, as in MLX
    return found + np.float32(0) if tensor.kind in _PACKED else found


def _unpack(header: GGUF, tensor: Tensor) -> tuple[mx.array, mx.array, mx.array]:
    """Repacks blocks of 32 weights for MLX: w = scale · q + bias with q ≥ 0, and the first weight
    in the low bits.

    In GGUF's Q8_0 and Q4_0, q is centred on 0 and there is no bias; Q4_1 has scale and bias. In a
    block's bytes, the low halves contain the four-bit weights 0…15, and the high halves contain
    weights 16…31.
    """
    rows = tensor.shape[0]
    blocks = header.bytes_of(tensor).reshape(rows, tensor.shape[1] // _GROUP, -1)
    wide = 4 if tensor.kind == "Q4_1" else 2
    halves = np.ascontiguousarray(blocks[..., :wide]).view(np.float16)
    scales = halves[..., 0]
    quants = blocks[..., wide:]
    if tensor.kind == "Q8_0":
        quants = quants ^ 0x80
    else:
        each = np.concatenate([quants & 15, quants >> 4], axis=-1)
        quants = each[..., ::2] | each[..., 1::2] << 4
    if tensor.kind == "Q4_1":
        biases = halves[..., 1]
    else:
        with np.errstate(over="ignore"):  # infinite ones are rejected with the weight's name
            biases = scales * np.float16(-128 if tensor.kind == "Q8_0" else -8)
    words = np.ascontiguousarray(quants).reshape(rows, -1).view(np.uint32)
    return mx.array(words), mx.array(scales), mx.array(biases)
