"""What a resume refuses: damaged files, a different config, and a folder in use."""

import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import threading

import mlx.core as mx
import pytest

from runners.checkpoints.manifest import MANIFEST, digest, write_manifest
from runners.checkpoints.resume import find_origin
from runners.checkpoints.run_folder import locked
from runners.errors import UserError
from runners.report.run_record import is_running
from runners.telemetry.report import Quiet
from runners.training import setup
from runners.training.train import run_training
from tests.support.resuming import SHORT, config_in, killed, lines_of, outcome
from tests.support.tiny_runs import Notes
from tests.support.tiny_states import same_bits


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The result of a short complete run."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    return run_training(config_in(folder, *SHORT), report=Quiet())


@pytest.fixture
def copy(finished, tmp_path):
    """Makes the config of a copy of that run, which a test may damage."""
    source = finished.folder.parent.parent
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)

    def config(*overrides):
        # The path of the rewards, which is part of the config, is in the first folder.
        return config_in(source / "run", *SHORT, f"run.output_dir={tmp_path / 'run'}", *overrides)

    config.folder = tmp_path / "run" / "tiny"
    return config


def name_more(folder, name):
    """Adds a name to the manifest."""
    content = json.loads((folder / MANIFEST).read_text())
    content["files"][name] = {"sha256": digest(folder.parent / "training_log.jsonl")}
    (folder / MANIFEST).write_text(json.dumps(content))


def cut(file):
    """Removes the end of a file."""
    file.write_bytes(file.read_bytes()[:-100])


