"""The grad step compared with a naive one; its traces and its forward passes."""

import attrs
import mlx.core as mx
import numpy as np
import pytest

import grpo_fn as g
from grpo_fn.learner import shape_of
from grpo_fn.trees import map_arrays
from tests.support.closeness import assert_same_figures, assert_same_gradients
from tests.support.naive_learner import (
    SPECS,
    TEMPERATURE,
    grad_step_of,
    make_batch,
    make_state,
    mean_gradient,
    naive_gradient,
    near_policy,
    policy_of,
    row_logprobs,
)
from tests.support.tiny_policies import repeats, tiny_policy


@pytest.mark.parametrize("by_token", [False, True], ids=["", "advantages of tokens"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_gradient_is_the_naive_one(spec, by_token):
    """Loss and gradient for clip, correction, KL, entropy and each aggregation."""
    policy = tiny_policy("llama")
    batch = near_policy(make_batch(by_token=by_token and spec.level == "token"), policy)
    state = make_state(policy, ref=spec.beta > 0)
    state, stats = grad_step_of(policy, spec, compile=False)(state, batch)
    loss, want = naive_gradient("llama", policy.params, batch, spec, state.ref_params)
    assert_same_figures(stats, {"loss": loss})
    assert_same_gradients(mean_gradient(state), want)
    if spec.level == "token":
        assert 0 < float(stats.clip_region) < 1, "some tokens are clipped, and some are not"


KINDS = ["llama-untied", "qwen2", "gemma2", "gemma3", "cohere", "mamba", "gpt_neox", "lora"]


@pytest.mark.parametrize("name", KINDS)
def test_the_gradient_is_the_naive_one_in_every_kind_of_model(name):
    """Windows and states included; with adapters, base and head stay frozen."""
    policy = policy_of(name)
    batch = near_policy(make_batch(prompts=(5, 1, 9), generations=2, width=6), policy)
    state, stats = grad_step_of(policy, SPECS["token_mean"], compile=False)(make_state(policy), batch)
    loss, want = naive_gradient(name, policy.params, batch, SPECS["token_mean"])
    assert_same_figures(stats, {"loss": loss})
    assert_same_gradients(mean_gradient(state), want)


def test_what_is_missing_is_refused():
    """An empty list of micro-batches, and beta > 0 without a reference."""
    policy = tiny_policy()
    with pytest.raises(ValueError, match="batch"):
        grad_step_of(policy, g.LossSpec(), compile=False)(make_state(policy), [])
    with pytest.raises(ValueError, match=r"beta = 0.1 requires a reference.*ref_params"):
        grad_step_of(policy, g.LossSpec(beta=0.1))(make_state(policy), make_batch())


def test_compiled_is_eager_and_traces_once_a_shape():
    """Same gradient and statistics; other values cost no new trace."""
    policy = tiny_policy("llama-untied")
    eager, grad_step = (grad_step_of(policy, SPECS["token_mean"], compile=c) for c in (False, True))
    state = make_state(policy)
    batch = near_policy(make_batch(), policy)
    want, want_stats = eager(state, batch)
    got, stats = grad_step(state, batch)
    assert_same_gradients(got.accum_grads, want.accum_grads)
    assert_same_figures(stats, want_stats)
    for seed in range(1, 4):  # accumulates, on other weights
        got = attrs.evolve(got, params=map_arrays(lambda a: a * 0.99, got.params))
        got, _ = grad_step(got, near_policy(make_batch(seed=seed), policy, seed=seed))
    assert grad_step.traces == 1
    grad_step(got, [near_policy(make_batch(width=9), policy)] * 2)
    assert grad_step.traces == 2
    fresh, _ = grad_step(make_state(policy), batch)
    assert grad_step.traces == 2 and repeats(fresh.accum_grads, grad_step(state, batch)[0].accum_grads)


def test_buckets_bound_the_traces():
    """Twelve rollouts of random lengths need few shapes, and one trace per shape."""
    policy = tiny_policy("llama-untied")
    grad_step, state, shapes, pieces = grad_step_of(policy, SPECS["token_mean"]), make_state(policy), set(), 0
    for seed in range(12):
        batch = make_batch(width=6, seed=seed)
        for piece in g.split_batch(batch, max_tokens=72, known=shapes, new_shape_tokens=40):
            state, _ = grad_step(state, piece)
            shapes.add(shape_of(piece))
            pieces += 1
    mx.eval(state.accum_weight)
    assert grad_step.traces == len(shapes) < 0.7 * pieces


def count_forwards(policy):
    """A list that grows by one with each forward pass of the backbone."""
    forwards, backbone = [], policy.module.model

    class Counted(type(backbone)):
        def __call__(self, *args, **kwargs):
            forwards.append(1)
            return super().__call__(*args, **kwargs)

    backbone.__class__ = Counted
    return forwards


@pytest.mark.parametrize("beta, given, forwards", [(0.0, False, 1), (0.1, False, 2), (0.1, True, 1)])
def test_the_reference_runs_only_where_it_is_needed(beta, given, forwards):
    """One forward pass if beta = 0 or the batch has its log-probs, otherwise two."""
    policy = tiny_policy()
    count = count_forwards(policy)
    batch = make_batch(old=False)
    if given:
        batch = attrs.evolve(batch, ref_logp_bt=batch.rollout_logp_bt)
    grad_step_of(policy, g.LossSpec(beta=beta), compile=False)(make_state(policy, ref=True), batch)
    assert len(count) == forwards


def test_given_reference_logprobs_are_those_of_the_reference():
    """Stored or computed, they give the same gradient."""
    policy = tiny_policy()
    state, batch, spec = make_state(policy, ref=True), make_batch(old=False), g.LossSpec(beta=0.2)
    logprob_step = g.make_logprob_step(policy, temperature=TEMPERATURE, compile=False)
    kept = attrs.evolve(batch, ref_logp_bt=logprob_step(state.ref_params, batch))
    grad_step = grad_step_of(policy, spec, compile=False)
    (computed, stats), (given, given_stats) = grad_step(state, batch), grad_step(state, kept)
    assert_same_gradients(given.accum_grads, computed.accum_grads)
    assert_same_figures(given_stats, stats)
    assert float(stats.kl) > 0


def test_logprobs_are_those_of_each_row_alone():
    """Equal to the model's on each unpadded row, with shared prompts too."""
    policy, batch = tiny_policy("qwen2"), make_batch(prompts=(5, 1), generations=2)
    logp = g.make_logprob_step(policy, temperature=TEMPERATURE, compile=False)(policy.params, batch)
    for row in range(4):
        want, _ = row_logprobs(policy.module, batch, row)
        assert float(mx.abs(logp[row, : len(want)] - want).max()) < 1e-5
    shared = g.split_batch(batch, max_tokens=1000, bucketed=False, share_prompts=True)[0]
    again = g.make_logprob_step(policy, temperature=TEMPERATURE, compile=False)(policy.params, shared)
    counted, want = (np.array(x)[np.array(b.mask_bt)] for x, b in ((again, shared), (logp, batch)))
    assert np.sort(counted).tolist() == pytest.approx(np.sort(want).tolist(), abs=1e-5)
