"""One whole step of the quickstart on the embedded model, split into its parts: for watching regressions.

Every repeat does the same work: the same weights, key, prompts and rewards. *batch* is packing rows for the
learner.

**What limits it.** Passes over small arrays on one core, and products too small for the rate of a large one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import attrs
import click
import mlx.core as mx

import grpo_fn as g
from benchmarks.harness.command import benchmark, say
from benchmarks.harness.machine import rates
from benchmarks.harness.measure import Timing, peak_bytes
from benchmarks.harness.record import Figure, time_figure
from grpo_fn.trees import nbytes
from runners.config.loading import load_config
from runners.data.prompts import Example
from runners.machine.startup import prepare
from runners.training.setup import Run, SetUp

PARTS = ("rollout", "reward", "batch", "grad", "update", "sync")


@attrs.frozen(eq=False)
class Step:
    """What one step did, and the seconds of its parts."""

    seconds: dict[str, float]
    sampled: int  # tokens that the rollout drew
    learnt: int  # positions (rows × length, padding included) that go through the learner
    widest: int  # tokens of the longest completion: the number of decode steps
    shapes: int  # different shapes among the micro-batches


class _Clock:
    """Seconds since the last reading, all arrays given computed first."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self, *trees: object) -> float:
        g.materialize(*trees)
        mx.synchronize()
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        return elapsed


def one_step(run: Run, state: g.TrainState, examples: Sequence[Example]) -> Step:
    """Rollout, reward, batch, gradient, update and sync, from a given state that stays as it was.

    The same prompts, key and weights give the same work each time.
    """
    learner, config = run.learner, run.config
    seconds = dict.fromkeys(PARTS, 0.0)
    learner.engine.load(state.old_params, 0)
    _ = learner.engine.sampler  # is rounded here
    experience = run.collector.collect(lambda number: examples[:number], state.key)
    seconds |= experience.seconds
    clock = _Clock()
    batch = g.make_batch(
        experience.rollout,
        experience.advantages_pg,
        mask_truncated=config.loss.mask_truncated_completions,
        top_entropy_quantile=config.loss.top_entropy_quantile,
    )
    batch = g.drop_inactive(batch, learner.spec)
    pieces = g.split_batch(
        batch, max_tokens=config.system.micro_batch_tokens, share_prompts=learner.share_prompts
    )
    seconds["batch"] = clock.lap(pieces)
    state, stats = learner.grad_step(state, pieces)
    seconds["grad"] = clock.lap(state.accum_grads, state.accum_weight, stats)
    # As a run does: the new weights may take the memory of those that sampled.
    state = attrs.evolve(state, old_params=None)
    learner.engine.load(None, 0)
    state, update = learner.update_step(state)
    seconds["update"] = clock.lap(state, update)
    state = g.sync_old(state)
    learner.engine.load(state.old_params, 0)
    seconds["sync"] = clock.lap(state.old_params, learner.engine.sampler[1])
    return Step(
        seconds,
        sampled=experience.sampled_tokens,
        learnt=sum(_positions(piece) for piece in pieces),
        widest=max(map(len, experience.rollout.completions())),
        shapes=len({(piece.tokens_bl.shape, piece.targets_bt.shape) for piece in pieces}),
    )


def _positions(piece: g.Batch) -> int:
    shared = piece.prompt_index_b is not None  # then tokens_bl holds each prompt once, and nothing else
    return piece.tokens_bl.size + (piece.targets_bt.size if shared else 0)


@benchmark("step")
@click.option("--repeats", default=12, show_default=True, help="Steps that are timed.")
@click.option("--set", "overrides", multiple=True, help="SECTION.KEY=VALUE, on top of the quickstart.")
def main(quick: bool, repeats: int, overrides: Sequence[str]) -> Sequence[Figure]:
    """One step of the quickstart, part by part, again and again on the same work."""
    small = ["optim.batch_size=4", "rollout.num_generations=4", "data.max_samples=16", "eval.samples=8"]
    repeats = min(repeats, 2) if quick else repeats
    config = load_config("quickstart", [*(small if quick else []), *overrides])
    run = SetUp(config.check(), prepare(), say).build()
    state = run.learner.state
    assert state is not None
    examples = run.stream.take(run.config.optim.batch_size)
    say(f"step: {repeats} steps of {len(examples)} prompts × {config.rollout.num_generations}")
    one_step(run, state, examples)  # traces and compiles
    steps = [one_step(run, state, examples) for _ in range(repeats)]
    times = {part: Timing(tuple(step.seconds[part] for step in steps)) for part in PARTS}
    whole = Timing(tuple(sum(step.seconds.values()) for step in steps))
    done = steps[0]
    floors = _floors(run, state, done, quick)
    sampling = sorted(done.sampled / step.seconds["rollout"] for step in steps)
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
            value=done.sampled / times["rollout"].median,
            unit="tokens/s",
            low=sampling[0],
            high=sampling[-1],
            samples=repeats,
        ),
        Figure(name="learner rate", value=done.learnt / times["grad"].median, unit="tokens/s"),
        Figure(name="tokens sampled", value=done.sampled),
        Figure(name="decode steps", value=done.widest),
        Figure(name="tokens through the learner", value=done.learnt),
        Figure(name="traces of the grad step", value=run.learner.grad_step.traces, at_most=done.shapes),
        Figure(
            name="peak of a step, beyond the state",
            value=peak_bytes(lambda: one_step(run, state, examples).seconds, warm=False) / 1e6,
            unit="MB",
        ),
    ]


def _floors(run: Run, state: g.TrainState, done: Step, quick: bool) -> dict[str, float]:
    """Seconds that a part cannot go below.

    Products: 2 FLOP a weight and token forward, 6 with the backward. Exponentials, which do not overlap with
    them on a CPU: one for each element of the gates, attention score and logit. An update reads and writes
    weights, gradients and both moments.
    """
    speed, shape = rates(quick), run.loaded.config
    prompt = len(run.data.train[0].tokens)  # all are about as long
    layers, heads = shape["num_hidden_layers"], shape["num_attention_heads"]
    scores = heads * (prompt + done.widest / 2)  # of a token, half of its completion behind it
    exps = layers * (shape["intermediate_size"] + scores) + shape["vocab_size"]
    weights = run.loaded.num_parameters
    sampled = done.sampled + prompt * run.config.optim.batch_size  # prompts are computed once a group
    moved = 7 * nbytes(state.params)  # reads w, g, m, v; writes w, m, v
    return {
        "rollout": sampled * (2 * weights / speed.matmul + exps / speed.exp),
        "grad": done.learnt * (6 * weights / speed.matmul + exps / speed.exp),
        "update": moved / speed.copy,
    }


if __name__ == "__main__":
    main()
