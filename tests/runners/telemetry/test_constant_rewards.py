"""A reward without a second value is pointed out once, after some batch steps."""

import json

import numpy as np
import pytest

from runners.errors import UserError
from runners.telemetry.constant_rewards import ConstantRewards

NAN = float("nan")


def spoken(steps, names, after=3):
    """What is said at each batch step; `steps` has the values of a batch step, [K, B]."""
    watch = ConstantRewards(names, after)
    return [watch.read(np.array(values)) for values in steps]


def test_one_value_is_pointed_out_once():
    """At the third step, with name, value and number of completions; then never again."""
    said = spoken([[[0.5, 0.5], [0, 1]]] * 5, ["flat", "varied"])
    assert [len(lines) for lines in said] == [0, 0, 1, 0, 0]
    assert said[2][0].startswith("reward flat gave 0.5 to each of 6 completions in the first 3 batch steps")


def test_a_second_value_is_enough():
    """At any step, in any place, and of any size."""
    for late in ([[0, 1e-9]], [[1, 0]]):
        assert spoken([[[0, 0]], [[0, 0]], late], ["r"]) == [[], [], []]


def test_nothing_to_say_is_no_value():
    """None beside one value is still one value; None alone is told apart."""
    assert "gave 2 to each" in spoken([[[NAN, 2]], [[NAN, NAN]], [[2, 2]]], ["r"])[2][0]
    (line,) = spoken([[[NAN, NAN]]] * 3, ["silent"])[2]
    assert line.startswith("reward silent returned None for each of 6 completions")


def test_batch_steps_of_different_sizes():
    """Dynamic sampling can leave fewer groups; each counts as it is."""
    assert "each of 6 completions" in spoken([[[1]], [[1, 1]], [[1, 1, 1]]], ["r"])[2][0]


def test_a_resumed_run_goes_on_with_the_count():
    """What was seen before the cut counts, through JSON; what was said is not said again."""
    steps = [[[0.5], [1.0]], [[0.5], [2.0]], [[0.5], [2.0]], [[0.5], [2.0]], [[0.5], [2.0]], [[0.5], [2.0]]]
    straight = spoken(steps, ["flat", "varied"])
    for cut in range(1, 6):
        before, after = (ConstantRewards(["flat", "varied"], 3) for _ in range(2))
        said = [before.read(np.array(values)) for values in steps[:cut]]
        after.restore(json.loads(json.dumps(before.facts())))
        assert said + [after.read(np.array(values)) for values in steps[cut:]] == straight
    assert sum(map(len, straight)) == 1


def test_a_checkpoint_of_before_this_was_saved_is_past_it():
    """Nothing is said then; nonsense is a line."""
    watch = ConstantRewards(["flat"], 1)
    watch.restore({})
    assert watch.read(np.array([[0.5, 0.5]])) == []
    for nonsense in (3, {"steps": -1}, {"first": {"flat": "x"}}, {"varied": 1}):
        with pytest.raises(UserError, match=r"^trainer_state\.json: "):
            watch.restore({"constant_rewards": nonsense})


def test_a_run_warns_of_a_constant_reward(tmp_path):
    """The line comes from the loop, at the tenth batch step, among the notes."""
    from runners.config.loading import load_config
    from runners.training.train import run_training
    from tests.support.tiny_runs import Notes, small

    (tmp_path / "flat.py").write_text("def flat(completions, **_):\n    return [0.25] * len(completions)\n")
    (tmp_path / "train.toml").write_text(
        small(
            run={"output_dir": str(tmp_path / "out")},
            rollout={"num_generations": 2, "max_new_tokens": 4},
            optim={"batch_size": 1, "max_steps": 11},
            eval={"samples": 1},
            reward={"functions": ["flat.py:flat"]},
        )
    )
    notes = Notes()
    run_training(load_config(str(tmp_path / "train.toml")), report=notes)
    found = [line for line in notes.lines if "flat" in line]
    assert len(found) == 1
    assert "gave 0.25 to each of 20 completions in the first 10 batch steps" in found[0]
