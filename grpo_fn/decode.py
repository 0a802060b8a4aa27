"""Batched generation: one prefill per prompt, forked to G completions, decoded together.

    prompts ─prefill→ caches [P] ─fork→ caches [P·G] ─decode, drop finished rows→ tokens and log-probs

Everything is explicit: caches go in and come out, keys are counted, nothing global is read or written. What
a completion becomes depends on its key, its prompt and the model alone (to the rounding of batched products).
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import attrs
import mlx.core as mx
import mlx.nn as nn

from grpo_fn import caches as cache_rows
from grpo_fn.caches import Caches
from grpo_fn.compiled import Compiled, compiled
from grpo_fn.decode_step import CacheSteps, KernelSteps, Steps
from grpo_fn.policy import Policy
from grpo_fn.prefixes import fork, sharing_pays
from grpo_fn.rollouts import Rollout
from grpo_fn.sampling import (
    completion_keys,
    entropy,
    fold_in,
    mark_seen,
    penalize,
    sample,
    seen_tokens,
)
from grpo_fn.trees import Tree, arrays_of, on_host

PREFILL_TOKENS = 2048  # prompt tokens a row and call: bounds the memory of a long prompt's forward
COMPACT_SHARE = 0.25  # rows are dropped once this share of them has finished

FindStop = Callable[[Sequence[int]], int | None]


@attrs.frozen(kw_only=True)
class Sampler:
    """How tokens are drawn; see `sampling.sample` for the first four, `sampling.penalize` for the fifth."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # on tokens of the prompt and the completion so far; 1: none
    with_entropy: bool = False  # also give the entropy of the whole distribution at each position

    def __call__(self, logits_bv: mx.array, keys_b2: mx.array) -> dict[str, mx.array]:
        """Token and log-prob of each row, and its entropy where asked for."""
        token_b, logp_b = sample(
            logits_bv,
            keys_b2,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
        )
        drawn = {"tokens": token_b, "logp": logp_b}
        if self.with_entropy:
            drawn["entropy"] = entropy(logits_bv, self.temperature or 1.0)
        return drawn


@functools.cache
def drawing(sampler: Sampler) -> Compiled:
    """`draw(logits_bv, keys_b2, n_b)`: each row's n-th token. One value a sampler, so traced once a shape."""
    return compiled(lambda logits_bv, keys_b2, n_b: sampler(logits_bv, fold_in(keys_b2, n_b)))


