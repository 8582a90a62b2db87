"""Script of the sandbox's child process, which confines itself and then runs an untrusted program.

It is started without site-packages and imports only the standard library. Its standard input
begins with the program; the rest is the program's own input. First it applies every protection.
Its first line of output names the protections that are active. Then it runs the program.
"""

import builtins
import contextlib
import ctypes
import os
import struct
import sys

READY = "ready"
REFUSED = "refused"
LAYERS = ("landlock", "seccomp", "namespaces", "tmpfs", "other_user", "rlimits")
# Required protections: without one of them, a program can reach files, the network or processes
NEEDED = ("landlock", "seccomp")
# Limit of threads, set only if the kernel counts the threads of this program separately
MAX_THREADS = 32

# System calls that fail with EPERM: name, number on x86_64, number on aarch64 (- if it has none)
_DENIED = """
socket 41 198, connect 42 203, bind 49 200, listen 50 201, accept 43 202, accept4 288 242,
fork 57 -, vfork 58 -, execve 59 221, execveat 322 281, setsid 112 157, setpgid 109 154,
kill 62 129, tkill 200 130, tgkill 234 131, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240,
pidfd_open 434 434, pidfd_send_signal 424 424, pidfd_getfd 438 438, kcmp 312 272, ptrace 101 117,
process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440,
process_mrelease 448 448, migrate_pages 256 238, move_pages 279 239, setpriority 141 140,
ioprio_set 251 30, sched_setscheduler 144 119, sched_setparam 142 118, sched_setattr 314 274,
sched_setaffinity 203 122, unshare 272 97, setns 308 268, mount 165 40, umount2 166 39,
pivot_root 155 41, chroot 161 51, open_tree 428 428, move_mount 429 429, fsopen 430 430,
fsconfig 431 431, fsmount 432 432, fspick 433 433, mount_setattr 442 442, io_uring_setup 425 425,
io_uring_enter 426 426, io_uring_register 427 427, bpf 321 280, perf_event_open 298 241,
userfaultfd 323 282, keyctl 250 219, add_key 248 217, request_key 249 218, memfd_create 319 279,
memfd_secret 447 447, shmget 29 194, msgget 68 186, semget 64 190, mq_open 240 180, chmod 90 -,
fchmod 91 52, fchmodat 268 53, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, utime 132 -,
utimes 235 -, utimensat 280 88, futimesat 261 -, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7,
removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, truncate 76 45, openat2 437 437,
name_to_handle_at 303 264, open_by_handle_at 304 265, fanotify_init 300 262, inotify_init 253 -,
inotify_init1 294 26, personality 135 92, modify_ldt 154 -, init_module 175 105,
finit_module 313 273, delete_module 176 106, kexec_load 246 104, kexec_file_load 320 294,
reboot 169 142, swapon 167 224, swapoff 168 225, acct 163 89, syslog 103 116, quotactl 179 60,
quotactl_fd 443 443, settimeofday 164 170, clock_settime 227 112, adjtimex 159 171,
clock_adjtime 305 266, sethostname 170 161, setdomainname 171 162, vhangup 153 58, iopl 172 -,
ioperm 173 -
"""
# As above, followed by: argument, mask, value, "is" or "not". The call is denied if
# (argument & mask) is, or is not, equal to the value.
_DENIED_BY_ARGUMENT = """
clone 56 220 0 0x10000 0 is, prlimit64 302 261 0 0xffffffff 0 not,
prctl 157 167 0 0xffffffff 1 is, fcntl 72 25 1 0xffffffff 8 is, fcntl 72 25 1 0xffffffff 10 is,
fcntl 72 25 1 0xffffffff 15 is, ioctl 16 29 1 0xffffffff 0x8901 is,
ioctl 16 29 1 0xffffffff 0x8902 is, open 2 - 1 0x203 0x200 is, openat 257 56 2 0x203 0x200 is
"""
# clone: a process, not a thread; prlimit64: limits of another process; prctl: PR_SET_PDEATHSIG,
# with which the process could outlive its parent; fcntl, ioctl: another process as the receiver of
# signals; open: O_RDONLY | O_TRUNC, which Landlock below version 3 lets through.
_CLONE3 = 435
_NEWEST = 450  # the last call these lists know; a later one does not exist for the program
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD, _AND, _EQUAL, _GREATER, _RETURN = 0x20, 0x54, 0x15, 0x25, 0x06  # BPF
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x50001, 0x50026  # seccomp

_NEW_NET_IPC_MOUNT = 0x48020000
_NEW_USER = 0x10000000
_PRIVATE_RECURSIVE = 0x44000
_NOSUID_NODEV_NOEXEC = 0xE
_PR_SET_PDEATHSIG = 1
_PR_SET_KEEPCAPS = 8
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SIGKILL = 9
_CAP_DAC_READ_SEARCH = 1 << 2

