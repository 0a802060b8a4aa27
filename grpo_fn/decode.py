"""Batched generation: one prefill per prompt, forked to G completions, decoded together.

    prompts ─prefill→ caches [P] ─fork→ caches [P·G] ─decode, drop finished rows→ tokens and log-probs

Everything is explicit: caches go in and come out, keys are counted, nothing global is read or written. What
a completion becomes depends on its key, its prompt and the model alone (to the rounding of batched products).
"""

from collections.abc import Callable, Iterable, Sequence

import attrs
import mlx.core as mx
import mlx.nn as nn

from grpo_fn import caches as cache_rows
from grpo_fn.compiled import compiled
from grpo_fn.policy import Policy
from grpo_fn.rollouts import Rollout
from grpo_fn.sampling import completion_keys, entropy, fold_in, sample
from grpo_fn.trees import Tree, arrays_of, on_host

PREFILL_TOKENS = 2048  # prompt tokens a row and call: bounds the memory of a long prompt's forward
COMPACT_SHARE = 0.25  # rows are dropped once this share of them has finished

FindStop = Callable[[Sequence[int]], int | None]


@attrs.frozen(kw_only=True)
class Sampler:
    """How tokens are drawn; see `sampling.sample` for the first four."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
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
    check_every: int = 8,
    pipelined: bool = False,
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
        check_every: steps between looks at which rows have ended; a look waits for the device.
        pipelined: hand each step to the device without waiting for the last (hides launch time on a GPU;
            costs a copy of the cache).

    Raises:
        ValueError: there is no prompt, one is empty, or a number is out of range.
    """
    sampler = sampler or Sampler()
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError(f"wanted at least one prompt and no empty one, found {[len(p) for p in prompts]}")
    for name, value in (("num_generations", num_generations), ("max_new_tokens", max_new_tokens)):
        if value < 1:
            raise ValueError(f"{name} = {value}: wanted at least 1")
    decoder = _Decoder(sampler, frozenset(eos_ids), find_stop, max_new_tokens, max(check_every, 1), pipelined)
    whole = _Columns.empty(len(prompts) * num_generations, max_new_tokens, sampler.with_entropy)
    with policy.bound(params) as model:
        for part in _parts(prompts, num_generations, max_batch, policy.takes_ragged):
            rows = [p * num_generations + g for p in part for g in range(num_generations)]
            keys_b2 = completion_keys(
                key,
                mx.array([row // num_generations for row in rows]),
                mx.array([row % num_generations for row in rows]),
            )
            logits_pv, caches = prefill(model, [prompts[p] for p in part])
            forked = [i for i in range(len(part)) for _ in range(num_generations)]
            cache_rows.keep_rows(caches, forked)
            decoder.run(model, logits_pv[mx.array(forked)], caches, keys_b2, rows, whole)
    return whole.rollout(prompts, num_generations)


def prefill(model: nn.Module, prompts: Sequence[Sequence[int]]) -> tuple[mx.array, cache_rows.Caches]:
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
        check_every: int,
        pipelined: bool,
    ) -> None:
        self._draw = compiled(lambda logits, keys, n: sampler(logits, fold_in(keys, n)))
        self._eos_ids, self._find_stop = eos_ids, find_stop
        self._max_new_tokens, self._check_every = max_new_tokens, check_every
        self._launch = mx.async_eval if pipelined else mx.eval

    def run(
        self,
        model: nn.Module,
        logits_bv: mx.array,
        caches: cache_rows.Caches,
        keys_b2: mx.array,
        rows: list[int],
        whole: _Columns,
    ) -> None:
        """Decode until every row has ended; row i of the batch is row `rows[i]` of the whole."""
        texts: dict[int, list[int]] = {row: [] for row in rows}
        alive = rows  # rows that have not ended; a subset of `rows`, which is what the caches hold
        start = 0
        block: list[dict[str, mx.array]] = []
        for n in range(self._max_new_tokens):
            drawn = self._draw(logits_bv, keys_b2, mx.full((keys_b2.shape[0],), n, mx.uint32))
            self._launch(drawn)
            block.append(drawn)
            last = n + 1 == self._max_new_tokens
            if last or (n + 1) % self._check_every == 0:
                alive = self._collect(block, rows, set(alive), texts, start, whole)
                start, block = n + 1, []
                if last or not alive:
                    return
                if len(alive) <= (1 - COMPACT_SHARE) * len(rows):
                    kept = [i for i, row in enumerate(rows) if row in set(alive)]
                    cache_rows.keep_rows(caches, kept)
                    keys_b2, rows = keys_b2[mx.array(kept)], alive
                    drawn = {"tokens": drawn["tokens"][mx.array(kept)]}
            logits_bv = model(drawn["tokens"][:, None], cache=caches)[:, -1]

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