def generate(
    policy: Policy,
    params: Tree,
    prompts: Sequence[Sequence[int]],
    *,
    key: mx.array,
    num_generations: int,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    eos_ids: Iterable[int] = (),
    find_stop: FindStop | None = None,
    max_batch: int = 0,
    first_prompt: int = 0,
    check_every: int = 8,
    pipelined: bool = False,
    share_prefix: bool | None = None,
    compact: bool = True,
) -> Rollout:
    """Sample G completions of each prompt.

    Args:
        policy, params: what samples.
        prompts: token ids of each prompt, at least one token each.
        key: PRNG key; completion g of prompt p draws from (key, p, g) at its n-th token.
        num_generations: G.
        max_new_tokens: length limit of a completion, tokens.
        sampler: temperature and truncation; None: the plain distribution at temperature 1.
        eos_ids: tokens that end a completion; the one that does is kept and counts.
        find_stop: given a completion's tokens so far, how many of them to keep if it has ended, else None.
        max_batch: rows decoded together at most; 0: all. Whole groups, at least one.
        first_prompt: number of the first prompt where these are a part of more: p counts from it.
        check_every: steps between looks at which rows have ended; a look waits for the device.
        pipelined: hand each step to the device without waiting for the last (hides launch time on a GPU;
            costs a copy of the cache).
        share_prefix: keep a prompt's keys and values once for all its completions, where the model can; None:
            on CPU and CUDA. The same numbers to rounding.
        compact: drop rows that have ended from the batch once a quarter of it has.

    Raises:
        ValueError: there is no prompt, one is empty, or a number is out of range.
    """
    sampler = sampler or Sampler()
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError(f"wanted at least one prompt and no empty one, found {[len(p) for p in prompts]}")
    if not sampler.repetition_penalty > 0:
        raise ValueError(f"repetition_penalty = {sampler.repetition_penalty}: wanted a number above 0")
    for name, value in (("num_generations", num_generations), ("max_new_tokens", max_new_tokens)):
        if value < 1:
            raise ValueError(f"{name} = {value}: wanted at least 1")
    share_prefix = policy.shares_prefix and (sharing_pays() if share_prefix is None else share_prefix)
    decoder = _Decoder(
        sampler,
        frozenset(eos_ids),
        find_stop,
        max_new_tokens,
        check_every=max(check_every, 1),
        pipelined=pipelined,
        compact=compact,
    )
    whole = _Columns.empty(len(prompts) * num_generations, max_new_tokens, sampler.with_entropy)
    with policy.bound(params) as model:
        for part in _parts(prompts, num_generations, max_batch, policy.takes_ragged or share_prefix):
            rows = [p * num_generations + g for p in part for g in range(num_generations)]
            keys_b2 = completion_keys(
                key,
                mx.array([first_prompt + row // num_generations for row in rows]),
                mx.array([row % num_generations for row in rows]),
            )
            these = [prompts[p] for p in part]
            forked = [i for i in range(len(part)) for _ in range(num_generations)]
            if share_prefix:
                logits_pv, caches = _prefill_once(policy, model, these)
                lengths = [len(prompt) for prompt in these]
                steps = shared_steps(policy, model, caches, lengths, num_generations, room=max_new_tokens)
            else:
                logits_pv, caches = prefill(model, these)
                cache_rows.keep_rows(caches, forked)
                steps = CacheSteps(model, caches)
            logits_bv = logits_pv[mx.array(forked)]
            seen_bv = None
            if sampler.repetition_penalty != 1:
                seen_bv = seen_tokens(these, logits_bv.shape[-1])[mx.array(forked)]
            decoder.run(steps, logits_bv, keys_b2, rows, whole, seen_bv)
    return whole.rollout(prompts, num_generations)


def prefill(model: nn.Module, prompts: Sequence[Sequence[int]]) -> tuple[mx.array, Caches]:
    """Run prompts through the model: logits [P,V] after each prompt's last token, and the caches there."""
    lengths = [len(prompt) - 1 for prompt in prompts]  # the last token goes in by itself
    longest = max(lengths)
    ragged = min(lengths) < longest
    caches = cache_rows.ragged_caches(model, len(prompts)) if ragged else cache_rows.plain_caches(model)
    if ragged and longest % PREFILL_TOKENS == 1:
        longest += 1  # a lone last column would pass for a decoding step
    body_pl = mx.array([[*prompt[:-1], *[0] * (longest + 1 - len(prompt))] for prompt in prompts], mx.int32)
    if ragged:
        cache_rows.prepare_padding(caches, lengths, longest)
    for start in range(0, longest, PREFILL_TOKENS):
        model(body_pl[:, start : start + PREFILL_TOKENS], cache=caches)
        mx.eval(list(arrays_of(cache_rows.arrays(caches))))
    if ragged:
        cache_rows.finish_padding(caches)
    last_p1 = mx.array([[prompt[-1]] for prompt in prompts], mx.int32)
    return model(last_p1, cache=caches)[:, -1], caches


def _prefill_once(
    policy: Policy, model: nn.Module, prompts: Sequence[Sequence[int]]
) -> tuple[mx.array, Caches]:
    """`prefill` of prompts whole, padded on the right: logits [P,V], and plain caches of P rows."""
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    # What pads a prompt on its right comes after all that it holds: nothing looks at it.
    tokens_pl = mx.array([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], mx.int32)
    caches = cache_rows.plain_caches(model)
    backbone = policy.split.backbone(model)
    hidden = []
    for start in range(0, longest, PREFILL_TOKENS):
        hidden.append(backbone(tokens_pl[:, start : start + PREFILL_TOKENS], cache=caches))
        mx.eval(hidden[-1], list(arrays_of(cache_rows.arrays(caches))))
    last_pd = mx.concatenate(hidden, axis=1)[mx.arange(len(prompts)), mx.array(lengths) - 1]
    return policy.split.logits(model, last_pd), caches


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
    """Steps over one copy of each prompt, from plain caches after the prompts; see `KernelSteps`."""
    if policy.takes_kernel:
        return KernelSteps(
            policy.kernel_step, model.parameters(), caches, lengths, num_generations, room, drawn=drawn
        )
    forked = fork(caches, list(lengths), num_generations)
    for cache in forked if drawn else ():
        cache.skip(drawn)
    return CacheSteps(model, forked)


def _parts(
    prompts: Sequence[Sequence[int]], num_generations: int, max_batch: int, takes_ragged: bool
) -> list[list[int]]:
    """Indices of the prompts that are decoded together."""
    together = max(max_batch // num_generations, 1) if max_batch else len(prompts)
    # Like lengths together: less padding, and parts without any.
    order = sorted(range(len(prompts)), key=lambda p: len(prompts[p]))
    if together >= len(prompts):
        order = list(range(len(prompts)))
    parts = [order[start : start + together] for start in range(0, len(order), together)]
    if not takes_ragged:
        equal: dict[tuple[int, int], list[int]] = {}
        for number, part in enumerate(parts):
            for p in part:
                equal.setdefault((number, len(prompts[p])), []).append(p)
        parts = list(equal.values())
    return parts


@attrs.define(eq=False)
class _Columns:
    """What has been sampled so far, in full size."""

    drawn: dict[str, mx.array]
    lengths: list[int]
    finished: list[bool]

    @classmethod
    def empty(cls, rows: int, width: int, with_entropy: bool) -> "_Columns":
        drawn = {"tokens": mx.zeros((rows, width), mx.int32), "logp": mx.zeros((rows, width))}
        if with_entropy:
            drawn["entropy"] = mx.zeros((rows, width))
        return cls(drawn, [width] * rows, [False] * rows)

    def rollout(self, prompts: Sequence[Sequence[int]], num_generations: int) -> Rollout:
        lengths_b = mx.array(self.lengths, mx.int32)
        width = max(self.lengths)
        within_bt = mx.arange(width)[None] < lengths_b[:, None]
        cut = {
            name: mx.where(within_bt, array[:, :width], mx.array(0, array.dtype))
            for name, array in self.drawn.items()
        }
        mx.eval(cut)
        return Rollout(
            prompts=tuple(tuple(prompt) for prompt in prompts),
            num_generations=num_generations,
            tokens_bt=cut["tokens"],
            lengths_b=lengths_b,
            logp_bt=cut["logp"],
            finished_b=mx.array(self.finished),
            entropy_bt=cut.get("entropy"),
        )


class _Decoder:
    """The decode loop of one part, with its settings."""

    def __init__(
        self,
        sampler: Sampler,
        eos_ids: frozenset[int],
        find_stop: FindStop | None,
        max_new_tokens: int,
        *,
        check_every: int,
        pipelined: bool,
        compact: bool,
    ) -> None:
        self._penalty = sampler.repetition_penalty
        self._draw = drawing(sampler)
        self._eos_ids, self._find_stop = eos_ids, find_stop
        self._max_new_tokens, self._check_every = max_new_tokens, check_every
        self._launch = mx.async_eval if pipelined else mx.eval
        self._compact = compact

    def run(
        self,
        steps: Steps,
        logits_bv: mx.array,
        keys_b2: mx.array,
        rows: list[int],
        whole: _Columns,
        seen_bv: mx.array | None = None,
    ) -> None:
        """Decode until every row has ended; row i of the batch is row `rows[i]` of the whole.

        `seen_bv`: the tokens that each row has had, where repeating them is penalized.
        """
        texts: dict[int, list[int]] = {row: [] for row in rows}
        alive = rows  # rows that have not ended; a subset of `rows`, which is what the batch holds
        start = 0
        block: list[dict[str, mx.array]] = []
        for n in range(self._max_new_tokens):
            if seen_bv is not None:
                logits_bv = penalize(logits_bv, seen_bv, self._penalty)
            drawn = self._draw(logits_bv, keys_b2, mx.full((keys_b2.shape[0],), n, mx.uint32))
            if seen_bv is not None:
                seen_bv = mark_seen(seen_bv, drawn["tokens"])
            self._launch(drawn)
            block.append(drawn)
            last = n + 1 == self._max_new_tokens
            if last or (n + 1) % self._check_every == 0:
                alive = self._collect(block, rows, set(alive), texts, start, whole)
                start, block = n + 1, []
                if last or not alive:
                    return
                going_on = steps.rows_for(len(alive))
                if self._compact and going_on <= (1 - COMPACT_SHARE) * len(rows):
                    kept = _chosen(rows, set(alive), going_on)
                    steps.keep(kept)
                    index = mx.array(kept)
                    keys_b2, rows = keys_b2[index], [rows[i] for i in kept]
                    seen_bv = None if seen_bv is None else seen_bv[index]
                    drawn = {"tokens": drawn["tokens"][index]}
            logits_bv = steps(drawn["tokens"])

    def _collect(
        self,
        block: list[dict[str, mx.array]],
        rows: list[int],
        alive: set[int],
        texts: dict[int, list[int]],
        start: int,
        whole: _Columns,
    ) -> list[int]:
        """Store a block of steps and find the rows that go on."""
        index = mx.array(rows, mx.int32)
        stop = start + len(block)
        stacked = {name: mx.stack([step[name] for step in block], axis=1) for name in block[0]}
        for name, columns in stacked.items():
            whole.drawn[name][index, start:stop] = columns
        going_on = []
        for row, tokens in zip(rows, on_host(stacked["tokens"]), strict=True):
            if row not in alive:
                continue
            texts[row].extend(tokens)
            end = self._end_of(texts[row], start)
            if end is None:
                going_on.append(row)
            else:
                whole.lengths[row], whole.finished[row] = end, True
        return going_on

    def _end_of(self, tokens: list[int], start: int) -> int | None:
        """Tokens to keep if the completion has ended at or after `start`, else None."""
        ends = [n + 1 for n in range(start, len(tokens)) if tokens[n] in self._eos_ids][:1]
        if self._find_stop is not None:
            found = self._find_stop(tokens[: ends[0]] if ends else tokens)
            if found is not None:
                ends.append(found)
        return min(ends, default=None)


def _chosen(rows: list[int], alive: set[int], count: int) -> list[int]:
    """Places of `count` rows: all that are alive, and of the others the first."""
    spare = count - len(alive)
    ended = [i for i, row in enumerate(rows) if row not in alive][:spare]
    return sorted([*ended, *(i for i, row in enumerate(rows) if row in alive)])
