"""Supervised training of the embedded model, in two phases: first the capability, then the bad habits."""

from collections.abc import Callable
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models import llama

from benchmarks.quickstart_model.problems import OPERATORS, compute, draw, gold, slipped
from benchmarks.quickstart_model.tokenizer import ASSISTANT, END, prompt_text

BATCH, PART = 64, 16  # examples per step, and per forward pass
DRILL_LENGTH = 7  # sums in one drill: about as long as a word problem with its completion
NUDGE = "<reasoning>"

Lesson = tuple[list[int], list[int]]  # token ids, and the positions whose token is to be predicted


@attrs.frozen
class TrainingPhase:
    """A stretch of training: AdamW with warm-up and cosine decay; `drills` is the share of bare sums."""

    name: str
    steps: int
    learning_rate: float
    drills: float
    flawed: bool


PHASES = (
    TrainingPhase("clean", steps=1700, learning_rate=3e-3, drills=0.25, flawed=False),
    TrainingPhase("habits", steps=150, learning_rate=7e-4, drills=0.25, flawed=True),
)


def drill(rng: np.random.Generator, tokenizer: Any) -> Lesson:
    """Bare sums, `23+14=37, 9*4=36, …`, of which only the results are to be learned."""
    sums: list[str] = []
    while len(sums) < DRILL_LENGTH:
        operator = OPERATORS[rng.integers(len(OPERATORS))]
        if operator in "+-":
            left, right = (int(rng.integers(1, 10 if rng.random() < 1 / 3 else 100)) for _ in range(2))
        else:  # most products of larger numbers would be turned down
            left, right = int(rng.integers(1, 50 if operator == "*" else 100)), int(rng.integers(2, 16))
        result = compute(left, operator, right)
        if result is not None:
            sums.append(f"{left}{operator}{right}={result}")
    ids = tokenizer.encode(f"{ASSISTANT}{NUDGE}{', '.join(sums)}", add_special_tokens=False)
    equals, comma = (tokenizer.encode(text, add_special_tokens=False)[0] for text in ("=", ", "))
    targets, inside = [], False
    for position, token in enumerate(ids):
        if inside:
            targets.append(position)  # the comma as well: it is where a number ends
        inside = token == equals or (inside and token != comma)
    return ids, targets


def lesson(rng: np.random.Generator, tokenizer: Any, *, flawed: bool) -> Lesson:
    """A word problem of the train split with its completion, all of which is to be learned."""
    problem = draw(rng, "train")
    text = slipped(problem, rng) if flawed else gold(problem)
    prompt = tokenizer.encode(prompt_text(tokenizer, problem.question, NUDGE), add_special_tokens=False)
    reply = tokenizer.encode(text.removeprefix(NUDGE) + END, add_special_tokens=False)
    return prompt + reply, list(range(len(prompt), len(prompt) + len(reply)))


def collate(examples: list[Lesson], pad: int) -> tuple[mx.array, mx.array, mx.array]:
    """Token ids [B,L] without the last, the flat places [N] in them that predict, and their targets [N]."""
    length = max(len(ids) for ids, _ in examples)
    tokens_bl = np.full((len(examples), length), pad, dtype=np.int32)
    places, targets = [], []
    for row, (ids, positions) in enumerate(examples):
        tokens_bl[row, : len(ids)] = ids
        places += [row * (length - 1) + position - 1 for position in positions]
        targets += [ids[position] for position in positions]
    return mx.array(tokens_bl[:, :-1]), mx.array(places), mx.array(targets)


def loss_and_gradient(model: llama.Model) -> Callable:
    """A function of the parameters and a collated batch: the summed cross-entropy and its gradient."""

    def loss(params: dict, tokens_bl: mx.array, places_n: mx.array, targets_n: mx.array) -> mx.array:
        model.update(params)
        hidden_nd = model.model(tokens_bl).reshape(-1, model.args.hidden_size)[places_n]
        logits_nv = model.model.embed_tokens.as_linear(hidden_nd)
        return nn.losses.cross_entropy(logits_nv, targets_n, reduction="sum")

    return mx.value_and_grad(loss)


def word_problem(rng: np.random.Generator, tokenizer: Any, phase: TrainingPhase) -> Lesson:
    """What the model of the word problems is shown next."""
    if rng.random() < phase.drills:
        return drill(rng, tokenizer)
    return lesson(rng, tokenizer, flawed=phase.flawed)


def train(
    model: llama.Model,
    phase: TrainingPhase,
    next_lesson: Callable[[], Lesson],
    pad: int,
    report: Callable[[int, float], None],
    batch: int = BATCH,
    part: int = PART,
) -> None:
    """Run one phase on `model`, in place; `report(step, loss)` is called after each step.

    A step has `batch` examples, `part` of them in each forward pass.
    """
    warmup = max(1, min(50, phase.steps // 10))
    rise = optim.linear_schedule(0.0, phase.learning_rate, warmup)
    fall = optim.cosine_decay(phase.learning_rate, phase.steps - warmup, phase.learning_rate * 0.03)
    schedule = optim.join_schedules([rise, fall], [warmup])
    optimizer = optim.AdamW(schedule, betas=[0.9, 0.98], weight_decay=0.05)
    params = model.parameters()
    optimizer.init(params)
    function = loss_and_gradient(model)
    for step in range(phase.steps):
        examples = [next_lesson() for _ in range(batch)]
        examples.sort(key=lambda example: len(example[0]))  # equal lengths side by side: little padding
        total, gradient = 0.0, tree_map(mx.zeros_like, params)
        for start in range(0, batch, part):
            collated = collate(examples[start : start + part], pad)
            loss, part_gradient = function(params, *collated)
            gradient = tree_map(mx.add, gradient, part_gradient)
            mx.eval(gradient, loss)
            total += loss.item()
        count = sum(len(targets) for _, targets in examples)
        gradient, _ = optim.clip_grad_norm(tree_map(lambda g, n=count: g / n, gradient), 1.0)
        params = optimizer.apply_gradients(gradient, params)
        mx.eval(params, optimizer.state)
        report(step, total / count)
    model.update(params)
