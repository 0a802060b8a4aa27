"""Completes a run's prompts with its model before training, for `grpo check --sample` and `grpo
difficulty`.
"""

import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np

import grpo_fn as g
from runners.config.loading import Config
from runners.data.curriculum import passed, prompt_id, read_difficulty
from runners.data.datasets import load_rows, with_answers_of
from runners.data.prompts import Example, build_examples
from runners.environments.environments import all_rewards, load_code, start_worker
from runners.errors import UserError
from runners.evaluation.completions import Completion, Evaluator
from runners.evaluation.measurement import evaluation_key, evaluator_of, open_model
from runners.files.json_files import JsonLines
from runners.machine.startup import Platform

# called with the number of completed prompts, the number of prompts, and the remaining seconds
Progress = Callable[[int, int, float], None]


def open_problems(
    config: Config, machine: Platform, most: int | None = None
) -> tuple[Evaluator, g.Sampling, list[Example], tuple[str, ...]]:
    """Returns the evaluator that completes and scores a checked config's training prompts, the
    sampling settings, the first `most` prompts, and notices. If `most` is None, all prompts are
    returned.

    Sampling uses the run's settings and weights in full precision. Rewards and their errors are
    handled as in a run.
    """
    worker = start_worker(config)
    rewards = load_code(config, worker)
    loaded, environments = open_model(
        config,
        config.model.path,
        machine,
        worker,
        adapter=config.model.adapters,
        dtype=config.model.dtype,
        trust_remote_code=config.model.trust_remote_code,
    )
    every = all_rewards(rewards, environments)
    rows = load_rows(config.data, config.folders)[0]
    config = with_answers_of(config, rows)
    del rows[len(rows) if most is None else most :]
    processor = loaded.vision.processor if loaded.vision else None
    tools = environments.schemas if environments else ()
    examples, too_long = build_examples(rows, config.data, loaded.tokenizer, tools, processor)
    notices = list(loaded.notices)
    if most is None:
        notices += rows.notices("train", too_long, config.data.max_prompt_length)
    loaded.check([example.tokens for example in examples], config.rollout.max_new_tokens)
    evaluator, sampling = evaluator_of(loaded, config, every, environments)
    return evaluator, sampling, examples, tuple(notices)


def sample_completions(
    config: Config, machine: Platform, count: int
) -> tuple[list[tuple[Example, Completion]], tuple[str, ...]]:
    """Samples one completion for each of a checked config's first `count` training problems. Also
    returns warnings.
    """
    evaluator, sampling, examples, notices = open_problems(config, machine, count)
    found = evaluator.complete_all(examples, sampling, evaluation_key(config))
    notice = evaluator.notice(found, examples, sampling.max_new_tokens)
    warnings = (*notices, *evaluator.problems, *filter(None, [notice]))
    return list(zip(examples, found, strict=True)), warnings


def measure_difficulty(
    config: Config,
    machine: Platform,
    samples: int,
    path: Path,
    *,
    overwrite: bool,
    progress: Progress,
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Samples completions for each training prompt in a checked config, and appends a line per
    prompt to the file. Returns the file's lines, and messages about model, data and failed rewards.

    Prompts that are already in the file are skipped, so an interrupted call can be resumed. A
    prompt's completions depend only on seed, prompt and number.

    Raises UserError if the file was measured differently, or cannot be written.
    """
    measured = _measured(config, samples)
    known = [] if overwrite or not path.exists() else read_difficulty(path)
    if any(line.get("measured") != measured for line in known):
        raise UserError(
            f"{path}: was measured with a different model, sampling or reward; --overwrite starts "
            "over, --out FILE writes elsewhere"
        )
    evaluator, one_each, prompts, notices = open_problems(config, machine)
    begun = time.perf_counter()
    sampling = attrs.evolve(one_each, num_generations=samples)
    before = len(known)
    by_id = {prompt_id(each): each for each in prompts}
    measured_ids = {line["prompt"] for line in known}
    examples = [each for name, each in by_id.items() if name not in measured_ids]
    numbered = [each.number for each in examples]
    lines = JsonLines(path, keep=None if overwrite else sys.maxsize)
    try:
        for part, batch in evaluator.complete(examples, sampling, evaluation_key(config), numbered):
            for place, example in enumerate(batch.examples):
                group = part[place * samples : (place + 1) * samples]
                line = {
                    "prompt": prompt_id(example),
                    "number": example.number,
                    **_line(group, config.data.pass_reward),
                    "measured": measured,
                }
                known.append(line)
                lines.write(line)
            if lines.fault:
                raise UserError(f"{path}: cannot be written: {lines.fault.strerror or lines.fault}")
            done = len(known) - before
            pace = (time.perf_counter() - begun) / done
            progress(len(known), before + len(examples), pace * (len(examples) - done))
    finally:
        lines.close()
    return known, (*notices, *evaluator.problems)


def _line(group: list[Completion], at_least: float) -> dict[str, Any]:
    names = list(group[0].rewards)
    values_kb = np.array([[each.rewards[name] for each in group] for name in names], np.float64)
    rewards_b = np.array([each.reward for each in group], np.float64)
    known_b = ~np.isnan(rewards_b)
    return {
        "samples": int(known_b.sum()),
        "passes": int((passed(names, values_kb, rewards_b, at_least) & known_b).sum()),
        "reward": float(rewards_b[known_b].mean()) if known_b.any() else None,
        "tokens": sum(each.tokens for each in group) / len(group),
    }


def _measured(config: Config, samples: int) -> str:
    """Returns a digest of everything that pass rates depend on, except the prompt."""
    values = config.to_dict()
    sections = ("model", "answer", "reward", "rollout", "env")
    facts = [values[name] for name in sections if name in values]
    text = repr((samples, config.run.seed, config.data.nudge, config.data.pass_reward, facts))
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:12]
