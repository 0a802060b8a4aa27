"""A signal stops a run at each of its stages: soon, saved once, with a message on how to continue."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runners.checkpoints.run_folder import checkpoint_folders
from tests.support.processes.new_process import python
from tests.support.processes.waiting import wait_until
from tests.support.resuming import LETTERS, TINY, _model, outcome
from tests.support.tiny_runs import PROBLEMS

ROOT = Path(__file__).resolve().parents[2]
LONG = 600.0  # seconds in a stage: a run that is not interrupted does not end
SHORT = 0.7  # in one that is not interrupted, because it ends soon
PACE = [
    "optim.max_steps=3",
    "eval.at_start=true",
    "checkpoint.every=2",
    "log.report=true",
    "answer.form=exact",
]
EVALUATION = "runners.training.evaluation:evaluate_on_ranks"
STAGES = {
    # name: function, its call, seconds in it, batch steps that are saved then
    "the config": ("runners.config.loading:load_config", 1, LONG, 0),
    "the model's load": ("runners.training.setup:load_model", 1, LONG, 0),
    "the evaluation before training": (EVALUATION, 1, LONG, 0),
    "the first rollout": ("grpo_fn.policy.policy:Policy.sampling", 3, LONG, 0),
    "a rollout": ("runners.training.rollout:Collector.collect", 2, LONG, 1),
    "a reward's answer": ("runners.user_code.worker:Calls.collect", 3, LONG, 1),
    "the commit to a step": ("runners.training.train:log_batch_step", 2, SHORT, 2),
    "the learner": ("runners.training.gradients:MicroBatches.gradients", 1, LONG, 2),
    "the writing of a checkpoint": ("runners.training.session:write_checkpoint", 1, SHORT, 2),
    "the evaluation at the end": (EVALUATION, 3, LONG, 3),
    "the final model": ("runners.training.session:save_model", 2, LONG, 3),  # after the best one
}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CASES = [(name, SIGNALS[number % 3]) for number, name in enumerate(STAGES)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a config of three batch steps, two per update, and its undisturbed run."""
    folder = tmp_path_factory.mktemp("stops")
    (folder / "letters.py").write_text(LETTERS)
    (folder / "straight-stage").mkdir()
    text = TINY.replace("{folder}", str(folder)).replace("{model}", str(_model()))
    (folder / "train.toml").write_text(text.replace("{problems}", str(PROBLEMS)))
    subprocess.run(command(folder, "straight"), cwd=ROOT, env=environment(folder, "straight"), check=True)
    return folder


def command(folder, name, *hook):
    """`grpo-run` with the settings of these runs."""
    settings = [f"run.output_dir={folder / name}", *PACE, "optim.gradient_accumulation_steps=2"]
    settings += ["system.micro_batch_tokens=64", "eval.every=1", "run.name=tiny"]
    words = [word for setting in settings for word in ("--set", setting)]
    program = ["-m", "tests.support.ranks.rank_process", str(folder / f"{name}-stage"), *hook, "--"]
    return [sys.executable, *program, str(folder / "train.toml"), *words]


def environment(folder, name):
    """A separate cache, so that the tokenizer is checked again."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "GRPO_FN_CACHE": str(folder / f"{name}-cache")}


@pytest.mark.parametrize(("stage", "number"), CASES, ids=[f"{n}-{s.name}" for n, s in CASES])
def test_a_signal_in(place, stage, number, request):
    """The exit code is 128 + the signal, the last step is saved once, and the resumed run is equal."""
    target, call, seconds, steps = STAGES[stage]
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    stage_folder = place / f"{name}-stage"
    stage_folder.mkdir()
    words = command(place, name, "linger", "0", target, str(call), str(seconds))
    with open(place / f"{name}.out", "w+") as out:
        options = {"stdout": out, "stderr": subprocess.STDOUT, "cwd": ROOT}
        process = subprocess.Popen(words, env=environment(place, name), **options)
        wait_until((stage_folder / "0.there").exists, process)
        started = time.monotonic()
        process.send_signal(number)
        process.wait(120)
        took = time.monotonic() - started
        out.seek(0)
        lines = [line for line in out.read().splitlines() if line]
    shown = "\n".join(lines)
    assert process.returncode == 128 + number, shown
    assert "Traceback" not in shown and took < 60, shown
    folder = place / name / "tiny"
    begun = steps > 0 or stage == "the first rollout"  # which an evaluation precedes
    assert sum("saved " in line for line in lines) == begun + (steps > 2), shown
    assert max(checkpoint_folders(folder), default=0) == steps, shown
    said, _, again = lines[-1].partition("grpo-run ")
    assert said.startswith("to continue: ") and lines[-2] == "interrupted", shown
    again = ["-m", "runners.cli", "run", *shlex.split(again)]
    python(*again, GRPO_FN_CACHE=place / f"{name}-cache")
    assert outcome(folder) == outcome(place / "straight/tiny")
