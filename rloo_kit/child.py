"""Call a function in a child process, so that all its memory returns to the system for certain.

The child is a fresh interpreter and not a fork: CUDA does not survive a fork, and a copy of a
notebook's memory would come along.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rloo_kit.errors import SetupError


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
        try:
            _relay(process, say)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stdout.close()
        if not answer.exists():
            raise SetupError(
                f"the child process ended with code {process.returncode} and no result: "
                f"{'memory may have run out; ' if process.returncode == -9 else ''}look at what it "
                f"printed last"
            )
        returned, value = pickle.loads(answer.read_bytes())  # written by our own child
    if returned:
        return value
    raise value


def _relay(process: subprocess.Popen, say: Callable) -> None:
    """Pass on lines until the child ends; a first Ctrl-C asks it to end, a second one kills it."""
    asked = False
    while True:
        try:
            for line in process.stdout:
                say(line.rstrip("\n"))
            process.wait()
        except KeyboardInterrupt:
            if asked:
                raise
            asked = True
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
        else:
            return


def _main(order: str, answer: str) -> None:
    import importlib

    module, name, args = pickle.loads(Path(order).read_bytes())
    try:
        function = getattr(importlib.import_module(module), name)
        result = (True, function(*args))
    except BaseException as exc:
        import traceback

        traceback.print_exc()
        result = (False, exc)
    try:
        content = pickle.dumps(result)
    except Exception:
        content = pickle.dumps((result[0], SetupError(f"the child raised {result[1]!r}")))
    Path(answer).write_bytes(content)


if __name__ == "__main__":
    _main(*sys.argv[1:])
