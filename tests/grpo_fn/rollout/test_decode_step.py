"""Decoding with one copy of each prompt compared with copied prompts."""

import threading

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from mlx_lm.models.base import scaled_dot_product_attention

import grpo_fn as g
from grpo_fn.policy.caches.prefix_cache import fork
from grpo_fn.rollout import decode_loop, decode_step
from tests.support.generating import EOS, EQUAL, RAGGED, assert_same, assert_teacher_forced, roll
from tests.support.tiny_policies import tiny_module, tiny_policy


@pytest.mark.parametrize("prompts", [EQUAL, RAGGED], ids=["equal", "ragged"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "nanochat", "cohere"])
def test_one_copy_of_a_prompt_serves_all_its_completions(name, prompts, monkeypatch):
    """Groups of equal and different lengths, thinned out to nothing, give the same tokens."""
    monkeypatch.setattr(decode_loop, "COMPACT_SHARE", 0.01)
    policy = tiny_policy(name)
    assert policy.shares_prefix
    options = {"generations": 7, "limit": 20, "eos_ids": EOS, "check_every": 1}
    shared = roll(policy, prompts, share_prefix=True, **options)
    assert_same(shared, roll(policy, prompts, share_prefix=False, **options))
    assert_teacher_forced(policy, shared)


def test_a_prompt_is_held_once():
    """After the fork, the caches hold P prompts, not P · G."""
    policy = tiny_policy()
    steps = decode_step.prefill_once(policy, policy.module, [[1, 2, 3, 4], [5, 6, 7, 8]])
    _, plain = decode_step.result_of(steps)
    caches = fork(plain, [4, 4], [50, 50])
    assert [sum(a.nbytes for a in cache.state) for cache in caches] == [2 * 4 * 2 * 16 * 4] * 2


@pytest.mark.parametrize("name", ["gemma3", "smollm3", "mamba", "gemma2"])
def test_what_cannot_share_a_prefix_decodes_with_copies(name):
    """With windows, recurrent states or custom attention, the option has no effect."""
    policy = tiny_policy(name)
    assert not policy.shares_prefix
    assert_same(roll(policy, share_prefix=True), roll(policy, share_prefix=False))


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="a GPU has attention kernels of its own")
@pytest.mark.parametrize("options", [{"share_prefix": False}, {"share_prefix": True}], ids=str)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_in_16_bits_a_shared_prompt_is_rounded_like_a_copied_one(dtype, options):
    """On a CPU both parts are added before rounding; rounded apart, bfloat16 was off by 0.009 nats."""
    policy = tiny_policy(compute_dtype=dtype)
    prompts = [[n % 61 for n in range(3, 153)], [7, 8, 9] * 5, [9, 8, 2]]  # held once, and short ones
    drawn = roll(policy, prompts, generations=4, **options)
    assert policy.shares_prefix
    batch = g.make_batch(drawn, mx.ones((3, 4)))
    logp_bt = g.make_logprob_step(policy)(policy.params, batch)
    assert mx.abs(mx.where(batch.mask_bt, logp_bt - drawn.logp_bt, 0.0)).mean().item() < 1e-4


@pytest.mark.parametrize("scale", [0.07, 0.9])
@pytest.mark.parametrize("prompts", [EQUAL, RAGGED], ids=["equal", "ragged"])
def test_attention_has_the_scale_of_the_model(scale, prompts):
    """Some models (gemma, granite) have a scale other than D^−½."""
    module = tiny_module()
    for layer in module.layers:
        layer.self_attn.scale = scale
    policy = g.Policy.from_module(module)
    options = {"generations": 4, "limit": 6}
    copies = roll(policy, prompts, share_prefix=False, **options)
    assert_same(copies, roll(policy, prompts, share_prefix=True, **options))
    assert_teacher_forced(policy, copies)
    usual = roll(tiny_policy(), prompts, share_prefix=False, **options)
    assert not mx.array_equal(usual.logp_bt, copies.logp_bt), "the scale matters"


class _Late(llama.Attention):
    """Attention with its own scores as a mask, which favour late positions."""

    peeks = False  # whether it looks into its cache as well

    def __call__(self, x, mask=None, cache=None):
        rows, length, _ = x.shape

        def heads(layer, number):
            return layer(x).reshape(rows, length, number, -1).swapaxes(1, 2)

        queries = heads(self.q_proj, self.n_heads)
        keys, values = (heads(layer, self.n_kv_heads) for layer in (self.k_proj, self.v_proj))
        if cache is not None:
            assert not self.peeks or cache.keys is None or cache.step
            keys, values = cache.update_and_fetch(keys, values)
        seen = keys.shape[2]
        back = mx.arange(seen) - mx.arange(seen - length, seen)[:, None]
        own = mx.where(back <= 0, 0.7 * back, -1e9)
        out = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=self.scale, mask=own)
        return self.o_proj(out.swapaxes(1, 2).reshape(rows, length, -1))


def test_a_mask_of_the_model_s_own_is_not_lost():
    """A cache that attends would not see it, so such a model copies its prompts."""
    module = tiny_module()
    for layer in module.layers:
        layer.self_attn.__class__ = _Late
    policy = g.Policy.from_module(module)
    assert not policy.shares_prefix
    assert_teacher_forced(policy, roll(policy, EQUAL))


def test_a_model_that_fails_in_another_way_is_asked_no_more():
    """An AttributeError from an unknown cache counts as no."""

    class Peeking(_Late):
        peeks = True

    module = tiny_module()
    for layer in module.layers:
        layer.self_attn.__class__ = Peeking
    assert not g.Policy.for_inference(module).shares_prefix


class _Twice(nn.Linear):
    """An `nn.Linear` only by inheritance."""

    def __call__(self, x):
        return 2 * super().__call__(x)


def test_a_layer_with_a_call_of_its_own_keeps_it():
    module = tiny_module("llama-untied")
    module.lm_head.__class__ = _Twice
    policy = g.Policy.from_module(module)
    assert_teacher_forced(policy, roll(policy))


def test_any_thread_may_generate():
    """Streams belong to threads: the main one first, then two temporary ones."""
    policy = tiny_policy()
    found = [roll(policy, EQUAL)]
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.append(roll(policy, EQUAL)))
        thread.start()
        thread.join()
    assert len(found) == 3, "one failed"
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])
