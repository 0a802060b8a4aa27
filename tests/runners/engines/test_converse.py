"""Conversations over an engine: turns as replies come, ends in their midst, and caches that are freed."""

import functools
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

import grpo_fn as g
from grpo_fn.rollout import Interrupted, Respond
from runners.engines.engine import Request, Weights, never
from runners.engines.local import LocalEngine
from runners.engines.rollouts import Cancelled, converse, generate, seeds_of
from runners.errors import UserError
from tests.support.generating import RAGGED, assert_same, roll
from tests.support.tiny_policies import VOCAB, tiny_policy

ENDS = tuple(range(0, VOCAB, 5))  # turns of a few tokens
SAMPLING = g.Sampling(num_generations=2, max_new_tokens=24, eos_ids=ENDS)
KEY = mx.random.key(0)


def engine_of(policy, **options):
    """An engine with the policy's own parameters."""
    engine = LocalEngine(decoding=g.Decoding(check_every=1, **options))
    engine.load(Weights(policy, policy.params, 5))
    return engine


def requests(prompts=RAGGED, sampling=SAMPLING):
    """One request per row, in groups of G."""
    seeds = [seed for group in seeds_of(KEY, range(len(prompts)), sampling) for seed in group]
    rows = [tuple(prompt) for prompt in prompts for _ in range(sampling.num_generations)]
    return [Request(prompt=prompt, seeds=(seed,)) for prompt, seed in zip(rows, seeds, strict=True)]


def assert_free(engine):
    """The engine holds no rows and no caches."""
    held = (engine._jobs, engine._kept, engine._waiting, engine._owners, engine._queue.rows)
    assert not any(held) and not engine._queue._kept and not engine._queue._ended


class Answers(Respond):
    """Three replies to each row, of 0 to 4 tokens; those of `slow` rows come last."""

    def __init__(self, turns=3, slow=()):
        self.turns, self.slow, self.told, self.events, self.asked = turns, slow, {}, [], []
        super().__init__(self.reply)

    def reply(self, row, tokens):
        """The next one; None after the last."""
        told = self.told[row] = self.told.get(row, 0) + 1
        given = [(7 * row + 3 * told + i) % VOCAB for i in range((row + told) % 5)]
        return None if told > self.turns else given

    def begin(self, row, tokens):
        """A turn has ended."""
        self.events.append((row, tuple(tokens)))
        return super().begin(row, tokens)

    def collect(self, least):
        """Quick replies at once, slow ones if as many are waited for."""
        self.asked.append((least, len(self._begun)))
        quick = [row for row in self._begun if row not in self.slow]
        rows = quick if len(quick) >= least else [*self._begun]
        return {row: self._function(row, self._begun.pop(row)) for row in rows}


@functools.cache
def usual():
    """A policy, and its conversations as the core decodes them."""
    policy = tiny_policy()
    wanted = roll(policy, generations=2, limit=24, eos_ids=ENDS, replies=Answers())
    assert sum(row.count(False) for row in wanted.sampled()) > 8
    return policy, wanted


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("options", [{}, {"pipelined": True}, {"max_batch": 3}], ids=str)
def test_conversations_are_those_of_the_core(together, options):
    """Tokens, ends, log-probs, masks and versions are equal; afterwards, the engine is free."""
    policy, wanted = usual()
    engine = engine_of(policy, **options)
    found = converse(engine, requests(), SAMPLING, Answers(), together=together)
    assert_same(found, wanted)
    assert found.sampled() == wanted.sampled() and found.prompts == wanted.prompts
    assert found.version_b is not None and np.unique(np.array(found.version_b)).tolist() == [5]
    assert_free(engine)


def test_a_slow_reply_delays_no_other_row():
    """If replies are used as they arrive, all other rows end first; with `together`, each turn waits for
    all replies."""
    policy, wanted = usual()
    slow = max(range(6), key=lambda row: wanted.sampled()[row].count(False))
    for together in (False, True):
        replies = Answers(slow=(slow,))
        assert_same(converse(engine_of(policy), requests(), SAMPLING, replies, together=together), wanted)
        rows = [row for row, _ in replies.events]
        later = rows[[place for place, row in enumerate(rows) if row == slow][1] :]
        assert (set(later) == {slow}) is not together
        assert all(least == begun if together else least <= 1 for least, begun in replies.asked)


@pytest.mark.parametrize("together", [True, False])
def test_a_reply_without_room_ends_the_conversation_before_it(together):
    """The reply is not part of the row, which ends by its length; one token below the limit fits."""
    policy, _ = usual()
    for room in (0, 1):
        lengths = {}

        def fill(row, tokens, room=room, lengths=lengths):
            lengths[row] = len(tokens)
            return [1] * (SAMPLING.max_new_tokens - len(tokens) - room)

        engine = engine_of(policy)
        found = converse(engine, requests(), SAMPLING, Respond(fill), together=together)
        assert len(lengths) > 2
        for row, sampled in enumerate(found.sampled()):
            if row in lengths:
                assert len(sampled) == (24 if room else lengths[row])
                assert sampled.count(True) == lengths[row] + room
                assert room or not found.finished_b[row].item()
        assert_free(engine)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("after", [0, 1, 7, 15, 40])
