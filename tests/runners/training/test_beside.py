"""`experience` may run in a separate thread while another thread learns and updates."""

import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import mlx.core as mx
import pytest

from grpo_fn.trees import arrays_of, named_leaves
from runners.machine.startup import Platform
from runners.telemetry.diary import Diary
from runners.telemetry.report import Quiet
from runners.training.plan import plan_of
from runners.training.run_state import first_state
from runners.training.setup import SetUp
from runners.training.steps import experience, gradients, learn, propose, sync, update
from tests.support.resuming import config_in

SETTINGS = ["optim.batch_size=2", "data.max_samples=9", "eval.every=0", "checkpoint.every=0"]


class Now:
    """Replaces threads: a submitted function is called immediately."""

    def submit(self, function, *arguments):
        """A result with the interface of a future."""
        found = function(*arguments)
        return types.SimpleNamespace(result=lambda: found)


def trained(folder, executor, steps, *settings):
    """Updates while the next rollout is sampled; returns tokens, losses and norms, and the weights."""
    config = config_in(folder, *SETTINGS, f"optim.max_steps={steps}", *settings).check()
    run = SetUp(config, Platform(backend="cpu")).build()
    plan = plan_of(run, Diary(Quiet()))
    state = first_state(run)
    learner = attrs.evolve(run.learner, engine=None, sampling=None)  # the other thread has them
    alone = attrs.evolve(plan, run=attrs.evolve(run, learner=learner))
    plan.engine.load(plan.weights(state))
    found = experience(plan, plan.engine, propose(plan, state))
    seen = []
    for _ in range(steps):
        ahead = attrs.evolve(state, batch_step=state.batch_step + 1, position=found.position)
        later = executor.submit(experience, plan, plan.engine, propose(plan, ahead))
        state, loss, updated = update(alone, gradients(alone, learn(alone, state, found)))
        seen.append((found.rollout.completions(), loss.loss.item(), updated.grad_norm.item()))
        found = later.result()
        state = sync(plan, state)
        stale = found.rollout.version_b
        assert stale is not None and (stale == state.update - 1).all().item()
    mx.eval(arrays_of(state.train))
    leaves: dict[str, Any] = named_leaves(state.train.params)
    return seen, {name: bytes(memoryview(leaf)) for name, leaf in leaves.items()}


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU's sums have no fixed order")
@pytest.mark.parametrize(
    ("steps", "settings"),
    [
        (200, ()),
        (12, ("rollout.quantization=affine-4", "rollout.group_size=32")),
        (12, ("model.path={mixtral}", "loss.router_replay=true")),
    ],
    ids=["plain", "calibrated", "experts"],
)
def test_a_rollout_beside_the_learner_is_bit_for_bit_one_after_the_other(tmp_path, steps, settings):
    """Completions, losses and weights are equal; each rollout is one update older than the learner."""
    one = trained(tmp_path / "a", Now(), steps, *settings)
    with ThreadPoolExecutor(1) as executor:
        beside = trained(tmp_path / "a", executor, steps, *settings)
    assert beside[0] == one[0]
    assert beside[1] == one[1]
    assert len({str(completions) for completions, _, _ in one[0]}) == steps
