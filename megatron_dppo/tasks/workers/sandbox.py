"""What a process may do that evaluates text which a model wrote: compute, and answer.

`lock_down` is one-way and holds for the process that calls it. It needs no privilege, no library and no namespace, so
that it works in containers and in batch jobs alike:

- Landlock: reads the code folders and harmless devices, writes its own folder, executes nothing, opens no TCP port,
  and cannot look into a process outside (`ptrace`, `/proc/PID/environ`, `/proc/PID/mem`);
- seccomp: no process and no thread, no program, no socket, no signal to another process, no limit or owner or mode of
  anything else changed, none of the kernel's rarely used doors, no system call that is younger than this file;
- limits: address space, processor time, files, descriptors; what it prints goes to /dev/null. As there is one process,
  its address space is the memory of the group;
- as root: another user, without capabilities but the one to read (virtual environments and Python itself may lie in
  root's home, which is closed to others; Landlock says what may be read).

Around it, where it is installed and works, bubblewrap gives the workers namespaces of their own: they see no other
process, no network interface, and a root that cannot be written.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import resource
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_dppo.errors import UserError

Sandbox = Literal["full", "none"]
"""What rewards and environments ask for: all of this file, or a clean environment and a limit of memory alone."""

ENVIRONMENT = (
    *("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "VIRTUAL_ENV"),
    *("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "PYTHONHASHSEED", "XDG_CACHE_HOME"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
)
"""Variables that a worker is started with, and those that begin with `LC_`. Everything else stays outside."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_SECCOMP = 1, 4, 8, 22
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2
_FIRST_USER, _USERS = 60_000, 5_000


@dataclass(frozen=True)
class Limits:
    """Of one process that is locked down."""

    memory_bytes: int
    """Address space."""
    processor_s: int | None
    """None for one that lives for many answers, each of which has its own time."""
    file_bytes: int = 16 << 20
    """Of one file; those of the folder together are counted by the worker."""
    open_files: int = 64


@functools.cache
def rung() -> Literal["bubblewrap", "landlock", "none"]:
    """What holds workers on this machine; `none` where the kernel has no Landlock (before 5.13, or switched off), or a
    container's own filter forbids it, or the processor is not one whose system calls are known here."""
    if platform.machine() not in _ARCHITECTURES or sys.byteorder != "little" or landlock_version() < 1:
        return "none"
    if _LIBC.prctl(_PR_SET_SECCOMP, 2, None, 0, 0) == 0 or ctypes.get_errno() != errno.EFAULT:  # 2: a filter, here none
        return "none"
    return "bubblewrap" if _bubblewrap_works() else "landlock"


def require(what: str, otherwise: str) -> None:
    """Raises UserError where nothing holds `what` on this machine; `otherwise` says what to do about it."""
    if rung() == "none":
        raise UserError(
            f"{what} evaluates what the model writes, and nothing holds that on this machine: it has no Landlock "
            f"(Linux 5.13 or newer, allowed by the container); {otherwise} to run it with this user's rights"
        )


def clean_environment(names: Iterable[str] = (), environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a worker starts with: `ENVIRONMENT` and `names`. One thread per numerical library: a fork of a process with
    such threads hangs in them."""
    kept = {*ENVIRONMENT, *names}
    clean = {name: value for name, value in environment.items() if name in kept or name.startswith("LC_")}
    path = [os.path.abspath(entry) for entry in clean.get("PYTHONPATH", "").split(os.pathsep) if entry]
    here = str(Path(__file__).parents[3])
    path += [here] if here == os.getcwd() else []  # of a checkout that is not installed
    clean |= {"PYTHONPATH": os.pathsep.join(path)} if path else {}
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {**dict.fromkeys(threads, "1"), "TOKENIZERS_PARALLELISM": "false", **clean}


def code_folders() -> list[str]:
    """Where this process has its code from, and so may still need some: the folders of its path, of Python and of
    what is imported."""
    found = {sys.prefix, sys.base_prefix, sys.exec_prefix, *(os.path.abspath(entry or ".") for entry in sys.path)}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if "." not in name and file:
            found.add(os.path.dirname(os.path.abspath(file)))
    return without_home(found)


def without_home(paths: Iterable[str]) -> list[str]:
    """Those that exist, without the home folder and what holds it, which have more than code in them."""
    home = Path.home().resolve()
    found = {Path(os.path.realpath(path)) for path in paths if os.path.exists(path)} - {home, *home.parents}
    return sorted(str(path) for path in found if found.isdisjoint(path.parents))


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """A signal for this process when the thread that started it ends."""
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        os.kill(os.getpid(), by)


def guard_supervisor() -> None:
    """For the process that starts those that are locked down: nobody of the same user reads its memory, and what its
    children leave behind becomes its child."""
    _prctl(_PR_SET_DUMPABLE, 0)
    adopt_orphans()


def adopt_orphans() -> None:
    """What children of this process leave behind becomes its child, until it ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def nobody() -> int:
    """For a process started by root: a user that should own nothing, the same for all that this process starts."""
    return _FIRST_USER + os.getpid() % _USERS


def lock_down(folder: Path, readable: Sequence[str], limits: Limits, user: int) -> None:
    """From here on this process may do what the head of this file says, for good. `folder` is its own; as root it
    becomes the user `user`, which should own nothing. Raises OSError where a part cannot be had."""
    os.chdir(folder)
    os.environ.update(HOME=str(folder), TMPDIR=str(folder))
    for what, most in _resource_limits(limits):
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _restrict_files(folder, readable)
    _drop_privileges(user)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user clears it
    _restrict_system_calls()


def _resource_limits(limits: Limits) -> list[tuple[int, int]]:
    found = [
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
    ]
    return found if limits.processor_s is None else [*found, (resource.RLIMIT_CPU, limits.processor_s)]


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


# ---- users and capabilities


def _drop_privileges(user: int) -> None:
    """Without a capability to change its user a process keeps it; it loses the capabilities all the same."""
    header = struct.pack("<Ii", 0x20080522, 0)
    data = ctypes.create_string_buffer(24)
    if _LIBC.capget(header, data):
        raise OSError(ctypes.get_errno(), "capget")
    permitted = struct.unpack("<6I", data.raw)[1]
    to_read = next((1 << cap for cap in (_CAP_DAC_READ_SEARCH, _CAP_DAC_OVERRIDE) if permitted >> cap & 1), 0)
    if os.geteuid() == 0:
        _prctl(_PR_SET_KEEPCAPS, 1)
        with suppress(OSError):  # no such user in this user namespace
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
    kept = ctypes.create_string_buffer(struct.pack("<6I", to_read, to_read, 0, 0, 0, 0), 24)
    if _LIBC.capset(header, kept):
        raise OSError(ctypes.get_errno(), "capset")


# ---- files: Landlock (linux/landlock.h)

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # of every architecture
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_EXECUTE, _MAKE_CHAR, _MAKE_SOCK, _MAKE_BLOCK = 1 << 0, 1 << 6, 1 << 9, 1 << 11
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/proc/cpuinfo", "/proc/meminfo",
           "/sys/devices/system/cpu")  # fmt: skip
