"""Variance of the gradient and steps to a score: the shrinkage baseline, and drawing of rows.

    python benchmarks/baselines.py --variance --train
    python benchmarks/baselines.py --train --minutes 4    # what fits; the next call continues

Variance: 32 completions of each of 32 prompts are recorded, with the squared norm of the adapter's
gradient of each one's log-probability. Batches of P prompts and G completions are drawn from them;
each gives a baseline for every prompt, and the mean of A^2 |grad log pi|^2 is taken over the other
completions of the prompt. That is the variance of a completion's part of the gradient, but for the
squared mean gradient, which is nearly the same for both. The error is that of the draws, not of the
one recorded batch. In the model as it comes, and after ten steps of training. Training: the
quickstart's settings with beta 0 and 32 completions a step, five seeds; the score is that of the
completions sampled, on prompts not seen before, over the last six steps. Both go into
results/baselines_cpu.json and docs/explanation/trainer.md.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import rloo_kit as rk

rk.setup()

import torch
from transformers import TrainerCallback

from rloo_kit.rloo.advantages import (
    inclusion_probabilities,
    leave_one_out_advantages,
    shrinkage_advantages,
)
from rloo_kit.rloo.rollout import Rollout

RESULT = Path(__file__).parent / "results" / "baselines_cpu.json"
PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "trainer.md"
SEEDS, STEPS, WINDOW = range(1, 6), 30, 6
STAGES = (0, 10)
POOL_PROMPTS, POOL_SIZE = 32, 32
DRAWS, BLOCKS = 2000, 10
ARMS = {"leave_one_out": leave_one_out_advantages, "shrinkage": shrinkage_advantages}


def make_trainer(policy: Any, folder: str, seed: int, **settings: Any) -> rk.LeaveOneOutTrainer:
    """The quickstart's training of the embedded model, with other numbers."""
    few = {"max_completion_length": 48, "learning_rate": 1e-3, "beta": 0.0, "doctor": False}
    return rk.LeaveOneOutTrainer(
        model=policy[0],
        reward_funcs="accuracy",
        args=rk.LeaveOneOutConfig(
            folder, seed=seed, save_strategy="no", disable_tqdm=True, **{**few, **settings}
        ),
        train_dataset=rk.load_prompts("arithmetic", num_prompts=1024, seed=seed),
        processing_class=policy[1],
    )


def make_policy(seed: int) -> Any:
    torch.manual_seed(seed)
    model, tokenizer = rk.load_model("tiny-thinker", max_seq_length=256, load_in_4bit=False)
    return rk.attach_lora(model, r=16, lora_alpha=16), tokenizer


# --- variance ------------------------------------------------------------------------------------


class Recorder(TrainerCallback):
    """Keeps the scores of a batch, and the squared norm of each completion's gradient."""

    def __init__(self) -> None:
        self.trainer: rk.LeaveOneOutTrainer | None = None
        self.scores = self.norms = self.lengths = torch.zeros(0)  # (prompts, completions)

    def on_completions(self, *_: Any, rollout: Rollout, **__: Any) -> None:
        assert self.trainer is not None
        parameters = self.trainer.learner.parameters
        norms = []
        for row in range(len(rollout)):
            batch = rollout.sampled.tokens.pad([row], 0)
            log_prob = self.trainer.policy.forward(batch).log_probs.sum()
            gradients = torch.autograd.grad(log_prob, parameters)
            norms.append(sum(float(gradient.square().sum()) for gradient in gradients))
        self.norms = torch.tensor(norms).view(-1, POOL_SIZE)
        self.scores = rollout.sampled.scores.view(-1, POOL_SIZE)
        self.lengths = rollout.completion_mask.sum(1).view(-1, POOL_SIZE)


def record(policy: Any, folder: str) -> Recorder:
    recorder = Recorder()
    rows = POOL_PROMPTS * POOL_SIZE
    recorder.trainer = make_trainer(
        policy, folder, 0, max_steps=1, learning_rate=1e-12, num_generations=POOL_SIZE,
        per_device_train_batch_size=rows,
    )  # fmt: skip
    recorder.trainer.add_callback(recorder)
    recorder.trainer.train()
    return recorder


