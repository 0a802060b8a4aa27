"""best/ contains the weights of the best evaluation, in the run's folder and in its checkpoints."""

import json
import os
import shutil
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from runners.checkpoints.run_list import summarize
from runners.commands.report import runs_command
from runners.errors import UserError
from runners.inference.inference_model import load_inference
from runners.machine.startup import Platform
from runners.telemetry.events import Finished
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.resuming import config_in, killed, lines_of, outcome

# The held-out reward, which differs between updates, determines the best evaluation.
REWARDED = ("answer.form=none", "eval.every=1", "eval.samples=8", "optim.learning_rate=3e-2")
SETTINGS = {"full": REWARDED, "lora": (*REWARDED, "model.tune=lora", "model.lora={rank=4}")}

FALLING = """
import itertools

steps = itertools.count()

def falling(completions, **_):
    level = 0.0 if next(steps) > 15 else 1.0
    return [level + len(set(completion[0]["content"])) / 100 for completion in completions]
"""


class Summary(Quiet):
    """Keeps the run's summary."""

    def handle(self, event):
        if isinstance(event, Finished):
            self.summary = dict(event.summary)


def best_of(folder):
    """The results of the best evaluation."""
    return json.loads((folder / "best" / "evaluation.json").read_text())


def highest(folder):
    """The first update with the highest held-out reward in the log, and all held-out rewards."""
    lines = lines_of(folder / "training_log.jsonl")
    rewards = {line["update"]: line["eval/reward"] for line in lines if "em_subset" in line}
    return max(rewards, key=rewards.__getitem__), rewards


@pytest.mark.parametrize("tune", SETTINGS)
def test_the_best_evaluation_s_weights_are_kept_and_load(tmp_path, tune):
    """best/ belongs to the best update of the log, the summary names both, and commands load it."""
    report = Summary()
    folder = run_training(config_in(tmp_path / "a", *SETTINGS[tune]), report=report).folder
    update, rewards = highest(folder)
    assert len({*rewards.values()}) > 1
    assert best_of(folder) == {"update": update, "eval/reward": rewards[update]}
    assert report.summary["model"] == str(folder / "final")
    assert report.summary["best model"] == f"{folder / 'best'} (of update {update})"
    assert (folder / "best" / "adapters.safetensors").is_file() == (tune == "lora")
    assert (folder / "best" / "model.safetensors").is_file() == (tune == "full")
    opened = load_inference(str(folder / "best"), platform=Platform(backend="cpu"))
    assert opened.path == (folder / "best" if tune == "full" else opened.path)
    assert (folder / "best" / "grpo_prompt.json").is_file()
    link = folder / "checkpoint-6" / "best"
    weights = next((folder / "best").glob("*.safetensors")).name
    assert os.path.samefile(link / weights, folder / "best" / weights)
    assert not os.path.samefile(link / "config.json", folder / "best" / "config.json")


@pytest.mark.parametrize("tune", SETTINGS)
@pytest.mark.parametrize("cut", [("sampling", 3), ("eval", 3), ("eval", 6), ("saving the final", 1)])
def test_a_resumed_run_has_the_same_best(tmp_path, tune, cut):
    """This holds wherever the run was interrupted, with a checkpoint every second step."""
    settings = (*SETTINGS[tune], "checkpoint.every=2", "run.seed=3")
    straight = run_training(config_in(tmp_path / "a", *settings), report=Quiet()).folder
    config = config_in(tmp_path / "b", *settings)
    killed(config, *cut)
    again = run_training(config, report=Quiet(), resume=True).folder
    assert outcome(again) == outcome(straight)
    assert best_of(again) == best_of(straight)


def test_an_earlier_checkpoint_brings_its_own_best(tmp_path):
    """A resumed run takes best/ from the checkpoint, because a later best would be wrong."""
    settings = (*REWARDED, "checkpoint.keep_last=0")
    folder = run_training(config_in(tmp_path / "a", *settings), report=Quiet()).folder
    _, rewards = highest(folder)
    for step in (1, 3, 5):
        known = {update: value for update, value in rewards.items() if update <= step}
        want = max(known, key=known.__getitem__)
        # the evaluation after a step comes before its checkpoint
        assert best_of(folder / f"checkpoint-{step}")["update"] == want
        branch = config_in(tmp_path / "a", *settings, f"run.name=b{step}", f"optim.max_steps={step}")
        found = run_training(
            branch, report=Quiet(), resume=folder / f"checkpoint-{step}", allow_config_change=True
        ).folder
        assert best_of(found)["update"] == want


