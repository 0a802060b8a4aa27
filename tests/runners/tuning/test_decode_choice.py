"""What is measured of decoding, and what is chosen by it."""

from collections import Counter
from itertools import count

import mlx.core as mx
import pytest

import grpo_fn as g
from grpo_fn.policy.caches import kv_caches as cache_rows
from grpo_fn.policy.caches.prefix_cache import PrefixCache, fork
from grpo_fn.rollout import decode_step
from grpo_fn.rollout.prefill import prefill, prefill_once
from runners.config.sections import RolloutConfig
from runners.machine.launch_modes import launch_modes
from runners.machine.startup import Platform
from runners.tuning import decode_choice, decode_probe
from runners.tuning.decode_choice import (
    DecodeCandidates,
    DecodeTimes,
    choose_decoding,
    measure_decoding,
    reason_not_to_measure,
    usual_decoding,
)
from runners.tuning.decode_probe import Probe
from runners.tuning.saved_answers import DecodeChoice
from runners.tuning.workload import Workload
from tests.support.tiny_policies import tiny_policy

PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13], [14, 15, 16, 17]]


def work_of(name="llama", **changes):
    """Four prompts, two completions of 64 tokens each."""
    policy = tiny_policy(name)
    lengths = tuple(map(len, PROMPTS))
    values = {"lengths": lengths, "num_generations": 2, "max_new_tokens": 64, "sampler": g.Sampler()}
    return Workload(policy=policy, params=policy.params, **(values | changes))


def candidates_of(work, backend="cuda", fitting=4, cores=1, **wish):
    """What a config leaves open."""
    ways = launch_modes(Platform(backend, cores=cores))
    return DecodeCandidates.of(RolloutConfig(**wish), work, ways, fitting)


def times_of(candidates, seconds):
    """Times from a function of a timing and a round."""
    samples = {timing: [seconds(*timing, n) for n in range(3)] for timing in candidates.timings}
    return DecodeTimes(samples, 16, 1.0)


def test_what_is_left_open():
    """Fixed keys leave one candidate; memory and whole groups bound the others; the usual one comes first."""
    work = work_of()
    assert candidates_of(work) == DecodeCandidates((4, 2, 1), ("async", "eval"), (8, 4, 16, 32))
    assert candidates_of(work, "cpu", 3).groups == (3, 2, 1)
    assert candidates_of(work, "cpu", 1).groups == (1,)
    assert candidates_of(work, "cpu").launches == ("eval", "async")
    assert candidates_of(work, "cpu", cores=2).launches == ("split", "eval", "async")
    assert candidates_of(work, "cpu", cores=16).launches == ("eval", "split", "async")
    fixed = candidates_of(work, launch="eval", check_every=5, max_batch=5)
    assert fixed == DecodeCandidates((2,), ("eval",), (5,))
    assert candidates_of(work, max_batch=100).groups == (4,)


def test_late_steps_decide_with_early_ones():
    """Pipelining that wins at first and loses more at the end is not chosen; where it wins in all, it is."""
    work = work_of()

    def seconds(slow):
        def of(groups, launch, late, looking, n):
            return {("eval", 0): 2.0, ("eval", 1): 3.0, ("async", 0): 1.0, ("async", 1): slow}[launch, late]

        return of

    for backend in ("cuda", "cpu"):
        candidates = candidates_of(work, backend, 1, max_batch=8, check_every=8)
        assert choose_decoding(times_of(candidates, seconds(6.0)), candidates, work).launch == "eval"
        assert choose_decoding(times_of(candidates, seconds(2.0)), candidates, work).launch == "async"


@pytest.mark.parametrize(("look", "wanted"), [(0.0, 4), (0.1, 4), (0.5, 8), (1.5, 16), (3.0, 16), (30.0, 32)])
def test_costly_looks_are_rare(look, wanted):
    """The number of steps between looks is what minimises look / k + (k − 1) / 128, in steps."""
    work = work_of(max_new_tokens=128)
    assert wanted == min((4, 8, 16, 32), key=lambda k: look / k + (k - 1) / 128)
    candidates = candidates_of(work, max_batch=8, launch="eval")
    times = times_of(candidates, lambda p, launch, late, looking, n: 1 + look * (4 if looking else 1) / 16)
    assert times.look(4, "eval") == pytest.approx(look)
    chosen = choose_decoding(times, candidates, work).check_every
    gain = 1 - (1 + look / wanted + (wanted - 1) / 128) / (1 + look / 8 + 7 / 128)
    assert chosen == (wanted if gain > decode_choice.MARGIN else 8)


