"""Processes of a training that a launcher starts: torchrun, accelerate launch, deepspeed."""

import os
from collections.abc import Mapping
from typing import Any, TypeVar

from rloo_kit.errors import ConfigError
from rloo_kit.machine.hardware import installed_version

T = TypeVar("T")


def num_processes() -> int:
    """Return the number of processes that train together; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def is_first() -> bool:
    """Return whether this is the first process, which writes and prints."""
    return num_processes() == 1 or os.environ["RANK"] == "0"


def from_first(value: T) -> T:
    """Return the first process's value; every process must call it.

    Create the trainer's settings (``TrainingArguments``) before, since that connects the processes.
    """
    if num_processes() == 1:
        return value
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value])[0]


def divided_by_launcher() -> bool:
    """Return whether ``accelerate launch`` started this training with DeepSpeed or FSDP."""
    return uses_fsdp() or os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"


def check_launch(trainer: Mapping[str, Any]) -> None:
    """Check that the launcher and the packages that trainer settings need are there.

    Args:
        trainer: Settings of ``trainer:`` in a run file.

    Raises:
        ConfigError: A launcher or package is missing; the message has the command for it.
    """
    for name, file in (("deepspeed", "zero3"), ("fsdp", "fsdp2")):
        if trainer.get(name) and "RANK" not in os.environ:
            raise ConfigError(
                f"trainer.{name} needs a launcher: leave it out, and start with accelerate launch "
                f"--config_file examples/accelerate/{file}.yaml -m rloo_kit train RUN.yaml"
            )
    for name, package in (("deepspeed", "deepspeed"), ("use_liger_kernel", "liger-kernel")):
        if trainer.get(name) and installed_version(package) is None:
            raise ConfigError(f"trainer.{name} needs the package {package}: pip install {package}")


def uses_fsdp() -> bool:
    """Return whether ``accelerate launch`` started this training with FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"


def is_cut_off(exc: BaseException) -> bool:
    """Return whether an error means that another process of the training has ended."""
    from torch.distributed import DistError

    return num_processes() > 1 and (isinstance(exc, DistError) or "gloo" in str(exc))
