"""Checks whether a model decodes what it learns: compares its numbers on a few tokens of a run's prompts.

    rollout of a few tokens, as the run will decode      learner's forward of each row alone
                 log-probs            ─────── the same, or a plainer way ───────           log-probs

The structure of a model decides which faster paths are offered (compiled decoding steps, one copy of a
prompt, rows of different lengths, merged adapters). Here its numbers decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from grpo_fn.learner import split_batch
from grpo_fn.policy import completion_logprobs, is_quantized
from grpo_fn.trees import Tree, named_leaves, on_host
from runners.errors import UserError, error_line, is_out_of_memory

LONG, SHORT = 24, 9  # tokens of the two prompts, at most
GENERATIONS, NEW_TOKENS = 2, 4
# The largest difference of a row's mean log-prob that rounding can explain, nats a token.
EXACT, ROUNDED = 5e-3, 0.1  # of models that compute in float32, and in 16 bits or over packed weights


@attrs.frozen
class Way:
    """How a model is decoded and trained: which of the faster paths are used."""

    takes_program: bool  # the backend's compiled decoding steps
    shares_prefix: bool  # completions over one copy of their prompt
    takes_ragged: bool  # rows of different lengths together
    joins_weights: bool  # adapters merged, projections fused
    over_caches: bool  # the learner's forward goes over caches, as decoding does
    share_prompts: bool  # the learner computes a group's prompt once
    compile: bool  # the learner's steps are compiled

    @classmethod
    def of(cls, policy: g.Policy, *, share_prompts: bool, compile: bool) -> Way:
        """The fastest way that the policy offers."""
        return cls(
            policy.takes_program,
            policy.shares_prefix,
            policy.takes_ragged,
            policy.joins_weights,
            policy.split.over_caches,
            share_prompts,
            compile,
        )

    def applied(self, policy: g.Policy) -> g.Policy:
        """The policy, restricted to this way."""
        return attrs.evolve(
            policy,
            takes_program=policy.takes_program and self.takes_program,
            shares_prefix=policy.shares_prefix and self.shares_prefix,
            takes_ragged=policy.takes_ragged and self.takes_ragged,
            joins_weights=self.joins_weights,
            split=attrs.evolve(policy.split, over_caches=self.over_caches),
        )


# The paths that are given up in turn, with their words in the notice.
PLAINER: tuple[tuple[dict[str, Any], str], ...] = (
    ({"takes_program": False}, "without compiled decoding steps"),
    ({"shares_prefix": False, "takes_program": False}, "with a copy of the prompt for each completion"),
    ({"takes_ragged": False}, "with prompts of one length in a batch"),
    ({"joins_weights": False}, "with the weights as they are trained"),
    ({"over_caches": True}, "and the learner computes over caches, as decoding does"),
)


@attrs.frozen
class Checked:
    """The outcome: the way with correct numbers, and notices about it."""

    way: Way
    notices: tuple[str, ...] = ()


def compare(
    policy: g.Policy,
    params: Tree,
    prompts: Sequence[Sequence[int]],
    way: Way,
    *,
    learns: bool = True,
    recomputes: bool = False,
) -> Checked:
    """The fastest way with correct numbers; raises as `model_check.check_model` does.

    learns: whether it trains, so that the learner's log-probs and gradient are checked.
    recomputes: whether its blocks are checkpointed, so that their gradient is compared with a plain one.
    """
    most = None if policy.positions is None else policy.positions + 1 - NEW_TOKENS
    rows = [row[:most] for row in few_prompts(prompts)]
    limit = EXACT if _is_exact(policy, params) else ROUNDED
    way, rollout, notices = _decoding(policy, params, rows, way, limit)
    if learns:
        way, more = _learning(way.applied(policy), params, rollout, way, limit)
        notices += more
        if recomputes:
            _compare_recomputed(way.applied(policy), params, rollout, limit)
    return Checked(way, tuple(notices))


def few_prompts(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The beginnings of the longest and of the shortest prompt, of different lengths if possible."""
    longest, shortest = max(prompts, key=len), min(prompts, key=len)
    long = list(longest[:LONG])
    short = list(shortest[: min(SHORT, max(len(long) - 1, 1))])
    return [long, short]


