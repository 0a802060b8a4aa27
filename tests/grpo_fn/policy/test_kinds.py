"""Kinds of architectures against mlx-lm's own models: what decodes, what learns, what it takes."""

import itertools

import mlx.core as mx
import pytest

from benchmarks.architectures import small_models
from benchmarks.architectures.small_settings import AROUND, SETTINGS, TEXT
from benchmarks.architectures.trial import run_steps
from grpo_fn.policy import patch_layers
from tests.support.tiny_policies import worst_difference

KINDS = {
    "deepseek_v3": "latent attention and experts",
    "qwen3_next": "gated delta and experts",
    "jamba": "a recurrent state beside attention and experts",
    "gpt_oss": "attention sinks",
    "cohere2": "a scaled head, tied",
    "gemma4_text": "embeddings for each layer, and shared keys",
    "dbrx": "steps that cannot be compiled",
}


MORE = {  # what is also in one of the others, for tests/campaigns
    "gemma3_text": "sliding windows",
    "qwen3_moe": "experts",
    "mamba2": "a recurrent state",
    "gemma2": "soft caps",
    "lfm2": "convolutions",  # their states are kept as jamba's are, beside attention's
}


def check_kind(name):
    """Rollouts and gradient of one architecture, as its trial takes them."""
    outcomes = list(itertools.takewhile(lambda each: each.step != "lora", run_steps(name)))
    assert [each.step for each in outcomes][-1] == "gradient"
    assert not [(each.step, each.fault) for each in outcomes if each.fault]


@pytest.mark.parametrize("name", KINDS, ids=KINDS.get)
def test_a_kind(name):
    """Rollouts have the log-probs of mlx-lm's model on each row alone; the gradient is its own."""
    check_kind(name)


def test_every_module_of_mlx_lm_has_settings_or_needs_none():
    """The settings name modules that are there."""
    known = set(small_models.modules())
    assert not (set(SETTINGS) | set(TEXT) | set(AROUND)) - known


def peak_of_gradient(model, tokens):
    """Bytes that a gradient takes at most, beside what is there."""
    params = model.trainable_parameters()

    def loss(params):
        model.update(params)
        return mx.square(model(tokens)).mean()

    mx.eval(params)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    gradient = mx.grad(loss)(params)
    mx.eval(gradient)
    model.update(params)
    return mx.get_peak_memory() - before, gradient


def test_jamba_s_scan_takes_memory_linear_in_tokens():
    """The same gradient as mlx-lm's, at a quarter of its memory for 64 tokens."""
    tokens = mx.array([[n % 50 for n in range(64)]])
    theirs, ours = small_models.small_model("jamba"), small_models.small_model("jamba")
    patch_layers(ours)
    most, want = peak_of_gradient(theirs, tokens)
    least, got = peak_of_gradient(ours, tokens)
    assert least < most / 4
    assert worst_difference(got, want) < 1e-4
