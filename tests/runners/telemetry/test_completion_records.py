"""completions.jsonl: the parts of each reward, and the length penalty."""

import json
import math

import pytest

from runners.config.conditions import condition_fault
from runners.config.loading import load_config
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.tiny_runs import small

REWARDS = """
def odd(completions, completion_ids, log_metric, log_extra, trainer_state, **_):
    log_metric("mine/odd", trainer_state.global_step / trainer_state.max_steps)
    log_extra("ids", [len(ids) for ids in completion_ids])
    return [None if len(ids) % 2 == 0 else float(len(ids)) for ids in completion_ids]


def letters(completions, **_):
    return [float(len(set(completion[0]["content"]))) for completion in completions]
"""
WEIGHTS = {"odd": 0.5, "letters": -0.25}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The completions and the log of a run with a length penalty and dynamic sampling."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "mine.py").write_text(REWARDS)
    (folder / "train.toml").write_text(
        small(
            run={"output_dir": str(folder / "outputs")},
            data={"system_prompt": "Think first."},
            rollout={"max_new_tokens": 24},
            reward={"functions": ["mine.py:odd", "mine.py:letters"], "weights": list(WEIGHTS.values())},
            loss={
                "preset": "dapo", "dynamic_sampling": True, "max_resample": 2,
                "overlong": {"buffer": 8, "penalty": 2.0},
            },
            optim={"batch_size": 4, "max_steps": 4, "gradient_accumulation_steps": 2},
        )
    )  # fmt: skip
    result = run_training(load_config(str(folder / "train.toml")), report=Quiet())

    def lines(name):
        return [json.loads(line) for line in (result.folder / name).read_text().splitlines()]

    return lines("completions.jsonl"), [row for row in lines("training_log.jsonl") if "loss" in row]


def test_a_reward_is_the_sum_of_what_the_record_says(run):
    """It is the weighted sum of the functions' values (None counts as 0) plus the length penalty."""
    records, _ = run
    assert len(records) == 4 * 4 * 4
    for record in records:
        assert list(record["rewards"]) == list(WEIGHTS)
        assert (record["rewards"]["odd"] is None) == (record["tokens"] % 2 == 0)
        assert record["rewards"]["letters"] == len(set(record["completion"]))
        assert record["length_penalty"] == pytest.approx(2.0 * min(0.0, (16 - record["tokens"]) / 8))
        given = {name: value for name, value in record["rewards"].items() if value is not None}
        total = sum(WEIGHTS[name] * value for name, value in given.items()) + record["length_penalty"]
        assert record["reward"] == pytest.approx(total, rel=1e-5) and math.isfinite(record["advantage"])
    assert len({record["rewards"]["odd"] for record in records}) > 2, "all alike would prove little"


def test_a_record_has_the_whole_prompt_and_what_rewards_logged(run):
    """It contains the question, the system message, and the rewards' columns and metrics."""
    records, log = run
    assert [line["mine/odd"] for line in log] == [0, 0.5]  # updates so far
    assert all(record["extra"] == {"ids": record["tokens"]} for record in records)
    assert all([*record["metrics"]] == ["mine/odd"] for record in records)
    assert {record["prompt"] for record in records} > {records[0]["prompt"]}
    assert all(record["context"] == [{"role": "system", "content": "Think first."}] for record in records)


def test_the_length_penalty_is_shown(run):
    """Each update's line contains its mean, and stop.when can use it."""
    records, log = run
    for line in log:
        rows = [record for record in records if record["update"] == line["update"]]
        mean = sum(record["length_penalty"] for record in rows) / len(rows)
        assert line["length_penalty"] == pytest.approx(mean, rel=1e-5) and mean < 0
    assert condition_fault("length_penalty > 0", []) == ""
