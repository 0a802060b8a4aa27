"""Rollouts ahead of the learner (`rollout.max_staleness`): threads sample and score them while the
learner works.

The order of batch steps is determined by the update count, not by timing, so a run is reproducible
and no batch step is dropped. One thread samples; several batches may be scored at once.
"""

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
    """A thread's MLX streams, which are cleared when the thread ends. If a process ends soon after
    a thread whose streams are still open, MLX may abort the process.
    """

    def __del__(self) -> None:
        mx.clear_streams()


def _free_streams_at_end() -> None:
    _of_thread.streams = _Streams()


def admitted(plan: Plan, state: RunState) -> RunState:
    """Returns the state after adding all batch steps that may start with the current weights: those
    for the current update and the next `rollout.max_staleness` updates.
    """
    length = plan.run.length
    together = plan.config.optim.gradient_accumulation_steps
    update = (state.batch_step - length.supervised) // together
    last = length.supervised + together * (update + 1 + plan.config.rollout.max_staleness)
    flights = list(state.flights)
    position = state.position
    if flights:
        position = flights[-1].position + plan.config.optim.batch_size
    for step in range(state.batch_step + len(flights), min(last, length.batch_steps)):
        flights.append(Flight.of(state, step, position))
        position += plan.config.optim.batch_size
    return attrs.evolve(state, flights=tuple(flights))


class Ahead:
    """Threads that sample and score rollouts ahead of the learner, and the resulting
    experiences.
    """

    def __init__(self, plan: Plan) -> None:
        """Creates the thread pools; no batch step runs yet."""
        self._stop = threading.Event()
        self._sampler = ThreadPoolExecutor(1, "sampler", _free_streams_at_end)
        self._scorers = ThreadPoolExecutor(
            2 + plan.config.rollout.max_staleness, "scorer", _free_streams_at_end
        )
        self._running: dict[int, Future[Experience]] = {}
        # An environment instance is busy until its conversation is scored.
        self._pool = self._sampler if plan.run.collector.environments else self._scorers
        collector = attrs.evolve(
            plan.run.collector, sampler=self._sampler, should_stop=self._stop.is_set
        )
        self._plan = attrs.evolve(plan, run=attrs.evolve(plan.run, collector=collector))

    def take(self, state: RunState) -> tuple[RunState, Experience]:
        """Starts the batch steps that are not running yet, and waits for the experience of the
        first one.

        Returns the state without that batch step, and the experience. Raises the exception of the
        step's thread, if any.
        """
        state = admitted(self._plan, state)
        for flight in state.flights:
            if flight.batch_step not in self._running:
                before = flight.state(state)
                draw = propose(self._plan, before)
                draw = attrs.evolve(draw, weights=self._plan.weights(before))
                self._running[flight.batch_step] = self._pool.submit(
                    experience, self._plan, self._plan.engine, draw
                )
        first, *rest = state.flights
        with self._plan.times.timing("rollout"):
            found = self._running[first.batch_step].result()
        del self._running[first.batch_step]
        return attrs.evolve(state, flights=tuple(rest)), found

    def settle(self) -> None:
        """Waits until all threads are idle, so that the model, rewards and environments are
        free.
        """
        wait(self._running.values())

    def close(self) -> None:
        """Stops the threads and discards their current work."""
        self._stop.set()
        for pool in (self._scorers, self._sampler):
            pool.shutdown(wait=False, cancel_futures=True)
