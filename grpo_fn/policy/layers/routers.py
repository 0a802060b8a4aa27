"""Records or replaces the decisions of a model's routers, in one instance during a call.

mlx-lm's blocks call a linear layer, `gate` or `router`, and choose the experts with the largest of its
outputs. During a call that layer is replaced by another one, which keeps the outputs, or excludes all experts
except those that were chosen before. Blocks that add biases or choose by groups are not supported.
"""

from collections.abc import Callable, Iterator
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
# Blocks that weight experts by a softmax over all experts: if some are excluded, the weights of the others
# would be larger. Other blocks weight by shares of the chosen ones, unless they have norm_topk_prob = false.
_WEIGHTED_BY_ALL = ("mlx_lm.models.qwen2_moe.Qwen2MoeSparseMoeBlock",)
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


def check_replay(module: nn.Module) -> None:
    """Raises ValueError if `replayed_routing` does not support this model: no known routers, checkpointed
    blocks, or weights of experts that depend on those that are not chosen."""
    for block, _, _ in _known_blocks(module):
        if _is_a(block, _WEIGHTED_BY_ALL) or not getattr(block, "norm_topk_prob", True):
            raise ValueError(
                f"{type(module).__module__.rsplit('.', 1)[-1]} weights its experts by a softmax over all "
                "of them, also those that are not chosen: with given experts the weights would be others"
            )


@contextmanager
def replayed_routing(module: nn.Module, experts_blnk: mx.array) -> Iterator[None]:
    """Until the end of the block each token gets these experts, weighted as the routers do now.

    Args:
        module: of a kind that `check_replay` takes.
        experts_blnk: k experts for each of B·L tokens and N layers with experts, integers.

    Raises:
        ValueError: as `check_replay`, or there are not as many layers or experts.
    """
    blocks = _known_blocks(module)
    wanted = len(blocks), int(getattr(blocks[0][0], blocks[0][2]))
    if experts_blnk.ndim != 4 or tuple(experts_blnk.shape[2:]) != wanted:
        raise ValueError(
            f"experts_blnk has shape {tuple(experts_blnk.shape)}: expected [B,L,{wanted[0]},{wanted[1]}]"
        )
    check_replay(module)
    with _in_place_of(blocks, lambda gate, number: _Replayer(gate, experts_blnk[:, :, number])):
        yield


@contextmanager
def recorded_routing(module: nn.Module) -> Iterator[list[mx.array]]:
    """A list that gets each router's logits [...,E] in the order of the calls, until the end of the block.

    Raises:
        ValueError: the model has no experts that are chosen in a known way, or its blocks are checkpointed:
            what a block records then has no gradient.
    """
    blocks = _known_blocks(module)
    logits: list[mx.array] = []
    with _in_place_of(blocks, lambda gate, number: _Recorder(gate, logits)):
        yield logits


@contextmanager
def _in_place_of(blocks: list[tuple[Any, str, str]], made: Callable[[Any, int], Any]) -> Iterator[None]:
    gates = [(block, name, block[name]) for block, name, _ in blocks]
    try:
        for number, (block, name, gate) in enumerate(gates):
            block[name] = made(gate, number)
        yield
    finally:
        for block, name, gate in gates:
            block[name] = gate


class _Router:
    """Replaces a router."""

    def __init__(self, gate: Any) -> None:
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gate, name)


class _Recorder(_Router):
    """Calls a router and keeps its result."""

    def __init__(self, gate: Any, logits: list[mx.array]) -> None:
        super().__init__(gate)
        self._logits = logits

    def __call__(self, x: mx.array) -> mx.array:
        self._logits.append(self._gate(x))
        return self._logits[-1]


class _Replayer(_Router):
    """Calls a router, and excludes all other experts than the given ones: their logits become −inf."""

    def __init__(self, gate: Any, experts_blk: mx.array) -> None:
        super().__init__(gate)
        self._experts = experts_blk

    def __call__(self, x: mx.array) -> mx.array:
        logits = self._gate(x)  # [B,L,E], or [B·L,E]
        experts = self._experts.reshape(*logits.shape[:-1], -1)
        chosen = mx.put_along_axis(mx.zeros(logits.shape, mx.bool_), experts, mx.array(True), axis=-1)
        return mx.where(chosen, logits, -mx.inf)


def _known_blocks(module: nn.Module) -> list[tuple[Any, str, str]]:
    blocks = _blocks(module)
    if not blocks:
        raise ValueError(
            f"{type(module).__module__.rsplit('.', 1)[-1]} has no experts that are chosen in a way that is "
            f"known here; known are those of {MODELS}"
        )
    if any(hasattr(type(part), "recomputes") for part in module.modules()):
        raise ValueError("checkpointed blocks do not return their routers' decisions")
    return blocks


def _blocks(module: nn.Module) -> list[tuple[Any, str, str]]:
    """Blocks with experts from the first to the last layer, each with the names of its router and of k."""
    found = []
    for layer in getattr(module, "layers", None) or []:
        for part in layer.modules():
            known = next((_ROUTERS[name] for name in _kinds(part) if name in _ROUTERS), None)
            if known is not None:
                found.append((part, *known))
    return found


def _kinds(part: Any) -> list[str]:
    """The names of its class and of those that this one comes from."""
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in type(part).__mro__]


def _is_a(part: Any, names: tuple[str, ...]) -> bool:
    return any(name in names for name in _kinds(part))
