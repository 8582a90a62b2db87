"""Held-out score against steps and seconds: the kit's RLOO, TRL's RLOO and GRPO.

    python benchmarks/study.py                                  # every run: hours on two CPU cores
    python benchmarks/study.py --task arithmetic --minutes 4    # begins no run after that
    python benchmarks/study.py --quiet                          # nothing else runs: seconds count
    python benchmarks/study.py --gpu                            # Qwen on GSM8K, on a card
    python benchmarks/study.py --partial --quiet                # the kit with partial rollouts
    python benchmarks/study.py --report                         # the page and the picture

A finished run is one line of a file in benchmarks/results and is not run again, except by
``--quiet`` where its seconds do not count. All arms of a task have the same adapter, prompts,
reward and settings; prompts come from a pool that they see more than once. Held-out prompts are
scored every few steps, outside of the seconds, which count from the first step. KL is that of the
held-out completions, in nats a completion, from the model without its adapter. ``--gpu`` has the
prompts, group, rank, learning rate and length of verl's GRPO-LoRA runs (eric-haibin-lin/verl-data,
gsm8k/*lorarank32*.log).
"""

import gc
import math
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from typing import Any

from compared import RECOMPUTES, environment, make_trainer, prepare  # sets Unsloth up
from shared import RESULTS, append_line, parser_of, read_lines

# isort: split

import torch
from transformers import TrainerCallback

import rloo_kit as rk
from rloo_kit.config.run_file import find_run_file
from rloo_kit.data.lengths import prompt_ids
from rloo_kit.evaluation.evaluator import evaluate, settings_of
from rloo_kit.job import PreparedJob, read_prompts
from rloo_kit.machine.lm_head import PlainTorchLogProb
from rloo_kit.scoring.specs import load_rewards

# Arm -> trainer, settings that differ
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "kit RLOO": ("kit", {}),
    "TRL RLOO": ("trl-rloo", {}),
    "TRL GRPO": ("trl-grpo", {}),
    "TRL Dr. GRPO": ("trl-grpo", {"loss_type": "dr_grpo", "scale_rewards": "none"}),
}
PARTIAL_ARMS = {
    "kit RLOO": ARMS["kit RLOO"],
    "partial rollouts": ("kit", {"partial_rollouts": True}),
    "age 1 at most": ("kit", {"partial_rollouts": True, "max_rollout_age": 1}),
    "corrected": ("kit", {"partial_rollouts": True, "rollout_correction": "token"}),
}


@dataclass(frozen=True)
class Task:
    """A run file, and what the study changes in it."""

    title: str
    run_file: str
    overrides: tuple[str, ...]
    pool: int  # prompts to train on
    judge: Any  # of held-out prompts, as in `rewards:`
    every: int  # steps from one evaluation to the next
    seeds: int
    greedy: bool = False  # held-out prompts, else as in training


def gsm8k(model: str, published: str = "no figure") -> Task:
    """Return verl's settings: 64 prompts x 5, one epoch, greedy on the test split."""
    judge = {"name": "accuracy", "match": "number"}
    settings = (
        "max_steps=116", "per_device_train_batch_size=40", "gradient_accumulation_steps=8",
        "num_generations=5", "max_completion_length=1024", "learning_rate=3e-5", "beta=0.001",
        "bf16=true",
    )  # fmt: skip
    overrides = (
        f"model.name=Qwen/{model}", "model.max_seq_length=1536", "model.load_in_4bit=false",
        "lora.r=32", "lora.lora_alpha=32", "data.prompts=gsm8k", "data.held_out=1319",
        "rewards=[{name: accuracy, match: number}]",
        *(f"trainer.{setting}" for setting in settings),
    )  # fmt: skip
    title = f"{model}, GSM8K (verl's GRPO-LoRA: {published})"
    return Task(title, "quickstart", overrides, 7473, judge, 29, 1, True)


