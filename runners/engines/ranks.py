"""`RanksEngine`: a local engine on several ranks."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import mlx.core as mx

import grpo_fn as g
from grpo_fn.trees import Tree
from runners.engines.engine import Engine, Requests, ShouldStop, Token, never
from runners.engines.local import LocalEngine
from runners.ranks.ranks import Ranks


def on_ranks(engine: LocalEngine, ranks: Ranks) -> Engine:
    """The engine as all ranks use it together; of one rank it is the engine itself."""
    return engine if ranks.is_alone else RanksEngine(engine, ranks)


@attrs.frozen(eq=False)
class RanksEngine:
    """Each rank samples its share, and all of them fall back together.

    All ranks call `generate` equally often, a rank without prompts too. A completion depends on its prompt's
    number, so that N ranks sample what one does.
    """

    engine: LocalEngine
    ranks: Ranks

    @property
    def version(self) -> int:
        """As `Engine`."""
        return self.engine.version

    def load(self, params: Tree, version: int) -> None:
        """As `Engine`; the same on all ranks."""
        self.engine.load(params, version)

    def generate(
        self, requests: Requests, sampling: g.Sampling, *, key: mx.array, should_stop: ShouldStop = never
    ) -> g.Rollout:
        """As `Engine`, of this rank's share of the prompts."""

        def agree(fault: str | None) -> str | None:
            messages = self.ranks.all_gather_object("the sampler", fault)
            return next((message.value for message in messages if message.value is not None), None)

        return self.engine.generate(requests, sampling, key=key, should_stop=should_stop, agree=agree)

    def stream(
        self, request: Requests, sampling: g.Sampling, *, key: mx.array, should_stop: ShouldStop = never
    ) -> Iterator[Token]:
        """As `Engine`, on this rank alone."""
        return self.engine.stream(request, sampling, key=key, should_stop=should_stop)
