"""Sandbox that runs an untrusted Python program in a confined child process.

This module starts and watches the process. The child runs ``_confinement.py``.
"""

import contextlib
import functools
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from rloo_kit.errors import BackendError

from . import _confinement
from ._text import check_least
from ._time_limit import time_limit

# If the child prints nothing for this long, it has failed. On a busy machine it starts in a second.
_START_SECONDS = 30.0


@dataclass(frozen=True)
class Limits:
    """Limits of one program in the sandbox, and whether it may run without full protection."""

    timeout_seconds: float = 5.0  # wall time of the program; its CPU time may be a little more
    memory_mib: int = 512  # address space of the process; Python itself needs about 40 MiB
    disk_mib: int = 16  # size of all files if the folder is a tmpfs, else the size of each file
    output_kib: int = 1024  # standard output; a program that prints more is ended
    allow_weak: bool = False  # run it even if this machine cannot protect files and the network

    def __post_init__(self) -> None:
        """Check that the limits are large enough, and that the system can run the sandbox.

        The system must be Linux or, if ``allow_weak`` is set, any POSIX system.

        Raises:
            BackendError: The system cannot run the sandbox.
        """
        check_least(self, "timeout_seconds", 0.1, 2**31)
        check_least(self, "memory_mib", 64, 2**31)
        if sys.platform != "linux" and not (self.allow_weak and os.name == "posix"):
            raise BackendError(
                f"the code sandbox needs Linux, and this is {sys.platform}; use WSL or a container"
            )


@dataclass(frozen=True)
class Outcome:
    """Outcome of one program that ran in the sandbox."""

    ok: bool  # it ended by itself, within its limits, with exit code 0
    reason: str  # "" if it is ok, else "exit", "signal", "timeout" or "output"
    stdout: str  # printed text, up to the limit; bytes that are not UTF-8 are replaced
    layers: tuple[str, ...]  # protections that were active


def run_python(source: str, *, stdin: str = "", limits: Limits | None = None) -> Outcome:
    """Run a program in a new, confined process, and return its outcome.

    The program has only the standard library, an empty environment and an empty folder. It cannot
    use the network, start processes, or reach other processes. See docs/how-to/code_sandbox.md.

    Args:
        source: Source code of the program, which runs as ``__main__``.
        stdin: Text of the program's standard input.
        limits: Limits of the program; None: the defaults.

    Raises:
        BackendError: This machine lacks a required protection, or the process did not start.
    """
    program = source.encode("utf-8", "surrogatepass")  # Python refuses lone surrogates
    given = program + stdin.encode("utf-8", "surrogatepass")
    run = functools.partial(_run, given, len(program), limits or Limits())
    code, header, output, reason = run()
    # A batch system's SIGTERM and a terminal's Ctrl-C may reach the child too, while the parent
    # finishes its step. The program is not to blame then.
    if code in (-signal.SIGTERM, -signal.SIGINT):
        code, header, output, reason = run()
    word, *rest = header.decode("ascii").split() or [""]
    if word == _confinement.REFUSED and set(rest) <= set(_confinement.LAYERS):
        raise BackendError(
            f"the code sandbox lacks {' and '.join(rest)} on this machine, so a program could "
            "reach your files or the network; use Linux 5.13 or newer with Landlock on, or set "
            "allow_weak=True if nothing can be harmed"
        )
    if word != _confinement.READY:
        raise BackendError(
            f"a process of the code sandbox did not start ({' '.join(rest)}); free memory, end "
            "other processes, raise memory_mib or lower max_workers"
        )
    if not reason and code:
        reason = "exit" if code > 0 else "signal"
    return Outcome(not reason, reason, output.decode("utf-8", "replace"), tuple(rest))


def _run(given: bytes, size: int, limits: Limits) -> tuple[int, bytes, bytes, str]:
    """Run a program in a child process, and return (exit code, *results of ``_watch``).

    Args:
        given: The program, followed by its standard input.
        size: Number of bytes of the program in ``given``.
        limits: Limits of the program.
    """
    folder = tempfile.mkdtemp(prefix="rloo-kit-code-")
    try:
        with tempfile.TemporaryFile() as file:  # the program may erase what it has read
            file.write(given)
            file.seek(0)
            process = _start(file, folder, size, limits)

        def end() -> None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

        with process:  # closes its output
            try:
                found = _watch(process, limits, end)
            finally:
                end()
        return process.returncode, *found
    finally:
        # Only a program under weak protection leaves files here, such as folders a thousand deep
        with contextlib.suppress(RecursionError):
            shutil.rmtree(folder, ignore_errors=True)


def protections() -> dict[str, bool]:
    """Try each protection on this machine, and return a dict from its name to whether it works.

    >>> sorted(protections())
    ['landlock', 'namespaces', 'other_user', 'rlimits', 'seccomp', 'tmpfs']
    """
    held = run_python("", limits=Limits(allow_weak=True)).layers if os.name == "posix" else ()
    return {name: name in held for name in _confinement.LAYERS}


def _start(stdin: IO[bytes], folder: str, size: int, limits: Limits) -> subprocess.Popen:
    numbers = (
        os.getpid(), size, int(limits.allow_weak), math.ceil(limits.timeout_seconds) + 1,
        limits.memory_mib, limits.disk_mib,
    )  # fmt: skip
    # Isolated, without site-packages, writing no bytecode
    command = [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(_confinement.__file__)]
    try:
        return subprocess.Popen(
            [*command, folder, *map(str, numbers)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
    except OSError as exc:
        raise BackendError(
            f"the code sandbox cannot start {sys.executable!r}: {exc}; free memory, end other "
            "processes, or lower max_workers"
        ) from exc


def _watch(
    process: subprocess.Popen, limits: Limits, end: Callable[[], None]
) -> tuple[bytes, bytes, str]:
    """Read a child process until the program ends or reaches a limit.

    Args:
        process: The child process.
        limits: Limits of the program.
        end: Function that kills the process.

    Returns:
        The first line of output, which reports the protections; the output of the program; and the
        limit that the program reached, ``timeout`` or ``output``, or "".
    """
    assert process.stdout is not None
    with time_limit(_START_SECONDS, end):
        header = process.stdout.readline()
    with time_limit(limits.timeout_seconds, end) as was_in_time:
        most = limits.output_kib << 10
        output = process.stdout.read(most + 1)
        if len(output) > most:
            return header, output[:most], "output"
        process.wait()  # it may have closed its output and still run
    return header, output, "" if was_in_time() else "timeout"
