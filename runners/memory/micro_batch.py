"""Chooses how many tokens the learner takes at a time, if the config does not."""

from __future__ import annotations

import attrs

from runners.config.loading import Config
from runners.machine.startup import Platform
from runners.memory.model_sizes import ModelSizes
from runners.memory.passes import ModelShape, Pass

# On a CPU, once a micro-batch fills the caches, more rows make no product faster and only take memory. But
# each micro-batch computes a shared prompt once.
CPU_ACTIVATIONS = 75e6  # bytes that are saved for the backward pass
CPU_COMPLETIONS = 3  # are taken together with their prompt, even if they need more memory
# On a GPU a micro-batch of up to some thousand tokens takes the host the same time whatever its size: fewer
# micro-batches are better, if memory allows (Qwen2.5-0.5B on an H200: 1.9 s a step with 5,120 tokens, 2.2 s
# with 2,560).
GPU_TOKENS = 8192
MOST_TOKENS = 16384
LEAST_TOKENS, USUAL_TOKENS = 256, 4096  # USUAL: a model whose sizes are not known


def resolve_micro_batch(config: Config, sizes: ModelSizes | str, platform: Platform, prompt: int) -> Config:
    """The config with `system.micro_batch_tokens` filled in if it is 0.

    `prompt` is the longest prompt's length in tokens; `sizes` may be a text on why they are unknown.
    """
    if config.system.micro_batch_tokens:
        return config
    if isinstance(sizes, str):
        tokens = USUAL_TOKENS if platform.backend == "cpu" else GPU_TOKENS
    else:
        new = config.rollout.max_new_tokens
        tokens = usual_tokens(sizes.shape, sizes.weights.compute, prompt, new, platform.backend)
    return with_tokens(config, tokens)


def with_tokens(config: Config, tokens: int) -> Config:
    """The config with `system.micro_batch_tokens`."""
    return attrs.evolve(config, system=attrs.evolve(config.system, micro_batch_tokens=tokens))


def usual_tokens(shape: ModelShape, itemsize: int, prompt: int, new: int, backend: str) -> int:
    """Tokens whose activations, in rows of prompt + new, are CPU_ACTIVATIONS on a CPU; in steps of 64."""
    if backend != "cpu":
        return GPU_TOKENS
    length = prompt + new
    row = Pass(rows=1, length=length, attended=length)
    nbytes = shape.layers * row.nbytes(shape, shape.saved_activations, itemsize) / length
    tokens = int(CPU_ACTIVATIONS / nbytes) // 64 * 64
    return min(max(tokens, prompt + CPU_COMPLETIONS * new, LEAST_TOKENS), MOST_TOKENS)
