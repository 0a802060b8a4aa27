"""One whole step of the quickstart on the embedded model, split into its parts: for watching regressions.

The step is a run's own. Every repeat does the same work: the same weights, key, prompts and rewards.

**What limits it.** Passes over small arrays on one core, and products too small for the rate of a large one.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import click
import mlx.core as mx
import numpy as np

import grpo_fn as g
from benchmarks.harness.command import benchmark, say
from benchmarks.harness.machine import rates
from benchmarks.harness.measure import Timing, peak_bytes
from benchmarks.harness.record import Figure, time_figure
from grpo_fn.trees import Tree, map_arrays, nbytes
from runners.config.loading import Config, load_config
from runners.machine.startup import Platform, prepare
from runners.profiling import PARTS, Stepping
from runners.telemetry.diary import Diary
from runners.telemetry.report import Report
from runners.training.setup import SetUp


@attrs.frozen(eq=False)
class _Leaf:
    values: np.ndarray
    dtype: mx.Dtype


class HostCopy:
    """A tree whose arrays lie in the host's memory, where MLX does not count them."""

    def __init__(self, tree: Tree) -> None:
        leaves: dict[int, _Leaf] = {}

        def leaf(array: mx.array) -> _Leaf:
            if id(array) not in leaves:
                plain = array.astype(mx.float32) if array.dtype == mx.bfloat16 else array
                leaves[id(array)] = _Leaf(np.array(plain), array.dtype)
            return leaves[id(array)]

        self._tree = map_arrays(leaf, tree)

    def arrays(self) -> Tree:
        """The tree with new arrays; what was one array in several places is one again."""
        made: dict[int, mx.array] = {}

        def array(leaf: _Leaf) -> mx.array:
            if id(leaf) not in made:
                made[id(leaf)] = mx.array(leaf.values).astype(leaf.dtype)
            return made[id(leaf)]

        return map_arrays(array, self._tree, kind=_Leaf)


class RepeatedStep:
    """The first step of a run, taken again and again: each time with arrays of its own, as in a run."""

    def __init__(self, config: Config, platform: Platform) -> None:
        """`config` is checked."""
        built = SetUp(config, platform, say).build()
        self.stepping = Stepping(built, Diary(Report()))
        del built
        self._train = HostCopy(self.stepping.state.train)
        self._first = attrs.evolve(self.stepping.state, train=None)

    def prepare(self) -> g.TrainState:
        """Back to the state before the first step, which is computed."""
        stepping = self.stepping
        stepping.state = self._first
        stepping.plan.engine.load(None)
        train: g.TrainState = self._train.arrays()
        g.materialize(train)
        stepping.state = attrs.evolve(self._first, train=train)
        stepping.plan.engine.load(stepping.plan.weights(stepping.state))
        return train

    def take(self) -> dict[str, float]:
        """See `Stepping.step`; `prepare` comes first."""
        self.stepping.plan.times.take()
        return self.stepping.step()


@benchmark("step")
@click.option("--repeats", default=12, show_default=True, help="Steps that are timed.")
@click.option("--set", "overrides", multiple=True, help="SECTION.KEY=VALUE, on top of the quickstart.")
def main(quick: bool, repeats: int, overrides: Sequence[str]) -> Sequence[Figure]:
    """One step of the quickstart, part by part, again and again on the same work."""
    small = ["optim.batch_size=4", "rollout.num_generations=4", "data.max_samples=16", "eval.samples=8"]
    repeats = min(repeats, 2) if quick else repeats
    config = load_config("quickstart", [*(small if quick else []), *overrides]).check()
    repeated = RepeatedStep(config, prepare())
    say(f"step: {repeats} steps of {config.optim.batch_size} prompts × {config.rollout.num_generations}")

    def step() -> dict[str, float]:
        repeated.prepare()
        return repeated.take()

    step()  # traces and compiles
    steps = [step() for _ in range(repeats)]
    times = {part: Timing(tuple(each[f"time/{part}"] for each in steps)) for part in PARTS}
    whole = Timing(tuple(each["step_time"] for each in steps))
    done = steps[0]
    floors = _floors(repeated, done, quick)
    sampling = sorted(each["tokens"] / each["time/rollout"] for each in steps)
    stepping = repeated.stepping
    shapes = len(stepping.state.shapes)
    repeated.prepare()
    return [
        time_figure("whole step", whole, predicted=sum(floors.values())),
        *(
            time_figure(
                f"{part}", times[part], "ms", predicted=1e3 * floors[part] if part in floors else None
            )
            for part in PARTS
        ),
        Figure(
            name="rollout rate",
            value=done["tokens"] / times["rollout"].median,
            unit="tokens/s",
            low=sampling[0],
            high=sampling[-1],
            samples=repeats,
        ),
        Figure(name="learner rate", value=done["learned"] / times["learner"].median, unit="tokens/s"),
        Figure(name="tokens sampled", value=done["tokens"]),
        Figure(name="decode steps", value=done["columns"]),
        Figure(name="tokens through the learner", value=done["learned"]),
        Figure(
            name="traces of the grad step",
            value=stepping.run.learner.grad_step.traces,
            at_most=shapes,
        ),
        Figure(
            name="peak of a step, beyond the state",
            value=peak_bytes(repeated.take, warm=False) / 1e6,
            unit="MB",
        ),
    ]


def _floors(repeated: RepeatedStep, done: dict[str, float], quick: bool) -> dict[str, float]:
    """Seconds that a part cannot go below.

    Products: 2 FLOP a weight and token forward, 6 with the backward. Exponentials, which do not overlap with
    them on a CPU: one for each element of the gates, attention score and logit. An update reads and writes
    weights, gradients and both moments.
    """
    speed = rates(quick)
    run = repeated.stepping.run
    shape = run.loaded.config
    prompt = len(run.data.train[0].tokens)  # all are about as long
    layers, heads = shape["num_hidden_layers"], shape["num_attention_heads"]
    scores = heads * (prompt + done["columns"] / 2)  # of a token, half of its completion behind it
    exps = layers * (shape["intermediate_size"] + scores) + shape["vocab_size"]
    weights = run.loaded.num_parameters
    sampled = done["tokens"] + prompt * run.config.optim.batch_size  # prompts are computed once a group
    moved = 7 * nbytes(repeated.stepping.state.train.params)  # reads w, g, m, v; writes w, m, v
    return {
        "rollout": sampled * (2 * weights / speed.matmul + exps / speed.exp),
        "learner": done["learned"] * (6 * weights / speed.matmul + exps / speed.exp),
        "update": moved / speed.copy,
    }


if __name__ == "__main__":
    main()
