"""Batched generation against the model run on each completion by itself, and against its own longer self."""

import mlx.core as mx
import numpy as np
import pytest

import grpo_fn as g
from grpo_fn import decode
from grpo_fn.caches import keep_rows
from tests.tiny_policies import ARCHITECTURES, VOCAB, lora_policy, memory_in_use, tiny_policy

EQUAL = [[1, 2, 3], [4, 5, 6]]
RAGGED = [list(range(3, 17)), [7], [9, 8, 2, 5, 1]]
EOS = (3, 17, 40)


def roll(policy, prompts=RAGGED, *, seed=0, generations=3, limit=12, **options):
    """A rollout with the policy's own parameters."""
    key = mx.random.key(seed)
    return g.generate(
        policy, policy.params, prompts, key=key, num_generations=generations, max_new_tokens=limit, **options
    )


def teacher_forced(policy, prompt, completion, sampler=None):
    """(log-probs, entropies) of a completion by one forward over prompt + completion, nothing cached."""
    logits = policy.logits(policy.params, mx.array([[*prompt, *completion]]))[0].astype(mx.float32)
    z = np.array(logits, np.float64)[len(prompt) - 1 : -1] / (sampler.temperature if sampler else 1.0)
    whole = z - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True)) - z.max(-1, keepdims=True)
    if sampler is not None and sampler.top_k:
        least = np.sort(z, axis=-1)[:, -sampler.top_k, None]
        z = np.where(z >= least, z, -np.inf)
    logp = z - z.max(-1, keepdims=True) - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True))
    return logp[np.arange(len(completion)), completion], -(np.exp(whole) * whole).sum(-1)


