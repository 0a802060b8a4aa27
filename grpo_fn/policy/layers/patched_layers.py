"""Replaces functions that mlx-lm's layers call by name, for one model instance.

mlx-lm's attention layers call `scaled_dot_product_attention`, and its MLPs call `swiglu`; both are
globals of the layer's module. `patch_layers` replaces `__call__` in the layers of one model by a
copy whose globals contain our functions, and replaces `__call__` in `nn.RMSNorm` layers. The
classes, their modules and other models in the process do not change.
"""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.backends import enabled, find
from grpo_fn.backends.composed import relu2, rms_norm, swiglu
from grpo_fn.layers import with_globals
from grpo_fn.policy.layers.gated_delta import gated_delta_update
from grpo_fn.policy.layers.model_fixes import fix_known_faults
from grpo_fn.policy.layers.quantized_layers import (
    QuantMode,
    dequantize,
    is_unpacked,
    packed_names,
    unpacked_product,
)


def patch_layers(module: nn.Module) -> int:
    """Makes this model's layers call the functions of this library; returns the number of patched
    layers.

    The model's results stay the same up to rounding. Layers that access these functions in a
    different way are not patched. A second call has no effect.
    """
    fix_known_faults(module)
    if not enabled("patched_layers"):
        return 0
    changed = 0
    for layer in module.modules():
        kind = _patched(type(layer))
        if kind is not type(layer):
            layer.__class__ = kind
        changed += hasattr(kind, "patched")
    return changed


def attends_through_cache(module: nn.Module) -> bool:
    """Returns whether every attention layer in the model lets a cache compute attention if the
    cache has a method `attend`.

    The function counts attention layers, because each block contains one.
    """
    layers = getattr(module, "layers", None) or []
    return bool(layers) and all(
        sum(
            "scaled_dot_product_attention" in getattr(part, "patched", ())
            for part in layer.modules()
        )
        == 1
        for layer in layers
    )


def attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Computes softmax(scale · Q Kᵀ + mask) V. The signature is that of mlx-lm's
    `scaled_dot_product_attention`.

    A cache with a method `attend(queries, keys, values, scale)` computes the attention itself,
    because its keys and values are not in one array.

    Raises ValueError if there is a mask or sinks and such a cache, which supports neither.
    """
    if hasattr(cache, "attend"):
        if mask is not None or sinks is not None:
            found = "a mask" if sinks is None else "attention sinks"
            raise ValueError(
                f"{found} cannot be combined with a cache that computes attention itself"
            )
        return cache.attend(queries, keys, values, scale)
    fast = find("attention", queries, keys, mask) if sinks is None else None
    if fast is not None:
        return fast(queries, keys, values, scale, mask)
    return _originals()["scaled_dot_product_attention"](
        queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
    )


def _gather_mm(*arrays: mx.array, **options: Any) -> mx.array:
    return (find("gather_mm") or mx.gather_mm)(*arrays, **options)


class _Module:
    """An mlx module in which one function is replaced, for the globals in a layer's module."""

    def __init__(self, module: Any, name: str, function: Callable[..., mx.array]) -> None:
        self.module, self.name = module, name
        setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


_OWN: dict[str, Any] = {
    "scaled_dot_product_attention": attention,
    "swiglu": swiglu,
    "gated_delta_update": gated_delta_update,
    "nn": _Module(nn, "relu2", relu2),
    "mx": _Module(mx, "gather_mm", _gather_mm),
}


class _RMSNorm(nn.RMSNorm):
    patched = ("rms_norm",)

    def __call__(self, x: mx.array) -> mx.array:
        return rms_norm(x, self["weight"], self.eps)


class _QuantizedLinear(nn.QuantizedLinear):
    computes_as = nn.QuantizedLinear
    patched = ("linear",)

    def __call__(self, x: mx.array) -> mx.array:
        if not is_unpacked(x, self.group_size):
            return super().__call__(x)
        y = _packed_product(self, x)
        return y + self["bias"] if "bias" in self else y


class _QuantizedEmbedding(nn.QuantizedEmbedding):
    computes_as = nn.QuantizedEmbedding
    patched = ("linear",)

    def as_linear(self, x: mx.array) -> mx.array:
        return _packed_product(self, x) if is_unpacked(x, self.group_size) else super().as_linear(x)


class _PackedLinear(_QuantizedLinear):
    """A quantized role's linear layer. The class does not set `computes_as`, so that no rollout
    unpacks the layer.
    """


class _PackedEmbedding(_QuantizedEmbedding):
    """A quantized role's embedding; its rows have the role's dtype."""

    dtype: mx.Dtype

    def __call__(self, tokens: mx.array) -> mx.array:
        mode = QuantMode(self.mode, self.bits, self.group_size)
        rows = {name: self[name][tokens] for name in packed_names("weight", mode)}
        return dequantize(rows, mode, self.dtype)


def packed_layer(plain: nn.Module, mode: QuantMode, dtype: mx.Dtype) -> nn.Module:
    """Creates a packed layer without weights, which replaces an `nn.Linear`, an `nn.Embedding` or
    mlx-lm's experts.

    `dtype` is the dtype of an embedding's rows.
    """
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    linear = QuantizedSwitchLinear if isinstance(plain, SwitchLinear) else _PackedLinear
    kind = _PackedEmbedding if isinstance(plain, nn.Embedding) else linear
    layer: Any = kind.__new__(kind)  # its constructor would use the global random state
    nn.Module.__init__(layer)
    layer.mode, layer.bits, layer.group_size = mode.mode, mode.bits, mode.group_size
    layer.dtype = dtype
    layer.global_scale = None
    for name in packed_names("weight", mode) + ["bias"] * ("bias" in plain):
        layer[name] = mx.zeros(())
    return layer


def _packed_product(layer: Any, x: mx.array) -> mx.array:
    packed = [layer[name] for name in ("weight", "scales", "biases") if layer.get(name) is not None]
    return unpacked_product(QuantMode(layer.mode, layer.bits, layer.group_size))(x, *packed)


_PACKED: dict[type[nn.Module], type[nn.Module]] = {
    nn.QuantizedLinear: _QuantizedLinear,
    nn.QuantizedEmbedding: _QuantizedEmbedding,
}


@functools.cache
def _originals() -> dict[str, Callable[..., Any]]:
    from mlx_lm.models import activations, base, gated_delta

    return {
        "scaled_dot_product_attention": base.scaled_dot_product_attention,
        "swiglu": activations.swiglu,
        "gated_delta_update": gated_delta.gated_delta_update,
    }


@functools.cache
def _patched(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns a subclass whose `__call__` uses our functions instead of mlx-lm's, or `kind` itself
    if it calls none of them.
    """
    call = next((vars(base)["__call__"] for base in kind.__mro__ if "__call__" in vars(base)), None)
    if hasattr(kind, "patched") or not isinstance(call, FunctionType):
        return kind
    if kind is nn.RMSNorm:
        return _RMSNorm
    if kind in _PACKED:
        return _PACKED[kind]
    names = [
        name
        for name, original in _originals().items()
        if name in call.__code__.co_names and call.__globals__.get(name) is original
    ]
    for name in ("nn", "mx"):
        own_module = _OWN[name]
        if (
            own_module.name in call.__code__.co_names
            and call.__globals__.get(name) is own_module.module
        ):
            names.append(name)
    if not names:
        return kind
    patched_call = with_globals(call, **{name: _OWN[name] for name in names})
    return type(kind.__name__, (kind,), {"__call__": patched_call, "patched": tuple(names)})
