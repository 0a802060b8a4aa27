"""Substitutes for macOS's commands, with the answers of Apple silicon."""

import os
import sys
from pathlib import Path

SETTINGS = """\
System-wide power settings:
Currently in use:
 standby              1
 powernap             1
 disksleep            10
 sleep                1 (sleep prevented by powerd)
 displaysleep         10
 lowpowermode         0
"""
SAVING = SETTINGS.replace("mode         0", "mode         1")
HOT = """\
Note: No thermal warning level has been recorded
2026-08-20 05:08:37 -0700 CPU Power notify
\tCPU_Scheduler_Limit \t= 100
\tCPU_Available_CPUs \t= 12
\tCPU_Speed_Limit \t= 70
"""


def as_mac(
    monkeypatch, folder: Path, settings=SETTINGS, therm="", level=0, *, caffeinate="exec sleep 60"
) -> None:
    """The system is macOS with these answers of pmset and notifyutil; `caffeinate` is a shell script."""
    folder = folder / "bin"
    folder.mkdir(exist_ok=True)
    (folder / "settings").write_text(settings)
    (folder / "therm").write_text(therm)
    scripts = {
        "pmset": f'cat "{folder}/${{2:-settings}}"',
        "notifyutil": f'echo "$2 {level}"',
        "caffeinate": caffeinate,
        "sysctl": 'echo "total = 2048.00M  used = 61.50M  free = 1986.50M  (encrypted)"',
    }
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("runners.machine.mac_power._CAFFEINATE", str(folder / "caffeinate"))
    monkeypatch.setattr(sys, "platform", "darwin")
