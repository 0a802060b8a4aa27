"""Defines the order in which a run uses its training examples."""

import functools
import math
from collections.abc import Sequence

import attrs
import numpy as np

from runners.config.loading import Config
from runners.data.curriculum import drawn_by_weight, explores
from runners.data.datasets import epoch_order
from runners.data.prompts import Example


@attrs.frozen(eq=False)
class PromptOrder:
    """The default order for a run's training examples: epoch after epoch, each in its own
    permutation.
    """

    examples: Sequence[Example]
    seed: int
    # measured pass rates, which sort each epoch from easy to hard; None shuffles it
    rates_n: np.ndarray | None = None

    def epoch(self, position: int) -> float:
        """Returns the number of completed epochs, as a fraction, after `position` examples."""
        return position / len(self.examples)

    def number_at(self, position: int) -> int:
        """Returns the number of the example at this position."""
        epoch, place = divmod(position, len(self.examples))
        return _permutation(self, epoch)[place]


@functools.lru_cache(maxsize=4)
def _permutation(order: PromptOrder, epoch: int) -> list[int]:
    numbers = epoch_order(len(order.examples), order.seed, epoch)
    if order.rates_n is not None:
        numbers = numbers[np.argsort(-order.rates_n[numbers], kind="stable")]
    return numbers.tolist()


@attrs.frozen(eq=False, kw_only=True)
class Weighted:
    """Settings for sampling a batch step's prompts by weight, for an adaptive curriculum."""

    weights_n: np.ndarray  # for each prompt, from `draw_weights`
    explore: float  # the share of samples that follow the usual order


@attrs.frozen(eq=False)
class Drawn:
    """Sampled examples, and the position of the run after them."""

    examples: tuple[Example, ...]
    position: int  # number of examples used so far
    taken: frozenset[int] = frozenset()  # numbers of the prompts sampled in this batch step


def drawn(
    order: PromptOrder,
    position: int,
    number: int,
    weighted: Weighted | None = None,
    taken: frozenset[int] = frozenset(),
) -> Drawn:
    """Returns the next `number` examples. A batch may extend into the next epoch.

    With `weighted`, a share of the examples follows the usual order and the others are sampled by
    weight. `taken` contains the prompts already sampled in this batch step. A batch step repeats no
    prompt while there are others. An example sampled by weight replaces one that the usual order
    would repeat.
    """
    places = range(position, position + number)
    if weighted is None:
        numbers = [order.number_at(place) for place in places]
        return Drawn(tuple(order.examples[each] for each in numbers), places.stop)
    explored = [explores(place, weighted.explore) for place in places]
    in_order = dict.fromkeys(order.number_at(place) for place in explored if place is not None)
    numbers = [each for each in in_order if each not in taken]
    taken |= frozenset(numbers)
    missing = number - len(numbers)
    numbers += drawn_by_weight(weighted.weights_n, missing, taken, order.seed, position)
    return Drawn(
        tuple(order.examples[each] for each in numbers), places.stop, taken | frozenset(numbers)
    )


@attrs.frozen
class RunLength:
    """The length of a run."""

    batch_steps: int  # rollouts
    updates: int  # optimizer updates, including all passes over each rollout
    supervised: int = 0  # number of initial batch steps on reference completions
    supervised_updates: int = 0

    @classmethod
    def of(cls, config: Config, examples: int, gold: int = 0) -> "RunLength":
        """Computes the length from the config, the number of training examples and the number of
        reference completions.
        """
        optim = config.optim
        sft = config.sft
        accumulated = gold_batch(config) * optim.gradient_accumulation_steps
        needed = sft.updates or math.ceil(gold * max(sft.epochs, 1) / accumulated)
        first = needed if gold else 0
        own = first * optim.gradient_accumulation_steps
        if sft.only:
            return cls(own, first, own, first)
        steps = optim.max_steps or math.ceil(examples * optim.num_epochs / optim.batch_size)
        phases = math.ceil(steps / optim.gradient_accumulation_steps)
        return cls(
            own + steps, first + phases * optim.num_iterations * optim.minibatches, own, first
        )


def gold_batch(config: Config) -> int:
    """Returns the number of reference completions in a supervised batch step."""
    return config.sft.batch_size or config.optim.batch_size * config.rollout.num_generations
