"""Hidden states and head apart give the whole model's result, in every architecture."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

import grpo_fn as g
from tests.support.tiny_policies import (
    ARCHITECTURES,
    VOCAB,
    tiny_module,
    tiny_policy,
    token_rows,
    worst_difference,
)

# Architectures whose logits are a function of a product with a matrix: they take the closed-form gradient.
TIED = dict.fromkeys(("llama", "qwen2", "smollm3", "gemma2", "cohere"), "model.embed_tokens.weight")
UNTIED = dict.fromkeys(("llama-untied", "qwen3", "phi3", "gemma3", "nanochat", "deepseek"), "lm_head.weight")
PRODUCTS = {**TIED, **UNTIED, "mamba": "backbone.embeddings.weight"}
SHAPES = {"gemma2": (1, 5), "cohere": (0.25, None), "nanochat": (1, 15)}  # scale and soft cap; else (1, None)


def through_the_head(policy, params, tokens):
    """Logits from hidden states and head."""
    hidden = policy.hidden(params, tokens)
    head = policy.head(params)
    return head.function(head.params, hidden.reshape(-1, hidden.shape[-1])).reshape(*tokens.shape, -1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hidden_and_head_are_the_model(name):
    """Tied, untied, scaled, soft-capped, biased, recurrent, or inside: the logits agree."""
    policy, tokens = tiny_policy(name), token_rows(3, 8)
    logits = policy.module(tokens)
    assert logits.std().item() > 0.2
    assert float(mx.abs(through_the_head(policy, policy.params, tokens) - logits).max()) < 1e-6
    assert policy.split.weight == PRODUCTS.get(name)
    scale, cap = SHAPES.get(name, (1, None))
    assert policy.split.scale == pytest.approx(scale, rel=1e-6) and policy.split.cap == pytest.approx(cap)


def assert_gradient_is_the_module_s(make, chunk: int | None = 3):
    """Through hidden states and head in chunks, every leaf has the naive gradient."""
    tokens, targets = token_rows(2, 5), token_rows(2, 5, seed=1)
    weights = mx.array(np.random.default_rng(0).normal(size=(2, 5)), mx.float32)
    policy, module = g.Policy.from_module(make()), make()

    def pure(params):
        logp = g.token_logprobs(policy.hidden(params, tokens), policy.head(params), targets, chunk=chunk)
        return (weights * logp).sum()

    def naive(params):
        module.update(params)
        return -(weights * nn.losses.cross_entropy(module(tokens), targets)).sum()

    got, want = (mx.grad(loss)(policy.params) for loss in (pure, naive))
    assert worst_difference(got, want) < 2e-5
    return policy, got


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_of_logprobs_are_the_model_s(name):
    """For every architecture."""
    assert_gradient_is_the_module_s(lambda: tiny_module(name))


def test_finding_the_head_leaves_the_module_alone():
    """Probes restore what they replaced; hidden states as wide as the vocabulary keep a model whole."""
    module = tiny_module("gemma2")
    held = {name: id(leaf) for name, leaf in tree_flatten(module.parameters())}
    backbone = module.model
    g.Policy.from_module(module)
    assert {name: id(leaf) for name, leaf in tree_flatten(module.parameters())} == held
    assert module.model is backbone
    policy, tokens = tiny_policy("llama-untied", vocab_size=32), token_rows(2, 4) % 32
    assert policy.split.path is None
    assert bool((policy.hidden(policy.params, tokens) == policy.module(tokens)).all())


@pytest.mark.parametrize("bias", [0.0, 0.1, 1.0, 10.0])
def test_a_frozen_bias_in_the_head_is_seen(bias):
    """A head with a frozen bias, however small, is not a plain product."""

    def make():
        module = tiny_module("phi")
        module.lm_head.bias = mx.array(bias * np.random.default_rng(0).normal(size=VOCAB), mx.float32)
        module.freeze()
        module.model.layers[0].mlp.fc1.unfreeze()
        return module

    assert_gradient_is_the_module_s(make, None)


def test_an_adapter_on_the_head_is_no_plain_product():
    """With its second factor at zero, the adapter still gets its gradient."""
    from mlx_lm.tuner.lora import LoRALinear

    def make():
        module = tiny_module("llama-untied")
        module.freeze()
        mx.random.seed(1)
        module.lm_head = LoRALinear.from_base(module.lm_head, r=2, scale=3.0)
        return module

    policy, got = assert_gradient_is_the_module_s(make)
    assert policy.split.weight is None
    assert sorted(policy.split.trainable) == ["lm_head.lora_a", "lm_head.lora_b"]
    assert float(mx.abs(got["lm_head"]["lora_b"]).max()) > 1e-3


def test_a_language_model_inside_another_is_found():
    """If a shell holds the text model as `language_model`, that one's backbone is split off."""

    class Shell(nn.Module):
        def __init__(self):
            super().__init__()
            self.language_model = tiny_module("llama-untied")

        def __call__(self, tokens, cache=None):
            return self.language_model(tokens, cache=cache)

    policy, tokens = g.Policy.from_module(Shell()), token_rows(2, 5)
    assert policy.split.path == ("language_model", "model")
    assert policy.split.weight == "language_model.lm_head.weight"
    assert bool((through_the_head(policy, policy.params, tokens) == policy.module(tokens)).all())


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_heads_in_16_bits_are_still_products(dtype):
    """Rounding and float16's range hide neither the closed form nor a soft cap."""
    for size in (VOCAB, 100_000):  # a sum over this many overflows in float16
        split = tiny_policy("llama", dtype=dtype, vocab_size=size).split
        assert split.weight == "model.embed_tokens.weight" and split.cap is None
    assert tiny_policy("gemma2", dtype=dtype).split.cap == 5


@pytest.mark.parametrize(
    "change", [mx.sin, lambda z: mx.clip(z, -4, 4), lambda z: -z, lambda z: z + 0.1 * z**2]
)
def test_another_function_of_the_product_is_told_apart(change):
    """Functions other than a scale or soft cap are differentiated automatically."""
    llama = type(tiny_module("llama-untied"))

    class Changed(llama):
        def __call__(self, *args, **kwargs):
            return change(super().__call__(*args, **kwargs))

    module = tiny_module("llama-untied")
    module.__class__ = Changed
    policy = g.Policy.from_module(module)
    assert policy.split.weight is None and policy.split.trainable == ("lm_head.weight",)
