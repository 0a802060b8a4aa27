"""Attempts to escape from the sandbox as this user, and programs at their limits."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runners.errors import UserError
from runners.machine.bounded_process import python_command
from runners.sandbox import sandbox
from runners.sandbox.sandbox import Limits, check_sandbox, run_program
from tests.support.sandbox.attempts import ATTEMPTS, MODULES
from tests.support.sandbox.outside import Outside

try:
    check_sandbox()
except UserError as error:
    pytest.skip(str(error), allow_module_level=True)

linux = pytest.mark.skipif(sys.platform != "linux", reason="tries Linux's own ways")


@pytest.fixture(scope="module")
def outside() -> Iterator[Outside]:
    """Things that a program must not reach; a final check finds them untouched."""
    found = Outside()
    yield found
    assert found.touched() == []


def test_an_honest_program_runs(outside):
    """A program can import the standard library, write files, and use threads and an event loop."""
    printed = outside.run(
        """
import asyncio, concurrent.futures, ctypes, fractions, hashlib, json, sqlite3, ssl, tempfile, zoneinfo
with tempfile.TemporaryFile() as file:
    file.write(b'x' * 1_000_000)
    file.seek(0)
    size = len(file.read())
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    squares = list(pool.map(lambda n: n * n, range(3)))
async def wait():
    await asyncio.sleep(0.01)
    return 'slept'
database = sqlite3.connect('x.db')
database.execute('create table t (n)')
print(json.dumps([size, squares, asyncio.run(wait()), str(fractions.Fraction(1, 3))]))
print(hashlib.sha256(b'').hexdigest()[:4], os.listdir('.'), threading.active_count())"""
    )
    assert printed.splitlines() == ['[1000000, [0, 1, 4], "slept", "1/3"]', "e3b0 ['x.db'] 1"]


def test_a_program_starts_anew(outside):
    """Nothing of one program reaches the next: files, modules, built-in names, random numbers."""
    leaves = "import builtins, json; builtins.left = json.left = 1; open('left', 'w').close(); print('x')"
    assert outside.run(leaves) == "x\n"
    looks = "import json, random; print(os.listdir('.'), hasattr(json, 'left'), 'left' in dir(__builtins__))"
    assert outside.run(looks) == "[] False False\n"
    assert run_program("import random; print(random.random())") != run_program(
        "import random; print(random.random())"
    )


# Prints whether texts are in its memory: in Python's arenas and in the heap of the C library. It knows them
# with the next letters, so it does not find itself. A page that is not there is an error, not a crash.
NEXT = bytes((n + 1) % 256 for n in range(256))
SEARCHES = """
NEXT = bytes((n + 1) % 256 for n in range(256))
CALL.sbrk.restype = ctypes.c_void_p
known = [each for module in list(sys.modules.values()) for pair in vars(module).items() for each in pair]
known += [bytes(size) for size in range(1, 512) for _ in range(20)]
pages = {id(each) + page * 4096 & ~4095 for each in known for page in range(-256, 256)}
end = CALL.sbrk(ctypes.c_long(0))
pages |= set(range(end - 32_000_000 & ~4095, end, 4096))
found = read = 0
copy = os.open('copy', os.O_RDWR | os.O_CREAT)
for page in sorted(pages):
    if CALL.pwrite(copy, ctypes.c_void_p(page), ctypes.c_long(4096), ctypes.c_long(0)) == 4096:
        held = os.pread(copy, 4096, 0)
        read += 1
        found += any(each in held.translate(NEXT) for each in NEEDLES)
print(found > 0, read > 1000)"""


@linux
def test_the_memory_of_a_program_has_nothing_of_the_one_before():
    """The next program finds neither the text nor the output of a program in its memory."""
    sandbox.end_programs()
    texts = ["needle-in-the-text", "needle-in-the-output"]
    first = f"text = {texts[0]!r}\nprint({texts[1][::-1]!r}[::-1] * 20)"
    needles = [text.encode().translate(NEXT) for text in texts]
    search = f"{MODULES}NEEDLES = {needles}\n{SEARCHES}"
    limits = Limits(seconds=60.0, processor_seconds=20.0)
    for _ in range(3):
        assert texts[1].encode() in run_program(first).output
    assert run_program(search, limits=limits).output.split() == [b"False", b"True"]
    assert run_program(f"own = {texts[0]!r}\n{search}", limits=limits).output.split() == [b"True", b"True"]


@linux
@pytest.mark.parametrize("program", ATTEMPTS.values(), ids=ATTEMPTS)
def test_no_attempt_gets_out(program, outside):
    assert "out\n" not in outside.run(program)


@pytest.mark.parametrize(
    ("program", "limits"),
    [
        ("while True: pass", {"processor_seconds": 1.0}),
        ("time.sleep(60)", {"seconds": 1.0}),
        ("signal.pthread_sigmask(0, range(1, 65))\ntime.sleep(60)", {"seconds": 1.0}),
        ("while True: print('x' * 10_000, flush=True)", {}),
        ("os.closerange(0, 256)\ntime.sleep(60)", {"seconds": 2.0}),
        (
            "for n in range(4): threading.Thread(target=lambda: [None for _ in iter(int, 1)]).start()",
            {"processor_seconds": 1.0},
        ),
        ("sys.stdin.read(); sys.stdin.close(); threading.Event().wait()", {"seconds": 1.0}),
    ],
    ids=["computing", "sleeping", "deaf to signals", "flooding", "closing all", "threads", "waiting"],
)
def test_a_program_ends_at_its_limit(program, limits, outside):
    """No process of a program remains after its limit."""
    start = time.monotonic()
    printed = outside.run(program, **limits)
    assert time.monotonic() - start < 10
    assert len(printed) <= Limits().output
    # The first process of each namespace stays.
    while any(len(below(server.process.pid)) > 1 for server in sandbox._servers):
        assert time.monotonic() - start < 15
        time.sleep(0.05)


def below(process: int) -> list[int]:
    """All descendants of a process."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process)], capture_output=True, text=True)
    children = [int(line) for line in listed.stdout.split()]
    return [*children, *(each for child in children for each in below(child))]


