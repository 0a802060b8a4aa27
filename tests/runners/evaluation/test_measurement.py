"""Evaluation: numbers computed by hand, the problems of training, and comparisons of models."""

import json
import shutil

import attrs
import numpy as np
import pytest

from runners.checkpoints.manifest import digest
from runners.config.loading import load_config
from runners.config.names import SHIPPED_PRESETS
from runners.data.datasets import load_rows
from runners.data.prompts import build_examples
from runners.engines.settings import sampling_of
from runners.evaluation.comparison import (
    Metric,
    ModelResult,
    bootstrap,
    comparison_summary,
    comparison_table,
    difference,
    shared,
    wilson,
)
from runners.evaluation.completions import Evaluator
from runners.evaluation.evaluation import evaluate, held_out
from runners.evaluation.measurement import choose_problems, measure
from runners.files.own_folder import remember
from runners.files.run_files import OWN_RUNS
from runners.inference.inference_model import load_inference
from runners.machine.startup import Platform
from runners.quickstart import DATA_DIR
from runners.rewards.scoring import Scorer, resolve_rewards
from runners.telemetry.report import Quiet
from runners.tokenization.text import TextDecoder
from runners.training.train import run_training
from tests.support.commands import grpo
from tests.support.tiny_runs import PROBLEMS, small

CPU = Platform(backend="cpu")
FEW = (f"data.source={PROBLEMS}", "data.eval_split=valid")


def config_of(*overrides):
    """The quickstart's config with little to do."""
    return load_config("quickstart", [*FEW, "eval.samples=12", "eval.max_new_tokens=40", *overrides])


@pytest.fixture(scope="module")
def model():
    """The embedded model."""
    return load_inference("embedded", CPU)


@pytest.fixture(scope="module")
def measured(model):
    """The embedded model, measured with four samples of each of twelve problems."""
    config = config_of()
    chosen, too_long = choose_problems(load_rows(config.data)[1], model, config)
    assert too_long == 0
    rewards = resolve_rewards(config.reward.functions)
    return measure(model, "it", chosen, config, rewards, num=4, ks=(1, 2, 4))


def test_greedy_exact_match_equals_training(model, measured):
    """The same problems, prompts, texts and verdicts as `evaluate`, which the training loop calls."""
    config = config_of()
    rows = load_rows(config.data)[1]
    examples = held_out(build_examples(rows, config.data, model.tokenizer)[0], 12)
    decoder = TextDecoder(model.tokenizer)
    sampling = sampling_of(config, model.eos_ids)
    sampling = attrs.evolve(sampling, max_new_tokens=40)
    scorer = Scorer(resolve_rewards(config.reward.functions))
    how = {"decoder": decoder, "nudge": config.data.nudge, "form": config.answer_form, "scorer": scorer}
    theirs = evaluate(Evaluator(engine=model.engine, **how), examples, sampling)
    greedy = [row for row in measured.completions if row["kind"] == "greedy"]
    assert [row["completion"] for row in greedy] == [each.text for each in theirs.completions]
    assert [row["prompt"] for row in greedy] == [example.text for example in examples]
    assert measured.metrics["exact match"].mean == theirs.score == np.mean([row["correct"] for row in greedy])
    assert measured.metrics["reward"].mean == pytest.approx(theirs.reward)
    by_hand = [sum(row["rewards"].values()) for row in greedy]
    assert theirs.metrics["eval/reward"] == pytest.approx(np.mean(by_hand))
    assert theirs.metrics["eval/reward_std"] == pytest.approx(np.std(by_hand))


def test_the_metrics_follow_from_the_completions(measured):
    """pass@k, lengths, truncation and rewards recomputed from the JSON rows."""
    samples = [row for row in measured.completions if row["kind"] == "sample"]
    assert len(samples) == 48 and [row["sample"] for row in samples] == [0, 1, 2, 3] * 12
    assert [row["problem"] for row in samples[::4]] == list(measured.indices)
    right = np.array([row["correct"] for row in samples]).reshape(12, 4)
    assert measured.metrics["pass@1"].values == pytest.approx(right.mean(axis=1))
    assert measured.metrics["pass@4"].values == pytest.approx(1.0 * right.any(axis=1))
    pairs = [[right[p, i] or right[p, j] for i in range(4) for j in range(i)] for p in range(12)]
    assert measured.metrics["pass@2"].values == pytest.approx(np.mean(pairs, axis=1))
    greedy = [row for row in measured.completions if row["kind"] == "greedy"]
    for prefix, rows in (("sampled ", samples), ("", greedy)):
        columns = {
            "length": [row["tokens"] for row in rows],
            "truncated": [row["finish"] == "length" for row in rows],
            "reward/correctness_reward_func": [2.0 * row["correct"] for row in rows],
        }
        for name, column in columns.items():
            by_hand = np.reshape(column, (12, -1)).mean(axis=1)
            assert measured.metrics[prefix + name].values == pytest.approx(by_hand)
        assert [row["rewards"]["correctness_reward_func"] for row in rows] == column
    assert 0 < right.mean() < 1, "all alike would prove little"


