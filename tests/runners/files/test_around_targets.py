"""Files next to the targets of convert, export and runs are untouched; full disks leave no partial target."""

import os
import resource

import pytest

from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.commands import grpo
from tests.support.files.decoys import look, plant
from tests.support.resuming import SHORT, config_in, outcome, straight_run
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import train


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The commands that convert a model, and export full weights or adapters."""
    folder = tmp_path_factory.mktemp("sources")
    return {
        "convert": ["convert", str(make_model_folder(folder / "model", dtype="bfloat16")), "--out"],
        "export": ["export", str(train(folder, "full", "full")), "--out"],
        "fuse": ["export", str(train(folder, "lora", "lora") / "checkpoint-2"), "--out"],
    }


@pytest.mark.parametrize("command", ["convert", "export"])
def test_files_of_the_users_beside_a_new_model_are_untouched(sources, tmp_path, command):
    """The target is new, refused, failing or replaced; the names of the other files are close to its own."""
    folder = tmp_path / "models"
    decoys = plant(folder, "out")
    before = look(decoys)
    grpo(*sources[command], folder / "out")
    grpo(*sources[command], folder / "out", code=2)
    bad = ["--force", "--bits", "2", "--group-size", "128"]  # no layer is as wide
    assert "nothing was quantized" in grpo(*sources[command], folder / "out", *bad, code=2).stderr
    grpo(*sources[command], folder / "out", "--force")
    assert look(decoys) == before
    inside = {path.name for path in folder.iterdir()} - {path.name for path in decoys}
    assert inside == {"out"}


def test_files_of_the_users_in_and_beside_a_runs_folder_are_untouched(tmp_path):
    """A run trains, resumes from a checkpoint, and starts over."""
    beside = plant(tmp_path / "out", "tiny")
    inside = plant(tmp_path / "out" / "tiny", "checkpoint-2")
    before = look(beside) | look(inside)
    straight = straight_run(*SHORT).folder
    for resume, overwrite in ((False, "false"), (True, "false"), (False, "true")):
        config = config_in(tmp_path / "out", *SHORT, f"run.overwrite={overwrite}")
        result = run_training(config, report=Quiet(), resume=resume)
        assert outcome(result.folder)["final"] == outcome(straight)["final"]
        assert look(beside) | look(inside) == before


@pytest.mark.parametrize("command", ["convert", "export", "fuse"])
@pytest.mark.parametrize("limit", [0, 100, 10_000, 50_000])
def test_a_disk_that_refuses_is_one_line_and_leaves_the_target_as_it_was(sources, tmp_path, command, limit):
    """With RLIMIT_FSIZE, the kernel refuses a write within a file, as on a full disk; the code is 2."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        result = grpo(*sources[command], tmp_path / "out", "--force", code=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("[INFO]")]
    assert line == f"{tmp_path / 'out'}: cannot be written: File too large"
    assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == ["old"]
