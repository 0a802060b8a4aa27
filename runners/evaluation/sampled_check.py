"""Real completions before a run, for `grpo check --sample`: what is read from each, and each reward."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

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


@attrs.frozen(eq=False)
class Sampled:
    """A completion of each of the first problems, drawn as in the run."""

    completions: Sequence[tuple[Example, Completion]]
    warnings: tuple[str, ...]


def sample_completions(config: Config, machine: Platform, count: int) -> Sampled:
    """Loads the model of a checked config and completes the first `count` training problems.

    Sampling is the run's, with weights in full precision, and rewards score as in a run, as do its errors.
    """
    worker = start_worker(config)
    rewards = load_code(config, worker)
    loaded = load_inference(
        config.model.path,
        machine,
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
    del rows[count:]
    tools = environments.schemas if environments else ()
    processor = vision.processor if vision else None
    examples, _ = build_examples(rows, config.data, tokenizer, tools, processor)
    limit = config.rollout.max_new_tokens
    loaded.check([example.tokens for example in examples], limit)
    evaluator = Evaluator(
        engine=loaded.engine,
        scorer=Scorer(every, config.reward.timeout, "skip") if every else None,
        form=config.answer_form,
        decoder=decoder,
        nudge=config.data.nudge,
        environments=environments,
        vision=vision,
    )
    sampling = sampling_of(config, ends, decoder.find_stop(config.rollout.stop))
    sampling = attrs.evolve(sampling, num_generations=1, with_entropy=False)
    found: list[Completion] = []
    for part, _ in evaluator.complete(examples, sampling, evaluation_key(config)):
        found += part
    notice = evaluator.notice(found, examples, limit)
    warnings = (*loaded.notices, *evaluator.problems, *filter(None, [notice]))
    return Sampled(list(zip(examples, found, strict=True)), warnings)
