"""Runs of models with experts: their load in the log, the loss that evens it, and what is refused."""

import json

import pytest

from runners.config.loading import load_config
from runners.errors import UserError
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import BY_LETTERS, LETTERS, small

NAMES = {"experts/max_load", "experts/unused", "experts/balance"}


def run(folder, arch, *overrides, reward=LETTERS):
    """The log of a run of two updates of a random model."""
    model = make_model_folder(folder / arch, arch=arch)
    (folder / "letters.py").write_text(reward)
    config = folder / "small.toml"
    settings = {"output_dir": str(folder), "name": "run"}
    config.write_text(small(model={"path": str(model)}, reward=BY_LETTERS, run=settings))
    run_training(load_config(str(config), ["system.compile=false", *overrides]), report=Quiet())
    lines = [json.loads(line) for line in (folder / "run" / "training_log.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("loss") is not None]


@pytest.mark.parametrize("coef", [0.0, 0.01])
def test_the_load_is_logged(tmp_path, coef):
    """With the loss and without: an even load is 1, no expert can have more than all of the tokens."""
    lines = run(tmp_path, "mixtral", f"loss.router_aux_coef={coef}")
    assert len(lines) == 2
    for line in lines:
        assert set(line) >= NAMES
        assert line["experts/max_load"] >= 1 and 0 <= line["experts/unused"] < 1
        assert 0.5 < line["experts/balance"] < 4


def test_where_no_token_counts_nothing_is_measured(tmp_path):
    """All completions are cut off and masked: no load of 0, as if a router had collapsed."""
    lines = run(tmp_path, "mixtral", "loss.mask_truncated_completions=true", "rollout.stop=[]")
    assert lines and not any(NAMES & set(line) for line in lines)


@pytest.mark.parametrize(
    ("arch", "more", "message"),
    [
        ("llama", "", "llama has no experts .*; expected 0"),
        ("mixtral", "system.grad_checkpoint=true", "checkpointed blocks do not"),
        (
            "mixtral",
            "system.share_prompts=always",
            'system.share_prompts: .*found "always": .*loss.router_aux_coef',
        ),
    ],
)
def test_what_a_model_cannot_do_is_refused(tmp_path, arch, more, message):
    """Before the first rollout, in a line that names the key."""
    with pytest.raises(UserError, match=message):
        run(tmp_path, arch, "loss.router_aux_coef=0.01", *filter(None, [more]))
