"""Prefill and fork: prompts in one call or several, of one token or many."""

import pytest

from grpo_fn.policy.caches.kv_caches import keep_rows
from grpo_fn.rollout import prefill
from tests.support.generating import assert_same, assert_teacher_forced, roll
from tests.support.tiny_policies import tiny_policy


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba"])
@pytest.mark.parametrize(
    "prompts", [[[5]], [[5], [9], [5]], [[5], [9, 2]]], ids=["one", "three", "one and two"]
)
def test_prompts_of_one_token(name, prompts):
    """Nothing to prefill but the token itself."""
    policy = tiny_policy(name)
    rollout = roll(policy, prompts, limit=8)
    assert rollout.prompts == tuple(map(tuple, prompts))
    assert_teacher_forced(policy, rollout)


@pytest.mark.parametrize("piece", [3, 4, 13])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_long_prompt_goes_in_by_pieces(name, piece, monkeypatch):
    """Prefill in several calls, whatever is left for the last one, changes nothing."""
    policy = tiny_policy(name)
    whole = roll(policy)
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", piece)
    assert_same(roll(policy), whole)


def test_forking_copies_only_what_is_in_use():
    """A cache has room for 256 tokens; G completions of a short prompt do not get G times that."""
    policy = tiny_policy()
    _, caches = prefill.result_of(prefill.prefill(policy.module, [[1, 2, 3, 4], [5, 6, 7, 8]]))
    assert caches[0].nbytes > 2 * 200 * 2 * 16 * 4
    keep_rows(caches, [0] * 5 + [1] * 5)
    assert [cache.nbytes for cache in caches] == [10 * 4 * 2 * 16 * 4] * 2
