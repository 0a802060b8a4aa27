"""Rollouts ahead of the learner (`rollout.max_staleness`): threads sample and score them while the
learner works.

Batch steps start in order, according to the number of updates and never to time, so a run is
reproducible and no batch step is dropped. One thread samples, and one batch is scored at a time.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait

import attrs
import mlx.core as mx

from runners.rewards.experience import Experience
from runners.training.plan import Plan
from runners.training.run_state import Flight, RunState
from runners.training.steps import experience, propose

_of_thread = threading.local()


class _Streams:
    """MLX's streams of a thread. MLX may abort a process that ends soon after a thread with streams."""

    def __del__(self) -> None:
        mx.clear_streams()


def _free_streams_at_end() -> None:
    _of_thread.streams = _Streams()


def admitted(plan: Plan, state: RunState) -> RunState:
    """The state with the flights that start with the current weights: the flights for the current
    update and the next `rollout.max_staleness` updates.
    """
    length = plan.run.length
    together = plan.config.optim.gradient_accumulation_steps
    update = (state.batch_step - length.supervised) // together
    last = length.supervised + together * (update + 1 + plan.config.rollout.max_staleness)
    flights = list(state.flights)
    for step in range(state.batch_step + len(flights), min(last, length.batch_steps)):
        position = state.position
        if flights:
            position = flights[-1].position + plan.config.optim.batch_size
        flights.append(Flight.of(state, step, position))
    return attrs.evolve(state, flights=tuple(flights))


class Ahead:
    """The threads of a run, and the experiences that they produce."""

    def __init__(self, plan: Plan) -> None:
        """Starts without flights."""
        self._stop = threading.Event()
        scorers = 2 + plan.config.rollout.max_staleness
        self._sampler = ThreadPoolExecutor(1, "sampler", _free_streams_at_end)
        self._scorers = ThreadPoolExecutor(scorers, "scorer", _free_streams_at_end)
        self._found: dict[int, Future[Experience]] = {}
        # Instances of environments are busy until their conversations are scored.
        self._pool = self._sampler if plan.run.collector.environments else self._scorers
        collector = attrs.evolve(
            plan.run.collector, sampler=self._sampler, should_stop=self._stop.is_set
        )
        self._plan = attrs.evolve(plan, run=attrs.evolve(plan.run, collector=collector))

    def begin(self, state: RunState) -> None:
        """Starts the flights of a state that are not running yet."""
        for flight in state.flights:
            if flight.batch_step not in self._found:
                before = flight.state(state)
                draw = propose(self._plan, before)
                draw = attrs.evolve(draw, weights=self._plan.weights(before))
                self._found[flight.batch_step] = self._pool.submit(
                    experience, self._plan, self._plan.engine, draw
                )

    def result(self, flight: Flight) -> Experience:
        """Waits for the experience of a flight and returns it. Raises the exception of its thread,
        if any.
        """
        found = self._found[flight.batch_step].result()
        del self._found[flight.batch_step]
        return found

    def settle(self) -> None:
        """Waits until no thread works, so that the model, rewards and environments are free."""
        wait(self._found.values())

    def close(self) -> None:
        """Ends the threads; their current work is lost."""
        self._stop.set()
        for pool in (self._scorers, self._sampler):
            pool.shutdown(wait=False, cancel_futures=True)
