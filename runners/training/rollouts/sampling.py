"""How a run samples: the sampler of [rollout], and a collector that draws from the sampling role."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import mlx.core as mx

import grpo_fn as g
from grpo_fn.rollout import FindStop, Replies
from grpo_fn.trees import Tree
from runners.config.loading import Config
from runners.data.prompts import Example
from runners.environments.environments import Environments
from runners.machine.launch_modes import launch_keywords
from runners.models.loaded_model import LoadedModel
from runners.ranks.ranks import Ranks
from runners.rewards.finished_episodes import FinishedEpisodes
from runners.rewards.functions import Reward
from runners.rewards.scoring import Scorer
from runners.tokenization.text import TextDecoder
from runners.training.learner import Learner
from runners.training.rollouts.rank_rollout import empty_rollout
from runners.training.rollouts.rollout import Collector


def sampling_of(config: Config, eos_ids: Iterable[int], find_stop: FindStop | None) -> g.Sampling:
    """How the run samples its completions."""
    rollout = config.rollout
    return g.Sampling(
        num_generations=rollout.num_generations,
        max_new_tokens=rollout.max_new_tokens,
        eos_ids=eos_ids,
        find_stop=find_stop,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        with_entropy=config.loss.top_entropy_quantile < 1,
    )


def build_collector(
    config: Config,
    learner: Learner,
    rewards: Sequence[Reward],
    decoder: TextDecoder,
    find_stop: FindStop | None,
    loaded: LoadedModel,
    ranks: Ranks,
    environments: Environments | None,
) -> Collector:
    """A collector over the run's model, or over its conversations with `environments`."""
    rollout, sampling = config.rollout, sampling_of(config, loaded.eos_ids, find_stop)
    decoding = g.Decoding(
        max_batch=rollout.max_batch,
        check_every=rollout.check_every,
        turns_together=config.env.schedule == "together",
        **launch_keywords(rollout.launch),
    )

    vision = loaded.vision
    role = learner.role  # a reference to the learner would keep its first state alive

    def generate(
        params: Tree, examples: Sequence[Example], numbers: Sequence[int], key: mx.array
    ) -> g.Rollout:
        images = vision.see(examples) if vision else None

        def sample(policy: g.Policy, params: Tree) -> g.Rollout:
            if not examples:
                return empty_rollout(rollout.num_generations, with_entropy=sampling.with_entropy)
            return g.generate(
                policy,
                params,
                [example.tokens for example in examples],
                sampling,
                key=key,
                prompt_numbers=numbers,
                decoding=decoding,
                images=images,
            )

        return role.draw(sample, params)

    def play(
        params: Tree, examples: Sequence[Example], numbers: Sequence[int], key: mx.array
    ) -> tuple[g.Rollout, FinishedEpisodes]:
        assert environments is not None
        player, size, played = environments, rollout.num_generations, list[FinishedEpisodes]()

        def sample(policy: g.Policy, params: Tree) -> g.Rollout:
            """Samples whole conversations; when repeated, they start with `reset` again."""

            def converse(
                prompts: Sequence[Sequence[int]],
                num_generations: int,
                replies: Replies,
                stops: frozenset[int],
            ) -> g.Rollout:
                if not prompts:
                    return empty_rollout(num_generations, with_entropy=sampling.with_entropy)
                # With one completion per prompt, each of an example's rows is a prompt.
                rows = size // num_generations
                return g.generate(
                    policy,
                    params,
                    prompts,
                    attrs.evolve(sampling, num_generations=num_generations, eos_ids=sampling.eos_ids | stops),
                    key=key,
                    prompt_numbers=[number * rows + row for number in numbers for row in range(rows)],
                    decoding=decoding,
                    replies=replies,
                )

            found, conversations = player.play(
                examples, size, converse, lambda differ: ranks.agree("the prompts", differ)
            )
            played[:] = [conversations]
            return found

        return role.draw(sample, params), played[0]

    scorer = Scorer(rewards, config.reward.timeout, config.reward.on_error)
    return Collector(generate, scorer, decoder, config, ranks, play if environments else None)
