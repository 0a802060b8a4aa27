"""`grpo bench`: a config's own steps, timed; nothing is written."""

import json
import os
import re

import pytest

from runners.config.loading import load_config
from runners.profiling.step_bench import BENCH_PARTS, advice, bench_steps
from tests.support.commands import grpo
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import small


@pytest.fixture(name="train")
def _train(tmp_path):
    file = tmp_path / "train.toml"
    steps = {"batch_size": 2, "gradient_accumulation_steps": 2, "num_iterations": 2}
    file.write_text(small(model={"path": str(make_model_folder(tmp_path / "model"))}, optim=steps))
    return file


def test_steps_are_measured_in_parts_that_add_up(train, tmp_path, monkeypatch):
    """The first update apart, the medians of the others, tokens, and a peak beside the forecast's."""
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir(tmp_path))
    said = []
    found = bench_steps(load_config(str(train)).check(), steps=1, say=said.append)
    assert found.steps == 1 and found.first > 0 and set(found.seconds) == set(BENCH_PARTS)
    assert sum(found.seconds.values()) == pytest.approx(found.step, abs=1e-6)
    assert 0 < found.tokens <= 2 * 2 * 4 * 8 < found.learned
    assert found.peak > 0 and found.expected_peak
    assert said[-1] == "step 2 of 2" and sorted(os.listdir(tmp_path)) == before
    assert (found.run.steps, found.run.evaluations) == (1, 1)
    assert found.run.training == pytest.approx(found.first + (found.run.steps - 1) * found.step)
    assert found.run.loading > 0 and 0 < found.run.evaluating < found.run.seconds
    text = found.table()
    assert f"{found.limit}; shorter with {found.advice}" in text and "forecast" in text
    assert json.loads(json.dumps(found.facts()))["limited_by"] == found.limit


def test_the_choice_of_formats_is_shown(train):
    """Of rollout.bits_budget, with the bits on average; the other weights add up to all that are rounded."""
    budget = ["rollout.quantization=affine-4", "rollout.group_size=32", "rollout.bits_budget=5.2"]
    found = bench_steps(load_config(str(train), budget).check(), steps=1)
    assert re.fullmatch(
        r"rollout.bits_budget = 5.2: [45]\.\d* bits on average; weights: \d+ in affine-.*", found.formats
    )
    assert found.formats in found.table() and found.facts()["formats"] == found.formats


def test_the_command_refuses_what_a_run_refuses(tmp_path):
    """One line, exit code 2."""
    done = grpo("bench", tmp_path / "none.toml", code=2)
    assert "none.toml" in done.output


@pytest.mark.parametrize(
    ("part", "override", "named"),
    [
        ("learner", "model.tune=lora", "model.tune"),
        ("update", "model.tune=lora", "model.tune"),
        ("learner", "system.grad_checkpoint=false", "grad_checkpoint"),
        ("sync", "rollout.quantization=none", "without quantization"),
    ],
)
def test_advice_leaves_out_what_the_config_does(part, override, named):
    """A LoRA config is not told to train adapters; the default config and a quantized one are told more."""
    other = {"model.tune": "model.tune=full", "grad_checkpoint": "system.grad_checkpoint=true"}
    config = load_config("quickstart", [override])
    assert named not in advice(part, config)
    assert named in advice(part, load_config("quickstart", [other.get(named, "rollout.quantization=mxfp4")]))