# What Python must read besides its own library: shared libraries, time zones
_READABLE = """
/lib /lib64 /usr/lib /usr/lib64 /usr/local/lib /usr/share/zoneinfo
/etc/ld.so.cache /etc/localtime /dev/null /dev/urandom
"""
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_WRITE_AND_TRUNCATE = 1 << 1 | 1 << 14
_OWN_FOLDER = 0b111_0001_1011_1110  # all but: execute, sockets, pipes, devices


def main() -> None:
    """Confine this process, report the active protections, and run the program."""
    folder, *rest = sys.argv[1:]
    parent, size, allow_weak, *limits = map(int, rest)
    try:
        held = confine(folder, parent, limits)
        missing = [] if allow_weak else [name for name in NEEDED if name not in held]
        words = [REFUSED, *missing] if missing else [READY, *held]
    except Exception as exc:
        words = [REFUSED, ascii(exc)]
    os.write(1, f"{' '.join(words)}\n".encode())
    if words[0] == REFUSED:
        os._exit(1)
    program = os.read(0, size)
    builtins.exit = builtins.quit = sys.exit  # site makes them elsewhere
    module = type(sys)("__main__")
    sys.modules["__main__"], sys.argv = module, ["program.py"]
    exec(compile(program, "program.py", "exec", dont_inherit=True), module.__dict__)


def confine(folder: str, parent: int, limits: list[int]) -> list[str]:
    """Apply each protection that the kernel supports, and return the names of the active ones.

    Args:
        folder: Empty folder in which the program runs.
        parent: Process id of the parent. The process exits if it has another parent.
        limits: Limits of CPU time in seconds, of memory in MiB, and of files in MiB.
    """
    import resource  # noqa: F401 - before files are restricted; Windows has none

    held = ["rlimits"]
    os.chmod(folder, 0o755)  # for another user; it is empty
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        held += _separate(libc, folder, limits[2])
        if os.getuid() == 0 and _become_other(libc):
            held.append("other_user")
        else:
            _keep_capabilities(libc, 0)
        libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if _restrict_files(libc, writable="tmpfs" in held):
            held.append("landlock")
        if _filter_system_calls(libc):
            held.append("seccomp")
    _limit(limits, held)
    return held


def _limit(limits: list[int], held: list[str]) -> None:
    """Set the resource limits of this process; some depend on the protections in ``held``.

    Args:
        limits: Limits of CPU time in seconds, of memory in MiB, and of files in MiB.
        held: Names of the active protections.
    """
    import resource

    # seccomp denies new processes but allows threads; without it, both must be denied by a limit
    threads = "seccomp" in held
    seconds, memory, disk = limits
    wanted = {
        "RLIMIT_CORE": 0,
        "RLIMIT_CPU": seconds,
        "RLIMIT_AS": memory << 20,
        "RLIMIT_FSIZE": disk << 20,
        "RLIMIT_NOFILE": 64,
    }
    # The kernel counts the processes of a user. With a namespace or another user id, it counts
    # only those of this program.
    if not threads or "namespaces" in held or "other_user" in held:
        wanted["RLIMIT_NPROC"] = MAX_THREADS if threads else 0
    for name, value in wanted.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(number, (value, value))
        except (OSError, ValueError):
            if sys.platform == "linux":  # macOS does not accept every limit
                raise


def _separate(libc: ctypes.CDLL, folder: str, disk: int) -> list[str]:
    """Move this process to new network, IPC and mount namespaces, with a tmpfs on the folder.

    Args:
        libc: The C library.
        folder: Folder on which the tmpfs is mounted; it becomes the working directory.
        disk: Size of the tmpfs in MiB.

    Returns:
        The active protections: both ``namespaces`` and ``tmpfs``, only ``namespaces``, or none.
    """
    uid = os.getuid()
    gid = os.getgid()
    if libc.unshare(_NEW_NET_IPC_MOUNT) != 0:
        if libc.unshare(_NEW_NET_IPC_MOUNT | _NEW_USER) != 0:
            return []
        for name, text in (
            ("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"),
        ):  # fmt: skip
            with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    options = f"size={disk}m,nr_inodes=1k,mode=777".encode()
    if libc.mount(None, b"/", None, _PRIVATE_RECURSIVE, None) != 0 or libc.mount(
        b"tmpfs", os.fsencode(folder), b"tmpfs", _NOSUID_NODEV_NOEXEC, options
    ):
        return ["namespaces"]
    os.chdir(folder)
    return ["namespaces", "tmpfs"]


