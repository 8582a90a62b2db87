"""Signals that end a run.

The first SIGINT or SIGTERM asks the training to finish its step and save. A second signal raises
KeyboardInterrupt at once.
"""

import _thread
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Seconds between two requests. Signals that are closer together count as one, because `timeout`
# sends SIGTERM to a process and then to its whole group.
APART = 0.2


class Terminated(KeyboardInterrupt):
    """KeyboardInterrupt for SIGTERM, so that code that cleans up after Ctrl-C cleans up here."""


def exit_code(raised: KeyboardInterrupt) -> int:
    """Return the exit code that tells a shell which signal ended a program.

    >>> exit_code(KeyboardInterrupt()), exit_code(Terminated())
    (130, 143)
    """
    return 128 + (signal.SIGTERM if isinstance(raised, Terminated) else signal.SIGINT)


def interrupt_for(received: int) -> KeyboardInterrupt:
    """Return the exception to raise for a signal."""
    return Terminated() if received == signal.SIGTERM else KeyboardInterrupt()


@contextlib.contextmanager
def handled(handle: Callable[[int, FrameType | None], Any], *numbers: int) -> Iterator[None]:
    """Install a handler for some signals, and restore the earlier handlers at the end.

    A signal that this process ignores already stays ignored. Outside of the main thread nothing is
    installed, because Python handles signals only there.

    Args:
        handle: Called with the number of the signal and the interrupted frame.
        *numbers: Signals, such as ``signal.SIGTERM``.
    """
    is_main = threading.current_thread() is threading.main_thread()
    wanted = [one for one in numbers if signal.getsignal(one) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, handle) for number in wanted if is_main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class StopRequest:
    """First signal that asked the training to stop."""

    received: int | None = None  # its number
    received_at: float = 0.0


@contextlib.contextmanager
def stop_signals(say: Callable[[str], object] = lambda _: None) -> Iterator[StopRequest]:
    """Note the first SIGINT or SIGTERM, and raise an exception in the body at each later one.

    Args:
        say: Called with a line for the user, from a thread of its own.

    Raises:
        KeyboardInterrupt: A later SIGINT arrived.
        Terminated: A later SIGTERM arrived.
    """
    request = StopRequest()

    def tell() -> None:
        with contextlib.suppress(Exception):  # the terminal may be closed
            # the request may come from Ctrl-C, a stop button or another program
            say("\nstopping: this step is finished and saved first; ask again to stop at once")

    def note(number: int, _: FrameType | None) -> None:
        """Note the first signal.

        Raises:
            KeyboardInterrupt: It is a later one.
        """
        now = time.monotonic()
        if request.received is None:
            request.received = number
            request.received_at = now
            # The interrupted code may hold the lock of the stream, or that of threading.Thread
            _thread.start_new_thread(tell, ())
        elif now - request.received_at >= APART:
            raise interrupt_for(number)

    with handled(note, *SIGNALS):
        yield request


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Raise Terminated in the body at the first SIGTERM, so that the body can clean up.

    Used before the training, when no step must be finished first.

    Raises:
        Terminated: In the body, at SIGTERM.
    """

    def end(number: int, _: FrameType | None) -> None:
        """End the body.

        Raises:
            Terminated: Always.
        """
        signal.signal(number, signal.SIG_IGN)  # a second one must not end the clean-up
        raise Terminated

    with handled(end, signal.SIGTERM):
        yield
