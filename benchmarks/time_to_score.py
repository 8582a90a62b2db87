"""Wall time until a training reaches a score: rloo-kit, TRL's RLOO, TRL's GRPO, five seeds.

    python benchmarks/time_to_score.py                  # about 20 minutes on two CPU cores
    python benchmarks/time_to_score.py --partial        # the kit with and without partial rollouts

The embedded model with the settings of the quickstart. The score is that of the sampled
completions, whose prompts the model has not seen before, as a mean over WINDOW steps. Seconds count
from the first step to the end of the last of these; trainers take turns, seed by seed. Results are
kept after every training, and a further call runs what is missing.

With ``--partial`` a training continues to ``PARTIAL_STEPS`` steps, and the score at its end is that
of 64 further prompts, each completed 8 times.
"""

import json
import statistics
import time
from typing import Any

from compared import RECOMPUTES, TRAINERS, make_trainer, prepare  # sets Unsloth up
from shared import RESULTS, parser_of, recomputed, write_result

# isort: split

import torch
from rloo_kit.rewards.accuracy import Accuracy
from transformers import TrainerCallback

import rloo_kit as rk

RESULT = RESULTS / "time_to_score_cpu.json"
SCORE = 0.9
WINDOW = 4
MOST_STEPS = 60
PARTIAL = RESULTS / "partial_rollouts_cpu.json"
PARTIAL_STEPS = 40
PARTIAL_ARMS = {"kit": {}, "kit, partial rollouts": {"partial_rollouts": True}}


def accuracy(**columns: Any) -> list[float]:
    """The reward, as a function, which TRL needs."""
    return Accuracy()(**columns)


class UntilScore(TrainerCallback):
    """Stops a training at the score."""

    def __init__(self, *, goes_on: bool = False) -> None:
        self.goes_on = goes_on
        self.steps = 0
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
                self.steps = len(self.scores)
                control.should_training_stop = not self.goes_on


def train(arm: str, seed: int, partial: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return steps and seconds of one training; None where it never got there."""
    steps = MOST_STEPS if partial is None else PARTIAL_STEPS
    torch.manual_seed(seed)
    model, tokenizer = rk.load_model("tiny-thinker", max_seq_length=256)
    model = rk.attach_lora(model, r=16, lora_alpha=16, seed=seed)
    until = UntilScore(goes_on=partial is not None)
    trainer = make_trainer(
        "kit" if partial is not None else arm, (model, tokenizer), accuracy,
        rk.load_prompts("arithmetic", num_prompts=8 * MOST_STEPS, seed=seed), [until],
        seed=seed, max_steps=steps, per_device_train_batch_size=64, num_generations=8,
        max_completion_length=48, learning_rate=1e-3, lr_scheduler_type="constant", beta=0.02,
        temperature=1.0, logging_steps=1, **(partial or {}),
    )  # fmt: skip
    trainer.train()
    row = {
        "arm": arm,
        "seed": seed,
        "gradient_checkpointing": RECOMPUTES,
        "steps": until.steps or len(until.scores),
        "seconds": round(until.seconds, 1) if until.seconds else None,
    }
    if partial is not None:
        logs = [log for log in trainer.state.log_history if "loss" in log]
        ages = [log.get("sampling/age_mean", 0) for log in logs]
        held_out = rk.load_prompts("arithmetic", num_prompts=64, seed=1000 + seed)
        row |= {
            "seconds_in_all": round(time.perf_counter() - until.started, 1),
            "age_mean": round(statistics.mean(ages), 2),
            "held_out": round(trainer.evaluate(held_out)["eval_reward"], 4),
        }
    return row


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--partial", action="store_true")
    options = parser.parse_args()
    prepare()
    result = PARTIAL if options.partial else RESULT
    rows = json.loads(result.read_text())["rows"] if result.exists() else []
    # --partial has the kit alone, which never recomputed on a CPU
    rows = [row for row in rows if options.partial or recomputed(row) == RECOMPUTES]
    done = {(row["arm"], row["seed"]) for row in rows}
    for seed in options.seeds:
        for arm in PARTIAL_ARMS if options.partial else TRAINERS:
            if (arm, seed) in done:
                continue
            rows.append(train(arm, seed, PARTIAL_ARMS[arm] if options.partial else None))
            print(rows[-1], flush=True)
            write_result(result.stem, score=SCORE, rows=rows)


if __name__ == "__main__":
    main()
