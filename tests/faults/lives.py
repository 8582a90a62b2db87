"""Real training processes that begin in a moment: forks of one that has imported everything.

Importing torch, TRL and Unsloth takes 15 seconds, a short training three. A life is a process with
a session and an output of its own; it runs the ``rloo-kit`` command and can be killed like any.
"""

import ctypes
import gc
import importlib
import os
import pkgutil
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

PARENT_DEATH_SIGNAL = 1
"""Of prctl: a life does not outlast the process that began it."""


def warm_up() -> None:
    """Import what a training needs. Nothing computes here: a fork keeps one thread of a pool."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    from rloo_kit.machine.environment import setup

    setup()
    import torch

    torch.set_num_threads(1)  # where torch was imported before the variable stood
    import rloo_kit.rewards

    import rloo_kit

    for package in (rloo_kit, rloo_kit.rewards):
        for room in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if not room.name.endswith("__main__"):
                importlib.import_module(room.name)


@dataclass
class Life:
    """A process that trains."""

    pid: int
    output: Path
    """What it printed, errors too."""
    began: float
    code: int | None = None
    """Its exit code once it has ended, minus the signal's number where one ended it."""
    ended: float = 0.0

    @property
    def text(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    @property
    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.began

    def wait(self, seconds: float) -> bool:
        """Return whether it has ended, after so many seconds at most."""
        if self.code is not None:
            return True
        door = os.pidfd_open(self.pid)
        try:
            if not select.select([door], [], [], max(0.0, seconds))[0]:
                return False
        finally:
            os.close(door)
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.ended = time.monotonic()
        return True

    def wait_for(self, seen: Callable[[], object], seconds: float = 120.0) -> bool:
        """Return whether ``seen()`` came true while it lived."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if seen():
                return True
            if self.wait(0.0005):
                return bool(seen())
        return False

    def wait_for_text(self, text: str, seconds: float = 120.0) -> bool:
        """Return whether it printed ``text`` while it lived."""
        return self.wait_for(lambda: text in self.text, seconds)

    def finish(self, seconds: float = 180.0) -> int:
        """Wait until it ends by itself; return its exit code.

        Raises:
            TimeoutError: It hangs; it is killed.
        """
        if not self.wait(seconds):
            self.kill()
            raise TimeoutError(f"it still ran after {seconds} s:\n{self.text}")
        return self.code

    def signal(self, number: int) -> None:
        if self.code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, to what it started as well, and wait for its end."""
        if self.code is None:
            self.signal(signal.SIGKILL)
            self.wait(30)
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # it had started nothing
            return


def begin(arguments: Sequence[object], output: Path, before: Callable[[], None] = bool) -> Life:
    """Start ``rloo-kit ARGUMENTS`` as a process of its own.

    Args:
        arguments: As on a command line.
        output: File for what it prints; a former one is replaced.
        before: Called in the new process first: it may break something there.
    """
    warm_up()
    output.unlink(missing_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # else the first collection of every child copies all its pages
    began = time.monotonic()
    pid = os.fork()
    if pid:
        output.touch()
        return Life(pid, output, began)
    code = 70
    try:
        code = _live([str(argument) for argument in arguments], output, before)
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        _leave(code)


def _live(arguments: list[str], output: Path, before: Callable[[], None]) -> int:
    os.setsid()
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(1, 2)
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import torch

    # A fork's first thread to compute replaces torch's pool, and a second one that comes meanwhile
    # finds none ("Invalid thread pool!"): transformers loads weights in several threads.
    torch.set_num_threads(torch.get_num_threads())
    from rloo_kit.cli import main

    before()
    return main(arguments)


def _leave(code: int) -> None:
    """End without the clean-up of the process this is a copy of."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
