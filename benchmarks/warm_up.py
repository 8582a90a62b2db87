"""Benefit of a warm-up on examples before RLOO, for a known and for a new form of answers.

    python benchmarks/warm_up.py     # a quarter of an hour of one core

The embedded model adds three-digit numbers, as in the quickstart. In the task "known", an answer
has the form that the model writes, such as 633. In the task "new", it has the form =633, which the
model never writes. The examples are worked sums without a forgotten carry, in the form of the task.
The arms of every seed are the warm-up alone, RLOO after the warm-up, and RLOO alone for the same
total time, converted to steps of RLOO. The held-out score is the accuracy on 128 sums, sampled at
temperature 1.
"""

import json
import os
import random
import statistics
import tempfile
from typing import Any

from shared import parser_of, write_lines, write_result, write_run

# isort: split

# of scripts/, which `shared` adds to the path
from worked_thought import worked_thought

import rloo_kit as rk

FORMS = {"known": "", "new": "="}  # task -> text before the answer
EXAMPLES_GIVEN = 64
TRAIN = 256
HELD_OUT = 128
STEPS = 20
WARM_UP = {"epochs": 4, "learning_rate": 3e-3}


def write_files(task: str) -> None:
    """Write the examples of a task, other prompts whose last ones are held out, and a run file."""
    rng = random.Random(1)
    rows = {}
    while len(rows) < EXAMPLES_GIVEN + TRAIN + HELD_OUT:
        a, b = rng.choices(range(100, 1000), k=2)
        thought, total = worked_thought(a, b)
        answer = f"{FORMS[task]}{total}"
        completion = f"{thought}\n</think>\n\n{answer}"
        rows[a, b] = {"prompt": f"What is {a} + {b}?", "answer": answer, "completion": completion}
    found = [*rows.values()]
    write_lines(f"{task}-examples.jsonl", found[:EXAMPLES_GIVEN])
    write_run(task, f"{task}-prompts.jsonl", found[EXAMPLES_GIVEN:], HELD_OUT)


def train(task: str, seed: int, steps: int, *more: str) -> Any:
    """Train with RLOO, and return the result."""
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
    parser = parser_of(__doc__)
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
    write_result("warm_up_cpu", **found)
    for task, runs in found["tasks"].items():
        for arm in next(iter(runs.values())):
            scores = [run[arm]["score"] for run in runs.values()]
            print(f"{task}: {arm} {statistics.fmean(scores):.2f} {scores}")


if __name__ == "__main__":
    main()
