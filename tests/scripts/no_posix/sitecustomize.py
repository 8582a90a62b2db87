"""Hide from Python what Windows lacks: with this folder on PYTHONPATH, in subprocesses too.

Gone are the modules, signals and functions of POSIX. Files in /proc and /dev/shm are hidden from
the kit, as psutil and torch need them on Linux. A file that is open or mapped is neither removed
nor renamed, a rename replaces no folder, and a file opened as text needs its encoding.
"""

import importlib
import os
import shutil
import signal
import sys
import warnings
from pathlib import Path

MODULES = ("fcntl", "grp", "pwd", "resource", "triton")
SIGNALS = ("ALRM", "CHLD", "CONT", "HUP", "PIPE", "QUIT", "STOP", "USR1", "USR2")
OF_SIGNAL = ("alarm", "getitimer", "pthread_kill", "setitimer", "sigwait")
OF_OS = (
    *("fork", "forkpty", "getegid", "geteuid", "getgid", "getloadavg", "getpgid", "getuid"),
    *("killpg", "mkfifo", "sched_getaffinity", "setpgid", "setsid"),
)
# Imported before: on Linux they need some of it. torch needs SIGKILL
NEED_IT = ("asyncio", "ctypes", "getpass", "multiprocessing.util", "platformdirs.unix", "psutil")
HIDDEN = ("/proc", "/dev/shm")
KIT = tuple(str(Path(__file__).resolve().parents[3] / name) for name in ("rloo_kit", "rewards"))
LIBRARY = os.path.dirname(os.__file__)

busy = False


def is_of_the_kit():
    """Return whether the kit, and no other library, makes the call."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        is_standard = name.startswith(LIBRARY) and "site-packages" not in name
        if not (is_standard or name.startswith("<frozen") or name == __file__):
            return name.startswith(KIT)
        frame = frame.f_back
    return False


def is_in_use(path):
    """Return whether this process has opened or mapped the file, or a file in this folder."""
    path = os.path.realpath(path)
    lines = Path("/proc/self/maps").read_bytes().splitlines()
    held = {os.fsdecode(line.split(None, 5)[-1]) for line in lines}
    for number in os.listdir("/proc/self/fd"):
        try:
            held.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    return any(one == path or one.startswith(path + os.sep) for one in held)


def watch(event, args):
    global busy
    if busy:
        return
    busy = True
    try:
        if event in ("open", "os.listdir", "os.scandir") and isinstance(args[0], str):
            if args[0].startswith(HIDDEN) and is_of_the_kit():
                raise FileNotFoundError(2, "hidden", args[0])
        elif event in ("os.remove", "os.rename") and is_in_use(args[0]):
            raise PermissionError(13, "used by this process", args[0])
        elif event == "ctypes.dlopen" and is_of_the_kit():
            raise OSError(2, "hidden", str(args[0]))
    finally:
        busy = False


def hidden_from_the_kit(function):
    def call(path, *args, **keywords):
        if isinstance(path, str | Path) and str(path).startswith(HIDDEN) and is_of_the_kit():
            raise FileNotFoundError(2, "hidden", str(path))
        return function(path, *args, **keywords)

    return call


def rename(source, goal, *, then=os.rename, **keywords):
    if os.path.lexists(goal):
        raise FileExistsError(17, "is there", str(goal))
    then(source, goal, **keywords)


def hide():
    for name in NEED_IT:
        importlib.import_module(name)
    shutil._use_fd_functions = False
    for name in MODULES:
        sys.modules[name] = None
    for module, names in (
        (signal, [*(f"SIG{name}" for name in SIGNALS), *OF_SIGNAL]),
        (os, OF_OS),
    ):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    os.environ.setdefault("USERNAME", "someone")
    os.stat = hidden_from_the_kit(os.stat)
    os.rename = rename
    sys.addaudithook(watch)
    warnings.filterwarnings("error", category=EncodingWarning, module=r"rloo_kit")


hide()
