"""Benefit of calibrate: the embedded model, trained at three levels and at the calibrated one.

    python benchmarks/calibrate.py     # two minutes of one core

Level 1 has sums of two three-digit numbers without a carry, level 2 any sums of two such numbers,
and level 3 sums of three. Each level has its own 256 prompts, and trains for the same number of
steps with the same seed. The held-out score is the accuracy on 128 other prompts of the level,
sampled at temperature 1. "Calibrated" is the run file that rloo-kit calibrate has written from all
levels.
"""

import os
import random
import tempfile
from pathlib import Path

from shared import parser_of, read_lines, write_result, write_run

import rloo_kit as rk

LEVELS = (1, 2, 3)
TRAIN = 256
HELD_OUT = 128
STEPS = 16


def without_carry(rng: random.Random) -> list[int]:
    """Return two three-digit numbers whose digits add up to less than ten in every column."""
    pairs = [(x, rng.randint(1, 9 - x)) for x in (rng.randint(1, 8) for _ in range(3))]
    return [int("".join(str(pair[one]) for pair in pairs)) for one in (0, 1)]


def make_rows(level: int, num: int) -> list[dict]:
    """Return ``num`` different problems of a level."""
    rng = random.Random(level)
    found = {}
    while len(found) < num:
        terms = (
            without_carry(rng) if level == 1 else rng.choices(range(100, 1000), k=level // 3 + 2)
        )
        text = f"What is {' + '.join(map(str, terms))}?"
        found[text] = {"prompt": text, "answer": str(sum(terms)), "level": level}
    return list(found.values())


def write_levels(name: str, levels: tuple[int, ...]) -> str:
    """Write prompts of these levels and a run file that trains on them; return the file's name.

    The held-out prompts of all levels are the last ones.
    """
    rows = {level: make_rows(level, TRAIN + HELD_OUT) for level in levels}
    order = [
        row for part in (slice(TRAIN), slice(TRAIN, None)) for r in rows.values() for row in r[part]
    ]
    return write_run(name, f"{name}.jsonl", order, HELD_OUT * len(levels), max_steps=STEPS)


def train(file: str) -> dict[str, float]:
    """Train, and return a dict with the results.

    ``before`` and ``after`` are the held-out accuracy, ``groups_with_signal`` is the mean share of
    groups whose scores differ, and ``prompts`` is the number of prompts.
    """
    result = rk.train(file, ["output_dir=runs/trained"], say=lambda line: None)
    rows = [row for row in read_lines(result.folder / "metrics.jsonl") if "reward" in row]
    without = [row["signal/groups_without"] for row in rows]
    return {
        "before": result.before.rewards["accuracy"],
        "after": result.after.rewards["accuracy"],
        "groups_with_signal": 1 - sum(without) / len(without),
        "prompts": len(read_lines(Path(rk.read_run_file(file).data.prompts))) - HELD_OUT,
    }


def main() -> None:
    """Calibrate on all levels, train each and the calibrated run file, and write the result."""
    parser = parser_of(__doc__)
    parser.add_argument("--num-prompts", type=int, default=64)
    args = parser.parse_args()
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        every = write_levels("all", LEVELS)
        file = rk.calibrate(every, num_prompts=args.num_prompts, say=said.append)
        comment = [line[2:].split() for line in file.read_text().splitlines()[2:] if line[0] == "#"]
        table = [
            dict(zip(("level", "prompts", "solved", "signal"), row, strict=True)) for row in comment
        ]
        runs = {
            f"level {level}": train(write_levels(f"level{level}", (level,))) for level in LEVELS
        }
        runs["calibrated"] = train(str(file))
    found = {"steps": STEPS, "held_out": HELD_OUT, "calibration": table, "runs": runs}
    write_result("calibrate_cpu", **found)
    print("\n".join(said), *(f"{name}: {run}" for name, run in runs.items()), sep="\n")


if __name__ == "__main__":
    main()
