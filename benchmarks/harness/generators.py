"""Both sides of `rollout`, each as a call that samples a case's tokens: our `generate` and a
BatchGenerator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

import grpo_fn as g
from grpo_fn.rollout import FindStop
from runners.engines.settings import usual_launch
from runners.machine import startup

Prompts = list[list[int]]
Options = dict[str, Any]  # keywords of `Decoding`


@attrs.frozen(kw_only=True)
class Case:
    """A measurement on one model, and its targets."""

    kind: str  # "peers" | "compaction" | "ragged" | "rate"
    model: str
    prompt: int  # tokens
    new: int  # tokens a completion
    generations: int  # of each prompt
    prompts: int = 1
    at_least: tuple[float | None, ...] = (None, None)  # the kind's targets
    repeats: int = 5

    @property
    def rows(self) -> int:
        """Decoded together."""
        return self.prompts * self.generations

    @property
    def tokens(self) -> int:
        """The number of tokens of all completions at full length."""
        return self.rows * self.new


def as_a_run() -> g.Decoding:
    """`Decoding` as in a run on this machine."""
    return g.Decoding(pipelined=usual_launch(startup.prepare()) == "async")


def ours(
    policy: g.Policy,
    prompts: Prompts,
    case: Case,
    *,
    find_stop: FindStop | None = None,
    eos_ids: Sequence[int] = (),
    **options: Any,
) -> Callable[[], g.Rollout]:
    """A call that samples the case's completions of these prompts."""
    decoding = attrs.evolve(as_a_run(), **options)
    return lambda: g.generate(
        policy,
        policy.params,
        prompts,
        g.Sampling(num_generations=case.generations, max_new_tokens=case.new, eos_ids=eos_ids),
        key=mx.random.key(0),
        find_stop=find_stop,
        decoding=decoding,
    )


def theirs(module: nn.Module, prompts: Prompts, case: Case, *, shared: bool) -> Callable[[], list[mx.array]]:
    """The same with BatchGenerator in its best configuration: every row in one batch, log-probs
    picked by the sampler.

    With `shared`, each prompt is prefilled once except for its last token, and all its rows start
    from there; otherwise, each row's prompt is computed.
    """
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.models.cache import make_prompt_cache

    def run() -> list[mx.array]:
        picked: list[mx.array] = []

        def sampler(logp_bv: mx.array) -> mx.array:
            token_b = mx.random.categorical(logp_bv)
            picked.append(mx.take_along_axis(logp_bv, token_b[:, None], axis=-1)[:, 0])
            return token_b

        starts: Prompts = []
        caches: list[Any] = []
        behind: Prompts = []
        for prompt in prompts:
            if shared:
                cache = make_prompt_cache(module)
                module(mx.array([prompt[:-1]]), cache=cache)
                mx.eval([layer.state for layer in cache])
                starts += [prompt[-1:]] * case.generations
                caches += [cache] * case.generations
                behind += [prompt[:-1]] * case.generations
            else:
                starts += [prompt] * case.generations
        generator = BatchGenerator(
            module,
            max_tokens=case.new,
            sampler=sampler,
            completion_batch_size=case.rows,
            prefill_batch_size=case.rows,
        )
        more: Options = (
            {"caches": caches, "all_tokens": [list(tokens) for tokens in behind]} if shared else {}
        )
        generator.insert([list(tokens) for tokens in starts], **more)
        drawn = 0
        try:
            while responses := generator.next_generated():
                drawn += len(responses)
                mx.eval(picked[-2:-1])  # lets go of the last step's full rows
        finally:
            generator.close()
        if drawn != case.tokens:
            raise RuntimeError(f"BatchGenerator sampled {drawn} tokens, expected {case.tokens}")
        return picked

    return run
