"""How many tokens the learner takes at a time, where the config leaves it open."""

from __future__ import annotations

import attrs

from grpo_fn.memory import KEPT, ModelShape, Pass
from runners.config import Config
from runners.model_sizes import ModelSizes
from runners.platform import Platform

# On a CPU more rows at a time make no product faster once a micro-batch has filled the caches; they only take
# memory. On a GPU each launch costs, and memory is wider.
CPU_ACTIVATIONS = 160e6  # bytes that the backward pass waits for
GPU_TOKENS = 16384
LEAST_TOKENS, USUAL_TOKENS = 256, 4096  # USUAL: a model whose sizes are not known


def settle_micro_batch(config: Config, sizes: ModelSizes | str, platform: Platform, prompt: int) -> Config:
    """The config with `system.micro_batch_tokens` filled in where it is 0.

    `prompt` is the longest prompt's length, tokens; `sizes` may be the reason why they are not known.
    """
    if config.system.micro_batch_tokens:
        return config
    if isinstance(sizes, str):
        tokens = USUAL_TOKENS if platform.backend == "cpu" else GPU_TOKENS
    else:
        length = prompt + config.rollout.max_new_tokens
        tokens = usual_tokens(sizes.shape, sizes.weights.compute, length, platform.backend)
    return attrs.evolve(config, system=attrs.evolve(config.system, micro_batch_tokens=tokens))


def usual_tokens(shape: ModelShape, itemsize: int, length: int, backend: str) -> int:
    """Tokens whose activations, in rows of this length, are CPU_ACTIVATIONS on a CPU: a multiple of 64."""
    if backend != "cpu":
        return GPU_TOKENS
    row = Pass(rows=1, length=length, attended=length)
    nbytes = shape.layers * row.nbytes(shape, KEPT, itemsize) / length
    tokens = int(CPU_ACTIVATIONS / nbytes) // 64 * 64
    return min(max(tokens, LEAST_TOKENS), GPU_TOKENS)