"""Libraries, and what they ask of a machine when they are loaded."""


@functools.cache
def landlock_version() -> int:
    """Landlock's ABI on this kernel; -1 without it."""
    return int(_LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def _restrict_files(folder: Path, readable: Sequence[str]) -> None:
    version = landlock_version()
    rights = (1 << 13) - 1
    for since, right in ((2, 13), (3, 14), (5, 15)):  # REFER, TRUNCATE, IOCTL_DEV
        rights |= 1 << right if version >= since else 0
    # Of the network TCP's bind and connect; of what is shared abstract sockets and signals.
    fields = [rights, 3 if version >= 4 else 0, 3 if version >= 6 else 0]
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    attributes = struct.pack("<3Q", *fields)
    ruleset = _LIBC.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    own = rights & ~(_EXECUTE | _MAKE_CHAR | _MAKE_BLOCK | _MAKE_SOCK)
    try:
        _allow(ruleset, str(folder), own)
        for path in (*_SYSTEM, *readable):
            _allow(ruleset, path, _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0))
        for path in _DEVICES:
            _allow(ruleset, path, _READ_FILE | _WRITE_FILE)
        if _LIBC.syscall(_RESTRICT_SELF, ruleset, 0):
            raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what is not there cannot be read either
    try:
        if _LIBC.syscall(_ADD_RULE, ruleset, 1, struct.pack("<Qi", rights, beneath), 0):
            raise OSError(ctypes.get_errno(), f"landlock_add_rule {path}")
    finally:
        os.close(beneath)


