"""What code that is called may leave changed in this process, and what is then put back."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

Kept = tuple[Callable[[], Any], Callable[[Any], Any]]
"""How something is read, and how it is set."""


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """Put back what the body changed of its process, however it ends.

    That is the working directory, what handles SIGINT and SIGTERM, and PyTorch's gradient mode,
    default precision and, where the body seeded them, random states: else every batch after it
    would be drawn from the same numbers. A body that seeds with the seed of the run
    itself is not recognised, and random numbers that it only draws stay drawn.
    """
    kept = [(*way, _read(way)) for way in _ways()]
    try:
        yield
    finally:
        for read, write, before in kept:
            if before is not None and _read((read, write)) != before:
                with contextlib.suppress(OSError):  # the folder is gone
                    write(before)


def _read(way: Kept) -> Any:
    try:
        return way[0]()
    except OSError:  # a working directory that was removed
        return None


def _ways() -> list[Kept]:
    ways: list[Kept] = [(os.getcwd, os.chdir)]
    if threading.current_thread() is threading.main_thread():
        ways += [_handler(number) for number in (signal.SIGINT, signal.SIGTERM)]
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_rng_state"):
        ways += [
            (torch.is_grad_enabled, torch.set_grad_enabled),
            (torch.get_default_dtype, torch.set_default_dtype),
            _seed(torch),
        ]
    return ways


def _handler(number: int) -> Kept:
    return (
        lambda: signal.getsignal(number),  # None where it was not set from Python
        lambda before: signal.signal(number, before),
    )


def _seed(torch: Any) -> Kept:
    """Return how PyTorch's seed is read, and how the random states from before are set again."""
    state = torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def write(_: int) -> None:
        torch.set_rng_state(state)
        if on_gpu:
            torch.cuda.set_rng_state_all(on_gpu)

    return torch.initial_seed, write