def assert_teacher_forced(policy, rollout, sampler=None):
    """Every log-prob (and entropy) of the rollout is the model's own, to 1e-4; zeros after the end."""
    for row, completion in enumerate(rollout.completions()):
        logp, entropy = teacher_forced(
            policy, rollout.prompts[row // rollout.num_generations], completion, sampler
        )
        got = np.array(rollout.logp_bt[row])
        assert np.abs(got[: len(completion)] - logp).max() < 1e-4, f"row {row}"
        assert not got[len(completion) :].any() and not rollout.tokens_bt[row, len(completion) :].any().item()
        if rollout.entropy_bt is not None:
            assert np.abs(np.array(rollout.entropy_bt[row])[: len(completion)] - entropy).max() < 1e-4


def assert_same(one, other):
    """Two rollouts have the same tokens, ends and (to rounding) log-probs."""
    assert one.completions() == other.completions()
    assert one.finished_b.tolist() == other.finished_b.tolist()
    assert mx.abs(one.logp_bt - other.logp_bt).max().item() < 1e-5


@pytest.mark.parametrize("prompts", [EQUAL, RAGGED], ids=["equal", "ragged"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logprobs_are_the_model_s(name, prompts):
    """Prefill, fork, cache, compaction: each sampled token's log-prob is that of a teacher-forced forward.

    Sliding windows (prompts and completions run past gemma3's 6), recurrent states and soft caps included.
    """
    policy = tiny_policy(name)
    rollout = roll(policy, prompts, eos_ids=EOS, check_every=2)
    assert_teacher_forced(policy, rollout)
    assert len({token for row in rollout.completions() for token in row}) > 10, (
        "a constant would prove little"
    )


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
    monkeypatch.setattr(decode, "PREFILL_TOKENS", piece)
    assert_same(roll(policy), whole)


@pytest.mark.parametrize(
    "sampler",
    [
        g.Sampler(temperature=0.6),
        g.Sampler(temperature=1.7, top_k=5, with_entropy=True),
        g.Sampler(with_entropy=True),
    ],
)
def test_logprobs_are_those_of_the_sampler_s_distribution(sampler):
    """Tempered and truncated; the entropy is that of the whole distribution at the temperature."""
    policy = tiny_policy("qwen2")
    rollout = roll(policy, sampler=sampler)
    assert (rollout.entropy_bt is not None) == sampler.with_entropy
    assert_teacher_forced(policy, rollout, sampler)


def test_greedy_takes_the_most_likely_token():
    """At temperature 0 every completion of a prompt is the same, and each token the forward's argmax."""
    policy = tiny_policy("llama-untied")
    rollout = roll(policy, sampler=g.Sampler(temperature=0.0))
    rows = rollout.completions()
    for p, prompt in enumerate(RAGGED):
        assert rows[3 * p] == rows[3 * p + 1] == rows[3 * p + 2]
        logits = policy.logits(policy.params, mx.array([[*prompt, *rows[3 * p]]]))[0]
        assert mx.argmax(logits, axis=-1).tolist()[len(prompt) - 1 : -1] == rows[3 * p]


def test_an_end_token_ends_and_counts():
    """With end tokens each completion is what it is without them, up to and including the first one."""
    policy = tiny_policy()
    free = roll(policy, generations=6)
    assert not free.finished_b.any().item() and free.lengths_b.tolist() == [12] * 18
    ended = roll(policy, generations=6, eos_ids=EOS)
    for long, short, finished in zip(
        free.completions(), ended.completions(), ended.finished_b.tolist(), strict=True
    ):
        ends = [n + 1 for n, token in enumerate(long) if token in EOS]
        assert short == long[: ends[0] if ends else 12]
        assert finished == bool(ends)
    counts = set(ended.lengths_b.tolist())
    assert 12 in counts and len(counts) > 3, "some run to the limit, others end at several places"


def test_an_end_token_at_the_limit_counts_as_finished():
    """The last token that is allowed may be the end token."""
    policy = tiny_policy()
    free = roll(policy, generations=6)
    last = free.completions()[0]
    n = next(n for n in range(1, 12) if last[n] not in last[:n])
    ended = roll(policy, generations=6, limit=n + 1, eos_ids=[last[n]])
    assert ended.completions()[0] == last[: n + 1] and ended.finished_b[0].item()


def test_the_width_is_that_of_the_longest():
    """No column without a token; all rows may end at once."""
    rollout = roll(tiny_policy(), eos_ids=range(VOCAB))
    assert rollout.tokens_bt.shape == (9, 1) and rollout.lengths_b.tolist() == [1] * 9
    assert rollout.finished_b.all().item()


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba"])
@pytest.mark.parametrize(
    "options",
    [
        {"check_every": 1},
        {"check_every": 5},
        {"check_every": 100},
        {"max_batch": 1},
        {"max_batch": 3},
        {"max_batch": 7},
        {"pipelined": True},
        {"share_prefix": False},
        {"share_prefix": False, "max_batch": 3},
        {"compact": False},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_how_rows_are_decoded(name, options):
    """Batch size, checks, dropped rows and pipelining change no token: a row has a key of its own."""
    policy = tiny_policy(name)
    assert_same(roll(policy, eos_ids=EOS, **options), roll(policy, eos_ids=EOS, check_every=3))


@pytest.mark.parametrize("share", [0.01, 1.0])
def test_tokens_do_not_depend_on_compaction(share, monkeypatch):
    """Rows dropped at once, or never."""
    policy = tiny_policy()
    want = roll(policy, eos_ids=EOS, check_every=2)
    monkeypatch.setattr(decode, "COMPACT_SHARE", share)
    assert_same(roll(policy, eos_ids=EOS, check_every=2), want)


@pytest.mark.parametrize("prompts", [EQUAL, RAGGED], ids=["equal", "ragged"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "nanochat", "cohere"])
def test_one_copy_of_a_prompt_serves_all_its_completions(name, prompts, monkeypatch):
    """Groups of one length and of several, whole and thinned out to nothing: the tokens of copied prompts."""
    monkeypatch.setattr(decode, "COMPACT_SHARE", 0.01)
    policy = tiny_policy(name)
    assert policy.shares_prefix
    options = {"generations": 7, "limit": 20, "eos_ids": EOS, "check_every": 1}
    shared = roll(policy, prompts, share_prefix=True, **options)
    assert_same(shared, roll(policy, prompts, share_prefix=False, **options))
    assert_teacher_forced(policy, shared)


def test_a_prompt_is_held_once():
    """The caches after the fork hold P prompts, not P · G."""
    policy = tiny_policy()
    _, plain = decode._prefill_once(policy, policy.module, [[1, 2, 3, 4], [5, 6, 7, 8]])
    caches = decode.fork(plain, [4, 4], 50)
    assert [sum(a.nbytes for a in cache.state) for cache in caches] == [2 * 4 * 2 * 16 * 4] * 2


@pytest.mark.parametrize("name", ["gemma3", "smollm3", "mamba", "gemma2"])
def test_what_cannot_share_a_prefix_decodes_with_copies(name):
    """Windows, recurrent states and attention of the layer's own: asked for, it is left out."""
    policy = tiny_policy(name)
    assert not policy.shares_prefix
    assert_same(roll(policy, share_prefix=True), roll(policy, share_prefix=False))


def test_ended_rows_really_leave_the_batch():
    """Later forwards see fewer rows than the first."""
    policy, sizes = tiny_policy(), []
    model = policy.module.model

    class Watched(type(model)):
        def __call__(self, tokens, *args, **kwargs):
            sizes.append(tokens.shape[0])
            return super().__call__(tokens, *args, **kwargs)

    model.__class__ = Watched
    roll(policy, generations=8, eos_ids=range(0, VOCAB, 4), check_every=1, limit=10)
    decoded = sizes[sizes.index(max(sizes)) :]
    assert decoded == sorted(decoded, reverse=True)
    assert decoded[0] > 12 and decoded[-1] <= decoded[0] / 2


def test_forking_copies_only_what_is_in_use():
    """A cache has room for 256 tokens; G completions of a short prompt do not get G times that."""
    policy = tiny_policy()
    _, caches = decode.prefill(policy.module, [[1, 2, 3, 4], [5, 6, 7, 8]])
    assert caches[0].nbytes > 2 * 200 * 2 * 16 * 4
    keep_rows(caches, [0] * 5 + [1] * 5)
    assert [cache.nbytes for cache in caches] == [10 * 4 * 2 * 16 * 4] * 2


def test_completions_depend_on_their_own_prompt_and_number():
    """Row p·G+g continues prompt p; other prompts beside it, or more completions, change no token."""
    policy = tiny_policy("llama-untied")
    rollout = roll(policy)
    more = roll(policy, [*RAGGED, [4, 4]], generations=5)
    rows, more_rows = rollout.completions(), more.completions()
    for p in range(3):
        assert rows[3 * p : 3 * p + 3] == more_rows[5 * p : 5 * p + 3]
    assert len({tuple(row) for row in rows}) == 9, "no two completions share their draws"
    assert rollout.num_generations == 3 and rollout.prompts == tuple(map(tuple, RAGGED))


def test_another_key_gives_other_completions_and_the_same_key_the_same():
    """Everything random comes from the key."""
    policy = tiny_policy()
    one = roll(policy, seed=1)
    mx.random.seed(99)
    assert_same(roll(policy, seed=1), one)
    assert roll(policy, seed=2).completions() != one.completions()


def test_a_stop_ends_at_the_token_that_completes_it():
    """find_stop says how many tokens to keep: the completion is cut there, however late it was looked at."""
    policy = tiny_policy()
    free = roll(policy, generations=6).completions()
    seen = []

    def find_stop(tokens):
        seen.append(tuple(tokens))
        return next((n + 1 for n in range(1, len(tokens)) if tokens[n - 1] % 2 and tokens[n] % 2), None)

    for every in (1, 4, 12):
        seen.clear()
        stopped = roll(policy, generations=6, find_stop=find_stop, check_every=every)
        for long, short, finished in zip(
            free, stopped.completions(), stopped.finished_b.tolist(), strict=True
        ):
            end = find_stop(long)
            assert short == long[:end] and finished == (end is not None)
        assert 0 < sum(stopped.finished_b.tolist()) < 18
        assert all(any(tuple(row[: len(s)]) == s for row in free) for s in seen), (
            "it sees completions, not prompts"
        )


def test_a_stop_and_an_end_token_end_at_the_first_of_both():
    """Neither hides the other, and what lies after an end token is never looked at."""
    policy = tiny_policy()
    free = roll(policy, generations=6).completions()
    for at in (2, 5):

        def find_stop(tokens, at=at):
            assert not set(tokens[:-1]) & set(EOS)
            return at if len(tokens) >= at else None

        got = roll(policy, generations=6, eos_ids=EOS, check_every=12, find_stop=find_stop)
        for long, short in zip(free, got.completions(), strict=True):
            ends = [n + 1 for n, token in enumerate(long) if token in EOS]
            assert short == long[: min([at, *ends])]


def test_it_samples_from_the_parameters_given():
    """Not from those that the policy was made with; and it leaves the module's leaves alone."""
    policy, other = tiny_policy("llama-untied"), tiny_policy("llama-untied", seed=4)
    held = [id(v) for _, v in sorted(policy.module["model"]["layers"][0]["mlp"]["up_proj"].items())]
    got = g.generate(policy, other.params, RAGGED, key=mx.random.key(0), num_generations=3, max_new_tokens=12)
    assert_same(got, roll(other))
    assert [id(v) for _, v in sorted(policy.module["model"]["layers"][0]["mlp"]["up_proj"].items())] == held


def test_adapters_sample_through_their_base():
    """LoRA's parameters alone are given; log-probs are the adapted model's."""
    policy = lora_policy("qwen2")
    assert_teacher_forced(policy, roll(policy))


def test_a_bfloat16_forward_of_float32_parameters():
    """Log-probs are float32 and close to the float32 model's."""
    policy = tiny_policy("llama-untied", compute_dtype=mx.bfloat16)
    rollout = roll(policy)
    assert rollout.logp_bt.dtype == mx.float32
    exact = tiny_policy("llama-untied")
    for row, completion in enumerate(rollout.completions()):
        logp, _ = teacher_forced(exact, RAGGED[row // 3], completion)
        assert np.abs(np.array(rollout.logp_bt[row]) - logp).max() < 0.3


def test_the_cache_is_freed():
    """Nothing of a rollout but its result stays in memory."""
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
        ({"prompts": [[1], []]}, r"no empty one, found \[1, 0\]"),
        ({"generations": 0}, "num_generations = 0"),
        ({"limit": 0}, "max_new_tokens = 0"),
        ({"sampler": g.Sampler(top_p=0.0)}, "top_p = 0.0"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    """Before anything is computed, with what was found."""
    with pytest.raises(ValueError, match=message):
        roll(tiny_policy(), **change)


@pytest.mark.parametrize("prompts", [EQUAL, RAGGED], ids=["equal", "ragged"])
def test_repetition_is_penalized(prompts):
    """Greedy with a penalty: at each step the largest of the teacher-forced, penalized logits; rows that end
    early and are dropped take their history with them."""
    policy = tiny_policy("llama")
    sampler = g.Sampler(temperature=0.0, repetition_penalty=1.7)
    rollout = roll(policy, prompts, generations=2, sampler=sampler, eos_ids=EOS, check_every=2, limit=16)
    plain = roll(policy, prompts, generations=2, sampler=g.Sampler(temperature=0.0), eos_ids=EOS, limit=16)
    assert rollout.completions() != plain.completions()
    for row, completion in enumerate(rollout.completions()):
        text = list(rollout.prompts[row // 2])
        for token in completion:
            z = np.array(policy.logits(policy.params, mx.array([text]))[0, -1], np.float64)
            seen = sorted(set(text))
            z[seen] = np.where(z[seen] > 0, z[seen] / 1.7, z[seen] * 1.7)
            assert z[token] > z.max() - 1e-5
            text.append(token)


def test_a_penalty_of_nothing_is_refused():
    """Division by 0, and a sign that turns round."""
    for penalty in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="repetition_penalty"):
            roll(tiny_policy("llama"), sampler=g.Sampler(repetition_penalty=penalty))


def test_parts_of_a_list_of_prompts_draw_as_the_whole():
    """`first_prompt` counts on: prompts by twos give the completions of all together."""
    policy = tiny_policy("llama")
    whole = roll(policy, RAGGED, eos_ids=EOS).completions()
    parts = [roll(policy, RAGGED[n : n + 2], first_prompt=n, eos_ids=EOS).completions() for n in (0, 2)]
    assert [*parts[0], *parts[1]] == whole
