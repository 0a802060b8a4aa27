"""The switches of mechanisms outside of the backends: each turns something off, and no result changes."""

import mlx.core as mx
import pytest

import grpo_fn as g
from benchmarks.architectures.small_models import small_model
from grpo_fn.backends import OPERATIONS, SWITCHES, disabled, disabled_names, enabled
from grpo_fn.learner import optimizer
from grpo_fn.learner.logprobs.token_logprobs import chunk_rows
from grpo_fn.policy.caches import prefix_cache
from grpo_fn.policy.decoding.merged_adapters import mergeable
from grpo_fn.policy.decoding.unpacked_layers import unpackable
from grpo_fn.policy.layers import gated_delta, patched_layers, quantized_layers
from grpo_fn.rollout import decode_loop
from tests.support.closeness import assert_same_gradients, assert_same_weights
from tests.support.generating import EOS, RAGGED, assert_same, roll
from tests.support.naive_learner import (
    SPECS,
    grad_step_of,
    make_batch,
    make_state,
    mean_gradient,
    near_policy,
)
from tests.support.tiny_policies import lora_policy, tiny_policy, token_rows

ON_CPU = mx.default_device() == mx.cpu


def calls(monkeypatch, owner, name):
    """The calls of a function from here on, in a list that grows."""
    real, found = getattr(owner, name), []
    monkeypatch.setattr(owner, name, lambda *a, **k: found.append(1) or real(*a, **k))
    return found


def gradient(policy, **split):
    """Of a loss, over the batch's micro-batches."""
    batch = near_policy(make_batch(zeros=True), policy)
    pieces = g.split_batch(g.drop_inactive(batch, SPECS["grpo"]), max_tokens=40, **split)
    state, _ = grad_step_of(policy, SPECS["grpo"], compile=False)(make_state(policy), pieces)
    mx.eval(state.accum_grads)
    return state


def packed_policy():
    """Adapters over a base of four bits."""
    return lora_policy(packed=True, intermediate_size=64)


def decoder():
    """What decodes, with the settings of a run."""
    return decode_loop.Decoder(g.Sampling(), g.Decoding())


def acts(name, monkeypatch):
    """Whether the mechanism does something now."""
    if name == "patched_layers":
        return patched_layers.patch_layers(tiny_policy().module) > 0
    if name == "shared_prefix":
        return prefix_cache.sharing_pays()
    if name == "row_compaction":
        return decoder()._compact
    if name == "merged_adapters":
        return bool(mergeable(lora_policy().module))
    if name == "unpacked_weights":
        return bool(unpackable(packed_policy().module))
    if name == "unpacked_products":
        return quantized_layers.unpack_rows() > 0
    if name == "logit_chunks":
        return chunk_rows(50_000) < 10_000
    if name == "inactive_rows":
        batch = make_batch(zeros=True)
        return g.drop_inactive(batch, SPECS["grpo"]).mask_bt.shape[0] < batch.mask_bt.shape[0]
    if name == "leafwise_update":
        found = calls(monkeypatch, optimizer.mx, "depends")
        state = gradient(tiny_policy())
        found.clear()
        mx.eval(g.make_update_step(g.adamw(1e-3), compile=False)(state)[0].params)
        return bool(found)
    if name == "chunked_gated_delta":
        found = calls(monkeypatch, gated_delta, "chunked_gated_delta")
        policy = g.Policy.from_module(small_model("qwen3_next"))
        mx.eval(policy.hidden(policy.params, token_rows(1, 4)))
        return bool(found)
    raise ValueError(name)


# Those of the shell have their tests beside their code.
OF_THE_SHELL = {"background_saving", "programs_ahead"}
BY_DEVICE = {"shared_prefix", "unpacked_weights", "unpacked_products"}  # what a CPU and CUDA do


@pytest.mark.parametrize("name", sorted(SWITCHES.keys() - OF_THE_SHELL))
def test_a_switch_turns_its_mechanism_off(name, monkeypatch):
    """It acts; inside of the block it does not."""
    if ON_CPU or name not in BY_DEVICE:
        assert enabled(name) and acts(name, monkeypatch)
    monkeypatch.undo()
    with disabled(name):
        assert not enabled(name) and disabled_names() == (name,) and not acts(name, monkeypatch)
    assert enabled(name) and disabled_names() == ()


def test_an_unknown_switch_is_an_error_with_the_nearest():
    """Also where the name is that of an operation, which `find` is for."""
    for name, near in (("row_compation", "row_compaction"), ("softmax", "patched_layers")):
        with pytest.raises(ValueError, match=f"no mechanism '{name}'; the nearest name is"):
            enabled(name)
        assert near in SWITCHES
    with pytest.raises(ValueError, match="the nearest name is 'merged_adapters'"), disabled("merged_adapter"):
        pass
    assert not SWITCHES.keys() & OPERATIONS.keys()


@pytest.mark.parametrize("make", [tiny_policy, lora_policy, packed_policy])
def test_results_are_the_same_without_the_switches_mechanisms(make):
    """Tokens, log-probs, gradient and update, to rounding, of full weights, adapters and a packed base."""
    options = {"generations": 4, "limit": 10, "eos_ids": EOS, "check_every": 1}

    def results(sampling):
        policy = make()
        state = gradient(policy)
        after, _ = g.make_update_step(g.adamw(1e-3), compile=False)(state)
        return roll(policy, RAGGED, sampling=sampling, **options), mean_gradient(state), after.params

    rollout, grads, params = results(g.Sampling(min_p=3e-6))
    with disabled(*SWITCHES):
        # Another sampling that draws the same: each distribution is compiled once a process.
        plain, plain_grads, plain_params = results(g.Sampling(min_p=4e-6))
    assert_same(rollout, plain)
    assert_same_gradients(plain_grads, grads)
    assert_same_weights(plain_params, params, make().params)


def test_inactive_rows_count_in_the_denominators_either_way():
    """Left out or not, the update is the same."""
    policy = tiny_policy()
    wanted = gradient(policy)
    with disabled("inactive_rows"):
        found = gradient(policy)
    assert_same_gradients(mean_gradient(found), mean_gradient(wanted))
    assert found.accum_weight.item() == wanted.accum_weight.item() > 0