def test_intervals_are_wilson_s_for_shares_and_resampled_else():
    """Shares of 0 and 1 use Wilson's interval, other means the bootstrap; NaN is ignored."""
    binary = Metric(np.array([1.0, 0.0, 1.0, np.nan]), percent=True)
    assert binary.mean == pytest.approx(2 / 3) and binary.interval == wilson(2, 3)
    share = Metric(np.array([0.5, 1.0, 0.25]), percent=True)
    assert share.interval == bootstrap([0.5, 1.0, 0.25])
    assert Metric(np.array([1.0, 0.0])).interval == bootstrap([1.0, 0.0])
    empty = Metric(np.array([np.nan]))
    assert empty.interval is None and np.isnan(empty.mean)


def made(name, indices, values):
    """A measurement by hand."""
    metrics = {
        "exact match": Metric(np.array(values, np.float64), percent=True),
        "length": Metric(np.array([10.0 * i for i in indices])),
    }
    return ModelResult(name, tuple(indices), metrics, (), ())


def test_two_models_are_compared_pair_by_pair():
    """Only shared problems are compared; the interval is that of the differences."""
    both = made("a", [0, 1, 2, 3, 5], [1, 0, 0, 0, 1]), made("b", [1, 2, 3, 5, 9], [1, 1, 1, 1, 0])
    one, other = shared(both)
    assert one.indices == other.indices == (1, 2, 3, 5)
    found = difference(one.metrics["exact match"], other.metrics["exact match"])
    assert found.mean == 0.75 and found.interval is not None
    assert found.interval == bootstrap([1, 1, 1, 0])
    heading, _, line, *_ = comparison_table(both).splitlines()
    heads, cells = ([cell.strip() for cell in row.split("|")[1:-1]] for row in (heading, line))
    low, high = (100 * end for end in (found.interval.low, found.interval.high))
    assert cells[0] == "exact match" and cells[1].startswith("25.0 % [") and cells[2].startswith("100.0 % [")
    assert cells[3:] == [f"+75.0 % [{low:+.1f} %, {high:+.1f} %]"]
    assert heads == ["4 problems", "a", "b", "difference"]
    content = comparison_summary(both)
    assert content["problems"] == 4 and content["difference"]["exact match"]["mean"] == 0.75
    assert content["models"]["a"]["exact match"]["mean"] == 0.25
    assert content["difference"]["length"]["mean"] == 0


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A fresh working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_prints_a_table_and_writes_both_files(folder):
    """The command prints a table and writes JSON lines and JSON."""
    (folder / "c.json").write_text(json.dumps(config_of().check().to_dict()))
    options = "--config c.json --samples 5 --k 1,2 --max-tokens 20 --out rows.jsonl --json scores.json"
    result = grpo("eval", "embedded", *options.split())
    names = [line.split("|")[1].strip() for line in result.stdout.splitlines()[2:]]
    assert names[0] == "exact match" and {"pass@1", "pass@2", "reward", "truncated", "length"} <= set(names)
    rows = rows_of(folder)
    assert len(rows) == 5 * (1 + 2) and all(row["tokens"] <= 20 for row in rows)
    scores = json.loads((folder / "scores.json").read_text())
    assert scores["problems"] == 5 and list(scores["models"]) == ["embedded"]


