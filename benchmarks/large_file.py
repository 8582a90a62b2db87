"""Wall time and peak memory of a one-step run with a million prompts, against a thousand.

    python benchmarks/large_file.py      # about two minutes

Each run is a process of its own, in the order A B A B; the first pair warms up. The file is
.jsonl, with a prompt and an answer in each row. Peak memory is the process's largest resident set.
"""

import functools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shared import in_turn, write_lines, write_result

SIZES = (1_000, 1_000_000)
PAIRS = 2


def write_rows(path: Path, size: int) -> Path:
    rng = random.Random(0)
    sums = ((rng.randint(100, 999), rng.randint(100, 999)) for _ in range(size))
    return write_lines(
        path, ({"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in sums)
    )


def run(file: Path, folder: Path) -> tuple[float, int]:
    """Return seconds and peak bytes of a training of one step."""
    command = [
        sys.executable, "-m", "rloo_kit", "train", "quickstart", "--set", f"data.prompts={file}",
        "--set", "data.held_out=0", "--set", "trainer.max_steps=1",
        "--set", f"output_dir={folder / 'run'}",
    ]  # fmt: skip
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"the run on {file.name} failed with {process.returncode}")
    return time.monotonic() - start, usage.ru_maxrss * 1024


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        files = {size: write_rows(folder / f"{size}.jsonl", size) for size in SIZES}
        arms = {str(n): functools.partial(run, file, folder) for n, file in files.items()}
        found = in_turn(arms, PAIRS)
    few, many = ([statistics.median(c) for c in zip(*one, strict=True)] for one in found.values())
    write_result(
        "large_file",
        rows=list(SIZES),
        seconds=[few[0], many[0]],
        peak_mib=[few[1] / 2**20, many[1] / 2**20],
    )
    print(
        f"{SIZES[1]:,} rows against {SIZES[0]:,}: {many[0] - few[0]:+.1f} s, "
        f"{(many[1] - few[1]) / 2**20:+.0f} MiB"
    )


if __name__ == "__main__":
    main()
