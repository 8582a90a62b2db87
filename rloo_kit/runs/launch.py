"""Start several processes of one training on this machine, and report why it ended.

Each process is the ``rloo-kit`` command with the variables that torchrun sets. Rank 0 prints; the
output of the others is kept and shown if one of them fails first. torchrun itself would replace
the exit code of a run by 1 and its message by a traceback.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rloo_kit.checkpoints.stopping import SIGNALS, exit_code, handled
from rloo_kit.errors import ConfigError
from rloo_kit.processes import LOST

# For the others to save after one has failed; then they are killed
GRACE_SECONDS = 20.0
POLL_SECONDS = 0.1
# Shown of a process that failed
LAST_LINES = 20


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
    processes: list[subprocess.Popen] = []

    def forward(number: int, _: object) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    with tempfile.TemporaryDirectory(prefix="rloo-kit-processes-") as logs:
        try:
            with handled(forward, *SIGNALS):
                _start(arguments, num_processes, Path(logs), processes)
                first = _wait(processes)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if first is None:
            return 0
        log = Path(logs) / str(first)
        text = log.read_text(errors="replace") if log.exists() else ""
    text, code = outcome(first, [process.returncode for process in processes], text)
    if text:
        say(text)
    return code


def _start(
    arguments: Sequence[str], num_processes: int, logs: Path, processes: list[subprocess.Popen]
) -> None:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    settings = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_processes)),
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
    }
    for rank in range(num_processes):
        with contextlib.ExitStack() as opened:
            log = opened.enter_context((logs / str(rank)).open("wb")) if rank else None
            process = subprocess.Popen(
                [sys.executable, "-m", "rloo_kit", *arguments],
                env={**settings, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL if rank else None,
                stdout=log,
                stderr=log,
                # Ctrl-C reaches each once, through us
                start_new_session=True,
            )
        processes.append(process)


def _wait(processes: list[subprocess.Popen]) -> int | None:
    """Wait until all have ended or the grace time is over; return the first rank that failed."""
    first, deadline = None, float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        failed = [rank for rank, one in enumerate(processes) if one.poll() not in (None, 0)]
        if failed and first is None:
            first, deadline = failed[0], time.monotonic() + GRACE_SECONDS
    if first is None:
        first = next((rank for rank, one in enumerate(processes) if one.returncode), None)
    return first


def outcome(first: int, codes: Sequence[int], text: str) -> tuple[str, int]:
    """Return why a training failed ("" if rank 0 has printed it), and the exit code.

    Args:
        first: Rank of the process that failed first.
        codes: Exit codes by rank.
        text: What the failed process printed.
    """
    code, own = codes[first], codes[0]
    name = f"process {first} of {len(codes)}"
    if code in map(exit_code, SIGNALS):
        return "", code
    if code < 0:
        hint = ": memory may have run out" if code == -signal.SIGKILL else ""
        return f"{name} was ended by {signal.Signals(-code).name}{hint}", 2
    if own > 0 and own != LOST:
        # Rank 0 had the same error and has printed it
        return "", own
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join([f"{name} ended with code {code}:", *lines[-LAST_LINES:]]), code
