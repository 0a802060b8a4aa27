"""`LocalEngine`: it decodes in this process, with few-bit weights as long as their numbers are good."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import attrs
import mlx.core as mx

import grpo_fn as g
from grpo_fn.policy import Moments, QuantizedRole
from grpo_fn.rollout import Column, Columns, Interrupted, decode
from grpo_fn.trees import Tree, on_host
from runners.engines.engine import Advance, Cancelled, Requests, Restart, ShouldStop, Token, never
from runners.errors import is_out_of_memory
from runners.ranks.ranks import Ranks

FINER = {  # the format that follows one whose numbers are too coarse; after the last: full precision
    "affine-3": "affine-4",
    "affine-4": "affine-6",
    "affine-6": "affine-8",
    "mxfp4": "mxfp8",
    "nvfp4": "mxfp8",
}
PAUSE = 0.2  # seconds between two reports of how far a rollout has come
SAMPLE_SIZE = 0.5  # effective sample size below which a format is too coarse


@attrs.define(eq=False, slots=False)
class LocalEngine:
    """An engine over a policy, without weights: `load` comes first."""

    full: g.Policy  # the learner's
    decoding: g.Decoding = attrs.field(factory=g.Decoding)
    quantized: QuantizedRole | None = None  # the same model with few-bit weights; None: full precision
    # The format of these weights; finer than at the start if that was too coarse.
    format: str = attrs.field(default="none", alias="name")
    calibrates: bool = False  # whether it samples in full precision until it has `moments`
    # KL(μ ‖ π) a token, in nats, above which a format is too coarse; 0: never.
    mismatch_limit: float = 0.0
    advance: Advance | None = None  # hears several times a second how far a rollout has come
    note: Callable[[str], None] = lambda line: None  # takes a line when it gives something up
    ranks: Ranks = attrs.field(factory=Ranks)  # those that sample together, each its share

    version: int = attrs.field(default=0, init=False)  # see `Engine`
    fallback: str | None = attrs.field(default=None, init=False)  # why the quantized weights were given up
    moments: Moments | None = attrs.field(default=None, init=False)  # of their layers' inputs
    formats: Mapping[str, str] = attrs.field(factory=dict, init=False)  # of weights with another format
    _loaded: Tree = attrs.field(default=None, init=False)  # the learner's parameters
    _params: Tree = attrs.field(default=None, init=False)  # those that it samples with
    # The tokens of the last stream, and its caches.
    _kept: tuple[list[int], Any] | None = attrs.field(default=None, init=False)

    @property
    def quantization(self) -> str:
        """The present weights' quantization: "none" is full precision."""
        waits = self.calibrates and self.moments is None
        return "none" if self.quantized is None or self.fallback is not None or waits else self.format

    @property
    def sampler(self) -> tuple[g.Policy, Tree]:
        """The policy and the parameters that it samples with now: they are rounded at their first use."""
        if self.quantized is None or self.quantization == "none":
            return self.full, self._loaded
        if self._params is None and self._loaded is not None:
            self._params = self.quantized.transform(self._loaded)
            g.materialize(self._params)
        return self.quantized.policy, self._params

    def load(self, params: Tree, version: int) -> None:
        """As `Engine`."""
        self._loaded, self.version, self._kept, self._params = params, version, None, None

    def generate(
        self, requests: Requests, sampling: g.Sampling, *, key: mx.array, should_stop: ShouldStop = never
    ) -> g.Rollout:
        """As `Engine`; if the numbers of quantized weights fail, sampled again in full precision.

        If memory runs out, again with half as many rows at a time.

        The ranks of a run fall back together: all of them sample equally often, one without prompts too. A
        completion depends on its prompt's number, so that N ranks sample what one does.
        """
        while True:
            rollout = self._fitting(requests, sampling, key, should_stop)
            if should_stop():
                raise Cancelled(rollout)
            finite = mx.isfinite(rollout.logp_bt).all()
            if self.quantization == "none" or not self.ranks.any_rank("the sampler", not finite.item()):
                versions_b = mx.full(rollout.lengths_b.shape, self.version, mx.int32)
                return attrs.evolve(rollout, version_b=versions_b)
            self._give_up("its log-probs are not finite; the rollout was sampled again")
            if requests.replies is not None:
                raise Restart

    def stream(
        self, request: Requests, sampling: g.Sampling, *, key: mx.array, should_stop: ShouldStop = never
    ) -> Iterator[Token]:
        """As `Engine`. Keys and values of a finished stream are kept for the next, which computes only what
        differs."""
        (prompt,), (number,) = request.prompts, request.numbers or (0,)
        policy, params = self.sampler
        caches, held = None, 0
        sampling = attrs.evolve(sampling, num_generations=1)
        # Ends are looked for here.
        how: dict[str, Any] = {"decoding": attrs.evolve(self.decoding, check_every=sampling.max_new_tokens)}
        how |= {"images": request.images, "prompt_numbers": [number]}
        columns = decode(policy, params, [prompt], sampling, key=key, **how)
        tokens: list[int] = []
        with closing(columns):
            for column in _delayed(columns, int(self.decoding.pipelined)):
                if column is not None:
                    tokens += on_host(column.tokens_b)
                    yield Token(tokens[-1], on_host(column.logp_b)[0], len(prompt) - held)
                    if sampling.end_of(tokens, len(tokens) - 1) is not None:
                        break
                if should_stop():
                    break
        self._kept = None if caches is None else ([*prompt, *tokens], caches)

    def round_as(self, name: str, moments: Moments | None, formats: Mapping[str, str] | None = None) -> None:
        """From now on its weights have that format ("": the present one), or theirs in `formats`."""
        if self.quantized is None:
            return
        self.format, self.moments = name or self.format, moments if self.calibrates else None
        self.formats = formats or {}
        made = self.quantized.remade(self.format, self.moments, self.formats)
        before = self.quantized.policy
        parts = {part: getattr(made.policy, part) for part in ("module", "frozen", "split")}
        self.quantized = attrs.evolve(made, policy=attrs.evolve(before, **parts))
        self.load(self._loaded, self.version)

    def check_mismatch(self, stats: g.LossStats) -> None:
        """A finer format, after the last full precision, if the weights π/μ of an update are too uneven."""
        if self.quantization == "none" or not self.mismatch_limit or not stats.num_tokens.item():
            return
        size, kl = float(stats.ess), float(stats.sampling_kl_k3)
        if size >= SAMPLE_SIZE and kl <= self.mismatch_limit:
            return
        reason = (
            f"an effective sample size of {size:.2g} and {kl:.2g} nats a token of KL divergence from the "
            f"learner; expected at least {SAMPLE_SIZE:g}, and at most "
            f"rollout.mismatch_limit = {self.mismatch_limit:g}"
        )
        if finer := FINER.get(self.format):
            self.note(f"sampling continues in {finer}: {self.format} has {reason}")
            self.round_as(finer, self.moments)
        else:
            self._give_up(reason)

    def metrics(self) -> dict[str, str]:
        """Metrics of an engine whose weights are or were quantized."""
        if self.quantized is None:
            return {}
        why = {} if self.fallback is None else {"rollout/fallback": self.fallback}
        return {"rollout/quantization": self.quantization, **why}

    def _fitting(
        self, requests: Requests, sampling: g.Sampling, key: mx.array, should_stop: ShouldStop
    ) -> g.Rollout:
        """`_sampled`, in halves where memory runs out, if no replies were made: down to one prompt's rows,
        which have a second try."""
        group, rows, again = sampling.num_generations, len(requests.prompts) * sampling.num_generations, False
        while True:
            try:
                return self._sampled(requests, sampling, key, should_stop)
            except Exception as error:
                if again or requests.replies is not None or not is_out_of_memory(error):
                    raise
                reason = str(error)
            mx.clear_cache()  # outside the handler the failed rollout's arrays are free
            before = min(self.decoding.max_batch or rows, rows)
            together = group * max(before // group // 2, 1)
            again = before <= group  # what is cached may be in pieces: once more, with all of it given back
            self.decoding = attrs.evolve(self.decoding, max_batch=together)
            self.note(f"out of memory ({reason}): sampled again, {together:,} rows at a time")

    def _sampled(
        self, requests: Requests, sampling: g.Sampling, key: mx.array, should_stop: ShouldStop
    ) -> g.Rollout:
        """A rollout; if `should_stop` ends it, as far as it has come."""
        if not requests.prompts:
            return _empty(sampling)
        policy, params = self.sampler
        columns = decode(
            policy,
            params,
            requests.prompts,
            sampling,
            key=key,
            prompt_numbers=requests.numbers,
            replies=requests.replies,
            images=requests.images,
            decoding=self.decoding,
        )
        most = len(requests.prompts) * sampling.num_generations * sampling.max_new_tokens
        done, reported = 0, 0.0
        try:
            while True:
                column = next(columns)
                done += 0 if column is None else len(column.rows)
                if self.advance and time.perf_counter() >= reported + PAUSE:
                    self.advance("tokens", min(done, most), most)
                    reported = time.perf_counter()
                if should_stop():
                    columns.throw(Interrupted())
        except StopIteration as end:
            return end.value

    def _give_up(self, reason: str) -> None:
        self.note(f"sampling continues in full precision: {self.format}: {reason}")
        self.fallback, self._params = reason, None

    def _caches_for(self, policy: g.Policy, prompt: Sequence[int]) -> tuple[Any, int]:
        """The caches kept, cut to the tokens that they share with the prompt, or new ones; and how many.

        The prompt's last token is not among them.
        """
        from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

        kept, self._kept = self._kept, None
        if kept is not None:
            known, caches = kept
            pairs = enumerate(zip(known, prompt[:-1], strict=False))
            shared = next((n for n, (a, b) in pairs if a != b), min(len(known), len(prompt) - 1))
            held = getattr(caches[0], "offset", None)
            if shared and isinstance(held, int) and can_trim_prompt_cache(caches):
                shared = min(shared, held)
                if trim_prompt_cache(caches, held - shared) == held - shared:
                    return caches, shared
        return make_prompt_cache(policy.module), 0


def _delayed(columns: Columns[Any], lag: int) -> Iterator[Column | None]:
    """The columns, each when the next `lag` are on their way: a pipelined step is not waited for at once."""
    waiting: deque[Column] = deque()
    for column in columns:
        if column is not None:
            waiting.append(column)
        yield waiting.popleft() if len(waiting) > lag else None
    yield from waiting


def _empty(sampling: g.Sampling) -> g.Rollout:
    """The rollout of no prompts."""
    none = mx.zeros((0, 1))
    return g.Rollout(
        prompts=(),
        num_generations=sampling.num_generations,
        tokens_bt=none.astype(mx.int32),
        lengths_b=mx.zeros((0,), mx.int32),
        logp_bt=none,
        finished_b=mx.zeros((0,), mx.bool_),
        entropy_bt=none if sampling.with_entropy else None,
    )
