"""The engine of this process: versions, streams over kept caches, and an end between two steps."""

import time
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

import grpo_fn as g
from runners.engines import local
from runners.engines.engine import Cancelled, Requests
from runners.engines.local import LocalEngine
from tests.support.generating import EOS, RAGGED, roll
from tests.support.tiny_policies import tiny_policy

SAMPLING = g.Sampling(num_generations=3, max_new_tokens=12, eos_ids=EOS)
KEY = mx.random.key(0)


def engine_of(policy, version=0, **options):
    """An engine with the policy's own parameters."""
    engine = LocalEngine(policy, g.Decoding(**options))
    engine.load(policy.params, version)
    return engine


def versions(rollout):
    """Which weights drew each row."""
    return np.array(rollout.version_b).tolist()


def test_the_engine_samples_like_generate_and_records_the_version():
    """The rollout of `generate`, with the version of the weights; no prompt gives no row."""
    policy = tiny_policy()
    engine = engine_of(policy, version=7)
    found = engine.generate(Requests(prompts=RAGGED), SAMPLING, key=KEY)
    assert found.completions() == roll(policy, eos_ids=EOS).completions()
    assert versions(found) == [7] * 9
    engine.load(policy.params, 8)
    both = g.join_rollouts([found, engine.generate(Requests(prompts=RAGGED), SAMPLING, key=KEY)])
    assert versions(both) == [7] * 9 + [8] * 9
    assert versions(g.take_groups(both, [5, 0])) == [8] * 3 + [7] * 3
    nothing = engine.generate(Requests(prompts=[]), SAMPLING, key=KEY)
    assert nothing.completions() == [] == versions(nothing)


@pytest.mark.parametrize(("fits", "tries"), [(6, [0, 3]), (3, [0, 3]), (0, [0, 3, 3])])
def test_a_rollout_that_runs_out_of_memory_is_sampled_again_in_smaller_parts(fits, tries, monkeypatch):
    """With half as many rows, down to one prompt's, tried twice: the same completions, or it ends."""
    policy = tiny_policy()
    engine = engine_of(policy)
    engine.note = (notes := []).append
    sampled, found = engine._sampled, []

    def short(*rest):
        found.append(engine.decoding.max_batch)
        if (engine.decoding.max_batch or 9) > fits:
            raise RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory")
        return sampled(*rest)

    monkeypatch.setattr(engine, "_sampled", short)
    if fits:
        rollout = engine.generate(Requests(prompts=RAGGED), SAMPLING, key=KEY)
        assert rollout.completions() == roll(policy, eos_ids=EOS).completions()
    else:
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.generate(Requests(prompts=RAGGED), SAMPLING, key=KEY)
    assert found == tries and len(notes) == len(tries) - 1


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
    """A signal comes during the third call of the model: that one is the last. The policy is usable after."""
    policy = tiny_policy()
    slow = Slow(policy, 0.02)
    sampling = g.Sampling(num_generations=2, max_new_tokens=400)
    engine = engine_of(policy, check_every=1)
    with pytest.raises(Cancelled) as cancelled:
        engine.generate(Requests(prompts=prompts), sampling, key=KEY, should_stop=lambda: slow.calls >= 3)
    assert slow.calls == 3
    assert max(map(len, cancelled.value.rollout.completions())) <= 3
    again = engine.generate(Requests(prompts=RAGGED), SAMPLING, key=KEY)
    assert again.completions() == roll(tiny_policy(), eos_ids=EOS).completions()


def test_a_rollout_reports_how_far_it_has_come(monkeypatch):
    """The tokens that were drawn of those that may be, over all parts of a rollout."""
    policy, reports = tiny_policy("llama"), []
    monkeypatch.setattr(local, "PAUSE", 0.0)
    engine = LocalEngine(policy, g.Decoding(max_batch=2), advance=lambda *report: reports.append(report))
    engine.load(policy.params, 0)
    prompts = [[1, 2, 3], [4, 5, 6], [1, 2, 4], [4, 5, 1]]
    engine.generate(Requests(prompts=prompts), g.Sampling(max_new_tokens=3), key=mx.random.key(1))
    assert list(dict.fromkeys(reports)) == [("tokens", n, 12) for n in (0, 2, 4, 6, 8, 10, 12)]


def stream(engine, prompt, **options):
    """(token ids, tokens of the prompt that were computed) of a stream."""
    request = Requests(prompts=[prompt], numbers=[0], **options)
    tokens = list(engine.stream(request, SAMPLING, key=KEY))
    return [token.id for token in tokens], tokens[0].prompt_tokens


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba"])
@pytest.mark.parametrize("pipelined", [False, True])
def test_a_stream_continues_over_what_it_kept(name, pipelined):
    """A longer prompt, one that differs in its midst, and the same again: never other tokens than without."""
    policy = tiny_policy(name)
    engine = engine_of(policy, pipelined=pipelined)
    first = [5, 9, 11, 3, 7]
    said, computed = stream(engine, first)
    assert computed == len(first)
    longer = [*first, *said, 8, 9]
    for prompt in (longer, [*longer[:4], 30, 31], longer, longer):
        fresh = engine_of(policy)
        want, whole = stream(fresh, prompt)
        got, computed = stream(engine, prompt)
        assert got == want and whole == len(prompt)
        if name == "llama":
            assert 1 <= computed < len(prompt), "the beginning was kept"
    engine.load(policy.params, 1)
    assert stream(engine, longer)[1] == len(longer), "other weights"


def test_a_closed_or_failed_stream_keeps_nothing():
    """The next one computes its whole prompt, whatever ended this one in the midst of a token."""
    policy, prompt = tiny_policy(), [5, 9, 11, 3, 7]
    engine = engine_of(policy)
    whole = stream(engine, prompt)
    steps: Any = engine.stream(Requests(prompts=[prompt]), SAMPLING, key=KEY)
    next(steps)
    steps.close()
    assert stream(engine, prompt) == whole
    with pytest.raises(ValueError, match="token id"):
        stream(engine, [*prompt, 10**6])
    assert stream(engine, prompt) == whole

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        endless = attrs.evolve(SAMPLING, eos_ids=())
        list(engine.stream(Requests(prompts=[prompt]), endless, key=KEY, should_stop=interrupt))
    assert stream(engine, prompt) == whole
