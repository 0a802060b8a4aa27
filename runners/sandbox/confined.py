"""A process that shuts itself off from its machine and then runs programs; `sandbox.py` starts it.

Run as a script, with the standard library alone. It answers one message with what it could not shut off, then
each task with the program's exit code, processor time and output. For each task it forks a guard, which holds
the time limits, and the guard forks the program. So a program starts with modules that are loaded already,
and needs nothing of the machine but the standard library's files.
"""

import atexit
import builtins
import ctypes
import gc
import importlib
import json
import math
import os
import resource
import secrets
import select
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
import types
import zoneinfo
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

# Loaded before the root is changed: what programs import often, and what needs libraries of the system.
MODULES = [
    "asyncio",
    "bisect",
    "bz2",
    "collections",
    "copy",
    "dataclasses",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "lzma",
    "math",
    "operator",
    "random",
    "re",
    "sqlite3",
    "ssl",
    "statistics",
    "string",
    "typing",
    "uuid",
    "zlib",
]
SCRATCH = "/scratch"
ROOT = "/sys"  # any folder that each system has: what was there is not in the new root
LINUX = sys.platform == "linux"
NEW_MOUNTS, NEW_PROCESSES = 0x20000, 0x20000000
NEW_NAMES, NEW_MESSAGES, NEW_USERS, NEW_NETWORK = 0x4000000, 0x8000000, 0x10000000, 0x40000000
READ_ONLY, NO_SUID, NO_DEVICES, NO_PROGRAMS, REMOUNT, BIND, RECURSIVE, PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    1 << 14,
    1 << 18,
)
DETACH = 2
DEATH_SIGNAL, FILTER, NO_NEW_RIGHTS = 1, 22, 38  # of prctl
KEYRING = {"x86_64": 250, "aarch64": 219}  # the number of keyctl
LANDLOCK = 444  # the first of its three calls
EXECUTE, READ_FILE, READ_FOLDER, ALL_RIGHTS = 1, 4, 8, 0x1FFF
REPORT = 3  # the descriptor on which a program's process reports
LONGEST = 100_000  # characters of a reported value
KEYS = type({}.keys())
libc = ctypes.CDLL(None, use_errno=True)


def call(name, *arguments):
    """A function of the C library; OSError where it fails."""
    given = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = getattr(libc, name)(*given)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def mount(source, target, kind=None, flags=0, options=None):
    call(
        "mount",
        *(each and each.encode() for each in (source, target, kind)),
        flags,
        options and options.encode(),
    )


