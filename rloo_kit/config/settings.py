"""Table of the trainer settings: each row has the type, default, range, help text and resume rule.

``LeaveOneOutConfig`` inherits ``KitSettings``. The run-file check, resume, the dry run, the model
card and the docs read the same rows. Importing this module imports neither torch nor TRL.
"""

import dataclasses
from dataclasses import MISSING, dataclass
from typing import Any, Literal

Resume = Literal["must", "may", "free"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Help text, allowed values and resume behaviour of one setting."""

    help: str = ""
    minimum: float | None = None
    above: float | None = None  # exclusive lower bound
    maximum: float | None = None
    below: float | None = None  # exclusive upper bound
    choices: tuple[Any, ...] = ()  # allowed values, or allowed items if the value is a list
    table: str = ""  # `module:NAME` of a dict whose keys are the choices; the check imports it
    default: Any = None  # the kit's default for a setting of TRL; None: TRL's default is used
    by_device: bool = False  # the default depends on machine and model; None: the kit chooses
    kit_step: bool = False  # only the kit's training step uses it; TRL's step ignores it
    trl_step: bool = False  # only TRL's training step uses it; the kit's step ignores it
    instead: str = ""  # why a value outside of `choices` has no effect here, and what to write
    resume: Resume = "free"
    """Whether a resumed run may change the setting.

    ``must``: No. The value must stay the same, because it affects sampling or training.
    ``may``: Yes. The new value is used from the next step, and the change is reported.
    ``free``: Yes. The change is not reported."""


def setting(
    default: Any = MISSING, help: str = "", *, default_factory: Any = MISSING, **rule: Any
) -> Any:
    """Return a dataclass field whose metadata hold a ``Rule``.

    Args:
        default: Default of the field.
        help: Help text of the rule.
        default_factory: Function that returns the default, for a list or dict.
        rule: Other fields of ``Rule``.
    """
    return dataclasses.field(
        default=default,
        default_factory=default_factory,
        metadata={"rule": Rule(help=help, **rule)},
    )


# For settings that affect what the model learns, and that only the kit's step uses
_LEARNING: dict[str, Any] = {"resume": "must", "kit_step": True}
# Findings of the doctor that can make a run worthless, so that `stop_on` may end it
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
        "Code that runs a training step: `kit` (rloo-kit's step, which is faster), `trl` (TRL's "
        "step), or `auto`: `kit` if rloo-kit's step can train this run, else `trl` "
        "([more than one card](../how-to/more_than_one_card.md)).",
    )
    tokens_per_micro_batch: int | None = setting(
        None,
        "Maximum size of a micro-batch, in tokens with padding (rows times padded length); null: "
        "computed from the free memory. It changes speed and memory use, but neither the gradient "
        "nor the batch size that `per_device_train_batch_size` sets.",
        minimum=1,
        resume="may",
        kit_step=True,
    )
    token_level_kl: bool = setting(
        False,
        "How the KL penalty is applied. false: subtract `beta` times the KL of the whole "
        "completion from its score. true: subtract `beta` times the KL of a token and all later "
        "tokens from the advantage of that token.",
        **_LEARNING,
    )
    kl_estimator: Literal["k1", "k3"] = setting(
        "k1",
        "Estimator of the KL divergence from the reference model: `k1` (the log ratio) or `k3` "
        "(never negative).",
        **_LEARNING,
    )
    missing_eos_penalty: float | None = setting(
        None,
        "Penalty that is subtracted from the score of a completion that was cut off before its "
        "EOS token; null: no penalty.",
        minimum=0,
        **_LEARNING,
    )
    combine: Literal["sum", "normalize_then_sum"] = setting(
        "sum",
        "How several rewards are combined into one score: `sum` is their weighted sum; "
        "`normalize_then_sum` first divides each reward by its spread over the batch (the root "
        "mean square of its leave-one-out advantages).",
        **_LEARNING,
    )
    normalize_reward: bool | Literal["batch", "moving"] | None = setting(
        None,
        "Normalise scores with the mean and standard deviation of the generation batch (`batch` "
        "or true), or of all batches so far (`moving`); null or false: do not normalise.",
        **_LEARNING,
    )
    baseline: str = setting(
        "leave_one_out",
        "Baseline that is subtracted from the scores: `leave_one_out`, or the name of a baseline "
        "that you added to `BASELINES` ([change the step](../how-to/change_the_step.md)).",
        table="rloo_kit.rloo.advantages:BASELINES",
        **_LEARNING,
    )
    loss: str = setting(
        "clipped",
        "Loss function: `clipped` (PPO's clipped surrogate), or the name of a loss that you added "
        "to `LOSSES` ([change the step](../how-to/change_the_step.md)).",
        table="rloo_kit.rloo.objective:LOSSES",
        **_LEARNING,
    )
    on_reward_error: Literal["stop", "skip"] = setting(
        "stop",
        "What to do if a reward function fails on a completion: `stop` the run, or `skip` that "
        "score and log the error.",
    )
    reward_timeout_seconds: float | None = setting(
        None, "Time limit for one call of a reward function, in seconds; null: no limit.", above=0
    )
    dynamic_sampling: bool = setting(
        False,
        "Sample further prompts to replace groups whose scores are all equal.",
        **_LEARNING,
    )
    dynamic_sampling_rounds: int = setting(
        4,
        "Maximum number of extra sampling rounds for one batch with `dynamic_sampling`. Groups "
        "with equal scores that remain after the last round stay in the batch.",
        minimum=1,
        maximum=100,
        **_LEARNING,
    )
    generation: Literal["auto", "vllm", "server", "transformers"] = setting(
        "auto",
        "Sampling engine: `vllm` (in this process), `server` (`vllm serve`, [started by you]"
        "(../how-to/generation.md#a-server-on-another-card-or-machine)), `transformers`, or "
        "`auto`: `vllm` if this machine has a GPU and vLLM can run on it, else `transformers`.",
        resume="may",
    )
    vllm_adapter_dir: str | None = setting(
        None,
        "Folder in which the adapter is saved for vLLM's server; the server must be able to read "
        "this folder under the same path. null: a folder in shared memory if it is writable and "
        "has 1 GiB free, else in the system's temporary folder; with null, the server must run on "
        "the same machine.",
    )
    thinking_budget: int | None = setting(
        None,
        "Maximum length of the thought, in tokens; if the thought is still open after that many "
        "tokens, the completion is truncated. null: only `max_completion_length` limits it.",
        minimum=1,
        **_LEARNING,
    )
    partial_rollouts: bool = setting(
        False,
        "Train as soon as enough groups are complete, and continue the unfinished completions in "
        "later steps ([when this helps](../how-to/partial_rollouts.md)).",
        **_LEARNING,
    )
    rows_in_flight: int | None = setting(
        None,
        "Number of completions that `partial_rollouts` keeps in flight (started, but not yet "
        "trained on); null: the completions of two generation batches, or of a single one if "
        "`max_rollout_age` is 0.",
        minimum=2,
        **_LEARNING,
    )
    max_rollout_age: int = setting(
        4,
        "Maximum age of a group with `partial_rollouts`: the number of generation batches from its "
        "start until it is trained on.",
        minimum=0,
        maximum=1000,
        **_LEARNING,
    )
    max_tool_calling_iterations: int | None = setting(
        None,
        "Maximum number of rounds of tool calls in a completion; null: only "
        "`max_completion_length` limits it.",
        minimum=0,
        **_LEARNING,
    )
    tool_timeout_seconds: float | None = setting(
        None,
        "Time limit for one call of a tool, in seconds; null: no limit. A tool that is not an "
        "async function has no time limit on Windows.",
        above=0,
    )
    on_tool_error: Literal["tell", "stop"] = setting(
        "tell",
        "What to do if a tool raises an exception: `tell` shows the error to the model, `stop` "
        "stops the run. A call that is malformed or names an unknown tool never stops the run.",
    )
    canary: bool = setting(
        True,
        "For every batch, check that vLLM sampled it from the current policy, and stop the run if "
        "it did not.",
    )
    rollout_correction: Literal["sequence", "token"] | None = setting(
        None,
        "Correct for the difference between policy and sampler with importance weights: the "
        "probability of each `sequence` or each `token` under the policy divided by its "
        "probability under the sampler; null: no correction.",
        **_LEARNING,
    )
    rollout_correction_cap: float = setting(
        2.0,
        "Upper limit for the importance weights of `rollout_correction`.",
        minimum=1,
        maximum=1e6,
        **_LEARNING,
    )
    doctor: bool = setting(
        True, "Look for problems during the run, such as a collapsing reward, and report them."
    )
    stop_on: list[str] | None = setting(
        None,
        "Findings of the doctor that end the run early, for example `[kl_explosion]`; the best "
        "weights so far are kept.",
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
        "Stop the run after this many optimizer steps in a row were skipped because of NaN or Inf "
        "gradients.",
        minimum=1,
        kit_step=True,
    )
    dry_run: bool | None = setting(
        None,
        "Run a worst-case step before training, to fail early if memory is short; null: only if "
        "the run trains on a GPU, the length of its prompts has an upper bound, and its batches "
        "are not small.",
        kit_step=True,
    )


# Message that refuses TRL's setting `sync_ref_model`
NO_SYNC = (
    "trainer.sync_ref_model updates the reference model during training, but here the reference is "
    "always the base model without the adapter: leave it out"
)
_MUST = Rule(resume="must")
_MAY = Rule(resume="may")
_BY_DEVICE = Rule(by_device=True)
_OF_TRL = Rule(trl_step=True)
_NO_UPLOAD = (
    "but nothing is uploaded while training: leave it out, and upload the result with rloo-kit "
    "export RUN --to hub, or with trainer.push_to_hub()"
)
_LOG_LEVEL = Rule(choices=("detail", "debug", "info", "warning", "error", "critical", "passive"))
# Rules for fields of TRL and transformers; the types of these fields are defined in TRL
TRL_RULES: dict[str, Rule] = {
    "adam_beta1": _MUST,
    "adam_beta2": _MUST,
    "adam_epsilon": _MUST,
    "beta": Rule(default=0.05, minimum=0, maximum=100, resume="must"),
    "bf16": Rule(by_device=True, resume="must"),
    "cache_implementation": _MAY,
    "chat_template_kwargs": _MUST,
    "data_seed": Rule(
        choices=(None,), instead="but trainer.seed gives the order of prompts: leave it out"
    ),
    "dataloader_pin_memory": _BY_DEVICE,
    "disable_dropout": _MUST,
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
    "log_level": _LOG_LEVEL,
    "log_level_replica": _LOG_LEVEL,
    "logging_steps": Rule(default=1),
    "lr_scheduler_kwargs": _MAY,
    "lr_scheduler_type": _MAY,
    "mask_truncated_completions": _MUST,
    "max_completion_length": Rule(default=512, minimum=1, maximum=1_000_000, resume="must"),
    "max_grad_norm": Rule(default=1.0, minimum=0, resume="may"),
    "max_steps": Rule(minimum=-1, maximum=1_000_000_000, resume="may"),
    "min_p": Rule(minimum=0, maximum=1, resume="must"),
    "neftune_noise_alpha": _MUST,
    "normalize_advantages": _MUST,
    "num_completions_to_print": Rule(default=0),
    # leave-one-out compares a completion with the others of its group
    "num_generations": Rule(default=4, minimum=2, resume="must"),
    "num_iterations": Rule(default=1, minimum=1, maximum=1000, resume="must"),
    "num_train_epochs": _MAY,
    "optim": _MUST,
    "optim_args": _MUST,
    "per_device_train_batch_size": Rule(default=8, minimum=1),
    "push_to_hub": Rule(choices=(False,), instead=_NO_UPLOAD),
    "ref_model_mixup_alpha": _MUST,
    "ref_model_sync_steps": _MUST,
    "repetition_penalty": Rule(above=0, resume="must"),
    "report_to": Rule(default="none"),
    "restore_callback_states_from_checkpoint": _OF_TRL,
    "reward_clip_range": _MUST,
    "reward_weights": _MUST,
    "router_aux_loss_coef": _MUST,
    "save_only_model": _OF_TRL,
    "save_steps": Rule(default=10),
    "save_total_limit": Rule(
        choices=(None,),
        instead="but trainer.keep_last and trainer.keep_best decide which checkpoints stay: set "
        "these two instead",
    ),
    "seed": _MUST,
    "shuffle_dataset": _MUST,
    "steps_per_generation": Rule(minimum=1),
    "sync_ref_model": _MUST,
    "temperature": Rule(default=1.0, minimum=1e-3, maximum=10, resume="must"),
    "top_k": Rule(minimum=0, resume="must"),
    "top_p": Rule(above=0, maximum=1, resume="must"),
    "train_sampling_strategy": Rule(
        choices=("random",),
        instead="but rloo-kit draws prompts at random, or in the order of the dataset if "
        "trainer.shuffle_dataset is false: leave it out",
    ),
    "use_cpu": _BY_DEVICE,
    "vllm_enable_sleep_mode": _BY_DEVICE,
    "vllm_gpu_memory_utilization": _BY_DEVICE,
    "warmup_steps": _MAY,
    "weight_decay": _MUST,
}

OWN_FIELDS = dataclasses.fields(KitSettings)
RULES: dict[str, Rule] = {
    **{field.name: field.metadata["rule"] for field in OWN_FIELDS},
    **TRL_RULES,
}
# The kit's defaults for fields of TRL. Some equal TRL's defaults; they are listed here so that they
# can be read without importing TRL
TRL_DEFAULTS: dict[str, Any] = {
    name: rule.default for name, rule in TRL_RULES.items() if rule.default is not None
}
# Default of each setting of the kit, and of each field of TRL in TRL_DEFAULTS
DEFAULTS: dict[str, Any] = {**{field.name: field.default for field in OWN_FIELDS}, **TRL_DEFAULTS}
OF_KIT_STEP = [name for name, rule in RULES.items() if rule.kit_step]
OF_TRL_STEP = [name for name, rule in RULES.items() if rule.trl_step]
BY_DEVICE = frozenset(name for name, rule in TRL_RULES.items() if rule.by_device)


def on_resume(rule: Resume) -> list[str]:
    """Return the sorted names of the trainer settings with a given resume rule.

    Args:
        rule: ``must``, ``may`` or ``free``; see ``Rule.resume``.
    """
    return sorted(name for name, one in RULES.items() if one.resume == rule)
