"""Trainer settings: TRL's ``RLOOConfig`` with the kit's own fields and defaults."""

import copy
import dataclasses
import enum
import warnings
from typing import Any

from trl import RLOOConfig

from rloo_kit.config.run_file import (
    DEFAULT_BATCH,
    known_trainer_fields,
    read_value,
    translate_trainer_arguments,
)
from rloo_kit.errors import ConfigError
from rloo_kit.machine.environment import setup
from rloo_kit.processes import launched_size
from rloo_kit.rloo.rollout import Shaping
from rloo_kit.text.redaction import redact_tree
from rloo_kit.text.wording import first_line

KIT_DEFAULTS = {
    **DEFAULT_BATCH,
    "learning_rate": 1e-5,
    "logging_steps": 1,
    "num_completions_to_print": 0,
    "report_to": "none",
    "save_steps": 10,
}
"""What the kit sets otherwise than TRL."""
BY_DEVICE = (
    "bf16",
    "dataloader_pin_memory",
    "ddp_backend",
    "fp16",
    "gradient_checkpointing",
    "use_cpu",
    "vllm_enable_sleep_mode",
    "vllm_gpu_memory_utilization",
)
"""Settings of TRL that follow the machine and the model; None leaves them to the kit."""


@dataclasses.dataclass(init=False, repr=False, eq=False)
class LeaveOneOutConfig(RLOOConfig):
    """Every field of TRL's ``RLOOConfig`` under TRL's name, and the kit's own below.

    Older names are translated. Defaults that differ from TRL's, for one consumer GPU and a LoRA
    adapter: ``num_generations`` 4, ``learning_rate`` 1e-5, ``logging_steps`` 1, ``report_to`` none,
    ``num_completions_to_print`` 0 (``log_completions`` fills the tables of ``report_to``),
    ``bf16``/``fp16`` by the device, ``gradient_checkpointing`` on a GPU only. Defaults that
    Unsloth's patched class changes are TRL's again, so that one file means the same with and
    without Unsloth. ``TrlParser`` and ``HfArgumentParser`` take the class as they take TRL's.

    Raises:
        ConfigError: An unknown name (with the nearest one), an old name beside its new one, a value
            out of range, or a batch that does not hold whole groups.
    """

    tokens_per_micro_batch: int | None = None
    """Positions (rows times width) of a training pass; null: from the free memory. Changes speed
    and memory, not the gradient. ``per_device_train_batch_size`` keeps its meaning."""
    skip_old_pass: bool = True
    """Take old log-probabilities from the training forward where that is exact."""
    skip_no_signal: bool = True
    """Run no pass for completions whose advantage is exactly 0 (at beta 0)."""
    gate_on_score: bool = False
    """Run no pass for groups of equal scores at beta > 0 too. Not exact: their KL is ignored."""
    token_level_kl: bool = False
    """Penalise each token by the KL from itself on, instead of the completion by its sum."""
    kl_estimator: str = "k1"
    """``k1`` (log ratio) or ``k3`` (never negative)."""
    missing_eos_penalty: float | None = None
    """Subtracted from the score of a completion that was cut off."""
    normalize_reward: bool | str | None = None
    """Scores over mean and spread of the generation batch (true, ``batch``) or of all batches so
    far (``moving``)."""
    truncated_in_baseline: bool = True
    """With ``mask_truncated_completions``: whether masked rows still count in the baseline."""
    on_reward_error: str = "stop"
    """``stop``, or ``skip``: what a reward cannot score counts as unscorable and is logged."""
    reward_timeout_seconds: float | None = None
    """A reward function that takes longer is an error; null: no limit."""
    dynamic_sampling: bool = False
    """Draw further prompts in place of groups of equal scores."""
    dynamic_sampling_rounds: int = 4
    """At most so many draws for one batch; what is missing then stays as it is."""
    max_no_signal_fraction: float | None = None
    """Stop when more of the groups of the last ten batches have equal scores."""
    generation: str = "auto"
    """Who samples: ``vllm`` (in this process), ``server`` (vLLM's own, at
    ``vllm_server_base_url``), ``transformers``, or ``auto``: vLLM on a GPU where it can."""
    canary: bool = True
    """Prove on every batch that vLLM samples from the policy that trains, and stop where not."""
    rollout_correction: str | None = None
    """``sequence`` or ``token``: weigh by the policy's probability over the sampler's."""
    rollout_correction_cap: float = 2.0
    """Largest such weight."""
    vllm_adapter_dir: str | None = None
    """Folder for the adapter that a vLLM server also sees; null: shared memory."""
    doctor: bool = True
    """Look for what goes wrong while the run goes, and say it (docs/how-to/doctor.md)."""
    stop_on: list[str] | None = None
    """Findings that end the run, such as ``[kl_explosion]``; its best weights are kept."""
    keep_last: int = 2
    """Newest checkpoints that are kept (docs/how-to/resume.md)."""
    keep_best: int = 1
    """Checkpoints that are kept beside them because they scored highest; 0: none."""
    rescue_dir: str | None = None
    """Where a checkpoint goes when the disk of ``output_dir`` is full; null: the system's folder
    for temporary files."""
    max_hours: float | None = None
    """Save and stop after the step in which so many hours of this training are over."""
    max_skipped_steps: int = 3
    """Stop when so many optimizer steps in a row had to be skipped, since their gradients were no
    finite numbers."""
    legacy_metrics: bool = False
    """Log the older TRL's metrics with its formulas and signs (docs/how-to/legacy.md)."""
    dry_run: bool | None = None
    """Take the memory of the longest possible step before the first one (docs/how-to/plan.md);
    null: on a GPU, until it has fitted once."""

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as trackers and checkpoints get them: without secrets."""
        return redact_tree(super().to_dict())

    def __init__(self, output_dir: str | None = None, **arguments: Any) -> None:
        arguments = {n: v for n, v in arguments.items() if v is not None or n not in BY_DEVICE}
        if isinstance(arguments.get("normalize_reward"), str):  # of a command line, perhaps "true"
            arguments["normalize_reward"] = read_value(arguments["normalize_reward"])
        of_unsloth = {name: arguments.pop(name) for name in _OF_UNSLOTH if name in arguments}
        values = translate_trainer_arguments(arguments, launched_size()) | of_unsloth
        for field in OWN_FIELDS:
            setattr(self, field.name, values.pop(field.name, field.default))
        hardware = setup().hardware
        on_cpu = hardware.device == "cpu"
        if not values.get("bf16") and not values.get("fp16"):
            values.setdefault("bf16", hardware.mixed_precision == "bf16")
            values.setdefault("fp16", hardware.mixed_precision == "fp16")
        if on_cpu and any(mark in str(values.get("optim", "")) for mark in ("8bit", "paged")):
            warnings.warn(
                f"optim={values['optim']!r} needs a GPU: adamw_torch is used",
                UserWarning,
                stacklevel=2,
            )
            values["optim"] = "adamw_torch"
        defaults = {
            **{
                field.name: field.default
                for field in dataclasses.fields(RLOOConfig)
                if field.init and field.default is not dataclasses.MISSING
            },
            **KIT_DEFAULTS,
            "gradient_checkpointing": not on_cpu,
            "vllm_enable_sleep_mode": not on_cpu,
            "dataloader_pin_memory": not on_cpu,
            "use_cpu": on_cpu,
            **({"ddp_backend": "gloo"} if on_cpu and launched_size() > 1 else {}),
        }
        try:
            super().__init__(**{**defaults, **values, "output_dir": output_dir or "runs/trainer"})
        except Exception as exc:  # what the libraries below raise differs by the setting
            raise ConfigError(f"TRL refuses the trainer settings: {first_line(exc)}") from exc
        if not self.bf16 and not self.fp16:
            self.mixed_precision = "no"  # else accelerate reads the variable that setup() sets
        self.follows_model = "gradient_checkpointing" not in arguments
        self.memory_share_given = "vllm_gpu_memory_utilization" in arguments

    @property
    def shaping(self) -> Shaping:
        """How scores become advantages."""
        mode = "batch" if self.normalize_reward is True else self.normalize_reward or None
        names = {field.name for field in dataclasses.fields(Shaping)} - {"normalize_reward"}
        values = {name: getattr(self, name) for name in names}
        return Shaping(**values, normalize_reward=mode)


_TRL_FIELDS = {field.name: field for field in dataclasses.fields(RLOOConfig) if field.init}
_OF_UNSLOTH = set(_TRL_FIELDS) - known_trainer_fields()
"""Settings that Unsloth's patched class adds to TRL's."""
OWN_FIELDS = tuple(
    field for field in dataclasses.fields(LeaveOneOutConfig) if field.name not in _TRL_FIELDS
)
"""The settings that TRL does not have."""


def _show_parsers_the_defaults() -> None:
    """Let a command-line parser read the kit's defaults, and one type for each setting."""
    shown = LeaveOneOutConfig.__dataclass_fields__
    for name, default in {**dict.fromkeys(BY_DEVICE), **KIT_DEFAULTS}.items():
        shown[name] = copy.copy(shown[name])  # TRL's own stays as it is
        shown[name].default = default
    LeaveOneOutConfig.__annotations__["normalize_reward"] = str | None


