"""The engine of this process: what it samples, kept caches, cancelled requests, and memory that runs out."""

import time
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

import grpo_fn as g
from runners.engines import local
from runners.engines.engine import Request, Weights
from runners.engines.local import LocalEngine
from runners.engines.rollouts import Cancelled, generate, seeds_of
from tests.support.generating import EOS, RAGGED, roll
from tests.support.tiny_policies import tiny_policy

SAMPLING = g.Sampling(num_generations=3, max_new_tokens=12, eos_ids=EOS)
KEY = mx.random.key(0)


def engine_of(policy, version=0, rows=0, **options):
    """An engine with the policy's own parameters."""
    engine = LocalEngine(decoding=g.Decoding(**options))
    engine.load(Weights(policy, policy.params, version, rows))
    return engine


def requests(prompts=RAGGED, sampling=SAMPLING):
    """A request for G completions per prompt."""
    seeds = seeds_of(KEY, range(len(prompts)), sampling)
    return [Request(prompt=tuple(prompt), seeds=seeds[p]) for p, prompt in enumerate(prompts)]


def versions(rollout):
    """The version of the weights that sampled each row."""
    return np.array(rollout.version_b).tolist()


def test_the_engine_samples_like_generate_and_records_the_version():
    """The rollout is bit-identical to `generate` and has the weights' version; without requests, it has
    no rows."""
    policy = tiny_policy()
    engine = engine_of(policy, version=7)
    found = generate(engine, requests(), SAMPLING)
    plain = roll(policy, eos_ids=EOS)
    assert found.completions() == plain.completions()
    assert mx.array_equal(found.logp_bt, plain.logp_bt)
    assert versions(found) == [7] * 9
    engine.load(Weights(policy, policy.params, 8))
    both = g.join_rollouts([found, generate(engine, requests(), SAMPLING)])
    assert versions(both) == [7] * 9 + [8] * 9
    assert versions(g.take_groups(both, [5, 0])) == [8] * 3 + [7] * 3
    nothing = generate(engine, [], SAMPLING)
    assert nothing.completions() == [] == versions(nothing)


def test_requests_of_one_prompt_are_computed_together():
    """Requests for single rows of a group give bit-identical rows to one request for the group."""
    policy = tiny_policy()
    whole = generate(engine_of(policy), requests(), SAMPLING)
    one = attrs.evolve(SAMPLING, num_generations=1)
    apart = [attrs.evolve(each, seeds=(seed,)) for each in requests() for seed in each.seeds]
    found = generate(engine_of(policy), apart, one)
    assert found.completions() == whole.completions()
    assert mx.array_equal(found.logp_bt, whole.logp_bt)


def test_a_request_that_comes_late_gets_what_it_gets_alone():
    """It joins decoding rows and has the same completion as alone."""
    policy = tiny_policy()
    alone = [roll(policy, [prompt], eos_ids=EOS).completions() for prompt in RAGGED]
    engine = engine_of(policy, check_every=1)
    seeds = seeds_of(KEY, [0] * len(RAGGED), SAMPLING)
    tickets = []
    rows = {}
    for prompt in RAGGED:
        tickets.append(engine.submit(Request(prompt=tuple(prompt), seeds=seeds[0]), SAMPLING))
        rows |= engine.collect(0)
        rows |= engine.collect(0)
    rows |= engine.collect(len(RAGGED))
    found = [[list(row.tokens) for row in rows[ticket]] for ticket in tickets]
    assert found == alone


LACK = "cudaMallocAsync(&data, size, stream) failed: out of memory"
TOO_MANY = "[metal::malloc] Resource limit (499000) exceeded."


@pytest.mark.parametrize(
    ("fits", "tries", "text", "said"),
    [
        (6, [0, 3], LACK, "out of memory ("),
        (3, [0, 3], LACK, "out of memory ("),
        (0, [0, 3, 3], LACK, "out of memory ("),
        (6, [0, 3], TOO_MANY, f"too many arrays ({TOO_MANY})"),
    ],
)
def test_rows_that_run_out_of_memory_are_sampled_again_in_smaller_parts(fits, tries, text, said, monkeypatch):
    """Half as many rows decode together, down to one request's, which is tried twice: the same
    completions, or an error."""
    policy = tiny_policy()
    engine = engine_of(policy)
    engine.note = (notes := []).append
    real, found = local.decode_queue, []

    def short(policy, params, queue, decoding):
        found.append(decoding.max_batch)
        if (decoding.max_batch or 9) > fits:
            raise RuntimeError(text)
        yield from real(policy, params, queue, decoding)

    monkeypatch.setattr(local, "decode_queue", short)
    if fits:
        rollout = generate(engine, requests(), SAMPLING)
        assert rollout.completions() == roll(policy, eos_ids=EOS).completions()
        assert engine.rows == 3
    else:
        with pytest.raises(MemoryError, match="out of memory"):
            generate(engine, requests(), SAMPLING)
    assert found == tries and len(notes) == len(tries) - 1
    assert all(note.startswith(said) and "; sampling again, 3 rows" in note for note in notes)


