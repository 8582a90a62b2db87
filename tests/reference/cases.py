"""A covering array of the trainer's settings: every triple of values meets in one of its cases.

``VALUES`` has a row for each setting of the kit's table that changes what is sampled, learned or
computed, and for each other property of a training; the first value is the default. covertable
makes the array, in minutes, so it is kept in array.txt, a digit for each value. After a change of
``VALUES``:

    uv run --no-project --with covertable python tests/reference/cases.py
"""

from itertools import combinations, product
from pathlib import Path
from typing import Any

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
    "keep_best keep_last save_steps max_hours": "when a checkpoint is written: tests/checkpoints",
    "logging_steps num_completions_to_print report_to": "what is written: tests/live, tests/report",
    "reward_timeout_seconds": "seconds of a reward: tests/scoring",
    "max_skipped_steps stop_on": "when a run ends: tests/rloo, tests/diagnosis",
    "ds3_gather_for_generation restore_callback_states_from_checkpoint save_only_model": (
        "only of TRL's step: tests/training/test_trl_step.py"
    ),
    "data_seed enable_jit_checkpoint hub_always_push hub_strategy label_smoothing_factor "
    "push_to_hub save_total_limit train_sampling_strategy": "one value each, others are refused",
}

# The kit refuses a training with both of these
REFUSED: list[tuple[tuple[str, Any], tuple[str, Any]]] = []
# These do not exist: a quantised model trains by its adapter alone, an error that stops the run
IMPOSSIBLE = [
    (("precision", "4bit"), ("trained", "full")),
    (("rewards", "fails"), ("on_reward_error", "stop")),
]
DEFAULT = {name: values[0] for name, values in VALUES.items()}


APART = [*REFUSED, *IMPOSSIBLE]
ARRAY = Path(__file__).with_name("array.txt")


def write_array() -> None:
    """Make an array that covers all triples, but those with a pair of ``APART``."""
    import covertable

    apart = [
        {
            "operator": "or",
            "conditions": [{"operator": "ne", "left": n, "value": v} for n, v in pair],
        }
        for pair in APART
    ]
    rows = covertable.make(VALUES, strength=3, constraints=apart)
    lines = ["".join(str(VALUES[n].index(row[n])) for n in VALUES) for row in rows]
    ARRAY.write_text("\n".join([" ".join(VALUES), *lines]) + "\n")


def read_array() -> list[dict[str, Any]]:
    """Return the cases, each with a value of every setting."""
    names, *lines = ARRAY.read_text().splitlines()
    return [
        {n: VALUES[n][int(digit)] for n, digit in zip(names.split(), line, strict=True)}
        for line in lines
    ]


def covered(cases: list[dict[str, Any]], strength: int) -> set[frozenset]:
    """Return the tuples of (setting, value) that occur in cases."""
    return {
        frozenset((name, repr(case[name])) for name in chosen)
        for case in cases
        for chosen in combinations(VALUES, strength)
    }


def possible(strength: int) -> set[frozenset]:
    """Return all tuples of (setting, value), but those with a pair of ``APART``."""
    apart = [{(name, repr(value)) for name, value in pair} for pair in APART]
    found = {
        frozenset((name, repr(value)) for name, value in zip(chosen, values, strict=True))
        for chosen in combinations(VALUES, strength)
        for values in product(*(VALUES[name] for name in chosen))
    }
    return {one for one in found if not any(pair <= one for pair in apart)}


if __name__ == "__main__":
    write_array()
