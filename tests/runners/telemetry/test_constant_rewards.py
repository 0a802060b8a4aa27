"""A reward without a second value is pointed out once, after some batch steps."""

import numpy as np

from runners.telemetry.constant_rewards import ConstantRewards

NAN = float("nan")


def spoken(steps, names, after=3):
    """What is said at each batch step; `steps` has the values of a batch step, [K, B]."""
    seen, said = ConstantRewards(), []
    for values in steps:
        seen, lines = seen.read(names, np.array(values), after)
        said.append(lines)
    return said


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
