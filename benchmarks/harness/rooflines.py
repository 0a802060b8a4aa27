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
            embeddings = [name for name in matrices if "wte" in name or "embed" in name]
            matrices = {name: leaf for name, leaf in matrices.items() if name not in embeddings}
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
        """The number of exponentials of the same pass."""
        return tokens * (self.exps + self.scores * behind)

    def decode_seconds(
        self, speed: Rates, *, rows: int, steps: int, prompt: int, prefixes: int, on_cpu: bool
    ) -> float:
        """The lower bound of the decoding time of `rows` rows, `steps` tokens each, after prompts of
        `prompt` tokens, of which the cache holds `prefixes` copies.

        Each step reads all matrices once, the copies of prompts' keys and values, and the keys and
        values of each row's own tokens. On a CPU, products and exponentials do not overlap, and
        usually take longer than reading the bytes.
        """
        cached = prefixes * prompt + rows * steps / 2
        reading = steps * (self.weight_bytes + self.cache_bytes * cached) / speed.read
        if not on_cpu:
            return reading
        tokens, behind = rows * steps, prompt + steps / 2
        exps = self.exponentials(tokens, behind) / speed.exp
        return max(reading, self.flops(tokens, behind) / speed.matmul + exps)
