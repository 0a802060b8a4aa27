"""MLX's limits on Metal, on a simulated device: they are set, reported and restored."""

import mlx.core as mx
import pytest

from runners.inference.inference_model import load_inference
from runners.machine.startup import Platform
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
    """The history of the limits of a Mac with 16 GB, of which the GPU may keep 12."""
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
        (PHASES, 11 * GB, ""),  # 10 % more than the peak
        ({}, 12 * GB, ""),  # without a forecast, all that is allowed
        ({"gradient": Phase(0, 0, 13 * GB)}, 12 * GB, "`sudo sysctl iogpu.wired_limit_mb=13638`"),
        ({"gradient": Phase(0, 0, 14 * GB)}, 12 * GB, "it becomes slow once macOS swaps"),
    ],
)  # fmt: skip
def test_the_run_s_memory_stays_resident(phases, resident, said, device):
    """macOS limits it; the message contains a command only if the machine has enough memory."""
    notes = []
    with pytest.raises(KeyError), metal_limits("metal", phases, notes.append):
        assert device["wired"][-1] == resident
        raise KeyError
    assert device["wired"][-1] == 0 and device["cache"][-1] == 24 * GB
    assert len(notes) == bool(said) and all(said in note for note in notes)
    assert all(("sysctl" in said) == ("sysctl" in note) for note in notes)


def test_a_command_keeps_its_model_resident(device, monkeypatch):
    """Without a forecast, as far as macOS allows; on other backends, nothing is set."""
    load_inference("embedded", Platform(backend="cpu"))
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    load_inference("embedded", Platform(backend="cpu"))
    assert device["wired"] == [0, 12 * GB]


def test_only_metal_has_these_limits(device):
    """On other backends nothing is set."""
    with metal_limits("cuda", PHASES, print):
        assert device == {"wired": [0], "cache": [24 * GB]}


def test_the_cache_limit_follows_the_phase(device, monkeypatch):
    """It is at least half a gigabyte; without a forecast, it is not changed."""
    for phase in (PHASES["rollout"], PHASES["gradient"], Phase(9 * GB, 0), None):
        keep_cache_of(phase)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    keep_cache_of(PHASES["rollout"])
    assert device["cache"][1:] == [5 * GB, 8 * GB, 2**29]


def test_a_run_sets_the_limits_by_its_forecast(device, tmp_path, monkeypatch):
    """The peak of the forecast stays resident, and each phase sets its cache limit."""
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
