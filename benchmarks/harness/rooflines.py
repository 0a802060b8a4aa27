"""The minimal work of a transformer's forward pass: its bytes, products and exponentials, from its
leaves.
"""

from __future__ import annotations

import attrs
import mlx.nn as nn

from benchmarks.harness.machine import Rates
from grpo_fn.trees import named_leaves, nbytes


@attrs.frozen
class Work:
    """The work of one token in a model, and of the state that the model keeps for it."""

    weights: int  # in matrices that a token is multiplied with: all but an embedding that is only looked up
    weight_bytes: int
    cache_bytes: int  # of one token's keys and values in all layers
    scores: int  # heads × layers: attention scores a token and token behind it
    score_flops: int  # FLOP of each: a product with the key and one with the value
    exps: int  # of gates and logits; a score is one more

    @classmethod
    def of(cls, module: nn.Module) -> Work:
        """From a module of SHAPES or the embedded one."""
        args = vars(module.args)
        leaves = named_leaves(module.parameters())
        matrices = {name: leaf for name, leaf in leaves.items() if leaf.ndim == 2}
        if "lm_head.weight" in matrices:  # then the embedding is no head
            matrices = {
                name: leaf for name, leaf in matrices.items() if "wte" not in name and "embed" not in name
            }
        layers, heads = args["num_hidden_layers"], args["num_attention_heads"]
        head = args.get("head_dim") or args["hidden_size"] // heads
        size = next(iter(leaves.values())).itemsize
        gated = any("gate_proj" in name for name in leaves)
        return cls(
            weights=sum(leaf.size for leaf in matrices.values()),
            weight_bytes=nbytes(matrices),
            cache_bytes=2 * layers * args["num_key_value_heads"] * head * size,
            scores=heads * layers,
            score_flops=4 * head,
            exps=args["vocab_size"] + (layers * args["intermediate_size"] if gated else 0),
        )

    def flops(self, tokens: float, behind: float) -> float:
        """The work of a forward pass over `tokens` tokens with `behind` preceding tokens on
        average.
        """
        return tokens * (2 * self.weights + self.scores * behind * self.score_flops)

    def exponentials(self, tokens: float, behind: float) -> float:
        """Likewise."""
        return tokens * (self.exps + self.scores * behind)


def decode_seconds(
    work: Work, speed: Rates, *, rows: int, steps: int, prompt: int, prefixes: int, on_cpu: bool
) -> float:
    """The lower bound of the decoding time.

    Each step reads all matrices once, `prefixes` copies of a prompt's keys and values, and the keys
    and values of each row's own tokens. On a CPU, products and exponentials do not overlap, and
    usually take longer than reading the bytes.

    Args:
        rows: number of rows decoded together, all to the end.
        steps: number of tokens of each.
        prompt: number of tokens in the cache before the first step.
        prefixes: number of copies of a prompt's cache: one per row, or one for all of its rows.
    """
    moved = steps * (work.weight_bytes + work.cache_bytes * (prefixes * prompt + rows * steps / 2))
    if not on_cpu:
        return moved / speed.read
    tokens, behind = rows * steps, prompt + steps / 2
    computed = work.flops(tokens, behind) / speed.matmul + work.exponentials(tokens, behind) / speed.exp
    return max(moved / speed.read, computed)
