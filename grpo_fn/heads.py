"""Where an mlx-lm model comes apart into hidden states and head, found by trying.

mlx-lm's models differ in how they go from the last hidden state to logits: tied or untied, scaled, soft
capped. None of that is written again here: the head is the model itself, called with its backbone replaced by
a stand-in that returns given hidden states.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

from grpo_fn.trees import from_names, named_leaves

_BACKBONES = ("model", "transformer", "backbone")
_PROBE_LOGIT = 100.0  # far above every soft cap in use, so that a capped head cannot pass for a product


@attrs.frozen
class HeadSplit:
    """How one architecture's head is reached.

    path: attributes from the root to the backbone; None where the head is inside it (the whole model then
        counts as backbone, and its logits as hidden states).
    trainable: names of the trainable leaves that the head uses.
    weight: name of the leaf [V,D] where the head is a plain product with it, else None.
    """

    path: tuple[str, ...] | None
    trainable: tuple[str, ...]
    weight: str | None

    def backbone(self, module: nn.Module) -> Any:
        """The part of `module` that maps token ids to hidden states."""
        for name in self.path or ():
            module = module[name]
        return module

    def hidden(self, module: nn.Module, tokens_bl: mx.array) -> mx.array:
        """[B,L] token ids to hidden states [B,L,D]."""
        # The second argument, the cache, has no default everywhere.
        return self.backbone(module)(tokens_bl, None)

    def logits(self, module: nn.Module, hidden_nd: mx.array) -> mx.array:
        """[N,D] hidden states to [N,V] logits, by the module with the leaves that it now holds."""
        if self.path is None:
            return hidden_nd
        with _given(module, self.path, hidden_nd[None]):
            return module(mx.zeros((1, hidden_nd.shape[0]), mx.int32))[0]


class _Given:
    """Stands in for a backbone: returns fixed hidden states, and hands on every other attribute."""

    def __init__(self, backbone: Any, hidden: mx.array) -> None:
        self._backbone, self._hidden = backbone, hidden

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        return self._hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backbone, name)


@contextmanager
def _given(module: nn.Module, path: tuple[str, ...], hidden: mx.array) -> Iterator[None]:
    *outer, name = path
    owner = module
    for step in outer:
        owner = owner[step]
    backbone = owner[name]
    owner[name] = _Given(backbone, hidden)
    try:
        yield
    finally:
        owner[name] = backbone


def split_head(module: nn.Module, trainable: tuple[str, ...]) -> HeadSplit:
    """Find how `module` comes apart; runs it on a single token.

    Args:
        module: an mlx-lm model with its weights.
        trainable: names of its trainable leaves.
    """
    path = _backbone_path(module)
    if path is None:
        return HeadSplit(None, (), None)
    token = mx.zeros((1, 1), mx.int32)
    whole = HeadSplit(path, (), None)
    hidden = whole.hidden(module, token)
    width, vocabulary = getattr(hidden, "shape", (0,))[-1], module(token).shape[-1]
    if not isinstance(hidden, mx.array) or hidden.ndim != 3 or width == vocabulary:
        return HeadSplit(None, (), None)

    named = named_leaves(module.parameters())
    leaves = {name: leaf for name, leaf in named.items() if not any(map(str.isdigit, name.split(".")))}
    probe = mx.random.normal((1, width), dtype=mx.float32, key=mx.random.key(0)).astype(hidden.dtype)
    floating = [name for name in trainable if name in leaves]
    used = tuple(name for name in floating if _depends_on(whole, module, name, leaves[name], probe))
    matrices = [
        name
        for name, leaf in leaves.items()
        if tuple(leaf.shape) == (vocabulary, width) and _is_product(whole, module, leaf, probe)
    ]
    weight = matrices[0] if matrices and set(used) <= {matrices[0]} else None
    return HeadSplit(path, used, weight)


def _backbone_path(module: nn.Module) -> tuple[str, ...] | None:
    path: list[str] = []
    while isinstance(module.get("language_model"), nn.Module):
        path.append("language_model")
        module = module["language_model"]
    names = [name for name in _BACKBONES if isinstance(module.get(name), nn.Module)]
    return (*path, names[0]) if names else None


def _depends_on(split: HeadSplit, module: nn.Module, name: str, leaf: mx.array, probe: mx.array) -> bool:
    """Whether the head's output turns NaN when this leaf does."""
    module.update(from_names({name: mx.full(leaf.shape, mx.nan, leaf.dtype)}))
    try:
        return bool(mx.isnan(split.logits(module, probe)).any())
    finally:
        module.update(from_names({name: leaf}))


def _is_product(split: HeadSplit, module: nn.Module, weight_vd: mx.array, probe: mx.array) -> bool:
    if mx.any(split.logits(module, mx.zeros_like(probe)) != 0):
        return False  # there is a bias
    product = probe @ weight_vd.T
    scale = _PROBE_LOGIT / mx.maximum(mx.abs(product).mean(), 1e-6)
    probe = (probe * scale).astype(probe.dtype)
    product = (probe @ weight_vd.T).astype(mx.float32)
    actual = split.logits(module, probe).astype(mx.float32)
    return bool(mx.abs(actual - product).max() <= 1e-2 * mx.abs(product).max())
