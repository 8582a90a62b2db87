"""Start several processes of one training on this machine, and report why it ended.

Each process is the ``rloo-kit`` command with the variables that torchrun sets. Rank 0 prints; the
output of the others is kept and shown if one of them fails first.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rloo_kit.checkpoints.stopping import SIGNALS, exit_code
from rloo_kit.errors import ConfigError
from rloo_kit.processes import LOST

# For the others to save after one has failed; then they are killed
GRACE_SECONDS = 20.0
POLL_SECONDS = 0.1
# Shown of a process that failed without a message of the kit
LAST_LINES = 20


@dataclass
class _Member:
    """One process and its output."""

    rank: int
    process: subprocess.Popen
    log: IO[bytes] | None
    """None for rank 0, which prints to the terminal."""


def launch(arguments: Sequence[str], num_processes: int, say: Callable[[str], None]) -> int:
    """Run ``rloo-kit`` with these arguments in several processes; return the exit code.

    Ctrl-C and SIGTERM are forwarded. When one process fails, the others save and end; after
    GRACE_SECONDS they are killed.

    Args:
        arguments: Of the command, without ``--processes``.
        num_processes: At least 2.
        say: Called with why they ended, unless rank 0 has printed it.

    Raises:
        ConfigError: ``num_processes`` is below 2.
    """
    if num_processes < 2:
        raise ConfigError(f"--processes is {num_processes}, must be at least 2")
    with tempfile.TemporaryDirectory(prefix="rloo-kit-processes-") as logs:
        members = _start(arguments, num_processes, Path(logs))
        try:
            with _forwarded_signals(members):
                first = _wait(members)
        finally:
            _end(members)
        text, code = _outcome(members, first)
    if text:
        say(text)
    return code


def _start(arguments: Sequence[str], num_processes: int, logs: Path) -> list[_Member]:
    threads = str(max(1, (os.cpu_count() or 1) // num_processes))
    settings = {
        "OMP_NUM_THREADS": threads,
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
    }
    members: list[_Member] = []
    for rank in range(num_processes):
        log = (logs / str(rank)).open("w+b") if rank else None
        process = subprocess.Popen(
            [sys.executable, "-m", "rloo_kit", *arguments],
            env={**settings, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=None if log is None else subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches each once, through us
        )
        members.append(_Member(rank, process, log))
    return members


def _free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


@contextlib.contextmanager
def _forwarded_signals(members: list[_Member]) -> Iterator[None]:
    def forward(number: int, _: object) -> None:
        for member in members:
            if member.process.poll() is None:
                member.process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(members: list[_Member]) -> _Member | None:
    """Wait until all have ended or the grace time is over; return the first that failed."""
    first, deadline = None, None
    while any(member.process.poll() is None for member in members):
        failed = [m for m in members if m.process.poll() not in (None, 0)]
        if failed and first is None:
            first = failed[0]
            deadline = time.monotonic() + GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            return first
        time.sleep(POLL_SECONDS)
    return first or next((m for m in members if m.process.returncode), None)


def _end(members: list[_Member]) -> None:
    for member in members:
        if member.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(member.process.pid, signal.SIGKILL)
        member.process.wait()


def _outcome(members: list[_Member], first: _Member | None) -> tuple[str, int]:
    """Return why the training ended ("" if rank 0 has printed it), and the exit code."""
    if first is None:
        return "", 0
    code, own = first.process.returncode, members[0].process.returncode
    asked = {exit_code(number) for number in SIGNALS}
    if code in asked or (own not in (0, LOST) and first.rank == 0 and code > 0):
        return "", code
    name = f"process {first.rank} of {len(members)}"
    if code < 0:
        hint = ": memory may have run out" if code == -signal.SIGKILL else ""
        return f"{name} was ended by {signal.Signals(-code).name}{hint}", 2
    if own not in (0, LOST) and own > 0:
        return "", own  # rank 0 had the same error and has printed it
    return _last_words(first) or f"{name} ended with code {code}", code


def _last_words(member: _Member) -> str:
    """Return the kit's message that a process ended with, or its last lines."""
    if member.log is None:
        return ""
    member.log.seek(0)
    text = member.log.read().decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("rloo-kit: ")]
    if own:
        return f"in process {member.rank}: {own[-1].removeprefix('rloo-kit: ')}"
    return "\n".join([f"process {member.rank} failed:", *lines[-LAST_LINES:]]) if lines else ""
