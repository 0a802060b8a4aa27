"""Checkpointed blocks and MLPs: the same gradient in less memory, in this one model, and in no sampling."""

import itertools

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from grpo_fn.policy.layers.learning_form import checkpoint_layers, checkpoint_mlps
from grpo_fn.trees import arrays_of, map_arrays, named_leaves
from tests.support.generating import assert_same, roll
from tests.support.naive_learner import accumulated, make_batch
from tests.support.tiny_policies import lora_policy, memory_in_use, tiny_policy, token_rows, worst_difference

BLOCKS, MLPS = checkpoint_layers, checkpoint_mlps


def checkpointed(policy, checkpoint=checkpoint_layers):
    """The policy with checkpointed parts in each of its layers."""
    assert checkpoint(policy.module) == len(policy.module.layers)
    return policy


def gradient(policy, **options):
    """The learner's accumulated gradient of a small batch."""
    batch = make_batch(old=False, generations=2, width=6)
    return accumulated(policy, batch, **options)[0].accum_grads


@pytest.mark.parametrize(
    ("checkpoint", "name", "compile"),
    [
        *itertools.product([BLOCKS], ["llama", "qwen2", "gemma2", "gemma3", "cohere", "mamba"], [False]),
        *itertools.product([MLPS], ["llama", "qwen2"], [False, True]),
    ],
)
def test_the_gradient_is_the_same(checkpoint, name, compile):
    """Every leaf's, inside the checkpointed parts too; an MLP's is equal to the bit on a CPU."""
    want = gradient(tiny_policy(name), compile=compile)
    got = gradient(checkpointed(tiny_policy(name), checkpoint), compile=compile)
    exact = checkpoint is MLPS and not mx.cuda.is_available()  # a GPU sums in any order
    assert worst_difference(got, want) <= (0 if exact else 1e-6)
    part = ".layers." if checkpoint is BLOCKS else ".mlp."
    inside = [leaf for path, leaf in named_leaves(got).items() if part in path]
    assert inside and all(leaf.any().item() for leaf in inside)


@pytest.mark.parametrize(
    ("checkpoint", "packed", "compile"),
    [(BLOCKS, False, False), (BLOCKS, True, True), (MLPS, False, False), (MLPS, True, False)],
)
def test_adapters_get_their_gradient(checkpoint, packed, compile):
    """LoRA inside checkpointed parts, also over packed weights, which have no gradient themselves."""
    options = {"packed": packed, "intermediate_size": 64}
    want = gradient(lora_policy(**options))
    got = gradient(checkpointed(lora_policy(**options), checkpoint), compile=compile)
    assert worst_difference(got, want) < 2e-6
    assert all(leaf.any().item() for leaf in arrays_of(got))


@pytest.mark.parametrize("compile", [False, True])
def test_the_module_s_leaves_are_put_back(compile):
    """The backward pass runs the blocks again: it must leave neither tracers nor other weights in them."""
    policy = checkpointed(tiny_policy())
    held = {name: id(leaf) for name, leaf in tree_flatten(policy.module.parameters())}
    before = policy.module(token_rows(2, 5))
    gradient(policy, params=map_arrays(lambda a: a * 0.9, policy.params), compile=compile)
    assert {name: id(leaf) for name, leaf in tree_flatten(policy.module.parameters())} == held
    assert bool((policy.module(token_rows(2, 5)) == before).all())


@pytest.mark.parametrize(("checkpoint", "name"), [(BLOCKS, "gemma3"), (MLPS, "llama")])
def test_sampling_is_left_alone(checkpoint, name, monkeypatch):
    """Nothing is wrapped: the tokens and log-probs are the same to the bit."""

    def wrapped(*args):
        raise AssertionError("mx.checkpoint in a forward that has no gradient")

    monkeypatch.setattr(mx, "checkpoint", wrapped)
    policy = checkpointed(tiny_policy(name), checkpoint)
    if checkpoint is MLPS:
        policy.module.eval()  # as loaded models are
        policy.module(token_rows(2, 5))
    one, other = roll(tiny_policy(name), limit=9), roll(policy, limit=9)
    assert_same(one, other)
    assert one.logp_bt.tolist() == other.logp_bt.tolist()


def test_it_takes_less_memory():
    """24 blocks over 256 tokens: the peak falls by at least two fifths. A model without layers is refused."""

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
