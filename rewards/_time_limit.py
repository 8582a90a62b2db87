"""Time limit for a block of code that reads from a process."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def time_limit(seconds: float, end: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Context manager that calls ``end`` if its block takes longer than ``seconds``.

    ``end`` must kill the process from which the block reads, so that the block ends. A thread calls
    it, because Windows cannot read a pipe with a time limit.

    The context manager yields a function that returns whether the block ended in time. Call this
    function right after the block, because it measures the time until it is called.
    """
    limit = threading.Timer(seconds, end)
    start = time.monotonic()
    try:
        limit.start()
        yield lambda: time.monotonic() - start < seconds
    finally:
        limit.cancel()