class Slow:
    """Makes each call of a model take a while."""

    def __init__(self, policy, seconds):
        self.calls, model = 0, policy.module.model
        kind = type(model)

        class Slowed(kind):
            def __call__(inner, *arguments, **options):
                self.calls += 1
                time.sleep(seconds)
                return kind.__call__(inner, *arguments, **options)

        model.__class__ = Slowed


@pytest.mark.parametrize("prompts", [RAGGED, [list(range(3, 60))] * 2], ids=["ragged", "long"])
def test_a_slow_rollout_ends_at_the_step_in_which_it_is_asked_to(prompts):
    """The signal comes during the model's third call, which is the last one. The policy stays usable."""
    policy = tiny_policy()
    slow = Slow(policy, 0.02)
    sampling = g.Sampling(num_generations=2, max_new_tokens=400)
    engine = engine_of(policy, check_every=1)
    with pytest.raises(Cancelled) as cancelled:
        generate(engine, requests(prompts, sampling), sampling, should_stop=lambda: slow.calls >= 3)
    assert slow.calls == 3
    assert max(map(len, cancelled.value.rollout.completions())) <= 3
    again = generate(engine, requests(), SAMPLING)
    assert again.completions() == roll(tiny_policy(), eos_ids=EOS).completions()


def test_a_rollout_reports_how_far_it_has_come(monkeypatch):
    """The reports count sampled tokens and their maximum over all parts of a rollout."""
    policy, reports = tiny_policy("llama"), []
    monkeypatch.setattr(local, "PAUSE", 0.0)
    engine = LocalEngine(decoding=g.Decoding(), advance=lambda *report: reports.append(report))
    engine.load(Weights(policy, policy.params, 0, rows=2))
    prompts = [[1, 2, 3], [4, 5, 6], [1, 2, 4], [4, 5, 1]]
    sampling = g.Sampling(max_new_tokens=3)
    generate(engine, requests(prompts, sampling), sampling)
    assert list(dict.fromkeys(reports)) == [("tokens", n, 12) for n in (0, 2, 4, 6, 8, 10, 12)]


def stream(engine, prompt, continues=None):
    """(token ids, tokens of the prompt that were computed, ticket) of a stream."""
    request = Request(prompt=tuple(prompt), seeds=requests()[0].seeds[:1], keep=True, continues=continues)
    ticket = engine.submit(request, SAMPLING)
    tokens = list(engine.tokens(ticket))
    return [token.id for token in tokens], tokens[0].prompt_tokens, ticket


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba"])
@pytest.mark.parametrize("pipelined", [False, True])
def test_a_stream_continues_over_what_it_kept(name, pipelined):
    """Longer, branching and repeated prompts give the same tokens as without kept caches."""
    policy = tiny_policy(name)
    engine = engine_of(policy, pipelined=pipelined)
    first = [5, 9, 11, 3, 7]
    said, computed, ticket = stream(engine, first)
    assert computed == len(first)
    longer = [*first, *said, 8, 9]
    for prompt in (longer, [*longer[:4], 30, 31], longer, longer):
        want, whole, _ = stream(engine_of(policy), prompt)
        got, computed, ticket = stream(engine, prompt, ticket)
        assert got == want and whole == len(prompt)
        if name == "llama":
            assert 1 <= computed < len(prompt), "the beginning was kept"
    engine.load(Weights(policy, policy.params, 1))
    assert stream(engine, longer, ticket)[1] == len(longer), "other weights"


def test_a_closed_or_failed_stream_leaves_the_engine_as_it_was():
    """The next stream has the same tokens."""
    policy, prompt = tiny_policy(), [5, 9, 11, 3, 7]
    engine = engine_of(policy, check_every=1)
    whole = stream(engine, prompt)[:2]
    endless = attrs.evolve(SAMPLING, eos_ids=())
    request = Request(prompt=tuple(prompt), seeds=requests()[0].seeds[:1])
    steps: Any = engine.tokens(engine.submit(request, endless))
    next(steps)
    steps.close()
    assert stream(engine, prompt)[:2] == whole
    with pytest.raises(ValueError, match="token id"):
        stream(engine, [*prompt, 10**6])
    assert stream(engine, prompt)[:2] == whole

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(engine.tokens(engine.submit(request, endless), should_stop=interrupt))
    assert stream(engine, prompt)[:2] == whole


def test_a_cancelled_request_is_collected_with_what_it_has():
    """Its rows are "cancelled"; other requests are not affected."""
    policy = tiny_policy()
    engine = engine_of(policy, check_every=1)
    endless = attrs.evolve(SAMPLING, eos_ids=(), max_new_tokens=50)
    one = engine.submit(requests()[0], endless)
    other = engine.submit(requests()[1], SAMPLING)
    waiting = engine.submit(requests()[2], SAMPLING)
    engine.collect(0)
    engine.collect(0)
    engine.cancel(one)
    engine.cancel(waiting)
    rows = engine.collect(3)
    assert {row.finish for row in rows[one]} == {"cancelled"} == {row.finish for row in rows[waiting]}
    assert 0 < len(rows[one][0].tokens) < 50 or not rows[one][0].tokens
    want = roll(policy, eos_ids=EOS).completions()[3:6]
    assert [list(row.tokens) for row in rows[other]] == want