def compare(recorded: Recorder, num_prompts: int, num_generations: int) -> dict[str, float]:
    """Return the variance of the gradient under shrinkage over that under leave-one-out."""
    generator = torch.Generator().manual_seed(num_prompts * 100 + num_generations)
    found: dict[str, list[torch.Tensor]] = {name: [] for name in ARMS}
    for _ in range(DRAWS):
        prompts = torch.randperm(POOL_PROMPTS, generator=generator)[:num_prompts]
        rows = torch.rand(num_prompts, POOL_SIZE, generator=generator).argsort(1)
        rows = rows[:, :num_generations]  # (P, G)
        pool, norms = recorded.scores[prompts], recorded.norms[prompts]  # (P, POOL_SIZE)
        scores = pool.gather(1, rows)
        others = torch.ones_like(pool).scatter(1, rows[:, 1:], 0.0)  # all but the siblings
        for name, advantages in ARMS.items():
            baselines = (scores - advantages(scores))[:, :1]  # (P, 1): of the first completion
            parts = (pool - baselines).square() * norms * others
            found[name].append((parts.sum(1) / others.sum(1)).mean())

    def blocks(name: str) -> torch.Tensor:
        return torch.stack(found[name]).view(BLOCKS, -1).mean(1)

    ratios = blocks("shrinkage") / blocks("leave_one_out")
    error = float(ratios.std()) / BLOCKS**0.5
    return {"ratio": round(float(ratios.mean()), 3), "standard_error": round(error, 3)}


def compare_draws(recorded: Recorder, num_prompts: int, size: int, kept: int) -> dict[str, float]:
    """Return what drawing ``kept`` of ``size`` completions multiplies the variance by.

    A row of size a = A^2 |grad log pi|^2 counts a / p in place of a: by |A| times length
    (``drawn``), and where every row is as likely as another (``at_random``). ``passes`` is the
    share of rows with an advantage that get a training pass.
    """
    generator = torch.Generator().manual_seed(kept)
    sums = torch.zeros(5, dtype=torch.float64)
    for _ in range(DRAWS):
        prompts = torch.randperm(POOL_PROMPTS, generator=generator)[:num_prompts]
        rows = torch.rand(num_prompts, POOL_SIZE, generator=generator).argsort(1)[:, :size]
        scores, norms, lengths = (
            values[prompts].gather(1, rows)
            for values in (recorded.scores, recorded.norms, recorded.lengths)
        )
        advantages = leave_one_out_advantages(scores).flatten()
        parts = (advantages.square() * norms.flatten()).double()
        signal = advantages != 0
        wanted = kept * num_prompts
        chances = inclusion_probabilities(advantages.abs() * lengths.flatten(), wanted)
        even = inclusion_probabilities(signal.float(), wanted)
        drawn, at_random = (parts[signal] / p[signal] for p in (chances, even))
        one = [parts.sum(), drawn.sum(), at_random.sum(), chances.sum(), signal.sum()]
        sums += torch.stack([value.double() for value in one])
    return {
        "drawn": round(float(sums[1] / sums[0]), 3),
        "at_random": round(float(sums[2] / sums[0]), 3),
        "passes": round(float(sums[3] / sums[4]), 3),
    }


def measure_variance(stage: int) -> list[dict[str, Any]]:
    """Return the cells of a model that was trained for so many steps."""
    policy = make_policy(0)
    with tempfile.TemporaryDirectory() as folder:
        if stage:
            make_trainer(
                policy, folder, 1, max_steps=stage, num_generations=8,
                per_device_train_batch_size=64,
            ).train()  # fmt: skip
        recorded = record(policy, folder)
    score = round(float(recorded.scores.mean()), 3)
    spread = round(float(recorded.scores.mean(1).std()), 3)
    about = {"steps_before": stage, "score": score, "spread_of_prompts": spread}
    cells = []
    for num_prompts in (4, 8, 16):
        for size in (2, 4, 8):
            found = compare(recorded, num_prompts, size)
            cells.append({**about, "prompts": num_prompts, "generations": size, **found})
            print(cells[-1], flush=True)
    for kept in (1, 2, 4):
        cell = {**about, "prompts": 8, "generations": 8, "learn_from": kept}
        cells.append(cell | compare_draws(recorded, 8, 8, kept))
        print(cells[-1], flush=True)
    return cells


# --- training ------------------------------------------------------------------------------------


