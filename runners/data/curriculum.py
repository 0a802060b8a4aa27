"""Selects the prompts that a run samples, with a preference for pass rates near a target.

    p̂ = (passes + m) / (weight + 1)   a prompt's rate, pooled with one completion of rate m
    w = exp(−2·G·KL(target ‖ p̂)) · (1 − decay^age)   its sampling weight; age in batch steps

m is the pass rate over all completions so far, itself pooled with one completion of the target
rate. A new prompt has the rate m. The first factor decreases as a group of G with this rate becomes
unlikely to show the target (its exponent is −2 times the log-likelihood ratio). The second factor
makes a prompt less likely right after it was sampled. Both of a prompt's statistics, passes and
weight, decay with age, so prompts are sampled again once the policy may have changed.
"""

import hashlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Self

import attrs
import mlx.core as mx
import numpy as np

from grpo_fn.prng import CURRICULUM, fold_in, random_bits
from runners.config.names import REWARD_NAMES
from runners.config.sections import DataConfig
from runners.data.prompts import Example
from runners.errors import UserError
from runners.files.json_files import read_lines

_MOST = 1 << 24  # completions per prompt; float32 counts up to this number exactly
NEVER = -1  # marks a missing step or rate
BANDS = {"hard": 0.25, "medium": 0.75, "easy": 1.01}  # upper bounds of first rates


@attrs.frozen(eq=False)
class Estimates:
    """Pass statistics for a run's N training prompts."""

    passes_n: np.ndarray  # float32: completions that passed, decayed up to step_n
    weight_n: np.ndarray  # float32: completions, decayed likewise
    step_n: np.ndarray  # int32: the last batch step with this prompt, or NEVER
    first_n: np.ndarray  # float32: the first measured rate, or NEVER

    @classmethod
    def of(cls, counts: Sequence[tuple[float, float]]) -> Self:
        """Creates statistics from (passes, completions) measured before the run; (0, 0) stands for
        an unmeasured prompt.
        """
        passes_n, weight_n = np.array(counts, np.float32).reshape(-1, 2).T.copy()
        first_n = np.where(weight_n > 0, passes_n / np.maximum(weight_n, 1), NEVER).astype(
            np.float32
        )
        return cls(passes_n, weight_n, np.full(len(counts), NEVER, np.int32), first_n)


# for a group: prompt number, number of passed completions, number of completions
Outcome = tuple[int, int, int]


def updated(known: Estimates, outcomes: Sequence[Outcome], step: int, decay: float) -> Estimates:
    """Returns the statistics updated with a batch step's groups. A group without rewards still
    marks its prompt as sampled.
    """
    new = Estimates(
        known.passes_n.copy(), known.weight_n.copy(), known.step_n.copy(), known.first_n.copy()
    )
    for prompt, passes, completions in outcomes:
        faded = decay ** max(step - max(int(new.step_n[prompt]), 0), 0)
        new.passes_n[prompt] = new.passes_n[prompt] * faded + passes
        new.weight_n[prompt] = new.weight_n[prompt] * faded + completions
        new.step_n[prompt] = step
        if completions and new.first_n[prompt] == NEVER:
            new.first_n[prompt] = passes / completions
    return new


def draw_weights(
    known: Estimates, step: int, *, target: float, decay: float, size: int
) -> np.ndarray:
    """Returns the sampling weight w of each prompt, float64 [N], at a batch step with group size
    `size`.
    """
    faded_n = decay ** np.maximum(step - np.maximum(known.step_n, 0), 0).astype(np.float64)
    passes_n = known.passes_n * faded_n
    weight_n = known.weight_n * faded_n
    common = (passes_n.sum() + target) / (weight_n.sum() + 1)
    rate_n = np.clip((passes_n + common) / (weight_n + 1), 1e-4, 1 - 1e-4)
    divergence_n = target * np.log(target / rate_n) + (1 - target) * np.log(
        (1 - target) / (1 - rate_n)
    )
    return np.exp(-2 * size * divergence_n) * np.where(known.step_n == NEVER, 1.0, 1 - faded_n)


def drawn_by_weight(
    weights_n: np.ndarray, number: int, taken: Collection[int], seed: int, position: int
) -> list[int]:
    """Samples prompts by weight without replacement, avoiding those in `taken` while there are
    others.

    Each prompt gets the key log(u) / w, and the largest keys win (Efraimidis and Spirakis, 2006).
    The random u depends only on the seed and on the number of earlier prompts, so all ranks sample
    the same prompts.
    """
    key = fold_in(mx.random.key(seed), CURRICULUM, position)
    bits_n = np.array(random_bits(key[None], 0, len(weights_n), 1)).reshape(-1).astype(np.float64)
    place_n = np.log((bits_n + 0.5) / 2.0**32) / np.maximum(weights_n, 1e-290)
    place_n[list(taken)] = -np.inf
    order = np.argsort(-place_n, kind="stable")
    return [int(order[i % len(order)]) for i in range(number)]