def _become_other(libc: ctypes.CDLL) -> bool:
    """Change from root to an unused user id without privileges, and return whether that worked."""
    uid = 2**30 + os.getpid()
    library = os.path.dirname(os.__file__)
    try:
        os.seteuid(uid)
        readable = os.access(library, os.R_OK | os.X_OK, effective_ids=True)
        os.seteuid(0)
        # Python may be in a folder that only root can read. Then Landlock alone decides what can be
        # read. Without Landlock, the user id stays root, but all capabilities are dropped.
        if not readable and not _landlock_version(libc):
            return False
        libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError:  # a container without that user id, or without the privilege
        return False
    _keep_capabilities(libc, 0 if readable else _CAP_DAC_READ_SEARCH)
    return True


def _keep_capabilities(libc: ctypes.CDLL, kept: int) -> None:
    libc.capset(struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", kept, kept, 0, 0, 0, 0))


# --- Landlock -------------------------------------------------------------------------------------


def _landlock_version(libc: ctypes.CDLL) -> int:
    return max(0, libc.syscall(444, None, 0, 1))


def _restrict_files(libc: ctypes.CDLL, *, writable: bool) -> bool:
    """Restrict this process with Landlock, and return whether that worked.

    It can then read only Python's own files, the system's libraries and time zones, and the working
    directory. Newer kernels also deny TCP and signals to other processes.

    Args:
        libc: The C library.
        writable: Let the process write files in the working directory.
    """
    version = _landlock_version(libc)
    if not version:
        return False
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    tcp = 3 if version >= 4 else 0
    scopes = 3 if version >= 6 else 0
    # An older kernel accepts fields that it does not know if they are 0
    ruleset = libc.syscall(444, struct.pack("=QQQ", handled, tcp, scopes), 24, 0)
    if ruleset < 0:
        return False

    own = [
        os.path.join(prefix, name)
        for prefix in (sys.base_prefix, sys.base_exec_prefix)
        for name in ("lib", "lib64")
    ]
    allowed = dict.fromkeys([*own, *_READABLE.split(), "."], _READ_FILE | _READ_DIR)
    allowed["/dev/null"] |= _WRITE_AND_TRUNCATE
    if writable:
        allowed["."] = _OWN_FOLDER
    failed = 0
    for path, rights in allowed.items():
        with contextlib.suppress(OSError):  # not on this machine
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            if not os.path.isdir(path):
                rights &= _READ_FILE | _WRITE_AND_TRUNCATE
            failed |= libc.syscall(445, ruleset, 1, struct.pack("=Qi", rights & handled, fd), 0)
            os.close(fd)
    restricted = not failed and libc.syscall(446, ruleset, 0) == 0
    os.close(ruleset)
    return restricted


# --- seccomp --------------------------------------------------------------------------------------


def _filter_system_calls(libc: ctypes.CDLL) -> bool:
    """Deny the listed system calls from now on with seccomp, and return whether that worked."""
    machine = os.uname().machine
    if machine not in _AUDIT_ARCH:
        return False
    code = b"".join(struct.pack("<HBBI", *line) for line in system_call_filter(machine))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    return libc.prctl(_PR_SET_SECCOMP, 2, program, 0, 0) == 0


def system_call_filter(machine: str) -> list[tuple[int, int, int, int]]:
    """Return the seccomp filter, a BPF program that denies system calls, for a machine type.

    It denies the system calls in ``_DENIED``, ``clone3``, and every system call with a number above
    ``_NEWEST``, because the lists in this file do not cover it. It denies a system call in
    ``_DENIED_BY_ARGUMENT`` only if its argument meets the condition given there. Each instruction
    is (operation, jump if true, jump if false, operand).

    Args:
        machine: ``x86_64`` or ``aarch64``.
    """
    column = 1 if machine == "x86_64" else 2
    lines = [
        (_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _AUDIT_ARCH[machine]), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0), (_GREATER, 0, 1, _NEWEST), (_RETURN, 0, 0, _ENOSYS),
        # glibc then starts its threads by clone, whose flags can be seen
        (_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ENOSYS),
    ]  # fmt: skip
    for words in map(str.split, f"{_DENIED},{_DENIED_BY_ARGUMENT}".split(",")):
        if words[column] == "-":
            continue
        denied = [(_RETURN, 0, 0, _EPERM)]
        if words[3:]:
            argument, mask, value = (int(word, 0) for word in words[3:6])
            on_equal = (0, 1) if words[6] == "is" else (1, 0)
            denied = [
                (_LOAD, 0, 0, 16 + 8 * argument), (_AND, 0, 0, mask), (_EQUAL, *on_equal, value),
                *denied, (_LOAD, 0, 0, 0),
            ]  # fmt: skip
        lines += [(_EQUAL, 0, len(denied), int(words[column])), *denied]
    return [*lines, (_RETURN, 0, 0, _ALLOW)]


if __name__ == "__main__":
    main()
