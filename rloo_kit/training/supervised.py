"""Supervised training with TRL's trainers: settings for this device, and short progress lines.

This module must be imported after ``setup()``.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from rloo_kit.errors import ConfigError, MemoryRanOutError
from rloo_kit.machine.cleanup import is_out_of_memory
from rloo_kit.machine.environment import precision_as_asked, quiet, setup
from rloo_kit.models.adapters import adapter_values, trained_parameters
from rloo_kit.training.trl_step import route_trl_lm_head
from rloo_kit.types import Say

PROGRESS_LINES = 10
# Arguments that the kit sets and the user must not set; `use_cpu` is another one
FIXED = {
    "eval_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    # Also turns off the progress bar of a notebook.
    "disable_tqdm": True,
}


def make_arguments(
    config_class: type[TrainingArguments],
    what: str,
    fixed: dict[str, Any],
    settings: dict[str, Any],
) -> Any:
    """Return the arguments for one of TRL's trainers, with defaults that suit this device.

    Args:
        config_class: The class of the arguments, such as TRL's ``SFTConfig``.
        what: Name of what is trained, for error messages.
        fixed: Arguments that the caller sets and the user must not set.
        settings: Arguments from the user, which replace the defaults.

    Raises:
        ConfigError: TRL rejects an argument, or the user sets one that is fixed.
    """
    hardware = setup().hardware
    on_cpu = hardware.device == "cpu"
    half = None if on_cpu else hardware.mixed_precision
    fixed = {**FIXED, **fixed, "use_cpu": on_cpu}
    # Unsloth changes defaults of the classes of TRL that it patches.
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(config_class)
        if field.init and field.default is not dataclasses.MISSING and field.name not in fixed
    }
    defaults |= {
        "bf16": half == "bf16" and not settings.get("fp16"),
        "fp16": half == "fp16" and not settings.get("bf16"),
        "gradient_checkpointing": not on_cpu,
        "dataloader_pin_memory": not on_cpu,
        "logging_steps": 1,
    }
    try:
        arguments = config_class(**fixed, **{**defaults, **settings})
    except (ValueError, TypeError) as exc:
        raise ConfigError(f"TRL refuses the settings of {what}: {exc}") from exc
    if not arguments.bf16 and not arguments.fp16:
        # Otherwise accelerate uses the environment variable that `setup` sets.
        arguments.mixed_precision = "no"
    return arguments


def make_trainer(trainer_class: type[Trainer], say: Say, shown: Sequence[str], **parts: Any) -> Any:
    """Return one of TRL's trainers, with the adapter kept in float32.

    Args:
        trainer_class: The class of the trainer, such as TRL's ``SFTTrainer``.
        say: Called every few steps with a line that has the loss and metrics.
        shown: Names of the metrics in these lines.
        **parts: Arguments of the trainer, including ``model`` and ``args``.
    """
    route_trl_lm_head()
    adapter = adapter_values(parts["model"])
    with precision_as_asked(parts["args"]), quiet():
        trainer: Any = trainer_class(callbacks=[_Lines(say, shown)], **parts)
    trainer.remove_callback(PrinterCallback)
    # TRL casts the adapter of a 4-bit model to bf16, where small updates are lost.
    for name, parameter in trained_parameters(trainer.model).items():
        parameter.data = adapter[name].to(parameter.device, torch.float32)
    return trainer


@contextlib.contextmanager
def memory_errors(what: str, remedy: str) -> Iterator[None]:
    """Replace an out-of-memory error in a ``with`` block by an error that says what to change.

    Args:
        what: Name of what is trained, for the message.
        remedy: What to change, for the message.

    Raises:
        MemoryRanOutError: Memory ran out during the ``with`` block.
    """
    try:
        yield
    except Exception as exc:
        if not is_out_of_memory(exc):
            raise
        raise MemoryRanOutError(f"out of memory while training {what}: {remedy}") from exc


@dataclasses.dataclass(eq=False)
class _Lines(TrainerCallback):
    """Callback that reports the loss and some metrics every few steps, in one line."""

    say: Say
    shown: Sequence[str]

    def on_log(  # pyright: ignore[reportIncompatibleMethodOverride]  # it also gets the logs
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any],
        **_: Any,
    ) -> None:
        """Report a line about ten times during the training, and after the last step."""
        step = state.global_step
        total = state.max_steps
        if "loss" in logs and (step % max(1, total // PROGRESS_LINES) == 0 or step == total):
            metrics = [f"  {name} {float(logs[name]):.2f}" for name in self.shown]
            self.say(f"step {step}/{total}  loss {float(logs['loss']):.3f}{''.join(metrics)}")