_show_parsers_the_defaults()


def _own_config(args: Any) -> LeaveOneOutConfig:
    """Return a trainer's ``args`` as a ``LeaveOneOutConfig``.

    An ``RLOOConfig`` does not say which of its values were set, so each is taken as it stands: it
    trains with the values that it shows, those of Unsloth's patched class too, and the kit's own
    settings keep their defaults. What TRL's default leaves to the machine (``BY_DEVICE``) follows
    the machine here too.

    Raises:
        ConfigError: It is the configuration of something else.
    """
    if args is None or isinstance(args, LeaveOneOutConfig):
        return args or LeaveOneOutConfig()
    # by name, since Unsloth puts a class of its own into the place of TRL's
    if not any(kind.__name__ == "RLOOConfig" for kind in type(args).__mro__):
        raise ConfigError(
            f"args is {_a(type(args).__name__)}, must be a LeaveOneOutConfig or TRL's RLOOConfig: "
            f"give its settings to LeaveOneOutConfig"
        )
    values = {name: getattr(args, name) for name in _TRL_FIELDS if hasattr(args, name)}
    del values["generation_batch_size"]  # TRL has filled it in from steps_per_generation
    for name in set(BY_DEVICE) - {"bf16", "fp16"}:
        if values[name] == _TRL_FIELDS[name].default:
            del values[name]
    if _OF_UNSLOTH and not args.bf16 and not args.fp16:  # Unsloth's default, by the model
        del values["bf16"], values["fp16"]
    return LeaveOneOutConfig(
        **{n: v.value if isinstance(v, enum.Enum) else v for n, v in values.items()}
    )


def _a(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
