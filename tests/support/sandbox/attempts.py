"""Attempts of a program to get out of the sandbox: each prints a line `out` if it reaches what is outside.

Each runs with names for what is outside: SECRET (a file), FOLDER (its folder), HOME, PORT (a server), NAME
(an abstract socket), SOCKET (a socket's file), PID (a process) and SEGMENT (the key of shared memory). `show`
prints "out" for what is true; `raw` makes a system call by its number on x86-64, and shows whether it worked.
"""

MODULES = """
import ctypes, mmap, os, resource, signal, socket, stat, struct, subprocess, sys, threading, time
CALL = ctypes.CDLL(None, use_errno=True)
BUFFER = ctypes.create_string_buffer(4096)
def show(found):
    print('out' if found else '', flush=True)
def raw(number, *arguments):
    given = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = CALL.syscall(ctypes.c_long(number), *given)
    show(result >= 0)
    return result
"""
READS = {
    "a file of the user": "show(open(SECRET).read())",
    "the list of users": "show(open('/etc/passwd').read())",
    "the list of passwords": "show(open('/etc/shadow').read())",
    "the home": "show(set(os.listdir(HOME)) - set(sys.base_prefix.split('/')))",
    "the environment": "show('GRPO_SECRET' in repr(os.environ) + open('/proc/self/environ').read())",
    "another's environment": "show(open(f'/proc/{PID}/environ').read())",
    "another's command": "show(open(f'/proc/{PID}/cmdline').read())",
    "the parent's environment": "show(b'GRPO_SECRET' in open(f'/proc/{os.getppid()}/environ','rb').read())",
    "the first process's root": "show(os.path.exists('/proc/1/root' + SECRET))",
    "the first process's command": "show(open('/proc/1/cmdline').read())",
    "its own memory map": "show(open('/proc/self/maps').read())",
    "its own root by /proc": "show(os.listdir('/proc/self/root'))",
    "the mounts": "show(open('/proc/self/mountinfo').read())",
    "the keys": "show(open('/proc/keys').read() + 'x')",
    "the kernel's log": "raw(103, 3, BUFFER, 4096)",
    "the kernel's settings": "show(open('/proc/sys/kernel/hostname').read())",
    "the devices' folder": "show(os.listdir('/sys'))",
    "/root": "show(os.listdir('/root/.ssh'))",
    "/var": "show(os.listdir('/var'))",
    "/run": "show(os.listdir('/run'))",
    "/tmp": "show(os.listdir('/tmp'))",
    "/etc": "show(os.listdir('/etc'))",
    "commands": "show(os.listdir('/usr/bin'))",
    "libraries of the system": "show(os.listdir('/usr/lib'))",
    "the interpreter": "show(open(sys.executable, 'rb').read(4))",
    "the old root": "show(os.listdir('/old'))",
    "beyond the root": "show(os.path.exists('/../../..' + SECRET) and open('/../../..' + SECRET).read())",
    "a link to it": "os.symlink(SECRET, 'link'); show(open('link').read())",
    "a second name of it": "os.link(SECRET, 'name'); show(open('name').read())",
    "a path of it": "opened = os.open(SECRET, os.O_PATH); show(open(f'/proc/self/fd/{opened}').read())",
    "openat2": "raw(437, -100, SECRET.encode(), struct.pack('QQQ', 0, 0, 0), 24)",
    "a file's handle": "raw(303, -100, SECRET.encode(), BUFFER, BUFFER, 0)",
    "a file by handle": "raw(304, -100, struct.pack('Ii', 8, 1) + bytes(8), 0)",
    "open descriptors": """
for number in range(256):
    try:
        found = os.fstat(number)
    except OSError:
        continue
    show(found.st_nlink and not (stat.S_ISFIFO(found.st_mode) or stat.S_ISCHR(found.st_mode)))""",
    "above its root": """
os.mkdir('cage')
os.chroot('cage')
for _ in range(30):
    os.chdir('..')
os.chroot('.')
show(os.path.exists(SECRET))""",
    "kernel memory": "show(open('/proc/kcore', 'rb').read(64) or open('/dev/mem', 'rb').read(1))",
    "a disk": "show(os.open('/dev/vda', os.O_RDONLY) or os.open('/dev/sda', os.O_RDONLY))",
    "other devices": "show(set(os.listdir('/dev')) - {'null'})",
    "changes of a folder": "raw(254, raw(294, 0), FOLDER.encode(), 0xfff)",
    "all opening": "raw(300, 0, 0)",
    "the container's daemon": "show(os.stat('/var/run/docker.sock'))",
    "memory of others": "show(os.listdir('/dev/shm'))",
    "installed packages": "import glob; show(glob.glob(sys.base_prefix + '/lib/python*/*-packages/*'))",
}
WRITES = {
    "beside the secret": "open(FOLDER + '/new', 'w').close(); print('out')",
    "over the secret": "open(SECRET, 'w').write('x'); print('out')",
    "to its end": "open(SECRET, 'a').write('x'); print('out')",
    "cutting it": "os.truncate(SECRET, 0); print('out')",
    "deleting it": "os.unlink(SECRET); print('out')",
    "renaming it": "os.rename(SECRET, FOLDER + '/new'); print('out')",
    "its mode": "os.chmod(SECRET, 0o777); print('out')",
    "its owner": "os.chown(SECRET, os.getuid(), os.getgid()); print('out')",
    "its time": "os.utime(SECRET, (1, 1)); print('out')",
    "its attributes": "os.setxattr(SECRET, 'user.x', b'x'); print('out')",
    "a folder beside it": "os.mkdir(FOLDER + '/new'); print('out')",
    "a link beside it": "os.symlink('/', FOLDER + '/new'); print('out')",
    "a pipe beside it": "os.mkfifo(FOLDER + '/new'); print('out')",
    "a file without a name beside it": "os.open(FOLDER, os.O_TMPFILE | os.O_RDWR); print('out')",
    "in the library": "open(os.path.dirname(os.__file__) + '/new.py', 'w').close(); print('out')",
    "over the library": "open(os.__file__, 'a').close(); print('out')",
    "the library's mode": "os.chmod(os.__file__, 0o777); print('out')",
    "in /": "open('/new', 'w').close(); print('out')",
    "in /tmp": "open('/tmp/new', 'w').close(); print('out')",
    "in /dev": "open('/dev/new', 'w').close(); print('out')",
    "in memory for all": "open('/dev/shm/new', 'w').close(); print('out')",
    "in the home": "open(HOME + '/new', 'w').close(); print('out')",
    "what all programs load": "open('/etc/ld.so.preload', 'w').close(); print('out')",
    "the kernel's settings": "open('/proc/sys/kernel/core_pattern', 'w').write('|/bin/sh'); print('out')",
    "the kernel's keys": "open('/proc/sysrq-trigger', 'w').write('h'); print('out')",
    "a group of processes": "os.mkdir('/sys/fs/cgroup/new'); print('out')",
    "a score of another process": "open(f'/proc/{PID}/oom_score_adj', 'w').write('1000'); print('out')",
    "its own score": "open('/proc/self/oom_score_adj', 'w').write('0'); print('out')",
    "its own memory by /proc": "open('/proc/self/mem', 'r+b'); print('out')",
    "a device file": "os.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(8, 0)); print('out')",
    "a null device's mode": "os.chmod('/dev/null', 0o600); print('out')",
    "a program with another's rights": """
open('id', 'w').close()
os.chmod('id', 0o4755)
os.chown('id', 12345, 12345)
print('out')""",
    "a program to run": "open('run', 'w').close(); os.chmod('run', 0o755); os.execv('run', ['run'])",
    "swap": "raw(167, SECRET.encode(), 0)",
    "accounting": "raw(163, SECRET.encode())",
    "quotas": "raw(179, 0x80000700, b'/', 0, BUFFER)",
}
NETWORK = {
    "a server here": "socket.create_connection(('127.0.0.1', PORT), 1); print('out')",
    "a far host": "socket.create_connection(('1.1.1.1', 53), 1); print('out')",
    "a name": "socket.getaddrinfo('example.org', 80); print('out')",
    "a page": """
import urllib.request
urllib.request.urlopen(f'http://127.0.0.1:{PORT}', timeout=1)
print('out')""",
    "a datagram": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 9)); print('out')",
    "version 6": "socket.socket(socket.AF_INET6); print('out')",
    "a server of its own": "socket.create_server(('127.0.0.1', 0)); print('out')",
    "an abstract socket": "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + NAME); print('out')",
    "an own abstract socket": "s = socket.socket(socket.AF_UNIX); s.bind('\\0new'); print('out')",
    "a socket's file": "s = socket.socket(socket.AF_UNIX); s.connect(SOCKET); print('out')",
    "raw packets": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); print('out')",
    "the machine's host": "s = socket.socket(socket.AF_VSOCK); s.bind((0xffffffff, 18997)); print('out')",
    "the kernel's messages": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); print('out')",
    "the kernel's ciphers": "socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET); print('out')",
    "radio": "socket.socket(31, socket.SOCK_RAW, 1); print('out')",
    "any family": "show(any(CALL.socket(n // 6, n % 6, 0) >= 0 for n in range(276)))",
    "a pair of other families": "show(any(CALL.socketpair(n, 1, 0, BUFFER) >= 0 for n in range(2, 46)))",
    "in old numbers": """
code = mmap.mmap(-1, 4096, prot=7)  # socket(AF_INET, SOCK_STREAM, 0) by the 32-bit call
code.write(bytes.fromhex('b867010000bb02000000b90100000031d2cd80c3'))
address = ctypes.addressof(ctypes.c_char.from_buffer(code))
show(ctypes.CFUNCTYPE(ctypes.c_int)(address)() >= 0)""",
    "in the numbers of x32": "raw(0x40000000 + 41, 2, 1, 0)",
    "a ring of requests": "raw(425, 8, BUFFER)",
    "descriptors in a message": """
one, other = socket.socketpair()
socket.send_fds(one, [b'x'], [0])
show(socket.recv_fds(other, 1, 1)[1])""",
}
PROCESSES = {
    "a signal": "os.kill(PID, 18); print('out')",
    "no signal": "os.kill(PID, 0); print('out')",
    "a signal to a thread": "raw(234, PID, PID, 18)",
    "a signal with a value": "raw(129, PID, 18, struct.pack('iiiiii', 18, 0, -1, 0, 0, 0) + bytes(104))",
    "a signal to all": "os.kill(-1, 0); print('out')",
    "a signal by a handle": "handle = os.pidfd_open(PID); signal.pidfd_send_signal(handle, 18); print('out')",
    "a signal to its parent": "os.kill(os.getppid() or -1, 0); print('out')",
    "a signal by a pipe": """
import fcntl
reads, writes = os.pipe()
fcntl.fcntl(reads, 8, PID)
print('out')""",
    "the signal's number": "import fcntl; fcntl.fcntl(os.pipe()[0], 10, 9); print('out')",
    "the list of processes": "show(sum(name.isdigit() for name in os.listdir('/proc')) > 1)",
    "a trace": "show(CALL.ptrace(16, PID, 0, 0) == 0)",
    "a trace of itself": "show(CALL.ptrace(0, 0, 0, 0) == 0)",
    "reading memory": "raw(310, PID, BUFFER, 1, BUFFER, 1, 0)",
    "writing memory": "raw(311, PID, BUFFER, 1, BUFFER, 1, 0)",
    "a descriptor of another": "raw(438, os.pidfd_open(PID), 0, 0)",
    "comparing": "raw(312, PID, PID, 1, 0, 0)",
    "limits of another": "resource.prlimit(PID, resource.RLIMIT_CORE, (0, 0)); print('out')",
    "priority of another": "os.setpriority(os.PRIO_PROCESS, PID, 19); print('out')",
    "processors of another": "os.sched_setaffinity(PID, {0}); print('out')",
    "a higher priority": "os.nice(-5); print('out')",
    "a schedule": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)); print('out')",
    "a child": "os.fork(); print('out')",
    "a child that shares memory": "raw(58)",
    "a child by its number": "raw(57)",
    "a child by clone": "raw(56, 17, 0, 0, 0, 0)",
    "a child by clone3": "raw(435, struct.pack('Q', 0) * 4 + struct.pack('Q', 17) + bytes(24), 64)",
    "a command": "subprocess.run(['/bin/sh', '-c', 'true']); print('out')",
    "itself again": "os.execv(sys.executable, [sys.executable, '-c', 'print(\"out\")'])",
    "a command by its descriptor": "raw(322, 0, b'', BUFFER, BUFFER, 0x1000)",
    "a pool": "import multiprocessing; multiprocessing.Pool(2); print('out')",
    "spawning": "os.posix_spawn('/bin/sh', ['sh'], {}); print('out')",
    "a session of its own": "os.setsid(); print('out')",
    "life after its parent": "show(CALL.prctl(1, 0, 0, 0, 0) == 0)",
    "shared memory of System V": "show(CALL.shmget(SEGMENT, 0, 0) >= 0)",
    "new shared memory": "show(CALL.shmget(0, 4096, 0o1600) >= 0)",
    "semaphores": "show(CALL.semget(0, 1, 0o1600) >= 0)",
    "messages": "show(CALL.msgget(0, 0o1600) >= 0)",
    "messages by name": "raw(240, b'new', 0o102, 0o600, None)",
    "a file in memory": "os.memfd_create('x'); print('out')",
    "secret memory": "raw(447, 0)",
    "pages in a pipe": "raw(278, os.pipe()[1], struct.pack('QQ', ctypes.addressof(BUFFER), 4096), 1, 0)",
    "a larger pipe": "import fcntl; fcntl.fcntl(os.pipe()[1], 1031, 1 << 20); print('out')",
    "locked pages": "show(CALL.mlock(BUFFER, 4096) == 0)",
    "all pages locked": "show(CALL.mlockall(2) == 0)",
    "the session's keys": "raw(250, 10, -3, b'user', b'grpo-secret', 0)",
    "the user's keys": "raw(250, 0, -4, 0)",
    "a new key": "raw(248, b'user', b'new', b'x', 1, -3)",
    "a requested key": "raw(249, b'user', b'grpo-secret', None, 0)",
    "more rights": "os.setuid(0) if os.getuid() else os.setgroups([0]); open(SECRET).read(); print('out')",
    "another user": "os.setresuid(12345, 12345, 12345); print('out')",
    "capabilities": "raw(126, struct.pack('Ii', 0x20080522, 0), b'\\xff' * 24)",
    "a program's rights": "show(CALL.prctl(38, 0, 0, 0, 0) == 0 or CALL.prctl(47, 2, 0, 0, 0) == 0)",
    "another filter": "raw(317, 1, 0, struct.pack('HxxxxxxQ', 1, 0))",
    "a namespace of users": "show(CALL.unshare(0x10000000) == 0)",
    "a mount namespace": "show(CALL.unshare(0x00020000) == 0)",
    "a network namespace": "show(CALL.unshare(0x40000000) == 0)",
    "a process namespace": "show(CALL.unshare(0x20000000) == 0)",
    "a namespace by clone": "raw(56, 0x10000011, 0, 0, 0, 0)",
    "another's namespace": "raw(308, os.open(f'/proc/{PID}/ns/net', os.O_RDONLY), 0)",
    "a mount": "show(CALL.mount(b'none', b'/scratch', b'tmpfs', 0, None) == 0)",
    "writing by a mount": "show(CALL.mount(None, b'/', None, 4096 | 32, None) == 0)",
    "taking a mount away": "show(CALL.umount2(os.path.dirname(os.__file__).encode(), 2) == 0)",
    "a mount in steps": "raw(430, b'tmpfs', 0)",
    "a tree of mounts": "raw(428, -100, b'/', 1)",
    "a mount's attributes": "raw(442, -100, b'/', 0, bytes(32), 32)",
    "another root": "raw(155, b'.', b'.')",
    "higher limits": "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40)); print('out')",
    "more threads": "resource.setrlimit(resource.RLIMIT_NPROC, (1 << 20, 1 << 20)); print('out')",
    "more processor time": "resource.setrlimit(resource.RLIMIT_CPU, (1000, 1000)); print('out')",
    "the clock": "time.clock_settime(time.CLOCK_REALTIME, 0); print('out')",
    "the clock's speed": "raw(159, BUFFER)",
    "the host's name": "socket.sethostname('x'); print('out')",
    "a program in the kernel": "raw(321, 0, BUFFER, 72)",
    "counters": "raw(298, BUFFER, 0, -1, -1, 0)",
    "page faults": "raw(323, 0)",
    "a module": "raw(175, BUFFER, 16, b'')",
    "another kernel": "raw(246, 0, 0, None, 0)",
    "a restart": "raw(169, 0, 0, 0)",
    "ports": "raw(173, 0, 1, 1)",
    "segments": "raw(154, 1, BUFFER, 16)",
    "another personality": "raw(135, 0x0400000)",
    "requests": "raw(206, 1, BUFFER)",
    "a timer": "raw(222, 0, None, BUFFER)",
    "a terminal's input": "import fcntl; fcntl.ioctl(0, 0x5412, b'x'); print('out')",
}
ATTEMPTS = {
    f"{kind}: {name}": program
    for kind, programs in {"read": READS, "write": WRITES, "network": NETWORK, "process": PROCESSES}.items()
    for name, program in programs.items()
}
# What succeeds without a root of its own and without Landlock: the files that the program's user may read.
_READ = (
    "a file of the user", "the list of users", "the list of passwords", "the home", "another's environment",
    "another's command", "the parent's environment", "the first process's command", "its own memory map",
    "the mounts", "its own root by /proc", "the keys", "the kernel's settings", "the devices' folder",
    "/root", "/var", "/run", "/tmp", "/etc", "commands", "libraries of the system", "the interpreter",
    "a path of it", "beyond the root", "a disk", "other devices", "memory of others", "installed packages",
    "the container's daemon",
)  # fmt: skip
FILES = {"process: the list of processes", *(f"read: {name}" for name in _READ)}
# Landlock leaves names and sizes of files visible, and installed packages.
NAMES = {"read: the container's daemon", "read: installed packages"}
