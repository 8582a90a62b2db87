"""Tell apart the processes of a training that torchrun, accelerate launch or deepspeed started."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from rloo_kit.errors import ConfigError
from rloo_kit.machine.hardware import installed_version

T = TypeVar("T")


def num_processes() -> int:
    """Return the number of processes that train together; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def is_first() -> bool:
    """Return True if this is the first process of the training; only it writes files and prints."""
    return num_processes() == 1 or os.environ["RANK"] == "0"


def use_own_card() -> None:
    """Make the GPU of this process the current one if a launcher started the process.

    accelerate does the same, but later. Until then every process would use the first GPU.
    """
    import torch

    card = int(os.environ.get("LOCAL_RANK", "-1"))  # for accelerate too, -1 means no launcher
    if card >= 0 and torch.cuda.is_available():
        torch.cuda.set_device(card % torch.cuda.device_count())


@contextlib.contextmanager
def with_seed(seed: int) -> Iterator[None]:
    """Set torch's seed while the body runs, and then restore the random states.

    These are the states of the CPU and of this process's GPU. The other GPUs are left alone,
    because a query of their states would initialise them.
    """
    import torch

    card = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(card):
        if card:  # torch.manual_seed would seed the other GPUs too
            torch.default_generator.manual_seed(seed)
            torch.cuda.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        yield


def from_first(value: T) -> T:
    """Send a value from the first process to all processes, and return it.

    Every process must call this function. The settings of the trainer (``TrainingArguments``) must
    exist already, because creating them connects the processes.

    Args:
        value: The value to send; it is ignored in all processes except the first.
    """
    if num_processes() == 1:
        return value
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value])[0]


def divided_by_launcher() -> bool:
    """Return True if ``accelerate launch`` started this training with DeepSpeed or FSDP."""
    return uses_fsdp() or os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"


def check_launch(trainer: Mapping[str, Any]) -> None:
    """Refuse trainer settings that need a missing launcher or package.

    Args:
        trainer: Settings under ``trainer:`` of a run file.

    Raises:
        ConfigError: DeepSpeed or FSDP is set, but no launcher started the training. Or a setting
            needs a package that is not installed. The message has the command to use.
    """
    for name, file in (("deepspeed", "zero3"), ("fsdp", "fsdp2")):
        if trainer.get(name) and "RANK" not in os.environ:
            raise ConfigError(
                f"trainer.{name} needs a launcher: remove this setting, and start the training "
                f"with `accelerate launch --config_file examples/accelerate/{file}.yaml "
                f"-m rloo_kit train RUN.yaml`"
            )
    for name, package in (("deepspeed", "deepspeed"), ("use_liger_kernel", "liger-kernel")):
        if trainer.get(name) and installed_version(package) is None:
            raise ConfigError(f"trainer.{name} needs the package {package}: pip install {package}")


def uses_fsdp() -> bool:
    """Return True if ``accelerate launch`` started this training with FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"


def is_cut_off(exc: BaseException) -> bool:
    """Return True if an error was raised because another process of the training has ended."""
    from torch.distributed import DistError

    return num_processes() > 1 and (isinstance(exc, DistError) or "gloo" in str(exc))
