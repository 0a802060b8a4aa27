"""`grpo doctor`: what this machine offers a run, what will be slow, and the command that mends it."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from runners.commands.base import HELP, ends_with_a_line
from runners.commands.options import flag
from runners.errors import UserError, gigabytes
from runners.machine.terminal import aligned, echo

PACKAGES = ("mlx", "mlx-lm", "transformers", "tokenizers", "datasets", "huggingface_hub", "numpy", "tiktoken")
_SIZE = 1024  # of the matrices of the measured product
_EXAMPLES = """\
\b
Examples:
  grpo doctor           one page
  grpo doctor --json    for a bug report: no names, no paths
"""


@click.command("doctor", context_settings=HELP, epilog=_EXAMPLES)
@flag("--json as as_json", "One JSON object, which names no file, folder, host or user.")
@ends_with_a_line
def doctor_command(as_json: bool) -> None:
    """Look at this machine: what will be slow.

    Shows what the machine offers, what will be slow, and what mends it: device, memory, BLAS, compiler,
    sandbox, versions against those that were tested, and the models in the Hub's cache. Nothing is changed.
    The exit code is 2 where no run can start.
    """
    found, problem = examine()
    if as_json:
        echo(json.dumps({**found, "problem": problem or None}, indent=2))
    else:
        rows = [(name, _text(value)) for name, value in found.items() if name != "slow"]
        for line in aligned(rows):
            echo(line)
        echo()
        for line in found["slow"]:
            echo(f"slow: {line}")
        if not found["slow"] and not problem:
            echo("a run can start, and nothing is known that would slow it")
    if problem:
        raise UserError(problem)


def examine() -> tuple[dict[str, Any], str]:
    """What was found, as JSON has it, and why no run can start here; empty if one can."""
    import runners
    from runners.machine.versions import installed_version

    found: dict[str, Any] = {
        "grpo_fn": runners.__version__,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := installed_version(name))},
        "compiler": _compiler(),
        "sandbox": _sandbox(),
        "cached_models": _cached_models(),
        "free_disk_bytes": shutil.disk_usage(Path.cwd()).free,
    }
    try:
        return {**found, **_device()}, ""
    except UserError as error:
        return {**found, "slow": []}, str(error)


def _device() -> dict[str, Any]:
    from runners.machine import startup
    from runners.machine.memory_readings import free_memory, memory_limit, read_memory, swap_used

    machine, total = startup.prepare(), read_memory().total
    limit = memory_limit() if sys.platform == "linux" else None
    return {
        "device": f"{machine.device} ({machine.backend})",
        "cores": machine.cores,
        "memory_bytes": total,
        "free_memory_bytes": free_memory(),
        "container_limit_bytes": limit if limit and limit <= total else None,
        "swap_used_bytes": swap_used(),
        "blas": Path(machine.blas).name if machine.blas else None,
        "float32_gflops": _gflops(),
        "slow": list(machine.notices),
    }


def _gflops() -> float:
    """10^9 operations a second of a product of float32 matrices: the best of three."""
    import mlx.core as mx

    a = mx.ones((_SIZE, _SIZE))
    mx.eval(a)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        mx.eval(a @ a)
        seconds.append(time.perf_counter() - start)
    return round(2 * _SIZE**3 / min(seconds) / 1e9, 1)


def _compiler() -> str | None:
    """The C++ compiler's first line about itself, without where it lies; None: there is none."""
    if shutil.which("g++") is None:
        return None
    done = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=False)
    return (done.stdout.splitlines() or [""])[0] or None


def _sandbox() -> str | None:
    from runners.sandbox.sandbox import mechanism

    try:
        return mechanism()
    except UserError:
        return None


def _cached_models() -> dict[str, int]:
    """How many models the Hub's cache has, and their bytes."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        models = [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:
        models = []
    return {"count": len(models), "bytes": sum(repo.size_on_disk for repo in models)}


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
    if value is None:
        return "none"
    return gigabytes(value) if isinstance(value, int) and value > 1_000_000 else str(value)
