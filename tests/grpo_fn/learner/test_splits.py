"""Micro-batches, gradient accumulation, shared prompts and inactive rows give the same update."""

import functools
from typing import Any

import mlx.core as mx
import pytest

import grpo_fn as g
from grpo_fn.backends.mechanisms import has_cuda
from grpo_fn.learner import can_share, halve_batch, shape_of
from grpo_fn.trees import arrays_of
from tests.support.closeness import assert_same_figures, assert_same_gradients
from tests.support.naive_learner import SPECS, grad_step_of, make_batch, make_state, near_policy
from tests.support.tiny_policies import memory_in_use, tiny_policy, tiny_rollout


def halves(pieces):
    return [half for piece in pieces for half in halve_batch(piece)]


SPLITS = {
    "micro-batches": lambda b: [g.split_batch(b, max_tokens=40)],
    "unbucketed": lambda b: [g.split_batch(b, max_tokens=30, bucketed=False)],
    "row by row": lambda b: [g.split_batch(b, max_tokens=1)],
    "shared prompts": lambda b: [g.split_batch(b, max_tokens=60, share_prompts=True)],
    "halved": lambda b: [halves(halves(g.split_batch(b, max_tokens=200)))],
    "halved, unbucketed": lambda b: [halves(g.split_batch(b, max_tokens=60, bucketed=False))],
    "halved, shared prompts": lambda b: [halves(g.split_batch(b, max_tokens=400, share_prompts=True))],
    "batch steps": lambda b: g.minibatches(b, 3),
    "both": lambda b: [g.split_batch(part, max_tokens=25) for part in g.minibatches(b, 2)],
}


@functools.cache
def of_the_whole(name):
    """A policy, a batch, and the result of one grad step with the spec of this name."""
    policy = tiny_policy("llama-untied")
    batch = near_policy(make_batch(prompts=(4, 2, 7), zeros=True, by_token=name == "by token"), policy)
    grad_step = grad_step_of(policy, SPECS.get(name, SPECS["grpo"]), compile=False)
    return policy, batch, grad_step, grad_step(make_state(policy), batch)


@pytest.mark.parametrize("dropped", [False, True], ids=["all rows", "active rows"])
@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("name", ["grpo", "token_mean", "sum", "by token"])
def test_any_split_gives_the_same_update(name, how, dropped):
    """Gradient, loss and statistics are those of the whole batch."""
    policy, whole, grad_step, (want, want_stats) = of_the_whole(name)
    spec = SPECS.get(name, SPECS["grpo"])
    state, stats = make_state(policy), []
    if dropped and "shared" in how:
        whole = g.drop_inactive(whole, spec)
    for number, part in enumerate(SPLITS[how](whole)):
        if dropped:
            parts = [part] if isinstance(part, g.Batch) else part
            part = [g.drop_inactive(p, spec) if p.prompt_index_b is None else p for p in parts]
        state, part_stats = grad_step(state, part)
        stats.append(part_stats)
        assert state.step.item() == number + 1
    merged = g.merge_stats(stats)
    assert state.accum_weight.item() == want.accum_weight.item()
    assert_same_gradients(state.accum_grads, want.accum_grads)
    assert_same_figures(merged, want_stats, ["loss"] if dropped else None)


@pytest.mark.parametrize("shared", [False, True])
def test_halves_are_smaller(shared):
    """Half the rows, never more tokens to compute; a single row stays whole."""
    batch = make_batch(prompts=(4, 2, 7))
    for piece in g.split_batch(batch, max_tokens=400, share_prompts=shared):
        one, two = halve_batch(piece)
        assert one.mask_bt.shape[0] + two.mask_bt.shape[0] == piece.mask_bt.shape[0]
        assert abs(one.mask_bt.shape[0] - two.mask_bt.shape[0]) <= 1
        for half in (one, two):
            assert shape_of(half).tokens <= shape_of(piece).tokens
            assert (half.prompt_index_b is None) is (piece.prompt_index_b is None)
    (single,) = g.split_batch(g.make_batch(tiny_rollout((3,), 1), mx.ones((1, 1))), max_tokens=1)
    assert halve_batch(single) == [single]


SHARING = ["llama", "qwen2", "qwen3", "phi3", "gemma2", "cohere", "nanochat", "smollm3", "gpt_neox"]


@pytest.mark.parametrize("name", [*SHARING, "mamba", "gemma3"])
def test_shared_prompts_give_the_same_gradient_where_they_can_be_shared(name):
    """`can_share` says yes only to models for which it holds; each prompt is in the batch once."""
    policy = tiny_policy(name)
    if not can_share(policy.module):  # there are no keys and values of the whole prompt to attend to
        assert name in ("gemma2", "gemma3", "mamba", "smollm3")
        return
    whole = near_policy(make_batch(prompts=(4, 1, 7), generations=2, width=5), policy)
    grad_step = grad_step_of(policy, SPECS["grpo"], compile=False)
    want, _ = grad_step(make_state(policy), whole)
    piece: Any
    (piece,) = g.split_batch(whole, max_tokens=1000, bucketed=False, share_prompts=True)
    assert piece.tokens_bl.shape == (3, 7) and piece.prompt_index_b.shape == (6,)
    got, _ = grad_step(make_state(policy), piece)
    assert_same_gradients(got.accum_grads, want.accum_grads)


def test_empty_batches_of_any_width_share_a_trace():
    """A rollout without an active row counts in the denominator and costs no new trace."""
    policy = tiny_policy()
    grad_step, state = grad_step_of(policy, SPECS["token_mean"]), make_state(policy)
    counted = 0
    for number, width in enumerate((5, 6, 7)):
        rollout = tiny_rollout(width=width)
        batch = g.drop_inactive(g.make_batch(rollout, mx.zeros((2, 3))), SPECS["token_mean"])
        state, stats = grad_step(state, g.split_batch(batch, max_tokens=100))
        counted += rollout.lengths_b.sum().item()
        assert stats.loss.item() == 0.0 and state.step.item() == number + 1
    assert state.accum_weight.item() == counted
    assert not any(a.any().item() for a in arrays_of(state.accum_grads))
    assert grad_step.traces <= 1


@pytest.mark.parametrize("way", ["micro-batches", "batch steps"])
def test_memory_is_that_of_one_micro_batch(way):
    """One micro-batch's activations at a time; CUDA also keeps ten buffers of operations."""
    policy = tiny_policy("llama-untied", num_hidden_layers=4)
    batch = make_batch(prompts=(6,) * 16, generations=2, width=60)
    grad_step, start = grad_step_of(policy, SPECS["grpo"], compile=False), make_state(policy)

    def peak(parts):
        g.materialize(start, parts)
        held = memory_in_use()
        mx.reset_peak_memory()
        state = start
        for part in [parts] if way == "micro-batches" else parts:
            state, _ = grad_step(state, part)
        mx.eval(list(arrays_of(state.accum_grads)))
        return mx.get_peak_memory() - held

    pieces = g.minibatches(batch, 8)
    assert peak(pieces) < (4 if has_cuda() else 1.5) * peak(pieces[:1])
