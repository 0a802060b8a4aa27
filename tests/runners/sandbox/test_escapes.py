"""Attempts to get out of the sandbox: each program prints `out` as soon as it reached what is not its own."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runners.errors import UserError
from runners.sandbox.sandbox import Limits, mechanism, run_program

try:
    KIND = mechanism()
except UserError as error:
    pytest.skip(str(error), allow_module_level=True)

linux = pytest.mark.skipif(sys.platform != "linux", reason="tries Linux's own ways")

MODULES = """
import ctypes, os, resource, socket, stat, subprocess, sys, threading, time
CALL = ctypes.CDLL(None)
def show(found):
    print('out' if found else '')
"""
# Each is run with names for what is outside: SECRET (a file), FOLDER (where it lies), HOME, PORT (a server),
# NAME (an abstract socket), PID (a process), SEGMENT (shared memory); `show` prints "out" for what is true.
READS = {
    "a file of the user": "show(open(SECRET).read())",
    "the list of users": "show(open('/etc/passwd').read())",
    "the home": "show(set(os.listdir(HOME)) - set(sys.base_prefix.split('/')))",
    "the environment": "show('GRPO_SECRET' in open('/proc/self/environ').read() + repr(os.environ))",
    "another's environment": "show(open(f'/proc/{PID}/environ').read())",
    "the parent's environment": "show(b'GRPO_SECRET' in open('/proc/1/environ','rb').read())",
    "the first process's root": "show(os.path.exists('/proc/1/root' + SECRET))",
    "the old root": "show(os.listdir('/old'))",
    "a link to it": "os.symlink(SECRET, 'link'); show(open('link').read())",
    "open descriptors": """
for number in range(3, 256):
    try:
        os.fstat(number)
    except OSError:
        continue
    show(not os.path.realpath(f'/proc/self/fd/{number}').startswith('/proc'))""",
    "above its root": """
os.mkdir('cage')
os.chroot('cage')
for _ in range(30):
    os.chdir('..')
os.chroot('.')
show(os.path.exists(SECRET))""",
    "kernel memory": "show(open('/proc/kcore', 'rb').read(64) or open('/dev/mem', 'rb').read(1))",
}
WRITES = {
    "beside the secret": "open(FOLDER + '/new', 'w').close(); print('out')",
    "over the secret": "open(SECRET, 'w').write('x'); print('out')",
    "in the library": "open(os.path.dirname(os.__file__) + '/new.py', 'w').close(); print('out')",
    "in /tmp": "open('/tmp/new', 'w').close(); print('out')",
    "the kernel's settings": "open('/proc/sys/kernel/core_pattern', 'w').write('|/bin/sh'); print('out')",
    "a score of another process": "open(f'/proc/{PID}/oom_score_adj', 'w').write('1000'); print('out')",
    "a device file": "os.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(8, 0)); print('out')",
    "a program with another's rights": """
import shutil
shutil.copy('/usr/bin/id', 'id')
os.chmod('id', 0o4755)
os.chown('id', 12345, 12345)
print('out')""",
}
NETWORK = {
    "a server here": "socket.create_connection(('127.0.0.1', PORT), 1); print('out')",
    "a far host": "socket.create_connection(('1.1.1.1', 53), 1); print('out')",
    "a datagram": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 9)); print('out')",
    "an abstract socket": "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + NAME); print('out')",
    "raw packets": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); print('out')",
}
PROCESSES = {
    "a signal": "os.kill(PID, 9); print('out')",
    "a signal to all": "os.kill(-1, 9)",
    "the list of processes": "show(sum(name.isdigit() for name in os.listdir('/proc')) > 1)",
    "a trace": "show(CALL.ptrace(16, PID, 0, 0) == 0)",
    "shared memory of System V": "show(CALL.shmget(SEGMENT, 0, 0) >= 0)",
    "more rights": "os.setuid(0) if os.getuid() else os.setgroups([0]); open(SECRET).read(); print('out')",
    "a namespace of its own": "show(CALL.unshare(0x10000000) == 0)",
    "a mount namespace": "show(CALL.unshare(0x00020000) == 0)",
    "a mount": "show(CALL.mount(b'none', b'/scratch', b'tmpfs', 0, None) == 0)",
    "taking a mount away": "show(CALL.umount2(b'/usr', 2) == 0)",
    "higher limits": "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40)); print('out')",
    "the clock": "time.clock_settime(time.CLOCK_REALTIME, 0); print('out')",
}
ATTEMPTS = {
    f"{kind}: {name}": program
    for kind, programs in {"read": READS, "write": WRITES, "network": NETWORK, "process": PROCESSES}.items()
    for name, program in programs.items()
}


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """What a program must not reach; checked to be untouched at the end."""
    secret = tmp_path_factory.mktemp("outside") / "secret"
    secret.write_text("secret")
    name = f"grpo-sandbox-{os.getpid()}"
    reached = []

    def serve(server: socket.socket) -> None:
        while True:
            try:
                reached.append(server.accept())
            except OSError:
                return

    servers = [socket.create_server(("127.0.0.1", 0))]
    if sys.platform == "linux":
        servers.append(socket.socket(socket.AF_UNIX))
        servers[1].bind("\0" + name)
        servers[1].listen()
    for server in servers:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
    sleeper = subprocess.Popen(["sleep", "600"], env={**os.environ, "GRPO_SECRET": "x"})
    os.environ["GRPO_SECRET"] = "x"
    yield {
        "SECRET": str(secret),
        "FOLDER": str(secret.parent),
        "HOME": str(Path.home()),
        "PORT": servers[0].getsockname()[1],
        "NAME": name,
        "PID": sleeper.pid,
        "SEGMENT": 0x47525000,
    }
    del os.environ["GRPO_SECRET"]
    assert sleeper.poll() is None
    sleeper.kill()
    sleeper.wait()
    for server in servers:
        server.close()
    assert not reached
    assert secret.read_text() == "secret"
    assert [path.name for path in secret.parent.iterdir()] == ["secret"]


def run(program: str, outside: dict[str, object], **limits: Any) -> str:
    """What a program prints that has names for what is outside."""
    names = "".join(f"{name} = {value!r}\n" for name, value in outside.items())
    outcome = run_program(MODULES + names + program, limits=Limits(**{"seconds": 20.0, **limits}))
    return outcome.output.decode("utf-8", "replace")


def test_an_honest_program_runs(outside):
    """It computes, imports the standard library, writes into its folder and starts a process."""
    printed = run(
        """
