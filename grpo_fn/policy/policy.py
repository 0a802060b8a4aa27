"""Policy, a language model as a pure function of a parameter tree.

An mlx-lm module provides the function: during a call, its leaves are replaced by the given
parameters, and then restored. The module decides what is trainable (all leaves, or LoRA's
adapters).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

from grpo_fn.checks import check_positions
from grpo_fn.compile import Compiled, compiled
from grpo_fn.images import ImageRows
from grpo_fn.layers import empty, parameters_replaced, twin_module
from grpo_fn.policy.caches.kv_caches import plain_caches, takes_ragged
from grpo_fn.policy.caches.prefix_cache import shares_prefix
from grpo_fn.policy.decode_weights import decode_weights, supports_compiled_decode
from grpo_fn.policy.head import Head, HeadSplit, split_head
from grpo_fn.policy.image_forward import WholeRows, forward_with_images
from grpo_fn.policy.layers.learning_form import learning_form
from grpo_fn.policy.layers.model_fixes import bound_positions
from grpo_fn.policy.layers.patched_layers import patch_layers
from grpo_fn.policy.layers.routers import recorded_routing, replayed_routing
from grpo_fn.process_check import check_process
from grpo_fn.trees import Tree, from_names, map_arrays, named_leaves, split_leaves


@attrs.frozen(eq=False)
class Policy:
    """A model without its parameters. Use `Policy.from_module` to create one.

    During a call, the module contains the given parameters: use it in one thread at a time.
    """

    module: nn.Module  # the function; its leaves are replaced during a call
    params: Tree  # trainable leaves at the time the policy was created
    frozen: Tree  # the other leaves, shared by all roles; {} if all leaves are trainable
    # dtype to which floating parameters are cast for the forward pass; None means no cast
    compute_dtype: mx.Dtype | None
    split: HeadSplit  # the backbone and the head of this architecture
    takes_ragged: bool  # whether rows of different lengths can be decoded together
    shares_prefix: bool  # whether completions can be decoded over one copy of their prompt
    supports_compiled_decode: bool  # whether the backend's compiled decoding steps support it
    # whether it decodes with `decode_weights`
    joins_weights: bool = attrs.field(default=True, kw_only=True)
    # exclusive bound on token ids: rows of the embedding; None if the module has no nn.Embedding
    vocabulary: int | None
    # number of learned positions; None means no limit
    positions: int | None = attrs.field(default=None, kw_only=True)
    compiled_programs: dict[str, Compiled] = attrs.field(init=False, repr=False, factory=dict)

    @classmethod
    def from_module(
        cls, module: nn.Module, *, compute_dtype: mx.Dtype | None = None, patched: bool = True
    ) -> "Policy":
        """Splits a module into its function and its leaves.

        To train only some leaves, first freeze the others (`module.freeze()`, mlx-lm's
        `linear_to_lora_layers`). The arrays are shared with the module, not copied. Afterwards, the
        module's layers call this library's functions (`patch_layers`), unless `patched` is False.

        Raises:
            ValueError: nothing is trainable.
        """
        check_process()
        trainable, frozen = split_leaves(module)
        if not trainable:
            raise ValueError("the module has no trainable parameters: unfreeze it, or add adapters")
        if patched:
            patch_layers(module)
        return cls._probed(module, trainable, frozen, compute_dtype)

    @classmethod
    def for_inference(cls, module: nn.Module) -> "Policy":
        """Creates a policy that samples with the weights in the module: `params` is {}, and nothing
        is trainable.
        """
        check_process()
        patch_layers(module)
        return cls._probed(module, {}, {}, None)

    @classmethod
    def _probed(
        cls,
        module: nn.Module,
        trainable: dict[str, mx.array],
        frozen: dict[str, mx.array],
        compute_dtype: mx.Dtype | None,
    ) -> "Policy":
        shares = shares_prefix(module)
        return cls(
            module=module,
            params=from_names(trainable),
            frozen=from_names(frozen),
            compute_dtype=compute_dtype,
            split=split_head(module, tuple(trainable)),
            takes_ragged=takes_ragged(module),
            shares_prefix=shares,
            supports_compiled_decode=shares and supports_compiled_decode(module, compute_dtype),
            vocabulary=_embedding_rows(module),
            positions=bound_positions(module),
        )

    def without_weights(self) -> "Policy":
        """Returns the same policy without the initial parameters, over a module without trainable
        weights.

        Use this method for long runs; otherwise, `params` and the module would keep the initial
        weights in memory. The weights are removed from the module in place; afterwards, use it
        through `bound`.
        """
        empty(self.module, self.params)
        return attrs.evolve(self, params=None)

    def twin(self) -> "Policy":
        """Returns the same policy over a separate module, which shares all arrays with this
        policy's module.

        A call replaces the leaves of the policy's module. Therefore, two threads, or a learner and
        a rollout that is suspended between two steps, need separate modules.
        """
        return attrs.evolve(self, module=twin_module(self.module))

    def program(self, name: str, forward: Callable[..., Any]) -> Compiled:
        """Returns the backend's forward function with this name, compiled once for this policy."""
        if name not in self.compiled_programs:
            self.compiled_programs[name] = compiled(partial(forward, self.bound))
        return self.compiled_programs[name]

    def bound(self, params: Tree, frozen: Tree | None = None) -> AbstractContextManager[nn.Module]:
        """Inside the `with` block, the module has these parameters."""
        frozen = self.frozen if frozen is None else frozen
        return parameters_replaced(self.module, self.cast(frozen), self.cast(params))

    @contextmanager
    def sampling(self, params: Tree, rows: int = 1) -> Iterator[nn.Module]:
        """Like `bound`, but for decoding this many rows. If `joins_weights` is set, the weights
        have the form that `decode_weights` creates.
        """
        with self.bound(params) as module:
            if not self.joins_weights:
                yield module
                return
            with decode_weights(module, rows):
                yield module

    @contextmanager
    def learning(self, params: Tree, frozen: Tree | None = None) -> Iterator[nn.Module]:
        """Like `bound`, but for a pass that has a gradient; see `learning_form`."""
        with self.bound(params, frozen) as module, learning_form(module):
            yield module

    def cast(self, params: Tree) -> Tree:
        """Casts floating leaves to the compute dtype, for the forward pass."""
        dtype = self.compute_dtype
        if dtype is None:
            return params
        return map_arrays(
            lambda a: a.astype(dtype) if mx.issubdtype(a.dtype, mx.floating) else a, params
        )

    def logits(self, params: Tree, tokens_bl: mx.array, cache: Any = None) -> mx.array:
        """Computes next-token logits [B,L,V] in the compute dtype, and extends the cache, if given.

        Raises ValueError if there is no cache and there are more tokens than learned positions.
        """
        if cache is None:
            check_positions("tokens_bl", tokens_bl.shape[1], self.positions)
        with self.bound(params) as module:
            return module(tokens_bl, cache=self.split.caches(module) if cache is None else cache)

    def hidden(
        self,
        params: Tree,
        tokens_bl: mx.array,
        frozen: Tree | None = None,
        images: ImageRows | None = None,
        experts_blnk: mx.array | None = None,
    ) -> mx.array:
        """Computes the final hidden states [B,L,D], after the last norm and before the head.

        `frozen` replaces the policy's own frozen leaves: a compiled step passes them as arguments,
        because a traced function keeps the arrays that it closes over. `images` are the rows'
        images; None if there are none. With `experts_blnk`, each token uses these experts instead
        of the routers' choice: see `replayed_routing`.
        """
        with self.learning(params, frozen) as module:
            if images is not None:
                whole = [WholeRows(images.positions_r3l) for _ in plain_caches(module)]
                return forward_with_images(self.split.backbone(module), tokens_bl, images, whole)
            with replayed_routing(module, experts_blnk):
                return self.split.hidden(module, tokens_bl)

    def hidden_and_routing(
        self,
        params: Tree,
        tokens_bl: mx.array,
        frozen: Tree | None = None,
        experts_blnk: mx.array | None = None,
    ) -> tuple[mx.array, list[mx.array]]:
        """Like `hidden`, but also returns router logits [B,L,E] for each layer with experts,
        including the logits of excluded experts.

        Raises:
            ValueError: `routers` does not support the model's experts, or the model has none.
        """
        with (
            self.learning(params, frozen) as module,
            recorded_routing(module) as logits,
            replayed_routing(module, experts_blnk),  # in front of the recorders
        ):
            hidden_bld = self.split.hidden(module, tokens_bl)
        return hidden_bld, [x.reshape(*tokens_bl.shape, -1) for x in logits]

    def head(self, params: Tree, frozen: Tree | None = None) -> Head:
        """Returns the function from hidden states to logits, and its trainable parameters."""
        frozen = self.frozen if frozen is None else frozen
        leaves = named_leaves(params)
        used = from_names({name: leaves[name] for name in self.split.trainable})
        name = self.split.weight

        def weight(head_params: Tree) -> mx.array:
            trains = name in self.split.trainable
            return self.cast(named_leaves(head_params if trains else frozen)[str(name)])

        def logits(head_params: Tree, hidden_nd: mx.array) -> mx.array:
            with self.bound(head_params, frozen) as module:
                return self.split.logits(module, hidden_nd)

        if name is None:
            return Head(used, logits)
        return Head(used, logits, weight, self.split.scale, self.split.cap)


def _embedding_rows(module: nn.Module) -> int | None:
    """Returns the number of rows in the token embedding. If there are several tables (positions may
    have one), the token embedding is the table with one row per logit.
    """
    rows = {
        part["weight"].shape[0]
        for part in module.modules()
        if isinstance(part, nn.Embedding | nn.QuantizedEmbedding)
    }
    if len(rows) > 1:
        # only the shape is used: nothing is computed
        logits = module(mx.zeros((1, 1), mx.int32)).shape[-1]
        return logits if logits in rows else max(rows)
    return max(rows, default=None)
