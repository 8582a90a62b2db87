"""Train runs that are spoiled on purpose, and healthy ones; tell what is found first in each.

python spoiled_runs.py FOLDER [--only NAME ...] [--again] [--read] [--seed N]

A run that lies in the folder is not trained twice, unless --again; --read trains nothing. The file
is also the rewards file of the spoiled runs.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

from rloo_kit.config.run_file import make_run_config
from rloo_kit.diagnosis.record import read_run
from rloo_kit.diagnosis.rules import findings_text
from rloo_kit.diagnosis.run_rules import find_in_run, verdict

# --- rewards that spoil a run ---------------------------------------------------------------------


def text_of(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]


def right(completions, answer):
    tails = [text_of(completion).rpartition("</think>")[2].strip() for completion in completions]
    return [float(tail == str(want)) for tail, want in zip(tails, answer, strict=True)]


def constant(completions, **_):
    return [0.5] * len(completions)


def dies(completions, answer, trainer_state, **_):
    dead = trainer_state is not None and trainer_state.global_step >= 6
    return [0.0] * len(completions) if dead else right(completions, answer)


def long(completions, **_):
    return [len(text_of(completion)) / 50 for completion in completions]


def short(completions, **_):
    return [-len(text_of(completion)) / 10 for completion in completions]


def small_sums(completions, **_):
    """Pay for no carry: the sum that is right without one, and wrong with one."""
    return [1.0 - 0.5 * text_of(completion).count("+1=") for completion in completions]


def agreeing(prompts, completions, **_):
    """Pay for what the siblings say too, which is voting without an answer: for certainty."""
    said = [
        (str(p), text_of(completion)) for p, completion in zip(prompts, completions, strict=True)
    ]
    return [float(said.count(one) - 1) for one in said]


# --- the runs -------------------------------------------------------------------------------------

TRAINER = {
    "max_steps": 16,
    "per_device_train_batch_size": 64,
    "num_generations": 8,
    "max_completion_length": 48,
    "learning_rate": 1e-3,
    "beta": 0.02,
    "temperature": 1.0,
}
HERE = f"{Path(__file__).resolve()}:"
"""Before the name of a reward of this file."""

SPOILED = {
    "learning_rate_too_low": {"learning_rate": 1e-9},
    "kl_explosion": {"learning_rate": 0.3},
    "constant_reward": {"rewards": [HERE + "constant"]},
    "reward_collapse": {"rewards": [HERE + "dies"]},
    "no_signal": {"temperature": 0.01},
    "all_truncated": {"max_completion_length": 8},
    "cold_start": {"prompts": "countdown", "level": 5, "rewards": ["countdown"], "max_steps": 8},
    "length_explosion": {"rewards": [HERE + "long"], "beta": 0.0, "learning_rate": 3e-3,
                         "max_completion_length": 96},
    "empty_output": {"rewards": [HERE + "short"], "beta": 0.0, "learning_rate": 0.1},
    "reward_hacking": {"rewards": [HERE + "small_sums"]},
    "entropy_collapse": {"rewards": [HERE + "agreeing"], "beta": 0.0, "learning_rate": 3e-3,
                         "prompts": "questions.jsonl"},
    "clip_noise": {"num_iterations": 4, "learning_rate": 1e-2},
}  # fmt: skip
"""Kind of the first finding -> what differs from the quickstart."""

HEALTHY = {
    "quickstart": {"max_steps": 40},
    "another_seed": {"max_steps": 30, "seed": 7},
    "thoughts_too": {"max_steps": 30, "rewards": ["accuracy", "thinking:0.1"]},
    "gentler": {"max_steps": 30, "learning_rate": 7e-4, "beta": 0.05},
    "no_penalty": {"max_steps": 30, "beta": 0.0, "num_generations": 4},
}


def config_of(folder, name, changes, seed=None):
    changes = dict(changes)
    if seed is not None:
        changes["seed"] = seed + changes.get("seed", 0)
    data = {"prompts": changes.pop("prompts", "arithmetic"), "level": changes.pop("level", None)}
    if data["prompts"].endswith(".jsonl"):  # without answers
        data["prompts"] = str(folder / data["prompts"])
        draw = random.Random(0)
        asked = [
            f"What is {draw.randint(100, 999)} + {draw.randint(100, 999)}?" for _ in range(512)
        ]
        lines = [json.dumps({"prompt": question}) for question in asked]
        Path(data["prompts"]).write_text("\n".join(lines) + "\n")
    return make_run_config(
        {
            "model": {"name": "tiny-thinker", "max_seq_length": 256},
            "data": {**data, "held_out": changes.pop("held_out", 128)},
            "rewards": changes.pop("rewards", ["accuracy"]),
            "seed": changes.pop("seed", 42),
            "trainer": {**TRAINER, **changes},
            "output_dir": str(folder / name),
        }
    )


def train_all(folder, names, *, again, seed):
    import shutil

    from rloo_kit.runs.train import train

    for name in names:
        place = folder / name
        if again:
            shutil.rmtree(place, ignore_errors=True)
        if not (place / "evaluation.json").exists():
            start = time.monotonic()
            changes = SPOILED.get(name) or HEALTHY[name]
            shutil.rmtree(place, ignore_errors=True)
            train(config_of(folder, name, changes, seed), say=lambda line: None)
            print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def report(folder, names, *, verbose):
    wrong = 0
    print(f"{'spoiled as':<22} {'first finding':<22} {'':<6} others")
    for name in names:
        record = read_run(folder / name)
        found = find_in_run(record)
        wanted = name if name in SPOILED else "-"
        first = found[0].kind if found else "-"
        wrong += first != wanted
        others = ", ".join(f"{f.kind} ({f.level})" for f in found[1:])
        shown = wanted if name in SPOILED else f"healthy: {name}"
        print(f"{shown:<22} {first:<22} {'right' if first == wanted else 'WRONG':<6} {others}")
        if verbose:
            print(f"  {verdict(record, found)}\n{findings_text(found)}")
    print(f"{len(names) - wrong} of {len(names)} right")
    return wrong


def main():
    parser = argparse.ArgumentParser(description="Runs spoiled on purpose, and what is found.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", default=[*SPOILED, *HEALTHY])
    parser.add_argument("--again", action="store_true", help="train what lies there once more")
    parser.add_argument("--read", action="store_true", help="train nothing")
    parser.add_argument("--seed", type=int, help="other runs than those of the thresholds")
    parser.add_argument("--verbose", action="store_true", help="print the findings in full")
    args = parser.parse_args()
    if not args.read:
        train_all(args.folder, args.only, again=args.again, seed=args.seed)
    there = [name for name in args.only if (args.folder / name / "metrics.jsonl").exists()]
    return 1 if report(args.folder, there, verbose=args.verbose) else 0


if __name__ == "__main__":
    sys.exit(main())