def train(size: int, baseline: str, seed: int) -> list[float]:
    """Return the mean score of every step."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            make_policy(seed), folder, seed, max_steps=STEPS, num_generations=size,
            per_device_train_batch_size=32, baseline=baseline,
        )  # fmt: skip
        trainer.train()
    history = trainer.state.log_history
    return [round(row["score/raw"], 4) for row in history if "score/raw" in row]


def steps_to(scores: list[float], wanted: float) -> int:
    """Return the step at which the mean of the last six reached a score; else one too many."""
    for step in range(WINDOW, len(scores) + 1):
        if statistics.fmean(scores[step - WINDOW : step]) >= wanted:
            return step
    return STEPS + 1


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, by G and baseline, the steps to two scores and the score of the last six steps."""
    rows = []
    for size in (2, 4):
        for baseline in ARMS:
            which = {"generations": size, "baseline": baseline}
            mine = [run for run in runs if which.items() <= run.items()]
            if not mine:
                continue
            row: dict[str, Any] = {**which, "seeds": len(mine)}
            for wanted in (0.7, 0.8, 0.9):
                row[f"steps_to_{wanted}"] = sorted(steps_to(run["scores"], wanted) for run in mine)
            last = [statistics.fmean(run["scores"][-WINDOW:]) for run in mine]
            row["last_score"] = round(statistics.fmean(last), 3)
            mean = statistics.fmean(statistics.fmean(run["scores"]) for run in mine)
            row["mean_score"] = round(mean, 3)
            rows.append(row)
    return rows


def write_page(results: dict[str, Any]) -> None:
    """Write the tables of the page: variances and trainings."""
    sizes = (2, 4, 8)
    lines = [
        "| prompts of a batch | steps trained | score | G = 2 | G = 4 | G = 8 |",
        "|---|---|---|---|---|---|",
    ]
    draws = [cell for cell in results["variance"] if "learn_from" in cell]
    cells = {
        (cell["prompts"], cell["steps_before"], cell["generations"]): cell
        for cell in results["variance"]
        if "ratio" in cell
    }
    for prompts, stage in sorted({key[:2] for key in cells}):
        row = [cells[prompts, stage, size] for size in sizes]
        ratios = " | ".join(f"{cell['ratio']:.2f}" for cell in row)
        lines.append(f"| {prompts} | {stage} | {row[0]['score']:.2f} | {ratios} |")
    if training := results.get("training"):
        lines += [
            "",
            "| G | baseline | seeds | steps to 0.7, median | to 0.8 | to 0.9 | mean score | last |",
            "|---|---|---|---|---|---|---|---|",
        ]
    for row in training or []:
        medians = [statistics.median(row[f"steps_to_{wanted}"]) for wanted in (0.7, 0.8, 0.9)]
        steps = " | ".join("none" if m > STEPS else f"{m:g}" for m in medians)
        name = row["baseline"]
        lines.append(
            f"| {row['generations']} | `{name}` | {row['seeds']} | {steps} | "
            f"{row['mean_score']} | {row['last_score']} |"
        )
    replace_part("baselines", lines)
    lines = [
        "| `learn_from` | steps trained | passes | variance | with equal chances |",
        "|---|---|---|---|---|",
    ]
    for cell in sorted(draws, key=lambda cell: (cell["learn_from"], cell["steps_before"])):
        about = f"| {cell['learn_from']} | {cell['steps_before']} | {cell['passes']:.0%} "
        lines.append(f"{about}| {cell['drawn']:.2f}x | {cell['at_random']:.2f}x |")
    replace_part("learn-from", lines)


def replace_part(name: str, lines: list[str]) -> None:
    begin, end = f"<!-- {name}: written by benchmarks/baselines.py -->", f"<!-- /{name} -->"
    text = PAGE.read_text()
    before, after = text.split(begin)[0], text.split(end)[1]
    PAGE.write_text(before + "\n".join([begin, *lines, end]) + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variance", action="store_true")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--minutes", type=float, default=60.0)
    asked = parser.parse_args()
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    started, cells = time.monotonic(), results.setdefault("variance", [])
    for stage in STAGES if asked.variance else ():
        known = any(cell["steps_before"] == stage for cell in cells)
        if not known and time.monotonic() - started < 60 * asked.minutes:
            cells += measure_variance(stage)
            RESULT.write_text(json.dumps(results, indent=1) + "\n")
    if asked.train:
        runs = results.setdefault("runs", [])
        for seed in SEEDS:
            for size in (2, 4):
                for baseline in ARMS:
                    which = {"seed": seed, "generations": size, "baseline": baseline}
                    known = any(which.items() <= run.items() for run in runs)
                    if known or time.monotonic() - started > 60 * asked.minutes:
                        continue
                    runs.append({**which, "scores": train(size, baseline, seed)})
                    RESULT.write_text(json.dumps(results, indent=1) + "\n")
                    print(which, runs[-1]["scores"], round(time.monotonic() - started), flush=True)
        results["training"] = summarise(runs)
    RESULT.write_text(json.dumps(results, indent=1) + "\n")
    write_page(results)


if __name__ == "__main__":
    main()
