"""A decoder's sizes, and the bytes of its blocks: counts of arrays per position × sizes.

Operations in flight come in addition to what is saved, and are measured: MLX's CPU backend submits up to 100
ahead. GPUs keep less of both, so that the sums are upper bounds there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import attrs

from grpo_fn.backends import number
from grpo_fn.learner import chunk_rows

FLOAT = 4  # bytes of float32


class Counts(NamedTuple):
    """Numbers of arrays of each kind per position; `precise` of the hidden ones are always float32."""

    hidden: float
    intermediate: float
    queries: float
    keys: float
    scores: float
    precise: float


# From a block's algebra: its input, the sum in its middle, and of each the norm and the scaled norm; queries
# after rotation, and what attention returns; keys and values, and the layouts that products need.
SAVED = Counts(hidden=4, intermediate=3, queries=1.5, keys=4, scores=1, precise=2)
CHECKPOINTED = Counts(1, 0, 0, 0, 0, 0)  # the block's input alone
# Measured on llama blocks of 14 shapes, and on whole runs of benchmarks/memory.py.
BACKWARD = Counts(hidden=7, intermediate=3, queries=3.4, keys=4.5, scores=4.2, precise=1.5)
PREFILL = Counts(hidden=5, intermediate=7.6, queries=0, keys=0, scores=9.5, precise=1)


@attrs.frozen(kw_only=True)
class ModelShape:
    """The sizes of a decoder that its activations depend on."""

    layers: int
    hidden: int
    intermediate: int  # width for one token: with experts, the sum over those that the token uses
    heads: int
    queries: int  # numbers in a position's queries
    keys: int  # numbers in a position's keys, and in its values
    vocabulary: int
    tied: bool  # the head's weights are the embedding's
    gated: bool  # by a SiLU, whose arrays a backend may save

    @property
    def block_parameters(self) -> int:
        """About as many as a token is multiplied with in one block."""
        return self.hidden * (2 * self.queries + 2 * self.keys + 3 * self.intermediate)

    @property
    def saved(self) -> Counts:
        """The arrays that one block saves for the backward pass; relu² saves one less than a gate."""
        return SAVED._replace(intermediate=3 + number("gate_arrays") if self.gated else 2)

    def block_bytes(self, counts: Counts, itemsize: int, rows: int, length: int, attended: int) -> float:
        """Bytes of these arrays in one block, for `rows` of `length` tokens that attend to `attended`."""
        tokens = rows * length
        scores = 0 if itemsize < FLOAT and not number("keeps_scores") else counts.scores
        numbers = (
            counts.hidden * tokens * self.hidden
            + counts.intermediate * tokens * self.intermediate
            + counts.queries * tokens * self.queries
            + counts.keys * rows * attended * self.keys
            + scores * tokens * self.heads * attended
        )
        return itemsize * numbers + (FLOAT - itemsize) * counts.precise * tokens * self.hidden

    def logit_bytes(self, targets: int, itemsize: int) -> tuple[float, float]:
        """Bytes of the learner's logits, a chunk at a time, and their share of the operations in flight.

        Twelve float32 arrays a chunk, up to the 24 that MLX keeps in flight; on CUDA the products.
        """
        products = number("product_arrays")
        arrays, most, size = (products, products, itemsize) if products else (12, 24, FLOAT)
        rows, bound = arrays * targets, most * chunk_rows(self.vocabulary)
        return size * self.vocabulary * min(rows, bound), min(rows / bound, 1.0)


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape given by a model's config.json. KeyError if it lacks layers, width, heads or vocabulary."""
    config = {**config, **(config.get("text_config") or {})}

    def first(*names: str, default: int | None = None) -> int:
        found = next((config[name] for name in names if config.get(name) is not None), default)
        if found is None:
            raise KeyError(f"config.json states none of {', '.join(names)}")
        return int(found)

    hidden = first("hidden_size", "n_embd", "d_model", "dim")
    heads = first("num_attention_heads", "n_head", "n_heads")
    width = first("head_dim", default=hidden // heads)
    wide = first("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    if chosen := first("num_experts_per_tok", "num_experts_per_token", "moe_top_k", default=0):
        expert = first("moe_intermediate_size", default=wide)
        shared = first("n_shared_experts", default=0) * expert
        wide = chosen * expert + first("shared_expert_intermediate_size", default=shared)
    return ModelShape(
        layers=first("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        hidden=hidden,
        intermediate=wide,
        heads=heads,
        queries=heads * width,
        keys=first("num_key_value_heads", "n_head_kv", default=heads) * width,
        vocabulary=first("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        gated=config.get("model_type") != "nanochat",
    )
