"""Call a function in a subprocess, which returns all its memory to the system.

The subprocess is a fresh interpreter, not a fork: CUDA does not survive a fork.
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

# From a second signal until the subprocess is killed
GRACE_SECONDS = 10.0


def call_in_child(
    function: Callable[..., Any], args: tuple[Any, ...], say: Callable, **keywords: Any
) -> Any:
    """Return ``function(*args, **keywords)``, called in a subprocess.

    Ctrl-C and SIGTERM are forwarded: the function may answer the first with a result, and a second
    gives it GRACE_SECONDS to clean up. The subprocess is killed if this process dies.

    Args:
        function: Importable by its module and name.
        args: Picklable.
        say: Called with each line that the subprocess prints.
        **keywords: Picklable.

    Raises:
        SetupError: The subprocess ended without a result, such as when the system killed it.
        KeyboardInterrupt: After a signal without a result; Terminated for SIGTERM.
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
                f"the subprocess ended with code {process.returncode} and no result: "
                f"{'memory may have run out; ' if process.returncode == -9 else ''}read the last "
                f"lines it printed"
            )
        returned, value = pickle.loads(answer.read_bytes())  # written by our own subprocess
    if returned:
        return value
    raise value


@contextlib.contextmanager
def _started(order: Path, answer: Path) -> Iterator[subprocess.Popen]:
    """Start the subprocess; at the end kill it and what it started."""
    watched, held = os.pipe()  # the system closes our end when this process dies
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
    """Forward lines and signals until the subprocess ends; return a second signal.

    The end of the process counts, not of its output: a grandchild may keep that open.

    Raises:
        KeyboardInterrupt: A third signal came, or GRACE_SECONDS after the second are over.
    """
    # not a SimpleQueue: it can wait forever if a signal is handled at the end of its timeout
    lines: queue.Queue[str] = queue.Queue()
    reader = threading.Thread(
        target=_read, args=(process.stdout, lines), name="rloo-kit subprocess output", daemon=True
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
        if second is not None and time.monotonic() > deadline:
            raise second


def _read(output: IO[str], lines: queue.Queue[str]) -> None:
    with contextlib.suppress(ValueError), output:
        for line in output:
            lines.put(line)


def _waiting(lines: queue.Queue[str], timeout: float) -> Iterator[str]:
    """Return the lines there are now; wait up to ``timeout`` seconds for the first."""
    with contextlib.suppress(queue.Empty):
        yield lines.get(timeout=timeout)
        for _ in range(lines.qsize()):  # not more: it may print without end
            yield lines.get()


def _main(order: str, answer: str, watched: str) -> None:
    import importlib

    # a shell that starts the parent in the background leaves SIGINT ignored
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
                exc.add_note(f"in the subprocess:\n{traceback.format_exc()}")
            result = (False, exc)
    try:
        content = pickle.dumps(result)
        pickle.loads(content)
    except Exception:
        what = "returned" if result[0] else "raised"
        content = pickle.dumps(
            (False, SetupError(f"the subprocess {what} {result[1]!r}, which cannot be pickled"))
        )
    Path(answer).write_bytes(content)


def _end_with_the_parent(watched: int, folder: Path) -> None:
    """Kill this process and what it started when the parent dies, and remove ``folder``."""

    def wait() -> None:
        os.read(watched, 1)  # returns when the parent's end is closed: nothing is ever written
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    os.set_inheritable(watched, False)
    threading.Thread(target=wait, name="rloo-kit parent watch", daemon=True).start()


if __name__ == "__main__":
    _main(*sys.argv[1:])
