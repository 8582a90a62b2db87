"""Real training processes that begin in a moment: forks of one that has imported everything.

Importing torch, TRL and Unsloth takes 15 seconds, a short training three. A life is a process with
a session and an output of its own; it runs the ``rloo-kit`` command and can be killed like any.
"""

import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import os
import pkgutil
import signal
import sys
import time

# Of prctl: a life does not outlast the process that began it.
PARENT_DEATH_SIGNAL = 1


def warm_up():
    """Import what a training needs. Nothing computes here: a fork keeps one thread of a pool."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    from rloo_kit.machine.environment import setup

    setup()
    import torch

    torch.set_num_threads(1)  # where torch was imported before the variable was set
    import rloo_kit

    for module in pkgutil.walk_packages(rloo_kit.__path__, "rloo_kit."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


class Life:
    """A process that trains."""

    def __init__(self, process, output):
        self.process = process
        self.output = output  # what it printed, errors too
        self.began = time.monotonic()
        self.ended = None

    @property
    def code(self):
        """Its exit code once it has ended, minus the signal's number where one ended it."""
        return self.process.exitcode

    @property
    def text(self):
        return self.output.read_text(encoding="utf-8", errors="replace")

    @property
    def seconds(self):
        return (self.ended or time.monotonic()) - self.began

    def wait(self, seconds):
        """Return whether it has ended, after so many seconds at most."""
        self.process.join(max(0.0, seconds))
        if self.code is not None and not self.ended:
            self.ended = time.monotonic()
        return self.code is not None

    def wait_for(self, seen, seconds=120.0):
        """Return whether ``seen()`` came true while it lived."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if seen():
                return True
            if self.wait(0.0005):
                return bool(seen())
        return False

    def until(self, text):
        """Wait until it has printed ``text``."""
        assert self.wait_for(lambda: text in self.text), self.text

    def finish(self, seconds=180.0):
        """Wait until it ends by itself; return its exit code, or kill it and raise TimeoutError."""
        if not self.wait(seconds):
            self.kill()
            raise TimeoutError(f"it still ran after {seconds} s:\n{self.text}")
        return self.code

    def signal(self, number):
        os.kill(self.process.pid, number)

    def kill(self):
        """Send SIGKILL, to what it started as well, and wait for its end."""
        self.process.kill()
        self.wait(30)
        with contextlib.suppress(ProcessLookupError):  # it had started nothing
            os.killpg(self.process.pid, signal.SIGKILL)


def begin(arguments, output, before=bool):
    """Start ``rloo-kit ARGUMENTS`` as a process of its own.

    Args:
        arguments: As on a command line.
        output: File for what it prints; a former one is replaced.
        before: Called in the new process first: it may break something there.
    """
    warm_up()
    output.unlink(missing_ok=True)
    output.touch()
    gc.freeze()  # else the first collection of every child copies all its pages
    process = multiprocessing.get_context("fork").Process(
        target=_live, args=([*map(str, arguments)], output, before)
    )
    process.start()
    return Life(process, output)


def _live(arguments, output, before):
    os.setsid()
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), 1)
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
    code = main(arguments)
    with contextlib.suppress(OSError):  # a test may have closed what reads the output
        sys.stdout.flush()
    # Without the clean-up of the process this is a copy of
    os._exit(code)
