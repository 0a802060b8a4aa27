"""Defines `grpo doctor`, which shows what this machine can run, what is slow, and commands that fix
it.
"""

import json
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from runners.commands.base import command, flag
from runners.errors import UserError, gigabytes, listed
from runners.machine.terminal import aligned, echo, echo_text

PACKAGES = (
    "mlx",
    "mlx-lm",
    "transformers",
    "tokenizers",
    "datasets",
    "huggingface_hub",
    "numpy",
    "tiktoken",
)


@command(
    "doctor",
    flag(
        "--json as as_json",
        "Print one JSON object without names of files, folders, hosts or users.",
    ),
    notes="""\
\b
Examples:
  grpo doctor           one page of facts
  grpo doctor --json    for a bug report: no names, no paths
""",
)
def doctor_command(as_json: bool) -> None:
    """Check this machine.

    Shows device, memory, BLAS, compiler, sandbox and versions, what will be slow, and the command that fixes
    it. Nothing is changed. The exit code is 2 if no run can start.
    """
    from runners.machine import startup
    from runners.machine.mac_power import power_state, slow_because
    from runners.machine.memory_readings import (
        free_memory,
        memory_limit,
        resident_limit,
        swap_limit,
        swap_used,
        total_memory,
    )
    from runners.machine.versions import installed_version
    from runners.sandbox.sandbox import check_sandbox

    missing = check_sandbox(partial=True)
    found: dict[str, Any] = {
        "grpo_fn": installed_version("grpo_fn"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := installed_version(name))},
        "compiler": shutil.which("g++") is not None,
        "sandbox": f"lacks {listed(missing)}" if missing else "whole",
        "free_disk_bytes": shutil.disk_usage(Path.cwd()).free,
    }
    slow = []
    problem = ""
    try:
        machine = startup.prepare()
    except UserError as error:
        problem = str(error)
    else:
        total = total_memory()
        limit = memory_limit() if sys.platform == "linux" else None
        power = power_state()
        slow = [*machine.notices, *filter(None, [slow_because(power)])]
        found |= {
            "device": f"{machine.device} ({machine.backend})",
            "cores": machine.cores,
            "memory_bytes": total,
            "free_memory_bytes": free_memory(),
            "container_limit_bytes": limit if limit and limit <= total else None,
            "swap_used_bytes": swap_used(),
            **power,
            "blas": Path(machine.blas).name if machine.blas else None,
        }
        if machine.backend == "metal":
            found["gpu_resident_bytes"] = resident_limit()
            found["swap_limit_bytes"] = int(swap_limit(0))
    if as_json:
        echo_text(json.dumps({**found, "slow": slow, "problem": problem or None}, indent=2))
    else:
        rows = [(_name(name), _text(value)) for name, value in found.items()]
        lines = [*aligned(rows), "", *(f"slow: {line}" for line in slow)]
        if not slow and not problem:
            lines.append("runs can start, and no cause of slow training was found")
        for line in lines:
            echo(line)
    if problem:
        raise UserError(problem)


def _name(key: str) -> str:
    return key.removesuffix("_bytes").replace("_", " ").replace("grpo ", "grpo_")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
    if not value or value is True:
        return "yes" if value else "none"
    return gigabytes(value) if isinstance(value, int) and value > 1_000_000 else str(value)
