"""Keeps macOS awake during a run, and reads the machine's power and thermal state, which can
explain slow steps.

Importing this module does not import MLX.
"""

import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import attrs

_CAFFEINATE = "/usr/bin/caffeinate"
# `pmset -g therm` reports values on Intel; on Apple silicon, only the notification reports pressure.
_QUERY = "pmset -g; pmset -g therm; notifyutil -g com.apple.system.thermalpressurelevel"
_ANSWERS = {
    "sleep_minutes": r"^ *sleep +(\d+)",
    "low_power": r"^ *(?:lowpowermode|powermode) +(\d)",  # 2: high power
    "cpu_speed": r"CPU_Speed_Limit\s*= *(\d+)",
    "thermal_pressure": r"thermalpressurelevel +(\d)",
}
_PRESSURES = ("nominal", "moderate", "heavy", "trapping", "sleeping")
_EVERY = 30.0  # seconds between two queries
_FIRST = 6  # number of updates, without the first, whose pace counts as usual
_LAST = 3  # number of updates whose pace is compared with it
_SLOWER = 2 / 3  # fraction of the usual pace


@contextmanager
def awake() -> Iterator[None]:
    """Prevents macOS from sleeping during the block; the display may sleep."""
    if sys.platform != "darwin":
        yield
        return
    # -w: ends when this process ends. In a new session, Ctrl-C does not reach the command.
    command = [_CAFFEINATE, "-is", "-w", str(os.getpid())]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            yield
        finally:
            process.terminate()


def power_state() -> dict[str, int]:
    """Returns the power state that macOS reports: minutes until sleep (0 means never), low-power
    mode, CPU speed in percent, and thermal pressure (0 to 4).

    Values that macOS does not report are missing. On other systems, the dict is empty.
    """
    if sys.platform != "darwin":
        return {}
    done = subprocess.run(["/bin/sh", "-c", _QUERY], capture_output=True, text=True, check=False)
    found = {name: re.search(form, done.stdout, re.MULTILINE) for name, form in _ANSWERS.items()}
    state = {name: int(match[1]) for name, match in found.items() if match}
    return state | {name: int(state[name] == 1) for name in state if name == "low_power"}


def slow_because(state: dict[str, int]) -> str:
    """Returns the reason why the machine computes more slowly than it could, or "" if macOS reports
    none.
    """
    pressure = state.get("thermal_pressure", 0)
    reasons = {
        "low-power mode is on (`sudo pmset -a lowpowermode 0`)": state.get("low_power"),
        f"thermal pressure is {_PRESSURES[min(pressure, 4)]}": pressure,
        f"the CPU runs at {state.get('cpu_speed')} %": state.get("cpu_speed", 100) < 100,
    }
    return " and ".join(reason for reason, holds in reasons.items() if holds)


@attrs.define(eq=False)
class PowerWatch:
    """Power and thermal readings during a run, and the pace of its updates."""

    _state: dict[str, int] = attrs.field(factory=dict, init=False)
    _due: float = attrs.field(default=0.0, init=False)
    _rates: list[float] = attrs.field(factory=list, init=False)
    _told: bool = attrs.field(default=False, init=False)

    def metrics(self) -> dict[str, float]:
        """Returns the readings for the log, which are empty on systems other than macOS."""
        if time.monotonic() >= self._due:
            self._state = power_state()
            self._due = time.monotonic() + _EVERY
        logged = ("low_power", "thermal_pressure")
        return {f"power/{name}": self._state[name] for name in logged if name in self._state}

    def slower(self, rate: float) -> str | None:
        """Records an update's tokens per second; 0 means that the update sampled no tokens. Returns
        a message, once, if updates have become slower by a third and macOS reports a reason.
        """
        self._rates += [rate] if rate else []
        reason = slow_because(self._state)
        if self._told or not reason or len(self._rates) <= _FIRST + _LAST:
            return None
        share = statistics.median(self._rates[-_LAST:]) / statistics.median(
            self._rates[1 : _FIRST + 1]
        )
        self._told = share < _SLOWER
        return f"updates run at {share:.0%} of their initial pace: {reason}" if self._told else None