def decoding_fault(
    policy: g.Policy, params: Tree, prompts: Sequence[Sequence[int]], limit: float
) -> tuple[g.Rollout | None, str]:
    """A rollout of a few tokens, and its difference from the forward pass of its rows; "": none."""
    try:
        rollout = g.generate(
            policy,
            params,
            prompts,
            g.Sampling(num_generations=GENERATIONS, max_new_tokens=NEW_TOKENS),
            key=mx.random.key(0),
        )
        for row, completion in enumerate(rollout.completions()):
            want_t = completion_logprobs(policy, params, prompts[row // GENERATIONS], completion)
            fault = _difference(rollout.logp_bt[row, : len(completion)], want_t, limit)
            if fault:
                return rollout, fault
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None, f"it ends with {error_line(error)}"
    return rollout, ""


def _decoding(
    policy: g.Policy, params: Tree, prompts: list[list[int]], way: Way, limit: float
) -> tuple[Way, g.Rollout, list[str]]:
    """The first way with correct decoding, a rollout with it, and a notice if it is not the fastest."""
    rollout, first = decoding_fault(way.applied(policy), params, prompts, limit)
    if not first:
        assert rollout is not None
        return way, rollout, []
    fault, plain = first, way
    for changes, words in PLAINER:
        before, plain = plain, attrs.evolve(plain, **changes)
        if plain == before:
            continue
        rollout, fault = decoding_fault(plain.applied(policy), params, prompts, limit)
        if fault:
            continue
        alone = attrs.evolve(way, **changes)  # the paths given up before may not have been at fault
        if alone != plain:
            again, remains = decoding_fault(alone.applied(policy), params, prompts, limit)
            plain, rollout = (plain, rollout) if remains else (alone, again)
        assert rollout is not None
        return plain, rollout, [f"this model is decoded {words}: as the machine would decode it, {first}"]
    raise UserError(
        f"this model does not decode what it learns, however plainly: {fault}. Training would "
        "teach it noise. system.check_model = false goes on all the same"
    )


def _learning(
    policy: g.Policy, params: Tree, rollout: g.Rollout, way: Way, limit: float
) -> tuple[Way, list[str]]:
    """The way with which the learner's batches give the rollout's log-probs and a finite gradient."""
    notices = []
    for share in (True, False) if way.share_prompts else (False,):
        fault = _learner_fault(policy, params, rollout, share, limit)
        if not fault:
            break
        if share:
            notices.append(f"the learner computes each row's prompt by itself: sharing it, {fault}")
            way = attrs.evolve(way, share_prompts=False)
    else:
        raise UserError(
            f"this model cannot be trained here: {fault}. system.check_model = false goes on all the same"
        )
    if way.compile:
        fault = _compile_fault(policy, params, rollout, way.share_prompts)
        if fault:
            notices.append(f"the learner's steps are not compiled: {fault}")
            way = attrs.evolve(way, compile=False)
    return way, notices


def _learner_fault(policy: g.Policy, params: Tree, rollout: g.Rollout, share: bool, limit: float) -> str:
    """The fault of the learner's log-probs or gradient for the rollout; "": none."""
    batch = _batch(rollout)
    try:
        logprobs = g.make_logprob_step(policy, compile=False)
        for number, rows in enumerate(_row_groups(batch, share)):
            got_bt = logprobs(params, rows)
            want_bt = rows.rollout_logp_bt
            for row, length in enumerate(on_host(rows.mask_bt.sum(axis=1))):
                fault = _difference(got_bt[row, :length], want_bt[row, :length], limit) if length else ""
                if fault:
                    return f"{fault} (micro-batch {number})"
        state, _ = _grad_step(policy, compile=False)(_state(params), list(_row_groups(batch, share)))
        names = [
            name
            for name, leaf in named_leaves(state.accum_grads).items()
            if not mx.isfinite(leaf).all().item()
        ]
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return error_line(error)
    if not names:
        return ""
    return f"the gradient of {names[0]} is not finite (of {len(names)} leaves), as mlx-lm computes it"


def _compare_recomputed(policy: g.Policy, params: Tree, rollout: g.Rollout, limit: float) -> None:
    """Raises UserError if checkpointed blocks give another gradient than the plain model."""
    # Over caches no block is recomputed.
    plain = attrs.evolve(policy, split=attrs.evolve(policy.split, over_caches=True))
    both = []
    for each in (policy, plain):
        state, _ = _grad_step(each, compile=False)(_state(params), list(_row_groups(_batch(rollout), False)))
        both.append({name: _in_float64(leaf) for name, leaf in named_leaves(state.accum_grads).items()})
    size = np.sqrt(sum(np.square(leaf).sum() for leaf in both[1].values()))
    off = np.sqrt(sum(np.square(leaf - both[1][name]).sum() for name, leaf in both[0].items()))
    if not off <= 2 * limit * size:
        raise UserError(
            f"system.grad_checkpoint = true gives this model another gradient, off by {off / size:.2g} of "
            "its norm: its blocks hand on more than their output. Want false"
        )


def _compile_fault(policy: g.Policy, params: Tree, rollout: g.Rollout, share: bool) -> str:
    """Why the grad step cannot be traced; "": it can. Nothing is computed."""
    try:
        _grad_step(policy, compile=True)(_state(params), next(_row_groups(_batch(rollout), share)))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return error_line(error)
    return ""


def _grad_step(policy: g.Policy, *, compile: bool) -> g.GradStep:
    return g.make_grad_step(
        policy,
        g.LossSpec(surrogate="none", aggregation="constant"),
        max_completion_length=NEW_TOKENS,
        compile=compile,
    )


def _state(params: Tree) -> g.TrainState:
    return g.init_state(params, g.adamw(1e-3), key=mx.random.key(0))


def _batch(rollout: g.Rollout) -> g.Batch:
    signs = [[1.0 if i % 2 else -1.0 for i in range(rollout.num_generations)] for _ in rollout.prompts]
    return g.make_batch(rollout, mx.array(signs))


def _row_groups(batch: g.Batch, share: bool) -> Iterator[g.Batch]:
    yield from split_batch(batch, max_tokens=10 * LONG, bucketed=False, share_prompts=share)


def _difference(got_t: mx.array, want_t: mx.array, limit: float) -> str:
    """The difference of a row's log-probs; "" if rounding can explain it."""
    got, want = _in_float64(got_t), _in_float64(want_t)
    if not np.isfinite(got).all() or not np.isfinite(want).all():
        return "log-probs are not finite"
    worst = float(np.abs(got - want).mean())
    return f"log-probs of a row are off by {worst:.2g} nats a token" if worst > limit else ""


def _in_float64(value: mx.array) -> np.ndarray:
    return np.array(value.astype(mx.float32), np.float64)


def _is_exact(policy: g.Policy, params: Tree) -> bool:
    """Whether everything is computed in float32."""
    if policy.compute_dtype is not None:
        return policy.compute_dtype == mx.float32 and not is_quantized(policy.module)
    leaves = [leaf for tree in (params, policy.frozen) for leaf in named_leaves(tree).values()]
    return all(leaf.dtype == mx.float32 for leaf in leaves)
