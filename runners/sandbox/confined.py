"""A process that isolates itself from the machine and then runs programs. `sandbox.py` starts it.

This script requires only the standard library. It answers the first message with the missing
protections. It answers each task (limits, then the program) with the program's exit code, CPU time
and output.

The process forks for each program and enforces the time limit. A program therefore starts with its
modules loaded, and needs only the standard library's files. This process never stores a program or
its output, because the next fork could read them.
"""

# pyright: basic
import atexit
import builtins
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import struct
import sys
import tempfile
import threading
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

# Modules loaded before the root is changed: those that programs often import, and those that need
# system libraries.
MODULES = """asyncio bisect bz2 collections copy dataclasses datetime decimal enum fractions
functools hashlib heapq itertools lzma math operator random re sqlite3 ssl statistics string typing
uuid zlib"""
LINUX = sys.platform == "linux"
ROOT = "/sys"  # the programs' root; any folder that every system has
SCRATCH = "/scratch"
LIBRARY = list(filter(os.path.isdir, (*sys.path, "/usr/share/zoneinfo")))
# Flags for unshare.
NEW_MOUNTS = 0x20000
NEW_PROCESSES = 0x20000000
NEW_USERS = 0x10000000
NEW_OTHERS = 0x4C000000
# Flags for mount.
READ_ONLY = 1
BARE = 2 | 4
NO_PROGRAMS = 8
REMOUNT = 32
BIND = 4096
PRIVATE = 1 << 14 | 1 << 18
# Options for prctl.
DEATH_SIGNAL = 1
FILTER = 22
NO_NEW_RIGHTS = 38
# System call numbers: keyctl, and the first of Landlock's three calls.
KEYCTL = {"x86_64": 250, "aarch64": 219}
LANDLOCK = 444
# Landlock's access rights: reading and mapping files and reading folders; all rights.
READING = 1 | 4 | 8
ALL_RIGHTS = 0x1FFF
# A program's file descriptors: one for reports, and one that stays open while the program lives.
REPORT = 3
LEASH = 4
LONGEST = 100_000  # limit on the characters of a report
builtins.exit = builtins.quit = sys.exit
OWN = dict(vars(builtins))
libc = ctypes.CDLL(None, use_errno=True)


def call(name, *arguments):
    """Calls a function from the C library. Raises OSError if the call fails."""
    given = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = getattr(libc, name)(*given)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def mount(source, target, kind=None, flags=0, options=None):
    names = [each and each.encode() for each in (source, target, kind)]
    call("mount", *names, flags, options and options.encode())


