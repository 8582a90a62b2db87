"""What prompt_selection saves: held-out score against completions sampled, on the embedded model.

    python benchmarks/prompt_selection.py               # twenty minutes of one core
    python benchmarks/prompt_selection.py --minutes 4   # part of it; the next call continues

32 prompts, eight epochs. Half of the prompts are sums of two numbers, which the model learns; the
others are sums of three, which it never solves. Every arm trains the same steps from the same
seeds. The held-out score is that of sums of two numbers, sampled, every two epochs. Completions
until a score are interpolated between two evaluations; a run that never reaches it counts with all
that it has sampled. Intervals are Student's t over the seeds, of differences within a seed.
"""

import argparse
import itertools
import json
import math
import statistics
import tempfile
import time
from pathlib import Path

import intervals

import rloo_kit as rk

rk.setup()

from transformers import TrainerCallback

from rloo_kit.evaluation.evaluator import evaluate
from rloo_kit.scoring.loading import load_rewards

RESULTS = Path(__file__).parent / "results" / "prompt_selection.json"
SEEDS = range(5)
PROMPTS, GROUPS, GENERATIONS, EPOCHS = 32, 8, 4, 8
HELD_OUT, TOKENS, THRESHOLDS = 128, 48, (0.7, 0.8)
HISTORY = {"prompt_selection": "history"}
RETIRE = HISTORY | {"prompt_retire_at": 0.9}
ARMS = {
    "off": {},
    "history": HISTORY,
    "history, retire at 0.9": RETIRE,
    "dynamic sampling": {"dynamic_sampling": True},
    "dynamic sampling, history": {"dynamic_sampling": True} | HISTORY,
}


class Curve(TrainerCallback):
    """Scores held-out prompts before the first step and every two epochs."""

    def __init__(self, counter, score):
        self.counter, self.score, self.points = counter, score, []

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 0:
            self.add()

    def on_step_end(self, args, state, control, **_):
        if state.global_step % (2 * PROMPTS // GROUPS) == 0:
            self.add()

    def add(self):
        self.points.append((self.counter[0], self.score()))


def run(arm, seed):
    """Train once; return held-out scores by completions sampled, and what was skipped."""
    model, tokenizer = rk.load_model("tiny-thinker", max_seq_length=256)
    model = rk.attach_lora(model, r=16, seed=seed)
    counter, rewards = [0], load_rewards(["accuracy"], tokenizer=tokenizer)
    held_out = rk.load_prompts("arithmetic", split="held_out", num_prompts=HELD_OUT)

    def accuracy(completions, **columns):
        counter[0] += len(completions)
        return rewards[0].func(completions=completions, **columns)

    def score():
        found = evaluate(
            model, tokenizer, held_out, rewards, max_completion_length=TOKENS, batch_size=HELD_OUT
        )
        return found.rewards["accuracy"]

    curve = Curve(counter, score)
    with tempfile.TemporaryDirectory() as folder:
        trainer = rk.LeaveOneOutTrainer(
            model=model,
            reward_funcs=accuracy,
            args=rk.LeaveOneOutConfig(
                folder, num_train_epochs=EPOCHS, per_device_train_batch_size=GROUPS * GENERATIONS,
                num_generations=GENERATIONS, max_completion_length=TOKENS, learning_rate=1e-3,
                beta=0.0, seed=seed, save_strategy="no", doctor=False, **ARMS[arm],
            ),
            train_dataset=rk.load_prompts(
                "arithmetic", level=[1, 2], num_prompts=PROMPTS, seed=seed
            ),
            processing_class=tokenizer,
            callbacks=[curve],
        )  # fmt: skip
        trainer.train()
    logs = [row for row in trainer.state.log_history if "reward" in row]

    def of(metric):
        return [round(row[metric], 3) for row in logs if metric in row]

    trainer.release()
    return {
        "curve": curve.points,
        "without_signal": of("signal/groups_without"),
        "skipped": of("signal/prompts_skipped"),
        "retired": of("signal/prompts_retired"),
    }


def completions_until(points, threshold):
    """Return the completions at which a curve first reaches a score; all where it never does."""
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if y0 < threshold <= y1:
            return x0 + (x1 - x0) * (threshold - y0) / (y1 - y0)
    return points[-1][0]


def interval(values):
    """Return mean, and the ends of its 95% interval."""
    return [round(value, 3) for value in intervals.interval(values)]


def summary(runs):
    """Return for every arm its scores, and each seed's difference from the arm without history."""
    found = {}
    for arm in ARMS:
        base = "dynamic sampling" if arm.startswith("dynamic") else "off"
        seeds = [n for n in SEEDS if {f"{arm}/{n}", f"{base}/{n}"} <= runs.keys()]
        if len(seeds) < 2:
            continue
        of, without = ([runs[f"{one}/{seed}"] for seed in seeds] for one in (arm, base))
        curves, base_curves = ([one["curve"] for one in each] for each in (of, without))
        ends, base_ends = ([curve[-1][1] for curve in each] for each in (curves, base_curves))
        found[arm] = {
            "seeds": len(seeds),
            "held_out_at_the_end": interval(ends),
            "more_than_without": interval([e - o for e, o in zip(ends, base_ends, strict=True)]),
            "completions_in_all": interval([curve[-1][0] for curve in curves]),
            "groups_without_signal": interval(
                [statistics.fmean(one["without_signal"]) for one in of]
            ),
            "prompts_skipped": interval([statistics.fmean(one["skipped"] or [0.0]) for one in of]),
            "prompts_retired": interval([max(one["retired"], default=0) for one in of]),
        }
        for threshold in THRESHOLDS:
            until, base_until = (
                [completions_until(curve, threshold) for curve in each]
                for each in (curves, base_curves)
            )
            saved = [1 - mine / other for mine, other in zip(until, base_until, strict=True)]
            found[arm][f"until_{threshold}"] = {
                "completions": interval(until),
                "reached_by": sum(max(y for _, y in curve) >= threshold for curve in curves),
                "saved_share": interval(saved),
            }
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after that")
    args = parser.parse_args()
    runs = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else {}
    began = time.monotonic()
    dynamic = [arm for arm in ARMS if arm.startswith("dynamic")]
    parts = [arm for arm in ARMS if arm not in dynamic], dynamic
    for arm, seed in ((arm, seed) for part in parts for seed in SEEDS for arm in part):
        key = f"{arm}/{seed}"
        if key in runs or time.monotonic() - began > args.minutes * 60:
            continue
        started = time.process_time()
        runs[key] = run(arm, seed)
        print(f"{key}: {time.process_time() - started:.0f} s, {runs[key]['curve']}", flush=True)
        RESULTS.write_text(json.dumps({"summary": summary(runs), "runs": runs}) + "\n")
    print(json.dumps(summary(runs), indent=1))


if __name__ == "__main__":
    main()
