"""The order in which a run goes through its training examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from runners.config.loading import Config
from runners.data.curriculum import Estimates, draw_weights, drawn, explores
from runners.data.datasets import epoch_order
from runners.data.prompts import Example


@attrs.define(eq=False)
class PromptStream:
    """Training examples of a run: epoch after epoch, each in its own permutation."""

    examples: Sequence[Example]
    seed: int
    position: int = 0  # examples handed out so far
    rates_n: np.ndarray | None = None  # measured pass rates: each epoch goes from easy to hard; None: mixed
    _order: tuple[int, list[int]] = attrs.field(default=(-1, []), init=False)

    @property
    def epoch(self) -> float:
        """Epochs done, with fractions."""
        return self.position / len(self.examples)

    def take(self, number: int) -> list[Example]:
        """The next examples; a batch may extend into the next epoch."""
        taken = []
        for _ in range(number):
            taken.append(self.examples[self._in_order(self.position)])
            self.position += 1
        return taken

    def taking(self, known: Estimates | None, step: int, config: Config) -> Callable[[int], list[Example]]:
        """`take` for a batch step; with estimates, data.explore of its draws follow the usual order, and the
        others are drawn by weight. No prompt is drawn twice in a step while there are others: one by weight
        replaces what the usual order would repeat."""
        if known is None or config.data.curriculum != "adaptive":
            return self.take
        data, taken = config.data, set[int]()
        how = {"target": data.target_rate, "decay": data.rate_decay}
        weights_n = draw_weights(known, step, size=config.rollout.num_generations, **how)

        def take(number: int) -> list[Example]:
            start, self.position = self.position, self.position + number
            places = [explores(position, data.explore) for position in range(start, self.position)]
            in_order = dict.fromkeys(self._in_order(place) for place in places if place is not None)
            chosen = [each for each in in_order if each not in taken]
            taken.update(chosen)
            chosen += drawn(weights_n, number - len(chosen), taken, self.seed, start)
            taken.update(chosen)
            return [self.examples[each] for each in chosen]

        return take

    def _in_order(self, position: int) -> int:
        """The number of the example at a place of the usual order."""
        epoch, place = divmod(position, len(self.examples))
        if self._order[0] != epoch:
            order = epoch_order(len(self.examples), self.seed, epoch)
            if self.rates_n is not None:
                order = order[np.argsort(-self.rates_n[order], kind="stable")]
            self._order = epoch, order.tolist()
        return self._order[1][place]


@attrs.frozen
class RunLength:
    """The length of a run."""

    batch_steps: int  # rollouts
    updates: int  # optimizer updates, including all passes over each rollout
    supervised: int = 0  # batch steps: the first ones, on gold completions
    supervised_updates: int = 0

    @classmethod
    def of(cls, config: Config, examples: int, gold: int = 0) -> RunLength:
        """From the config and the numbers of training examples and of gold completions."""
        optim, sft, first, own = config.optim, config.sft, 0, 0
        if gold:
            accumulated = gold_batch(config) * optim.gradient_accumulation_steps
            first = sft.updates or math.ceil(gold * max(sft.epochs, 1) / accumulated)
            own = first * optim.gradient_accumulation_steps
        if sft.only:
            return cls(own, first, own, first)
        steps = optim.max_steps or math.ceil(examples * optim.num_epochs / optim.batch_size)
        phases = math.ceil(steps / optim.gradient_accumulation_steps)
        return cls(own + steps, first + phases * optim.num_iterations * optim.minibatches, own, first)


def gold_batch(config: Config) -> int:
    """Gold completions of a supervised batch step."""
    return config.sft.batch_size or config.optim.batch_size * config.rollout.num_generations