class Sandbox:
    """The isolation of this process and its programs. `missing` lists the missing protections, with
    the reasons.
    """

    def __init__(self, filters):
        """Isolates this process. `filters` contains two system-call filters: for programs with
        their own files, and for programs without.
        """
        self.missing = []
        self.user = 0  # the programs' user id; 0 means this process's user
        self.namespaces = False
        if not LINUX:
            return
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        self.memory = pages * resource.getpagesize()  # bytes of address space before any program
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")  # killed first if memory runs out
        with suppress(OSError, KeyError):  # if the call does not exist, there are no keys
            call("syscall", KEYCTL[os.uname().machine], 1, None)
        first, _, count = map(int, Path("/proc/self/uid_map").read_text().splitlines()[-1].split())
        library = Path(os.__file__)
        is_open = all(place.stat().st_mode & 1 for place in library.parents)
        for name, protect in (
            ("namespaces", self.enter_namespaces),
            ("Landlock", self.restrict_files),
        ):
            try:
                protect()
                break  # Landlock is only for machines without namespaces
            except OSError as error:
                self.missing.append(f"{name} ({error.strerror})")
        self.namespaces = not self.missing
        if os.geteuid() == 0 and count > 60_000:  # root's number of threads is not limited
            if library.stat().st_mode & 4 and (self.namespaces or is_open):
                drawn = int.from_bytes(os.urandom(4)) % min(count // 2, 10**9)
                self.user = first + count - 3 - drawn
            else:
                self.missing.append("a separate user (only root can read its Python)")
        self.filter = bytes.fromhex(filters[not self.namespaces])
        if not self.filter:
            self.missing.append(f"seccomp (not for {os.uname().machine})")

    def enter_namespaces(self):
        """Changes the root to one that contains only the standard library (read-only), a null
        device and a folder.
        """
        identities = {"uid_map": os.getuid(), "gid_map": os.getgid()}
        flags = NEW_MOUNTS | NEW_PROCESSES | NEW_OTHERS
        try:
            call("unshare", flags)
        except PermissionError:
            call("unshare", flags | NEW_USERS)
            Path("/proc/self/setgroups").write_text("deny")
            for name, number in identities.items():
                Path(f"/proc/self/{name}").write_text(f"{number} {number} 1")
        first = os.fork()
        if first:  # the new process-id namespace starts with the child
            os.waitpid(first, 0)
            os._exit(0)
        call("prctl", DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        self.processes = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        mount(None, "/", flags=PRIVATE)
        mount("none", ROOT, "tmpfs", BARE, "mode=755,size=1m")
        for place in LIBRARY:
            os.makedirs(ROOT + place, exist_ok=True)
            mount(os.path.realpath(place), ROOT + place, flags=BIND)
            kept = os.statvfs(place).f_flag & NO_PROGRAMS
            mount(None, ROOT + place, flags=REMOUNT | BIND | READ_ONLY | BARE | kept)
            for packages in Path(ROOT + place).glob("*-packages"):
                mount("none", str(packages), "tmpfs", READ_ONLY)
        os.mkdir(ROOT + SCRATCH)
        os.mkdir(ROOT + "/dev")
        Path(ROOT + os.devnull).touch()
        mount(os.devnull, ROOT + os.devnull, flags=BIND)
        os.chdir(ROOT)
        call("pivot_root", b".", b".")
        call("umount2", b".", 2)  # takes effect once no process uses the old root
        mount(None, "/", flags=REMOUNT | BIND | READ_ONLY | BARE)

    def restrict_files(self):
        """Restricts file access: only the standard library's files can be read, and no file can be
        written.
        """
        rules = call("syscall", LANDLOCK, struct.pack("Q", ALL_RIGHTS), 8, 0)
        for place in LIBRARY:
            rule = struct.pack("=Qi", READING, os.open(place, os.O_PATH | os.O_CLOEXEC))
            call("syscall", LANDLOCK + 1, rules, 1, rule, 0)
        call("prctl", NO_NEW_RIGHTS, 1, 0, 0, 0)
        call("syscall", LANDLOCK + 2, rules, 0)

    def fork(self):
        """Forks like `os.fork`, and gives the child a new process-id namespace."""
        if self.namespaces:
            call("setns", self.processes, NEW_PROCESSES)
            call("unshare", NEW_PROCESSES)
        return os.fork()

    def enter(self, limits):
        """Creates a folder for one program. Runs in the program's process."""
        if self.namespaces:
            call("unshare", NEW_MOUNTS)
            options = f"mode=1777,size={limits['disk']},nr_inodes=10000"
            mount("none", SCRATCH, "tmpfs", BARE | NO_PROGRAMS, options)
            os.chdir(SCRATCH)
        elif not LINUX:
            os.chdir(os.environ["HOME"])

    def drop_rights(self, limits):
        """Sets the program's limits, switches to a user without rights, and installs the filter.
        Runs in the program's process.
        """
        most = {
            "CORE": 1,  # byte: the only limit that also prevents calling a core-dump handler
            "CPU": limits["processor_seconds"],
            "FSIZE": limits["disk"],
            "NOFILE": 64,
        }
        if LINUX:
            most |= {"AS": self.memory + limits["memory"], "MEMLOCK": 0, "SIGPENDING": 64}
        # otherwise, the limit would also count the user's other processes
        if self.user or self.namespaces or not LINUX:
            most["NPROC"] = limits["threads"]
        for name, value in most.items():
            with suppress(ValueError, OSError):  # a lower limit is set; macOS lacks some limits
                resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
        if self.user:
            os.setgroups([])
            os.setresgid(self.user, self.user, self.user)
            os.setresuid(self.user, self.user, self.user)
        if LINUX:
            call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
            call("prctl", DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
            call("prctl", NO_NEW_RIGHTS, 1, 0, 0, 0)
        if LINUX and self.filter:
            code = ctypes.create_string_buffer(self.filter)
            program = struct.pack("HxxxxxxQ", len(self.filter) // 8, ctypes.addressof(code))
            call("prctl", FILTER, 2, program, 0, 0)


def answer(sandbox, connection):
    """Runs one task's program within its limits, and sends the answer. Returns False if the program
    did not start.
    """
    limits = json.loads(connection.recv_bytes())
    output = new_file()
    lives, leash = os.pipe()
    program = sandbox.fork()
    if not program:
        try:
            begin(sandbox, connection, limits, output, leash)
        finally:
            os._exit(1)
    os.close(leash)
    if not os.read(lives, 1):  # the program ended before it had read its task
        return False
    # Ends early if the program ends, or if the connection closes, because no one waits for the
    # answer.
    select.select([lives, 0], [], [], limits["seconds"])
    os.kill(program, signal.SIGKILL)  # a program that has already ended keeps its exit code
    _, status, used = os.wait4(program, 0)
    head = f"{os.waitstatus_to_exitcode(status)} {used.ru_utime + used.ru_stime}\n".encode()
    size = min(os.fstat(output).st_size, limits["output"])
    os.write(0, struct.pack("!i", len(head) + size) + head)  # the header of a `Connection` message
    sent = 0
    while sent < size:
        sent += os.sendfile(0, output, sent, size - sent)
    os.close(lives)
    os.close(output)
    return True


def begin(sandbox, connection, limits, output, leash):
    """Reads the task, drops all rights and runs the program. Runs in the program's process."""
    task = json.loads(connection.recv_bytes())
    sandbox.enter(limits)
    stdin = new_file()
    os.write(stdin, task["stdin"].encode("utf-8", "surrogatepass"))
    os.lseek(stdin, 0, os.SEEK_SET)
    os.write(leash, b"1")
    os.dup2(stdin, 0)
    os.dup2(2 if task["tests"] else output, 1)  # 2 is the null device
    os.dup2(output, REPORT)
    os.dup2(leash, LEASH)
    os.closerange(LEASH + 1, 1024)
    sandbox.drop_rights(limits)
    perform(task["code"], task["tests"], task["mark"])


def new_file():
    """Returns the descriptor of a new, empty file."""
    return os.memfd_create("") if LINUX else tempfile.mkstemp()[0]


def perform(code, tests, mark, leave=os._exit):
    """Executes the program's text, then its tests, and exits. Runs in the program's process."""
    main = sys.modules["__main__"] = type(sys)("__main__")
    result = 0
    try:
        run(code, vars(main))
    except SystemExit as error:
        result = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        result = 1
    builtins.__dict__.update(OWN)
    for number, test in enumerate(tests if result == 0 else []):
        report = partial(check, mark, number)
        with suppress(BaseException):
            run(test, {**vars(main), "__check__": report})
            report(-1)
    if not tests:
        with suppress(BaseException):
            vars(threading)["_shutdown"]()
            atexit._run_exitfuncs()
            sys.stdout.flush()
    leave(result & 255)


def run(code, names):
    exec(compile(code, "<program>", "exec", dont_inherit=True), names)  # noqa: S102


def check(mark, test, number, *values, write=os.write):
    """Reports the values for a check in a test. The number -1 without values marks the end of the
    test.

    If neither of two values is plain data, they are compared in this process, with their classes'
    methods.
    """
    told = [plain(value) for value in values]
    if told == [{"object": []}] * 2:
        told = [bool(values[0] == values[1])]
    text = json.dumps([test, number, *told])
    if len(text) <= LONGEST:
        write(REPORT, f"{mark}{text}\n".encode())


def plain(value):
    """Converts a value of a built-in type (or a subclass) to JSON's form. Any other value becomes
    `{"object": []}`.
    """
    for base, told in PLAIN.items():
        if isinstance(value, base):
            return told(value)
    return float(value) if hasattr(value, "as_integer_ratio") else {"object": []}


def items(name, base):
    """Returns a function that converts a collection to JSON's form: the name of its type, and its
    items.
    """
    return lambda value: {name: [plain(each) for each in base.__iter__(value)]}


PLAIN = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    bytes: lambda value: {"bytes": [bytes.hex(value)]},
    bytearray: lambda value: {"bytes": [bytearray.hex(value)]},
    list: lambda value: [plain(each) for each in list.__iter__(value)],
    dict: lambda value: {"dict": [[plain(name), plain(each)] for name, each in dict.items(value)]},
    **{base: items(base.__name__, base) for base in (tuple, set, frozenset)},
    type({}.keys()): items("set", type({}.keys())),
}


def serve():
    """Answers tasks until the connection is closed."""
    connection = Connection(os.dup(0))
    os.umask(0o022)
    for name in MODULES.split():
        with suppress(ImportError):
            importlib.import_module(name)
    with suppress(OSError):
        ctypes.CDLL("libgcc_s.so.1")  # required when a thread ends
    sandbox = Sandbox(json.loads(connection.recv_bytes()))
    connection.send_bytes(json.dumps(sandbox.missing).encode())
    gc.freeze()
    with suppress(EOFError, OSError):  # the other end has been closed
        while answer(sandbox, connection):
            pass


if __name__ == "__main__":
    serve()
