"""Trainer settings: TRL's ``RLOOConfig`` with the kit's own fields and defaults."""

import argparse
import copy
import dataclasses
import enum
import warnings
from typing import TYPE_CHECKING, Any

import torch
from trl import RLOOConfig  # pyright: ignore[reportPrivateImportUsage]  # Unsloth replaces it

from rloo_kit.config.other_names import OF_SCRIPTS, OTHER_NAMES, RENAMED
from rloo_kit.config.run_file import read_value
from rloo_kit.config.settings import BY_DEVICE, OWN_FIELDS, TRL_DEFAULTS, KitSettings
from rloo_kit.config.trainer_settings import known_trainer_fields, translate_trainer_arguments
from rloo_kit.errors import ConfigError
from rloo_kit.machine.environment import setup
from rloo_kit.machine.processes import check_launch
from rloo_kit.rloo.rollout import Shaping
from rloo_kit.text.redaction import redact_tree
from rloo_kit.text.wording import first_line

_TRL_FIELDS = {field.name: field for field in dataclasses.fields(RLOOConfig) if field.init}


class _OtherFlag(argparse.Action):
    """Command-line action that collects the flags of other trainers in one dict, by name."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Add a flag and its value to the dict."""
        found = getattr(namespace, self.dest) or {}
        setattr(namespace, self.dest, found | {str(option_string)[2:]: read_value(values)})


@dataclasses.dataclass(init=False, repr=False, eq=False)
class LeaveOneOutConfig(KitSettings, RLOOConfig):
    """Trainer settings: the fields of TRL's ``RLOOConfig`` and of the kit's ``KitSettings``.

    Settings may also be given under the names that other trainers use (``config.other_names``).
    These names are translated or rejected.

    Some defaults differ from TRL's, to suit one consumer GPU and a LoRA adapter:
    ``num_generations`` is 4, ``learning_rate`` 1e-5, ``logging_steps`` 1, ``save_steps`` 10,
    ``report_to`` none, and ``num_completions_to_print`` 0, so that ``log_completions`` prints
    nothing and only fills the tables of ``report_to``. ``bf16`` and ``fp16`` depend on the device.
    ``gradient_checkpointing`` and ``vllm_enable_sleep_mode`` are on only on a GPU.

    Unsloth replaces ``RLOOConfig`` by a class in which some defaults differ. This class restores
    TRL's defaults, so that a run file means the same with and without Unsloth. ``TrlParser`` and
    ``HfArgumentParser`` accept this class as they accept ``RLOOConfig``.

    Raises:
        ConfigError: A setting is unknown (the message suggests the nearest known name), exists only
            in another trainer, or is given under two names. Or a value is out of range, or the
            batch does not consist of whole groups.
    """

    other_names: str | None = dataclasses.field(
        default=None,
        metadata={
            "help": "Settings named as in TRL before 0.22, in TRL's GRPO trainer or in Unsloth.",
            "aliases": sorted(f"--{name}" for name in OTHER_NAMES - OF_SCRIPTS - {*_TRL_FIELDS}),
            "action": _OtherFlag,
            "nargs": "?",
            "const": "true",
        },
    )

    if TYPE_CHECKING:  # TRL replaces None by a value in these fields
        num_generations: int = 0  # pyright: ignore[reportIncompatibleVariableOverride]
        max_completion_length: int = 0  # pyright: ignore[reportIncompatibleVariableOverride]
        generation_batch_size: int = 0  # pyright: ignore[reportIncompatibleVariableOverride]
        chat_template_kwargs: dict[str, Any] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
        steps_per_generation: int = 0  # pyright: ignore[reportIncompatibleVariableOverride]

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a dict, for experiment trackers and checkpoints.

        Secrets are left out.
        """
        return redact_tree(super().to_dict())

    def __init__(
        self, output_dir: str | None = None, *, _recorded: bool = False, **arguments: Any
    ) -> None:
        # only ``job.py`` passes ``_recorded``; ``run_file.make_run_config`` explains it
        others = arguments.pop("other_names", None) or {}
        for name in {RENAMED[other] for other in others if other in RENAMED} & arguments.keys():
            if arguments[name] == self.__dataclass_fields__[name].default:
                del arguments[name]  # a parser passes the default of a flag that was not given
        arguments |= others
        arguments = {n: v for n, v in arguments.items() if v is not None or n not in BY_DEVICE}
        if isinstance(arguments.get("normalize_reward"), str):  # of a command line, such as "true"
            arguments["normalize_reward"] = read_value(arguments["normalize_reward"])
        of_unsloth = {
            name: arguments.pop(name)
            for name in _OF_UNSLOTH & arguments.keys()
            if name not in OTHER_NAMES or arguments[name] == _TRL_FIELDS[name].default
        }
        values = translate_trainer_arguments(arguments, recorded=_recorded) | of_unsloth
        check_launch(values)
        for field in OWN_FIELDS:
            setattr(self, field.name, values.pop(field.name, field.default))
        hardware = setup().hardware
        on_cpu = hardware.device == "cpu"
        if on_cpu and any(mark in str(values.get("optim", "")) for mark in ("8bit", "paged")):
            warnings.warn(
                f"optim={values['optim']!r} needs a GPU, so adamw_torch is used instead",
                UserWarning,
                stacklevel=2,
            )
            values["optim"] = "adamw_torch"
        defaults = {
            **{
                name: field.default
                for name, field in _TRL_FIELDS.items()
                if field.default is not dataclasses.MISSING
            },
            **TRL_DEFAULTS,
            "bf16": hardware.mixed_precision == "bf16" and not values.get("fp16"),
            "fp16": hardware.mixed_precision == "fp16" and not values.get("bf16"),
            "gradient_checkpointing": not on_cpu,
            "vllm_enable_sleep_mode": not on_cpu,
            "dataloader_pin_memory": not on_cpu,
            "use_cpu": on_cpu,
        }
        try:
            RLOOConfig.__init__(
                self, **{**defaults, **values, "output_dir": output_dir or "runs/trainer"}
            )
        except Exception as exc:  # the libraries raise errors of many types
            raise ConfigError(f"TRL refuses the trainer settings: {first_line(exc)}") from exc
        for name in ("bf16", "fp16", "tf32"):
            if arguments.get(name) and not getattr(self, name):
                text = f"{name}=True is slow or not supported on this CPU, so Unsloth turns it off"
                warnings.warn(text, UserWarning, stacklevel=2)
        if not self.bf16 and not self.fp16:
            # otherwise accelerate uses the environment variable that `setup` sets
            self.mixed_precision = "no"
        self.follows_model = "gradient_checkpointing" not in arguments
        self.memory_share_given = "vllm_gpu_memory_utilization" in arguments

    @property
    def n_gpu(self) -> int:
        """Number of GPUs; at most 1, because transformers would split batches among more GPUs."""
        return min(1, super().n_gpu)

    @property
    def device(self) -> torch.device:
        """The device for training.

        For a CPU it is ``cpu`` and not ``cpu:0``, because torch.load cannot map tensors to the
        latter.
        """
        found = super().device
        return torch.device("cpu") if found.type == "cpu" else found

    @property
    def shaping(self) -> Shaping:
        """The settings that define how scores become advantages."""
        return Shaping(**{one.name: getattr(self, one.name) for one in dataclasses.fields(Shaping)})


# Settings that only Unsloth's patched `RLOOConfig` has
_OF_UNSLOTH = set(_TRL_FIELDS) - known_trainer_fields()


def _show_parsers_the_defaults() -> None:
    """Write the kit's defaults, help texts and types into the class, so that parsers show them."""
    parsed = LeaveOneOutConfig.__dataclass_fields__
    for name, default in {**dict.fromkeys(BY_DEVICE), **TRL_DEFAULTS}.items():
        parsed[name] = copy.copy(parsed[name])  # TRL's class keeps its own
        parsed[name].default = default
    for field in OWN_FIELDS:  # argparse gets the metadata as keyword arguments
        parsed[field.name] = copy.copy(field)
        parsed[field.name].metadata = {"help": field.metadata["rule"].help}
    LeaveOneOutConfig.__annotations__["normalize_reward"] = str | None


