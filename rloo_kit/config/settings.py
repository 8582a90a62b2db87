"""The table of settings: what the kit knows of every trainer setting, in one row each.

``LeaveOneOutConfig`` inherits ``KitSettings``. The run-file check, resume, the dry run, the model
card and the docs read the same rows. Loads neither torch nor TRL.
"""

import dataclasses
from dataclasses import MISSING, dataclass
from typing import Any, Literal

Resume = Literal["must", "may", "free"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What holds of one setting, in addition to its name, type and default."""

    help: str = ""
    minimum: float | None = None
    above: float | None = None  # lower bound that is not allowed itself
    maximum: float | None = None
    below: float | None = None  # upper bound that is not allowed itself
    choices: tuple[Any, ...] = ()  # of the value, or of each item of a list
    table: str = ""  # `module:NAME` of a table whose rows are the choices; loads what that needs
    default: Any = None  # what the kit sets in place of TRL's default; None: nothing
    by_device: bool = False  # the default follows machine and model; None lets the kit choose
    kit_step: bool = False  # the kit's own step obeys it, and TRL's does not
    trl_step: bool = False  # TRL's step obeys it, and the kit's does not
    instead: str = ""  # why another value than `choices` has no effect here, and what to write
    resume: Resume = "free"
    """``must``: it decides what is sampled and learned, so a resumed run keeps it. ``may``: a new
    value is used from the next step and reported. ``free``: it may change without notice."""


def setting(default: Any = MISSING, help: str = "", **rule: Any) -> Any:
    """Return a dataclass field with its rule; a list or dict as ``default_factory=``."""
    factory = rule.pop("default_factory", MISSING)
    metadata = {"rule": Rule(help=help, **rule)}
    if factory is not MISSING:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


# Findings of the doctor that can make a run worthless
STOP_ON = (
    "stale_sampler",
    "clip_noise",
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
)


@dataclass(repr=False, eq=False)
class KitSettings:
    """Trainer settings that TRL does not have."""

    step: Literal["auto", "kit", "trl"] = setting(
        "auto",
        "Whose training step: the `kit`'s, which is faster, or TRL's own (`trl`); `auto`: TRL's "
        "where the kit's cannot train ([more than one card](../how-to/more_than_one_card.md)).",
    )
    tokens_per_micro_batch: int | None = setting(
        None,
        "Positions (rows times width) of a training pass; null: from the free memory. Changes "
        "speed and memory, not the gradient. `per_device_train_batch_size` keeps its meaning.",
        minimum=1,
        resume="may",
        kit_step=True,
    )
    token_level_kl: bool = setting(
        False,
        "Penalise each token by the KL from itself on, instead of the completion by its sum.",
        resume="must",
        kit_step=True,
    )
    kl_estimator: Literal["k1", "k3"] = setting(
        "k1",
        "`k1` (log ratio) or `k3` (never negative).",
        resume="must",
        kit_step=True,
    )
    missing_eos_penalty: float | None = setting(
        None,
        "Subtracted from the score of a completion that was cut off.",
        minimum=0,
        resume="must",
        kit_step=True,
    )
    combine: Literal["sum", "normalize_then_sum"] = setting(
        "sum",
        "Several rewards: the weighted `sum`, or each over its own spread first "
        "(`normalize_then_sum`).",
        resume="must",
        kit_step=True,
    )
    normalize_reward: bool | Literal["batch", "moving"] | None = setting(
        None,
        "Scores over mean and spread of the generation batch (true, `batch`) or of all batches so "
        "far (`moving`).",
        resume="must",
        kit_step=True,
    )
    baseline: str = setting(
        "leave_one_out",
        "`leave_one_out`; or a row that you added to `BASELINES` ([change the "
        "step](../how-to/change_the_step.md)).",
        table="rloo_kit.rloo.advantages:BASELINES",
        resume="must",
        kit_step=True,
    )
    loss: str = setting(
        "clipped",
        "`clipped`: PPO's clipped surrogate; or a row that you added to `LOSSES` ([change the "
        "step](../how-to/change_the_step.md)).",
        table="rloo_kit.rloo.objective:LOSSES",
        resume="must",
        kit_step=True,
    )
    on_reward_error: Literal["stop", "skip"] = setting(
        "stop", "`stop`, or `skip`: what a reward cannot score counts as unscorable and is logged."
    )
    reward_timeout_seconds: float | None = setting(
        None, "A reward function that takes longer is an error; null: no limit.", above=0
    )
    dynamic_sampling: bool = setting(
        False,
        "Draw further prompts in place of groups of equal scores.",
        resume="must",
        kit_step=True,
    )
    dynamic_sampling_rounds: int = setting(
        4,
        "At most so many draws for one batch; what is missing then stays as it is.",
        minimum=1,
        maximum=100,
        resume="must",
        kit_step=True,
    )
    generation: Literal["auto", "vllm", "server", "transformers"] = setting(
        "auto",
        "Who samples: `vllm` (in this process), `server` (`vllm serve`, [where you start it]"
        "(../how-to/generation.md#a-server-on-another-card-or-machine)), `transformers`, or "
        "`auto`: vLLM in this process on a GPU where it can.",
        resume="may",
    )
    vllm_adapter_dir: str | None = setting(
        None,
        "Folder that vLLM's server sees too, for the adapter; null: in memory, on one machine.",
    )
    thinking_budget: int | None = setting(
        None,
        "A thought that is still open after so many tokens ends its completion there, as one that "
        "was cut off; null: no limit but `max_completion_length`.",
        minimum=1,
        resume="must",
        kit_step=True,
    )
    canary: bool = setting(
        True,
        "Check on every batch that vLLM samples from the current policy; stop if it does not.",
    )
    rollout_correction: Literal["sequence", "token"] | None = setting(
        None,
        "`sequence` or `token`: weigh by the policy's probability over the sampler's.",
        resume="must",
        kit_step=True,
    )
    rollout_correction_cap: float = setting(
        2.0,
        "Largest such weight.",
        minimum=1,
        maximum=1e6,
        resume="must",
        kit_step=True,
    )
    doctor: bool = setting(True, "Look for problems during the run and report them.")
    stop_on: list[str] | None = setting(
        None,
        "Findings that end the run, such as `[kl_explosion]`; its best weights are kept.",
        choices=STOP_ON,
    )
    keep_last: int = setting(2, "Newest checkpoints that are kept.", minimum=1)
    keep_best: int = setting(
        1,
        "Checkpoints kept in addition because they scored highest; 0: none.",
        minimum=0,
    )
    max_hours: float | None = setting(
        None, "Save and stop after the step in which the training has taken so long.", above=0
    )
    max_skipped_steps: int = setting(
        3,
        "Stop when so many optimizer steps in a row were skipped because of NaN/Inf gradients.",
        minimum=1,
        kit_step=True,
    )
    dry_run: bool | None = setting(
        None,
        "Take the memory of the longest step of a training before its first; null: on a GPU only.",
        kit_step=True,
    )


# Why an adapter is not trained with this setting of TRL
NO_SYNC = (
    "trainer.sync_ref_model copies the weights into the reference, and that of an adapter is the "
    "model without it: leave it out"
)
_MUST = Rule(resume="must")
_MAY = Rule(resume="may")
_BY_DEVICE = Rule(by_device=True)
_OF_TRL = Rule(trl_step=True)
_NO_UPLOAD = (
    "and nothing is uploaded while training: leave it out, and upload the result by rloo-kit "
    "export RUN --to hub, or by trainer.push_to_hub()"
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
        choices=(None,), instead="and trainer.seed gives the order of prompts: leave it out"
    ),
    "dataloader_pin_memory": _BY_DEVICE,
    "ds3_gather_for_generation": _OF_TRL,
    "enable_jit_checkpoint": Rule(
        choices=(False,), instead="and SIGTERM saves a checkpoint anyway: leave it out"
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
        choices=(0,), instead="and RLOO's loss has no labels to smooth: leave it out"
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
        instead="and checkpoints stay by trainer.keep_last and trainer.keep_best: write those",
    ),
    "seed": _MUST,
    "shuffle_dataset": _MUST,
    "steps_per_generation": Rule(minimum=1),
    "temperature": Rule(default=1.0, minimum=1e-3, maximum=10, resume="must"),
    "top_k": _MUST,
    "top_p": Rule(above=0, maximum=1, resume="must"),
    "train_sampling_strategy": Rule(
        choices=("random",),
        instead="and RLOO draws prompts at random, or in their order with "
        "trainer.shuffle_dataset: false: leave it out",
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
# What the kit sets in place of TRL's defaults, or repeats so that it can be read without TRL
TRL_DEFAULTS: dict[str, Any] = {
    name: rule.default for name, rule in TRL_RULES.items() if rule.default is not None
}
# Trainer settings where the run file says nothing
DEFAULTS: dict[str, Any] = {**{field.name: field.default for field in OWN_FIELDS}, **TRL_DEFAULTS}
OF_KIT_STEP = [name for name, rule in RULES.items() if rule.kit_step]
OF_TRL_STEP = [name for name, rule in RULES.items() if rule.trl_step]
BY_DEVICE = frozenset(name for name, rule in TRL_RULES.items() if rule.by_device)


def on_resume(rule: Resume) -> list[str]:
    """Return the settings with that resume rule, sorted."""
    return sorted(name for name, one in RULES.items() if one.resume == rule)
