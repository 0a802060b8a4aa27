"""One decoding step of a batch: a token of each row goes in, the logits after it come out.

    CacheSteps     any caches: the model is called as it is
    KernelSteps    on CUDA, over one copy of each prompt: a compiled program
    GridSteps      on a CPU, over one copy of each prompt: a compiled program

`shared_steps` chooses between the first two where completions share their prompt; `lanes` takes the third.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.backends.cuda.kernel_steps import KernelSteps
from grpo_fn.policy import kv_caches as cache_rows
from grpo_fn.policy.kv_caches import Caches
from grpo_fn.policy.policy import Policy
from grpo_fn.rollout.shared_prefix import fork, keep_prefix_rows


class Steps(Protocol):
    """The decoding steps of one batch of rows."""

    def __call__(self, token_b: mx.array) -> mx.array:
        """Feed each row its token: logits [B,V] of the next."""
        ...

    def kept(self, alive: Sequence[bool]) -> list[int]:
        """The rows that the batch should keep, in rising order: all that have not ended, and maybe others."""
        ...

    def keep(self, rows: list[int]) -> None:
        """Keep rows that `kept` has chosen."""
        ...


class CacheSteps:
    """Steps of a model over caches."""

    def __init__(
        self,
        model: nn.Module,
        caches: Caches,
        keep_rows: Callable[[Caches, list[int]], None] = cache_rows.keep_rows,
    ) -> None:
        """`keep_rows` is what drops rows of such caches."""
        self._model, self.caches, self._keep_rows = model, caches, keep_rows

    def __call__(self, token_b: mx.array) -> mx.array:
        """As `Steps`."""
        return self._model(token_b[:, None], cache=self.caches)[:, -1]

    def kept(self, alive: Sequence[bool]) -> list[int]:
        """Rows that have ended go."""
        return [row for row, is_alive in enumerate(alive) if is_alive]

    def keep(self, rows: list[int]) -> None:
        """As `Steps`."""
        self._keep_rows(self.caches, rows)


def shared_steps(
    policy: Policy,
    model: nn.Module,
    caches: Caches,
    lengths: Sequence[int],
    num_generations: int,
    *,
    room: int,
    drawn: int = 0,
) -> Steps:
    """Steps over one copy of each prompt; with the kernel where the policy takes it.

    Args:
        policy, model: the policy, and its module as `Policy.bound` gives it.
        caches: plain ones after P prompts, padded on the right.
        lengths: tokens of each prompt.
        num_generations: rows of each prompt.
        room: tokens that a row may be fed.
        drawn: go on as if so many zeros had been fed.
    """
    if policy.takes_kernel:
        return KernelSteps(
            policy.kernel_step, model.parameters(), caches, lengths, num_generations, room, drawn=drawn
        )
    forked = fork(caches, list(lengths), num_generations)
    for cache in forked if drawn else ():
        cache.skip(drawn)
    return CacheSteps(model, forked, keep_prefix_rows)
