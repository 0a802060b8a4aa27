"""The order in which a run goes through its training examples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from runners.config.loading import Config
from runners.data.datasets import epoch_order
from runners.data.prompts import Example


@attrs.define(eq=False)
class PromptStream:
    """Training examples of a run: epoch after epoch, each in its own permutation."""

    examples: Sequence[Example]
    seed: int
    position: int = 0  # examples handed out so far
    _order: tuple[int, list[int]] = attrs.field(default=(-1, []), init=False)

    @property
    def epoch(self) -> float:
        """Epochs done, with fractions."""
        return self.position / len(self.examples)

    def take(self, number: int) -> list[Example]:
        """The next examples; a batch may extend into the next epoch."""
        taken = []
        for _ in range(number):
            epoch, place = divmod(self.position, len(self.examples))
            if self._order[0] != epoch:
                self._order = epoch, epoch_order(len(self.examples), self.seed, epoch).tolist()
            taken.append(self.examples[self._order[1][place]])
            self.position += 1
        return taken


@attrs.frozen
class RunLength:
    """The length of a run."""

    batch_steps: int  # rollouts
    updates: int  # optimizer updates, including all passes over each rollout

    @classmethod
    def of(cls, config: Config, examples: int) -> RunLength:
        """From the config and the number of training examples."""
        optim = config.optim
        steps = optim.max_steps or math.ceil(examples * optim.num_epochs / optim.batch_size)
        phases = math.ceil(steps / optim.gradient_accumulation_steps)
        return cls(steps, phases * optim.num_iterations * optim.minibatches)
