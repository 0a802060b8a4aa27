"""The learner calls no kernel of mlx-lm's without a gradient: a stand-in for Metal has kernels that raise."""

import importlib
import pkgutil
import re
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear

import grpo_fn as g
from benchmarks.architectures.small_models import small_model
from benchmarks.architectures.small_settings import VOCABULARY
from grpo_fn.policy import checkpoint_layers
from grpo_fn.policy.layers.learning_form import asks_for_training, learning_form
from tests.support.tiny_policies import logprob_gradient, token_rows

# mlx-lm's modules with kernels of their own, and the functions that lead to these.
KERNELS = {
    "bitlinear_layers": ("_bitlinear_kernel",),
    "deepseek_v41": ("_sinkhorn_kernel",),
    "gated_delta": tuple(
        f"_gated_delta_kernel{kind}" for kind in ("", "_masked", "_vec", "_vec_masked", "_xtree", "_packed")
    ),
    "kimi_k3": ("_attn_res_kernel",),
    "rwkv7": ("_wkv7_kernel",),
    "ssm": ("_ssm_kernel",),
}
# The others: bitnet, rwkv7 and deepseek_v41 have no switch, and are refused on Metal; mamba2's and its like
# are for one token over a state.
GATED_DELTA = ["bailing_moe_v3", "kimi_k3", "kimi_linear", "olmo_hybrid"]
GATED_DELTA += ["qwen3_5", "qwen3_5_moe", "qwen3_next"]
CHANGES = {"bailing_moe_v3": {"head_dim": 32}}  # the kernels want keys of at least 32
RECURRENT = ("falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "plamo2")


class KernelCalled(Exception):
    """Raised instead of running a kernel."""


@contextmanager
def metal():
    """mlx-lm's layers see a Metal device, and each of its kernels raises."""

    def kernel(*args, **kwargs):
        raise KernelCalled

    with pytest.MonkeyPatch.context() as patch:
        for module, names in KERNELS.items():
            for name in names:
                patch.setattr(importlib.import_module(f"mlx_lm.models.{module}"), name, kernel)
        patch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu, 0))
        patch.setattr(mx.metal, "is_available", lambda: True)
        yield


def test_every_kernel_is_known():
    """A kernel that a new mlx-lm adds must be added here and looked at."""
    found = {}
    for info in pkgutil.iter_modules(mlx_lm.models.__path__):
        source = Path(mlx_lm.models.__path__[0], f"{info.name}.py").read_text()
        made = len(re.findall(r"(?:metal|cuda)_kernel\(", source))
        if made:
            module = importlib.import_module(f"mlx_lm.models.{info.name}")
            held = re.findall(r"^(_\w*kernel\w*) = ", source, re.M)
            found[info.name] = tuple(name for name in held if hasattr(module, name))
    assert {name: set(names) for name, names in found.items()} == {
        name: set(names) for name, names in KERNELS.items()
    }


def loaded(name):
    """A small model as mlx-lm's loader returns it: not in training."""
    return small_model(name, **CHANGES.get(name, {})).eval()


def gradient(policy):
    """The gradient of the learner's log-probs of two rows."""
    tokens = token_rows(2, 7) % VOCABULARY
    return logprob_gradient(policy, tokens, tokens)[1]


@pytest.mark.parametrize("name", GATED_DELTA)
def test_decoding_uses_them_and_the_learner_does_not(name):
    """The prefill asks for the kernel; log-probs and their gradient do not."""
    policy = g.Policy.from_module(loaded(name))
    with metal():
        with pytest.raises(KernelCalled), policy.bound(policy.params) as module:
            mx.eval(module(token_rows(2, 7), cache=make_prompt_cache(module)))
        assert not any(part.training for part in policy.module.modules())
        gradient(policy)
        if name == "qwen3_next":  # a checkpointed block is called again when the forward has ended
            checkpoint_layers(policy.module)
            gradient(policy)
    assert not any(part.training for part in policy.module.modules())


@pytest.mark.parametrize("name", RECURRENT)
def test_kernels_for_one_token_are_out_of_the_learner_s_way(name):
    """These need a state, and the learner's sequences have none."""
    policy = g.Policy.from_module(loaded(name))
    with metal():
        gradient(policy)
        policy.hidden(policy.params, token_rows(2, 1))
        with pytest.raises(KernelCalled), policy.bound(policy.params) as module:
            cache = make_prompt_cache(module)
            for tokens in (token_rows(2, 2), token_rows(2, 1)):
                mx.eval(module(tokens, cache=cache))


def test_only_layers_that_ask_are_switched():
    """Dropout and layers in training keep their mode; an error restores all layers."""
    module = nn.Sequential(LoRALinear(4, 4, dropout=0.5), nn.Dropout(0.5)).eval()
    with learning_form(module):
        assert not any(part.training for part in module.modules())
    model = small_model("qwen3_next")
    asks = [part for part in model.modules() if asks_for_training(type(part))]
    assert len(asks) == 2
    with pytest.raises(KernelCalled), learning_form(model.eval()):
        assert [part for part in model.modules() if part.training] == asks
        raise KernelCalled
    assert not any(part.training for part in model.modules())
    with learning_form(model.train()):
        pass
    assert all(part.training for part in model.modules())


def test_a_model_outside_of_training_follows_its_weights():
    """kimi_k3 caches products of weights in its first call; decoding must not use old ones."""
    policy = g.Policy.from_module(loaded("kimi_k3"))
    tokens = token_rows(1, 5)
    policy.logits(policy.params, tokens)
    changed = small_model("kimi_k3", seed=1)
    want = g.Policy.from_module(changed.eval(), patched=False)
    got = policy.logits(want.params, tokens)
    assert float(mx.abs(got - want.logits(want.params, tokens)).max()) < 1e-4
    gradient(policy)  # leaves no traced array behind
    assert float(mx.abs(policy.logits(want.params, tokens) - got).max()) < 1e-5
