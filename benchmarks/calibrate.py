"""What calibrate is for: the embedded model trained at each of three levels, and at the one chosen.

    python benchmarks/calibrate.py     # two minutes of one core

Level 1 is sums of two three-digit numbers without a carry, level 2 any such sums, level 3 sums of
three numbers. Each level trains the same steps from the same seed on 256 prompts of its own; the
held-out score, sampled at temperature 1, is that of 128 others of the same level. "Calibrated" is
the run file that rloo-kit calibrate wrote from all levels.
"""

import argparse
import json
import os
import random
import tempfile
from pathlib import Path

import yaml

import rloo_kit as rk
from rloo_kit.config.run_file import EXAMPLES

RESULTS = Path(__file__).resolve().parent / "results" / "calibrate_cpu.json"
LEVELS = (1, 2, 3)
TRAIN = 256
HELD_OUT = 128
STEPS = 16


def without_carry(rng: random.Random) -> list[int]:
    """Two numbers of three digits, no column of which sums to ten."""
    pairs = [(x, rng.randint(1, 9 - x)) for x in (rng.randint(1, 8) for _ in range(3))]
    return [int("".join(str(pair[one]) for pair in pairs)) for one in (0, 1)]


def make_rows(level: int, num: int) -> list[dict]:
    """Return different problems of one level."""
    rng = random.Random(level)
    found = {}
    while len(found) < num:
        terms = (
            without_carry(rng) if level == 1 else rng.choices(range(100, 1000), k=level // 3 + 2)
        )
        text = f"What is {' + '.join(map(str, terms))}?"
        found[text] = {"prompt": text, "answer": str(sum(terms)), "level": level}
    return list(found.values())


def write_run(name: str, levels: tuple[int, ...]) -> str:
    """Write prompts of these levels, the held-out ones last, and a run file; return its name."""
    rows = {level: make_rows(level, TRAIN + HELD_OUT) for level in levels}
    order = [
        row for part in (slice(TRAIN), slice(TRAIN, None)) for r in rows.values() for row in r[part]
    ]
    Path(f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in order))
    run = yaml.safe_load((EXAMPLES / "quickstart.yaml").read_text())
    run["data"] = {"prompts": f"{name}.jsonl", "held_out": HELD_OUT * len(levels)}
    run["trainer"] |= {"max_steps": STEPS}
    run["output_dir"] = f"runs/{name}"
    Path(f"{name}.yaml").write_text(yaml.safe_dump(run))
    return f"{name}.yaml"


def train(file: str) -> dict[str, float]:
    """Return the held-out accuracy before and after, and the last steps' share with signal."""
    result = rk.train(file, ["output_dir=runs/trained"], say=lambda line: None)
    lines = (result.folder / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "reward" in row]
    without = [row["signal/groups_without"] for row in rows]
    parts = {"before": result.before, "after": result.after}
    return {
        **{name: one.rewards["accuracy"] for name, one in parts.items()},
        "groups_with_signal": 1 - sum(without) / len(without),
        "prompts": sum(1 for _ in open(rk.read_run_file(file).data.prompts)) - HELD_OUT,
    }


def main() -> None:
    """Calibrate on all levels, train each and the calibrated run file, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-prompts", type=int, default=64)
    args = parser.parse_args()
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        every = write_run("all", LEVELS)
        file = rk.calibrate(every, num_prompts=args.num_prompts, say=said.append)
        comment = [line[2:].split() for line in file.read_text().splitlines()[2:] if line[0] == "#"]
        table = [
            dict(zip(("level", "prompts", "solved", "signal"), row, strict=True)) for row in comment
        ]
        runs = {f"level {level}": train(write_run(f"level{level}", (level,))) for level in LEVELS}
        runs["calibrated"] = train(str(file))
    found = {"steps": STEPS, "held_out": HELD_OUT, "calibration": table, "runs": runs}
    RESULTS.write_text(f"{json.dumps(found, indent=1)}\n")
    print("\n".join(said), *(f"{name}: {run}" for name, run in runs.items()), sep="\n")


if __name__ == "__main__":
    main()
