"""A run of some minutes learns, which no single step can show."""

import json
from pathlib import Path

import numpy as np

from runners.config.loading import load_config
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.tiny_runs import small


def test_reward_rises(tmp_path: Path) -> None:
    """The mean reward of the last updates is above that of the first."""
    path = tmp_path / "train.toml"
    text = small(
        run={"output_dir": str(tmp_path)},
        rollout={"num_generations": 8, "max_new_tokens": 32},
        loss={"preset": "bnpo"},
        optim=dict(
            learning_rate=3e-4, schedule="constant", warmup_ratio=0.1, betas=[0.9, 0.95], batch_size=16,
            max_steps=16,
        ),
        eval={"samples": 1},
    )  # fmt: skip
    path.write_text(text, encoding="utf-8")
    result = run_training(load_config(str(path)), report=Quiet())
    lines = (result.folder / "training_log.jsonl").read_text(encoding="utf-8").splitlines()
    rewards = [line["reward"] for line in map(json.loads, lines) if "loss" in line]
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.15
