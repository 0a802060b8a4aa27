"""How completions are decoded on this machine: what the config leaves open is measured, once, and kept.

    seconds a token ∝ parts · (step + look / k + step · (k − 1) / max_new_tokens)

`step` is the mean of a step with nothing drawn yet and one with nearly all of it, as the KV cache makes them
differ; `look` is what bringing the tokens to the host costs; a row is decoded (k − 1) / 2 steps beyond its
end, at a typical length of half the limit. None of it changes which tokens are drawn.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import attrs
import mlx.core as mx

from runners.config.sections import RolloutConfig
from runners.tuning.decode_probe import WARM_STEPS, Probe
from runners.tuning.saved_answers import DecodeChoice
from runners.tuning.workload import Workload

CHECKS = (4, 8, 16, 32)  # candidates for check_every
USUAL_CHECK = 8
USUAL_SECONDS = 5.0  # seconds that a measurement should take
MOST_SECONDS = 8.0  # seconds that it may take to get its least number of rounds
MARGIN = 0.03  # the usual answer stays unless another is better by this share
SLOW_FLOPS = 1e11  # a step of more takes a CPU a second: not even to be tried
WORTH = {"cpu": 0.02}  # share of a run's decoding steps that may be spent on the measurement
WORTH_ON_GPU = 0.1  # where much more can be gained
MEASURED_STEPS = 800  # about as many as a measurement makes
_STEPS = (16, 8)  # of one timing
_ROUNDS = 3  # wanted of each timing, at least
_MOST_ROUNDS = 5

Timing = tuple[int, str, bool, bool]  # groups together, launch, near the end, with many looks


@attrs.frozen(eq=False)
class DecodeTimes:
    """What was measured."""

    samples: dict[Timing, list[float]]  # seconds a step, one for each round
    steps: int  # of each timing, with one look at the end or with one in every CHECKS[0]
    spent: float  # seconds that the measurement took

    def look(self, groups: int, launch: str) -> float:
        """Seconds of one look: the median over the rounds."""
        few, many = (self.samples[groups, launch, False, looking] for looking in (False, True))
        more = statistics.median(b - a for a, b in zip(few, many, strict=True))
        return max(self.steps * more / (self.steps // CHECKS[0] - 1), 0.0)

    def step(self, groups: int, launch: str) -> list[float]:
        """Seconds of a step in each round, looks left in."""
        early, late = (self.samples[groups, launch, late, False] for late in (False, True))
        return [(a + b) / 2 for a, b in zip(early, late, strict=True)]

    def costs(self, groups: int, launch: str, check_every: int, look: float, work: Workload) -> list[float]:
        """Seconds of one position of all rows of a batch step, in each round: the formula above."""
        parts = -(-len(work.lengths) // groups)
        more_looks = look * (1 / check_every - 1 / self.steps)
        overrun = 1 + (check_every - 1) / work.max_new_tokens
        return [parts * (step * overrun + more_looks) for step in self.step(groups, launch)]


@attrs.frozen
class DecodeCandidates:
    """What may be chosen of each; the first is the usual one."""

    groups: tuple[int, ...]  # prompts together, falling
    launches: tuple[str, ...]
    checks: tuple[int, ...]

    @classmethod
    def of(
        cls, wish: RolloutConfig, work: Workload, launches: tuple[str, ...], fitting: int
    ) -> DecodeCandidates:
        """All that the config leaves open; `fitting` is how many prompts' groups memory holds.

        `launches` are those that may pay on the machine.
        """
        if wish.max_batch:
            groups: tuple[int, ...] = (
                min(max(wish.max_batch // work.num_generations, 1), len(work.lengths)),
            )
        else:
            groups = tuple(dict.fromkeys(-(-fitting // parts) for parts in (1, 2, 4)))
        launches = launches if wish.launch == "auto" else (wish.launch,)
        others = tuple(k for k in CHECKS if k != USUAL_CHECK)
        return cls(groups, launches, (wish.check_every,) if wish.check_every else (USUAL_CHECK, *others))

    @property
    def timings(self) -> list[Timing]:
        """What a round measures."""
        plain = [
            (p, launch, late, False)
            for late in (False, True)
            for p in self.groups
            for launch in self.launches
        ]
        return plain + [(self.groups[0], launch, False, True) for launch in self.launches]


def measure_decoding(
    work: Workload, candidates: DecodeCandidates, clock: Callable[[], float] = time.perf_counter
) -> tuple[DecodeTimes | None, DecodeCandidates, str]:
    """Times for the candidates, or for fewer of them where steps are slow; without times, the reason."""
    started = clock()
    probe = Probe(work, clock)
    if not probe.measurable:
        return None, candidates, "caches of this model's kind are not measured"
    first = probe.seconds_per_step(
        candidates.launches[0], CHECKS[-1], groups=candidates.groups[0], drawn=0, steps=WARM_STEPS
    )
    only_largest = attrs.evolve(candidates, groups=candidates.groups[:1])
    for less in (candidates, only_largest):
        for steps in _STEPS:
            seconds = len(less.timings) * (steps + WARM_STEPS + 1) * first
            if seconds * _ROUNDS <= USUAL_SECONDS:
                times = _rounds(probe, work, less, steps, lambda: clock() - started)
                return times, less, ""
    reason = f"a step takes {1e3 * first:.0f} ms: how it is launched is no matter"
    return None, attrs.evolve(only_largest, launches=_slow(candidates.launches)), reason


def choose_decoding(times: DecodeTimes, candidates: DecodeCandidates, work: Workload) -> DecodeChoice:
    """The cheapest of the candidates by the median of the rounds.

    The usual one stays where that is not better by `MARGIN`, or not in every round: then it is noise.
    """
    look = {launch: times.look(candidates.groups[0], launch) for launch in candidates.launches}
    everything = [
        (groups, launch, check)
        for groups in candidates.groups
        for launch in candidates.launches
        for check in candidates.checks
    ]
    costs = {each: times.costs(*each, look[each[1]], work) for each in everything}
    best = everything[0]
    for each in sorted(everything, key=lambda each: statistics.median(costs[each])):
        gains = [1 - cost / before for cost, before in zip(costs[each], costs[best], strict=True)]
        if min(gains) > 0 and statistics.median(gains) > MARGIN:
            best = each
            break
    return decoding(*best, work)


def usual_decoding(candidates: DecodeCandidates, work: Workload) -> DecodeChoice:
    """The answer without a measurement."""
    return decoding(candidates.groups[0], candidates.launches[0], candidates.checks[0], work)


def decoding(groups: int, launch: str, check_every: int, work: Workload) -> DecodeChoice:
    """An answer with as many prompts together; all of them is written as no limit."""
    return DecodeChoice(
        launch, check_every, 0 if groups == len(work.lengths) else groups * work.num_generations
    )


def reason_not_to_measure(work: Workload, backend: str, batch_steps: int) -> str | None:
    """Why a measurement cannot pay, known before it begins; None: it may."""
    steps = batch_steps * work.max_new_tokens
    if steps * WORTH.get(backend, WORTH_ON_GPU) < MEASURED_STEPS:
        return f"{steps:,} decoding steps are too few for it to pay"
    if backend == "cpu" and work.step_flops > SLOW_FLOPS:
        return "a step takes long: how it is launched is no matter"
    return None


def _slow(launches: Sequence[str]) -> tuple[str, ...]:
    # Where steps are slow there is no launch to hide, and pipelining copies the caches.
    return tuple(sorted(launches, key=lambda launch: launch == "async"))


def _rounds(
    probe: Probe, work: Workload, candidates: DecodeCandidates, steps: int, spent: Callable[[], float]
) -> DecodeTimes:
    """Every timing in turn, again and again, until there are enough of them or the time is up."""
    late_at = max(work.max_new_tokens - steps - WARM_STEPS, 0)
    samples: dict[Timing, list[float]] = defaultdict(list)
    for number in range(_MOST_ROUNDS):
        began = spent()
        for timing in candidates.timings:
            groups, launch, late, looking = timing
            seconds = probe.seconds_per_step(
                launch,
                CHECKS[0] if looking else steps,
                groups=groups,
                drawn=late_at if late else 0,
                steps=steps,
            )
            samples[timing].append(seconds)
        if spent() + (spent() - began) > (MOST_SECONDS if number + 1 < _ROUNDS else USUAL_SECONDS):
            break
    mx.clear_cache()
    return DecodeTimes(dict(samples), steps, spent())
