"""Call a function in a child process, so that all its memory returns to the system for certain.

The child is a fresh interpreter and not a fork: CUDA does not survive a fork, and a copy of a
notebook's memory would come along.
"""

import contextlib
import operator
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rloo_kit.errors import KitError, SetupError


def call_in_child(function: Callable[..., Any], args: tuple[Any, ...], say: Callable) -> Any:
    """Return ``function(*args)``, called in a child process.

    Args:
        function: Importable by its module and name.
        args: What pickle takes.
        say: Called with each line the child prints. Ctrl-C here is Ctrl-C there.

    Raises:
        SetupError: The child ended without a result, such as when the system killed it.
        Exception: Whatever the function raised.
    """
    with tempfile.TemporaryDirectory(prefix="rloo-kit-child-") as folder:
        order, answer = Path(folder) / "order", Path(folder) / "answer"
        order.write_bytes(pickle.dumps((function.__module__, function.__qualname__, args)))
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", __name__, str(order), str(answer)],
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches it once, through us
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        interrupted = False
        try:
            interrupted = _relay(process, say)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it started
            process.wait()
        if not answer.exists():
            if interrupted:
                raise KeyboardInterrupt
            raise SetupError(
                f"the child process ended with code {process.returncode} and no result: "
                f"{'memory may have run out; ' if process.returncode == -9 else ''}look at what it "
                f"printed last"
            )
        returned, value = pickle.loads(answer.read_bytes())  # written by our own child
    if returned:
        return value
    raise value


def _relay(process: subprocess.Popen, say: Callable) -> bool:
    """Pass on lines until the child ends; return whether Ctrl-C asked it to.

    A second Ctrl-C is raised here. What the child started may keep its output open, so the end of
    the process counts and not the end of the output.
    """
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        with contextlib.suppress(ValueError), process.stdout as output:
            for line in output:
                lines.put(line)

    reader = threading.Thread(target=read, name="rloo-kit child's output", daemon=True)
    reader.start()
    asked = False
    while True:
        try:
            ended = process.poll() is not None
            if ended:
                reader.join(0.5)
            with contextlib.suppress(queue.Empty):
                while True:
                    say(lines.get(timeout=0 if ended else 0.2).rstrip("\n"))
            if ended:
                return asked
        except KeyboardInterrupt:
            if asked:
                raise
            asked = True
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)


def _main(order: str, answer: str) -> None:
    import importlib

    # a parent that was started in the background may have left it ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    module, name, args = pickle.loads(Path(order).read_bytes())
    try:
        function = operator.attrgetter(name)(importlib.import_module(module))
        result = (True, function(*args))
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


if __name__ == "__main__":
    _main(*sys.argv[1:])
