"""Where the sandbox is tried: as root and as an ordinary user, on a whole machine and in containers.

`python -m tests.support.sandbox.settings NAME COMMAND…` runs a command in one; only root can enter all.
"""

import ctypes
import os
import platform
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
NOBODY = 65534
# What the usual filter of a container refuses on x86-64 and on aarch64, and the calls of Landlock.
REFUSED = {
    "x86_64": (272, 308, 165, 155, 250, 248, 249, 428, 429, 430, 432, 442),
    "aarch64": (97, 268, 40, 41, 219, 217, 218, 428, 429, 430, 432, 442),
}
LANDLOCK = (444, 445, 446)
CLONE, CLONE3 = {"x86_64": 56, "aarch64": 220}, 435
NAMESPACES = 0x7E020000  # flags of clone
USERS = {"root": 0, "user": NOBODY}
PLACES = {"": False, " in a container": True, " without Landlock": True}
SETTINGS = [user + place for place in PLACES for user in USERS]


def available(name: str) -> bool:
    """Whether this process can enter a setting."""
    return sys.platform == "linux" and (os.geteuid() == 0 or not name.startswith("root"))


def command(name: str, *arguments: str) -> list[str]:
    """The command of a Python with these arguments in a setting."""
    return [sys.executable, "-m", __name__, name, *arguments]


def refuse(numbers: tuple[int, ...]) -> None:
    """A filter of system calls: these fail, and clone with a namespace."""

    def step(code: int, value: int, if_so: int = 0, else_: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_so, else_, value)

    code = [step(0x20, 0), step(0x15, CLONE3, 0, 1), step(0x06, 0x50000 | 38)]
    for number in numbers:
        code += [step(0x15, number, 0, 1), step(0x06, 0x50000 | 1)]
    code += [step(0x15, CLONE[platform.machine()], 0, 3), step(0x20, 16), step(0x45, NAMESPACES, 0, 1)]
    code += [step(0x06, 0x50000 | 1), step(0x06, 0x7FFF0000)]
    text = ctypes.create_string_buffer(b"".join(code))
    library = ctypes.CDLL(None, use_errno=True)
    if os.geteuid():
        library.prctl(38, 1, 0, 0, 0)
    assert library.prctl(22, 2, struct.pack("HxxxxxxQ", len(code), ctypes.addressof(text)), 0, 0) == 0


def open_python() -> None:
    """In a mount namespace of its own: this Python where everybody can reach it."""
    base = Path(sys.base_prefix)
    closed = [place for place in (*reversed(base.parents), base) if not place.stat().st_mode & 1]
    if not closed:
        return
    assert ctypes.CDLL(None).unshare(0x20000) == 0
    with tempfile.TemporaryDirectory() as folder:
        steps = [
            ["mount", "--make-rprivate", "/"],
            ["mount", "--bind", str(base), folder],
            ["mount", "-t", "tmpfs", "-o", "mode=755", "none", str(closed[0])],
            ["mkdir", "-p", str(base)],
            ["mount", "--move", folder, str(base)],
        ]
        for step in steps:
            subprocess.run(step, check=True)


def main() -> None:
    """Enters a setting and becomes the command."""
    name, *arguments = sys.argv[1:]
    user, _, place = name.partition(" ")
    os.chdir(ROOT)
    if os.geteuid() == 0:
        open_python()
    if place:
        refuse(REFUSED[platform.machine()] + (LANDLOCK if "Landlock" in place else ()))
    if USERS[user] and os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    os.environ |= {"HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main()
