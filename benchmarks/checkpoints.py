"""What checkpoints cost: seconds of the quickstart's training, and the memory of resuming.

    .venv/bin/python benchmarks/checkpoints.py            # share of the time, every 10 steps
    .venv/bin/python benchmarks/checkpoints.py --memory   # peak of a fresh and of a resumed run

Time is taken around the two places where a training pays for checkpoints: what is copied into
memory after every step, and what is written. So the share does not drown in the noise of whole
runs. Memory is the peak of a process each, fresh and resumed in turn.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rloo_kit.machine.environment import setup

RESULTS = Path(__file__).parent / "results"
EVERY = 10


def share(runs: int) -> dict:
    setup()
    from rloo_kit.checkpoints.resume import ExactResume
    from rloo_kit.config.run_file import read_run_file
    from rloo_kit.runs.train import train

    spent = {"copied": [], "written": []}

    def timed(name, kind):
        method = getattr(ExactResume, name)

        def call(*args, **kwargs):
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                spent[kind].append(time.perf_counter() - began)

        setattr(ExactResume, name, call)

    timed("take_snapshot", "copied")
    timed("_write", "written")
    found = []
    with tempfile.TemporaryDirectory() as place:
        for number in range(runs):
            for times in spent.values():
                times.clear()
            overrides = [f"output_dir={place}/{number}", "data.held_out=0"]
            overrides.append(f"trainer.save_steps={EVERY}")
            result = train(read_run_file("quickstart", overrides), say=lambda line: None)
            step = result.seconds / result.steps
            found.append(
                {
                    "seconds_a_step": step,
                    "copied_a_step": sum(spent["copied"]) / result.steps,
                    "written_each": statistics.mean(spent["written"]),
                    "share": (sum(spent["copied"]) + sum(spent["written"])) / result.seconds,
                }
            )
            print(json.dumps(found[-1]), flush=True)
    return {"every": EVERY, "runs": found, "share": statistics.median(r["share"] for r in found)}


def peak(folder: str, resume: bool) -> None:
    """In a process of its own: train, and print the peak of its memory in MiB."""
    setup()
    from rloo_kit.runs.train import train

    overrides = [f"output_dir={folder}", "data.held_out=0", "trainer.max_steps=20"]
    train("quickstart", overrides, say=lambda line: None, resume=resume)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def memory(pairs: int) -> dict:
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for number in range(pairs):
            row = {}
            for name in ("fresh", "resumed"):
                folder = Path(place) / str(number)
                if name == "resumed":  # as a run that was killed after its tenth step
                    for left in ("checkpoint-20", "end.json", "adapter"):
                        subprocess.run(["rm", "-r", str(folder / left)], check=True)
                command = [sys.executable, __file__, "--peak", str(folder), name]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                row[name] = float(done.stdout.split()[-1])
            rows.append(row)
            print(json.dumps(row), flush=True)
    return {
        "runs": rows,
        "fresh": statistics.median(r["fresh"] for r in rows),
        "resumed": statistics.median(r["resumed"] for r in rows),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--peak", nargs=2, metavar=("FOLDER", "HOW"))
    parser.add_argument("--output", type=Path, help="a .json file")
    asked = parser.parse_args()
    if asked.peak:
        peak(asked.peak[0], asked.peak[1] == "resumed")
        raise SystemExit
    result = memory(asked.runs) if asked.memory else share(asked.runs)
    print(json.dumps(result, indent=2))
    if asked.output:
        asked.output.write_text(json.dumps(result, indent=2) + "\n")
