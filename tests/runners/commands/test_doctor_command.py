"""`grpo doctor` describes the machine on one page, or as JSON without names."""

import getpass
import json
import socket

import mlx.core as mx

from runners.errors import UserError
from runners.machine import startup
from runners.machine.startup import Platform
from tests.support.commands import grpo
from tests.support.macos import SAVING, as_mac


def test_a_machine_that_runs_these_tests_can_start_a_run():
    """The JSON names no host, user or path."""
    text = grpo("doctor", "--json").output
    found = json.loads(text)
    assert found["problem"] is None
    assert found["memory_bytes"] >= found["free_memory_bytes"] > 0
    assert found["cores"] >= 1
    assert {"mlx", "mlx-lm"} <= found["packages"].keys()
    assert "/" not in text.replace("://", "")
    assert socket.gethostname() not in text.split()
    assert f'"{getpass.getuser()}"' not in text


def test_where_no_run_can_start_the_rest_is_shown_with_code_2(monkeypatch):
    def refuse():
        raise UserError("MLX is not installed")

    monkeypatch.setattr(startup, "prepare", refuse)
    done = grpo("doctor", code=2)
    assert "MLX is not installed" in done.output and "\ngrpo_fn " in f"\n{done.output}"


def test_on_a_mac_it_shows_power_heat_and_limits(tmp_path, monkeypatch):
    """The cause of slow training is on a line of its own, with the command that fixes it."""
    monkeypatch.setattr(startup, "prepare", lambda: Platform("metal", device="Apple M9"))
    info = {"max_recommended_working_set_size": 12 * 10**9, "memory_size": 16 * 10**9}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    as_mac(monkeypatch, tmp_path, SAVING, level=2)
    found = json.loads(grpo("doctor", "--json").output)
    assert found["gpu_resident_bytes"] == 12 * 10**9 and found["swap_limit_bytes"] <= 8 * 10**9
    assert (found["sleep_minutes"], found["low_power"], found["thermal_pressure"]) == (1, 1, 2)
    assert found["swap_used_bytes"] == round(61.5 * 2**20)
    text = grpo("doctor").output
    assert "gpu resident" in text and "12.0 GB" in text
    assert "slow: low-power mode is on (`sudo pmset -a lowpowermode 0`) and thermal pressure is heavy" in text
