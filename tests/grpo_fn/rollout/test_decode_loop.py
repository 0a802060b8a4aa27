"""What ends a completion, and which rows stay in the batch until then."""

import functools

import mlx.core as mx
import numpy as np
import pytest

import grpo_fn as g
from grpo_fn.rollout import Interrupted, Respond, decode
from tests.support.generating import EOS, RAGGED, assert_same, roll
from tests.support.naive_learner import accumulated
from tests.support.tiny_policies import VOCAB, tiny_policy


def test_an_end_token_ends_and_counts():
    """A completion ends with its first end token, which may be the last token allowed or the first of all."""
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
    last = free.completions()[0]
    n = next(n for n in range(1, 12) if last[n] not in last[:n])
    ended = roll(policy, generations=6, limit=n + 1, eos_ids=[last[n]])
    assert ended.completions()[0] == last[: n + 1] and ended.finished_b[0].item()
    rollout = roll(policy, eos_ids=range(VOCAB))
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
        {"check_every": 100},
        {"max_batch": 1},
        {"max_batch": 7},
        {"pipelined": True},
        {"share_prefix": False, "max_batch": 3},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_how_rows_are_decoded(name, options):
    """Batch size, checks, dropped rows and pipelining change no token."""
    policy, want = usual(name)
    assert_same(roll(policy, eos_ids=EOS, **options), want)


def test_ended_rows_really_leave_the_batch():
    """Later forward passes have fewer rows than the first."""
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


@pytest.mark.parametrize("every", [1, 4, 12])
@pytest.mark.parametrize("ends", [(), EOS], ids=["", "ends"])
def test_a_stop_ends_at_the_token_that_completes_it(ends, every):
    """A completion is cut there, or at an earlier end token; `find_stop` sees no token as new twice."""
    policy = tiny_policy()
    free, seen = roll(policy, generations=6).completions(), []

    def stop_of(tokens):
        return next((n + 1 for n in range(1, len(tokens)) if tokens[n - 1] % 2 and tokens[n] % 2), None)

    def find_stop(tokens, start):
        assert 0 <= start < len(tokens) and not set(tokens[:-1]) & set(ends)
        assert start == 0 or tuple(tokens[:start]) in seen
        assert any(row[: len(tokens)] == [*tokens] for row in free), "it sees completions, not prompts"
        seen.append(tuple(tokens))
        return stop_of(tokens)

    options = {"generations": 6, "find_stop": find_stop, "check_every": every, "eos_ids": ends}
    stopped = roll(policy, **options)
    finished = stopped.finished_b.tolist()
    for long, short, is_finished in zip(free, stopped.completions(), finished, strict=True):
        found = [stop_of(long), *[n + 1 for n, token in enumerate(long) if token in ends]]
        end = min((n for n in found if n is not None), default=None)
        assert short == long[:end] and is_finished == (end is not None)
    assert 0 < sum(finished) < 18
    for kept in (-1, 13):
        message = rf"find_stop: expected None, or how many of 12 tokens to keep, found {kept}"
        with pytest.raises(ValueError, match=message):
            roll(policy, find_stop=lambda tokens, start, kept=kept: kept, check_every=12)


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("share_prefix", [True, False])
def test_every_completion_may_be_empty(kept, share_prefix):
    """If all or some are, the rollout has a column and can be learned from."""
    policy = tiny_policy()
    rollout = roll(policy, find_stop=lambda tokens, start: kept * (tokens[0] % 2), share_prefix=share_prefix)
    lengths, empty = np.array(rollout.lengths_b), np.array(rollout.lengths_b) == 0
    assert rollout.tokens_bt.shape == (9, 1) and rollout.finished_b.all().item()
    assert set(lengths.tolist()) == {0, kept}
    assert [len(row) for row in rollout.completions()] == lengths.tolist()
    assert not np.array(rollout.tokens_bt)[empty].any() and not np.array(rollout.logp_bt)[empty].any()
    batch = g.make_batch(rollout, mx.arange(9.0).reshape(3, 3) - 4)
    spec = g.LossSpec(aggregation="token_mean")
    active = g.drop_inactive(batch, spec)
    for parts in ([batch], g.split_batch(batch, max_tokens=20), g.split_batch(active, max_tokens=20)):
        new, stats = accumulated(policy, parts, spec)
        assert np.isfinite(stats.loss.item()) and new.accum_weight.item() == lengths.sum()
    assert g.join_rollouts([rollout, rollout]).tokens_bt.shape == (18, 1)


SAMPLING = g.Sampling(num_generations=3, max_new_tokens=12, eos_ids=EOS)


def started(policy, prompts=RAGGED, sampling=SAMPLING, **options):
    """A generator of columns with the policy's own parameters."""
    return decode(policy, policy.params, prompts, sampling, key=mx.random.key(0), **options)


def columns_of(steps):
    """The columns of a generator, and what it returns."""
    found = []
    while True:
        try:
            column = next(steps)
        except StopIteration as end:
            return found, end.value
        if column is not None:
            found.append(column)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba"])
def test_columns_are_the_rollout_s_tokens(name):
    """Each row's tokens begin with its completion, in parts or all at once."""
    policy = tiny_policy(name)
    for decoding in (g.Decoding(), g.Decoding(max_batch=3, check_every=1)):
        columns, rollout = columns_of(started(policy, decoding=decoding))
        assert_same(rollout, usual(name)[1])
        texts = {}  # of each row, tokens behind its end included
        for column in columns:
            for row, token in zip(column.rows, column.tokens_b.tolist(), strict=True):
                texts.setdefault(row, []).append(token)
        for row, completion in enumerate(rollout.completions()):
            assert texts[row][: len(completion)] == completion


@pytest.mark.parametrize("replies", [None, Respond(lambda row, tokens: [7, 8])], ids=["single", "turns"])
@pytest.mark.parametrize("taken", [0, 1, 3, 7])
def test_an_interrupted_rollout_has_what_was_sampled_before(taken, replies):
    """It has the beginnings of the whole rollout's rows, and the module is restored."""
    policy = tiny_policy()
    options = {"replies": replies, "decoding": g.Decoding(check_every=1, max_batch=3)}
    _, whole = columns_of(started(policy, **options))
    steps, seen = started(policy, **options), 0
    while seen < taken or not seen:
        seen += next(steps) is not None
        if not taken:
            break
    with pytest.raises(StopIteration) as end:
        steps.throw(Interrupted())
    part = end.value.value
    lengths = [len(row) for row in part.completions()]
    assert max(lengths) <= taken and part.tokens_bt.shape[0] == 9
    assert all(a[: len(b)] == b for a, b in zip(whole.completions(), part.completions(), strict=True))
    assert lengths.count(0) >= 6, "the other parts were not begun"
    closed = started(policy)
    next(closed)
    closed.close()
    assert_same(roll(policy, eos_ids=EOS), usual("llama")[1])


def test_a_long_prefill_gives_control_after_each_layer():
    """A slow model's prefill can be interrupted before anything is sampled."""
    policy = tiny_policy()
    steps = started(policy, [list(range(3, 40))] * 4)
    layers = len(policy.module.layers)
    assert [next(steps) for _ in range(layers)] == [None] * layers
