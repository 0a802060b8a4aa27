"""Records or replaces the routers' decisions in one model instance during a call.

mlx-lm's blocks call a linear layer, `gate` or `router`, and choose the experts with its largest
outputs. During a call, this layer is replaced by a layer that records the outputs, or that excludes
all experts except the given ones. Blocks that add biases or choose by groups are not supported.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.layers import calls_replaced

# mlx-lm's block -> its router, its attribute for the number of experts per token, and whether it
# weights experts by a softmax over all experts: if some are excluded, the weights of the others
# would be larger. Other blocks weight by shares of the chosen experts, unless norm_topk_prob =
# false.
_ROUTERS = {
    "mlx_lm.models.qwen3_moe.Qwen3MoeSparseMoeBlock": ("gate", "top_k", False),
    "mlx_lm.models.qwen2_moe.Qwen2MoeSparseMoeBlock": ("gate", "top_k", True),
    "mlx_lm.models.mixtral.MixtralSparseMoeBlock": ("gate", "num_experts_per_tok", False),
    "mlx_lm.models.gpt_oss.MLPBlock": ("router", "num_experts_per_tok", False),
    "mlx_lm.models.olmoe.OlmoeSparseMoeBlock": ("gate", "top_k", False),
}
# with the names of its router and of k, and whether it uses a softmax over all experts
_Blocks = list[tuple[Any, str, str, bool]]


def has_routers(module: nn.Module) -> bool:
    """Returns whether the model has experts that are chosen in a supported way."""
    return bool(_blocks(module))


def experts_per_token(module: nn.Module) -> int:
    """Returns k, the number of experts per token, for the model's first router.

    Raises:
        ValueError: see `recorded_routing`.
    """
    block, _, top_k, _ = _known_blocks(module)[0]
    return int(getattr(block, top_k))


def check_replay(module: nn.Module) -> None:
    """Raises ValueError if `replayed_routing` does not support this model: no known routers,
    checkpointed blocks, or expert weights that depend on experts that are not chosen."""
    for block, _, _, by_all in _known_blocks(module):
        if by_all or not getattr(block, "norm_topk_prob", True):
            raise ValueError(
                f"{type(module).__module__.rsplit('.', 1)[-1]} weights its experts by a softmax "
                f"over all of them, including those that are not chosen, so the weights would "
                f"differ with given experts"
            )


@contextmanager
def replayed_routing(module: nn.Module, experts_blnk: mx.array | None) -> Iterator[None]:
    """Inside the `with` block, each token uses these experts, weighted by the current routers.

    Args:
        module: a model that `check_replay` accepts.
        experts_blnk: k experts for each of B·L tokens and N layers with experts, integers; None
            means the experts that the routers choose, for any model.

    Raises:
        ValueError: see `check_replay`, or the number of layers or experts is wrong.
    """
    if experts_blnk is None:
        yield
        return
    blocks = _known_blocks(module)
    wanted = len(blocks), int(getattr(blocks[0][0], blocks[0][2]))
    if experts_blnk.ndim != 4 or tuple(experts_blnk.shape[2:]) != wanted:
        raise ValueError(
            f"experts_blnk has shape {tuple(experts_blnk.shape)}: expected "
            f"[B,L,{wanted[0]},{wanted[1]}]"
        )
    check_replay(module)

    def of_layer(number: int, logits: mx.array) -> mx.array:  # [B,L,E], or [B·L,E]
        experts = experts_blnk[:, :, number].reshape(*logits.shape[:-1], -1)
        chosen = mx.put_along_axis(
            mx.zeros(logits.shape, mx.bool_), experts, mx.array(True), axis=-1
        )
        return mx.where(chosen, logits, -mx.inf)

    with _through(blocks, of_layer):
        yield


@contextmanager
def recorded_routing(module: nn.Module) -> Iterator[list[mx.array]]:
    """Yields a list that receives each router's logits [...,E] in the order of the calls, inside
    the `with` block.

    Raises:
        ValueError: the model's experts are not chosen in a supported way, or its blocks are
            checkpointed, so recorded values would have no gradient.
    """
    blocks = _known_blocks(module)
    logits: list[mx.array] = []

    def record(number: int, found: mx.array) -> mx.array:
        logits.append(found)
        return found

    with _through(blocks, record):
        yield logits


def _through(
    blocks: _Blocks, function: Callable[[int, mx.array], mx.array]
) -> AbstractContextManager[None]:
    """Inside the `with` block, each router's logits are replaced by a function of the router's
    number and the logits.
    """
    gates = [(block, name, block[name]) for block, name, _, _ in blocks]
    return calls_replaced(
        (block, name, lambda x, number=number, gate=gate: function(number, gate(x)))
        for number, (block, name, gate) in enumerate(gates)
    )


def _known_blocks(module: nn.Module) -> _Blocks:
    blocks = _blocks(module)
    if not blocks:
        raise ValueError(
            f"{type(module).__module__.rsplit('.', 1)[-1]} has no experts that are chosen in a "
            f"supported way; supported models: qwen3_moe, qwen2_moe, mixtral, gpt_oss and olmoe"
        )
    if any(hasattr(type(part), "recomputes") for part in module.modules()):
        raise ValueError("checkpointed blocks do not return their routers' decisions")
    return blocks


def _blocks(module: nn.Module) -> _Blocks:
    """Returns the blocks with experts, from the first to the last layer. A block's class may be
    derived from a known class.
    """
    found: _Blocks = []
    for layer in getattr(module, "layers", None) or []:
        for part in layer.modules():
            names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(part).__mro__]
            found += [(part, *_ROUTERS[name]) for name in names if name in _ROUTERS][:1]
    return found
