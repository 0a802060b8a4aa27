"""Checkpoints of four ranks, gone on with by as many and by fewer."""

from runners.config.loading import load_config
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.runners.ranks.test_ranks import lines, weights, worst, write
from tests.support.ranks.launching import begin
from tests.support.ranks.runs_on_ranks import digests_of
from tests.support.tiny_runs import BY_LETTERS, LETTERS

TABLES = {
    "reward": BY_LETTERS,
    "optim": {"batch_size": 5, "max_steps": 5, "learning_rate": 3e-4},
    "checkpoint": {"every": 2, "keep_last": 0},
}


def test_what_four_ranks_saved_goes_on_with_four_two_and_one(tmp_path):
    """With four bit for bit, all ranks alike after each update; with two and one to rounding."""
    (tmp_path / "letters.py").write_text(LETTERS)
    config = write(tmp_path, "four", **TABLES)
    said = begin(4, tmp_path / "straight", [str(config)], "digests").end()
    four = tmp_path / "outputs/four"
    assert (four / "final").is_dir(), said
    want, kept = digests_of(tmp_path / "straight", 4), weights(four / "final")
    rewards = [line["reward"] for line in lines(four, "completions.jsonl")]
    options = [str(config), "--resume", str(four / "checkpoint-2")]
    for number in (4, 2):
        said = begin(number, tmp_path / f"again-{number}", options, "digests").end()
        assert "resuming from" in said, said
        found = digests_of(tmp_path / f"again-{number}", number)
        assert len(set(found[0])) == 3
        assert found == [found[0]] * number
        assert number == 2 or found[0] == want[0][2:]
        assert worst(weights(four / "final"), kept) < 1e-5
    run_training(load_config(str(config)), report=Quiet(), resume=four / "checkpoint-2")
    assert worst(weights(four / "final"), kept) < 1e-5
    assert [line["reward"] for line in lines(four, "completions.jsonl")] == rewards
