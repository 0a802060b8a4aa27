"""A run whose final model is worse than an earlier one says so, and names the checkpoint that is better."""

import json

import pytest

from runners.training.best_model import decline_line


def checkpoint(folder, step, em):
    """A kept checkpoint with this exact match; None: it is damaged."""
    place = folder / f"checkpoint-{step}"
    place.mkdir()
    text = "{" if em is None else json.dumps({"em": em})
    (place / "trainer_state.json").write_text(text)


@pytest.mark.parametrize(
    ("scores", "problems", "falls"),
    [
        ((0.46, 0.5, 0.02), 50, True),
        ((0.46, 0.5, 0.44), 50, False),  # within chance
        ((0.46, 0.5, 0.44), 5000, True),
        ((0.3, 0.6), 50, False),
        ((0.5,), 50, False),
        ((), 50, False),
        ((0.5, 0.0), 0, False),
    ],
)
def test_a_decline_beyond_chance_is_named(tmp_path, scores, problems, falls):
    """By twice the standard error of the difference, on that many problems."""
    line = decline_line(tmp_path, scores, problems)
    assert (line is not None) is falls
    assert not falls or "no better checkpoint was kept" in str(line)


def test_the_best_checkpoint_is_named(tmp_path):
    """Of those that are there; a damaged one is passed over, and one that is no better is not named."""
    checkpoint(tmp_path, 4, 0.46)
    checkpoint(tmp_path, 8, None)
    checkpoint(tmp_path, 24, 0.02)
    line = str(decline_line(tmp_path, (0.5, 0.46, 0.02), 50))
    assert "fell from 50.0% to 2.0%" in line and f"grpo export {tmp_path / 'checkpoint-4'}" in line
    assert "has 46.0%" in line
