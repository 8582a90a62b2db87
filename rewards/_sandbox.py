"""Sandbox for untrusted Python in a process of its own: the parent's side."""

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rloo_kit.errors import BackendError

from . import _confinement
from ._text import check_least
from ._time_limit import time_limit

# A worker that is silent for longer has failed; a loaded machine starts one in a second
_START_SECONDS = 30.0


@dataclass(frozen=True)
class Limits:
    """Limits of one program."""

    timeout_seconds: float = 5.0  # wall time of the program; its CPU time may be a little more
    memory_mib: int = 512  # address space of the process; Python itself needs about 40 MiB
    disk_mib: int = 16  # all files together if the folder is a file system of its own, else each
    output_kib: int = 1024  # standard output; a program that prints more is ended

    def __post_init__(self) -> None:
        """Refuse a limit that no program can keep."""
        check_least("timeout_seconds", self.timeout_seconds, 0.1, 2**31)
        check_least("memory_mib", self.memory_mib, 64, 2**31)


@dataclass(frozen=True)
class Outcome:
    """Outcome of one program."""

    ok: bool  # it ended by itself, within its limits, with exit code 0
    reason: str  # "" if it is ok, else "exit", "signal", "timeout" or "output"
    stdout: str  # printed text, up to the limit; bytes that are not UTF-8 are replaced
    layers: tuple[str, ...] = field(repr=False)  # protections that it ran under


def run_python(
    source: str, *, stdin: str = "", limits: Limits | None = None, allow_weak: bool = False
) -> Outcome:
    """Run a program in a fresh, confined process, and return its outcome.

    The process has only the standard library, an empty environment, an empty folder of its own, no
    network, and no other process to start or to reach. See docs/how-to/code_sandbox.md.

    Args:
        source: The program, which runs as ``__main__``.
        stdin: Its whole standard input.
        limits: Its limits; None: the defaults.
        allow_weak: Run it even if neither files nor the network are protected.

    Raises:
        BackendError: The protections do not hold on this machine, or the process did not start.
    """
    limits = limits or Limits()
    check_system(allow_weak=allow_weak)
    program = source.encode("utf-8", "surrogatepass")  # Python refuses lone surrogates
    given = program + stdin.encode("utf-8", "surrogatepass")
    run = functools.partial(_run, given, len(program), limits, allow_weak=allow_weak)
    code, header, output, reason = run()
    # A batch system's SIGTERM and a terminal's Ctrl-C may reach the child too, while the parent
    # finishes its step. The program is not to blame then.
    if code in (-signal.SIGTERM, -signal.SIGINT):
        code, header, output, reason = run()
    word, *rest = header.decode("ascii").split() or [""]
    if word != _confinement.READY:
        raise BackendError(_refusal(word, rest))
    if not reason and code:
        reason = "exit" if code > 0 else "signal"
    return Outcome(not reason, reason, output.decode("utf-8", "replace"), tuple(rest))


def check_system(*, allow_weak: bool) -> None:
    """Check that this is Linux, or with ``allow_weak`` another POSIX system.

    Raises:
        BackendError: It is another system.
    """
    if sys.platform != "linux" and not (allow_weak and os.name == "posix"):
        raise BackendError(
            f"the code sandbox needs Linux, and this is {sys.platform}; use WSL or a container"
        )


def _run(
    given: bytes, size: int, limits: Limits, *, allow_weak: bool
) -> tuple[int, bytes, bytes, str]:
    """Run the program in the first ``size`` bytes of ``given``; the rest is its input.

    The result is the exit code of the ended process, and the results of ``_watch``.
    """
    folder = Path(tempfile.mkdtemp(prefix="rloo-kit-code-"))
    try:
        place = folder / "input"
        place.write_bytes(given)
        with place.open("rb") as file:
            place.unlink()
            process = _start(file, folder, size, limits, allow_weak=allow_weak)

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
    """Try each protection, and return whether it holds on this machine.

    >>> sorted(protections())
    ['landlock', 'namespaces', 'other_user', 'rlimits', 'seccomp', 'tmpfs']
    """
    held = run_python("", allow_weak=True).layers if os.name == "posix" else ()
    return {name: name in held for name in _confinement.LAYERS}


def _start(
    stdin: IO[bytes], folder: Path, size: int, limits: Limits, *, allow_weak: bool
) -> subprocess.Popen:
    numbers = (
        os.getpid(), size, int(allow_weak), math.ceil(limits.timeout_seconds) + 1,
        limits.memory_mib, limits.disk_mib,
    )  # fmt: skip
    # Isolated, without site-packages, writing no bytecode
    command = [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(_confinement.__file__)]
    try:
        return subprocess.Popen(
            [*command, str(folder), *map(str, numbers)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
    except OSError as exc:
        raise BackendError(
            f"the code sandbox cannot start {sys.executable!r}: {exc}; free memory or processes, "
            "or lower max_workers"
        ) from exc


def _watch(
    process: subprocess.Popen, limits: Limits, end: Callable[[], None]
) -> tuple[bytes, bytes, str]:
    """Return the worker's first line, the program's output, and why it must be ended or ""."""
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


def _refusal(word: str, rest: list[str]) -> str:
    if word != _confinement.REFUSED or not set(rest) <= set(_confinement.LAYERS):
        return (
            f"a process of the code sandbox did not start ({' '.join(rest)}); free memory or "
            "processes, raise memory_mib or lower max_workers"
        )
    return (
        f"the code sandbox lacks {' and '.join(rest)} on this machine, so a program could reach "
        "your files or the network; use Linux 5.13 or newer with Landlock on, or set "
        "allow_weak=True if nothing can be harmed"
    )
