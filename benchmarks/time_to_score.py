"""Wall time until a training reaches a score: rloo-kit, TRL's RLOO, TRL's GRPO, five seeds.

    python benchmarks/time_to_score.py                  # about 20 minutes on two CPU cores

The embedded model with the settings of the quickstart. The score is that of the sampled
completions, whose prompts the model has not seen before, as a mean over WINDOW steps. Seconds count
from the first step to the end of the last of these; trainers take turns, seed by seed. Results are
kept after every training, and a further call runs what is missing.
"""

import argparse
import json
import statistics
import time
from typing import Any

from compared import TRAINERS, make_trainer, prepare  # sets Unsloth up
from shared import RESULTS, write_result

# isort: split

import torch
from rloo_kit.rewards.accuracy import Accuracy
from transformers import TrainerCallback

import rloo_kit as rk

RESULT = RESULTS / "time_to_score_cpu.json"
SCORE = 0.9
WINDOW = 4
MOST_STEPS = 60


def accuracy(**columns: Any) -> list[float]:
    """The reward, as a function, which TRL needs."""
    return Accuracy()(**columns)


class UntilScore(TrainerCallback):
    """Stops a training at the score."""

    def __init__(self) -> None:
        self.scores: list[float] = []
        self.started = self.seconds = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.started = self.started or time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "reward" in logs and not self.seconds:
            self.scores.append(float(logs["reward"]))
            last = self.scores[-WINDOW:]
            if len(last) == WINDOW and statistics.mean(last) >= SCORE:
                self.seconds = time.perf_counter() - self.started
                control.should_training_stop = True


def train(arm: str, seed: int) -> dict[str, Any]:
    """Return steps and seconds of one training; None where it never got there."""
    torch.manual_seed(seed)
    model, tokenizer = rk.load_model("tiny-thinker", max_seq_length=256)
    model = rk.attach_lora(model, r=16, lora_alpha=16, seed=seed)
    until = UntilScore()
    trainer = make_trainer(
        arm, (model, tokenizer), accuracy,
        rk.load_prompts("arithmetic", num_prompts=8 * MOST_STEPS, seed=seed), [until],
        seed=seed, max_steps=MOST_STEPS, per_device_train_batch_size=64, num_generations=8,
        max_completion_length=48, learning_rate=1e-3, lr_scheduler_type="constant", beta=0.02,
        temperature=1.0, logging_steps=1,
    )  # fmt: skip
    trainer.train()
    return {
        "arm": arm,
        "seed": seed,
        "steps": len(until.scores),
        "seconds": round(until.seconds, 1) if until.seconds else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3, 4, 5])
    options = parser.parse_args()
    prepare()
    rows = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    done = {(row["arm"], row["seed"]) for row in rows}
    for seed in options.seeds:
        for arm in TRAINERS:
            if (arm, seed) in done:
                continue
            rows.append(train(arm, seed))
            print(rows[-1], flush=True)
            write_result(RESULT.stem, score=SCORE, rows=rows)


if __name__ == "__main__":
    main()
