"""Gradient checkpointing: the same gradient in less memory, on this one model, and only there."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

import grpo_fn as g
from grpo_fn.policy.layers.learning_form import checkpoint_layers, checkpoint_mlps
from grpo_fn.trees import arrays_of, map_arrays, named_leaves
from tests.support.generating import assert_same, roll
from tests.support.tiny_policies import (
    lora_policy,
    memory_in_use,
    tiny_advantages,
    tiny_policy,
    tiny_rollout,
    token_rows,
    worst_difference,
)


def checkpointed(policy):
    """The policy, its blocks checkpointed."""
    checkpoint_layers(policy.module)
    return policy


def gradient(policy, *, compile=False, params=None):
    """The learner's accumulated gradient of a small batch."""
    rollout = tiny_rollout((4, 2), 2, 6)
    batch = g.make_batch(rollout, tiny_advantages(rollout))
    params = policy.params if params is None else params
    state = g.init_state(params, g.adamw(1e-3), key=mx.random.key(0))
    state, _ = g.make_grad_step(policy, g.LossSpec(), compile=compile)(state, batch)
    mx.eval(state.accum_grads)
    return state.accum_grads


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gemma3", "cohere", "mamba"])
def test_the_gradient_is_the_same(name):
    """Every leaf, those inside the blocks first of all: mx.checkpoint drops what it closes over."""
    want = gradient(tiny_policy(name))
    got = gradient(checkpointed(tiny_policy(name)))
    assert worst_difference(got, want) < 1e-6
    inside = [leaf for path, leaf in named_leaves(got).items() if ".layers." in path]
    assert inside and all(leaf.any().item() for leaf in inside)


@pytest.mark.parametrize(("packed", "compile"), [(False, False), (True, True)])
def test_adapters_get_their_gradient(packed, compile):
    """LoRA inside checkpointed blocks, over packed weights too, which have none themselves."""
    options = {"packed": packed, "intermediate_size": 64}
    want = gradient(lora_policy(**options))
    got = gradient(checkpointed(lora_policy(**options)), compile=compile)
    assert worst_difference(got, want) < 2e-6
    assert all(leaf.any().item() for leaf in arrays_of(got))


@pytest.mark.parametrize("compile", [False, True])
def test_the_module_s_leaves_are_put_back(compile):
    """The backward pass runs the blocks again: it must leave neither tracers nor other weights in them."""
    policy = checkpointed(tiny_policy())
    held = {name: id(leaf) for name, leaf in tree_flatten(policy.module.parameters())}
    tokens = token_rows(2, 5)
    before = policy.module(tokens)
    gradient(policy, params=map_arrays(lambda a: a * 0.9, policy.params), compile=compile)
    assert {name: id(leaf) for name, leaf in tree_flatten(policy.module.parameters())} == held
    assert bool((policy.module(tokens) == before).all())


def test_decoding_is_left_alone(monkeypatch):
    """The same tokens and log-probs, to the bit; no block of a forward with a cache is wrapped."""

    def wrapped(*args):
        raise AssertionError("mx.checkpoint in a forward with a cache")

    monkeypatch.setattr(mx, "checkpoint", wrapped)
    one, other = (
        roll(policy, limit=9) for policy in (tiny_policy("gemma3"), checkpointed(tiny_policy("gemma3")))
    )
    assert_same(one, other)
    assert one.logp_bt.tolist() == other.logp_bt.tolist()


def test_it_takes_less_memory():
    """24 blocks over 256 tokens: the peak of a gradient falls by at least two fifths. A model without layers
    has nothing to checkpoint, and is refused by the name of its class."""

    def peak(policy):
        tokens = token_rows(4, 64)
        mx.eval(policy.params)
        peaks = []
        for _ in range(4):  # the largest: MLX runs less far ahead where other programs take the core
            held = memory_in_use()
            mx.reset_peak_memory()
            mx.eval(mx.grad(lambda p: policy.hidden(p, tokens).sum())(policy.params))
            peaks.append(mx.get_peak_memory() - held)
        return max(peaks)

    plain, less = (tiny_policy("llama-untied", num_hidden_layers=24, intermediate_size=256) for _ in range(2))
    assert peak(checkpointed(less)) < 0.6 * peak(plain)
    with pytest.raises(ValueError, match="Linear has no layers"):
        checkpoint_layers(nn.Linear(2, 2))


def with_checkpointed_mlps(policy):
    """The policy, its gated MLPs checkpointed."""
    assert checkpoint_mlps(policy.module) == len(policy.module.layers)
    return policy


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("compile", [False, True])
def test_checkpointed_mlps_give_the_same_gradient(name, compile):
    """To the bit on a CPU, as the same operations run again; every leaf of an MLP has one."""
    want = gradient(tiny_policy(name), compile=compile)
    got = gradient(with_checkpointed_mlps(tiny_policy(name)), compile=compile)
    # A GPU adds up an embedding's gradient in any order.
    assert worst_difference(got, want) <= (1e-6 if mx.cuda.is_available() else 0)
    inside = [leaf for path, leaf in named_leaves(got).items() if ".mlp." in path]
    assert inside and all(leaf.any().item() for leaf in inside)


@pytest.mark.parametrize("packed", [False, True])
def test_adapters_inside_checkpointed_mlps_get_their_gradient(packed):
    """Over packed weights too, which have none themselves."""
    options = {"packed": packed, "intermediate_size": 64}
    want = gradient(lora_policy(**options))
    got = gradient(with_checkpointed_mlps(lora_policy(**options)))
    assert worst_difference(got, want) < 2e-6
    assert all(leaf.any().item() for leaf in arrays_of(got))


def test_checkpointed_mlps_sample_as_before(monkeypatch):
    """Outside of learning nothing is wrapped, with a cache or without."""

    def wrapped(*args):
        raise AssertionError("mx.checkpoint in a forward that has no gradient")

    policy = with_checkpointed_mlps(tiny_policy())
    policy.module.eval()  # as loaded models are
    monkeypatch.setattr(mx, "checkpoint", wrapped)
    assert_same(roll(tiny_policy(), limit=9), roll(policy, limit=9))
    policy.module(token_rows(2, 5))
