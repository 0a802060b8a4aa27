"""What runs leave is the same model to transformers: logits in float32, scores of greedy completions.

With `GRPO_REAL_MODEL=FOLDER` the runs are of that model, which takes minutes; else of a tiny one.
"""

import json
import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from runners.config.loading import load_config
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.commands import grpo
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import LETTERS, small

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

REAL = os.environ.get("GRPO_REAL_MODEL", "")
LORA = {"tune": "lora", "lora": {"rank": 4, "scale": 8.0}}


@pytest.fixture(scope="module", params=["full", "lora"])
def run(request, tmp_path_factory):
    """A finished run's config, and the folder of its complete model with fused adapters."""
    folder = tmp_path_factory.mktemp(request.param)
    path = REAL or str(make_model_folder(folder / "base"))
    (folder / "letters.py").write_text(LETTERS)
    text = small(
        run={"name": request.param, "output_dir": str(folder)},
        model={"path": path, "dtype": "float32", **(LORA if request.param == "lora" else {})},
        data={"system_prompt": "Think first.", "nudge": ""},
        answer={"form": "last_number"},
        reward={"functions": ["correctness_reward_func", f"{folder}/letters.py:letters"]},
        rollout={"max_new_tokens": 48 if REAL else 12},
        optim={"learning_rate": 1e-4 if REAL else 5e-3},
        eval={"samples": 24 if REAL else 8},
    )
    config = folder / "run.toml"
    config.write_text(text)
    done = run_training(load_config(str(config)), report=Quiet()).folder
    whole = done / "final"
    if request.param == "lora":
        whole = folder / "fused"
        grpo("export", done, "--out", whole)
    return load_config(str(config)), config, whole


def test_logits_are_those_of_transformers_in_float32(run):
    """On each held-out prompt alone, to a thousandth."""
    from mlx_lm.utils import load_model

    from benchmarks.sides import opened

    settings = _settings(run)
    theirs, _ = opened(settings)
    theirs.eval()
    ours, _ = load_model(Path(settings["model"]))
    ours.set_dtype(mx.float32)
    assert settings["test"]
    for example in settings["test"]:
        with torch.no_grad():
            wanted = theirs(torch.tensor([example["tokens"]])).logits.numpy()
        assert np.ptp(wanted) > 0.1  # there is something to compare
        assert np.abs(np.array(ours(mx.array([example["tokens"]]))) - wanted).max() < 1e-3


def test_eval_gives_the_score_of_a_plain_loop_over_generate(run, tmp_path):
    """Exact match and reward of `grpo eval` are those of transformers' own greedy completions."""
    from benchmarks.sides import evaluation, opened

    settings = _settings(run)
    theirs = evaluation(*opened(settings), settings)
    scores = tmp_path / "scores.json"
    grpo("eval", run[2], "--config", run[1], "--samples", theirs["em_subset"], "--json", scores)
    (ours,) = json.loads(scores.read_text())["models"].values()
    assert theirs["eval/reward"] > 0
    assert ours["reward"]["mean"] == pytest.approx(theirs["eval/reward"])
    assert ours["exact match"]["mean"] == theirs["em"]


def _settings(run):
    """What `sides` needs, for the model that the run left."""
    from benchmarks.sides import side_settings

    config, _, folder = run
    return {**side_settings(config), "model": str(folder)}