class Sandbox:
    """What shuts off the programs of this process; `missing` says what does not, with the reason."""

    def __init__(self, filters, limits):
        """Shuts this process off; `filters` of system calls: with and without files of the program's own."""
        self.places = [place for place in (*sys.path, *zoneinfo.TZPATH[:1]) if os.path.isdir(place)]
        self.missing = []
        self.namespaces = False
        self.filter = b""
        self.user = 0
        self.memory = 0  # bytes of address space before any program
        if not LINUX:
            return
        self.memory = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")  # the first to go where memory ends
        with suppress(OSError, KeyError):  # without the call there are no keys
            call("syscall", KEYRING[os.uname().machine], 1, None)
        first, _, count = map(int, Path("/proc/self/uid_map").read_text().splitlines()[-1].split())
        if os.geteuid() == 0 and count > 60_000:  # root has no bound on its threads: become a user of its own
            self.user = first + count - 3 - secrets.randbelow(min(count // 2, 1_000_000_000))
        self.namespaces = self.tried("namespaces", self.enter_namespaces)
        if not self.namespaces:
            self.tried("Landlock", self.restrict_files)
        self.filter = bytes.fromhex(filters[not self.namespaces])
        if not self.filter:
            self.missing.append(f"seccomp (not for {os.uname().machine})")
        rehearsal = partial(self.rehearse, limits)
        if self.user and not self.tried("a user of its own", rehearsal):  # who cannot read the library, maybe
            self.user = 0
        self.tried("a confined process", rehearsal)

    def tried(self, name, protect):
        """Whether a protection works here."""
        try:
            protect()
        except OSError as error:
            self.missing.append(f"{name} ({error.strerror})")
            return False
        return True

    def enter_namespaces(self):
        """A root of nothing but the standard library, read-only, three devices and a folder."""
        user, group = os.getuid(), os.getgid()
        kinds = NEW_MOUNTS | NEW_NAMES | NEW_MESSAGES | NEW_NETWORK
        try:
            call("unshare", kinds)
        except PermissionError:
            call("unshare", kinds | NEW_USERS)
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        mount(None, "/", flags=RECURSIVE | PRIVATE)
        mount("none", ROOT, "tmpfs", NO_SUID | NO_DEVICES, "mode=755,size=1m")
        for place in self.places:
            os.makedirs(ROOT + place, exist_ok=True)
            mount(os.path.realpath(place), ROOT + place, flags=BIND)
            kept = os.statvfs(place).f_flag & NO_PROGRAMS
            mount(None, ROOT + place, flags=REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES | kept)
            for name in ("site-packages", "dist-packages"):
                if os.path.isdir(f"{ROOT}{place}/{name}"):
                    mount("none", f"{ROOT}{place}/{name}", "tmpfs", READ_ONLY)
        for folder in (SCRATCH, "/dev"):
            os.mkdir(ROOT + folder)
        for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
            Path(ROOT + device).touch()
            mount(device, ROOT + device, flags=BIND)
        call("sethostname", b"sandbox", 7)
        os.chdir(ROOT)
        call("pivot_root", b".", b".")
        call("umount2", b".", DETACH)
        os.chdir("/")
        mount(None, "/", flags=REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES)

    def restrict_files(self):
        """No file can be read but the standard library's."""
        rules = call("syscall", LANDLOCK, struct.pack("Q", ALL_RIGHTS), 8, 0)
        files = ["/dev/null", "/dev/zero", "/dev/urandom"]
        for place in (*self.places, *files):
            opened = os.open(place, os.O_PATH)
            rights = READ_FILE if place in files else READ_FILE | READ_FOLDER | EXECUTE
            call("syscall", LANDLOCK + 1, rules, 1, struct.pack("=Qi", rights, opened), 0)
            os.close(opened)
        call("prctl", NO_NEW_RIGHTS, 1, 0, 0, 0)
        call("syscall", LANDLOCK + 2, rules, 0)
        os.close(rules)

    def rehearse(self, limits):
        """OSError if a forked child cannot be confined as programs are."""
        child = os.fork()
        if not child:
            try:
                self.enter(limits)
                self.drop_rights(limits)
                with open(os.__file__):
                    os._exit(0)
            except OSError as error:
                os._exit(error.errno)
            finally:
                os._exit(1)
        if number := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise OSError(number, os.strerror(number))

    def apply_filter(self):
        """In the program: no new rights, and no system calls but those of the filter."""
        code = ctypes.create_string_buffer(self.filter)
        program = struct.pack("HxxxxxxQ", len(self.filter) // 8, ctypes.addressof(code))
        call("prctl", NO_NEW_RIGHTS, 1, 0, 0, 0)
        call("prctl", FILTER, 2, program, 0, 0)

    def enter(self, limits):
        """In the guard: a folder for the program alone, and process numbers."""
        if self.namespaces:
            call("unshare", NEW_MOUNTS | NEW_PROCESSES)
            options = f"mode=1777,size={limits['disk']},nr_inodes=10000"
            mount("none", SCRATCH, "tmpfs", NO_SUID | NO_DEVICES | NO_PROGRAMS, options)
        elif not LINUX:
            tempfile.tempdir = tempfile.mkdtemp()
            os.chdir(tempfile.tempdir)

    def drop_rights(self, limits):
        """In the program: its limits, then a user without rights, then the filter."""
        if self.namespaces:
            os.chdir(SCRATCH)
        most = {
            "CORE": 1,  # the one number at which a handler of dumps is not called either
            "FSIZE": limits["disk"],
            "NOFILE": 64,
            "CPU": math.ceil(limits["processor_seconds"]),
        }
        if LINUX:
            most |= {"AS": self.memory + limits["memory"], "MEMLOCK": 0, "MSGQUEUE": 0, "SIGPENDING": 64}
        if self.user or self.namespaces or not LINUX:  # elsewhere it would count the user's other processes
            most["NPROC"] = limits["threads"]
        for name, value in most.items():
            number = getattr(resource, f"RLIMIT_{name}")
            _, bound = resource.getrlimit(number)
            value = value if bound == resource.RLIM_INFINITY else min(value, bound)
            with suppress(*([] if LINUX else [ValueError, OSError])):
                resource.setrlimit(number, (value, value))
        if self.user:
            os.setgroups([])
            os.setresgid(self.user, self.user, self.user)
            os.setresuid(self.user, self.user, self.user)
        if LINUX:
            call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
            call("prctl", DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if self.filter:
            self.apply_filter()


def guard(sandbox, connection):
    """One task: runs its program within its limits, and answers."""
    if LINUX:
        call("prctl", DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    task = json.loads(connection.recv_bytes())
    limits, stdin = task["limits"], task["stdin"].encode("utf-8", "surrogatepass")
    end = time.monotonic() + limits["seconds"]
    sandbox.enter(limits)
    (reads, feed), (report, writes) = os.pipe(), os.pipe()
    program = os.fork()
    if not program:
        os.dup2(reads, 0)
        os.dup2(2 if task["tests"] else writes, 1)
        os.dup2(writes, REPORT)
        os.closerange(4, 1024)
        sandbox.drop_rights(limits)
        perform(task["code"], task["tests"], task["mark"])
    os.close(reads)
    os.close(writes)
    os.set_blocking(feed, False)
    stdin = memoryview(stdin)
    output = bytearray()
    while (rest := end - time.monotonic()) > 0 and len(output) <= limits["output"]:
        ready, waits, _ = select.select([report, 0], [feed] if feed else [], [], rest)
        if waits:
            with suppress(BrokenPipeError):
                stdin = stdin[os.write(feed, stdin) if stdin else 0 :]
                if stdin:
                    continue
            os.close(feed)
            feed = 0
        if 0 in ready or not (ready or waits):  # nobody waits for the answer; time is over
            break
        if report in ready:
            printed = os.read(report, 65536)
            if not printed:
                break
            output += printed
    with suppress(ProcessLookupError):
        os.kill(program, signal.SIGKILL)  # a program that ended keeps its exit code
    _, status, used = os.wait4(program, 0)
    if not LINUX:
        shutil.rmtree(os.getcwd(), ignore_errors=True)
    head = f"{os.waitstatus_to_exitcode(status)} {used.ru_utime + used.ru_stime}\n"
    connection.send_bytes(head.encode() + output[: limits["output"]])


def perform(code, tests, mark, leave=os._exit):
    """In the program's process: runs its text, then its tests, and ends."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    own = {name: getattr(builtins, name) for name in vars(builtins)}
    result = 0
    try:
        exec(compile(code, "<program>", "exec", dont_inherit=True), vars(main))
    except SystemExit as error:
        result = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        result = 1
    vars(builtins).update(own)
    if tests:
        for number, test in enumerate(tests if result == 0 else []):
            report = partial(check, mark, number)
            try:
                exec(compile(test, "<test>", "exec", dont_inherit=True), {**vars(main), "__check__": report})
                report(-1)
            except BaseException:
                continue
    else:
        with suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
    leave(result & 255)


def check(mark, test, number, *values, write=os.write):
    """Reports the values in a check of a test, if they are plain data; number -1, without any, is the test's end.

    Two values of which neither is plain data are compared here, by what their class says.
    """
    told = []
    for value in values:
        with suppress(Exception):
            told.append(plain(value))
    if len(values) == 2 and not told:
        told = [bool(values[0] == values[1])]
    elif len(told) < len(values):
        return
    text = json.dumps([test, number, *told])
    if len(text) <= LONGEST:
        write(REPORT, f"{mark} {text}\n".encode())


def plain(value):
    """A value of Python's own types as JSON has it, whatever its class says; TypeError for any other."""
    if value is None or value is True or value is False:
        return value
    for base, exact in (int, int.__int__), (float, float.__float__), (str, str.__str__):
        if isinstance(value, base):
            return exact(value)
    if isinstance(value, list):
        return [plain(each) for each in list.__iter__(value)]
    for base in (tuple, set, frozenset, KEYS):
        if isinstance(value, base):
            name = "set" if base is KEYS else base.__name__
            return {name: [plain(each) for each in base.__iter__(value)]}
    if isinstance(value, dict):
        return {"dict": [[plain(name), plain(each)] for name, each in dict.items(value)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if type(value) is Fraction:
        return {"Fraction": [value.numerator, value.denominator]}
    if type(value) is Decimal:
        return {"Decimal": [str(value)]}
    raise TypeError("no plain data")


def serve():
    """Answers tasks until the other end is closed."""
    connection = Connection(os.dup(0))
    os.umask(0o022)
    filters, limits = json.loads(connection.recv_bytes())
    for name in MODULES:
        with suppress(ImportError):
            importlib.import_module(name)
    with suppress(OSError):
        ctypes.CDLL("libgcc_s.so.1")  # the end of a thread needs it
    builtins.exit = builtins.quit = sys.exit
    sandbox = Sandbox(filters, limits)
    connection.send_bytes(json.dumps(sandbox.missing).encode())
    gc.collect()
    gc.freeze()
    while True:
        select.select([0], [], [])
        child = os.fork()
        if not child:
            try:
                guard(sandbox, connection)
            except EOFError:
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            return


if __name__ == "__main__":
    serve()
