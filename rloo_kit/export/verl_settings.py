"""Translation of a run file's settings into those of verl 0.9.1.

The table of settings is ``assets/verl/settings.yaml``. verl is not imported here.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rloo_kit.config.run_file import RunConfig
from rloo_kit.config.trainer_settings import batch_plan
from rloo_kit.job import PreparedJob, template_settings
from rloo_kit.models.adapters import adapter_in
from rloo_kit.report.content import flat_settings

ASSETS = Path(__file__).resolve().parents[1] / "assets" / "verl"
# Experiment trackers whose names are the same in verl and in TRL
TRACKERS = {"clearml", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"}
PASS_TOKENS = 16_384  # tokens in a training pass, verl's default
NEVER = 1_000_000_000  # interval, in steps, that no run reaches


class Row(NamedTuple):
    """Settings of the run file, and the settings of verl that correspond to them."""

    run: dict[str, Any]  # dotted name in the run file -> value
    verl: dict[str, Any]  # dotted name in verl -> value
    note: str


def verl_rows(job: PreparedJob) -> tuple[list[Row], list[Row]]:
    """Translate a run's settings into verl's.

    Returns:
        Two lists: the settings that are carried over to verl, and the settings that differ from
        their default but are lost. ``model.load_in_4bit`` is always among the lost ones.
    """
    table = yaml.safe_load((ASSETS / "settings.yaml").read_text(encoding="utf-8"))
    given = flat_settings(job.config.as_dict())
    values = given | flat_settings({"trainer": job.args.to_dict()}) | _derived(job)
    carried = [Row({}, table["always"], "in every folder")]
    lost = []
    for one in table["carried"]:
        run = {name: values[name] for name in one["run"]}
        verl = {key: values[name] for key, name in one["verl"].items()}
        carried.append(Row(run, verl, one.get("note", "").format(**values)))
    seen = {name for row in carried for name in row.run}
    default = flat_settings(RunConfig().as_dict())
    for name, value in given.items():
        is_default = name in default and value == default[name]
        if {name, name.partition(".")[0]} & seen or (is_default and name != "model.load_in_4bit"):
            continue
        if name in table["in_files"]:
            carried.append(Row({name: value}, {}, table["in_files"][name]))
        else:
            why = table["lost"].get(name) or table["lost"].get(name.partition(".")[0])
            lost.append(Row({name: value}, {}, why or table["unknown"]))
    return carried, lost


def _derived(job: PreparedJob) -> dict[str, Any]:
    """Return the values for verl that must be computed, as name in the settings table -> value.

    A batch size is a number of prompts in verl, and a number of completions in TRL. A step is a
    generation batch in verl, and an optimizer step in TRL.
    """
    args = job.args
    config = job.config
    train, held_out = job.splits
    plan = batch_plan(config.trainer)
    batch = max(plan.num_completions, plan.step_rows) // plan.num_generations
    step, rest = divmod(plan.step_rows, plan.num_generations)
    step = batch if rest or batch % step else step
    updates = batch // step * args.num_iterations
    per_epoch = max(1, len(train) // batch)
    total = math.ceil(args.max_steps / updates) if args.max_steps > 0 else None
    epochs = math.ceil(total / per_epoch) if total else args.num_train_epochs
    steps = total or math.ceil(epochs * per_epoch)
    # A number below 1 is a share of the run
    save = args.save_steps * (steps if args.save_steps < 1 else 1 / updates)
    every = config.data.held_out_every
    often = max(1, round(every / updates)) if every else NEVER
    limit = config.model.max_seq_length - args.max_completion_length
    return {
        "adapter": str(adapter_in(config.model.name) or "") or None,
        "betas": [args.adam_beta1, args.adam_beta2],
        "chat_template_kwargs": template_settings(config),
        "clip_grad": args.max_grad_norm or 1e9,  # 0 clips nothing
        "dtype": "float16" if config.trainer.get("fp16") else "bfloat16",
        "epsilon_high": args.epsilon if args.epsilon_high is None else args.epsilon_high,
        "has_kl": args.beta > 0,
        "kl_penalty": {"k1": "kl", "k3": "low_var_kl"}[args.kl_estimator],
        "loggers": ["console", *sorted(TRACKERS.intersection(args.report_to or ()))],
        "max_prompt_length": min(limit, config.data.max_prompt_tokens or limit),
        "pass_tokens": args.tokens_per_micro_batch or max(PASS_TOKENS, config.model.max_seq_length),
        "ppo_mini_batch_size": step,
        "save_freq": max(1, round(save)),
        "schedule": "constant" if "constant" in args.lr_scheduler_type else "cosine",
        "test_freq": -1 if held_out is None else often,
        "top_k": args.top_k or -1,
        "total_epochs": math.ceil(epochs),
        "total_training_steps": total,
        "train_batch_size": batch,
        "updates": updates,
        "val_before_train": held_out is not None,
        "vllm": config.vllm,
        "warmup_ratio": args.warmup_steps if args.warmup_steps < 1 else 0.0,
        "warmup_steps": round(args.warmup_steps / updates),
    }
