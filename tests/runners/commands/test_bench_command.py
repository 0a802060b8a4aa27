"""`grpo bench` measures the steps of a config and writes nothing."""

import io
import itertools
import json
import os
import re

import pytest

from runners.config.loading import load_config
from runners.profiling import PARTS, bench_steps, bench_table
from runners.telemetry.report import PlainReport
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import BY_LETTERS, LETTERS, Notes, small


def test_steps_are_measured_in_parts_that_add_up(tmp_path):
    """The first step is separate; the others have medians, tokens, peak memory and quantization formats."""
    steps = {"batch_size": 2, "gradient_accumulation_steps": 2, "num_iterations": 2}
    formats = {"quantization": "affine-4", "group_size": 32, "bits_budget": 5.2}
    model = {"path": str(make_model_folder(tmp_path / "model"))}
    (tmp_path / "train.toml").write_text(small(model=model, optim=steps, rollout=formats))
    before = sorted(os.listdir(tmp_path))
    shown = Notes()
    found = bench_steps(load_config(str(tmp_path / "train.toml")).check(), steps=1, report=shown)
    seconds = found["part_seconds"]
    assert found["steps"] == 1 and found["first_step_seconds"] > 0 and set(seconds) == set(PARTS)
    assert sum(seconds.values()) == pytest.approx(found["step_seconds"], abs=1e-6)
    assert 0 < found["tokens_per_step"] <= 2 * 2 * 4 * 8
    assert found["peak_bytes"] > 0 and "step 2 of 2" in shown.lines
    assert sorted(os.listdir(tmp_path)) == before
    assert (found["run_steps"], found["run_evaluations"]) == (1, 1)
    assert found["loading_seconds"] > 0 and 0 < found["evaluating_seconds"] < found["run_seconds"]
    text = bench_table(found)
    assert f"{found['limited_by']}: {found['advice']}" in text
    wanted = r"rollout.bits_budget = 5.2: [45]\.\d* bits on average; weights: \d+ in affine-.*"
    assert re.fullmatch(wanted, found["formats"]) and found["formats"] in text
    json.dumps(found)


def test_a_long_step_says_how_far_it_has_come(tmp_path):
    """Rollout and gradients show progress; here, 100 s pass between two readings of the clock."""
    (tmp_path / "letters.py").write_text(LETTERS)
    (tmp_path / "train.toml").write_text(small(reward=BY_LETTERS))
    clock, shown = itertools.count(step=100), io.StringIO()
    report = PlainReport(shown, clock=lambda: next(clock))
    bench_steps(load_config(str(tmp_path / "train.toml")).check(), steps=1, report=report)
    for step in ("step 1 of 2", "step 2 of 2"):
        assert f"\n{step}\n" in shown.getvalue()
        for line in (r"tokens [\d,]+ of 64", r"micro-batches \d+ of \d+"):
            assert re.search(rf"^{step}: {line}, [\d:]+$", shown.getvalue(), re.MULTILINE), shown.getvalue()
