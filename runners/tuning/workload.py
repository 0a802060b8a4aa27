"""What decides how fast a run decodes: the model, the prompts' lengths, the number of rows, the sampler."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

import grpo_fn as g
from grpo_fn.policy import sharing_pays
from grpo_fn.trees import Tree
from runners.config.loading import Config
from runners.data.prompts import Example
from runners.data.stream import PromptStream


def sampler_of(config: Config) -> g.Sampler:
    """How the run draws tokens."""
    rollout = config.rollout
    return g.Sampler(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        with_entropy=config.loss.top_entropy_quantile < 1,
    )


@attrs.frozen(eq=False, kw_only=True)
class Workload:
    """One batch step's decoding, without the prompts' contents, which cost nothing."""

    policy: g.Policy
    params: Tree  # what samples
    lengths: tuple[int, ...]  # tokens of each prompt of the first batch step
    num_generations: int
    max_new_tokens: int
    sampler: g.Sampler

    @classmethod
    def of(cls, config: Config, policy: g.Policy, params: Tree, examples: Sequence[Example]) -> Workload:
        """A run's first batch step; `examples` are all that it trains on."""
        first = PromptStream(examples, config.run.seed).take(config.optim.batch_size)
        return cls(
            policy=policy,
            params=params,
            lengths=tuple(len(example.tokens) for example in first),
            num_generations=config.rollout.num_generations,
            max_new_tokens=config.rollout.max_new_tokens,
            sampler=sampler_of(config),
        )

    @property
    def rows(self) -> int:
        """Completions of a batch step."""
        return len(self.lengths) * self.num_generations

    @property
    def shares_prefix(self) -> bool:
        """Whether `generate` keeps a prompt once for its completions, by its own rule."""
        return self.policy.shares_prefix and sharing_pays()
