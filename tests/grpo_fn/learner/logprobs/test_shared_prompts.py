"""A group's prompt computed once gives the gradient that computing it for every row gives."""

import attrs
import mlx.core as mx
import pytest

import grpo_fn as g
from grpo_fn.learner import can_share
from tests.support.closeness import assert_same_figures, assert_same_gradients
from tests.support.naive_learner import make_state
from tests.support.tiny_policies import tiny_policy, tiny_rollout


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("max_tokens", [1000, 40])
def test_sharing_a_prompt_changes_no_gradient(name, max_tokens):
    """Prompts of unlike lengths, one token included, rows of one token, a group half left out."""
    policy, spec = tiny_policy(name), g.preset("dapo")
    rollout = attrs.evolve(
        tiny_rollout((7, 1, 3), generations=4, width=6),
        lengths_b=mx.array([6, 3, 1, 2, 5, 6, 1, 4, 6, 2, 2, 1]),
    )
    active_pg = mx.array([[1, 0, 1, 0], [1] * 4, [1] * 4])
    batch = g.make_batch(rollout, mx.random.normal((3, 4), key=mx.random.key(2)) * active_pg)
    batch = g.drop_inactive(batch, spec)
    assert batch.mask_bt.shape[0] == 10
    grad_step = g.make_grad_step(policy, spec, compile=False)
    plain, plain_stats = grad_step(make_state(policy), batch)
    parts = g.split_batch(batch, max_tokens=max_tokens, share_prompts=True)
    assert all(part.prompt_index_b is not None for part in parts)
    assert (len(parts) > 1) == (max_tokens < 1000)
    shared, shared_stats = grad_step(make_state(policy), parts)
    assert shared.accum_weight.item() == plain.accum_weight.item()
    assert_same_figures(shared_stats, plain_stats, ["entropy"])
    assert_same_gradients(shared.accum_grads, plain.accum_grads)


def test_each_prompt_stands_once():
    """Four completions of one prompt bring it into the batch once."""
    rollout = tiny_rollout((3,), generations=4, width=2)
    (part,) = g.split_batch(g.make_batch(rollout, mx.ones((1, 4))), max_tokens=100, share_prompts=True)
    assert part.tokens_bl.tolist() == [list(rollout.prompts[0])]
    assert part.prompt_index_b.tolist() == [0, 0, 0, 0]


def test_windows_and_recurrent_states_cannot_be_shared():
    """There are no keys and values of the whole prompt to attend to."""
    assert not any(can_share(tiny_policy(name).module) for name in ("mamba", "gemma3"))
    assert can_share(tiny_policy("llama").module)