def test_fewer_rows_only_where_a_token_is_cheaper():
    """Half the rows at 0.6 of the time stay away; at 0.4 they are taken, and written as rows."""
    work = work_of()
    candidates = candidates_of(work, launch="eval", check_every=8)
    for half, wanted in ((0.6, 0), (0.4, 4)):
        times = times_of(candidates, lambda p, *_, half=half: {4: 1.0, 2: half, 1: 1.0}[p])
        assert choose_decoding(times, candidates, work) == DecodeChoice("eval", 8, wanted)


def test_noise_changes_nothing():
    """A candidate that is worse in one round, or better by too little, does not replace the usual one."""
    work = work_of()
    candidates = candidates_of(work, max_batch=8, check_every=8)
    for rounds in ((0.5, 0.5, 1.1), (0.98, 0.98, 0.98)):
        times = times_of(
            candidates, lambda p, launch, late, looking, n, r=rounds: r[n] if launch == "eval" else 1
        )
        assert choose_decoding(times, candidates, work).launch == "async"


def test_when_a_measurement_cannot_pay():
    """Few steps, or on a CPU a model whose steps are long; a GPU's run is measured earlier."""
    work = work_of()
    assert "too few" in str(reason_not_to_measure(work, "cpu", 100))
    assert reason_not_to_measure(work, "cuda", 200) is None and reason_not_to_measure(work, "cpu", 200)
    assert reason_not_to_measure(work, "cpu", 10_000) is None
    assert work.step_flops == 2 * 8 * sum(leaf.size for leaf in g.trees.arrays_of(work.params))


@pytest.mark.parametrize("drawn", [0, 7])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba"])
def test_a_probe_has_the_caches_of_the_real_thing(name, drawn):
    """Kind, rows, length and sizes are those that prompts and drawn tokens leave behind."""
    work = work_of(name, lengths=(5, 5))
    with work.policy.bound(work.params) as model:
        if work.shares_prefix:
            _, plain = prefill_once(work.policy, model, PROMPTS[:2])
            real = fork(plain, [5, 5], 2)
        else:
            _, real = prefill(model, PROMPTS[:2])
            cache_rows.keep_rows(real, [0, 0, 1, 1])
        for _ in range(drawn):
            model(mx.zeros((4, 1), mx.int32), cache=real)
        probe = Probe(work)
        assert probe.measurable
        [(steps, places, _)] = probe.steps(model, 2, drawn)
        made = steps.caches
        assert places == [0, 1, 2, 3]
        # One more token, as buffers grow differently before it.
        for caches in (real, made):
            model(mx.zeros((4, 1), mx.int32), cache=caches)
    for a, b in zip(real, made, strict=True):
        assert type(a) is type(b)
        assert getattr(a, "offset", None) == getattr(b, "offset", None)
        if hasattr(a, "keys_and_values"):
            assert [x.shape for x in a.keys_and_values()] == [x.shape for x in b.keys_and_values()]
        elif isinstance(a, PrefixCache):
            assert [x.shape for x in a.state] == [x.shape for x in b.state]
        else:
            assert [x.shape for x in g.trees.arrays_of(a.state)] == [
                x.shape for x in g.trees.arrays_of(b.state)
            ]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_probe_keeps_prompts_as_generate_does(name, monkeypatch):
    """`generate` forks one copy of the prompts exactly where the workload says so."""
    work, forks = work_of(name), []
    monkeypatch.setattr(decode_step, "fork", lambda *args: forks.append(args) or fork(*args))
    g.generate(work.policy, work.params, PROMPTS, key=mx.random.key(0), num_generations=2, max_new_tokens=2)
    assert bool(forks) == work.shares_prefix


