"""Updates with numbers that are not finite are skipped and counted, and end the run at a limit."""

from functools import partial

import attrs
import mlx.core as mx
import numpy as np
import pytest

import grpo_fn as g
from grpo_fn.trees import map_arrays, named_leaves
from runners.checkpoints.checkpoint import load_trees
from runners.config.conditions import condition_fault
from runners.config.loading import load_config
from runners.errors import NumbersError
from runners.files.tensor_files import load_arrays
from runners.quickstart import MODEL_DIR
from tests.support.resuming import lines_of
from tests.support.tiny_runs import ran, small

CONFIG = small(
    rollout={"max_new_tokens": 8}, optim={"learning_rate": 2e-4, "max_steps": 4}, eval={"samples": 1}
)
start = partial(ran, text=CONFIG)


def weights_of(params):
    return {name: np.array(leaf) for name, leaf in named_leaves(params).items()}


def test_a_run_whose_numbers_fail_stops_with_its_last_good_state(tmp_path):
    """With a learning rate beyond float32 no weight changes, and the third consecutive skip ends the run."""
    with pytest.raises(NumbersError, match=r"3 consecutive updates .*optim\.max_bad_updates = 3") as caught:
        start(tmp_path, "optim.learning_rate=1e39", "optim.max_bad_updates=3")
    folder = tmp_path / "out/small"
    log, events = (lines_of(folder / f"{name}.jsonl") for name in ("training_log", "events"))
    lines = [event.get("text", "") for event in events]
    assert caught.value.exit_code == 3
    assert [line["bad_updates"] for line in log] == [1, 2, 3] and all(line["update_skipped"] for line in log)
    assert sum("skipped because the new weights would not be finite" in line for line in lines) == 3
    assert any("the last good state: saved" in line for line in lines)
    state, _ = load_trees(folder / "checkpoint-3")
    (before, _), after = load_arrays(MODEL_DIR / "model.safetensors"), weights_of(state.params)
    assert all(np.array_equal(np.array(before[name]), after[name]) for name in after)
    assert all(not moment.any() for moment in weights_of(state.opt_state).values())


def test_without_a_limit_a_run_continues(tmp_path):
    """With optim.max_bad_updates = 0 all updates are skipped and counted, and the run ends normally."""
    found = start(tmp_path, "optim.learning_rate=1e39", "optim.max_bad_updates=0")
    assert found.result.updates == 4 and found.updates[-1]["bad_updates"] == 4
    assert (found.result.folder / "final" / "model.safetensors").is_file()


def test_one_bad_gradient_costs_one_update(tmp_path, monkeypatch):
    """A good update resets the count of consecutive ones; the log marks the skipped updates."""
    real, count = g.GradStep.__call__, []

    def step(self, state, batch, **how):
        state, stats = real(self, state, batch)
        count.append(1)
        spoil = mx.nan if len(count) in (1, 3) else 1.0
        grads = map_arrays(lambda a: a * spoil, state.accum_grads)
        return attrs.evolve(state, accum_grads=grads), stats

    monkeypatch.setattr(g.GradStep, "__call__", step)
    # The check of the model computes gradients too, unless its result is cached.
    found = start(tmp_path, "optim.max_bad_updates=2", "system.check_model=false")
    log = found.updates
    assert [line.get("update_skipped", False) for line in log] == [True, False, True, False]
    assert [line["bad_updates"] for line in log] == [1, 1, 2, 2]
    assert found.result.updates == 4 and log[0]["grad_norm"] is None and "grad_norm" in log[0]["nonfinite"]
    assert sum("the norm of its gradient nan" in line for line in found.notes) == 2
    assert all(np.isfinite(leaf).all() for leaf in weights_of(found.result.state.params).values())


def test_stop_when_ends_a_run_early(tmp_path):
    """The run is evaluated, its final model is saved, and a message gives the reason."""
    found = start(tmp_path, 'stop.when=["kl > 9", "update >= 2 for 2"]')
    result, log = found.result, found.log
    assert result.updates == 3 and log[-1]["em"] == result.last_em and log[-1]["update"] == 3
    plain = [name for line in log for name, value in line.items() if not isinstance(value, str | list)]
    rewards = load_config("quickstart").reward.functions
    assert [name for name in plain if condition_fault(f"{name} > 0", rewards)] == []
    why = "the run ends early: update >= 2 for 2 readings (stop.when): update = 3"
    assert any(why in line for line in found.notes)
    assert (result.folder / "final" / "model.safetensors").is_file()


def test_an_evaluation_may_end_a_run(tmp_path):
    """A condition on em is checked at each evaluation."""
    found = start(tmp_path, 'stop.when=["em >= 0"]', "eval.every=2")
    assert found.result.updates == 2 and any("em >= 0 (stop.when): em = " in line for line in found.notes)


def test_flat_rewards_are_warned_about(tmp_path):
    """Two updates without a difference within any group cause one warning."""
    (tmp_path / "mine.py").write_text("def same(completions, **_):\n    return [1.0] * len(completions)\n")
    found = start(tmp_path, 'reward.functions=["mine.py:same"]', "watch.patience=2")
    assert sum("no group's completions have differed" in line for line in found.notes) == 1
