"""A deep, narrow model that has been taught the packaged problems, habits included, in a folder.

    python -m benchmarks.evidence.deep_models FOLDER LAYERS CLEAN_STEPS HABIT_STEPS

It begins as the shipped model with random blocks between its own, whose part in the residual stream is scaled
by 1/√(2·layers). Then it gets the lessons that made the shipped model, in shorter phases. Nothing is frozen:
all blocks learn.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
from mlx_lm.models import llama
from mlx_lm.utils import load_model
from transformers import AutoTokenizer

from benchmarks.quickstart_model.model import CONFIG, exact_match, save_embedded_model
from benchmarks.quickstart_model.problems import draw_rows
from benchmarks.quickstart_model.training import PHASES, TrainingPhase, train, word_problem
from grpo_fn.trees import from_names, named_leaves
from runners.machine import startup
from runners.quickstart import MODEL_DIR

LEARNING_RATES = (1e-3, 7e-4)  # of the clean phase and of that with the habits
BATCH = 64  # examples a step, in one forward pass


def deepened(leaves: Mapping[str, mx.array], layers: int, seed: int = 0) -> dict[str, mx.array]:
    """The weights of a model with more blocks: the old ones spread evenly, random ones between."""
    blocks: dict[int, dict[str, mx.array]] = {}
    for name, leaf in leaves.items():
        if name.startswith("model.layers."):
            number, _, rest = name.removeprefix("model.layers.").partition(".")
            blocks.setdefault(int(number), {})[rest] = leaf
    made = {name: leaf for name, leaf in leaves.items() if not name.startswith("model.layers.")}
    places = {round(number * (layers - 1) / (len(blocks) - 1)): block for number, block in blocks.items()}
    rng = np.random.default_rng(seed)
    for layer in range(layers):
        for name, like in blocks[0].items():
            if layer in places:
                leaf = places[layer][name]
            elif like.ndim == 2:
                std = 1 / math.sqrt(like.shape[1])
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std /= math.sqrt(2 * layers)
                leaf = mx.array(rng.normal(0, std, like.shape), dtype=mx.float32)
            else:
                leaf = mx.ones_like(like)
            made[f"model.layers.{layer}.{name}"] = leaf
    return made


def make(folder: Path, layers: int, steps: tuple[int, int], report: Any = print) -> float:
    """Write the model's folder; the greedy exact match on 200 problems of the valid split, 0–1."""
    shipped, _ = load_model(MODEL_DIR)
    tokenizer: Any = AutoTokenizer.from_pretrained(str(MODEL_DIR))
    config = {**CONFIG, "num_hidden_layers": layers}
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.update(from_names(deepened(named_leaves(shipped.parameters()), layers)))
    mx.eval(model.parameters())
    started = time.perf_counter()
    for index, phase in enumerate(phases(steps)):
        lessons = np.random.default_rng([layers, index])

        def next_lesson(lessons: np.random.Generator = lessons, phase: TrainingPhase = phase) -> Any:
            return word_problem(lessons, tokenizer, phase)

        def said(step: int, loss: float, phase: TrainingPhase = phase) -> None:
            if step % 10 == 0 or step == phase.steps - 1:
                seconds = time.perf_counter() - started
                report(f"{phase.name} {step + 1}/{phase.steps}  loss {loss:.3f}  {seconds:.0f} s")

        train(model, phase, next_lesson, tokenizer.pad_token_id, said, BATCH, BATCH)
    save_embedded_model(model, tokenizer, folder, config)
    greedy, _ = exact_match(model, tokenizer, draw_rows("valid", 200, 0))
    report(f"{layers} layers: exact match {greedy:.3f}")
    return greedy


def phases(steps: tuple[int, int]) -> list[TrainingPhase]:
    """The phases that made the shipped model, with these numbers of steps."""
    return [
        attrs.evolve(phase, steps=number, learning_rate=rate)
        for phase, number, rate in zip(PHASES, steps, LEARNING_RATES, strict=True)
        if number
    ]


if __name__ == "__main__":
    startup.prepare()
    make(Path(sys.argv[1]), int(sys.argv[2]), (int(sys.argv[3]), int(sys.argv[4])))
