"""A run's prompts, completed by its model before it starts: `grpo check --sample`, `grpo difficulty`."""

from __future__ import annotations

import attrs

import grpo_fn as g
from runners.config.loading import Config
from runners.data.datasets import load_rows, with_answers_of
from runners.data.prompts import Example, build_examples
from runners.environments.environments import all_rewards
from runners.environments.own_code import load_code, start_worker
from runners.evaluation.completions import Completion, Evaluator
from runners.evaluation.measurement import evaluation_key, evaluator_of, open_model
from runners.machine.startup import Platform


@attrs.frozen(eq=False)
class Problems:
    """A config's training prompts, with what completes and scores them as in a run."""

    evaluator: Evaluator
    sampling: g.Sampling
    examples: list[Example]
    notices: tuple[str, ...]


def open_problems(config: Config, machine: Platform, most: int | None = None) -> Problems:
    """Loads the model of a checked config, and its training prompts: the first `most`, None: all.

    Sampling is the run's, with weights in full precision, and rewards score as in a run, as do its errors.
    """
    worker = start_worker(config)
    rewards = load_code(config, worker)
    how = {"adapter": config.model.adapters, "dtype": config.model.dtype}
    trust = config.model.trust_remote_code
    loaded, environments = open_model(
        config, config.model.path, machine, worker, trust_remote_code=trust, **how
    )
    every = all_rewards(rewards, environments)
    rows = load_rows(config.data, config.folders)[0]
    config = with_answers_of(config, rows)
    del rows[len(rows) if most is None else most :]
    processor = loaded.vision.processor if loaded.vision else None
    tools = environments.schemas if environments else ()
    examples, too_long = build_examples(rows, config.data, loaded.tokenizer, tools, processor)
    left_out = rows.notices("train", too_long, config.data.max_prompt_length) if most is None else []
    loaded.check([example.tokens for example in examples], config.rollout.max_new_tokens)
    evaluator, sampling = evaluator_of(loaded, config, every, environments)
    return Problems(evaluator, sampling, examples, (*loaded.notices, *left_out))


def sample_completions(
    config: Config, machine: Platform, count: int
) -> tuple[list[tuple[Example, Completion]], tuple[str, ...]]:
    """A completion of each of the first `count` training problems of a checked config, and warnings."""
    opened = open_problems(config, machine, count)
    found: list[Completion] = []
    for part, _ in opened.evaluator.complete(opened.examples, opened.sampling, evaluation_key(config)):
        found += part
    notice = opened.evaluator.notice(found, opened.examples, opened.sampling.max_new_tokens)
    warnings = (*opened.notices, *opened.evaluator.problems, *filter(None, [notice]))
    return list(zip(opened.examples, found, strict=True)), warnings
