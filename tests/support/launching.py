"""Runs on several ranks, as real processes under mlx.launch."""

import os
import socket
import subprocess
import sys
from pathlib import Path

BIN = Path(sys.executable).parent


def free_ports(number: int) -> int:
    """The first of so many ports in a row that nobody uses now."""
    for start in range(20_000 + os.getpid() % 10_000, 60_000, number):
        try:
            for port in range(start, start + number):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return start
        except OSError:
            continue
    raise RuntimeError("no free ports")


def launch(ranks: int, config: Path, *options: str, timeout: float = 300, **environ: str):
    """A finished `mlx.launch -n RANKS grpo-run CONFIG OPTIONS`, with its output as text."""
    # fmt: off
    command = [
        str(BIN / "mlx.launch"), "-n", str(ranks), "--backend", "ring",
        "--starting-port", str(free_ports(ranks)), "--", str(BIN / "grpo-run"), str(config), *options,
    ]
    # fmt: on
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        env={**os.environ, **environ},
        check=False,
    )
