"""How to install what is missing, as commands of this system's package manager."""

from __future__ import annotations

import sys
from pathlib import Path

_BLAS = {
    "debian": "apt-get install libopenblas0-pthread",
    "fedora": "dnf install openblas-threads",
    "rhel": "dnf install openblas-threads",
    "arch": "pacman -S openblas",
    "suse": "zypper install libopenblas_pthreads0",
    "alpine": "apk add openblas",
}
_COMPILER = {
    "debian": "apt-get install g++",
    "fedora": "dnf install gcc-c++",
    "rhel": "dnf install gcc-c++",
    "arch": "pacman -S gcc",
    "suse": "zypper install gcc-c++",
    "alpine": "apk add g++",
}
# grpo_fn is on no package index, and anyone could register its name there with any content.
_WHERE = "in a clone of grpo_fn"


def blas() -> str:
    """A fast BLAS."""
    return _of_distribution(_BLAS)


def compiler() -> str:
    """The C++ compiler that compiled steps need on a CPU."""
    return _of_distribution(_COMPILER)


def mlx() -> str:
    """MLX with a backend."""
    if sys.platform == "darwin":
        return f"pip install -e . {_WHERE}"
    return (
        f"pip install -e '.[cpu]' {_WHERE} for the CPU, '.[cuda12]' or '.[cuda13]' for an NVIDIA GPU (one of "
        "them: these wheels exclude each other)"
    )


def extra(name: str) -> str:
    """The packages of one of the extras of pyproject.toml."""
    return f"pip install -e '.[{name}]' {_WHERE}"


def _of_distribution(lines: dict[str, str]) -> str:
    release = Path("/etc/os-release")
    words = release.read_text().replace('"', "").split("\n") if release.is_file() else []
    values = dict(line.split("=", 1) for line in words if "=" in line)
    for name in [values.get("ID", ""), *values.get("ID_LIKE", "").split()]:
        if name.split("-")[0] in lines:  # opensuse-leap says "suse" in ID_LIKE
            return lines[name.split("-")[0]]
    return lines["debian"]
