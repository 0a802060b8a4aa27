"""Numbers that are not finite in a run: skipped, counted, and an end in time."""

import json

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from grpo_fn.trees import named_leaves
from runners.checkpoints.checkpoint import load_trees
from runners.config.conditions import condition_fault
from runners.config.loading import load_config
from runners.errors import NumbersError
from runners.quickstart import MODEL_DIR
from runners.training.train import run_training
from tests.support.tiny_runs import Notes, small

CONFIG = small(
    rollout={"max_new_tokens": 8}, optim={"learning_rate": 2e-4, "max_steps": 4}, eval={"samples": 1}
)


def start(tmp_path, *overrides):
    """Run a config: its result (or what it raised), its notes, its log and its folder."""
    (tmp_path / "train.toml").write_text(CONFIG)
    config = load_config(str(tmp_path / "train.toml"), [f"run.output_dir={tmp_path}", *overrides])
    notes, result = Notes(), None
    try:
        result = run_training(config, report=notes)
    except NumbersError as error:
        result = error
    log = [json.loads(line) for line in (tmp_path / "small/training_log.jsonl").read_text().splitlines()]
    return result, notes.lines, log, tmp_path / "small"


def weights_of(params):
    return {name: np.array(leaf) for name, leaf in named_leaves(params).items()}


def test_a_run_whose_numbers_fail_stops_with_its_last_good_state(tmp_path):
    """A rate beyond float32: no weight changes, the third in a row is the last."""
    error, lines, log, folder = start(tmp_path, "optim.learning_rate=1e39", "optim.max_bad_updates=3")
    assert isinstance(error, NumbersError) and error.exit_code == 3
    assert "3 updates in a row" in str(error) and "optim.max_bad_updates = 3" in str(error)
    assert [line["bad_updates"] for line in log] == [1, 2, 3] and all(line["update_skipped"] for line in log)
    assert sum("skipped: the new weights would not be finite" in line for line in lines) == 3
    assert any("the last good state: saved" in line for line in lines)
    state = load_trees(folder / "checkpoint-3")[0]
    before = mx.load(str(MODEL_DIR / "model.safetensors"))
    after = weights_of(state.params)
    assert all(np.array_equal(np.array(before[name]), after[name]) for name in after)
    assert all(not moment.any() for moment in weights_of(state.opt_state).values())


def test_without_a_limit_it_goes_on(tmp_path):
    """optim.max_bad_updates = 0: all updates are skipped and counted, and the run ends as runs do."""
    result, _, log, folder = start(tmp_path, "optim.learning_rate=1e39", "optim.max_bad_updates=0")
    assert result.updates == 4 and log[-2]["bad_updates"] == 4
    assert (folder / "final" / "model.safetensors").is_file()


def spoiled(monkeypatch, calls, spoil):
    """The learner's grad step with what it gives changed at some of its calls."""
    real, count = g.GradStep.__call__, []

    def step(self, state, batch, **how):
        state, stats = real(self, state, batch)
        count.append(1)
        return spoil(state, stats) if len(count) in calls else (state, stats)

    monkeypatch.setattr(g.GradStep, "__call__", step)


def test_one_bad_gradient_costs_one_update(tmp_path, monkeypatch):
    """The row starts anew after a good one; the log says which, and the reward's numbers are kept."""

    def spoil(state, stats):
        grads = g.trees.map_arrays(lambda a: a * mx.nan, state.accum_grads)
        return attrs.evolve(state, accum_grads=grads), stats

    spoiled(monkeypatch, {1, 3}, spoil)
    result, lines, log, _ = start(tmp_path, "optim.max_bad_updates=2")
    assert [line.get("update_skipped", False) for line in log[:4]] == [True, False, True, False]
    assert [line["bad_updates"] for line in log[:4]] == [1, 1, 2, 2]
    assert result.updates == 4 and log[0]["grad_norm"] is None and "grad_norm" in log[0]["nonfinite"]
    assert sum("the norm of its gradient is nan" in line for line in lines) == 2
    assert all(np.isfinite(leaf).all() for leaf in weights_of(result.state.params).values())


def test_stop_when_ends_a_run_early(tmp_path):
    """As if it had been this long: evaluated, final model saved, and the reason told."""
    result, lines, log, folder = start(tmp_path, 'stop.when=["kl > 9", "update >= 2 for 2"]')
    assert result.updates == 3 and log[-1]["em"] == result.last_em and log[-1]["update"] == 3
    plain = [name for line in log for name, value in line.items() if not isinstance(value, str | list)]
    rewards = load_config("quickstart").reward.functions
    assert [name for name in plain if condition_fault(f"{name} > 0", rewards)] == []
    assert any("the run ends early: update >= 2 for 2 readings (stop.when): update = 3" in x for x in lines)
    assert (folder / "final" / "model.safetensors").is_file()


def test_an_evaluation_may_end_a_run(tmp_path):
    """em is read where it is measured."""
    result, lines, _, _ = start(tmp_path, 'stop.when=["em >= 0"]', "eval.every=2")
    assert result.updates == 2 and any("em >= 0 (stop.when): em = " in line for line in lines)


def test_flat_rewards_are_warned_about(tmp_path):
    """Two updates whose groups are all alike: one line, in the run's own notes."""
    (tmp_path / "mine.py").write_text("def same(completions, **_):\n    return [1.0] * len(completions)\n")
    _, lines, _, _ = start(tmp_path, 'reward.functions=["mine.py:same"]', "watch.patience=2")
    assert sum("no group's completions have differed" in line for line in lines) == 1
