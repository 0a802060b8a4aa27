"""Replaces decoder blocks by `block_kernel` while a model samples on CUDA.

Two families of mlx-lm's blocks are supported: blocks whose parts have Llama's names (Llama, Qwen2,
Qwen3, Mistral), and nanochat's. Names alone are not trusted: a block is replaced only if it agrees
with `composed_block`, the kernel's specification, on random weights.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import attrs
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

from grpo_fn.backends.cuda.decoding.block_kernel import BlockShape, Weights, block_step, takes_block
from grpo_fn.backends.cuda.decoding.kernel_steps import KernelCache
from grpo_fn.layers import CANNOT_CALL, NamedLayers, is_linear, parameters_replaced, replaced_layers
from grpo_fn.trees import on_host

_TOKENS = 5  # tokens per comparison
_TOLERANCE = 0.03  # largest difference, relative to what a block adds to its input
Rope = Callable[..., mx.array]  # takes [B,H,L,HD] and the first position


class Parts(NamedTuple):
    """The parts that a block consists of."""

    shape: BlockShape
    weights: Weights
    rope: Rope


def parts_of(block: nn.Module) -> Parts | None:
    """Returns the parts of a block if its family is supported, otherwise None."""
    try:
        parts = _llama_parts(block) if "self_attn" in block else _nanochat_parts(block)
    except (AttributeError, KeyError, TypeError):
        return None
    return parts if parts is None or parts.shape.fault() is None else None


def _llama_parts(block: Any) -> Parts | None:
    attention, mlp = block.self_attn, block.mlp
    queries, keys, values, out = (attention[f"{name}_proj"] for name in "qkvo")
    gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    first, second = block.input_layernorm, block.post_attention_layernorm
    normed = "q_norm" in attention
    biased = "bias" in queries
    norms = [first, second] + ([attention.q_norm, attention.k_norm] if normed else [])
    known = {"q_proj", "k_proj", "v_proj", "o_proj", "rope", "q_norm", "k_norm"}
    if (
        not all(is_linear(layer) for layer in (queries, keys, values, out, gate, up, down))
        or any("bias" in layer for layer in (out, gate, up, down))
        or any(("bias" in layer) is not biased for layer in (keys, values))
        or any(not isinstance(norm, nn.RMSNorm) or norm.eps != first.eps for norm in norms)
        or set(attention.children()) - known
        or set(mlp.children()) != {"gate_proj", "up_proj", "down_proj"}
        or set(block.children())
        != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    ):
        return None
    shape = BlockShape(
        width=queries.weight.shape[1],
        heads=attention.n_heads,
        shared=attention.n_kv_heads,
        head_width=queries.weight.shape[0] // attention.n_heads,
        hidden=up.weight.shape[0],
        gated=True,
        biased=biased,
        head_norms=1 if normed else 0,
        scale=attention.scale,
        eps=first.eps,
    )
    weights = Weights(
        q=queries.weight,
        k=keys.weight,
        v=values.weight,
        o=out.weight,
        up=up.weight,
        down=down.weight,
        gate=gate.weight,
        norm_1=first.weight,
        norm_2=second.weight,
        q_bias=queries.bias if biased else None,
        k_bias=keys.bias if biased else None,
        v_bias=values.bias if biased else None,
        q_norm=attention.q_norm.weight if normed else None,
        k_norm=attention.k_norm.weight if normed else None,
    )
    return Parts(shape, weights, attention.rope)


def _nanochat_parts(block: Any) -> Parts | None:
    attention, mlp = block.attn, block.mlp
    layers = [attention.c_q, attention.c_k, attention.c_v, attention.c_proj, mlp.c_fc, mlp.c_proj]
    if (
        not all(is_linear(layer) and "bias" not in layer for layer in layers)
        or set(attention.children()) != {"c_q", "c_k", "c_v", "c_proj"}
        or set(mlp.children()) != {"c_fc", "c_proj"}
        or set(block.children()) != {"attn", "mlp"}
    ):
        return None
    queries, keys, values, out, up, down = (layer.weight for layer in layers)
    shape = BlockShape(
        width=queries.shape[1],
        heads=attention.num_heads,
        shared=attention.num_kv_heads,
        head_width=attention.head_dim,
        hidden=up.shape[0],
        gated=False,
        biased=False,
        head_norms=2,
        scale=attention.scale,
        eps=1e-5,
    )
    weights = Weights(q=queries, k=keys, v=values, o=out, up=up, down=down)
    frequencies = attention._rope_freqs

    def rope(x: mx.array, offset: Any = 0) -> mx.array:
        return mx.fast.rope(
            x,
            shape.head_width,
            traditional=False,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=frequencies,
        )

    return Parts(shape, weights, rope)


def turns_at(rope: Rope, width: int, rows: int, length: int, offset: Any) -> mx.array:
    """Returns the cosines, then the sines, for rotating pairs (i, i + width/2): float32
    [rows,length,width].
    """
    # Concatenated, not selected by a comparison, which would be one more program to compile.
    half = mx.ones((rows, 1, length, width // 2))
    pairs = mx.concatenate([half, mx.zeros_like(half)], axis=-1)
    return rope(pairs, offset=offset).reshape(rows, length, width)


def composed_block(parts: Parts, x: mx.array) -> mx.array:
    """Computes a block in MLX operations, for whole sequences [B,L,D] starting at position 0. This
    is the kernel's specification.
    """
    shape, weights, rope = parts
    rows, length, _ = x.shape
    turns = turns_at(rope, shape.head_width, 1, length, 0)

    def heads(x: mx.array, weight: mx.array, bias: mx.array | None, number: int) -> mx.array:
        y = x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)
        return y.reshape(rows, length, number, -1).swapaxes(1, 2)

    def rotated(x: mx.array, weight: mx.array | None) -> mx.array:
        if shape.head_norms == 1:
            x = mx.fast.rms_norm(x, weight, shape.eps)
        cos, sin = mx.split(turns, 2, axis=-1)
        one, two = mx.split(x.astype(mx.float32), 2, axis=-1)
        x = mx.concatenate([one * cos - two * sin, one * sin + two * cos], axis=-1).astype(x.dtype)
        return mx.fast.rms_norm(x, None, shape.eps) if shape.head_norms == 2 else x

    normal = mx.fast.rms_norm(x, weights.norm_1, shape.eps)
    queries = rotated(heads(normal, weights.q, weights.q_bias, shape.heads), weights.q_norm)
    keys = rotated(heads(normal, weights.k, weights.k_bias, shape.shared), weights.k_norm)
    values = heads(normal, weights.v, weights.v_bias, shape.shared)
    attended = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=shape.scale, mask="causal"
    )
    x = x + attended.swapaxes(1, 2).reshape(rows, length, -1) @ weights.o.T
    normal = mx.fast.rms_norm(x, weights.norm_2, shape.eps)
    up = normal @ weights.up.T
    hidden = mx.square(nn.relu(up)) if weights.gate is None else _gated(normal @ weights.gate.T, up)
    return x + hidden @ weights.down.T


def _gated(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up  # nn.silu would be one more program for NVRTC to compile


@functools.lru_cache(maxsize=64)
def _is_composed(kind: type, shape: BlockShape, dtype: mx.Dtype, block: "_ById") -> bool:
    """Returns whether a block computes the same as `composed_block`; both are compared on random
    weights, once per class and shape.
    """
    module = block.module

    def drawn(path: str, leaf: mx.array) -> mx.array:
        key = mx.random.key(sum(path.encode()))
        noise = mx.random.normal(leaf.shape, key=key)
        return (noise / leaf.shape[-1] ** 0.5 if leaf.ndim == 2 else 1 + 0.2 * noise).astype(
            leaf.dtype
        )

    with parameters_replaced(module, tree_map_with_path(drawn, module.parameters())):
        x = mx.random.normal((2, _TOKENS, shape.width), key=mx.random.key(0)).astype(dtype)
        parts = parts_of(module)
        assert parts is not None
        try:
            plain = module(x, mask="causal", cache=None)
        except CANNOT_CALL:
            return False
        composed = composed_block(parts, x).astype(mx.float32)
        difference = mx.abs(plain.astype(mx.float32) - composed).mean()
        added = mx.abs(plain.astype(mx.float32) - x.astype(mx.float32)).mean()
        return bool((difference < _TOLERANCE * added).item())


@attrs.frozen(hash=False, eq=False)
class _ById:
    """Wraps a module so that a cache treats it as equal to others."""

    module: nn.Module

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById)

    def __hash__(self) -> int:
        return 0


class DecodeBlock(nn.Module):
    """Replaces a block: decoding steps use the kernel, and all other calls use the block itself."""

    def __init__(self, block: nn.Module, rotation: tuple[float, ...], barrier: mx.array) -> None:
        """Wraps a block; `rotation` differs for blocks whose heads are rotated differently."""
        super().__init__()
        self.block = block
        self._rotation, self._barrier = rotation, barrier

    def __getattr__(self, key: str) -> Any:
        """Forwards attribute access to the block, because some models read attributes of a
        layer."""
        try:
            return super().__getattr__(key)
        except AttributeError:
            if "block" not in self:
                raise
            return getattr(self["block"], key)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        rows = x.shape[0]
        parts = parts_of(self.block) if isinstance(cache, KernelCache) else None
        if (
            parts is None
            or x.dtype != parts.weights.q.dtype
            or not takes_block(parts.shape, parts.weights, rows)
        ):
            return self.block(x, mask=mask, cache=cache)
        if self._rotation not in cache.turns:  # computed once per step, by the first such block
            cache.turns[self._rotation] = turns_at(
                parts.rope, parts.shape.head_width, rows, 1, cache.offset
            )[:, 0]
        return block_step(
            parts.shape,
            parts.weights,
            x,
            cache.turns[self._rotation],
            cache.prompt,
            cache.own,
            cache.prompt_of_b,
            cache.lengths_p,
            cache.used_b,
            self._barrier,
        )


@contextmanager
def decode_blocks(module: nn.Module, rows: int = 1) -> Iterator[None]:
    """Inside the `with` block, `DecodeBlock`s replace the module's blocks for this many rows, on
    CUDA only.

    If the kernel does not support this many rows, the blocks stay unchanged, and other decoding
    forms may be used.
    """
    found = known_blocks(module, rows)
    barrier = mx.zeros((64,), mx.uint32)
    rotations = [_rotation(parts_of(block)) for _, block in found]
    mx.eval(barrier, rotations)
    known = [tuple(on_host(rotation.flatten())) for rotation in rotations]
    new = [
        (name, DecodeBlock(block, own, barrier))
        for (name, block), own in zip(found, known, strict=True)
    ]
    with replaced_layers(module, new, found):
        yield


def _rotation(parts: Parts | None) -> mx.array:
    """Returns the rotations at some positions; they are equal for two blocks that rotate their
    heads in the same way.
    """
    assert parts is not None
    turns = [turns_at(parts.rope, parts.shape.head_width, 1, 4, first) for first in (0, 5000)]
    return mx.concatenate(turns, axis=1)


def known_blocks(module: nn.Module, rows: int = 1) -> NamedLayers:
    """Returns the blocks that the kernel supports for this many rows, and their paths."""
    found: NamedLayers = []
    for name, block in module.named_modules():
        parts = parts_of(block) if "mlp" in block else None
        if parts is None or not takes_block(parts.shape, parts.weights, rows):
            continue
        if _is_composed(type(block), parts.shape, parts.weights.q.dtype, _ById(block)):
            found.append((name, block))
    return found
