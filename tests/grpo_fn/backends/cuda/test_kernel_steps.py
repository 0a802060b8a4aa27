"""`KernelSteps` on any machine: a kernel in NumPy, which writes through, stands in for CUDA's."""

from functools import cache, partial

import attrs
import mlx.core as mx
import pytest

import grpo_fn as g
from grpo_fn.backends import substituted
from grpo_fn.backends.cuda.decoding import kernel_steps
from grpo_fn.backends.cuda.decoding.kernel_steps import KernelSteps
from grpo_fn.rollout.decode_step import CacheSteps
from grpo_fn.rollout.generation import prefilled
from grpo_fn.rollout.prefill import result_of
from tests.support.generating import EOS, EQUAL, RAGGED, assert_same, assert_teacher_forced, roll
from tests.support.kernels.in_place_kernel import InPlaceKernel
from tests.support.tiny_policies import tiny_policy, token_rows

LAYERS = 2


@pytest.fixture
def kernel(monkeypatch):
    """The stand-in; steps are not compiled, and buffers begin with room for four tokens."""
    monkeypatch.setattr(kernel_steps, "FIRST_ROOM", 4)
    monkeypatch.setattr(kernel_steps, "_ROOM_STEP", 3)
    monkeypatch.setattr("grpo_fn.policy.policy.compiled", partial(g.compiled, enabled=False))
    stand_in = InPlaceKernel()
    monkeypatch.setattr(kernel_steps, "append_and_attend", stand_in)
    untried = kernel_steps.PROGRAM._replace(takes=lambda module, caches: False)
    with substituted(kernel_steps=untried):
        yield stand_in


def with_kernel(name="llama"):
    """A tiny policy that takes the kernel."""
    return attrs.evolve(tiny_policy(name), supports_compiled_decode=True)


def both_steps(policy, prompts, generations, *, room):
    """The kernel's steps after these prompts, and those of `PrefixCache`."""
    sampling = g.Sampling(num_generations=generations, max_new_tokens=room)
    policies = policy, attrs.evolve(policy, supports_compiled_decode=False)
    given = policy.module, prompts, None, sampling, True, None
    ours, theirs = (result_of(prefilled(each, *given))[1] for each in policies)
    assert isinstance(ours, KernelSteps) and isinstance(theirs, CacheSteps)
    return ours, theirs


def assert_step_for_step(ours, theirs, tokens_bt):
    """Fed the same tokens, both give the same logits."""
    for n in range(tokens_bt.shape[1]):
        difference = mx.abs(ours(tokens_bt[:, n]) - theirs(tokens_bt[:, n])).max().item()
        assert difference < 1e-4, f"step {n}"


SEVEN = {"generations": 7, "limit": 20, "eos_ids": EOS, "check_every": 1}


@cache
def of_copied_prompts(prompts):
    """Seven completions of each of these prompts as the model itself draws them, from copies."""
    policy = tiny_policy()
    copies = roll(policy, [list(prompt) for prompt in prompts], share_prefix=False, **SEVEN)
    assert_teacher_forced(policy, copies)
    return copies


@pytest.mark.parametrize("prompts", [EQUAL, RAGGED], ids=["equal", "ragged"])
@pytest.mark.parametrize(
    "options",
    [{}, {"pipelined": True}, {"max_batch": 7}, {"check_every": 3}],
    ids=str,
)
def test_it_draws_as_with_copied_prompts(prompts, options, kernel):
    """Tokens, ends and log-probs, with buffers that are outgrown."""
    policy = with_kernel()
    drawn = roll(policy, prompts, share_prefix=True, **SEVEN | options)
    assert {room for _, room, _ in kernel.calls} == {4, 8, 16, 21}
    assert_same(drawn, of_copied_prompts(tuple(map(tuple, prompts))))


@pytest.mark.parametrize("name", ["qwen3", "nanochat", "cohere"])
def test_other_architectures_draw_as_with_copied_prompts(name, kernel):
    """Norms of queries and keys, a head of keys for each query, scaled logits."""
    policy = with_kernel(name)
    options = {"generations": 4, "limit": 10, "eos_ids": EOS, "check_every": 1}
    drawn = roll(policy, share_prefix=True, **options)
    calls = len(kernel.calls)
    assert_same(drawn, roll(policy, share_prefix=False, **options))
    assert len(kernel.calls) == calls > 0, "copied prompts do without"


def test_buffers_grow_by_doubling_and_to_what_is_needed(kernel):
    """Four, eight, sixteen, then the length asked for, rounded up; past it, just enough. Nothing is lost."""
    ours, theirs = both_steps(with_kernel(), RAGGED, 2, room=17)
    assert_step_for_step(ours, theirs, token_rows(6, 20))
    rooms = [4] * 4 + [8] * 4 + [16] * 8 + [18] * 2 + [21] * 2
    assert kernel.calls == [(6, room, n) for n, room in enumerate(rooms) for _ in range(LAYERS)]