import fractions, json, tempfile
with tempfile.TemporaryFile() as file:
    file.write(b'x' * 1_000_000)
    file.seek(0)
    size = len(file.read())
child = subprocess.run([sys.executable, '-c', 'print(6 * 7)'], capture_output=True, text=True)
print(json.dumps([size, child.stdout.strip(), str(fractions.Fraction(1, 3))]))""",
        outside,
    )
    assert printed.strip() == '[1000000, "42", "1/3"]'


@linux
@pytest.mark.parametrize("program", ATTEMPTS.values(), ids=ATTEMPTS)
def test_no_attempt_gets_out(program, outside):
    assert "out\n" not in run(program, outside)


@pytest.mark.parametrize(
    ("program", "limits"),
    [
        ("while True: pass", {"seconds": 1.0}),
        ("time.sleep(60)", {"seconds": 1.0}),
        ("import signal\nsignal.pthread_sigmask(0, range(1, 65))\ntime.sleep(60)", {"seconds": 1.0}),
        ("while True: print('x' * 10_000, flush=True)", {}),
        ("if os.fork(): os._exit(0)\nos.setsid()\nwhile True: time.sleep(1)", {"seconds": 2.0}),
        ("os.setsid()\ntime.sleep(60)", {"seconds": 2.0}),
        ("CALL.prctl(1, 0, 0, 0, 0)\nos.setsid()\ntime.sleep(60)", {"seconds": 2.0}),
    ],
    ids=["computing", "sleeping", "deaf to signals", "flooding", "left behind", "out of the group", "alone"],
)
def test_a_program_ends_at_its_limit(program, limits, outside):
    """And nothing of it is left: its mark is on no command line of this machine."""
    mark = f"mark = {os.urandom(8).hex()!r}\n"
    start = time.monotonic()
    printed = run(mark + program, outside, **limits)
    assert time.monotonic() - start < limits.get("seconds", 20.0) + 5
    assert len(printed) <= Limits().output
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert mark.strip() not in listed


@linux
@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        ("held = bytearray(2_000_000_000); print('out')", "MemoryError"),
        ("file = open('x', 'wb')\nfor _ in range(300): file.write(bytes(1_000_000))\nprint('out')", "Error"),
        ("for n in range(300):\n    open(str(n), 'wb').write(bytes(1_000_000))\nprint('out')", "No space"),
        (
            """
children = 0
try:
    for _ in range(100):
        if os.fork() == 0:
            time.sleep(60)
        children += 1
except OSError as error:
    print(children, type(error).__name__)
show(children > 10)""",
            "BlockingIOError",
        ),
        (
            "for _ in range(100): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
            "start new thread",
        ),
        ("files = [open('/dev/null') for _ in range(1000)]; print('out')", "Too many open files"),
    ],
    ids=["memory", "one file", "many files", "processes", "threads", "descriptors"],
)
def test_a_program_cannot_take_more(program, wanted, outside):
    printed = run(program, outside, seconds=10.0)
    assert wanted in printed
    assert "out\n" not in printed
