"""Runs programs in the sandbox beside what they must not reach: `python -m tests.support.sandbox.outside`.

Reads a JSON object of programs from standard input, and writes what each has printed, what was touched
("touched") and the protections that are missing ("missing").
"""

import ctypes
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from runners.sandbox.sandbox import Limits, check_sandbox, run_program
from tests.support.sandbox.attempts import MODULES

SEGMENT = 0x47525000 + os.getpid() % 4096
KEYCTL, ADD_KEY = {"x86_64": (250, 248), "aarch64": (219, 217)}.get(platform.machine(), (0, 0))
UNTOUCHED = (("secret", "secret"), ("socket", False))


class Outside:
    """What a program must not reach, by the names that attempts use."""

    def __init__(self) -> None:
        """Servers, a process, a file, shared memory and a key."""
        self.folder = Path(tempfile.mkdtemp(prefix="grpo-outside-"))
        self.secret = self.folder / "secret"
        self.secret.write_text("secret")
        self.reached: list[Any] = []
        name, path = f"grpo-outside-{os.getpid()}", str(self.folder / "socket")
        self.servers = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)]
        self.servers[1].bind(path)
        if sys.platform == "linux":
            self.servers.append(socket.socket(socket.AF_UNIX))
            self.servers[2].bind(f"\0{name}")
        for server in self.servers:
            server.listen()
            threading.Thread(target=self._serve, args=(server,), daemon=True).start()
        os.environ["GRPO_SECRET"] = "x"
        self.sleeper = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
        self.segment, self.library = -1, ctypes.CDLL(None)
        if sys.platform == "linux":
            self.segment = self.library.shmget(SEGMENT, 4096, 0o1666)
            self.library.syscall(KEYCTL, 1, b"grpo-outside")
            self.library.syscall(ADD_KEY, b"user", b"grpo-secret", b"x", 1, -3)
        self.names = {
            "SECRET": str(self.secret),
            "FOLDER": str(self.folder),
            "HOME": str(Path.home()),
            "PORT": self.servers[0].getsockname()[1],
            "NAME": name,
            "SOCKET": path,
            "PID": self.sleeper.pid,
            "SEGMENT": SEGMENT,
        }

    def _serve(self, server: socket.socket) -> None:
        while True:
            try:
                self.reached.append(server.accept())
            except OSError:
                return

    def run(self, program: str, *, plain: bool = False, **limits: Any) -> str:
        """What a program prints that has the names, an exception too. `plain`: without a sandbox."""
        names = "".join(f"{name} = {value!r}\n" for name, value in self.names.items())
        settings = Limits(**{"seconds": 20.0, "processor_seconds": 10.0, "partial": True, **limits})
        body = "\n    ".join(program.splitlines())
        guarded = (
            f"try:\n    {body}\nexcept BaseException as error:\n    print(type(error).__name__, error)\n"
        )
        if plain:
            command = [sys.executable, "-c", MODULES + names + guarded]
            done = subprocess.run(command, capture_output=True, timeout=60, cwd=tempfile.mkdtemp())
            self.secret.write_text("secret")
            return done.stdout.decode("utf-8", "replace")
        return run_program(MODULES + names + guarded, limits=settings).output.decode("utf-8", "replace")

    def touched(self) -> list[str]:
        """What is not as it was; ends everything."""
        found = [] if self.sleeper.poll() is None else ["the process"]
        found += ["a server"] * bool(self.reached)
        content = {path.name: path.is_file() and path.read_text() for path in self.folder.iterdir()}
        found += [name for name, text in content.items() if (name, text) not in UNTOUCHED]
        self.sleeper.kill()
        self.sleeper.wait()
        for server in self.servers:
            server.close()
        if self.segment >= 0:
            self.library.shmctl(self.segment, 0, None)
        return found


def main() -> None:
    """All programs one after the other; with an argument, without a sandbox."""
    programs, outside, plain = json.load(sys.stdin), Outside(), len(sys.argv) > 1
    printed = {name: outside.run(program, plain=plain) for name, program in programs.items()}
    missing = check_sandbox(partial=True)
    print(json.dumps({"printed": printed, "touched": outside.touched(), "missing": missing}))


if __name__ == "__main__":
    main()