@pytest.mark.parametrize("launch", ["eval", "async", "split"])
def test_a_run_of_steps_launches_and_looks(launch, monkeypatch):
    """Each step is launched as asked; tokens come to the host every so many, and at the end."""
    work, seen = work_of(), Counter()
    for name, function in dict(decode_probe.LAUNCHES).items():
        monkeypatch.setitem(
            decode_probe.LAUNCHES, name, lambda *a, n=name, f=function: (seen.update([n]), f(*a))
        )
    on_host = decode_probe.on_host
    monkeypatch.setattr(
        decode_probe, "on_host", lambda array: seen.update({array.shape: 1}) or on_host(array)
    )
    ticks = iter([10.0, 15.0])
    probe = Probe(work, lambda: next(ticks))
    assert probe.seconds_per_step(launch, 4, groups=3, drawn=5, steps=10) == 0.5
    warm = decode_probe.WARM_STEPS
    assert warm == 2
    if launch == "split":
        assert seen == {launch: 10 + warm, (3, 4): 4, (3, 2): 4}, "half of the rows in each lane"
    else:
        assert seen == {launch: 10 + warm, (6, 4): 2, (6, 2): 2}


def test_every_candidate_is_measured_in_turn(monkeypatch):
    """Rounds of all timings, early and late, until the budget is spent."""
    work, calls = work_of(max_new_tokens=200), []
    now = [0.0]

    def seconds_per_step(self, launch, check_every, *, groups, drawn, steps):
        calls.append((groups, launch, drawn, check_every))
        now[0] += 0.001 * (steps + 3)
        return 0.001

    monkeypatch.setattr(Probe, "seconds_per_step", seconds_per_step)
    candidates = candidates_of(work)
    times, left, reason = measure_decoding(work, candidates, clock=lambda: now[0])
    assert times is not None and left == candidates and reason == ""
    plain = [(p, how, drawn, 16) for p in (4, 2, 1) for how in ("async", "eval") for drawn in (0, 182)]
    assert set(calls[1:15]) == {*plain, (4, "async", 0, 4), (4, "eval", 0, 4)}
    assert calls[1:15] * 5 == calls[1:] and times.samples[4, "eval", True, False] == [0.001] * 5


@pytest.mark.parametrize(
    ("step", "groups", "steps"), [(0.002, 3, 16), (0.01, 3, 8), (0.014, 1, 16), (0.02, 1, 8), (0.03, None, 0)]
)
def test_slow_steps_are_measured_less(step, groups, steps, monkeypatch):
    """What does not fit the budget is left out; slowest of all, eval is the answer without a measurement."""
    work, now = work_of(max_new_tokens=200), [0.0]

    def seconds_per_step(self, launch, check_every, *, groups, drawn, steps):
        now[0] += step * (steps + 3)
        return step

    monkeypatch.setattr(Probe, "seconds_per_step", seconds_per_step)
    times, left, reason = measure_decoding(work, candidates_of(work), clock=lambda: now[0])
    assert now[0] < 6
    if groups is None:
        assert times is None and "30 ms" in reason
        assert usual_decoding(left, work) == DecodeChoice("eval", 8, 0)
    else:
        assert times is not None and (len(left.groups), times.steps) == (groups, steps)
        assert len(times.samples[4, "async", False, False]) >= 3


def test_a_real_model_is_measured():
    """Real steps under a clock of a millisecond a look: all samples are there, and the answer a candidate."""
    work, looks = work_of(max_new_tokens=32), count(1)
    candidates = candidates_of(work, "cpu", max_batch=4, cores=2)
    times, left, _ = measure_decoding(work, candidates, lambda: 0.001 * next(looks))
    assert times is not None and left == candidates and set(times.samples) == set(candidates.timings)
    assert all(sample > 0 for taken in times.samples.values() for sample in taken)
    answer = choose_decoding(times, left, work)
    assert answer.launch in ("eval", "async", "split") and answer.check_every in (4, 8, 16, 32)
    assert answer.max_batch == 4
