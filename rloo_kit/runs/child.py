"""Call a function in a child process, so that all its memory returns to the system for certain.

The child is a fresh interpreter and not a fork: CUDA does not survive a fork, and a copy of a
notebook's memory would come along.
"""

import contextlib
import math
import operator
import os
import pickle
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from rloo_kit.checkpoints.stopping import (
    StopSignals,
    Terminated,
    exit_code,
    interrupt_for,
    signal_of,
    terminate_as_interrupt,
)
from rloo_kit.errors import KitError, SetupError
from rloo_kit.text.redaction import hide_on_terminal

GRACE_SECONDS = 10.0
"""From a second signal until the child is killed."""


def call_in_child(
    function: Callable[..., Any], args: tuple[Any, ...], say: Callable, **keywords: Any
) -> Any:
    """Return ``function(*args, **keywords)``, called in a child process.

    Ctrl-C and SIGTERM here are the same there: the function may answer a first one with a result,
    and a second one gives it GRACE_SECONDS to clean up. The child ends with this process, however
    this process ends.

    Args:
        function: Importable by its module and name.
        args: What pickle takes.
        say: Called with each line the child prints.
        **keywords: As ``args``.

    Raises:
        SetupError: The child ended without a result, such as when the system killed it.
        KeyboardInterrupt: For a signal that the function did not answer with a result;
            Terminated for SIGTERM.
        Exception: Whatever the function raised.
    """
    with (
        tempfile.TemporaryDirectory(prefix="rloo-kit-child-") as folder,
        StopSignals() as stop,
    ):
        order, answer = Path(folder) / "order", Path(folder) / "answer"
        order.write_bytes(
            pickle.dumps((function.__module__, function.__qualname__, args, keywords))
        )
        with _started(order, answer) as process:
            second = _relay(process, say, stop)
        if not answer.exists():
            if stop.received:
                raise second or interrupt_for(stop.received)
            raise SetupError(
                f"the child process ended with code {process.returncode} and no result: "
                f"{'memory may have run out; ' if process.returncode == -9 else ''}look at what it "
                f"printed last"
            )
        returned, value = pickle.loads(answer.read_bytes())  # written by our own child
    if returned:
        return value
    raise value


@contextlib.contextmanager
def _started(order: Path, answer: Path) -> Iterator[subprocess.Popen]:
    """Start the child; at the end kill it, if it is still there, and what it started."""
    watched, held = os.pipe()  # the system closes what we hold, also when it kills us
    process = None
    try:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", __name__, str(order), str(answer), str(watched)],
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            pass_fds=(watched,),
            start_new_session=True,  # Ctrl-C reaches it once, through us
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        yield process
    finally:
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(watched)
        os.close(held)


def _relay(process: subprocess.Popen, say: Callable, stop: StopSignals) -> KeyboardInterrupt | None:
    """Pass on lines, and signals the other way, until the child ends; return a second signal.

    What the child started may keep its output open, so the end of the process counts and not the
    end of the output.

    Raises:
        KeyboardInterrupt: A third signal came, or the child was not done in time after a second.
    """
    # A SimpleQueue waits for ever where a signal is handled at the end of its timeout.
    lines: queue.Queue[str] = queue.Queue()
    reader = threading.Thread(
        target=_read, args=(process.stdout, lines), name="rloo-kit child's output", daemon=True
    )
    reader.start()
    asked, second, deadline = False, None, math.inf
    while True:
        try:
            if stop.received and not asked:
                asked = True
                process.send_signal(stop.received)
            ended = process.poll() is not None
            if ended:
                reader.join(0.5)
            for line in _waiting(lines, 0.0 if ended else 0.1):
                say(line.rstrip("\n"))
            if ended:
                return second
        except KeyboardInterrupt as exc:
            if second is not None:
                raise
            second, deadline = exc, time.monotonic() + GRACE_SECONDS
            process.send_signal(signal_of(exc))
        if time.monotonic() > deadline:
            raise second


def _read(output: IO[str], lines: queue.Queue[str]) -> None:
    with contextlib.suppress(ValueError), output:
        for line in output:
            lines.put(line)


def _waiting(lines: queue.Queue[str], timeout: float) -> Iterator[str]:
    """Return the lines that are there now; wait for the first, seconds."""
    with contextlib.suppress(queue.Empty):
        yield lines.get(timeout=timeout)
        for _ in range(lines.qsize()):  # not those of a child that prints without end
            yield lines.get()


def _main(order: str, answer: str, watched: str) -> None:
    import importlib

    hide_on_terminal()
    # a parent that was started in the background may have left it ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _end_with_the_parent(int(watched), Path(order).parent)
    module, name, args, keywords = pickle.loads(Path(order).read_bytes())
    with terminate_as_interrupt():
        try:
            function = operator.attrgetter(name)(importlib.import_module(module))
            result = (True, function(*args, **keywords))
        except Terminated:  # not the parent's to raise, unless it was asked too
            sys.exit(exit_code(signal.SIGTERM))
        except BaseException as exc:
            if not isinstance(exc, KitError):
                exc.add_note(f"in the child process:\n{traceback.format_exc()}")
            result = (False, exc)
    try:
        content = pickle.dumps(result)
        pickle.loads(content)
    except Exception:
        what = "returned" if result[0] else "raised"
        content = pickle.dumps(
            (False, SetupError(f"the child {what} {result[1]!r}, which cannot be sent back"))
        )
    Path(answer).write_bytes(content)


def _end_with_the_parent(watched: int, folder: Path) -> None:
    """Kill this process and what it started once the parent is gone, and remove ``folder``."""

    def wait() -> None:
        os.read(watched, 1)  # nothing is ever written: this is its end
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    os.set_inheritable(watched, False)
    threading.Thread(target=wait, name="rloo-kit child's parent", daemon=True).start()


if __name__ == "__main__":
    _main(*sys.argv[1:])
