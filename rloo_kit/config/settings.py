"""Table of trainer settings: type, default, range, help and resume rule in one row each.

``LeaveOneOutConfig`` inherits ``KitSettings``. The run-file check, resume, the dry run, the model
card and the docs read the same rows. Loads neither torch nor TRL.
"""

import dataclasses
from dataclasses import MISSING, dataclass
from typing import Any, Literal

Resume = Literal["must", "may", "free"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Rule of one setting, in addition to its name, type and default."""

    help: str = ""
    minimum: float | None = None
    above: float | None = None  # lower bound that is not allowed itself
    maximum: float | None = None
    below: float | None = None  # upper bound that is not allowed itself
    choices: tuple[Any, ...] = ()  # allowed values, or allowed items of a list
    table: str = ""  # `module:NAME` of a table whose keys are the choices; imported for the check
    default: Any = None  # the kit's default in place of TRL's; None: TRL's
    by_device: bool = False  # the default depends on machine and model; None lets the kit choose
    kit_step: bool = False  # the kit's own step obeys it, and TRL's does not
    trl_step: bool = False  # TRL's step obeys it, and the kit's does not
    instead: str = ""  # why a value outside of `choices` has no effect here, and what to write
    resume: Resume = "free"
    """``must``: it decides what is sampled and learned, so a resumed run keeps it. ``may``: a new
    value is used from the next step and reported. ``free``: it may change without notice."""


def setting(default: Any = MISSING, help: str = "", **rule: Any) -> Any:
    """Return a dataclass field with its rule; a default list or dict is a ``default_factory``."""
    if "default_factory" in rule:
        given = {"default_factory": rule.pop("default_factory")}
    else:
        given = {"default": default}
    return dataclasses.field(**given, metadata={"rule": Rule(help=help, **rule)})


# What holds of most settings of the kit: they decide what is learned, by the kit's own step
_LEARNING: dict[str, Any] = {"resume": "must", "kit_step": True}
# Findings of the doctor that can make a run worthless
STOP_ON = (
    "stale_sampler",
    "clip_noise",
    "old_rollouts",
    "kl_explosion",
    "all_truncated",
    "empty_output",
    "length_explosion",
    "no_thought",
    "constant_reward",
    "cold_start",
    "reward_collapse",
    "reward_hacking",
    "entropy_collapse",
    "no_signal",
    "learning_rate_too_low",
    "high_variance",
    "tool_calls_fail",
    "calls_without_answer",
)


@dataclass(repr=False, eq=False)
class KitSettings:
    """Trainer settings that TRL does not have."""

    step: Literal["auto", "kit", "trl"] = setting(
        "auto",
        "Training step: `kit`, which is faster, or `trl` (TRL's own); `auto`: the kit's, or TRL's "
        "if the kit's cannot train ([more than one card](../how-to/more_than_one_card.md)).",
    )
    tokens_per_micro_batch: int | None = setting(
        None,
        "Most positions (rows times padded length) of a training pass; null: computed from the "
        "free memory. It changes speed and memory, not the gradient. "
        "`per_device_train_batch_size` keeps its meaning.",
        minimum=1,
        resume="may",
        kit_step=True,
    )
    token_level_kl: bool = setting(
        False,
        "true: the advantage of each token is reduced by `beta` times the KL of that token and all "
        "later ones; false: the score of a completion is reduced by `beta` times its whole KL.",
        **_LEARNING,
    )
    kl_estimator: Literal["k1", "k3"] = setting(
        "k1",
        "KL estimator: `k1` (log ratio) or `k3` (never negative).",
        **_LEARNING,
    )
    missing_eos_penalty: float | None = setting(
        None,
        "Subtract this from the score of a completion that was cut off.",
        minimum=0,
        **_LEARNING,
    )
    combine: Literal["sum", "normalize_then_sum"] = setting(
        "sum",
        "Combine several rewards as the weighted `sum`, or divide each by its own spread first "
        "(`normalize_then_sum`).",
        **_LEARNING,
    )
    normalize_reward: bool | Literal["batch", "moving"] | None = setting(
        None,
        "Normalise scores by the mean and spread of the generation batch (true, `batch`) or of all "
        "batches so far (`moving`).",
        **_LEARNING,
    )
    baseline: str = setting(
        "leave_one_out",
        "Baseline: `leave_one_out`, or a row that you added to `BASELINES` ([change the "
        "step](../how-to/change_the_step.md)).",
        table="rloo_kit.rloo.advantages:BASELINES",
        **_LEARNING,
    )
    loss: str = setting(
        "clipped",
        "Loss: `clipped` (PPO's clipped surrogate), or a row that you added to `LOSSES` ([change "
        "the step](../how-to/change_the_step.md)).",
        table="rloo_kit.rloo.objective:LOSSES",
        **_LEARNING,
    )
    on_reward_error: Literal["stop", "skip"] = setting(
        "stop",
        "If a reward cannot score a completion: `stop` the run, or `skip` the score and log it.",
    )
    reward_timeout_seconds: float | None = setting(
        None, "Time limit of a call of a reward function, in seconds; null: no limit.", above=0
    )
    dynamic_sampling: bool = setting(
        False,
        "Sample further prompts to replace groups whose scores are all equal.",
        **_LEARNING,
    )
    dynamic_sampling_rounds: int = setting(
        4,
        "Most sampling rounds for one batch; groups that are still missing stay as they are.",
        minimum=1,
        maximum=100,
        **_LEARNING,
    )
    generation: Literal["auto", "vllm", "server", "transformers"] = setting(
        "auto",
        "Sampling engine: `vllm` (in this process), `server` (`vllm serve`, [started by you]"
        "(../how-to/generation.md#a-server-on-another-card-or-machine)), `transformers`, or "
        "`auto`: vLLM in this process if this machine has a GPU and vLLM can run on it.",
        resume="may",
    )
    vllm_adapter_dir: str | None = setting(
        None,
        "Folder for the adapter, which vLLM's server must find under the same path; null: in "
        "memory, for a server on the same machine.",
    )
    thinking_budget: int | None = setting(
        None,
        "Truncate the completion if the thought is still open after this many tokens; null: no "
        "limit but `max_completion_length`.",
        minimum=1,
        **_LEARNING,
    )
    partial_rollouts: bool = setting(
        False,
        "Sample until enough groups are complete, and continue the others in later steps "
        "([when](../how-to/partial_rollouts.md)).",
        **_LEARNING,
    )
    rows_in_flight: int | None = setting(
        None,
        "Number of completions that `partial_rollouts` keeps in flight (begun, but not trained "
        "yet); null: two generation batches (one with `max_rollout_age: 0`).",
        minimum=2,
        **_LEARNING,
    )
    max_rollout_age: int = setting(
        4,
        "Most generation batches that a group of `partial_rollouts` waits until it is trained.",
        minimum=0,
        maximum=1000,
        **_LEARNING,
    )
    max_tool_calling_iterations: int | None = setting(
        None,
        "Most rounds of tool calls in a completion; null: no limit but `max_completion_length`.",
        minimum=0,
        **_LEARNING,
    )
    tool_timeout_seconds: float | None = setting(
        None,
        "Time limit of a call of a tool, in seconds (a plain function: on Unix); null: no limit.",
        above=0,
    )
    on_tool_error: Literal["tell", "stop"] = setting(
        "tell",
        "If a tool raises: `tell` the model, which reads the error, or `stop` the run. Calls that "
        "are malformed or name no tool never stop it.",
    )
    canary: bool = setting(
        True,
        "Check on every batch that vLLM samples from the current policy, and stop if it does not.",
    )
    rollout_correction: Literal["sequence", "token"] | None = setting(
        None,
        "Weight each `sequence` or each `token` by its probability under the policy divided by "
        "that under the sampler; null: no weights.",
        **_LEARNING,
    )
    rollout_correction_cap: float = setting(
        2.0,
        "Largest weight of `rollout_correction`.",
        minimum=1,
        maximum=1e6,
        **_LEARNING,
    )
    doctor: bool = setting(True, "Look for problems during the run, and report them.")
    stop_on: list[str] | None = setting(
        None,
        "Findings that end the run, for example `[kl_explosion]`; its best weights are kept.",
        choices=STOP_ON,
    )
    keep_last: int = setting(2, "Number of newest checkpoints to keep.", minimum=1)
    keep_best: int = setting(
        1,
        "Number of highest-scoring checkpoints to keep in addition to the newest.",
        minimum=0,
    )
    max_hours: float | None = setting(
        None, "Save and stop after this many hours of training.", above=0
    )
    max_skipped_steps: int = setting(
        3,
        "Stop after this many optimizer steps in a row were skipped because of NaN/Inf gradients.",
        minimum=1,
        kit_step=True,
    )
    dry_run: bool | None = setting(
        None,
        "Run a worst-case step before training, to fail early if memory is short; null: only on a "
        "GPU.",
        kit_step=True,
    )


# Why this setting of TRL is refused
NO_SYNC = (
    "trainer.sync_ref_model copies the weights into the reference, but the reference of an adapter "
    "is the model without it: leave it out"
)
_MUST = Rule(resume="must")
_MAY = Rule(resume="may")
_BY_DEVICE = Rule(by_device=True)
_OF_TRL = Rule(trl_step=True)
_NO_UPLOAD = (
    "but nothing is uploaded while training: leave it out, and upload the result with rloo-kit "
    "export RUN --to hub, or with trainer.push_to_hub()"
)
# Fields of TRL and transformers that the kit has a rule for; their types are TRL's
TRL_RULES: dict[str, Rule] = {
    "adam_beta1": _MUST,
    "adam_beta2": _MUST,
    "adam_epsilon": _MUST,
    "beta": Rule(default=0.05, minimum=0, maximum=100, resume="must"),
    "bf16": Rule(by_device=True, resume="must"),
    "chat_template_kwargs": _MUST,
    "data_seed": Rule(
        choices=(None,), instead="but trainer.seed gives the order of prompts: leave it out"
    ),
    "dataloader_pin_memory": _BY_DEVICE,
    "ds3_gather_for_generation": _OF_TRL,
    "enable_jit_checkpoint": Rule(
        choices=(False,), instead="but SIGTERM saves a checkpoint anyway: leave it out"
    ),
    "epsilon": Rule(minimum=0, resume="must"),
    "epsilon_high": _MUST,
    "fp16": Rule(by_device=True, resume="must"),
    "generation_batch_size": Rule(minimum=1, resume="must"),
    "generation_kwargs": _MUST,
    "gradient_accumulation_steps": Rule(default=1, minimum=1),
    "gradient_checkpointing": Rule(by_device=True, resume="may"),
    "hub_always_push": Rule(choices=(False,), instead=_NO_UPLOAD),
    "hub_strategy": Rule(choices=("every_save",), instead=_NO_UPLOAD),
    "label_smoothing_factor": Rule(
        choices=(0,), instead="but RLOO's loss has no labels to smooth: leave it out"
    ),
    "learning_rate": Rule(default=1e-5, above=0, maximum=1, resume="may"),
    "logging_steps": Rule(default=1),
    "lr_scheduler_type": _MAY,
    "mask_truncated_completions": _MUST,
    "max_completion_length": Rule(default=512, minimum=1, maximum=1_000_000, resume="must"),
    "max_grad_norm": Rule(default=1.0, minimum=0, resume="may"),
    "max_steps": Rule(minimum=-1, maximum=1_000_000_000, resume="may"),
    "min_p": _MUST,
    "normalize_advantages": _MUST,
    "num_completions_to_print": Rule(default=0),
    # leave-one-out compares a completion with its siblings
    "num_generations": Rule(default=4, minimum=2, resume="must"),
    "num_iterations": Rule(default=1, minimum=1, maximum=1000, resume="must"),
    "num_train_epochs": _MAY,
    "optim": _MUST,
    "optim_args": _MUST,
    "per_device_train_batch_size": Rule(default=8, minimum=1),
    "push_to_hub": Rule(choices=(False,), instead=_NO_UPLOAD),
    "repetition_penalty": _MUST,
    "report_to": Rule(default="none"),
    "restore_callback_states_from_checkpoint": _OF_TRL,
    "reward_clip_range": _MUST,
    "reward_weights": _MUST,
    "save_only_model": _OF_TRL,
    "save_steps": Rule(default=10),
    "save_total_limit": Rule(
        choices=(None,),
        instead="but trainer.keep_last and trainer.keep_best decide what stays: write those",
    ),
    "seed": _MUST,
    "shuffle_dataset": _MUST,
    "steps_per_generation": Rule(minimum=1),
    "temperature": Rule(default=1.0, minimum=1e-3, maximum=10, resume="must"),
    "top_k": _MUST,
    "top_p": Rule(above=0, maximum=1, resume="must"),
    "train_sampling_strategy": Rule(
        choices=("random",),
        instead="but RLOO draws prompts at random, or with trainer.shuffle_dataset: false in their "
        "order: leave it out",
    ),
    "use_cpu": _BY_DEVICE,
    "vllm_enable_sleep_mode": Rule(by_device=True),
    "vllm_gpu_memory_utilization": Rule(by_device=True),
    "warmup_steps": _MAY,
    "weight_decay": _MUST,
}

OWN_FIELDS = dataclasses.fields(KitSettings)
RULES: dict[str, Rule] = {
    **{field.name: field.metadata["rule"] for field in OWN_FIELDS},
    **TRL_RULES,
}
# Defaults that differ from TRL's, or repeat TRL's so that they can be read without TRL
TRL_DEFAULTS: dict[str, Any] = {
    name: rule.default for name, rule in TRL_RULES.items() if rule.default is not None
}
# Trainer settings that the run file does not give
DEFAULTS: dict[str, Any] = {**{field.name: field.default for field in OWN_FIELDS}, **TRL_DEFAULTS}
OF_KIT_STEP = [name for name, rule in RULES.items() if rule.kit_step]
OF_TRL_STEP = [name for name, rule in RULES.items() if rule.trl_step]
BY_DEVICE = frozenset(name for name, rule in TRL_RULES.items() if rule.by_device)


def on_resume(rule: Resume) -> list[str]:
    """Return the settings with this resume rule, sorted."""
    return sorted(name for name, one in RULES.items() if one.resume == rule)