def explores(position: int, share: float) -> int | None:
    """Returns the place in the usual order for the sample at `position`, or None if that sample is
    drawn by weight.
    """
    before = int(position * share)
    after = int((position + 1) * share)
    return before if after > before else None


def passed(
    names: Sequence[str], values_kb: np.ndarray, rewards_b: np.ndarray, at_least: float
) -> np.ndarray:
    """Returns whether each completion passed, bool [B]. A completion passes if the built-in
    correctness reward rates its answer right or, without that reward, if its combined reward is at
    least `at_least`.
    """
    if REWARD_NAMES[0] in names:
        return values_kb[list(names).index(REWARD_NAMES[0])] > 0
    return rewards_b >= at_least


def prompt_id(example: Example) -> str:
    """Returns a hash over a prompt's messages, images and reference answer, which is the same for
    every model.
    """
    content = [example.messages, [image.name for image in example.images], example.answer]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def rate_metrics(outcomes: Sequence[tuple[float, int, int]]) -> dict[str, float]:
    """Returns pass rates and group shares per difficulty band, from (first rate, passes,
    completions) per group. A prompt's first rate determines its band.

    A prompt's first group sets its first rate, so it counts only as `new`.
    """
    groups: dict[str, list[tuple[int, int]]] = {name: [] for name in ("new", *BANDS)}
    for first, passes, completions in outcomes:
        band = "new" if first < 0 else next(name for name, below in BANDS.items() if first < below)
        groups[band].append((passes, completions))
    metrics = {
        f"groups/share/{name}": len(rows) / len(outcomes)
        for name, rows in groups.items()
        if outcomes
    }
    for name, rows in groups.items():
        total = sum(completions for _, completions in rows)
        if total:
            metrics[f"groups/pass_rate/{name}"] = sum(passes for passes, _ in rows) / total
    return metrics


def read_difficulty(path: Path) -> list[dict[str, Any]]:
    """Reads a difficulty file, whose keys are listed in docs/cold-start.md. Raises UserError for
    other files.
    """
    bad: list[int] = []
    lines = list(read_lines(path, bad=bad))
    kinds = {
        tuple(type(line.get(key)) for key in ("prompt", "passes", "samples")) for line in lines
    }
    is_counted = kinds <= {(str, int, int)} and all(
        0 <= line["passes"] <= line["samples"] <= _MOST for line in lines
    )
    if bad or not is_counted:
        raise UserError(
            f'{path}: expected lines {{"prompt": HASH, "samples": K, "passes": from 0 to K}}, as '
            "`grpo difficulty` writes them"
        )
    return lines


def with_difficulty(
    examples: Sequence[Example], config: DataConfig
) -> tuple[list[Example], Estimates | None, list[str]]:
    """Returns the training prompts that data.curriculum selects, numbered in order; their
    statistics before the first step (None without a curriculum); and a message about skipped
    prompts.

    Raises UserError if none is left, or if no prompt is in the file.
    """
    if config.curriculum == "none":
        return list(examples), None, []
    place = f"data.difficulty = {config.difficulty}"
    lines = read_difficulty(Path(config.difficulty)) if config.difficulty else []
    found = {line["prompt"]: (float(line["passes"]), float(line["samples"])) for line in lines}
    counts = [found.get(prompt_id(example), (0.0, 0.0)) for example in examples]
    if config.difficulty and not any(samples for _, samples in counts):
        raise UserError(f"{place}: the file contains none of the {len(examples)} training prompts")
    kept = list(zip(examples, counts, strict=True))
    if config.curriculum == "static":
        low, high = config.pass_rates
        rates = [passes / samples if samples else NEVER for passes, samples in counts]
        kept = [each for each, rate in zip(kept, rates, strict=True) if low <= rate <= high]
        if not kept:
            raise UserError(
                f"{place}: no prompt has a pass rate from {low:g} to {high:g} (data.pass_rates)"
            )
    notice = (
        f"data.curriculum: {len(examples) - len(kept)} of {len(examples)} training prompts are "
        "skipped, because their pass rate is outside data.pass_rates or was not measured"
    )
    numbered = [attrs.evolve(example, number=number) for number, (example, _) in enumerate(kept)]
    notices = [notice] if len(kept) < len(examples) else []
    return numbered, Estimates.of([count for _, count in kept]), notices
