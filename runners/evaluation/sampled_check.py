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
from runners.environments.own_code import loading, start_worker
from runners.evaluation.completions import Completion, Evaluator, form_notice, is_cut
from runners.evaluation.measurement import evaluation_key
from runners.inference.inference_model import load_inference
from runners.machine.startup import Platform
from runners.rewards.functions import rewards_of
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
    rewards = rewards_of(config, worker)
    if code := loading(config.env, config.folders):
        worker.load(*code)
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
    use_template(loaded.tokenizer, config.data.chat_template)
    ends, decoder = loaded.eos_ids, loaded.decoder
    environments = build_environments(
        config.env, config.data, loaded.tokenizer, decoder, ends, config.folders, worker
    )
    every = all_rewards(rewards, environments)
    rows = load_rows(config.data, config.folders)[0]
    config = with_answers_of(config, rows)
    del rows[count:]
    processor = loaded.vision.processor if loaded.vision else None
    tools = environments.schemas if environments else ()
    examples, _ = build_examples(rows, config.data, loaded.tokenizer, tools, processor)
    limit, form = config.rollout.max_new_tokens, config.answer_form
    loaded.check([example.tokens for example in examples], limit)
    evaluator = Evaluator(
        engine=loaded.engine,
        scorer=Scorer(every, config.reward.timeout, "skip") if every else None,
        form=form,
        decoder=decoder,
        nudge=config.data.nudge,
        environments=environments,
        vision=loaded.vision,
    )
    sampling = sampling_of(config, ends, decoder.find_stop(config.rollout.stop))
    sampling = attrs.evolve(sampling, num_generations=1, with_entropy=False)
    found: list[Completion] = []
    for part, _ in evaluator.complete(examples, sampling, evaluation_key(config)):
        found += part
    notice = form_notice(
        form,
        [each.text for each in found],
        [example.answer for example in examples],
        [is_cut(each) for each in found],
        [each.tokens for each in found],
        limit,
    )
    warnings = (*loaded.notices, *evaluator.problems, *([notice] if notice else []))
    return Sampled(list(zip(examples, found, strict=True)), warnings)
