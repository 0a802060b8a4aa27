"""Sleep, power and heat on macOS, with replacements for its commands."""

import os
import subprocess
import sys
import time

import pytest

from runners.machine import mac_power
from runners.machine.mac_power import PowerWatch, awake, power_state, slow_because
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.macos import HOT, SAVING, SETTINGS, as_mac
from tests.support.resuming import SHORT, config_in, lines_of, straight_run
from tests.support.tiny_states import same_bits

NORMAL = {"sleep_minutes": 1, "low_power": 0, "thermal_pressure": 0}


def test_a_run_keeps_the_machine_awake_for_its_length_alone(tmp_path, monkeypatch):
    """caffeinate runs with -is but not -d, so the display may sleep, and ends with the block. Other systems
    start nothing."""
    noted = tmp_path / "noted"
    as_mac(monkeypatch, tmp_path, caffeinate=f'echo "$$ $@" > {noted}; exec sleep 60')
    with awake():
        for _ in range(200):
            if noted.exists() and noted.read_text().endswith("\n"):
                break
            time.sleep(0.01)
        number, *words = noted.read_text().split()
        assert words == ["-is", "-w", str(os.getpid())]
        os.kill(int(number), 0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(number), 0)
    noted.unlink()
    monkeypatch.setattr(sys, "platform", "linux")
    with awake():
        pass
    assert not noted.exists()


def test_caffeinate_ends_after_an_error(tmp_path, monkeypatch):
    """The exception is raised, and no process is left."""
    as_mac(monkeypatch, tmp_path, caffeinate="exec sleep 60")
    started = []
    real = subprocess.Popen
    monkeypatch.setattr(
        mac_power.subprocess, "Popen", lambda *a, **k: started.append(real(*a, **k)) or started[-1]
    )
    with pytest.raises(KeyError), awake():
        raise KeyError
    assert started[0].poll() is not None


def test_a_run_is_awake_and_logs_power_and_heat(tmp_path, monkeypatch):
    """The updates' log contains both, and the weights are the same as on other systems."""
    noted = tmp_path / "noted"
    straight = straight_run(*SHORT)
    as_mac(monkeypatch, tmp_path, level=1, caffeinate=f"echo $$ > {noted}; exec sleep 600")
    result = run_training(config_in(tmp_path / "a", *SHORT), report=Quiet())
    updates = [line for line in lines_of(result.folder / "training_log.jsonl") if "loss" in line]
    assert {(line["power/low_power"], line["power/thermal_pressure"]) for line in updates} == {(0, 1)}
    with pytest.raises(ProcessLookupError):
        os.kill(int(noted.read_text()), 0)
    assert same_bits(result.state, straight.state)


@pytest.mark.parametrize(
    ("settings", "therm", "level", "state", "reason"),
    [
        (SETTINGS, HOT, 0, NORMAL | {"cpu_speed": 70}, "70 %"),
        (SETTINGS, "", 2, NORMAL | {"thermal_pressure": 2}, "pressure is heavy"),
        (SAVING, "", 0, NORMAL | {"low_power": 1}, "low-power mode is on"),
        (" powermode            2\n", "", 0, {"low_power": 0, "thermal_pressure": 0}, ""),
        ("", "Note: No thermal warning level has been recorded\n", "", {}, ""),
    ],
)  # fmt: skip
def test_what_macos_reports(settings, therm, level, state, reason, tmp_path, monkeypatch):
    """Values that macOS does not report are missing; high power and no pressure are not a reason."""
    as_mac(monkeypatch, tmp_path, settings, therm, level)
    assert power_state() == state
    found = slow_because(state)
    assert reason in found and bool(found) == bool(reason)
    monkeypatch.setattr(sys, "platform", "linux")
    assert power_state() == {}


@pytest.mark.parametrize(("level", "late", "lines"), [(1, 60, 1), (1, 70, 0), (0, 20, 0)])
def test_a_slowdown_by_a_third_is_reported_once_with_its_reason(level, late, lines, tmp_path, monkeypatch):
    """Supervised updates and the first other update, which compiles, do not count. Without a reason from
    macOS, nothing is reported."""
    as_mac(monkeypatch, tmp_path, SETTINGS, "", level)
    watch = PowerWatch()
    assert watch.metrics() == {"power/low_power": 0, "power/thermal_pressure": level}
    as_mac(monkeypatch, tmp_path, SETTINGS, "", 4)  # is not read again within half a minute
    said = []
    for rate in (*[0.0] * 12, 5, *[100] * 8, *[late] * 6):
        said += filter(None, [watch.slower(rate)])
        assert watch.metrics()["power/thermal_pressure"] == level
    assert len(said) == lines
    assert all("60% of their initial pace: thermal pressure is moderate" in line for line in said)
