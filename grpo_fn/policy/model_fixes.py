"""Fixes for faults of single mlx-lm models, in one instance; such a model is known by its module's name."""

from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn


def fix_known_faults(module: nn.Module) -> None:
    """Fix the model if it is one of those; a second call changes nothing."""
    fix = _FIXES.get(type(module).__module__)
    if fix is not None:
        fix(module)


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

    for layer in module.modules():
        if type(layer) is phi3small.Attention and layer.block_sparse:
            layer.__class__ = Attention


def _fix_jamba(module: nn.Module) -> None:
    """Its scan writes each state into one array of all tokens: a copy of them all for each token, which the
    backward pass holds. Here the states are stacked once."""
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

    for layer in module.modules():
        if type(layer) is jamba.JambaMambaMixer:
            layer.__class__ = Mixer


_FIXES = {"mlx_lm.models.phi3small": _fix_phi3small, "mlx_lm.models.jamba": _fix_jamba}