TASKS = {
    "arithmetic": Task(
        "embedded model, sums",
        "quickstart",
        ("trainer.max_steps=20", "trainer.per_device_train_batch_size=32",
         "trainer.num_generations=4", "data.held_out=128"),
        pool=64, judge="accuracy", every=5, seeds=5,
    ),
    "summaries": Task(
        "SmolLM2-135M, summaries", "smollm2", (), pool=24, judge="rouge", every=7, seeds=2
    ),
    "gym": Task(
        "SmolLM2-135M, words spelt backward (reasoning-gym)",
        "smollm2",
        ("data.prompts=reasoning_gym:spell_backward", "rewards=[reasoning_gym]",
         "data.settings={min_word_len: 3, max_word_len: 3}", "data.held_out_rewards=[]",
         "data.system=Answer with the word only.", "trainer.max_completion_length=16"),
        pool=32, judge="reasoning_gym", every=7, seeds=2,
    ),
}  # fmt: skip
GPU_TASKS = {
    "0.5b": gsm8k("Qwen2.5-0.5B-Instruct", "54.3%"),
    "1.5b": gsm8k("Qwen2.5-1.5B-Instruct", "77.9%"),
    "3b": gsm8k("Qwen2.5-3B-Instruct", "86.1%"),
    "4b": gsm8k("Qwen3-4B"),
}


class Curve(TrainerCallback):
    """Scores held-out prompts during a training, outside of its seconds."""

    def __init__(self, task: Task, args: Any, policy: tuple[Any, Any], held_out: Any) -> None:
        self.task = task
        self.args = args
        self.policy = policy
        self.held_out = held_out
        self.judge = load_rewards([task.judge], tokenizer=policy[1])[0].func
        self.trainer: Any = None
        self.began = self.scoring = 0.0
        self.points: list[tuple[int, float, float, float]] = []  # step, seconds, score, KL
        self.rewards: list[float] = []
        self.ages: list[float] = []  # mean of each step's tokens, in batches

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.began:
            self.add(0, 0.0)
            self.began = time.perf_counter()
            self.scoring = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds = time.perf_counter() - self.began - self.scoring
        if state.global_step % self.task.every == 0:
            self.add(state.global_step, seconds)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "reward" in logs:
            self.rewards.append(round(float(logs["reward"]), 4))
        if "sampling/age_mean" in logs:
            self.ages.append(round(float(logs["sampling/age_mean"]), 3))

    def add(self, step: int, seconds: float) -> None:
        """Score the held-out prompts."""
        started = time.perf_counter()
        drawn = []

        def judge(completion_ids: Any, **columns: Any) -> Any:
            drawn.extend(completion_ids)
            return self.judge(completion_ids=completion_ids, **columns)

        how = settings_of(self.args) | ({"temperature": 0.0} if self.task.greedy else {})
        engine = getattr(self.trainer, "engine", None)
        found = evaluate(*self.policy, self.held_out, load_rewards([judge]), **how, engine=engine)
        prompts = [prompt_ids(self.policy[1], row["prompt"], None) for row in self.held_out]
        kl = drift(self.policy[0], prompts, drawn, self.args.temperature) if step else 0.0
        score = found.rewards["judge"] or 0.0
        self.points.append((step, round(seconds, 2), round(score, 4), round(kl, 3)))
        self.scoring += time.perf_counter() - started


@torch.no_grad()
def drift(model: Any, prompts: list, completions: list, temperature: float) -> float:
    """Return the mean over completions of log pi - log pi_ref, logits over ``temperature``."""

    def log_prob(prompt: list[int], completion: list[int]) -> float:
        ids = torch.tensor([prompt + completion], device=model.device)
        hidden = model.get_decoder()(input_ids=ids).last_hidden_state[0, len(prompt) - 1 : -1]
        head = model.get_output_embeddings().weight
        how = (temperature, 256, None, 1.0, ("log_probs",))
        found = PlainTorchLogProb.apply(hidden, head, None, ids[0, len(prompt) :], *how)
        return float(found[0].sum())

    was_training = model.training
    model.eval()
    mine = [log_prob(*pair) for pair in zip(prompts, completions, strict=True)]
    with model.disable_adapter():
        theirs = [log_prob(*pair) for pair in zip(prompts, completions, strict=True)]
    model.train(was_training)
    return statistics.fmean(a - b for a, b in zip(mine, theirs, strict=True))


