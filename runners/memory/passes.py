"""The bytes of each part of a run, as functions of its shapes. `footprint` adds them up.

The numbers that the backward pass saves of a block, per position, follow from the block's algebra:

    hidden        4   the block's input, the sum in its middle; of each: normalised and scaled by the norm
    intermediate  2   gate and up (`gated_mlp`); with experts or another gate than silu the gated product too
    queries     1.5   queries after rotation, what attention returns, as far as they are not one and the same
    keys          4   keys after rotation and values, and the layouts of both that products ask for
    scores        1   the probabilities

The buffers of operations in flight come in addition. MLX's CPU backend submits up to 100 operations ahead of
the current one (10 tasks of 10), and each of them holds its buffers; these counts are measured. On GPUs fused
kernels keep less of both, so the sums are upper bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from grpo_fn.backends import number
from grpo_fn.learner import chunk_rows

FLOAT = 4  # bytes of float32
CACHE_STEP = 256  # mlx-lm's caches grow by so many positions


@attrs.frozen(kw_only=True)
class ModelShape:
    """The sizes of a decoder that its activations depend on."""

    layers: int
    hidden: int
    intermediate: int  # width for one token: with experts, the sum over those that the token uses
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool  # the head's weights are the embedding's
    keeps_product: bool = False  # the backward pass saves the input of the MLP's last layer
    gated: bool = False  # the MLP is silu(gate) · x

    @property
    def saved_activations(self) -> Counts:
        """The arrays that one block saves for the backward pass."""
        more = self.keeps_product + (number("gate_arrays") if self.gated else 0)
        return attrs.evolve(SAVED_ACTIVATIONS, intermediate=SAVED_ACTIVATIONS.intermediate + more)

    @property
    def queries(self) -> int:
        """Numbers in a position's queries."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Numbers in a position's keys, and in its values."""
        return self.kv_heads * self.head_dim


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape given by a model's config.json.

    Raises:
        KeyError: it lacks the number of layers, the width, the heads or the vocabulary size.
    """
    config = {**config, **(config.get("text_config") or {})}

    def first(*names: str, default: int | None = None) -> int:
        found = next((config[name] for name in names if config.get(name) is not None), default)
        if found is None:
            raise KeyError(f"config.json states none of {', '.join(names)}")
        return int(found)

    hidden = first("hidden_size", "n_embd", "d_model", "dim")
    heads = first("num_attention_heads", "n_head", "n_heads")
    wide = first("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    chosen = first("num_experts_per_tok", "num_experts_per_token", "moe_top_k", default=0)
    if chosen:
        expert = first("moe_intermediate_size", default=wide)
        shared = first("n_shared_experts", default=0) * expert
        wide = chosen * expert + first("shared_expert_intermediate_size", default=shared)
    activations = (config.get(name) for name in ("hidden_act", "hidden_activation", "activation_function"))
    activation = next((name for name in activations if name), "silu")
    return ModelShape(
        layers=first("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        hidden=hidden,
        intermediate=wide,
        heads=heads,
        kv_heads=first("num_key_value_heads", "n_head_kv", default=heads),
        head_dim=first("head_dim", default=hidden // heads),
        vocabulary=first("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        keeps_product=bool(chosen) or activation not in ("silu", "swish", "relu2"),
        gated=activation in ("silu", "swish") and config.get("model_type") != "nanochat",
    )


@attrs.frozen
class Counts:
    """Numbers of arrays of each kind per position; `precise` of the hidden ones are always float32."""

    hidden: float
    intermediate: float
    queries: float
    keys: float
    scores: float
    precise: float = 0

    def __add__(self, other: Counts) -> Counts:
        pairs = zip(attrs.astuple(self), attrs.astuple(other), strict=True)
        return Counts(*(a + b for a, b in pairs))


SAVED_ACTIVATIONS = Counts(hidden=4, intermediate=2, queries=1.5, keys=4, scores=1, precise=2)
# The proportions were measured on llama blocks of 14 shapes, the scale on whole runs of benchmarks/memory.py.
# `elementwise` computes an exponential with several arrays, hence many scores.
BACKWARD = Counts(hidden=7, intermediate=3, queries=3.4, keys=4.5, scores=4.2, precise=1.5)
# A forward pass without gradient: compiled (accurate to 2 %), and op by op as for prompts (to 8 %).
FORWARD = Counts(hidden=8, intermediate=7, queries=3.7, keys=5.5, scores=8.1, precise=1)
PREFILL = Counts(hidden=5, intermediate=7.6, queries=0, keys=0, scores=9.5, precise=1)
CHECKPOINTED = Counts(hidden=1, intermediate=0, queries=0, keys=0, scores=0)  # only the block's input


@attrs.frozen(kw_only=True)
class Pass:
    """Positions that go through the model together.

    A batch that shares prompts has two passes: the prompts, and the completions, which attend to copies of
    their prompts' keys.
    """

    rows: int
    length: int  # tokens of a row
    attended: int  # positions that a row's tokens can attend to

    @property
    def positions(self) -> int:
        """Tokens in all."""
        return self.rows * self.length

    def nbytes(self, shape: ModelShape, counts: Counts, itemsize: int) -> float:
        """Bytes of the given numbers of arrays of each kind, for one block."""
        tokens, seen = self.positions, self.rows * self.attended
        if itemsize < FLOAT and not number("keeps_scores"):
            counts = attrs.evolve(counts, scores=0)
        numbers = (
            counts.hidden * tokens * shape.hidden
            + counts.intermediate * tokens * shape.intermediate
            + counts.queries * tokens * shape.queries
            + counts.keys * seen * shape.keys
            + counts.scores * tokens * shape.heads * self.attended
        )
        return itemsize * numbers + (FLOAT - itemsize) * counts.precise * tokens * shape.hidden


@attrs.frozen(kw_only=True)
class MicroBatch:
    """The rows that the learner computes together."""

    passes: tuple[Pass, ...]
    targets: int  # tokens whose log-probs are computed, including padding

    @classmethod
    def of(
        cls,
        tokens: tuple[int, int],
        completions: tuple[int, int],
        *,
        targets: int | None = None,
        shares_prompts: bool = False,
    ) -> MicroBatch:
        """From the shapes [B,L] or [P,L] of a batch's `tokens_bl` and [B,T] of its `targets_bt`.

        `targets`: number of tokens that count, if only their log-probs are computed; None: all of [B,T].
        """
        rows, width = completions
        targets = rows * width if targets is None else targets
        first = Pass(rows=tokens[0], length=tokens[1], attended=tokens[1])
        if not shares_prompts:
            return cls(passes=(first,), targets=targets)
        # The last token is never an input.
        rest = Pass(rows=rows, length=width - 1, attended=tokens[1] + width - 1)
        return cls(passes=(first, rest), targets=targets)

    def saved_activations(self, shape: ModelShape, itemsize: int, *, checkpointed: bool) -> float:
        """Bytes that all blocks save for the backward pass."""
        counts = CHECKPOINTED if checkpointed else shape.saved_activations
        return shape.layers * sum(part.nbytes(shape, counts, itemsize) for part in self.passes)

    def in_flight(self, shape: ModelShape, itemsize: int, *, checkpointed: bool) -> float:
        """Bytes of the current block in the backward pass.

        A checkpointed block is computed again first. MLX is then one block ahead, so that two are in memory.
        """
        counts = BACKWARD + shape.saved_activations + shape.saved_activations if checkpointed else BACKWARD
        return max(part.nbytes(shape, counts, itemsize) for part in self.passes)

    def forward(self, shape: ModelShape, itemsize: int) -> float:
        """Bytes of a forward pass without gradient; shared prompts keep the keys of every block."""
        shared = 2 * shape.layers * self.passes[0].positions * shape.keys * itemsize
        most = max(part.nbytes(shape, FORWARD, itemsize) for part in self.passes)
        return most + (shared if len(self.passes) > 1 else 0)

    def logits(self, shape: ModelShape, itemsize: int, *, gradient: bool) -> tuple[float, float]:
        """Bytes of logits in chunks, and their share of the operations in flight.

        Measured: eight float32 arrays per chunk, twelve with the gradient, up to MLX's limit of 27 or 24
        arrays; on CUDA hardly more than the products.
        """
        arrays, most, size = (12, 24, FLOAT) if gradient else (8, 27, FLOAT)
        products = number("product_arrays")
        if products:
            arrays, most, size = products, products, itemsize
        rows, bound = arrays * self.targets, most * chunk_rows(shape.vocabulary)
        return size * shape.vocabulary * min(rows, bound), min(rows / bound, 1.0)


def kv_bytes(
    shape: ModelShape,
    *,
    rows: int,
    prompt: int,
    new: int,
    itemsize: int,
    prompt_copies: int | None = None,
    step: int = CACHE_STEP,
) -> int:
    """Keys and values of all blocks while `rows` completions are decoded.

    Args:
        rows: completions decoded together.
        prompt, new: tokens of a prompt and, at most, of a completion.
        prompt_copies: number of prompts in the caches; None: one per row. `prefixes` keeps each once.
        step: number of positions by which the rows' own part grows.
    """
    copies = rows if prompt_copies is None else prompt_copies
    grown = -(-(new - 1) // step) * step  # the last drawn token is never an input
    positions = copies * prompt + rows * grown
    return 2 * shape.layers * shape.keys * itemsize * positions


def sampling_arrays(
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    with_entropy: bool = False,
) -> int:
    """Number of [rows,V] float32 arrays of a draw at its peak, including the logits.

    Measured. The exponential of `elementwise` takes four arrays besides the logits. Top-k sorts a copy, and
    top-p computes an exponential of it as well. The entropy's arrays may be in memory at the same time.
    """
    if temperature == 0:
        return 5 + 4 * with_entropy
    truncation = 8 + (top_k > 0) if top_p < 1 else 2 if top_k else 1 if min_p else 0
    return 5 + max(truncation, 8 * with_entropy)
