"""Experts with few tokens: the learner sorts tokens by expert and computes what mlx-lm does."""

import mlx.core as mx
import pytest
from mlx_lm.models import switch_layers
from mlx_lm.tuner.utils import linear_to_lora_layers

import grpo_fn as g
from benchmarks.architectures.small_models import small_model
from benchmarks.architectures.small_settings import VOCABULARY
from grpo_fn.trees import arrays_of
from tests.support.closeness import apart
from tests.support.tiny_policies import logprob_gradient, token_rows, worst_difference

NAMES = ("qwen3_moe", "gpt_oss", "nemotron_h")  # gated experts, with a bias, and without a gate


def loaded(name):
    """As mlx-lm's loader returns it: not in training."""
    return small_model(name).eval()


def gradient(policy, tokens):
    """Σ of the log-probs of the next tokens, and its gradient."""
    return logprob_gradient(policy, tokens, mx.roll(tokens, -1, axis=1))


@pytest.fixture
def said(monkeypatch):
    """Per product of experts: whether its indices are sorted, and how many there are."""
    real, found = mx.gather_mm, []

    def spying(*arrays, rhs_indices, sorted_indices=False):
        found.append((sorted_indices, rhs_indices.size))
        return real(*arrays, rhs_indices=rhs_indices, sorted_indices=sorted_indices)

    monkeypatch.setattr(switch_layers.mx, "gather_mm", spying)
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "length"), [(1, 5), (1, 31), (8, 4)])
def test_few_tokens_of_the_learner_are_sorted(name, rows, length, said):
    """Of 5, 31 and 32 tokens with two experts each, only the last are sorted by mlx-lm."""
    tokens = token_rows(rows, length) % VOCABULARY
    policy = g.Policy.from_module(loaded(name))
    said.clear()
    value, grads = gradient(policy, tokens)
    assert said and all(is_sorted and 64 <= size < 128 for is_sorted, size in said)
    plain_policy = g.Policy.from_module(loaded(name), patched=False)
    said.clear()
    with mx.stream(mx.cpu):  # MLX has no gradient of unsorted products of this size on CUDA
        plain_value, plain = gradient(plain_policy, tokens)
    assert all(is_sorted == (size == 64) for is_sorted, size in said)
    assert mx.abs(value - plain_value).item() < 1e-3
    assert worst_difference(grads, plain) < 1e-4


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="MLX has the other products of GPUs")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_experts_in_16_bits_compute_on_a_cpu(name, dtype):
    """With adapters, in float32 inside: the results of the same weights in float32."""
    tokens, found = token_rows(2, 6) % VOCABULARY, []
    for compute in (dtype, mx.float32):
        module = small_model(name)
        module.set_dtype(dtype)
        module.freeze()
        linear_to_lora_layers(module, 2, {"rank": 4, "scale": 1.0, "dropout": 0.0})
        found.append(gradient(g.Policy.from_module(module, compute_dtype=compute), tokens))
    (value, grads), (wanted, wanted_grads) = found
    assert value.item() == pytest.approx(wanted.item(), rel=2e-3)
    assert apart(grads, wanted_grads) < 0.9  # a token at the border of two experts may change sides
    assert any(leaf.ndim == 3 for leaf in arrays_of(grads))  # an adapter of each expert
