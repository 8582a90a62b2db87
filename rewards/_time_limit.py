"""Time limit of a block that reads from a process."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def time_limit(seconds: float, end: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Call ``end`` once the block has taken so many seconds; it ends the process that is read.

    Yields a function for after the block, which returns whether ``end`` was not called. A thread
    does it, since Windows reads no pipe with a time limit.
    """
    limit = threading.Timer(seconds, end)
    start = time.monotonic()
    try:
        limit.start()
        yield lambda: time.monotonic() - start < seconds
    finally:
        limit.cancel()
