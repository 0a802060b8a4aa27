"""system.swap_limit_gb: a run ends, saved, before the system swaps more than that."""

import pytest

from runners.errors import UserError
from runners.telemetry.report import Quiet
from runners.training import session
from runners.training.train import run_training
from tests.support.resuming import SHORT, config_in, outcome, straight_run
from tests.support.tiny_runs import Notes
from tests.support.tiny_states import same_bits


@pytest.mark.parametrize("limit", [0, 2.5, 9])
def test_a_run_whose_system_swaps_too_much_is_saved_and_goes_on_later(limit, tmp_path, monkeypatch):
    """What was swapped out before the run does not count; unknown swap is none."""
    readings = iter([5e9, 6e9, *[8e9] * 99])
    monkeypatch.setattr(session, "swap_used", lambda: next(readings))
    config, notes = (
        config_in(tmp_path / "a", *SHORT, "checkpoint.every=0", f"system.swap_limit_gb={limit}"),
        Notes(),
    )
    if limit != 2.5:
        run_training(config, report=notes)
        return
    with pytest.raises(UserError, match=r"system\.swap_limit_gb: the system has swapped out 3\.00 GB"):
        run_training(config, report=notes)
    assert any(line.startswith("stopped before the system swaps more: saved") for line in notes.lines)
    monkeypatch.setattr(session, "swap_used", lambda: None)
    resumed = run_training(config, report=Quiet(), resume=True)
    straight = straight_run(*SHORT, "checkpoint.every=0")
    assert same_bits(resumed.state, straight.state) and outcome(resumed.folder) == outcome(straight.folder)