# ---- system calls: seccomp, as a classic BPF program (linux/seccomp.h, linux/filter.h)

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""AUDIT_ARCH, and the column of the table."""
_NEWEST = 450
"""Later system calls are as if they were not there; the C library does without."""
_FORBIDDEN = """
fork 57 -            vfork 58 -             clone 56 220            clone3 435 435          execve 59 221
execveat 322 281     unshare 272 97         setns 308 268           setsid 112 157          setpgid 109 154
ptrace 101 117       process_vm_readv 310 270  process_vm_writev 311 271  process_madvise 440 440
process_mrelease 448 448  kcmp 312 272     pidfd_open 434 434     pidfd_getfd 438 438
pidfd_send_signal 424 424  tkill 200 130
rt_sigqueueinfo 129 138  rt_tgsigqueueinfo 297 240  setpriority 141 140  ioprio_set 251 30   sched_setparam 142 118
sched_setscheduler 144 119  sched_setattr 314 274  sched_setaffinity 203 122  migrate_pages 256 238  move_pages 279 239
socket 41 198        connect 42 203         bind 49 200             listen 50 201           accept 43 202
accept4 288 242      mq_open 240 180        mq_unlink 241 181       msgget 68 186           semget 64 190
shmget 29 194        memfd_create 319 279   memfd_secret 447 447    chmod 90 -              fchmod 91 52
fchmodat 268 53      chown 92 -             fchown 93 55            lchown 94 -             fchownat 260 54
utime 132 -          utimes 235 -           utimensat 280 88        futimesat 261 -         setxattr 188 5
lsetxattr 189 6      fsetxattr 190 7        removexattr 197 14      lremovexattr 198 15     fremovexattr 199 16
truncate 76 45       mount 165 40           umount2 166 39          pivot_root 155 41       chroot 161 51
fsopen 430 430       fsconfig 431 431       fsmount 432 432         fspick 433 433          move_mount 429 429
open_tree 428 428    mount_setattr 442 442  name_to_handle_at 303 264  open_by_handle_at 304 265  quotactl 179 60
quotactl_fd 443 443  fanotify_init 300 262  bpf 321 280             perf_event_open 298 241  userfaultfd 323 282
keyctl 250 219       add_key 248 217        request_key 249 218     io_uring_setup 425 425  io_uring_enter 426 426
io_uring_register 427 427  io_setup 206 0   personality 135 92      syslog 103 116          modify_ldt 154 -
sync 162 81          syncfs 306 267
"""
"""Name, number on x86_64, number on aarch64. Among them what Landlock leaves open: mode, owner, times and attributes of
files that the user owns, signals and limits of processes that the user runs, UDP and Unix sockets."""
_TO_ITSELF = "kill 62 129  tgkill 234 131  prlimit64 302 261"
"""Allowed where the first argument is this process (or 0, for the limits)."""
_FIRST_NOT = {
    "prctl 157 167": (0, (1, 62)),
    "fcntl 72 25": (1, (8, 10, 15)),
    "ioctl 16 29": (1, (0x5412, 0x541C, 0x8901, 0x8902)),
}
"""Which argument must not be one of these: PR_SET_PDEATHSIG and PR_SCHED_CORE; F_SETOWN, F_SETSIG and F_SETOWN_EX,
which send signals to others, as FIOSETOWN and SIOCSPGRP; TIOCSTI and TIOCLINUX, which type into a terminal."""
_SOCKETPAIR = "socketpair 53 199"
"""Streams only: a datagram can be sent from one to any address."""


def _numbers(table: str, column: int) -> list[int]:
    words = table.split()
    numbers = [words[place + 1 + column] for place in range(0, len(words), 3)]
    return [int(number) for number in numbers if number != "-"]


def filter_program(machine: str, pid: int) -> bytes:
    """The filter for a process `pid`: an array of `struct sock_filter`."""
    audit, column = _ARCHITECTURES[machine]
    load, equal, greater, mask, give = 0x20, 0x15, 0x25, 0x54, 0x06
    allow, kill, refuse, absent = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS

    def argument(number: int) -> int:
        return 16 + 8 * number  # its lower half; these arguments are ints

    program = [(load, 0, 0, 4), (equal, 1, 0, audit), (give, 0, 0, kill), (load, 0, 0, 0)]
    program += [(greater, 0, 1, _NEWEST), (give, 0, 0, absent)]  # x32 calls too
    for number in _numbers(_FORBIDDEN, column):
        program += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    limits = _numbers(_TO_ITSELF, column)[2]
    for number in _numbers(_TO_ITSELF, column):
        zero = [(equal, 1, 0, 0)] if number == limits else []
        body = [(load, 0, 0, argument(0)), *zero, (equal, 0, 1, pid), (give, 0, 0, allow), (give, 0, 0, refuse)]
        program += [(equal, 0, len(body), number), *body]
    for table, (place, values) in _FIRST_NOT.items():
        body = [(load, 0, 0, argument(place))]
        for value in values:
            body += [(equal, 0, 1, value), (give, 0, 0, refuse)]
        body.append((give, 0, 0, allow))
        program += [(equal, 0, len(body), _numbers(table, column)[0]), *body]
    body = [(load, 0, 0, argument(1)), (mask, 0, 0, 0xF), (equal, 0, 1, 1), (give, 0, 0, allow), (give, 0, 0, refuse)]
    program += [(equal, 0, len(body), _numbers(_SOCKETPAIR, column)[0]), *body, (give, 0, 0, allow)]
    return b"".join(struct.pack("<HBBI", *one) for one in program)


def _restrict_system_calls() -> None:
    program = filter_program(platform.machine(), os.getpid())
    held = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(held))
    if _LIBC.prctl(_PR_SET_SECCOMP, 2, header, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


# ---- bubblewrap


def bubblewrapped(command: Sequence[str], visible: Sequence[str]) -> list[str]:
    """`command` in namespaces of its own: the machine's files can be read but not written, home and temporary folders
    are empty but for `visible`, and there is no network and no other process."""
    found = ["bwrap", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--uid", "65534", "--gid", "65534"]
    found += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    for folder in dict.fromkeys(["/tmp", "/var/tmp", "/run", str(Path.home())]):
        found += ["--tmpfs", folder] if os.path.isdir(folder) and not os.path.islink(folder) else []
    for path in sorted(set(visible)):
        found += ["--ro-bind-try", path, path]
    return [*found, "--setenv", "TMPDIR", "/tmp", "--chdir", "/tmp", *command]


def _bubblewrap_works() -> bool:
    if shutil.which("bwrap") is None:
        return False
    try:
        command = bubblewrapped([sys.executable, "-I", "-c", "pass"], code_folders())
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False
