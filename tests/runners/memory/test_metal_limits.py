"""MLX's limits on Metal, with stand-ins for the device: what is set, said and restored."""

import mlx.core as mx
import pytest

from runners.memory.forecast import Phase
from runners.memory.metal_limits import keep_cache_of, metal_limits
from runners.telemetry.report import Quiet
from runners.training import session, train
from runners.training.plan import plan_of
from tests.support.resuming import SHORT, config_in

GB = 10**9
PHASES = {"rollout": Phase(1 * GB, 0, 2 * GB, 3 * GB), "gradient": Phase(1 * GB, 1 * GB, 8 * GB)}


@pytest.fixture
def device(monkeypatch):
    """A Mac with 16 GB, of which the GPU may keep 12: its limits, as they are set."""
    limits = {"wired": [0], "cache": [24 * GB]}

    def setting(name):
        def set_limit(nbytes):
            assert name != "wired" or nbytes <= 12 * GB, "MLX refuses more"
            limits[name].append(nbytes)
            return limits[name][-2]

        return set_limit

    info = {"max_recommended_working_set_size": 12 * GB, "memory_size": 16 * GB}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "set_wired_limit", setting("wired"))
    monkeypatch.setattr(mx, "set_cache_limit", setting("cache"))
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    return limits


@pytest.mark.parametrize(
    ("phases", "resident", "said"),
    [
        (PHASES, 11 * GB, ""),  # a tenth more than the peak
        ({}, 12 * GB, ""),  # no forecast: all that is allowed
        ({"gradient": Phase(0, 0, 13 * GB)}, 12 * GB, "`sudo sysctl iogpu.wired_limit_mb=13638`"),
        ({"gradient": Phase(0, 0, 14 * GB)}, 12 * GB, "it becomes slow once macOS swaps"),
    ],
)  # fmt: skip
def test_what_the_run_needs_stays_resident(phases, resident, said, device):
    """As far as macOS allows; the line has a command only if the machine's memory is enough."""
    notes = []
    with pytest.raises(KeyError), metal_limits("metal", phases, notes.append):
        assert device["wired"][-1] == resident
        raise KeyError
    assert device["wired"][-1] == 0 and device["cache"][-1] == 24 * GB
    assert len(notes) == bool(said) and all(said in note for note in notes)
    assert all(("sysctl" in said) == ("sysctl" in note) for note in notes)


def test_only_metal_has_these_limits(device):
    """Elsewhere nothing is set."""
    with metal_limits("cuda", PHASES, print):
        assert device == {"wired": [0], "cache": [24 * GB]}


def test_freed_memory_is_kept_for_the_phase_that_begins(device, monkeypatch):
    """What it computes with, and half a gigabyte at least; without a forecast MLX's own limit stays."""
    for phase in (PHASES["rollout"], PHASES["gradient"], Phase(9 * GB, 0), None):
        keep_cache_of(phase)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    keep_cache_of(PHASES["rollout"])
    assert device["cache"][1:] == [5 * GB, 8 * GB, 2**29]


def test_a_run_sets_them_by_its_forecast(device, tmp_path, monkeypatch):
    """Its peak stays resident while it runs; each phase says what it needs when it begins."""
    begun = []
    monkeypatch.setattr(session, "keep_cache_of", begun.append)
    monkeypatch.setattr(train, "metal_limits", lambda _, *more: metal_limits("metal", *more))
    runs = []
    monkeypatch.setattr(session, "plan_of", lambda run, shown: runs.append(run) or plan_of(run, shown))
    train.run_training(config_in(tmp_path / "a", *SHORT, "eval.at_start=true"), report=Quiet())
    phases = runs[0].phases
    assert [*phases] == ["rollout", "evaluation", "gradient", "update"]
    assert begun[:3] == [phases["evaluation"], phases["rollout"], phases["gradient"]]
    assert device["wired"] == [0, int(1.1 * max(map(sum, phases.values()))), 0]
