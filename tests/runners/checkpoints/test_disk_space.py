"""Space on the disk: a run knows what it will write, and what to do where that does not fit."""

from types import SimpleNamespace

import pytest

from runners.errors import UserError
from runners.telemetry.report import Quiet
from runners.training import start
from runners.training.train import run_training
from tests.support.resuming import SHORT, Killer, config_in, outcome, straight_run
from tests.support.tiny_runs import Notes
from tests.support.tiny_states import same_bits


@pytest.fixture
def disk(monkeypatch):
    """A disk with `disk.free` bytes."""
    state = SimpleNamespace(free=10**12)
    monkeypatch.setattr(start.shutil, "disk_usage", lambda _: state)
    return state


def size_of(folder):
    """Bytes of its files."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_a_disk_without_room_for_the_final_model_is_noticed_before_training(tmp_path, disk):
    """One line with both sizes. A run that replaces another has the room of that one's files as well."""
    config = config_in(tmp_path / "a", *SHORT, "run.overwrite=true")
    final = run_training(config, report=Quiet()).folder / "final"
    disk.free = size_of(final) // 2
    with pytest.raises(UserError, match=r"run\.name: .*tiny: the final model takes .* free; make room, or"):
        run_training(config_in(tmp_path / "b", *SHORT), report=Quiet())
    assert not (tmp_path / "b" / "tiny" / "training_log.jsonl").exists()
    before = size_of(final)
    assert size_of(run_training(config, report=Quiet()).folder / "final") == before


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