def test_a_best_after_the_last_checkpoint_is_removed(tmp_path):
    """The resumed run repeats its update, possibly with another result."""
    late = (*REWARDED, "eval.at_start=false", "eval.every=4", "checkpoint.every=3")
    config = config_in(tmp_path / "a", *late)
    killed(config, "sampling", 5)
    folder = tmp_path / "a" / "tiny"
    assert best_of(folder)["update"] == 4 and not (folder / "checkpoint-3" / "best").exists()
    killed(config, "learning", 1, resume=True)
    assert not (folder / "best").exists()


def test_keep_best_0_writes_no_best(tmp_path):
    """The summary does not mention one either."""
    report = Summary()
    folder = run_training(
        config_in(tmp_path / "a", *REWARDED, "checkpoint.keep_best=0"), report=report
    ).folder
    assert not (folder / "best").exists() and "best model" not in report.summary


def test_a_best_that_cannot_be_written_is_reported(tmp_path, monkeypatch):
    """The run continues or stops, according to checkpoint.on_error."""

    def full(folder, *_, **__):
        if folder.name == "best":
            raise UserError(f"{folder}: cannot be written: No space left on device")
        return folder

    monkeypatch.setattr("runners.training.session.save_model", full)
    run_training(config_in(tmp_path / "a", *REWARDED, "optim.max_steps=2"), report=Quiet())
    stopping = config_in(tmp_path / "b", *REWARDED, "checkpoint.on_error=stop")
    with pytest.raises(UserError, match="best: cannot be written"):
        run_training(stopping, report=Quiet())


def test_a_disk_without_space_for_both_models_is_refused_before_training(tmp_path, monkeypatch):
    """The space depends on whether best/ is written, and on whether only adapters are trained."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    lines = set()
    for more in ((), ("checkpoint.keep_best=0",), ("model.tune=lora",)):
        with pytest.raises(
            UserError, match=r"run\.name: .*tiny: the final and the best model need .* free; free"
        ) as found:
            run_training(config_in(tmp_path / "a", *more), report=Quiet(), overwrite=True)
        lines.add(str(found.value))
    assert len(lines) == 3 and not (tmp_path / "a/tiny/training_log.jsonl").exists()


def test_a_decline_is_listed_with_the_run(tmp_path):
    """`grpo runs` shows the warning of the log's last line, if any."""
    (tmp_path / "config.resolved.json").write_text("{}")
    with open(tmp_path / "training_log.jsonl", "w", buffering=1) as log:
        log.write('{"update": 1, "reward": 0.5, "worse": "reward fell"}\n')
        assert summarize(tmp_path).worse == "reward fell"
        assert "  reward fell\n" in CliRunner().invoke(runs_command, [str(tmp_path)]).output
        log.write('{"update": 2, "reward": 0.6}\n')
        assert summarize(tmp_path).worse == ""


def test_a_run_whose_reward_falls_reports_it_and_ends(tmp_path):
    """The log, the events and `grpo runs` report it, and stop.patience ends the run."""
    (tmp_path / "falling.py").write_text(FALLING)
    more = ("eval.every=0", "eval.at_start=false", "checkpoint.every=0", "optim.num_epochs=9")
    falls = (f'reward.functions=["{tmp_path}/falling.py:falling"]', "stop.patience=3")
    config = config_in(tmp_path / "a", *more, *falls, "optim.max_steps=30")
    folder = run_training(config, report=Quiet()).folder
    log = lines_of(folder / "training_log.jsonl")
    (line,) = {record["worse"] for record in log if "worse" in record}
    assert log[-1]["update"] < 25 and "optim.learning_rate = 0.001 is the likeliest cause: try 0.0002" in line
    events = (folder / "events.jsonl").read_text()
    assert json.dumps(line)[1:-1] in events and "(stop.patience)" in events
    assert summarize(folder).worse == line
