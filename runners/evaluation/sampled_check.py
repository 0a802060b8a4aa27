"""A run's prompts, completed by its model before it starts: `grpo check --sample`, `grpo difficulty`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs

import grpo_fn as g
from runners.config.loading import Config
from runners.data.datasets import load_rows, with_answers_of
from runners.data.prompts import Example, build_examples
from runners.data.rendering import use_template
from runners.engines.settings import sampling_of
from runners.environments.environments import all_rewards, build_environments
from runners.environments.own_code import load_code, start_worker
from runners.evaluation.completions import Completion, Evaluator
from runners.evaluation.measurement import evaluation_key
from runners.inference.inference_model import load_inference
from runners.machine.startup import Platform
from runners.rewards.scoring import Scorer

OnError = Literal["skip", "raise"]  # of a failing reward


@attrs.frozen(eq=False)
class Problems:
    """A config's training prompts, with what completes and scores them as in a run."""

    evaluator: Evaluator
    sampling: g.Sampling
    examples: list[Example]
    notices: tuple[str, ...]


@attrs.frozen(eq=False)
class Sampled:
    """A completion of each of the first problems, drawn as in the run."""

    completions: Sequence[tuple[Example, Completion]]
    warnings: tuple[str, ...]


def open_problems(config: Config, machine: Platform, on_error: OnError, most: int | None = None) -> Problems:
    """Loads the model of a checked config, and its training prompts: the first `most`, None: all.

    Sampling is the run's, with weights in full precision, and rewards score as in a run, as do its errors.
    """
    worker = start_worker(config)
    rewards = load_code(config, worker)
    loaded = load_inference(
        config.model.path,
        machine,
        adapter=config.model.adapters,
        dtype=config.model.dtype,
        loader=config.model.loader,
        folders=config.folders,
        trust_remote_code=config.model.trust_remote_code,
        images=bool(config.data.image),
        image_max_pixels=config.data.image_max_pixels,
    )
    tokenizer, ends, decoder, vision = loaded.tokenizer, loaded.eos_ids, loaded.decoder, loaded.vision
    use_template(tokenizer, config.data.chat_template)
    environments = build_environments(
        config.env, config.data, tokenizer, decoder, ends, config.folders, worker
    )
    every = all_rewards(rewards, environments)
    rows = load_rows(config.data, config.folders)[0]
    config = with_answers_of(config, rows)
    del rows[len(rows) if most is None else most :]
    processor = vision.processor if vision else None
    tools = environments.schemas if environments else ()
    examples, too_long = build_examples(rows, config.data, tokenizer, tools, processor)
    left_out = rows.notices("train", too_long, config.data.max_prompt_length) if most is None else []
    loaded.check([example.tokens for example in examples], config.rollout.max_new_tokens)
    evaluator = Evaluator(
        engine=loaded.engine,
        scorer=Scorer(every, config.reward.timeout, on_error) if every else None,
        form=config.answer_form,
        decoder=decoder,
        nudge=config.data.nudge,
        rows=config.rollout.max_batch,
        environments=environments,
        vision=vision,
    )
    sampling = sampling_of(config, ends, decoder.find_stop(config.rollout.stop))
    sampling = attrs.evolve(sampling, num_generations=1, with_entropy=False)
    return Problems(evaluator, sampling, examples, (*loaded.notices, *left_out))


def sample_completions(config: Config, machine: Platform, count: int) -> Sampled:
    """A completion of each of the first `count` training problems of a checked config."""
    opened = open_problems(config, machine, "skip", count)
    found: list[Completion] = []
    for part, _ in opened.evaluator.complete(opened.examples, opened.sampling, evaluation_key(config)):
        found += part
    notice = opened.evaluator.notice(found, opened.examples, opened.sampling.max_new_tokens)
    warnings = (*opened.notices, *opened.evaluator.problems, *filter(None, [notice]))
    return Sampled(list(zip(opened.examples, found, strict=True)), warnings)