def test_a_conversation_that_is_stopped_hands_out_what_there_is(together, after):
    """At any moment, each row is the beginning of the complete row, and the engine is free."""
    policy, wanted = usual()
    engine, asked = engine_of(policy), iter(range(1000))
    with pytest.raises(Cancelled) as stopped:
        converse(
            engine,
            requests(),
            SAMPLING,
            Answers(),
            together=together,
            should_stop=lambda: next(asked) >= after,
        )
    assert_beginnings(stopped.value.rollout, wanted)
    assert_free(engine)
    assert_same(converse(engine, requests(), SAMPLING, Answers()), wanted)


def assert_beginnings(found, wanted):
    """Each row is the beginning of the wanted one."""
    rows = zip(found.completions(), found.sampled(), wanted.completions(), wanted.sampled(), strict=True)
    for tokens, sampled, whole, drawn in rows:
        assert tokens == whole[: len(tokens)] and sampled == drawn[: len(tokens)]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("error", [Interrupted, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["begin", "collect", "should_stop"])
def test_whatever_ends_a_conversation_leaves_the_engine_free(together, error, place):
    """After a failed reply or a stop, the next conversation on this engine is correct."""
    policy, wanted = usual()
    engine, replies, calls = engine_of(policy), Answers(), iter(range(1000))

    def fails(real):
        def call(*given):
            if next(calls) >= 3:
                raise error
            return real(*given)

        return call

    should_stop: Any = never
    if place == "should_stop":
        should_stop = fails(never)
    else:
        setattr(replies, place, fails(getattr(replies, place)))
    with pytest.raises(Cancelled if error is Interrupted else error):
        converse(engine, requests(), SAMPLING, replies, together=together, should_stop=should_stop)
    assert_free(engine)
    assert_same(converse(engine, requests(), SAMPLING, Answers()), wanted)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_whatever_ends_a_rollout_leaves_the_engine_free(error):
    """The next rollout is correct."""
    policy = tiny_policy()
    engine, calls = engine_of(policy), iter(range(1000))

    def fails():
        if next(calls) >= 3:
            raise error
        return False

    groups = [attrs.evolve(each, seeds=each.seeds * 2) for each in requests()[::2]]
    wanted = generate(engine_of(policy), groups, SAMPLING)
    with pytest.raises(error):
        generate(engine, groups, SAMPLING, should_stop=fails)
    assert_free(engine)
    assert_same(generate(engine, groups, SAMPLING), wanted)


def test_a_group_has_the_prompt_that_its_rows_share():
    """The rest of a row's prompt precedes its completion as given tokens."""
    policy, _ = usual()
    rests = [(8, 9), (), (4,), (8, 7, 6)]
    shared = [(5, 9, 11), (5, 9, 11), (7,), (7,)]
    own = [
        attrs.evolve(request, prompt=(*shared[row], *rests[row]))
        for row, request in enumerate(requests(RAGGED[:2]))
    ]
    found = converse(engine_of(policy), own, SAMPLING, Answers())
    assert found.prompts == ((5, 9, 11), (7,))
    single = attrs.evolve(SAMPLING, num_generations=1)
    for row, request in enumerate(own):
        replies = Answers()
        respond = Respond(lambda _, tokens, row=row, replies=replies: replies.reply(row, tokens))
        alone = converse(engine_of(policy), [request], single, respond)
        rest = list(rests[row])
        assert found.completions()[row] == rest + alone.completions()[0]
        assert found.sampled()[row] == [False] * len(rest) + alone.sampled()[0]
        assert found.logp_bt[row, : len(rest)].tolist() == [0.0] * len(rest)
    with pytest.raises(UserError, match="do not start with the same token"):
        converse(engine_of(policy), [own[0], own[2]], SAMPLING, Answers())


@pytest.mark.parametrize(
    ("replied", "line"), [({0: [1], 9: [1]}, r"rows \[0, 9\]"), ({}, r"rows \[\]: expected at least")]
)
def test_a_reply_of_a_wrong_row_or_too_few_are_refused(replied, line):
    """The error names the rows with replies and the waiting rows; the engine is free."""
    policy, _ = usual()
    engine, replies = engine_of(policy), Answers()
    replies.collect = lambda least: replied
    with pytest.raises(ValueError, match=f"replies arrived for {line}.* of the rows"):
        converse(engine, requests(), SAMPLING, replies)
    assert_free(engine)
