"""Ways a run is asked to stop from outside: signals, the clock, a machine that slept.

The first SIGINT or SIGTERM asks, and whoever trains finishes its step and saves. A second one is
raised at once, as Ctrl-C is.
"""

import _thread
import contextlib
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

from rloo_kit.text.wording import format_duration

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NAMES: dict[int, str] = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
"""What a person calls them."""
APART = 0.2
"""Seconds. Signals that are closer together are one request: ``timeout`` and launchers such as
torchrun pass on what the terminal, or the system, has already sent to everybody."""
LONGEST_NAP = 5.0
"""Seconds of suspend that nobody needs to hear of."""


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


# --- signals --------------------------------------------------------------------------------------


class _Requests:
    """Tells a new request from an echo of the one before."""

    def __init__(self) -> None:
        self._last = -math.inf

    def is_new(self) -> bool:
        """Return whether the signal that came now is a request of its own."""
        now = time.monotonic()
        # Between the next two lines nothing is called, so no other signal is handled.
        is_new = now - self._last >= APART
        self._last = now if is_new else self._last
        return is_new


class StopSignals:
    """Let the first SIGINT or SIGTERM ask, and raise every further one.

    A signal that this process was started to ignore stays ignored, and outside of the main thread
    nothing is done: Python handles signals nowhere else. What handled the signals before does so
    again at the end.

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
        self._say = say
        self._requests = _Requests()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS if _may_handle() else ():
            if not _is_left_alone(number):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _handle(self, number: int, _: FrameType | None) -> None:
        if not self._requests.is_new():
            return
        if self.received is not None:
            raise interrupt_for(number)
        self.received = number
        if self._say is not None:
            # Whatever prints may be what was interrupted, with its lock held; and to start a
            # threading.Thread takes a lock too.
            _thread.start_new_thread(self._tell, (NAMES[number],))

    def _tell(self, name: str) -> None:
        again = "press it again" if name == "Ctrl-C" else "send it again"
        with contextlib.suppress(Exception):  # a terminal that is closed by now
            self._say(f"\n{name}: this step is finished and saved first; {again} to stop at once")


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Let SIGTERM raise Terminated in the body, so that what was begun is cleaned up.

    For what comes before the training, where a signal has nothing to wait for; Ctrl-C does the
    same by itself. Outside of the main thread, and where SIGTERM is ignored, nothing is done.
    """
    if not _may_handle() or _is_left_alone(signal.SIGTERM):
        yield
        return
    requests = _Requests()

    def end(number: int, _: FrameType | None) -> None:
        if requests.is_new():  # an echo must not end the cleaning up
            raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Let a signal that comes in the body be raised after it.

    For a moment in which something is made and not yet known to what would clean it up.

    Raises:
        KeyboardInterrupt: After the body: SIGINT came.
        Terminated: After the body: SIGTERM came.
    """
    with StopSignals() as waiting:
        yield
    if waiting.received is not None:
        raise interrupt_for(waiting.received)


def _may_handle() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_left_alone(number: int) -> bool:
    """Return whether a signal is ignored, or handled by a program that Python is a part of."""
    return signal.getsignal(number) in (signal.SIG_IGN, None)


# --- the clock ------------------------------------------------------------------------------------


def _system_clocks() -> tuple[Callable[[], float], Callable[[], float]]:
    """Return the clock that goes on while the machine sleeps, and the one that stands still then.

    Nobody can set either of them. Where the system has no such pair (Windows), both are the same.
    """
    names = {
        "linux": ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC"),
        # its CLOCK_MONOTONIC is adjusted to the network's time, its CLOCK_UPTIME_RAW is not
        "darwin": ("CLOCK_MONOTONIC_RAW", "CLOCK_UPTIME_RAW"),
    }.get(sys.platform, ())
    try:
        numbers = [getattr(time, name) for name in names]
        for number in numbers:
            time.clock_gettime(number)
    except (AttributeError, OSError):  # an old kernel, an emulated one
        numbers = []
    if not numbers:
        return time.monotonic, time.monotonic
    counting, awake = numbers
    return lambda: time.clock_gettime(counting), lambda: time.clock_gettime(awake)


class Clock:
    """Time that includes the machine's sleep and that nobody can set.

    Args:
        counting: Seconds, sleep included; None: the system's.
        awake: Seconds, sleep left out; None: the system's.
    """

    def __init__(
        self,
        counting: Callable[[], float] | None = None,
        awake: Callable[[], float] | None = None,
    ) -> None:
        system = _system_clocks()
        self._counting = counting or system[0]
        self._awake = awake or system[1]

    def now(self) -> float:
        """Return seconds since some moment, the machine's sleep included."""
        return self._counting()

    def suspended(self) -> float:
        """Return how many seconds the machine slept since that moment, plus a constant."""
        # This process may be stopped between the two readings; that makes one difference smaller,
        # and never larger.
        return max(self._counting() - self._awake() for _ in range(3))


class TimeLimit:
    """A number of hours after which a training is to stop.

    Args:
        max_hours: None: there is no limit.
        clock: By which they are counted; None: the system's. Hours asleep count.
    """

    def __init__(self, max_hours: float | None, clock: Clock | None = None) -> None:
        self._max_hours = max_hours
        self._clock = clock or Clock()
        self._begun: float | None = None

    def begin(self) -> None:
        """Count from now on."""
        self._begun = self._clock.now()

    def over(self) -> str | None:
        """Return a sentence once the time is over, else None; None before ``begin`` too."""
        if self._max_hours is None or self._begun is None:
            return None
        spent = self._clock.now() - self._begun
        if spent < self._max_hours * 3600:
            return None
        return (
            f"max_hours {self._max_hours:g} is over after {format_duration(spent)}: saved; "
            "resume with --resume"
        )


class SleepWatch:
    """Notices that the machine slept: a laptop that was closed, a suspended virtual machine.

    Args:
        clock: None: the system's.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self._known = self._clock.suspended()
        self.seconds = 0.0
        """That the machine slept since this began, as far as was looked."""

    def look(self) -> str | None:
        """Return a sentence when the machine slept longer than LONGEST_NAP since the last look."""
        before, self._known = self._known, self._clock.suspended()
        slept = max(0.0, self._known - before)
        self.seconds += slept
        return f"the machine slept for {format_duration(slept)}" if slept > LONGEST_NAP else None
