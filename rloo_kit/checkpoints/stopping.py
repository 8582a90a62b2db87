"""Handle the signals that end a run: SIGINT (Ctrl-C), SIGTERM, and SIGHUP (a lost terminal).

The first signal asks the training to finish its step and save. A second signal raises
KeyboardInterrupt at once.
"""

import _thread
import contextlib
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

# The signal after a terminal or an ssh connection was closed; None on Windows
HANGUP = getattr(signal, "SIGHUP", None)
ENDINGS = (signal.SIGTERM, *([HANGUP] if HANGUP else []))  # signals for which Terminated is raised
SIGNALS = (signal.SIGINT, *ENDINGS)
# A signal within this many seconds of the first one is not counted as a second signal, because the
# command `timeout` sends SIGTERM to a process and then again to its whole group
APART = 0.2


class Terminated(KeyboardInterrupt):
    """The error that is raised for SIGTERM and SIGHUP; its text is the name of the signal.

    It is a KeyboardInterrupt, so that code that cleans up after Ctrl-C also cleans up after it.
    """


def exit_code(raised: KeyboardInterrupt) -> int:
    """Return the exit code after a signal: 130 for Ctrl-C, 143 for SIGTERM and SIGHUP.

    >>> exit_code(KeyboardInterrupt()), exit_code(Terminated())
    (130, 143)
    """
    return 128 + (signal.SIGTERM if isinstance(raised, Terminated) else signal.SIGINT)


def who_interrupted(raised: KeyboardInterrupt) -> str:
    """Return what ended a program, for a message: the signal's name, or ``the user`` (Ctrl-C)."""
    return str(raised) if isinstance(raised, Terminated) else "the user"


def interrupt_for(received: int) -> KeyboardInterrupt:
    """Return the exception to raise for a signal of this number."""
    if received == signal.SIGINT:
        return KeyboardInterrupt()
    return Terminated(signal.Signals(received).name)


def silence(output: int) -> None:
    """Redirect the file descriptor ``output`` to the null device, which drops all later output."""
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), output)


@contextlib.contextmanager
def handled(handle: Callable[[int, FrameType | None], Any], *numbers: int) -> Iterator[None]:
    """Handle signals with ``handle`` while the body runs, and then restore the earlier handlers.

    A signal that this process already ignores stays ignored. In other threads than the main thread
    nothing is handled, because Python can install handlers only in the main thread.

    If SIGHUP arrives because the terminal is gone, standard output and standard error are first
    redirected to the null device, because printing would fail.

    Args:
        handle: Called with the number of the signal and the interrupted frame.
        *numbers: Signals, such as ``signal.SIGTERM``.
    """

    def call(number: int, frame: FrameType | None) -> None:
        for output in (1, 2) if number == HANGUP else ():
            with contextlib.suppress(OSError):  # it may be closed
                # the file of a closed terminal is still a device, but isatty is False
                if stat.S_ISCHR(os.fstat(output).st_mode) and not os.isatty(output):
                    silence(output)
        handle(number, frame)

    is_main = threading.current_thread() is threading.main_thread()
    wanted = [one for one in numbers if signal.getsignal(one) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, call) for number in wanted if is_main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class StopRequest:
    """The first signal that asked the training to stop."""

    received: int | None = None  # number of the signal; None if none has arrived
    received_at: float = 0.0  # when it arrived, in seconds of time.monotonic()


@contextlib.contextmanager
def stop_signals(say: Callable[[str], object] = lambda _: None) -> Iterator[StopRequest]:
    """Record the first of ``SIGNALS`` while the body runs; raise an exception at each later one.

    Signals that arrive within 0.2 seconds of the first one count as the same signal.

    Args:
        say: Called in another thread, with a line for the user, when the first signal arrives.

    Yields:
        The request, which the first signal fills in.

    Raises:
        KeyboardInterrupt: A later SIGINT has arrived.
        Terminated: A later SIGTERM or SIGHUP has arrived.
    """
    request = StopRequest()

    def tell() -> None:
        with contextlib.suppress(Exception):  # the terminal may be closed
            # the request may come from Ctrl-C, a stop button or another program
            say("\nstopping: this step is finished and saved first; ask again to stop at once")

    def note(number: int, _: FrameType | None) -> None:
        """Record the first signal; raise an exception at a later one.

        Raises:
            KeyboardInterrupt: A later SIGINT, at least ``APART`` seconds after the first signal.
            Terminated: A later SIGTERM or SIGHUP, at least ``APART`` seconds after the first
                signal.
        """
        now = time.monotonic()
        if request.received is None:
            request.received = number
            request.received_at = now
            # Another thread, and not of threading.Thread: the interrupted code may hold a lock that
            # printing or starting a thread needs
            _thread.start_new_thread(tell, ())
        elif now - request.received_at >= APART:
            raise interrupt_for(number)

    with handled(note, *SIGNALS):
        yield request


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Raise Terminated in the body when SIGTERM or SIGHUP arrives, so that the body can clean up.

    Use it while no optimizer step is in progress: before and after training, and in commands that
    do not train.

    Raises:
        Terminated: SIGTERM or SIGHUP has arrived.
    """

    def end(number: int, _: FrameType | None) -> None:
        """Raise Terminated in the body.

        Raises:
            Terminated: Always.
        """
        for one in ENDINGS:  # neither a second SIGTERM nor a SIGHUP may interrupt the clean-up
            signal.signal(one, signal.SIG_IGN)
        raise interrupt_for(number)

    with handled(end, *ENDINGS):
        yield
