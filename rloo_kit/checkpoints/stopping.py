"""External stop conditions of a run: signals and a time limit.

The first SIGINT or SIGTERM asks the training to finish its step and save. A second one is raised
at once, as Ctrl-C is.
"""

import _thread
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# What a person calls them
NAMES: dict[int, str] = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
# Seconds. Signals that are closer together are one request: `timeout` and torchrun send SIGTERM to
# a process and then to its whole group.
APART = 0.2


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised as Ctrl-C is, so that everything that cleans up after Ctrl-C does it."""


def exit_code(received: int | KeyboardInterrupt) -> int:
    """Return the exit code by which a shell knows that a signal ended a program.

    Args:
        received: The number of the signal, or what was raised for it.

    >>> exit_code(signal.SIGINT), exit_code(signal.SIGTERM), exit_code(Terminated())
    (130, 143, 143)
    """
    return 128 + (signal_of(received) if isinstance(received, KeyboardInterrupt) else received)


def signal_of(raised: KeyboardInterrupt) -> int:
    """Return the number of the signal that something was raised for."""
    return signal.SIGTERM if isinstance(raised, Terminated) else signal.SIGINT


def interrupt_for(received: int) -> KeyboardInterrupt:
    """Return what is raised for a signal."""
    return Terminated() if received == signal.SIGTERM else KeyboardInterrupt()


class StopSignals:
    """Note the first SIGINT or SIGTERM, and raise every further one.

    A signal that this process was started to ignore stays ignored, and outside of the main thread
    nothing is done: Python handles signals nowhere else. The handlers before are put back at the
    end.

    Example:
        with StopSignals(say=print) as stop:
            while not stop.received:
                step()
        if stop.received:
            sys.exit(exit_code(stop.received))

    Args:
        say: Called with a line for the user, from a thread of its own; None: nothing is said.

    Raises:
        KeyboardInterrupt: In the body, by a second SIGINT.
        Terminated: In the body, by a second signal that is a SIGTERM.
    """

    def __init__(self, say: Callable[[str], object] | None = None) -> None:
        self.received: int | None = None
        """Number of the first signal."""
        self._received_at = 0.0
        self._say = say
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            if _may_handle(number):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _handle(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is not None:
            if now - self._received_at < APART:
                return
            raise interrupt_for(number)
        self.received, self._received_at = number, now
        if self._say is not None:
            # What was interrupted may hold the lock of the stream; threading.Thread takes one too.
            _thread.start_new_thread(self._tell, (self._say, NAMES[number]))

    @staticmethod
    def _tell(say: Callable[[str], object], name: str) -> None:
        again = "press it again" if name == "Ctrl-C" else "send it again"
        with contextlib.suppress(Exception):  # a terminal that is closed by now
            say(f"\n{name}: this step is finished and saved first; {again} to stop at once")


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Let the first SIGTERM raise Terminated in the body, so that what was begun is cleaned up.

    For the time before the training, where a signal has nothing to wait for; Ctrl-C raises by
    itself. Outside of the main thread, and where SIGTERM is ignored, nothing is done.
    """
    if not _may_handle(signal.SIGTERM):
        yield
        return

    def end(_: int, __: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)  # a second one must not end the clean-up
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Raise a signal that comes in the body after it.

    For a moment in which something is made that nothing cleans up yet.

    Raises:
        KeyboardInterrupt: After the body: SIGINT came.
        Terminated: After the body: SIGTERM came.
    """
    with StopSignals() as waiting:
        yield
    if waiting.received is not None:
        raise interrupt_for(waiting.received)


def _may_handle(number: int) -> bool:
    """Return whether this is the main thread, and Python handles the signal, not ignores it."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(number) not in (signal.SIG_IGN, None)


class TimeLimit:
    """Hours after which a training is to stop, counted from now on; the machine's sleep counts.

    Args:
        max_hours: None: there is no limit.
    """

    def __init__(self, max_hours: float | None) -> None:
        self._max_hours = max_hours
        self._started = _now()

    def over(self) -> str | None:
        """Return a sentence once the time is over, else None."""
        hours = (_now() - self._started) / 3600
        if self._max_hours is None or hours < self._max_hours:
            return None
        return f"max_hours {self._max_hours:g} is over after {hours:.2f} h: resume with --resume"


def _now() -> float:
    """Return seconds on a clock that cannot be set and, on Linux, runs while the machine sleeps."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)
