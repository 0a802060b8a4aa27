"""Records the decisions of a model's routers, in one instance during a call.

mlx-lm's blocks call a linear layer, `gate` or `router`, and choose the experts with the largest of its
outputs. During a call that layer is replaced by another one, which keeps the outputs. Blocks that add biases
or choose by groups are not supported.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.layers import calls_replaced

# mlx-lm's block -> its router, its attribute for the number of experts a token.
_ROUTERS = {
    "mlx_lm.models.qwen3_moe.Qwen3MoeSparseMoeBlock": ("gate", "top_k"),
    "mlx_lm.models.qwen2_moe.Qwen2MoeSparseMoeBlock": ("gate", "top_k"),
    "mlx_lm.models.mixtral.MixtralSparseMoeBlock": ("gate", "num_experts_per_tok"),
    "mlx_lm.models.gpt_oss.MLPBlock": ("router", "num_experts_per_tok"),
    "mlx_lm.models.olmoe.OlmoeSparseMoeBlock": ("gate", "top_k"),
}
_Blocks = list[tuple[Any, str, str]]  # with the names of its router and of k
MODELS = "qwen3_moe, qwen2_moe, mixtral, gpt_oss and olmoe"


def has_routers(module: nn.Module) -> bool:
    """Whether the model has experts that are chosen in a supported way."""
    return bool(_blocks(module))


def experts_per_token(module: nn.Module) -> int:
    """k, of the model's first router.

    Raises:
        ValueError: as `recorded_routing`.
    """
    block, _, top_k = _known_blocks(module)[0]
    return int(getattr(block, top_k))


@contextmanager
def recorded_routing(module: nn.Module) -> Iterator[list[mx.array]]:
    """A list that gets each router's logits [...,E] in the order of the calls, until the end of the block.

    Raises:
        ValueError: the model has no experts that are chosen in a known way, or its blocks are checkpointed:
            what a block records then has no gradient.
    """
    blocks = _known_blocks(module)
    logits: list[mx.array] = []

    def recording(gate: nn.Module) -> Callable[[mx.array], mx.array]:
        def call(x: mx.array) -> mx.array:
            logits.append(cast(Any, gate)(x))
            return logits[-1]

        return call

    with calls_replaced((block, name, recording(block[name])) for block, name, _ in blocks):
        yield logits


def _known_blocks(module: nn.Module) -> _Blocks:
    blocks = _blocks(module)
    if not blocks:
        raise ValueError(
            f"{type(module).__module__.rsplit('.', 1)[-1]} has no experts that are chosen in a way that is "
            f"known here; known are those of {MODELS}"
        )
    if any(hasattr(type(part), "recomputes") for part in module.modules()):
        raise ValueError("checkpointed blocks do not return their routers' decisions")
    return blocks


def _blocks(module: nn.Module) -> _Blocks:
    """Blocks with experts from the first to the last layer; a block may be of a class made of a known one."""
    found: _Blocks = []
    for layer in getattr(module, "layers", None) or []:
        for part in layer.modules():
            names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(part).__mro__]
            found += [(part, *_ROUTERS[name]) for name in names if name in _ROUTERS][:1]
    return found
