"""Ranks as processes, and all that they decide together."""

from runners.config.loading import load_config
from runners.quickstart import MODEL_DIR
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.runners.ranks.test_rank_processes import lines
from tests.support.closeness import assert_same_weights
from tests.support.ranks.launching import begin, config_writer


def test_three_ranks_are_equal_at_every_update_and_train_as_one(tmp_path):
    """With adapters, minibatches, dynamic sampling, and memory that runs out on rank 1."""
    write = config_writer(tmp_path)
    tables = {
        "model": {"tune": "lora", "lora": {"rank": 4, "scale": 8.0}},
        "run": {"seed": 1},  # groups vary in both of its rollouts
        "loss": {"dynamic_sampling": True},
        "optim": {"batch_size": 5, "max_steps": 2, "num_iterations": 2, "minibatches": 2},
    }
    one = run_training(load_config(str(write("one", **tables))), report=Quiet()).folder
    config = write("three", **tables)
    run = begin(3, tmp_path / "ranks", [str(config)], "digests", "memory")
    said = run.end()
    three = one.with_name("three")
    assert (three / "final").is_dir(), said
    digests = [(tmp_path / f"ranks/{rank}.digests").read_text().splitlines() for rank in range(3)]
    assert len(digests[0]) == len(set(digests[0])) == 8
    assert digests == [digests[0]] * 3
    assert " ".join(said.split()).count("the step is repeated with half as many") == 1, said
    same = ("batch_step", "prompt", "completion", "reward")
    want, found = lines(one, "completions.jsonl"), lines(three, "completions.jsonl")
    assert [[line[key] for key in same] for line in found] == [[line[key] for key in same] for line in want]
    assert_same_weights(three / "final", one / "final", MODEL_DIR)
    run_training(load_config(str(config)), report=Quiet(), resume=three / "checkpoint-1")
    assert_same_weights(three / "final", one / "final", MODEL_DIR)
    assert [line["reward"] for line in lines(three, "completions.jsonl")] == [line["reward"] for line in want]
