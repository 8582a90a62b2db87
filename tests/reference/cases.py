"""Covering arrays: every triple of trainer settings and every pair of commands and run files.

``VALUES`` has a row for each setting of the kit's table that changes what is sampled, learned or
computed, and for each other property of a training; the first value is the default. covertable
makes the arrays, in minutes, so their cases are kept in files: the place of each value. After a
change of the values:

    uv run --no-project --with covertable python tests/reference/cases.py
"""

from dataclasses import dataclass
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Pair = tuple[tuple[str, Any], tuple[str, Any]]


@dataclass
class Array:
    """A covering array: values, the pairs that may not meet, and the file with its cases."""

    file: str
    values: dict[str, list[Any]]
    apart: list[Pair]
    strength: int

    def write(self) -> None:
        """Make the cases."""
        import covertable

        names = list(self.values)
        places = {name: list(range(len(values))) for name, values in self.values.items()}
        apart = [
            {
                "operator": "or",
                "conditions": [
                    {"operator": "ne", "left": n, "value": self.values[n].index(v)} for n, v in pair
                ],
            }
            for pair in self.apart
        ]
        rows = covertable.make(places, strength=self.strength, constraints=apart)
        lines = [" ".join(str(row[name]) for name in names) for row in rows]
        HERE.joinpath(self.file).write_text("\n".join([" ".join(names), *lines]) + "\n")

    def cases(self) -> list[dict[str, Any]]:
        """Return the cases, each with a value of every setting."""
        names, *lines = HERE.joinpath(self.file).read_text().splitlines()
        return [
            {n: self.values[n][int(p)] for n, p in zip(names.split(), line.split(), strict=True)}
            for line in lines
        ]

    def missing(self) -> set[tuple]:
        """Return the tuples of (setting, value) that may meet and do not."""
        apart = [{(name, repr(value)) for name, value in pair} for pair in self.apart]
        found = set()
        for case in self.cases():
            found.update(combinations([(n, repr(v)) for n, v in case.items()], self.strength))
        options = [[(name, repr(v)) for v in values] for name, values in self.values.items()]
        wanted = chain(*(product(*chosen) for chosen in combinations(options, self.strength)))
        return {one for one in wanted if one not in found and not any(p <= {*one} for p in apart)}


VALUES: dict[str, list[Any]] = {
    # how scores become a gradient
    "beta": [0.05, 0.0, 0.5],
    "kl_estimator": ["k1", "k3"],
    "token_level_kl": [False, True],
    "epsilon": [0.2, 0.002],
    "epsilon_high": [None, 0.3],
    "combine": ["sum", "normalize_then_sum"],
    "reward_weights": [None, "uneven"],
    "missing_eos_penalty": [None, 0.5],
    "reward_clip_range": [None, [-0.3, 0.6]],
    "normalize_reward": [None, "batch", "moving"],
    "normalize_advantages": [False, True],
    "mask_truncated_completions": [False, True],
    "num_generations": [4, 2],
    "num_iterations": [1, 2],
    "steps_per_generation": [None, 2],
    "gradient_accumulation_steps": [1, 2],
    "rollout_correction": [None, "sequence", "token"],
    "rollout_correction_cap": [2.0, 1.0],
    "engine": ["transformers", "rough"],
    "tokens_per_micro_batch": [None, 40],
    # what is sampled
    "dynamic_sampling": [False, True],
    "dynamic_sampling_rounds": [4, 1],
    "temperature": [1.0, 0.8],
    "top_p": [1.0, 0.9],
    "top_k": [0, 100],
    "min_p": [None, 0.01],
    "repetition_penalty": [1.0, 1.1],
    "generation_kwargs": [None, {"min_new_tokens": 2}],
    "thinking_budget": [None, 4],
    "shuffle_dataset": [True, False],
    "chat_template_kwargs": [None, {"enable_thinking": False}],
    # how it is learned
    "learning_rate": [0.05, 0.01],
    "lr_scheduler_type": ["constant", "linear"],
    "warmup_steps": [0, 1],
    "optim": ["sgd", "adamw_torch"],
    "weight_decay": [0.0, 0.1],
    "max_grad_norm": [0.0, 0.1],
    # how it is computed
    "step": ["auto", "kit"],
    "gradient_checkpointing": [False, True],
    "checkpointing_kwargs": [None, {"use_reentrant": False, "every_n_layers": 2}],
    "pad_to_multiple_of": [None, 8],
    "dry_run": [False, True],
    "canary": [True, False],
    "doctor": [True, False],
    "on_reward_error": ["stop", "skip"],
    "precision": ["float32", "bf16", "4bit"],
    "trained": ["lora", "full"],
    # what a training consists of
    "rewards": ["two", "one", "async", "fails"],
    "prompts": ["chat", "text"],
    "resumed": [False, True],
    "evaluated": [False, True],
}