def flip(file):
    """Flips one bit of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def link(file):
    """Replaces a file by a link to its content elsewhere."""
    elsewhere = file.parent.parent / "elsewhere"
    shutil.move(file, elsewhere)
    file.symlink_to(elsewhere)


DAMAGE = {
    "a turned bit": (lambda f: flip(f / "model.safetensors"), "model.safetensors: its content has changed"),
    "a missing file": (lambda f: (f / "tokenizer.json").unlink(), 'expected a file "tokenizer.json" in'),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "manifest.json: cannot be read as JSON"),
    "half a manifest": (lambda f: cut(f / MANIFEST), "manifest.json: cannot be read as JSON"),
    "a linked file": (lambda f: link(f / "model.safetensors"), 'a file "model.safetensors" in .* a link'),
    "no table": (lambda f: (f / MANIFEST).write_text('{"files": []}'), "the list of files is damaged"),
    "a parent": (lambda f: name_more(f, "../training_log.jsonl"), "found none or a link"),
    "a path": (lambda f: name_more(f, str(f.parent / "training_log.jsonl")), "found none or a link"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_skipped(copy, name):
    """The previous checkpoint is used; the damaged one is refused if it is requested by name.

    Names in a manifest cannot lead out of its folder.
    """
    damage, line = DAMAGE[name]
    damage(copy.folder / "checkpoint-3")
    notes = []
    origin = find_origin(copy.folder, None, notes.append)
    assert origin is not None and origin.folder.name == "checkpoint-2"
    (passed,) = notes
    assert re.search(line, passed) and passed.endswith("checkpoint-3 is skipped")
    with pytest.raises(UserError, match=line):
        find_origin(copy.folder, copy.folder / "checkpoint-3", notes.append)


def test_an_invalid_state_with_a_valid_manifest_is_refused(copy):
    """The content is checked too, because anyone can write a manifest."""
    folder = copy.folder / "checkpoint-3"
    whole = json.loads((folder / "trainer_state.json").read_text())
    for changes, line in (
        # This is no damage: resuming from the previous checkpoint would lose this one.
        (
            {"version": 5},
            r"trainer_state\.json: expected version 7, found 5: it was saved by a different version",
        ),
        ({"loop": {}}, "loop: batch_step is missing"),
        ({"loop": {**whole["loop"], "update": "three"}}, 'loop: update: expected an integer, found "three"'),
        ({"loop": {**whole["loop"], "bad_updates": -1}}, "bad_updates: expected an integer: 0 <= x"),
        ({"loop": {**whole["loop"], "seen": {"reached": None}}}, "counts is missing"),
        ({"logs": []}, r"logs: expected a table, found \[\]"),
        ({"logs": {"training_log.jsonl": 10**30}}, r"logs: expected a table .*each: 0 <= x <= 1e18"),
        ({"decided": {"launch": "x", "max_batch": 1}}, "decided: launch: expected one of "),
    ):
        (folder / "trainer_state.json").write_text(json.dumps({**whole, **changes}))
        write_manifest(folder)
        with pytest.raises(UserError, match=line):
            run_training(copy(), report=Quiet(), resume=True)


def test_a_folder_with_a_run_is_not_replaced_unasked(copy):
    """The error names the options; run.overwrite removes old checkpoints and keeps the old log."""
    with pytest.raises(UserError, match=r"tiny already contains a run \(training_log\.jsonl\); --resume"):
        run_training(copy(), report=Quiet())
    old = (copy.folder / "training_log.jsonl").read_bytes()
    run_training(copy("run.overwrite=true", "optim.max_steps=1", "checkpoint.every=0"), report=Quiet())
    names = {path.name for path in copy.folder.iterdir()}
    assert not [name for name in names if name.startswith("checkpoint")]
    assert (copy.folder / "training_log.previous.jsonl").read_bytes() == old
    with pytest.raises(UserError, match="contains a finished run without checkpoints"):
        run_training(copy(), report=Quiet(), resume=True)


def test_an_interrupted_run_is_never_removed_unasked(tmp_path):
    """run.overwrite, as in the quickstart, only replaces a finished run."""
    config, folder = config_in(tmp_path / "b", *SHORT, "run.overwrite=true"), tmp_path / "b" / "tiny"
    killed(config, "sampling", 3)
    before = sorted(folder.rglob("*"))
    with pytest.raises(
        UserError, match=r"tiny already contains an interrupted run \(checkpoint-2\); --resume"
    ):
        run_training(config, report=Quiet())
    assert sorted(folder.rglob("*")) == before
    result = run_training(config, report=Quiet(), resume=True)
    assert run_training(config, report=Quiet()).updates == result.updates  # a finished run is replaced
    # A finished run that was continued and interrupted counts as interrupted.
    longer = config_in(tmp_path / "b", *SHORT, "run.overwrite=true", "optim.max_steps=5")
    killed(longer, "sampling", 2, resume=True, allow_config_change=True)
    with pytest.raises(UserError, match=r"an interrupted run \(checkpoint-4\)"):
        run_training(config, report=Quiet())
    run_training(config, report=Quiet(), overwrite=True)


def test_harmless_keys_may_differ(copy, finished):
    """Changes in logging and saving are reported, and the weights are the same."""
    notes = Notes()
    changes = ["log.every=2", "checkpoint.every=0", "eval.every=1"]
    shutil.rmtree(copy.folder / "checkpoint-3")
    result = run_training(copy(*changes), report=notes, resume=True)
    (line,) = [line for line in notes.lines if "the config differs from" in line]
    assert "checkpoint-2: checkpoint.every (was 1, is 0), eval.every (was 0, is 1), log.every (was" in line
    assert same_bits(result.state, finished.state)


def test_changes_that_affect_the_weights_must_be_allowed(copy, finished):
    """The error contains both values; --allow-config-change continues, with different weights."""
    change = "optim.learning_rate=5e-3"
    shutil.rmtree(copy.folder / "checkpoint-3")
    notes = Notes()
    with pytest.raises(UserError, match=r"optim\.learning_rate \(was 0\.001, is 0\.005\); --allow-config"):
        run_training(copy(change), report=notes, resume=True)
    assert not notes.lines  # the error is the only message
    result = run_training(copy(change), report=Quiet(), resume=True, allow_config_change=True)
    assert result.updates == 3 and not same_bits(result.state, finished.state)
    with pytest.raises(UserError, match="belongs to a different model or"):
        run_training(copy("model.tune=lora"), report=Quiet(), resume=True, allow_config_change=True)


def test_a_changed_quantization_of_the_sampler_takes_effect(copy):
    """The checkpoint's format, here none, is not one that the new config can build."""
    shutil.rmtree(copy.folder / "checkpoint-3")
    config = copy("rollout.quantization=affine-8", "loss.correction=token_truncate")
    result = run_training(config, report=Quiet(), resume=True, allow_config_change=True)
    assert result.updates == 3


