"""What a warm-up is for: examples before RLOO, in a form that the model knows and in a new one.

    python benchmarks/warm_up.py     # a quarter of an hour of one core

The embedded model adds three-digit numbers, as in the quickstart. In the task "known" the answer
is written as it writes it, 633; in the task "new" as =633, which it never does. The examples are
worked sums without a forgotten carry, in the form of the task. Arms of every seed: the warm-up;
RLOO after it; RLOO alone for as long as both, counted in steps of RLOO. The held-out score is the
accuracy on 128 sums, sampled at temperature 1.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

import rloo_kit as rk
from rloo_kit.config.run_file import EXAMPLES

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from worked_thought import worked_thought

RESULTS = Path(__file__).resolve().parent / "results" / "warm_up_cpu.json"
FORMS = {"known": "", "new": "="}  # task -> what stands before the answer
EXAMPLES_GIVEN = 64
TRAIN = 256
HELD_OUT = 128
STEPS = 20
WARM_UP = {"epochs": 4, "learning_rate": 3e-3}


def write_files(task: str) -> None:
    """Write examples, other prompts of which the last are held out, and a run file."""
    rng = random.Random(1)
    rows = {}
    while len(rows) < EXAMPLES_GIVEN + TRAIN + HELD_OUT:
        a, b = rng.choices(range(100, 1000), k=2)
        thought, total = worked_thought(a, b)
        answer = f"{FORMS[task]}{total}"
        completion = f"{thought}\n</think>\n\n{answer}"
        rows[a, b] = {"prompt": f"What is {a} + {b}?", "answer": answer, "completion": completion}
    parts = {"examples": slice(EXAMPLES_GIVEN), "prompts": slice(EXAMPLES_GIVEN, None)}
    for name, part in parts.items():
        own = [*rows.values()][part]
        Path(f"{task}-{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in own))
    run = yaml.safe_load((EXAMPLES / "quickstart.yaml").read_text())
    run["data"] = {"prompts": f"{task}-prompts.jsonl", "held_out": HELD_OUT}
    run["output_dir"] = f"runs/{task}"
    Path(f"{task}.yaml").write_text(yaml.safe_dump(run))


def train(task: str, seed: int, steps: int, *more: str) -> Any:
    """Train by RLOO; return the result."""
    settings = (f"seed={seed}", f"trainer.max_steps={steps}", *more)
    return rk.train(f"{task}.yaml", settings, say=lambda line: None)


def compare(task: str, seed: int) -> dict:
    """Return held-out scores, steps and seconds of the arms of one seed."""
    folder = rk.warm_up(
        f"{task}.yaml", f"{task}-examples.jsonl", overrides=[f"seed={seed}"], **WARM_UP
    )
    warm_up = json.loads((folder / "warm_up.json").read_text())["seconds"]
    both = train(task, seed, STEPS, f"model.name={folder}")
    steps = round(STEPS * (1 + warm_up / both.seconds))
    alone = train(task, seed, steps)
    arms = {
        "base": (alone.before, 0, 0.0),
        "warm-up": (both.before, 0, warm_up),
        "warm-up, RLOO": (both.after, STEPS, warm_up + both.seconds),
        "RLOO alone": (alone.after, steps, alone.seconds),
    }
    return {
        name: {"score": one.rewards["accuracy"], "steps": steps, "seconds": round(seconds, 1)}
        for name, (one, steps, seconds) in arms.items()
    }


def main() -> None:
    """Compare the arms of every task and seed, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    args = parser.parse_args()
    found: dict = {"examples": EXAMPLES_GIVEN, "held_out": HELD_OUT, **WARM_UP, "tasks": {}}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for task in FORMS:
            write_files(task)
            runs = found["tasks"][task] = {}
            for seed in args.seeds:
                runs[seed] = compare(task, seed)
                print(task, seed, runs[seed], flush=True)
    RESULTS.write_text(f"{json.dumps(found, indent=1)}\n")
    for task, runs in found["tasks"].items():
        for arm in next(iter(runs.values())):
            scores = [run[arm]["score"] for run in runs.values()]
            print(f"{task}: {arm} {statistics.fmean(scores):.2f} {scores}")


if __name__ == "__main__":
    main()