# Settings of the table that no case varies, and why
NOT_VARIED = {
    "adam_beta1 adam_beta2 adam_epsilon optim_args": "the optimizer's own: it takes the gradient",
    "baseline loss": "one value each; tests/rloo adds others",
    "bf16 fp16": "`precision` sets them; fp16 needs a GPU",
    "generation vllm_adapter_dir vllm_enable_sleep_mode vllm_gpu_memory_utilization": (
        "vLLM is in another environment: tests/vllm"
    ),
    "generation_batch_size": "follows from steps_per_generation",
    "per_device_train_batch_size max_completion_length max_steps num_train_epochs seed": (
        "sizes of every case"
    ),
    "use_cpu dataloader_pin_memory": "of the machine",
    "cache_implementation disable_dropout lr_scheduler_kwargs neftune_noise_alpha "
    "ref_model_mixup_alpha ref_model_sync_steps router_aux_loss_coef sync_ref_model": (
        "TRL's, tests/training/test_every_field.py"
    ),
    "keep_best keep_last save_steps max_hours": "when a checkpoint is written: tests/checkpoints",
    "logging_steps num_completions_to_print report_to": "what is written: tests/live, tests/report",
    "log_level log_level_replica": "what transformers prints",
    "reward_timeout_seconds": "seconds of a reward: tests/scoring",
    "max_tool_calling_iterations on_tool_error tool_timeout_seconds": "of tools: tests/tools",
    "max_skipped_steps stop_on": "when a run ends: tests/rloo, tests/diagnosis",
    "ds3_gather_for_generation restore_callback_states_from_checkpoint save_only_model": (
        "only of TRL's step: tests/training/test_trl_step.py"
    ),
    "data_seed enable_jit_checkpoint hub_always_push hub_strategy label_smoothing_factor "
    "push_to_hub save_total_limit train_sampling_strategy": "one value each, others are refused",
}

# The kit refuses a training with both of these
REFUSED: list[Pair] = [
    (("kl_estimator", "k3"), ("beta", 0.0)),
    (("token_level_kl", True), ("beta", 0.0)),
    (("rollout_correction_cap", 1.0), ("rollout_correction", None)),
    (("dynamic_sampling_rounds", 1), ("dynamic_sampling", False)),
]
# These do not exist: a quantised model trains by its adapter alone, an error that stops the run
IMPOSSIBLE: list[Pair] = [
    (("precision", "4bit"), ("trained", "full")),
    (("rewards", "fails"), ("on_reward_error", "stop")),
]
# Settings that have an effect with partial rollouts alone, after the default
OF_PARTIAL: dict[str, list[Any]] = {
    "rows_in_flight": [None, "three batches"],
    "max_rollout_age": [4, 2],
}
DEFAULT = {name: values[0] for name, values in {**VALUES, **OF_PARTIAL}.items()}
DEFAULT["partial_rollouts"] = False


APART = [*REFUSED, *IMPOSSIBLE]
TRAINER = Array("array.txt", VALUES, APART, strength=3)

# --- the same with partial rollouts ---------------------------------------------------------------

NOT_WITH_PARTIAL = ["top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs"]
REFUSED += [
    *((("partial_rollouts", True), (name, VALUES[name][1])) for name in NOT_WITH_PARTIAL),
    *((("partial_rollouts", False), (name, values[1])) for name, values in OF_PARTIAL.items()),
]
PARTIAL = Array(
    "partial.txt",
    {name: v for name, v in VALUES.items() if name not in NOT_WITH_PARTIAL} | OF_PARTIAL,
    APART,
    strength=2,
)


# --- commands -------------------------------------------------------------------------------------

COMMAND_VALUES: dict[str, list[Any]] = {
    "command": [
        "train",
        "train --resume",
        "eval",
        "eval --no-base --samples 2",
        "eval --no-greedy --num-prompts 2 --batch-size 1",
        "eval --prompts own.jsonl",
        "export --to adapter",
        "export --to merged --prompts 2",
        "export --to merged --no-check",
        "calibrate --num-prompts 4",
        "calibrate --num-generations 2 --num-prompts 2",
        "rewards check --prompts 2",
        "rewards check --generations 2 --output-dir checked",
        "rewards check --completions kept.jsonl",
    ],
    "model": ["embedded", "folder", "adapter", "gguf"],
    "load_in_4bit": [True, False],
    "file": ["built-in", "rows.jsonl", "rows.csv", "rows.parquet"],
    "prompts": ["text", "chat"],
    "columns": ["as they are", "mapped"],
    "held_out": [0, 4],
    "system": [None, "Be brief."],
    "rewards": ["library", "own file", "several"],
    "beta": [0.0, 0.05],
    "thinking": [None, {"start": "<think>", "end": "</think>"}],
}
COMMANDS = Array(
    "commands.txt",
    COMMAND_VALUES,
    [
        (("file", "rows.csv"), ("prompts", "chat")),  # a cell holds no messages
        (("file", "built-in"), ("prompts", "text")),
        (("file", "built-in"), ("columns", "mapped")),
    ],
    strength=2,
)


if __name__ == "__main__":
    TRAINER.write()
    PARTIAL.write()
    COMMANDS.write()
