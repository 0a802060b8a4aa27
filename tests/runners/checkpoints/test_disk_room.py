"""Room on the disk: how much a run will write, and what it does where that does not fit."""

import shutil
import signal
from types import SimpleNamespace

import pytest

from runners.checkpoints import disk_room
from runners.checkpoints.disk_room import DiskRoom
from runners.checkpoints.snapshot import list_checkpoints
from runners.config.loading import load_config
from runners.errors import UserError
from runners.machine.signals import Stopped
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.resuming import SHORT, Killer, config_in, outcome, straight_run
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import BY_LETTERS, LETTERS, Notes, small
from tests.support.tiny_states import same_bits


@pytest.fixture
def disk(monkeypatch):
    """A disk whose free bytes are `disk.free`, or what the function `disk.free` says."""
    state = SimpleNamespace(free=10**12)

    def usage(path):
        return SimpleNamespace(free=state.free() if callable(state.free) else state.free)

    monkeypatch.setattr(disk_room, "shutil", SimpleNamespace(disk_usage=usage))
    return state


def size_of(folder):
    """Bytes of its files."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    ("model", "overrides", "exact"),
    [
        ({}, [], True),
        ({"dtype": "bfloat16"}, ["loss.beta=0.1"], True),
        ({}, ["model.tune=lora", "model.lora={rank=4}"], True),
        ({"dtype": "bfloat16"}, ["model.tune=dora", "model.lora={rank=4}"], True),
        ({"quantize": {"group_size": 32, "bits": 4}}, ["model.tune=lora", "model.lora={rank=4}"], False),
    ],
)
def test_what_a_run_writes_is_known_before(tmp_path, monkeypatch, model, overrides, exact):
    """The size of final/, to 60 kB of small files; at most where adapters are merged."""
    found = []
    monkeypatch.setattr(DiskRoom, "check_start", lambda self, *_, **__: found.append(self))
    (tmp_path / "letters.py").write_text(LETTERS)
    (tmp_path / "train.toml").write_text(
        small(
            run={"output_dir": str(tmp_path / "out")},
            model={"path": str(make_model_folder(tmp_path / "base", vocab_size=8000, **model))},
            reward=BY_LETTERS,
            checkpoint={"every": 2},
        )
    )
    folder = run_training(load_config(str(tmp_path / "train.toml"), overrides), report=Quiet()).folder
    room, final = found[0], size_of(folder / "final")
    assert final - 60_000 < room.final < (final + 60_000 if exact else 2 * final)
    assert final > 120_000


def test_a_disk_without_room_for_the_final_model_is_noticed_before_training(tmp_path, disk):
    """One line with both sizes; what an earlier run left is still there, and counts as room where it goes."""
    config = config_in(tmp_path / "a", *SHORT, "run.overwrite=true")
    finished = run_training(config, report=Quiet())
    before = outcome(finished.folder)
    old = size_of(finished.folder / "final") + sum(map(size_of, list_checkpoints(finished.folder)))
    final = size_of(finished.folder / "final")
    disk.free = 0.6 * final - old
    with pytest.raises(UserError, match=r"run\.name: .*tiny: the final model takes .* free; make room, or"):
        run_training(config, report=Quiet())
    assert outcome(finished.folder) == before
    disk.free = 0.6 * final
    assert run_training(config, report=Quiet()).updates == 3  # the old one's room is enough


def test_a_checkpoint_does_not_take_the_final_models_room(tmp_path, disk):
    """Lines for those that are not written; the final model is, and the result is the same."""
    straight = straight_run(*SHORT)
    disk.free = 1.5 * size_of(straight.folder / "final")
    notes = Notes()
    result = run_training(config_in(tmp_path / "b", *SHORT), report=notes)
    assert same_bits(result.state, straight.state) and outcome(result.folder) == outcome(straight.folder)
    assert list_checkpoints(result.folder) == []
    refused = [line for line in notes.lines if "is not saved" in line]
    assert len(refused) == 3 and "checkpoint-1 is not saved: it takes " in refused[0]
    assert "and the final model " in refused[0] and "goes on" in refused[0]


class Asked(Killer):
    """Sends this process SIGINT instead of ending it."""

    def _tick(self, what):
        if what.startswith(self.what):
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)


def test_the_last_checkpoint_of_a_stopped_run_may_take_that_room(tmp_path, disk):
    """Without it the training so far would be lost; one of a run that goes on is refused."""
    finished = straight_run(*SHORT).folder
    disk.free = size_of(finished / "checkpoint-1") + 0.5 * size_of(finished / "final")
    notes = Notes()
    run_training(config_in(tmp_path / "b", *SHORT), report=notes)
    assert sum("is not saved" in line for line in notes.lines) == 3
    config = config_in(tmp_path / "c", *SHORT, "checkpoint.every=0")
    with pytest.raises(Stopped):
        run_training(config, report=Asked("step", 1))
    assert [path.name for path in list_checkpoints(tmp_path / "c" / "tiny")] == ["checkpoint-1"]


def test_where_the_final_model_cannot_be_written_the_training_is_saved(tmp_path, monkeypatch):
    """Another program filled the disk: a resumed run, with room again, has only the model left to write."""
    settings = [*SHORT, "checkpoint.every=0"]
    straight = straight_run(*settings)
    config, notes = config_in(tmp_path / "b", *settings), Notes()

    def full(*_, **__):
        raise UserError("final: cannot be written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("runners.training.session.save_final", full)
        with pytest.raises(UserError, match="No space left"):
            run_training(config, report=notes)
    assert any(line.startswith("the final model could not be saved, but") for line in notes.lines)
    resumed = run_training(config, report=Killer("sampling", 1), resume=True)
    assert same_bits(resumed.state, straight.state)
    assert outcome(resumed.folder) == outcome(straight.folder)


def test_a_file_system_that_does_not_say_is_no_fault(tmp_path, monkeypatch):
    """Writing will tell."""

    def refuse(path):
        raise OSError("not supported")

    monkeypatch.setattr(shutil, "disk_usage", refuse)
    assert run_training(config_in(tmp_path / "a", *SHORT), report=Quiet()).updates == 3
