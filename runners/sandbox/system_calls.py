"""A kernel filter that permits only the system calls that a Python program needs.

The filter prevents creating processes, sockets (except a connected pair), and memory outside the
address space (files in memory, shared segments, rings). It also prevents using keys, namespaces and
tracing, and changing the settings of other processes.
"""

import errno
import os
import struct

# name:number on x86-64:number on aarch64
_CALLS = """
read:0:63 write:1:64 close:3:57 fstat:5:80 lseek:8:62 pread64:17:67 pwrite64:18:68 readv:19:65
writev:20:66 preadv:295:69 pwritev:296:70 poll:7: ppoll:271:73 select:23: pselect6:270:72 dup:32:23
dup2:33: dup3:292:24 pipe:22: pipe2:293:59 flock:73:32 fsync:74:82 fdatasync:75:83 ftruncate:77:46
fadvise64:221:223 copy_file_range:326:285 sendfile:40:71 epoll_create1:291:20 epoll_ctl:233:21
epoll_wait:232: epoll_pwait:281:22 eventfd2:290:19 stat:4: lstat:6: newfstatat:262:79 statx:332:291
access:21: faccessat:269:48 faccessat2:439:439 readlink:89: readlinkat:267:78 getdents64:217:61
getcwd:79:17 chdir:80:49 fchdir:81:50 statfs:137:43 fstatfs:138:44 umask:95:166 listxattr:194:11
llistxattr:195:12 mmap:9:222 mprotect:10:226 munmap:11:215 brk:12:214 mremap:25:216 madvise:28:233
msync:26:227 exit:60:93 exit_group:231:94 getpid:39:172 getppid:110:173 gettid:186:178
getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 getresuid:118:148 getresgid:120:150
getgroups:115:158 getpgrp:111: getpgid:121:155 getsid:124:156 uname:63:160 sysinfo:99:179
getrusage:98:165 times:100:153 getrlimit:97:163 getpriority:140:141 getcpu:309:168
sched_yield:24:124 sched_getaffinity:204:123 sched_getparam:143:121 sched_getscheduler:145:120
wait4:61:260 waitid:247:95 futex:202:98 set_robust_list:273:99 rseq:334:293 set_tid_address:218:96
restart_syscall:219:128 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139
rt_sigpending:127:136 rt_sigtimedwait:128:137 rt_sigsuspend:130:133 sigaltstack:131:132 pause:34:
alarm:37: setitimer:38:103 getitimer:36:102 clock_gettime:228:113 clock_getres:229:114
clock_nanosleep:230:115 nanosleep:35:101 gettimeofday:96:169 time:201: getrandom:318:278
sendto:44:206 recvfrom:45:207 shutdown:48:210 getsockname:51:204 getpeername:52:205
getsockopt:55:209
"""
# Calls that change files or send signals; permitted if the program can reach only its own files and
# processes.
_OWN = """
open:2: creat:85: mkdir:83: mkdirat:258:34 rmdir:84: unlink:87: unlinkat:263:35 rename:82:
renameat:264:38 renameat2:316:276 link:86: linkat:265:37 symlink:88: symlinkat:266:36 chmod:90:
fchmod:91:52 fchmodat:268:53 truncate:76:45 fallocate:285:47 utimensat:280:88 kill:62:129
tkill:200:130 tgkill:234:131
"""
# Calls that are permitted if one argument has a listed value: families, requests, commands, this
# process, a thread's flags.
_IF_EQUAL = {
    "socketpair:53:199": (0, (1,)),
    "prlimit64:302:261": (0, (0,)),
    "ioctl:16:29": (1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
    "fcntl:72:25": (1, (0, 1, 2, 3, 4, 5, 6, 7, 1030)),
    "clone:56:220": (0, (0x3D0F00, 0x7D0F00)),  # the flags that glibc and musl use for threads
}
_OPENAT = "openat:257:56"
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

# The column in the tables above, and the kernel's number for the architecture.
_ARCHITECTURES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}
# Instructions of the kernel's filter language.
_LOAD = 0x20
_EQUAL = 0x15
_SHARED = 0x45
_RETURN = 0x06
# Values that a filter returns.
_ALLOW = 0x7FFF0000
_REFUSE = 0x00050000 | errno.ENOSYS
# Offsets in a filter's input.
_NUMBER = 0
_ARCHITECTURE = 4
_ARGUMENTS = 16


def system_call_filter(machine: str, *, own_files: bool) -> bytes:
    """Returns the filter's program for a machine (`x86_64` or `aarch64`). For other machines, the
    program is empty.

    Args:
        own_files: whether the program sees only its own files and processes, and may change them.
    """
    if machine not in _ARCHITECTURES:
        return b""
    column, name = _ARCHITECTURES[machine]
    allow = _step(_RETURN, _ALLOW)
    refuse = _step(_RETURN, _REFUSE)
    code = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, name, 1),
        refuse,
        _step(_LOAD, _NUMBER),
    ]

    def rule(call: str, steps: bytes) -> None:
        number = call.split(":")[column]
        if number:
            code.extend([_step(_EQUAL, int(number), 0, len(steps) // 8), steps])

    for call in f"{_CALLS} {_OWN if own_files else ''}".split():
        rule(call, allow)
    for call, (argument, values) in _IF_EQUAL.items():
        allowed = [_step(_EQUAL, value, 0, 1) + allow for value in values]
        rule(call, _step(_LOAD, _ARGUMENTS + 8 * argument) + b"".join(allowed) + refuse)
    writing = _step(_SHARED, 0 if own_files else _WRITING, 0, 1)
    rule(_OPENAT, _step(_LOAD, _ARGUMENTS + 16) + writing + refuse + allow)
    return b"".join([*code, refuse])


def _step(code: int, value: int, if_so: int = 0, else_: int = 0) -> bytes:
    """Encodes one instruction. `if_so` and `else_` are the numbers of instructions to skip."""
    return struct.pack("HBBI", code, if_so, else_, value)