def run(task: Task, arm: str, seed: int) -> dict[str, Any]:
    """Train once; return the curve."""
    base = find_run_file(task.run_file).parent
    (kind, extra) = (ARMS | PARTIAL_ARMS)[arm]
    constant = "trainer.lr_scheduler_type=constant"
    config = rk.read_run_file(task.run_file, [*task.overrides, constant, f"seed={seed}"])
    job = PreparedJob(replace(config, output_dir=tempfile.gettempdir()), base)
    args = job.args
    torch.manual_seed(seed)
    policy = job.policy
    prompts, held_out = read_prompts(config, base)
    prompts = prompts.shuffle(seed=seed).select(range(min(task.pool, len(prompts))))
    rewards = load_rewards(config.rewards, tokenizer=policy[1])

    def score(**columns: Any) -> list[float]:  # one function, which TRL's trainers take too
        values = [[one.weight_at(0) * v for v in one.func(**columns)] for one in rewards]
        return [sum(of_row) for of_row in zip(*values, strict=True)]

    curve = Curve(task, args, policy, held_out)
    settings = {**config.trainer, **extra, "seed": seed, "logging_steps": 1}
    if kind != "kit":
        settings.pop("generation", None)
    curve.trainer = make_trainer(kind, policy, score, prompts, [curve], **settings)
    curve.trainer.train()
    if getattr(curve.trainer, "engine", None) is not None:
        curve.trainer.engine.close()
    found = {"curve": curve.points, "rewards": curve.rewards}
    return found | ({"ages": curve.ages} if curve.ages else {})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--task", nargs="*", default=[], help=", ".join([*TASKS, *GPU_TASKS]))
    parser.add_argument("--arm", nargs="*", choices=ARMS | PARTIAL_ARMS, default=[])
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after that")
    parser.add_argument("--quiet", action="store_true", help="nothing else runs: seconds count")
    parser.add_argument("--gpu", action="store_true", help="the kit's arms on GSM8K")
    parser.add_argument("--partial", action="store_true", help="with and without them")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    tasks = GPU_TASKS if options.gpu else TASKS
    end = time.monotonic() + 60 * options.minutes
    path = RESULTS / f"study_{'gpu' if options.gpu else 'cpu'}.jsonl"
    partial = RESULTS / "partial_rollouts_study.jsonl"
    if options.report:
        from study_report import write, write_partial

        titles = {name: task.title for name, task in (TASKS | GPU_TASKS).items()}
        rows = [row for file in sorted(RESULTS.glob("study_*.jsonl")) for row in read_lines(file)]
        write(rows, titles)
        write_partial(read_lines(partial), titles)
        return
    prepare()
    arms = [arm for arm in ARMS if not options.gpu or ARMS[arm][0] == "kit"]
    if options.partial:
        path, arms = partial, list(PARTIAL_ARMS)
        tasks = {name: replace(task, seeds=max(3, task.seeds)) for name, task in TASKS.items()}
    if wrong := set(options.task) - tasks.keys():
        parser.error(f"--task {min(wrong)} is not among {', '.join(tasks)}; --gpu has others")
    if wrong := set(options.arm) - set(arms):
        parser.error(f"--arm {min(wrong)} is not among {', '.join(arms)}")
    arms = options.arm or arms
    chosen = {name: tasks[name] for name in options.task or tasks}
    known = {
        (row["task"], row["arm"], row["seed"])
        for row in read_lines(path)
        if row["quiet"] or not options.quiet
    }
    for seed in range(1, 6):
        for name, arm in ((n, a) for n, task in chosen.items() if seed <= task.seeds for a in arms):
            if (name, arm, seed) in known or time.monotonic() > end:
                continue
            about = {"task": name, "arm": arm, "seed": seed, "quiet": options.quiet}
            about |= {"machine": environment.hardware.name, "gradient_checkpointing": RECOMPUTES}
            row = about | run(tasks[name], arm, seed)
            append_line(path, row)
            print(name, arm, seed, row["curve"], flush=True)
            gc.collect()


if __name__ == "__main__":
    main()
