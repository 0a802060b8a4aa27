"""What ends a completion, and which rows stay in the batch until then."""

import functools

import mlx.core as mx
import numpy as np
import pytest

import grpo_fn as g
from tests.support.generating import EOS, assert_same, roll
from tests.support.tiny_policies import VOCAB, tiny_policy


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


@functools.cache
def usual(name):
    """A policy of this architecture, and its completions."""
    policy = tiny_policy(name)
    return policy, roll(policy, eos_ids=EOS, check_every=3)


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
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_how_rows_are_decoded(name, options):
    """Batch size, checks, dropped rows and pipelining change no token: a row has a key of its own."""
    policy, want = usual(name)
    assert_same(roll(policy, eos_ids=EOS, **options), want)


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


def test_a_stop_ends_at_the_token_that_completes_it():
    """find_stop says how many tokens to keep: the completion is cut there, however late it was looked at."""
    policy = tiny_policy()
    free = roll(policy, generations=6).completions()
    seen = []

    def find_stop(tokens, start=0):
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

        def find_stop(tokens, start, at=at):
            assert not set(tokens[:-1]) & set(EOS)
            return at if len(tokens) >= at else None

        got = roll(policy, generations=6, eos_ids=EOS, check_every=12, find_stop=find_stop)
        for long, short in zip(free, got.completions(), strict=True):
            ends = [n + 1 for n, token in enumerate(long) if token in EOS]
            assert short == long[: min([at, *ends])]


@pytest.mark.parametrize("every", [1, 5, 12])
def test_a_stop_is_told_what_it_has_seen(every):
    """`start` is how many tokens there were at the look before: no token is new twice, and none never."""
    policy = tiny_policy()
    new = []

    def find_stop(tokens, start):
        assert 0 <= start < len(tokens)
        new.append(tuple(tokens[start:]))
        return None

    rollout = roll(policy, [[1, 2, 3]], generations=1, find_stop=find_stop, check_every=every)
    assert [token for part in new for token in part] == rollout.completions()[0]
    assert len(new) == -(-12 // every)


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("share_prefix", [True, False])
def test_every_completion_may_be_empty(kept, share_prefix):
    """find_stop that keeps nothing, of all rows or of some: the rollout has a column, and can be learned."""
    policy = tiny_policy()
    rollout = roll(policy, find_stop=lambda tokens, start: kept * (tokens[0] % 2), share_prefix=share_prefix)
    lengths, empty = np.array(rollout.lengths_b), np.array(rollout.lengths_b) == 0
    assert rollout.tokens_bt.shape == (9, 1) and rollout.finished_b.all().item()
    assert set(lengths.tolist()) == {0, kept}
    assert [len(row) for row in rollout.completions()] == lengths.tolist()
    assert not np.array(rollout.tokens_bt)[empty].any() and not np.array(rollout.logp_bt)[empty].any()
    batch = g.make_batch(rollout, mx.arange(9.0).reshape(3, 3) - 4)
    spec = g.LossSpec(aggregation="token_mean")
    state = g.init_state(policy.params, g.adamw(1e-2), key=mx.random.key(0))
    active = g.drop_inactive(batch, spec)
    for parts in ([batch], g.split_batch(batch, max_tokens=20), g.split_batch(active, max_tokens=20)):
        new, stats = g.make_grad_step(policy, spec, compile=False)(state, parts)
        assert np.isfinite(stats.loss.item()) and new.accum_weight.item() == lengths.sum()
    assert g.join_rollouts([rollout, rollout]).tokens_bt.shape == (18, 1)


@pytest.mark.parametrize("found", [-1, 13])
def test_a_stop_outside_of_the_completion_is_refused(found):
    """The number that was given, and what is wanted."""
    with pytest.raises(
        ValueError, match=rf"find_stop: expected None, or how many of 12 tokens to keep, found {found}"
    ):
        roll(tiny_policy(), find_stop=lambda tokens, start: found, check_every=12)
