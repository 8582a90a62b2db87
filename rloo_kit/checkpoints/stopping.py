"""Signals that end a run.

The first SIGINT or SIGTERM asks the training to finish its step and save. A second one is raised
at once, as Ctrl-C is.
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
# Seconds. Signals that are closer together are one request: `timeout` sends SIGTERM to a process
# and then to its whole group.
APART = 0.2


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised as Ctrl-C is, so that everything that cleans up after Ctrl-C does it."""


def exit_code(raised: KeyboardInterrupt) -> int:
    """Return the exit code by which a shell knows that a signal ended a program.

    >>> exit_code(KeyboardInterrupt()), exit_code(Terminated())
    (130, 143)
    """
    return 128 + (signal.SIGTERM if isinstance(raised, Terminated) else signal.SIGINT)


def interrupt_for(received: int) -> KeyboardInterrupt:
    """Return what is raised for a signal."""
    return Terminated() if received == signal.SIGTERM else KeyboardInterrupt()


@contextlib.contextmanager
def handled(handle: Callable[[int, FrameType | None], Any], *numbers: int) -> Iterator[None]:
    """Install a handler for some signals, and put the ones before back at the end.

    A signal that this process was started to ignore stays ignored. Outside of the main thread
    nothing is done: Python handles signals nowhere else.
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
    """The first signal that asked the training to stop."""

    received: int | None = None  # its number
    received_at: float = 0.0


@contextlib.contextmanager
def stop_signals(say: Callable[[str], object] = lambda _: None) -> Iterator[StopRequest]:
    """Note the first SIGINT or SIGTERM, and raise every further one.

    Args:
        say: Called with a line for the user, from a thread of its own; nothing is said by default.

    Raises:
        KeyboardInterrupt: In the body, by a second SIGINT.
        Terminated: In the body, by a second signal that is a SIGTERM.
    """
    request = StopRequest()

    def tell() -> None:
        # The terminal may be closed by now
        with contextlib.suppress(Exception):
            # It may come from Ctrl-C, a notebook's stop button, the form's, or another program
            say("\nstopping: this step is finished and saved first; ask again to stop at once")

    def note(number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if request.received is None:
            request.received = number
            request.received_at = now
            # What was interrupted may hold the lock of the stream; threading.Thread takes one too.
            _thread.start_new_thread(tell, ())
        elif now - request.received_at >= APART:
            raise interrupt_for(number)

    with handled(note, *SIGNALS):
        yield request


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Let the first SIGTERM raise Terminated in the body, so that what was begun is cleaned up.

    For the time before the training, where a signal has nothing to wait for; Ctrl-C raises by
    itself.
    """

    def end(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not end the clean-up
        raise Terminated

    with handled(end, signal.SIGTERM):
        yield