def test_resuming_from_an_older_checkpoint_starts_a_branch(copy, finished, tmp_path):
    """In the same folder, later checkpoints are renamed and the log is cut; elsewhere, a new log starts."""
    config = copy(f"run.output_dir={tmp_path / 'other'}")
    result = run_training(config, report=Quiet(), resume=copy.folder / "checkpoint-1")
    assert same_bits(result.state, finished.state)
    assert [line["update"] for line in lines_of(result.folder / "training_log.jsonl")] == [2, 3, 3]
    config = copy("checkpoint.every=0")
    result = run_training(config, report=Quiet(), resume=copy.folder / "checkpoint-1")
    assert same_bits(result.state, finished.state) and outcome(result.folder) == outcome(finished.folder)
    names = {path.name for path in copy.folder.iterdir() if path.name.startswith("checkpoint")}
    assert names == {"checkpoint-1", "checkpoint-2.aside", "checkpoint-3.aside"}


HOLDS = """
import sys, time
from pathlib import Path
from runners.checkpoints.run_folder import locked
with locked(Path(sys.argv[1]), "run.name"):
    print("ready", flush=True)
    time.sleep(600)
"""


def test_a_folder_in_use_is_locked_and_a_dead_process_is_not(copy):
    """The error contains the owner's process id; after SIGKILL, the folder is free immediately."""
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(copy.folder)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == "ready\n"
        with pytest.raises(UserError, match=f"tiny is in use by process {other.pid}"):
            run_training(copy("run.overwrite=true"), report=Quiet())
    finally:
        other.kill()
        other.communicate()
    run_training(copy(), report=Quiet(), resume=True)


def test_checking_for_a_running_process_does_not_block_a_start(tmp_path, monkeypatch):
    """The check holds a shared lock for an instant. A file system without locks is reported."""
    with locked(tmp_path, "run.name"):
        assert is_running(tmp_path)
    assert not is_running(tmp_path)
    with open(tmp_path / ".lock") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        threading.Timer(0.1, fcntl.flock, [asking, fcntl.LOCK_UN]).start()
        with locked(tmp_path, "run.name"):
            assert is_running(tmp_path)

    def refuses(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuses)
    with (
        pytest.raises(UserError, match=f"{tmp_path} cannot be locked: No locks"),
        locked(tmp_path, "run.name"),
    ):
        pass


def test_a_resumed_run_keeps_earlier_decisions(tmp_path, monkeypatch):
    """It keeps max_batch and launch as the first process determined them."""
    config, real = config_in(tmp_path / "b", *SHORT, "rollout.launch=auto"), setup.memory_outlook

    def decide(launch, rows):
        def outlook(config, *more):
            config, *notes = real(config, *more)
            return config.having("rollout", max_batch=rows), *notes

        monkeypatch.setattr(setup, "usual_launch", lambda platform: launch)
        monkeypatch.setattr(setup, "memory_outlook", outlook)

    decide("eval", 4)
    killed(config, "sampling", 3)
    decide("async", 8)
    result = run_training(config, report=Quiet(), resume=True)
    resolved = json.loads((result.folder / "config.resolved.json").read_text())["rollout"]
    assert (resolved["launch"], resolved["max_batch"]) == ("eval", 4)
    assert mx.array_equal(result.state.step, mx.array(3))
