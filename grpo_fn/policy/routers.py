"""What the routers of a model with experts decide, recorded in one instance while it is called.

mlx-lm's blocks call a linear layer, `gate` or `router`, and choose the experts with the largest of its
outputs. For the time of a call a recorder stands in that layer's place. Blocks that add biases or choose by
groups are not known here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

# mlx-lm's block -> its router, and its attribute for the number of experts a token.
_ROUTERS = {
    "mlx_lm.models.qwen3_moe.Qwen3MoeSparseMoeBlock": ("gate", "top_k"),
    "mlx_lm.models.qwen2_moe.Qwen2MoeSparseMoeBlock": ("gate", "top_k"),
    "mlx_lm.models.mixtral.MixtralSparseMoeBlock": ("gate", "num_experts_per_tok"),
    "mlx_lm.models.gpt_oss.MLPBlock": ("router", "num_experts_per_tok"),
    "mlx_lm.models.olmoe.OlmoeSparseMoeBlock": ("gate", "top_k"),
}
MODELS = "qwen3_moe, qwen2_moe, mixtral, gpt_oss and olmoe"


def has_routers(module: nn.Module) -> bool:
    """Whether the model has experts that are chosen in a way that is known here."""
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
    gates = [(block, name, block[name]) for block, name, _ in blocks]
    try:
        for block, name, gate in gates:
            block[name] = _Recorder(gate, logits)
        yield logits
    finally:
        for block, name, gate in gates:
            block[name] = gate


class _Recorder:
    """Calls a router and keeps what it returns."""

    def __init__(self, gate: Any, logits: list[mx.array]) -> None:
        self._gate, self._logits = gate, logits

    def __call__(self, x: mx.array) -> mx.array:
        self._logits.append(self._gate(x))
        return self._logits[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gate, name)


def _known_blocks(module: nn.Module) -> list[tuple[Any, str, str]]:
    blocks = _blocks(module)
    if not blocks:
        raise ValueError(
            f"{type(module).__module__.rsplit('.', 1)[-1]} has no experts that are chosen in a way that is "
            f"known here; known are those of {MODELS}"
        )
    if any(hasattr(type(part), "recomputes") for part in module.modules()):
        raise ValueError("checkpointed blocks do not hand out what their routers decide")
    return blocks


def _blocks(module: nn.Module) -> list[tuple[Any, str, str]]:
    """Blocks with experts from the first to the last layer, each with its router's name and k's."""
    found = []
    for layer in getattr(module, "layers", None) or []:
        for part in layer.modules():
            for kind in type(part).__mro__:
                known = _ROUTERS.get(f"{kind.__module__}.{kind.__qualname__}")
                if known is not None:
                    found.append((part, *known))
                    break
    return found