@pytest.mark.parametrize(("model", "preset"), SHIPPED_PRESETS.items())
def test_a_shipped_model_is_measured_as_its_preset_trains_it(folder, model, preset):
    """A shipped model is measured on its preset's problems, offline, with a message."""
    arguments = ("--samples", "12", "--out", "rows.jsonl")
    found = grpo("eval", model, *arguments)
    assert f"data, prompts and rewards as in the preset {preset};" in found.stderr
    rows = rows_of(folder)
    assert 0 < sum(row["correct"] for row in rows) < len(rows) == 12
    named = grpo("eval", model, "--config", preset, *arguments)
    assert "preset" not in named.stderr and rows_of(folder) == rows


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run whose problems, prompts and rewards are not the defaults."""
    folder = tmp_path_factory.mktemp("runs")
    rows = (DATA_DIR / "test.jsonl").read_text().splitlines()[:30]
    (folder / "p.jsonl").write_text("\n".join(rows))
    source = (
        "def mine(completions, **_):\n"
        f"    open({str(folder / 'ran')!r}, 'w').close()\n"
        "    return [1.0] * len(completions)\n"
    )
    (folder / "mine.py").write_text(source)
    text = small(
        run={"output_dir": str(folder / "outputs")},
        data={"source": "p.jsonl", "eval_split": "train"},
        rollout={"max_new_tokens": 30},
        reward={"functions": ["mine.py:mine", "int_reward_func"], "weights": [1.0, 2.0]},
        optim={"max_steps": 1},
        checkpoint={"every": 1},
        eval={"samples": 3},
    )
    (folder / "train.toml").write_text(text)
    found = run_training(load_config(str(folder / "train.toml")), report=Quiet()).folder
    (folder / "ran").unlink()
    return found


def rows_of(folder):
    """The JSON lines of --out, without the model's name."""
    lines = (folder / "rows.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "model"} for line in lines]


@pytest.mark.parametrize("place", ["final", ""])
def test_a_run_s_model_is_measured_on_its_own_data(folder, run, place):
    """Without --config, problems, prompts, limits and rewards are the run's; a message says so."""
    config = run / "config.resolved.json"
    found = grpo("eval", run / place, "--out", "rows.jsonl")
    assert f"data, prompts and rewards as in the run ({config})" in found.stderr
    rows = rows_of(folder)
    assert len(rows) == 3 and all(row["completion"].startswith("<reasoning>") for row in rows)
    named = grpo("eval", run / place, "--config", config, "--out", "rows.jsonl")
    assert "as in the run" not in named.stderr and rows_of(folder) == rows


def test_a_foreign_run_is_measured_only_if_its_config_is_named(folder, run):
    """A foreign config may name code, so it must be named explicitly or not be used."""
    ran = run.parents[1] / "ran"
    assert "reward/mine" in grpo("eval", run).stdout and ran.exists()
    ran.unlink()
    config = shutil.copytree(run, folder / "theirs") / "config.resolved.json"
    config.write_text(json.dumps(json.loads(config.read_text())))
    refused = grpo("eval", "theirs", code=2)
    assert "--config theirs/config.resolved.json uses" in refused.stderr
    other = grpo("eval", "theirs", "--data", PROBLEMS, "--split", "valid", "--samples", "2")
    assert "reward/mine" not in other.stdout and not ran.exists()
    assert "reward/mine" in grpo("eval", "theirs", "--config", config).stdout and ran.exists()
    ran.unlink()


def test_a_moved_model_keeps_its_prompt_format(folder, run):
    """grpo_prompt.json determines prompts and limits; the command determines data and rewards."""
    shutil.copytree(run / "final", folder / "moved")
    arguments = ("--data", PROBLEMS, "--split", "valid", "--samples", "2", "--out", "rows.jsonl")
    result = grpo("eval", "embedded", "moved", *arguments)
    assert "prompt format as in training (moved: grpo_prompt.json)" in result.stderr
    rows = rows_of(folder)
    by_hand = ("data.system_prompt=", "data.nudge=<reasoning>", "rollout.max_new_tokens=30")
    (folder / "moved" / "grpo_prompt.json").unlink()
    plain = grpo("eval", "embedded", "moved", *arguments, *(f"--set={each}" for each in by_hand))
    assert "as in training" not in plain.stderr and rows_of(folder) == rows


def test_two_models_with_different_prompt_formats_require_a_config(folder, run):
    """The message names the keys in which two runs or files differ."""
    other = shutil.copytree(run, folder / "other")
    content = json.loads((other / "config.resolved.json").read_text())
    content["data"] |= {"nudge": "x", "max_samples": 7, "curriculum": "adaptive"}
    content["eval"]["every"] = 3
    (other / "config.resolved.json").write_text(json.dumps(content))
    remember(OWN_RUNS, digest(other / "config.resolved.json"))
    result = grpo("eval", run, other, code=2)
    assert "differ in data.nudge; --config" in result.stderr
    grpo("eval", run, other, "--set", "data.nudge=")
    for name, nudge in (("one", "x"), ("two", "y")):
        file = shutil.copytree(run / "final", folder / name) / "grpo_prompt.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"nudge": nudge}))
    result = grpo("eval", "one", "two", "--data", "embedded", code=2)
    assert "one and two were trained with different prompt formats" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("embedded --out link", "link: no such folder"),
        ("embedded --k 0", "expected positive integers"),
        ("embedded --k 1,9999999999", "expected positive integers"),
        ("embedded --k 8 --num 4", "--k 8: expected at least 8 samples per problem"),
        ("embedded --out no/such/x.jsonl", "no such folder: no/such"),
    ],
)
def test_invalid_options_exit_with_code_2(folder, arguments, message):
    """Invalid options are reported before anything is generated."""
    (folder / "link").symlink_to("gone/x.jsonl")
    result = grpo("eval", *arguments.split(), code=2)
    assert result.stdout == "" and message in result.stderr