_show_parsers_the_defaults()


def _own_config(args: RLOOConfig | None) -> LeaveOneOutConfig:
    """Return a trainer's ``args`` as a ``LeaveOneOutConfig``; None gives the default settings.

    An ``RLOOConfig`` does not record which of its values the user set. So all its values are used,
    including those that Unsloth's patched class adds, and the kit's own settings get their
    defaults. There is one exception: a setting in ``BY_DEVICE`` that has TRL's default gets the
    kit's default for this machine. For ``bf16`` and ``fp16``, this happens only if Unsloth has
    patched the class and both settings are off.

    Raises:
        ConfigError: ``args`` is the configuration of another trainer.
    """
    if args is None or isinstance(args, LeaveOneOutConfig):
        return args or LeaveOneOutConfig()
    # compared by name, because Unsloth replaces TRL's class by its own
    if not any(kind.__name__ == "RLOOConfig" for kind in type(args).__mro__):
        raise ConfigError(
            f"args is of type {type(args).__name__}, must be a LeaveOneOutConfig or TRL's "
            f"RLOOConfig: pass its settings to LeaveOneOutConfig"
        )
    values = {name: getattr(args, name) for name in _TRL_FIELDS if hasattr(args, name)}
    del values["generation_batch_size"]  # TRL has filled it in from steps_per_generation
    for name in BY_DEVICE - {"bf16", "fp16"}:
        if values[name] == _TRL_FIELDS[name].default:
            del values[name]
    if _OF_UNSLOTH and not args.bf16 and not args.fp16:  # Unsloth then uses the model's dtype
        del values["bf16"], values["fp16"]
    return LeaveOneOutConfig(
        **{n: v.value if isinstance(v, enum.Enum) else v for n, v in values.items()}
    )
