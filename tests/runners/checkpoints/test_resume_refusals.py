"""What a resume does not take as it is: damage, another config, other data, a folder in use."""

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
    """A short run from beginning to end: its folder and result."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    return run_training(config_in(folder, *SHORT), report=Quiet())


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of that run, which a test may damage; the config that made it."""
    source = finished.folder.parent.parent
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)

    def config(*overrides):
        # Rewards are named by their path: that of the first folder.
        return config_in(source / "run", *SHORT, f"run.output_dir={tmp_path / 'run'}", *overrides)

    config.folder = tmp_path / "run" / "tiny"
    return config


def name_more(folder, name):
    """One more name in the manifest's own table."""
    content = json.loads((folder / MANIFEST).read_text())
    content["files"][name] = {"sha256": digest(folder.parent / "training_log.jsonl")}
    (folder / MANIFEST).write_text(json.dumps(content))


def cut(file):
    """A file that lost its end."""
    file.write_bytes(file.read_bytes()[:-100])


def flip(file):
    """A file with one bit turned, its size as it was."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def link(file):
    """A link to the same content elsewhere."""
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
def test_a_damaged_checkpoint_is_named_and_passed_over(copy, name):
    """The one before is taken; the damaged one, asked for by its name, is refused.

    No name in a manifest leads out of its folder.
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


def test_a_damaged_state_behind_a_right_manifest_is_refused(copy):
    """A stranger may write a manifest too: what it vouches for is checked all the same."""
    folder = copy.folder / "checkpoint-3"
    whole = json.loads((folder / "trainer_state.json").read_text())
    for changes, line in (
        # No damage: going on from the checkpoint before would lose this one.
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


def test_a_folder_that_holds_a_run_is_not_begun_anew(copy):
    """Refused, with the ways on; with run.overwrite old checkpoints go and the old log stays beside."""
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
    """run.overwrite, as in the quickstart, replaces a finished run; an interrupted one asks how to go on."""
    config, folder = config_in(tmp_path / "b", *SHORT, "run.overwrite=true"), tmp_path / "b" / "tiny"
    killed(config, "sampling", 3)
    before = sorted(folder.rglob("*"))
    with pytest.raises(
        UserError, match=r"tiny already contains an interrupted run \(checkpoint-2\); --resume"
    ):
        run_training(config, report=Quiet())
    assert sorted(folder.rglob("*")) == before
    result = run_training(config, report=Quiet(), resume=True)
    assert run_training(config, report=Quiet()).updates == result.updates  # it has finished: it is replaced
    # A finished run that was gone on with and interrupted is an interrupted one.
    longer = config_in(tmp_path / "b", *SHORT, "run.overwrite=true", "optim.max_steps=5")
    killed(longer, "sampling", 2, resume=True, allow_config_change=True)
    with pytest.raises(UserError, match=r"an interrupted run \(checkpoint-4\)"):
        run_training(config, report=Quiet())
    run_training(config, report=Quiet(), overwrite=True)


def test_what_does_not_change_the_weights_may_differ(copy, finished):
    """Logging and saving: shown in a line, and gone on with, to the same weights."""
    notes = Notes()
    changes = ["log.every=2", "checkpoint.every=0", "eval.every=1"]
    shutil.rmtree(copy.folder / "checkpoint-3")
    result = run_training(copy(*changes), report=notes, resume=True)
    (line,) = [line for line in notes.lines if "the config differs from" in line]
    assert "checkpoint-2: checkpoint.every (was 1, is 0), eval.every (was 0, is 1), log.every (was" in line
    assert same_bits(result.state, finished.state)


def test_what_changes_the_weights_has_to_be_allowed(copy, finished):
    """Named with both values; --allow-config-change goes on, and not to the same weights."""
    change = "optim.learning_rate=5e-3"
    shutil.rmtree(copy.folder / "checkpoint-3")
    notes = Notes()
    with pytest.raises(UserError, match=r"optim\.learning_rate \(was 0\.001, is 0\.005\); --allow-config"):
        run_training(copy(change), report=notes, resume=True)
    assert not notes.lines  # the error says it all
    result = run_training(copy(change), report=Quiet(), resume=True, allow_config_change=True)
    assert result.updates == 3 and not same_bits(result.state, finished.state)
    with pytest.raises(UserError, match="belongs to a different model or"):
        run_training(copy("model.tune=lora"), report=Quiet(), resume=True, allow_config_change=True)


def test_an_older_checkpoint_by_name_begins_a_new_branch(copy, finished, tmp_path):
    """In its own folder the later ones are put aside and the log is cut; elsewhere a new log begins."""
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
    """A live owner is named by its number; after SIGKILL its folder is free at once."""
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


def test_whoever_asks_whether_a_run_is_going_keeps_none_from_starting(tmp_path, monkeypatch):
    """It shares the lock for an instant. A file system without locks is named."""
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


def test_a_resumed_run_takes_over_what_was_decided(tmp_path, monkeypatch):
    """Rows that fit into memory, and how steps are launched, as the first process found them."""
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
