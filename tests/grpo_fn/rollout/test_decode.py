"""Batched generation compared with the model on each completion alone; what a rollout depends on."""

import mlx.core as mx
import pytest

import grpo_fn as g
from grpo_fn.policy.caches.kv_caches import keep_rows
from grpo_fn.rollout import decode_step
from grpo_fn.trees import arrays_of, on_host
from tests.support.generating import EOS, EQUAL, RAGGED, assert_same, assert_teacher_forced, roll
from tests.support.tiny_policies import ARCHITECTURES, memory_in_use, tiny_policy


@pytest.mark.parametrize("prompts", [EQUAL, RAGGED], ids=["equal", "ragged"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logprobs_are_the_model_s(name, prompts):
    """Every log-prob is that of a teacher-forced forward, past sliding windows of 6 and with soft caps."""
    policy = tiny_policy(name)
    rollout = roll(policy, prompts, eos_ids=EOS, check_every=2)
    assert_teacher_forced(policy, rollout)
    assert len({token for row in rollout.completions() for token in row}) > 10, (
        "a constant would prove little"
    )


def test_logprobs_are_those_of_the_sampler_s_distribution():
    """Tempered, truncated, with the whole distribution's entropy; temperature 0 is the argmax."""
    policy = tiny_policy("qwen2")
    for sampling in (g.Sampling(temperature=0.6), g.Sampling(temperature=1.7, top_k=5, with_entropy=True)):
        rollout = roll(policy, sampling=sampling)
        assert (rollout.entropy_bt is not None) == sampling.with_entropy
        assert_teacher_forced(policy, rollout, sampling)
    rows = roll(policy, sampling=g.Sampling(temperature=0.0)).completions()
    for p, prompt in enumerate(RAGGED):
        assert rows[3 * p] == rows[3 * p + 1] == rows[3 * p + 2]
        logits = policy.logits(policy.params, mx.array([[*prompt, *rows[3 * p]]]))[0]
        assert on_host(mx.argmax(logits, axis=-1))[len(prompt) - 1 : -1] == rows[3 * p]


def test_completions_depend_on_their_own_prompt_and_number():
    """Other prompts or more completions change no token of row p·G+g."""
    policy = tiny_policy("llama-untied")
    rollout = roll(policy)
    more = roll(policy, [*RAGGED, [4, 4]], generations=5)
    rows, more_rows = rollout.completions(), more.completions()
    for p in range(3):
        assert rows[3 * p : 3 * p + 3] == more_rows[5 * p : 5 * p + 3]
    assert len({tuple(row) for row in rows}) == 9, "no two completions share their draws"
    assert rollout.num_generations == 3 and rollout.prompts == tuple(map(tuple, RAGGED))


def test_a_later_part_of_a_group_is_that_part_of_the_whole():
    """`first_generation` numbers the completions of a group sampled in stages."""
    policy = tiny_policy()
    whole = roll(policy, EQUAL, generations=3)
    part = roll(policy, EQUAL, generations=2, first_generation=1)
    wanted = [row for n, row in enumerate(whole.completions()) if n % 3]
    assert part.completions() == wanted


def test_it_samples_from_the_parameters_and_the_key_given():
    """The policy's own parameters and MLX's global random state play no part."""
    policy, other = tiny_policy("llama-untied"), tiny_policy("llama-untied", seed=4)
    held = [id(leaf) for leaf in arrays_of(policy.module.parameters())]
    sampling = g.Sampling(num_generations=3, max_new_tokens=12)
    got = g.generate(policy, other.params, RAGGED, sampling, key=mx.random.key(0))
    mx.random.seed(99)
    assert_same(got, roll(other))
    assert roll(other, seed=2).completions() != got.completions()
    assert [id(leaf) for leaf in arrays_of(policy.module.parameters())] == held


def test_the_cache_is_freed():
    """Only the result of a rollout stays in memory."""
    policy = tiny_policy()
    g.materialize(roll(policy))
    before = memory_in_use()
    rollout = roll(policy, generations=8, limit=60)
    held = sum(a.nbytes for a in (rollout.tokens_bt, rollout.logp_bt, rollout.lengths_b, rollout.finished_b))
    assert memory_in_use() - before < held + (1 << 16)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"prompts": []}, "at least one prompt"),
        ({"prompts": [[1], []]}, r"no empty one, found lengths \[1, 0\]"),
        ({"generations": 0}, "num_generations: expected at least 1, found 0"),
        ({"limit": 0}, "max_new_tokens: expected at least 1, found 0"),
        *[({"repetition_penalty": bad}, "repetition_penalty") for bad in (0.0, -1.0, float("nan"))],
    ],
)
def test_wrong_arguments_are_refused(change, message):
    """Before anything is computed, with the value found."""
    with pytest.raises(ValueError, match=message):
        roll(tiny_policy(), **change)


def test_prompts_with_numbers_of_their_own_draw_as_in_the_whole():
    """`prompt_numbers` has each prompt's place in the whole, in any order."""
    policy = tiny_policy("llama")
    whole = roll(policy, RAGGED, eos_ids=EOS)
    for numbers in (range(2, len(RAGGED)), range(0, len(RAGGED), 2), [2, 0]):
        part = roll(policy, [RAGGED[n] for n in numbers], prompt_numbers=numbers, eos_ids=EOS)
        assert part.completions() == g.take_groups(whole, list(numbers)).completions()
    with pytest.raises(ValueError, match="prompt_numbers: expected 3, one per prompt, found 2"):
        roll(policy, RAGGED, prompt_numbers=[2, 0])


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba"])
@pytest.mark.parametrize(
    "prompts", [[[5]], [[5], [9], [5]], [[5], [9, 2]]], ids=["one", "three", "one and two"]
)
def test_prompts_of_one_token(name, prompts):
    """There is nothing to prefill except the token itself."""
    policy = tiny_policy(name)
    rollout = roll(policy, prompts, limit=8)
    assert rollout.prompts == tuple(map(tuple, prompts))
    assert_teacher_forced(policy, rollout)


@pytest.mark.parametrize("piece", [3, 4, 13])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_long_prompt_goes_in_by_pieces(name, piece, monkeypatch):
    """A prefill in several calls changes nothing."""
    policy = tiny_policy(name)
    whole = roll(policy)
    monkeypatch.setattr(decode_step, "PREFILL_TOKENS", piece)
    assert_same(roll(policy), whole)


def test_forking_copies_only_what_is_in_use():
    """G completions of a short prompt do not copy a cache's spare room."""
    policy = tiny_policy()
    _, caches = decode_step.result_of(decode_step.prefill(policy.module, [[1, 2, 3, 4], [5, 6, 7, 8]]))
    assert caches[0].nbytes > 2 * 200 * 2 * 16 * 4
    keep_rows(caches, [0] * 5 + [1] * 5)
    assert [cache.nbytes for cache in caches] == [10 * 4 * 2 * 16 * 4] * 2
