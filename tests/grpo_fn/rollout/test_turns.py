"""Conversations: sampled turns, with given tokens between them."""

import functools
from itertools import pairwise
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

import grpo_fn as g
from grpo_fn.prng import completion_keys
from grpo_fn.rollout import Respond, draw, draw_bits
from grpo_fn.trees import on_host
from tests.support.closeness import assert_same_gradients
from tests.support.generating import EOS, EQUAL, RAGGED, assert_same, roll
from tests.support.naive_learner import accumulated
from tests.support.tiny_policies import VOCAB, repeats, tiny_policy

ENDS = tuple(range(0, VOCAB, 5))  # turns of a few tokens


def answers(turns=3, length=4):
    """Replies of different lengths and contents to each row's first turns; then the conversation ends."""
    told: dict[int, int] = {}
    seen: list[tuple[int, tuple[int, ...]]] = []

    def respond(row, tokens):
        seen.append((row, tuple(tokens)))
        told[row] = told.get(row, 0) + 1
        if told[row] > turns:
            return None
        return [(7 * row + 3 * told[row] + i) % VOCAB for i in range((row + told[row]) % (length + 1))]

    replies: Any = Respond(respond)
    replies.seen = seen
    return replies


def alone(policy, prompt, key, row, group, *, limit, ends, turns, penalty):
    """A conversation by whole forward passes: tokens, which of them were sampled, and log-probs."""
    replies = answers(turns)
    tokens, sampled, logp, turn, drawn = [], [], [], 0, 0
    keys = draw_bits(completion_keys(key, mx.array([row // group]), mx.array([row % group])), 0, limit)
    while len(tokens) < limit:
        logits = np.array(policy.logits(policy.params, mx.array([[*prompt, *tokens]]))[:, -1])
        for had in {*prompt, *tokens}:
            logits[0, had] *= penalty if logits[0, had] < 0 else 1 / penalty
        found = draw(mx.array(logits), keys[drawn], g.Sampling())
        token = found["tokens"].item()
        drawn += 1
        tokens.append(token)
        sampled.append(True)
        logp.append(found["logp"].item())
        if token in ends and len(tokens) < limit:
            replies.begin(row, tokens[turn:])
            given = replies.collect(1)[row]
            if given is None or len(tokens) + len(given) >= limit:
                break
            tokens += given
            sampled += [False] * len(given)
            logp += [0.0] * len(given)
            turn = len(tokens)
        elif token in ends:
            break
    return tokens, sampled, logp


@pytest.mark.parametrize(
    ("name", "penalty"), [("llama", 1.8), ("gemma3", 1.0), ("mamba", 1.0), ("nanochat", 1.0)]
)
def test_a_conversation_is_that_of_whole_forwards(name, penalty):
    """Resumed rows sample what one forward over all tokens would; the penalty counts given tokens."""
    group, limit = 2, 24
    policy, options = tiny_policy(name), {"limit": limit, "ends": ENDS, "turns": 3, "penalty": penalty}
    wanted = [
        alone(policy, RAGGED[row // group], mx.random.key(0), row, group, **options)
        for row in range(group * len(RAGGED))
    ]
    how = {"check_every": 3, "repetition_penalty": penalty}
    rollout = roll(policy, generations=group, limit=limit, eos_ids=ENDS, replies=answers(), **how)
    rows = list(zip(rollout.completions(), rollout.sampled(), strict=True))
    for row, ((tokens, sampled), (*want, logp)) in enumerate(zip(rows, wanted, strict=True)):
        assert [tokens, sampled] == want, f"row {row}"
        got = np.array(rollout.logp_bt[row])[: len(tokens)]
        assert np.abs(got - logp).max() < 1e-4 and not got[~np.array(sampled)].any()
    assert sum(sampled.count(False) for _, sampled in rows) > 8, "tokens were given"
    assert len({sum(a and not b for a, b in pairwise(sampled)) for _, sampled in rows}) > 1, "turns differ"


@functools.cache
def usual_conversations(name):
    """A policy, and its conversations with default decoding."""
    policy = tiny_policy(name)
    return policy, roll(policy, generations=4, limit=24, eos_ids=ENDS, replies=answers())


TOGETHER = {"turns_together": False, "check_every": 2}


@pytest.mark.parametrize(
    "options", [{"check_every": 1}, {"max_batch": 3}, TOGETHER, {"pipelined": True}], ids=str
)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_conversations_do_not_depend_on_how_rows_are_decoded(name, options):
    """Nor on when replies are collected."""
    policy, want = usual_conversations(name)
    got = roll(policy, generations=4, limit=24, eos_ids=ENDS, replies=answers(), **options)
    assert_same(got, want)
    assert got.sampled() == want.sampled()


@pytest.mark.parametrize("together", [True, False])
def test_turns_begin_together_or_as_replies_come(together):
    """Together, the loop waits for all replies; otherwise for one or none."""
    asked = []

    class Sparing(Respond):
        def collect(self, least):
            """No more replies than asked for, and at least one."""
            asked.append((least, len(self._begun)))
            given = [*self._begun][: max(least, 1)]
            return {row: self._function(row, self._begun.pop(row)) for row in given}

    policy, want = usual_conversations("llama")
    replies = Sparing(answers()._function)
    options = {"generations": 4, "limit": 24, "eos_ids": ENDS, "turns_together": together}
    assert_same(roll(policy, replies=replies, **options), want)
    waited = {least == begun if together else least <= 1 for least, begun in asked}
    assert waited == {True} and max(begun for _, begun in asked) > 2


@pytest.mark.parametrize("prompts", [EQUAL, RAGGED], ids=["equal", "ragged"])
def test_one_turn_is_bit_for_bit_the_completion_without_replies(prompts):
    """If replies end each conversation at once, all numbers are `generate`'s."""
    policy = tiny_policy()
    options = {"generations": 5, "limit": 20, "eos_ids": EOS, "share_prefix": False, "check_every": 4}
    plain = roll(policy, prompts, with_entropy=True, **options)
    turns = roll(policy, prompts, with_entropy=True, replies=Respond(lambda row, t: None), **options)
    for name in ("tokens_bt", "lengths_b", "logp_bt", "finished_b", "entropy_bt"):
        assert mx.array_equal(getattr(plain, name), getattr(turns, name)).item(), name
    assert turns.sampled() == [[True] * n for n in plain.lengths_b.tolist()]


def test_each_turn_is_asked_about_once_and_ends_with_its_end():
    """The environment sees the turn's own tokens, with the end token."""
    replies = answers()
    rollout = roll(tiny_policy(), generations=4, limit=30, eos_ids=ENDS, replies=replies)
    per_row: dict[int, list[int]] = {}
    for row, tokens in replies.seen:
        assert tokens[-1] in ENDS and not set(tokens[:-1]) & set(ENDS)
        per_row.setdefault(row, []).extend(tokens)
    for row, (tokens, sampled) in enumerate(zip(rollout.completions(), rollout.sampled(), strict=True)):
        said = [token for token, mine in zip(tokens, sampled, strict=True) if mine]
        asked = per_row.get(row, [])
        assert said[: len(asked)] == asked


def test_the_limit_counts_given_tokens_and_leaves_room_for_an_answer():
    """A reply that would fill the rest is dropped, and the conversation counts as truncated."""
    replies = Respond(lambda row, t: [1] * 5)
    rollout = roll(tiny_policy(), generations=4, limit=12, eos_ids=ENDS, replies=replies)
    assert rollout.tokens_bt.shape[1] <= 12
    for tokens, sampled, finished in zip(
        rollout.completions(), rollout.sampled(), rollout.finished_b.tolist(), strict=True
    ):
        assert sampled[-1] and len(tokens) > 12 - 6
        assert finished == (len(tokens) == 12 and tokens[-1] in ENDS), "an end at the very limit is one"


def test_bad_replies_are_refused():
    """Unknown token ids, and rows that were not asked for."""
    policy = tiny_policy()
    with pytest.raises(ValueError, match=f"token id {VOCAB}"):
        roll(policy, eos_ids=ENDS, limit=30, replies=Respond(lambda row, t: [VOCAB]))

    class Silent(Respond):
        def collect(self, least):
            return {}

    with pytest.raises(ValueError, match="replies arrived for rows"):
        roll(policy, eos_ids=ENDS, limit=30, replies=Silent(lambda row, t: None))


def test_turns_are_numbered_and_start_in_states():
    """Turn numbers, states and per-turn values of conversations written by hand."""
    rows = [  # tokens of turns that were sampled, and between them given ones
        ([1, 2], [8, 9], [3], [7], [4, 5]),
        ([1], [8, 9], [2, 2]),
        ([], [6], [3, 3, 3], [8, 9], [1]),
        ([5],),
    ]
    tokens = [[token for part in row for token in part] for row in rows]
    sampled = [[n % 2 == 0 for n, part in enumerate(row) for _ in part] for row in rows]
    width = max(map(len, tokens)) + 1
    rollout = g.Rollout(
        prompts=((1,), (2,)),
        num_generations=2,
        tokens_bt=mx.array([[*row, *[0] * (width - len(row))] for row in tokens]),
        lengths_b=mx.array([len(row) for row in tokens]),
        logp_bt=mx.zeros((4, width)),
        finished_b=mx.array([True] * 4),
        sampled_bt=mx.array([[*row, *[False] * (width - len(row))] for row in sampled]),
    )
    assert on_host(rollout.turn_numbers())[2][: len(tokens[2])] == [-1, 0, 0, 0, 0, 0, 1]
    assert rollout.turn_states().tolist() == [[[0, 1, 2], [0, 1, -1]], [[0, 1, -1], [2, -1, -1]]]
    values = mx.arange(12).reshape(2, 2, 3)
    batch = g.make_batch(rollout, g.spread_over_turns(values, rollout))
    rows = zip(np.array(batch.advantages_b), np.array(batch.mask_bt), strict=True)
    counted = [row[mask].tolist() for row, mask in rows]
    assert counted == [[0, 0, 1, 2, 2], [3, 4, 4], [6, 6, 6, 7], [9]]
    with pytest.raises(ValueError, match=r"\(2, 2, 2\): expected 3 turns"):
        g.spread_over_turns(values[..., :2], rollout)


def test_given_tokens_have_no_gradient_but_through_attention():
    """Given tokens are masked: their log-probs change nothing."""
    policy = tiny_policy()
    rollout = roll(policy, generations=4, limit=30, eos_ids=ENDS, replies=answers())
    adv_pg = mx.array(np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32))
    batch = g.make_batch(rollout, adv_pg)
    assert batch.num_tokens.item() == sum(sum(sampled) for sampled in rollout.sampled())

    def stepped(batch, **options):
        return accumulated(policy, g.split_batch(batch, **options))

    junk = mx.where(batch.mask_bt, batch.rollout_logp_bt, 1e4)
    state, stats = stepped(batch, max_tokens=4096)
    other, other_stats = stepped(attrs.evolve(batch, rollout_logp_bt=junk), max_tokens=4096)
    shared, _ = stepped(batch, max_tokens=200, share_prompts=True)
    assert stats.loss.item() == other_stats.loss.item()
    assert repeats(state.accum_grads, other.accum_grads)
    assert_same_gradients(shared.accum_grads, state.accum_grads)