def test_computing_and_waiting_have_limits_of_their_own(outside):
    """A program may sleep longer than it may compute."""
    assert outside.run("time.sleep(1.5); print('slept')", processor_seconds=1.0) == "slept\n"
    assert (
        outside.run("while time.process_time() < 1.5: pass\nprint('computed')", processor_seconds=1.0) == ""
    )


@linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_dies_with_its_run(number):
    """A killed run leaves neither the program nor the processes around it."""
    code = (
        "from runners.sandbox.sandbox import Limits, run_program; "
        "run_program('import time; time.sleep(300)', limits=Limits(seconds=200.0))"
    )
    run = subprocess.Popen(python_command(code), start_new_session=True)
    end, found = time.monotonic() + 30, list[int]()
    while len(found) < 3 and time.monotonic() < end:
        time.sleep(0.1)
        found = below(run.pid)  # the process, the first one in its namespace, the program
    assert len(found) == 3
    os.kill(run.pid, number)
    run.wait()
    while left := [process for process in found if Path(f"/proc/{process}").exists()]:
        assert time.monotonic() < end + 10, left
        time.sleep(0.05)


@linux
@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        ("held = bytearray(2_000_000_000); print('out')", "MemoryError"),
        ("held = []\nfor _ in range(300): held.append(mmap.mmap(-1, 10_000_000))\nprint('out')", "OSError"),
        ("file = open('x', 'wb')\nfor _ in range(300): file.write(bytes(1_000_000))\nprint('out')", "Error"),
        ("for n in range(300):\n    open(str(n), 'wb').write(bytes(1_000_000))\nprint('out')", "No space"),
        ("for n in range(20_000): os.mkdir(str(n))\nprint('out')", "No space"),
        (
            "threading.stack_size(65536)\n"
            "for _ in range(100): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
            "start new thread",
        ),
        ("files = [open('/dev/null') for _ in range(1000)]; print('out')", "Too many open files"),
        ("file = os.memfd_create('x'); print('out')", "Error"),
        ("raw(29, 0, 100_000_000, 0o1600)", ""),
        ("for _ in range(40): os.pipe()", "Too many open files"),
    ],
    ids=[
        *("memory", "mapped memory", "one file", "many files", "folders", "threads", "descriptors"),
        *("a file in memory", "shared memory", "pipes"),
    ],
)
def test_a_program_cannot_take_more(program, wanted, outside):
    printed = outside.run(program)
    assert wanted in printed
    assert "out\n" not in printed


@linux
def test_a_program_that_cannot_begin_costs_no_other():
    """If its folder cannot be created, the process is not used again."""
    assert run_program("print(1)", limits=Limits(disk=-1)).ended
    assert run_program("print(1)").output == b"1\n"


def test_standard_error_is_not_the_output_and_half_a_character_is_no_fault():
    assert run_program("import sys; print('note', file=sys.stderr); print(1)").output == b"1\n"
    assert run_program("print('\ud800')").code == 1
    assert run_program("print(ascii(input()))", stdin="\ud800").code == 0


def test_a_path_without_sbin_is_enough(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    sandbox.end_programs()
    assert run_program("print(1)").output == b"1\n"


def test_what_is_missing_refuses_programs_unless_that_is_accepted(monkeypatch):
    """The error names the missing protection and the key."""
    monkeypatch.setattr(sandbox, "_missing", lambda: ["namespaces (no)"])
    with pytest.raises(UserError, match=r"lacks namespaces \(no\).*answer\.partial_sandbox"):
        run_program("print(1)")
    assert run_program("print(1)", limits=Limits(partial=True)).output == b"1\n"
