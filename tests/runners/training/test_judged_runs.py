"""Whole runs with judges: `mlx_lm.server` with the embedded model marks completions of the embedded model."""

import json

import pytest
from click.testing import CliRunner

from runners import cli
from runners.config.loading import load_config
from runners.errors import RewardError, UserError
from runners.judges import endpoint
from runners.quickstart import MODEL_DIR
from runners.training.train import run_training
from tests.support.resuming import lines_of
from tests.support.services.judge_servers import answering, free_port, mlx_lm_server
from tests.support.tiny_runs import Notes, small

SECRET = "sk-planted-9Xw4"
ONE_STEP = ["optim.max_steps=1"]


@pytest.fixture(autouse=True)
def _own(tmp_path, monkeypatch):
    """Everything in the test's folder; no answers of another test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRPO_FN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    monkeypatch.setattr(endpoint, "_taken_keys", {})


def write_config(url, functions=("judge.solver", "correctness_reward_func"), reward=None, **judge):
    """A small run with a judge that solves the problem itself; its number is the score."""
    solver = {
        "url": url,
        "prompt": "{question} {completion}",
        "pattern": r"<answer>\s*(\d+)",
        "scale": [0, 1000],
        "max_tokens": 48,
        "api_key_env": "JUDGE_KEY",
        "price_out": 1.0,
    } | judge
    decoding = {"launch": "eval", "check_every": 1, "max_batch": 8}  # nothing is measured
    tables = {
        "rollout": decoding,
        "reward": {"functions": list(functions)} | (reward or {}),
        "judge.solver": solver,
    }
    with open("t.toml", "w") as stream:
        stream.write(small(checkpoint={"every": 1}, **tables))
    return load_config("t.toml")


def test_a_model_behind_a_real_server_judges_a_run(tmp_path):
    """`grpo check` shows question and answer; a run logs rewards, numbers and cost; the same run again asks
    nothing; the key is in no file."""
    with mlx_lm_server(MODEL_DIR, tmp_path / "server.log") as url:
        write_config(url)
        config = load_config("t.toml", ONE_STEP)
        shown = CliRunner().invoke(cli.main, ["check", "t.toml", "--problems", "1"])
        assert shown.exit_code == 0, shown.output
        first = run_training(config, report=Notes())
        again = run_training(load_config("t.toml", [*ONE_STEP, "run.name=again"]), report=Notes())
    assert "judge.solver is asked\n  > user: There are 6 boxes" in shown.output
    assert "judge.solver answers\n  < " in shown.output and "judge.solver rewards   0.0" in shown.output
    lines = [line for line in lines_of(first.folder / "training_log.jsonl") if "reward" in line]
    assert len(lines) == 1
    for line in lines:
        judged = line["judge/solver/requests"] + line["judge/solver/cached"]
        assert judged == 8 and 0 <= line["judge/solver/failed"] < 8
        assert 0 <= line["rewards/judge.solver/mean"] < 1
        assert line["judge/solver/latency"] > 0 and line["judge/solver/tokens_out"] > 0
        assert line["judge/solver/cost"] == pytest.approx(line["judge/solver/tokens_out"] / 1e6)
    records = lines_of(first.folder / "completions.jsonl")
    assert any(record["rewards"]["judge.solver"] is not None for record in records)
    second = [line for line in lines_of(again.folder / "training_log.jsonl") if "reward" in line]
    assert [line["reward"] for line in second] == [line["reward"] for line in lines]
    assert all(line["judge/solver/requests"] <= line["judge/solver/failed"] for line in second)
    secrets = [
        path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()
    ]
    assert secrets == [] and (first.folder / "checkpoint-1").is_dir()
    assert json.loads((first.folder / "config.resolved.json").read_text())["judge"]["solver"]["api_key_env"]


def test_a_judge_that_stops_answering_ends_the_run_or_not():
    """As reward.on_error and reward.stop_if_all_fail say; the steps before are saved; prices may change at a
    resume, the criteria may not."""

    def twice(_, number):
        return "<answer>500" if number <= 2 else (400, {"error": "enough"})

    with answering(twice) as (url, _):
        config = write_config(url, retries=0)
        with pytest.raises(RewardError, match=r"judge\.solver.*enough.*it failed for every completion"):
            run_training(config, report=Notes())
    with answering(lambda *_: "<answer>500") as (url, _):
        changed = write_config(url, retries=0)
        with pytest.raises(UserError, match=r"judge\.solver\.url"):
            run_training(changed, report=Notes(), resume=True)
    with answering(lambda _, number: "<answer>1" if number % 2 else "hm") as (url, _):
        with pytest.raises(RewardError, match="an answer without a score"):
            run_training(write_config(url, reward={"on_error": "raise"}), report=Notes(), overwrite=True)
        shown = Notes()
        result = run_training(write_config(url, price_in=3.0, cache=False), report=shown, overwrite=True)
    assert result.updates == 2
    assert any("an answer without a score" in line for line in shown.lines)
    failed = [line.get("judge/solver/failed") for line in lines_of(result.folder / "training_log.jsonl")]
    assert any(failed)


def test_a_run_without_its_judge_does_not_begin():
    """Nothing listens there: one line before the data is read."""
    with pytest.raises(UserError, match=r"judge\.solver\.url: .* does not answer"):
        run_training(write_config(f"http://127.0.0.1:{free_port()}/v1"), report=Notes())


def test_an_evaluation_by_a_folders_config_asks_no_judge(tmp_path):
    """The folder may be a stranger's: its address gets nothing unless the config is named."""
    with answering(lambda *_: "<answer>5") as (url, asked):
        config = write_config(url, reward={"on_error": "skip"})
        run = run_training(config, report=Notes()).folder
        before = len(asked)
        recorded = run / "config.resolved.json"
        recorded.write_text(recorded.read_text() + "\n")  # nobody has trained with this one
        done = CliRunner().invoke(cli.main, ["eval", str(run), "--samples", "2"])
        assert done.exit_code == 0 and "rewards left out" in done.output, done.output
        named = ["--set", 'reward.functions=["judge.solver"]']
        done = CliRunner().invoke(cli.main, ["eval", str(run), "--samples", "2", *named])
        assert done.exit_code == 2 and "asks a judge" in done.output
        assert len(asked) == before
        done = CliRunner().invoke(cli.main, ["eval", str(run), "--samples", "2", "--config", "t.toml"])
        assert done.exit_code == 0 and "reward/judge.solver" in done.output, done.output
