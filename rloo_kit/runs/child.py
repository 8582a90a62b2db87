"""Call a function in a subprocess, so that all its memory is free again when it returns.

The subprocess is a new interpreter: CUDA does not work in a forked process, and a process that
``multiprocessing`` spawns would run the user's script again.
"""

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rloo_kit.checkpoints.stopping import (
    SIGNALS,
    Terminated,
    exit_code,
    handled,
    interrupt_for,
    terminate_as_interrupt,
)
from rloo_kit.errors import KitError, SetupError

# True if the system has process groups. On other systems, processes that the subprocess started may
# keep running after the subprocess was killed
POSIX = hasattr(os, "killpg")


def call_in_child(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    say: Callable,
    *,
    variables: Mapping[str, str] | None = None,
    **keywords: Any,
) -> Any:
    """Call ``function(*args, **keywords)`` in a subprocess, and return its result.

    Ctrl-C, SIGTERM and SIGHUP are forwarded to the subprocess, and the function may still return a
    result after them. A third signal kills the subprocess. It is also killed if this process dies.
    On Windows nothing is forwarded, because the system itself sends Ctrl-C to both processes; other
    signals do not reach the subprocess.

    Args:
        function: A function that can be imported by its module and name.
        args: Picklable arguments.
        say: Called with each line that the subprocess prints.
        variables: Environment variables of the subprocess, in addition to those of this process.
        **keywords: Picklable keyword arguments.

    Raises:
        SetupError: The subprocess ended without a result, for example because the system killed it.
        KeyboardInterrupt: A signal ended the subprocess before the function returned; the subclass
            ``Terminated`` if it was SIGTERM or SIGHUP.
        Exception: Any error that the function raises.
    """
    with tempfile.TemporaryDirectory(prefix="rloo-kit-child-") as folder:
        order = Path(folder) / "order"
        answer = Path(folder) / "answer"
        order.write_bytes(pickle.dumps((function, args, keywords)))
        received = []

        def forward(number: int, _: object) -> None:
            """Note a signal; forward the first two to the process, except on Windows.

            Raises:
                KeyboardInterrupt: It is the third signal.
            """
            received.append(number)
            if len(received) > 2:
                raise interrupt_for(number)
            if POSIX:  # Windows itself sends Ctrl-C to both processes
                process.send_signal(number)

        with _started(order, answer, variables or {}) as process, handled(forward, *SIGNALS):
            assert process.stdout is not None
            for line in process.stdout:
                say(line.rstrip("\n"))
            process.wait()
        if not answer.exists():
            if received:
                raise interrupt_for(received[-1])
            raise SetupError(
                f"the subprocess ended with exit code {process.returncode} without a result: "
                f"{'memory may have run out; ' if process.returncode == -9 else ''}read the last "
                f"lines that it printed"
            )
        # safe, because the subprocess that this function started wrote the file
        returned, value = pickle.loads(answer.read_bytes())
    if returned:
        return value
    raise value


@contextlib.contextmanager
def _started(order: Path, answer: Path, variables: Mapping[str, str]) -> Iterator[subprocess.Popen]:
    """Start the subprocess; at the end of the block, kill it and the processes that it started.

    On Windows only the subprocess itself is killed, on other systems its whole process group.

    Args:
        order: File with the pickled function and its arguments.
        answer: File to which the subprocess writes the pickled result.
        variables: Additional environment variables.
    """
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", __name__, str(order), str(answer)],
        # if this process dies, the system closes this pipe, and the subprocess notices it
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        # so that Ctrl-C reaches it only once, from this process
        start_new_session=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTHONIOENCODING": "utf-8:replace",
            **variables,
        },
    )

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            if POSIX:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()

    def kill_the_rest() -> None:
        """Wait until the subprocess ends, and kill the processes that it left running."""
        process.wait()
        # a process that is left running would keep the output open
        kill()

    threading.Thread(target=kill_the_rest, name="rloo-kit subprocess", daemon=True).start()
    with process:  # closes its streams and waits for it
        try:
            yield process
        finally:
            kill()


def _main(order: str, answer: str) -> None:
    """Run in the subprocess: call the function in the file ``order``, write ``answer``."""
    # if a shell started the parent in the background, SIGINT is ignored here
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_end_with_the_parent, args=(Path(order).parent,), daemon=True).start()
    with terminate_as_interrupt():
        try:
            function, args, keywords = pickle.loads(Path(order).read_bytes())
            result = (True, function(*args, **keywords))
        except Terminated as exc:  # the parent raises it only if it received the signal itself
            sys.exit(exit_code(exc))
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


def _end_with_the_parent(folder: Path) -> None:
    """Wait until the parent dies; then remove ``folder`` and kill this process and its children."""
    # nothing is ever written, so this returns when the parent's end of the pipe is closed
    os.read(0, 1)
    shutil.rmtree(folder, ignore_errors=True)
    if POSIX:
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    _main(*sys.argv[1:])
