"""Fixes for faults of mlx-lm's models and of their experts, in one instance.

A model with its own fault is identified by its module's name.
"""

import functools
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

_SORTED_FROM = 64  # pairs of token and expert from which on mlx-lm sorts them


def fix_known_faults(module: nn.Module) -> None:
    """Fix the known faults of the model; a second call changes nothing."""
    fix = _FIXES.get(type(module).__module__)
    if fix is not None:
        fix(module)
    _fix_experts(module)


def _fix_experts(module: nn.Module) -> None:
    """mlx-lm's experts sort pairs of token and expert from 64 on. If they are not sorted, the gradient of
    MLX's products in their weights is an error on CUDA (0.32.4, float32, from 64 × 96 on)."""
    from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

    _replace_classes(module, {kind: _sorting(kind) for kind in (SwitchGLU, SwitchMLP)})


def _replace_classes(module: nn.Module, classes: dict[type[Any], type[Any]]) -> None:
    for layer in cast("list[Any]", module.modules()):
        layer.__class__ = classes.get(type(layer), type(layer))


@functools.cache
def _sorting(kind: type[Any]) -> type[Any]:
    """A class whose learner's pass repeats a small number of tokens; only the first copy counts."""

    def call(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        copies = -(-_SORTED_FROM // max(indices.size, 1)) if self.training else 1
        if copies == 1:
            return kind.__call__(self, x, indices)
        copied = (mx.broadcast_to(each, (copies, *each.shape)) for each in (x, indices))
        return kind.__call__(self, *copied)[0]

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": __name__})


def _fix_phi3small(module: nn.Module) -> None:
    """It writes −inf at ids that a smaller vocabulary does not have, past the end of the logits; and its
    block-sparse layers add their causal mask of booleans to the scores, so that they see later tokens."""
    from mlx_lm.models import phi3small

    model = cast(Any, module)
    unused = [n for n in model._dummy_tokenizer_ids.tolist() if n < model.args.vocab_size]
    model._dummy_tokenizer_ids = mx.array(unused, mx.int32)

    class Attention(phi3small.Attention):
        def _block_sparse_attention(
            self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None
        ) -> mx.array:
            if mask is not None and mask.dtype == mx.bool_:
                mask = mx.where(mask, 0.0, -mx.inf).astype(queries.dtype)
            return super()._block_sparse_attention(queries, keys, values, scale, mask)

    _replace_classes(module, {phi3small.Attention: Attention})


def _fix_jamba(module: nn.Module) -> None:
    """Its scan writes each state into one array of all tokens, which makes a full copy for each token that
    the backward pass holds. Here the states are stacked once."""
    from mlx_lm.models import jamba

    class Mixer(jamba.JambaMambaMixer):
        def ssm_step(
            self, x: mx.array, A: mx.array, state: mx.array | None = None
        ) -> tuple[mx.array, mx.array]:
            rank, size = int(self.time_step_rank), int(self.ssm_state_size)
            delta, b, c = mx.split(self.x_proj(x), [rank, rank + size], axis=-1)
            delta, b, c = self.dt_layernorm(delta), self.b_layernorm(b), self.c_layernorm(c)
            delta_bld = nn.softplus(self.dt_proj(delta))
            decay_bldn = mx.exp(delta_bld[..., None] * A)
            added_bldn = (delta_bld * x)[..., None] * b[..., None, :]
            states = []
            for t in range(x.shape[1]):
                state = (
                    added_bldn[:, t]
                    if state is None
                    else jamba.fma(state, decay_bldn[:, t], added_bldn[:, t])
                )
                states.append(state)
            y_bld = (mx.stack(states, axis=1) @ c[..., None]).squeeze(-1)
            return y_bld + self.D * x, states[-1]

    _replace_classes(module, {jamba.JambaMambaMixer: Mixer})


def _fix_kimi_k3(module: nn.Module) -> None:
    """Outside training it caches products of two weights at the first call, and on Metal a compiled step with
    a layer's weights: neither follows an update."""
    from mlx_lm.models import kimi_k3

    class DecoderLayer(kimi_k3.KimiK3DecoderLayer):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            self._attn_res_w_eff = None
            return super().__call__(*args, **kwargs)

    class TextModel(kimi_k3.KimiK3TextModel):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            self._output_res_w_eff = None
            return super().__call__(*args, **kwargs)

    classes = {kimi_k3.KimiK3DecoderLayer: DecoderLayer, kimi_k3.KimiK3TextModel: TextModel}
    _replace_classes(module, classes)
    for layer in module.modules():
        if isinstance(layer, kimi_k3.KimiK3DeltaAttention):
            layer._step = layer._decode_core


_FIXES = {
    "mlx_lm.models.jamba": _fix_jamba,
    "mlx_lm.models.kimi_k3": _fix_kimi_k3,
    "mlx_lm.models.phi3small": _fix_phi3small,
}
