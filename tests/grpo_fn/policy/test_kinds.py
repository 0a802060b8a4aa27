"""Kinds of architectures against mlx-lm's own models: what decodes, what learns, what it takes."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

import grpo_fn as g
from benchmarks.architectures import small_models
from benchmarks.architectures.small_settings import AROUND, SETTINGS, TEXT
from benchmarks.architectures.trial import run_steps
from grpo_fn.learner import can_share
from grpo_fn.policy import patch_layers
from grpo_fn.policy.caches.kv_caches import plain_caches
from grpo_fn.trees import arrays_of
from tests.support.generating import EOS, EQUAL, RAGGED, assert_same, assert_teacher_forced, roll
from tests.support.tiny_policies import UNUSUAL, tiny_module, tiny_policy, token_rows, worst_difference

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


def step_by_step(module, tokens_bl):
    """Logits [B,L,V] of rows that are decoded token by token from the first, over the model's own caches."""
    caches = plain_caches(module)
    steps = [module(tokens_bl[:, n : n + 1], cache=caches) for n in range(tokens_bl.shape[1])]
    return mx.concatenate(steps, axis=1)


@pytest.mark.parametrize("name", UNUSUAL)
def test_the_forward_is_what_decodes(name):
    """A whole row at once gives the logits of its tokens one by one, past the window as well."""
    policy = tiny_policy(name)
    tokens = token_rows(2, 13)
    want = step_by_step(policy.module, tokens)
    assert mx.abs(policy.logits(policy.params, tokens) - want).max().item() < 1e-4


@pytest.mark.parametrize("prompts", [EQUAL, RAGGED], ids=["equal", "ragged"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_rollouts_are_the_learner_s(name, prompts):
    """Log-probs of a rollout are those of the learner's forward; asking for shortcuts changes nothing."""
    policy = tiny_policy(name)
    drawn = roll(policy, prompts, eos_ids=EOS, check_every=2)
    assert_teacher_forced(policy, drawn)
    assert not policy.shares_prefix
    assert_same(drawn, roll(policy, prompts, eos_ids=EOS, check_every=2, share_prefix=True))


@pytest.mark.parametrize("name", UNUSUAL)
def test_the_learner_s_gradient_is_that_of_what_decodes(name):
    """Log-probs and gradients are those of the model over its own caches; prompts are not shared."""
    policy = tiny_policy(name)
    assert not can_share(policy.module)
    tokens, targets = token_rows(2, 6), token_rows(2, 6, seed=1)
    weights = mx.array(np.random.default_rng(0).normal(size=(2, 6)), mx.float32)

    def learner(params):
        logp = g.token_logprobs(policy.hidden(params, tokens), policy.head(params), targets)
        return (weights * logp).sum()

    def decoding(params):
        with policy.bound(params) as module:
            logits = step_by_step(module, tokens)
        logp = mx.take_along_axis(logits, targets[..., None], axis=-1)[..., 0] - mx.logsumexp(logits, axis=-1)
        return (weights * logp).sum()

    assert learner(policy.params).item() == pytest.approx(decoding(policy.params).item(), rel=1e-5)
    assert worst_difference(mx.grad(learner)(policy.params), mx.grad(decoding)(policy.params)) < 1e-3


def test_rows_of_one_length_are_decoded_together():
    """afm7 has no batches of rows of different lengths; gemma3n, which shares keys as well, has."""
    assert not tiny_policy("afm7").takes_ragged and not tiny_policy("phi3small").takes_ragged
    assert tiny_policy("gemma3n").takes_ragged


def test_a_vocabulary_below_the_ids_that_are_never_drawn():
    """mlx-lm's phi3small writes −inf at ids up to 100,351, past the end of a small vocabulary's logits."""
    module = tiny_module("phi3small")
    assert max(module._dummy_tokenizer_ids.tolist()) > 100_000
    g.Policy.from_module(module)
    assert module._dummy_tokenizer_ids.tolist() == []
    large = tiny_module("phi3small", vocab_size=100_300)
    g.Policy.for_inference(large)
    assert max(large._dummy_tokenizer_ids.tolist()) == 100_299


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_logits_of_minus_infinity_train(entropy_coef):
    """phi3small at its real vocabulary: a loss, an entropy and a gradient that are finite and not 0."""
    policy = tiny_policy("phi3small", vocab_size=100_352)
    rollout = roll(policy, RAGGED, with_entropy=True)
    batch = g.make_batch(rollout, mx.array([[1.0, 0.5, -1.0]] * 3))
    state = g.init_state(policy.params, g.adamw(1e-3), key=mx.random.key(0))
    state, stats = g.make_grad_step(policy, g.preset("grpo", entropy_coef=entropy_coef))(state, batch)
    norm = sum(mx.square(leaf).sum().item() for leaf in arrays_of(state.accum_grads)) ** 0.5
    assert 0 < norm < np.inf and 0 < stats.entropy.item() < np.log(100_352)
    assert stats.logp_diff_max.item() < 1e-4 and mx.isfinite(rollout.entropy_bt).all()
