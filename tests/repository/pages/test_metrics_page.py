"""runners/metrics.py has the names that real runs log, no more and no fewer; docs/metrics.md its lines."""

import importlib.util
import json
import re

import attrs
import mlx.core as mx

import grpo_fn as g
from runners.config.loading import load_config
from runners.metrics import METRICS
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.pages import ROOT
from tests.support.resuming import LETTERS
from tests.support.tiny_runs import BY_LETTERS, small

# Together these log every name of the table.
RUNS = {
    "a reference, a reward per completion": ["loss.beta=0.1", "loss.preset=grpo"],
    "cispo, with a length penalty": ["loss.preset=cispo", "loss.overlong={buffer=4, penalty=0.5}"],
    "dynamic sampling of flat rewards": [
        "loss.dynamic_sampling=true",
        "loss.max_resample=1",
        'reward.functions=["correctness_reward_func"]',
    ],
    "supervised updates": ["sft.updates=1", "rollout.max_new_tokens=44", "optim.max_steps=1"],
    "a curriculum": ["data.curriculum=adaptive"],
    "programs": [
        "answer.form=code",
        "answer.partial_sandbox=true",
        'reward.functions=["correctness_reward_func"]',
        "optim.max_steps=1",
    ],
    "rollouts ahead": ["rollout.max_staleness=1", "loss.correction=token_truncate"],
    "quantized rollouts that fall back": ["rollout.quantization=affine-8", "rollout.mismatch_limit=1e-9"],
}


def logged(folder, name, overrides):
    """The names in the log of a run of two updates; `{name}` in place of a reward's."""
    config = folder / "small.toml"
    rollout = {"num_generations": 4, "max_new_tokens": 8, "temperature": 1.5}
    run = {"name": name, "output_dir": str(folder)}
    config.write_text(small(reward=BY_LETTERS, run=run, rollout=rollout))
    (folder / "letters.py").write_text(LETTERS)
    run_training(load_config(str(config), overrides), report=Quiet())
    lines = (folder / name / "training_log.jsonl").read_text().splitlines()
    names = {key for line in lines for key in json.loads(line)}
    return {re.sub(r"^(eval/)?rewards/[^/]+", r"\1rewards/{name}", key) for key in names}


def test_the_table_has_the_names_that_runs_log(tmp_path, monkeypatch):
    """These runs and one whose gradient is NaN log exactly the names of the table."""
    found = set()
    for number, overrides in enumerate(RUNS.values()):
        found |= logged(tmp_path, f"run{number}", overrides)

    real = g.GradStep.__call__

    def spoiled(self, state, batch, **how):
        state, stats = real(self, state, batch)
        grads = g.trees.map_arrays(lambda a: a * mx.nan, state.accum_grads)
        return attrs.evolve(state, accum_grads=grads), stats

    monkeypatch.setattr(g.GradStep, "__call__", spoiled)
    found |= logged(tmp_path, "bad", [])
    assert found - {*METRICS} == set(), "logged, and not in the table"
    # Conversations have theirs, models with experts, several ranks, prompts that come again, a teacher, runs
    # that become worse: see test_train.py, test_experts.py and test_teacher.py of tests/runners/training,
    # tests/runners/ranks/test_rank_processes.py, tests/runners/data/test_curriculum.py and
    # tests/runners/checkpoints/test_best.py; Macs theirs: tests/runners/machine/test_mac_power.py.
    played = ("experts/", "groups/pass_rate/", "power/", "ranks/", "teacher/", "tools/", "turns/")
    played += ("eval/success", "eval/reward", "eval/turns", "eval/tool_calls", "eval/failed")
    rare = {name for name in METRICS if name.startswith(played)} | {"memory/swap_gb", "fault", "worse"}
    assert {*METRICS} - found - rare == set(), "in the table, and never logged"


def test_what_is_made_from_the_code_is_current():
    """The tables of docs/config.md and docs/metrics.md, and what the config knows of LossSpec."""
    spec = importlib.util.spec_from_file_location("written", ROOT / "docs" / "manual" / "written.py")
    written = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(written)
    assert written.loss_keys() == written.LOSS_KEYS.read_text(), "run python docs/manual/written.py"
    for page in (ROOT / "docs" / name for name in written.PAGES):
        assert written.rendered(page.name, page.read_text()) == page.read_text(), page.name
