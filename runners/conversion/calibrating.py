"""`grpo convert --calibrate`: packed weights that keep the layers' outputs on given prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

import grpo_fn as g
from grpo_fn.policy import Moments, QuantMode, added, carries_of, input_moments, round_calibrated
from runners.data.messages import read_prompts
from runners.data.rendering import render

PROMPTS, TOKENS, ROWS = 64, 128, 8  # of the file at most; of a completion; rows at a time
Collect = Callable[[nn.Module, int], Moments]


def moments_from(file: str, column: str, tokenizer: Any, note: Callable[[str], None]) -> Collect:
    """A function (module, group size) -> moments of its linear layers, on a file's prompts and completions.

    The completions are the model's own, drawn with a fixed key. UserError for the file as `read_prompts`.
    """
    found = read_prompts(file, column, option="--calibrate")
    prompts = [render(tokenizer, messages)[1] for messages in found[:PROMPTS]]

    def collect(module: nn.Module, group_size: int) -> Moments:
        policy, found = g.Policy.for_inference(module), {}
        names = [
            f"{path}.weight"
            for path, layer in module.named_modules()
            if isinstance(layer, nn.Linear) and layer.weight.shape[-1] % group_size == 0
        ]
        if not names:
            return {}
        sampling = g.Sampling(max_new_tokens=TOKENS, eos_ids=frozenset(tokenizer.eos_token_ids))
        for start in range(0, len(prompts), ROWS):
            some = prompts[start : start + ROWS]
            note(f"calibrating: prompts {start + 1} to {start + len(some)} of {len(prompts)}")
            rollout = g.generate(policy, {}, some, sampling, key=mx.random.key(start))
            batch = g.make_batch(rollout, mx.zeros((len(some), 1)))
            lengths_b = batch.prompt_lengths_b + rollout.lengths_b
            found = added(found, input_moments(policy, {}, batch.tokens_bl, lengths_b, names, group_size))
        return found

    return collect


def pack_calibrated(module: nn.Module, weights: dict[str, mx.array], moments: Moments) -> None:
    """Rounds the module's packed layers again, from their full weights, with their inputs' moments."""
    carries = carries_of(moments)
    for path, layer in module.named_modules():
        name = f"{path}.weight"
        if name in moments and hasattr(layer, "bits"):
            mode = QuantMode(layer.mode, layer.bits, layer.group_size)
            layer.update(round_calibrated({name: weights[name]}, carries, mode)[name])