@pytest.mark.parametrize("place", ["submitted", "queued", "refused"])
def test_a_request_that_does_not_come_to_continue_another_one_frees_it(place):
    """If it is cancelled before its start, or refused and the other request cancelled, no caches remain."""
    engine = engine_of(tiny_policy(), rows=1, check_every=1)
    ticket = stream(engine, [5, 9, 11])[2]
    queue: Any = engine._queue
    assert len(queue._kept) == len(engine._kept) == 1
    one = attrs.evolve(requests()[0], seeds=requests()[0].seeds[:1])
    busy = engine.submit(one, attrs.evolve(SAMPLING, eos_ids=(), max_new_tokens=50))
    engine.collect(0)
    late = attrs.evolve(one, prompt=(5, 10**6 if place == "refused" else 9), continues=ticket)
    if place == "refused":
        with pytest.raises(ValueError, match="token id"):
            engine.submit(late, SAMPLING)
        last = ticket
    else:
        last = engine.submit(late, SAMPLING)
        if place == "queued":
            engine.collect(0)
    waiting = [job.ticket for job in engine._waiting]
    assert len(queue._kept) == 1 and (last in waiting) == (place == "submitted")
    engine.cancel(last)
    assert not queue._kept and not engine._kept
    engine.cancel(busy)


@pytest.mark.parametrize("name", ["llama", "mamba"])
@pytest.mark.parametrize("pipelined", [False, True])
def test_an_interrupted_stream_is_continued_from_its_last_token(name, pipelined):
    """Its caches are kept, and the continuation has the same tokens as without them."""
    policy, prompt = tiny_policy(name), [5, 9, 11, 3, 7]
    engine = engine_of(policy, pipelined=pipelined)
    sampling = attrs.evolve(SAMPLING, eos_ids=(), max_new_tokens=40)
    request = Request(prompt=tuple(prompt), seeds=requests()[0].seeds[:1], keep=True)
    other = engine.submit(requests()[1], sampling)
    ticket = engine.submit(request, sampling)
    said: list[int] = []
    said += (token.id for token in engine.tokens(ticket, should_stop=lambda: len(said) >= 3))
    assert 3 <= len(said) < 40
    longer = [*prompt, *said, 8]
    want, whole, _ = stream(engine_of(policy), longer)
    got, computed, _ = stream(engine, longer, ticket)
    assert got == want and whole == len(longer) and computed == 1
    assert [len(row.tokens) for row in engine.collect()[other]] == [40] * 3


def test_a_request_that_cannot_be_sampled_ends_alone():
    """`submit` refuses it with a reason; decoding requests continue."""
    policy = tiny_policy()
    engine = engine_of(policy, check_every=1)
    ticket = engine.submit(requests()[0], SAMPLING)
    engine.collect(0)
    faults = {"token id": (5, 10**6), "no empty one": ()}
    for fault, prompt in faults.items():
        with pytest.raises(ValueError, match=fault):
            engine.submit(attrs.evolve(requests()[1], prompt=prompt), SAMPLING)
    with pytest.raises(ValueError, match="token id"):
        generate(engine, [requests()[1], attrs.evolve(requests()[1], prompt=(-1,))], SAMPLING)
    rows = engine.collect()
    assert [list(row.tokens) for row in rows[ticket]] == roll(policy, eos_ids=EOS).completions()[:3]
    assert not engine._jobs


def test_an_error_ends_the_requests_that_decode_and_no_others(monkeypatch):
    """Each of their readers receives the error once; waiting and later requests complete."""
    policy = tiny_policy()
    engine = engine_of(policy, rows=6, check_every=1)
    calls, real = [], mx.eval

    def broken(*arrays):
        calls.append(arrays)
        if len(calls) == 4:
            raise RuntimeError("the device is gone")
        real(*arrays)

    order = sorted(range(3), key=lambda p: len(RAGGED[p]))  # as rounds of rows begin
    tickets = [engine.submit(requests()[p], SAMPLING) for p in order]
    streamed: Any = engine.tokens(tickets[1])
    next(streamed)
    monkeypatch.setattr(mx, "eval", broken)
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.collect()
    monkeypatch.setattr(mx, "eval", real)
    for failed in tickets[:2]:
        with pytest.raises(RuntimeError, match="the device is gone"):
            engine.peek(failed)
    with pytest.raises(RuntimeError, match="the device is gone"):
        list(streamed)
    (row,) = [[list(row.tokens) for row in rows] for rows in engine.collect().values()]
    last = 3 * order[2]
    assert row == roll(policy, eos_ids=EOS).completions()[last : last + 3]
    engine.cancel(tickets[0])
    assert not engine._jobs
    again = generate(engine, requests(), SAMPLING)
    assert again.completions() == roll(policy, eos_ids=EOS).completions()


def test_stop_strings_without_a_tokenizer_are_refused():
    """The error says that the engine has no tokenizer."""
    engine = engine_of(tiny_policy())
    with pytest.raises(ValueError, match="no tokenizer"):
        generate(engine, requests(), attrs.evolve(SAMPLING, stop=("x",)))
